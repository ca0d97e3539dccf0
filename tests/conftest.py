"""What tests of several folders share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def sglang_stand_in() -> Iterator[None]:
    """For each test of a module that names it in its ``pytestmark``, SGLang is "installed" in this process."""
    from tests.support.sglang_servers import sglang_installed

    with sglang_installed():
        yield
