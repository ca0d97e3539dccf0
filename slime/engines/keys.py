"""The run's key, which engines and routers require: ``Authorization: Bearer KEY``.

    driver: RunKeys.new() ──► rollout actor, owners of servers, trainers (sealed Ray messages)
                          └─► engines, routers (`VARIABLE` in their environment)

Every run makes its own key, and restarted engines and routers get the same one. External engines
require their own key, if any; the run's key is never sent to them. A process maps URLs to keys, so
judges, tools and models on other servers get none.

As in SGLang, ``/health…`` and ``/metrics…`` of an engine and the router's liveness route need no
key.
"""

from __future__ import annotations

import hmac
import os
import secrets
from dataclasses import dataclass

from slime.redact import HIDDEN

#: In a server's environment: the key that it requires. In a driver's: the key of external engines.
VARIABLE = "SLIME_ENGINE_KEY"

#: Variable of servers that `slime serve` starts: whether their control routes are closed.
ACCESS = "SLIME_ENGINE_ACCESS"
ONLY_INFERENCE = "inference"
EVERYTHING = "everything"

#: Sent by the router to an engine that requires no key; with "" the router would pass on the run's.
NO_KEY = "none"

_OPEN = ("/health", "/metrics")


class Key(str):
    """A key with a hidden repr, so it does not appear in logs and tracebacks by accident."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN)


@dataclass(frozen=True)
class RunKeys:
    """The keys of the run's own servers and of external engines ("": they require none)."""

    own: Key
    external: Key

    @staticmethod
    def new() -> RunKeys:
        return RunKeys(Key(secrets.token_urlsafe(32)), Key(os.environ.get(VARIABLE, "")))


_run: RunKeys | None = None
_key_of: dict[str, Key] = {}
_external: set[str] = set()


def set_run_keys(keys: RunKeys) -> RunKeys:
    """Set this process's keys, for `register_own` and `register_external`."""
    global _run
    _run = keys
    return keys


def _run_keys() -> RunKeys:
    """Return this process's keys; before `set_run_keys`, those of external engines alone."""
    return _run or RunKeys(Key(), Key(os.environ.get(VARIABLE, "")))


def register_own(*urls: str) -> None:
    """Register servers that the run has started."""
    for url in urls:
        register(url, _run_keys().own)


def register_external(*urls: str) -> None:
    """Register engines that were started outside the run."""
    for url in urls:
        register(url, _run_keys().external)
        _external.add(url.rstrip("/"))


def register(url: str, key: str) -> None:
    """Send the key with requests to this base URL; "" sends none."""
    _external.discard(url.rstrip("/"))
    _key_of[url.rstrip("/")] = Key(key)


def key_of(url: str) -> Key:
    """Return the key of a base URL; "" if it has none or none is known."""
    return _key_of.get(url.rstrip("/"), Key())


def is_external(url: str) -> bool:
    return url.rstrip("/") in _external


def header_of(key: str) -> dict[str, str]:
    """Return the header that carries a key; {} without one.

    Example:
        >>> header_of("abc"), header_of("")
        ({'Authorization': 'Bearer abc'}, {})
    """
    return {"Authorization": f"Bearer {key!s}"} if key else {}


# -- in a server -----------------------------------------------------------------------------------


def take_from_environment() -> Key:
    """Remove this server's key from the environment, so that children do not inherit it, and return
    it; "" if there is none."""
    return Key(os.environ.pop(VARIABLE, ""))


def take_access() -> str:
    """Remove `ACCESS` from the environment and return it: `ONLY_INFERENCE`, `EVERYTHING` or ""."""
    return os.environ.pop(ACCESS, "")


def admits(key: str, method: str, path: str, authorization: str) -> bool:
    """Return whether a server that requires ``key`` answers a request. Compares in constant time.

    Args:
        authorization: the header; "" if there is none.

    Example:
        >>> admits("abc", "POST", "/generate", "Bearer abc"), admits("abc", "POST", "/generate", "")
        (True, False)
    """
    if not key or method == "OPTIONS" or path.startswith(_OPEN):
        return True
    scheme, _, given = authorization.partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(
        given.encode(errors="surrogateescape"), key.encode()
    )
