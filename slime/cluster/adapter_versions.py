"""Versions of the policy's adapter: which ones engines hold, and which one requests name.

    push 7    load policy-7 into every engine (`slime.weights.adapter_sync`), check the canary
    switch    new requests name policy-7; running ones end with policy-6, or are aborted and
              continue with policy-7 (--update-weights-in-flight)
    push 8    first unload policy-6 …

So two versions are resident: the one that requests name and its predecessor. A restarted engine has
the newest version before it gets requests. SGLang unloads an adapter only after its last request,
and loads no other one meanwhile. So an adapter in use is unloaded at a later push.
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
        use: makes requests name a version; with ``cut``, requests for older versions are aborted.
        in_use: returns the names of the adapters that running requests use.
        cuts: running requests continue with the new version at once.
    """

    def __init__(
        self, use: Callable[[int, bool], None], in_use: Callable[[], set[str]], *, cuts: bool
    ) -> None:
        self._use = use
        self._in_use = in_use
        self._cuts = cuts
        self._resident: list[int] = []  # oldest first; new requests use the last one

    def switch(self, version: int) -> None:
        """Make requests name this version, which every engine holds."""
        if version not in self._resident:
            self._resident.append(version)
        self._use(version, self._cuts)

    def unload_old(self, fleet: EngineFleet) -> None:
        """Unload all versions except the newest and those in use; call it before a push."""
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
                # status 400: the engine was restarted and never had this adapter
                if isinstance(answer, EngineError) and answer.status != 400:
                    logger.warning("%s could not be unloaded from %s: %s", name, url, answer)
            self._resident.remove(version)
