"""The kernels that the trainer would find on a GPU host, judged by the installed packages. Nothing
is imported, so that a launch can check before it starts anything."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from slime.errors import UserError
from slime.memory.hardware import FLASH4_NARROWEST, FLASH4_WIDEST
from slime.processes.host import installed_release

#: Major compute capability of Hopper.
_HOPPER = 9
#: Triton releases (from the first, before the second) that compile the backward pass of gated delta
#: nets wrongly for Hopper; flash-linear-attention then requires tilelang.
_WRONG_TRITON = ((3, 4), (3, 7, 1))
#: The first release whose packed attention supports windows.
_TORCH_WITH_WINDOWS = (2, 12)


def delta_net_gap(majors: Iterable[int]) -> str:
    """Return why the kernels of gated delta nets cannot be used on GPUs of these major compute
    capabilities; "" if they can."""
    if importlib.util.find_spec("fla") is None:
        return "flash-linear-attention is not installed"
    triton = installed_release("triton")
    first, fixed = _WRONG_TRITON
    if _HOPPER not in majors or triton is None or not first <= triton < fixed:
        return ""
    if importlib.util.find_spec("tilelang") is not None:
        return ""
    version = ".".join(map(str, triton))
    return (
        f"on Hopper flash-linear-attention refuses its backward pass with Triton {version}, unless "
        "tilelang is installed"
    )


def finds_windows(majors: Iterable[int], head_dim: int, *, torch_only: bool) -> bool:
    """Tell whether a kernel for packed sequences supports windows: torch's, or flash-attn-4.

    Args:
        majors: major compute capabilities of the GPUs, as far as known.
        torch_only: whether flash-attn-4 must not be used.
    """
    torch = installed_release("torch")
    if torch is None or torch >= _TORCH_WITH_WINDOWS:
        return True
    fits = all(FLASH4_NARROWEST <= head_dim <= FLASH4_WIDEST.get(major, 0) for major in majors)
    return fits and not torch_only and _has_flash4()


def _has_flash4() -> bool:
    found = importlib.util.find_spec("flash_attn")
    places = found.submodule_search_locations if found is not None else None
    return any((Path(place) / "cute").is_dir() for place in places or ())


def no_windows(torch_version: str, window: int) -> UserError:
    """Return the error for a window that no kernel supports."""
    return UserError(
        f"torch {torch_version} attends to whole sequences only",
        why=f"layers of this model see {window} tokens; torch's kernel has windows from 2.12",
        fix="install torch 2.12 or later, or flash-attn-4, or pass --transformer-impl "
        "transformer_engine",
    )
