"""How fast a GPU computes, reads memory and exchanges bytes: defaults by kind, or what
`slime plan --calibrate` measured on this host."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slime.errors import UserError
from slime.files import write_atomically


@dataclass(frozen=True)
class Rates:
    """Speeds of one GPU and of its connections.

    Attributes:
        gpu: name of the GPU.
        products: FLOP/s of a large matrix product in bfloat16.
        memory: bytes/s of kernels that only read and write memory.
        link: bytes/s that a GPU receives from other GPUs of its host in a collective.
        network: bytes/s that a GPU receives from other hosts.
        host_link: bytes/s from pinned host memory.
        launch: seconds that the host takes to launch the kernels of one layer, forward and
            backward: a lower bound of a layer's time per micro-batch.
        gpu_gb: memory in 10⁹ bytes.
        source: where the numbers come from.
        flash4: maximum head dimension with which flash-attn-4 is used on the GPU; 0: it does not
            support it.
    """

    gpu: str
    products: float
    memory: float
    link: float
    network: float
    host_link: float
    launch: float
    gpu_gb: float
    source: str
    gpus_per_host: int = 8
    flash4: int = 256


_H200 = Rates(
    gpu="H200",
    products=758e12,
    memory=3.28e12,
    link=290e9,
    network=40e9,
    host_link=45e9,
    launch=3.5e-3,
    gpu_gb=141.0,
    source=(
        "measured on one host of H200: the product of 8,192³; 45 ns to read the 147 kB "
        "that Qwen3-4B caches of a token; 8 GB of gradients exchanged in 29 ms; a 4B trainer's "
        "wake. Network: 400 Gb/s a GPU at 80 %, which is assumed"
    ),
)
_H100 = replace(
    _H200,
    gpu="H100",
    products=715e12,
    memory=2.87e12,
    gpu_gb=80.0,
    source=(
        "measured on two H100: 40 ns to read the 115 kB that Qwen3-1.7B caches of a "
        "token. The product of a large matrix: 72 % of the 989 TFLOP/s of NVIDIA's data sheet, "
        "which is assumed. Links as measured on H200, network as assumed there"
    ),
)
_A100 = Rates(
    gpu="A100",
    products=240e12,
    memory=1.39e12,
    link=193e9,
    network=20e9,
    host_link=20e9,
    launch=3.5e-3,
    gpu_gb=80.0,
    flash4=0,
    source=(
        "NVIDIA's data sheet of the A100 80GB SXM (312 TFLOP/s, 2.04 TB/s, NVLink 600 GB/s, PCIe "
        "4.0) times the shares that an H200 reaches of its own (77 %, 68 %, 32 %); network: "
        "200 Gb/s a GPU at 80 %. None of it was measured here"
    ),
)
DEFAULTS = {rates.gpu: rates for rates in (_H200, _H100, _A100)}


def default_rates(name: str) -> Rates:
    """Return the rates of a kind of GPU, whose name ``name`` contains ("NVIDIA H200").

    Raises:
        UserError: no default rates exist for the GPU.
    """
    for kind, rates in DEFAULTS.items():
        if kind.lower() in name.lower():
            return rates
    raise UserError(
        f"no rates are known for the GPU {name!r}",
        why=f"defaults exist for {', '.join(DEFAULTS)}",
        fix="run `slime plan --calibrate rates.json` on it and pass --rates rates.json, or name "
        "the most similar GPU of these with --device",
    )


def save_rates(rates: Rates, path: Path) -> None:
    write_atomically(path, json.dumps(asdict(rates), indent=1).encode() + b"\n")


def load_rates(path: Path) -> Rates:
    """Read what `save_rates` wrote.

    Raises:
        UserError: the file is missing, has another format, or holds impossible rates.
    """
    try:
        rates = Rates(**json.loads(path.read_text()))
        for name, value in asdict(rates).items():
            if name in ("gpu", "source"):
                is_right = isinstance(value, str)
            else:
                is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
                is_right = is_number and (value > 0 or (name == "flash4" and value == 0))
            if not is_right:
                raise ValueError(f"{name} cannot be {value!r}")
        return rates
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"--rates {path} cannot be read",
            why=str(error),
            fix=f"write the file with slime plan --calibrate {path}",
        ) from None
