"""Process groups over gloo that share one event loop."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup, Store, distributed_c10d

_Gloo: Any = distributed_c10d.ProcessGroupGloo


@functools.cache
def _loop(process_id: int) -> Any:
    """Return the loop of this process: its thread does not survive a fork."""
    return _Gloo.create_default_device()


class _OnSharedLoop(type):
    def __call__(cls, store: Store, rank: int, size: int, timeout: timedelta, **later: Any) -> Any:
        assert not any(later.values()), later  # torch 2.14: enable_reconfigure
        options = _Gloo._Options()
        options._devices = [_loop(os.getpid())]
        options._timeout = timeout
        return _Gloo(store, rank, size, options)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Gloo)


class _SharedGloo(metaclass=_OnSharedLoop):
    pass


def end_gloo_loop() -> None:
    """Let the loop end with the groups on it, all of which were left; the next group has another.
    Idle, its thread would wake up a hundred times a second.
    """
    from megatron.core import parallel_state

    for name, value in vars(parallel_state).items():
        if isinstance(value, ProcessGroup):  # `destroy_model_parallel` forgets two of them
            setattr(parallel_state, name, None)
    _loop.cache_clear()


def share_gloo_loop() -> None:
    """Let all groups that this process makes from now on share one event loop.

    Otherwise each has a thread that wakes up a hundred times a second. A trainer has 21 groups, and
    groups that were destroyed keep theirs until the garbage collector finds their cycles.
    """
    distributed_c10d.ProcessGroupGloo = _SharedGloo
