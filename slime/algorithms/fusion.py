"""Element-wise work on large tensors: one kernel on a GPU, plain torch elsewhere.

Written out in torch, a softmax over a block of logits or a rotation reads and writes its tensor
five to ten times. A GPU spends its time on just that, so there `torch.compile` makes one kernel of
it. On a CPU the tensors stay in the cache, and nobody wants to wait for a compiler: the same lines
run as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

#: Forms of arguments (dimensions, sizes of 1, dtypes, with and without gradients) that one function
#: may be called with. torch stops at 8, and latent attention alone has as many: queries and keys,
#: of one head and of several.
_MOST_FORMS = 64


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, compiled where its first argument, a tensor, is on a GPU.

    It may write in place into tensors that it was given to consume. Sizes are variables of the
    kernel: equal inputs give equal bits, whatever sizes were seen before. Compilation happens at
    the first call; torch caches it on disk.

    Example:
        >>> @fused
        ... def scaled_exp(x, scale):
        ...     return x.mul_(scale).exp_()
        >>> scaled_exp(torch.zeros(2), 3.0).tolist()
        [1.0, 1.0]
    """

    @functools.cache
    def compiled() -> Callable[P, R]:  # at the first use: importing the compiler takes seconds
        return whole_graph(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = args[0]
        assert isinstance(tensor, torch.Tensor)
        chosen = compiled() if tensor.is_cuda else function
        return chosen(*args, **kwargs)

    return call


def whole_graph(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, compiled as one graph with sizes as variables; imports the compiler."""
    from torch._dynamo import config

    # behind the limit torch would go on uncompiled, but of a function that must be one graph it
    # makes an error
    config.recompile_limit = max(config.recompile_limit, _MOST_FORMS)
    return torch.compile(function, fullgraph=True, dynamic=True)
