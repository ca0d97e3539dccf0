"""Which versions of an adapter stay loaded, and in which order a push does its work."""

from __future__ import annotations

from typing import Any

import pytest

from slime.cluster.weight_push import AdapterVersions
from slime.engines.api import EngineError


class Engines:
    """Remembers what is done, in order; the fleet and the rollout at once."""

    urls = ("http://a", "http://b")

    def __init__(self) -> None:
        self.done: list[Any] = []
        self.used: set[str] = set()
        self.error: EngineError | None = None

    def use(self, version: int, cut: bool) -> None:
        self.done.append(("cut" if cut else "use", version))

    def in_use(self) -> set[str]:
        return self.used

    def post_to(self, path: str, bodies: dict[str, Any], timeout: float) -> dict[str, Any]:
        assert path == "/unload_lora_adapter" and tuple(bodies) == self.urls
        [name] = {body["lora_name"] for body in bodies.values()}
        self.done.append(("unload", name))
        return {url: self.error or {} for url in bodies}


def versions(engines: Engines, *, cuts: bool = False) -> AdapterVersions:
    return AdapterVersions(engines.use, engines.in_use, cuts=cuts)


def test_two_are_resident() -> None:
    engines = Engines()
    adapters = versions(engines)
    for version in (1, 2, 3):
        adapters.unload_old(engines)  # type: ignore[arg-type]
        adapters.switch(version)
    assert engines.done == [
        ("use", 1), ("use", 2), ("unload", "policy-1"), ("use", 3),
    ]  # fmt: skip


def test_what_requests_use_stays_until_they_have_ended() -> None:
    engines = Engines()
    adapters = versions(engines)
    for version in (1, 2):
        adapters.switch(version)
    engines.used = {"policy-1", "policy-2"}
    adapters.unload_old(engines)  # type: ignore[arg-type]
    assert ("unload", "policy-1") not in engines.done
    adapters.switch(3)
    engines.used = {"policy-3"}
    adapters.unload_old(engines)  # type: ignore[arg-type]
    assert engines.done[-2:] == [("unload", "policy-1"), ("unload", "policy-2")]


@pytest.mark.parametrize("status", [400, None])
def test_an_engine_that_does_not_have_it_or_does_not_answer_holds_nothing_up(
    status: int | None,
) -> None:
    engines = Engines()
    adapters = versions(engines, cuts=True)
    for version in (1, 2):
        adapters.switch(version)
    engines.error = EngineError("http://a", "no such adapter", status)
    adapters.unload_old(engines)  # type: ignore[arg-type]
    adapters.switch(2)  # of a push that is repeated
    adapters.unload_old(engines)  # type: ignore[arg-type]
    assert engines.done == [("cut", 1), ("cut", 2), ("unload", "policy-1"), ("cut", 2)]
