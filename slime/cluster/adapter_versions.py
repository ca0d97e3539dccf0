"""Which versions of the policy's adapter engines hold, and which one requests name.

    push 7    load policy-7 into every engine (`slime.weights.adapter_sync`), check the canary
    switch    new requests name policy-7; those under way end with policy-6, or are cut and go on
              with policy-7 (--update-weights-in-flight)
    push 8    first unload policy-6 …

So two versions are resident, that of requests and the one before, and an engine that was started
again has the newest before requests come to it. SGLang unloads an adapter only when its last
request has ended, and takes no other one meanwhile: an adapter that requests still use is left for
a later push.
"""

from __future__ import annotations

from collections.abc import Callable

from slime import deadlines
from slime.engines.adapters import UNLOAD_ADAPTER, adapter_name
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.log import get_logger

logger = get_logger(__name__)


class AdapterVersions:
    """Switches requests to a new version, and unloads old ones.

    Args:
        use: has requests name a version; with ``cut`` those for older ones are aborted.
        in_use: returns the names of the adapters that requests under way have asked for.
        cuts: requests under way go on with the new version at once.
    """

    def __init__(
        self, use: Callable[[int, bool], None], in_use: Callable[[], set[str]], *, cuts: bool
    ) -> None:
        self._use = use
        self._in_use = in_use
        self._cuts = cuts
        self._resident: list[int] = []  # oldest first; the last one is that of new requests

    def switch(self, version: int) -> None:
        """Have requests name this version, which every engine has."""
        if version not in self._resident:
            self._resident.append(version)
        self._use(version, self._cuts)

    def unload_old(self, fleet: EngineFleet) -> None:
        """Unload every version but the newest that no request uses; call it before a push."""
        old = self._resident[:-1]
        if not old:
            return
        in_use = self._in_use()
        for version in old:
            name = adapter_name(version)
            if name in in_use:
                logger.info("%s stays loaded: requests use it", name)
                continue
            bodies = {url: {"lora_name": name} for url in fleet.urls}
            answers = fleet.post_to(UNLOAD_ADAPTER, bodies, deadlines.ADAPTER_UNLOAD)
            for url, answer in answers.items():
                # one that was started since then does not have it
                if isinstance(answer, EngineError) and answer.status != 400:
                    logger.warning("%s could not be unloaded from %s: %s", name, url, answer)
            self._resident.remove(version)
