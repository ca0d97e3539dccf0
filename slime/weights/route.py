"""Which way the weights of a run go, from its flags and from what the engines say of themselves."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slime.config import Config
from slime.engines.api import WEIGHT_LOADER
from slime.engines.wire.buckets import dtype_of
from slime.errors import UserError
from slime.models.spec import HfConfig, read_hf_config


@dataclass(frozen=True)
class Route:
    """How weights travel in a run; known to every rank.

    Attributes:
        kind: see `choose_route`.
        dtype: of the engines' floating-point weights.
        asks_ranks: the engines' ranks are asked for their slices (SGLang), not the engines for whole tensors.
        sources: the rank that sends, of each pipeline stage; rank 0 alone if it has everything brought to it.
        in_runs: neighbouring experts travel as one tensor (`slime.engines.wire.expert_runs`).
    """

    kind: str
    dtype: torch.dtype
    asks_ranks: bool
    sources: tuple[int, ...] = (0,)
    in_runs: bool = False


def choose_route(config: Config, *, embedded: bool, local: bool) -> str:
    """Which way the weights go.

    ==============  ===============================================  =====================================
    "disk"          ``--update-weight-transport disk``               a Hugging Face directory
    "shm"           embedded engines on this host, and either no     shared memory (between CPUs it is the
                    GPU or ``--colocate``                            fastest; NCCL cannot join two
                                                                     processes of one GPU)
    "ipc"           SGLang with ``--colocate``                       handles of the trainer's buffers
    "broadcast"     anything else                                    NCCL between GPUs, gloo between CPUs
    ==============  ===============================================  =====================================
    """
    if config.sync.update_weight_transport == "disk":
        return "disk"
    if embedded and local and (not torch.cuda.is_available() or config.cluster.colocate):
        return "shm"
    return "ipc" if config.cluster.colocate and not embedded else "broadcast"


#: Flags of SGLang with which an expert is not where its number says, or not as it was sent.
_MOVES_EXPERTS = ("enable_eplb", "ep_num_redundant_experts", "quantization")


def takes_runs(kind: str, infos: Collection[Mapping[str, Any]]) -> bool:
    """Whether all engines take runs of experts: only by handles, which our loader inside the engine can be given.

    Args:
        infos: the engines' ``/server_info``.
    """
    plain = all(
        WEIGHT_LOADER in (info.get("custom_weight_loader") or ())
        and info.get("init_expert_location") in (None, "trivial")
        and not any(info.get(flag) for flag in _MOVES_EXPERTS)
        for info in infos
    )
    return kind == "ipc" and plain


def check_experts(infos: Mapping[str, Mapping[str, Any]]) -> None:
    """Engines must hold experts so that they can be pushed to.

    Args:
        infos: engine URL → its ``/server_info``.
    Raises:
        UserError: one permutes them when it starts (SGLang 0.5.16, ``process_weights_after_loading`` of unquantised
            experts), which nothing does again after a push. SGLang chooses this by itself on Blackwell GPUs.
    """
    for url, info in infos.items():
        backend = str(info.get("moe_runner_backend") or "")
        if backend.startswith("flashinfer_trtllm"):
            raise UserError(
                f"engine {url} cannot take experts: its moe_runner_backend is {backend}",
                why="SGLang permutes them for these kernels when it starts, and not again after a push",
                fix="pass --sglang-moe-runner-backend triton",
            )


def engine_dtype(infos: Mapping[str, Mapping[str, Any]], hf_config: HfConfig) -> torch.dtype:
    """The dtype that all engines hold their weights in; "auto" means the model config's.

    Args:
        infos: engine URL → its ``/server_info``.
    Raises:
        UserError: engines differ, or do not say.
    """
    named = {url: info.get("dtype") for url, info in infos.items()}
    if len(set(named.values())) != 1:
        raise UserError("the engines hold their weights in different dtypes", why=str(named), fix="start them alike")
    [name] = set(named.values())
    if name == "auto":
        config = read_hf_config(hf_config)
        said = str(config.get("dtype") or config.get("torch_dtype"))
        name = said if "16" in said else f"auto, and config.json says {said}"  # engines make float16 of float32
    try:
        return dtype_of(str(name))
    except ValueError as error:
        raise UserError(
            f"engine {next(iter(named))} does not say which dtype its weights have",
            why=f"/server_info gives dtype {name}",
            fix="pass an explicit --sglang-dtype (bfloat16, float32)",
        ) from error
