"""What sandboxes have on this host, tried once."""

from __future__ import annotations

import asyncio
from functools import cache

import pytest

from slime.errors import UserError
from slime.sandbox.sandbox import Sandbox


@cache
def has_namespaces() -> bool:
    try:
        return asyncio.run(Sandbox(walls="namespaces").run(["true"])).status == 0
    except UserError:
        return False


with_namespaces = pytest.mark.skipif(
    not has_namespaces(), reason="this kernel or container allows no namespaces"
)
