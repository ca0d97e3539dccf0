"""Element-wise operations on large tensors: one compiled kernel on a GPU, plain torch elsewhere.

In plain torch, a softmax over a block of logits or a rotary embedding reads and writes its tensor
five to ten times, which dominates its time on a GPU. There, `torch.compile` makes one kernel of it.
On a CPU the blocks stay in the cache, so compilation is not worth its time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

#: Limit of recompilations of one function for different forms of arguments (dimensions, sizes of 1,
#: dtypes, with and without gradients). torch's default is 8, which latent attention alone uses up:
#: queries and keys, of one head and of several.
_RECOMPILE_LIMIT = 64


def fused(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` for calls whose first argument, a tensor, is on a GPU.

    ``function`` may overwrite its arguments. Sizes are variables of the kernel, so results do not
    depend bitwise on the sizes of earlier calls. The first call compiles; torch caches the result
    on disk.

    Example:
        >>> @fused
        ... def scaled_exp(x, scale):
        ...     return x.mul_(scale).exp_()
        >>> scaled_exp(torch.zeros(2), 3.0).tolist()
        [1.0, 1.0]
    """

    @functools.cache
    def compiled() -> Callable[P, R]:  # lazy, as importing the compiler takes seconds
        return whole_graph(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        tensor = args[0]
        assert isinstance(tensor, torch.Tensor)
        chosen = compiled() if tensor.is_cuda else function
        return chosen(*args, **kwargs)

    return call


def whole_graph(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` as one graph with sizes as variables. Imports the compiler."""
    from torch._dynamo import config

    # beyond the limit torch raises an error, because the function must be one graph
    config.recompile_limit = max(config.recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(function, fullgraph=True, dynamic=True)
