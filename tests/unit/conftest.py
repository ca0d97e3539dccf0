"""What all unit tests share: the processes that stand for trainer ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from trainer_ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """``ranks.run(size, job, *args)``."""
    pools = Pools()
    yield pools
    pools.close()
