"""Runs of experts: consecutive experts of one layer, sent to engines as one tensor.

A mixture of experts has more than ten thousand weights. Handling each one in Python on both sides
of a push takes seconds, and the transfer itself a tenth of one. Trainer and SGLang hold the experts
of a layer stacked, so a run needs only one entry of a bucket and one copy:

    model.layers.3.mlp.experts.32-63.up_proj.weight    [32, intermediate, hidden], experts 32 to 63

Each part of a quantised weight is a run: …up_proj.weight_packed, …up_proj.weight_scale. So is each
side of the experts' adapters, …up_proj.lora_B.weight, which trainer ranks gather in this form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

#: Largest size of a run in bytes, in one trainer rank's shard; several fit into one gathered batch.
RUN_BYTES = 64 << 20

_HF_RUN = re.compile(
    r"(?P<owner>.*\.experts)\.(?P<first>\d+)-(?P<last>\d+)\.(?P<projection>gate|up|"
    r"down)_proj\.(?P<leaf>(?:lora_[AB]\.)?weight\w*)"
)
_MEGATRON_RUN = re.compile(
    r"(?P<stem>.*\.experts\.linear_fc[12]\.(?:weight|adapter\.\w+?))(?P<first>\d+)-(?P<last>\d+)"
)
_HF_EXPERT = re.compile(r"(?<=\.experts\.)(\d+)(?=\.)")


@dataclass(frozen=True)
class ExpertRun:
    """Experts ``first`` to ``last`` (both included) of one layer and projection, as engines are
    sent them.

    Attributes:
        owner: "model.layers.3.mlp.experts".
        projection: "gate", "up" or "down".
        leaf: "weight", the part of a quantised weight, or the side of an adapter.
    """

    owner: str
    first: int
    last: int
    projection: str
    leaf: str = "weight"

    @staticmethod
    def parse(name: str) -> ExpertRun | None:
        """Parse a name; None for the name of a single tensor.

        Example:
            >>> run = ExpertRun.parse("model.layers.3.mlp.experts.32-63.up_proj.weight")
            >>> run.owner, run.first, run.last, run.projection, run.leaf
            ('model.layers.3.mlp.experts', 32, 63, 'up', 'weight')
        """
        found = _HF_RUN.fullmatch(name)
        if found is None:
            return None
        return ExpertRun(
            found["owner"],
            int(found["first"]),
            int(found["last"]),
            found["projection"],
            found["leaf"],
        )

    def expert_name(self, number: int) -> str:
        """Return the name of one of the experts in a checkpoint."""
        return f"{self.owner}.{number}.{self.projection}_proj.{self.leaf}"

    def name_of(self, leaf: str) -> str:
        """Return the name of the run of another part of the same weights."""
        return f"{self.owner}.{self.first}-{self.last}.{self.projection}_proj.{leaf}"

    def split(self, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split [experts, out, in] into (name, [out, in]) of each, as views."""
        return ((self.expert_name(self.first + place), one) for place, one in enumerate(tensor))


def bounds(count: int, nbytes: int, limit: int = RUN_BYTES) -> list[tuple[int, int]]:
    """Split ``count`` stacked experts of ``nbytes`` each into half-open ranges of at least one.

    Example:
        >>> bounds(5, nbytes=10, limit=25)
        [(0, 2), (2, 4), (4, 5)]
    """
    step = max(1, limit // max(nbytes, 1))
    return [(start, min(start + step, count)) for start in range(0, count, step)]


def first_of(megatron_name: str) -> tuple[str, int | None]:
    """Return the name of a run's first Megatron parameter and the last expert; for other names, the
    name and None.

    Example:
        >>> first_of("decoder.layers.0.mlp.experts.linear_fc1.weight8-15")
        ('decoder.layers.0.mlp.experts.linear_fc1.weight8', 15)
    """
    found = _MEGATRON_RUN.fullmatch(megatron_name)
    if found is None:
        return megatron_name, None
    return found["stem"] + found["first"], int(found["last"])


def run_name(expert_name: str, last: int) -> str:
    """Return the Hugging Face name of a run from the name of its first tensor.

    Example:
        >>> run_name("model.layers.0.mlp.experts.8.down_proj.weight", 15)
        'model.layers.0.mlp.experts.8-15.down_proj.weight'
    """
    return _HF_EXPERT.sub(lambda found: f"{found[1]}-{last}", expert_name, count=1)
