"""Matrix products that accumulate into an existing tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def add_product(sink: Tensor, a: Tensor, b: Tensor) -> None:
    """sink += a @ b. No intermediate tensor is made if the dtypes are equal, or if ``sink`` is
    float32 on a GPU, where 16-bit products are accumulated in float32 anyway.

    Example:
        >>> sink = torch.ones(1, 1)
        >>> add_product(sink, torch.full((1, 2), 2.0), torch.full((2, 1), 3.0))
        >>> sink.item()
        13.0
    """
    if sink.dtype == a.dtype:
        sink.addmm_(a, b)
    elif sink.is_cuda and sink.dtype == torch.float32:
        torch.ops.aten.addmm.dtype_out(sink, a, b, torch.float32, out=sink)
    else:
        sink.add_(a @ b)
