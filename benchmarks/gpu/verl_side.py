"""What verl's processes load for `peer_verl`: the reward, and an adjustment of transformers.

As VERL_USE_EXTERNAL_MODULES=verl_side every process of verl imports this file. transformers hands
flash-attn-4 the longest length of a micro-batch as a tensor; its kernels count with an int, and
would be compiled anew for each tensor. So it is read once per micro-batch, for all layers.
"""

from __future__ import annotations

import zlib
from typing import Any


def compute_score(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any = None, **_: Any
) -> float:
    """A coin, the same for the same response: random weights have nothing better to be judged
    by."""
    return float(zlib.crc32(solution_str.encode()) % 2)


def whole_lengths() -> None:
    """Give flash attention the longest length as an int."""
    from transformers import modeling_flash_attention_utils as flash

    original = flash.prepare_fa_kwargs_from_position_ids
    if getattr(original, "counts", False):
        return
    newest: list[Any] = [None, None]

    def prepare(position_ids: Any) -> Any:
        if newest[0] is not position_ids:
            ends, longest = original(position_ids)
            newest[:] = [position_ids, (ends, tuple(int(length) for length in longest))]
        return newest[1]

    prepare.counts = True  # type: ignore[attr-defined]
    flash.prepare_fa_kwargs_from_position_ids = prepare


whole_lengths()
