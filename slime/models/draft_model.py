"""The draft of speculative decoding in a Hugging Face directory: prediction layers beside the
policy's weights, or a model of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from safetensors import SafetensorError, safe_open

from slime.errors import UserError
from slime.models.nested import decoder_config
from slime.models.spec import ModelSpec, read_hf_config

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OWN_PREFIX = re.compile(r"(model\.)?mtp(_\w+)?\.")


@dataclass(frozen=True)
class DraftModel:
    """Where a draft's weights are.

    Attributes:
        path: a Hugging Face directory.
        is_own_layers: the draft is the policy's own prediction layers, in the policy's directory.
    """

    path: Path
    is_own_layers: bool

    def check(self, spec: ModelSpec) -> None:
        """Refuse a directory that holds no draft for the policy.

        Args:
            spec: of the policy.
        Raises:
            UserError: says what is missing, or which vocabularies differ.
        """
        if self.is_own_layers:
            if not prediction_layers(tensor_sizes(self.path), spec.num_layers):
                raise UserError(
                    f"{self.path} has no prediction layers to draft with",
                    why="it has no tensors of multi-token prediction; many exports leave them out",
                    fix="name a draft model with --sglang-speculative-draft-model-path, or leave "
                    "--sglang-speculative-algorithm out",
                )
            return
        vocabulary = decoder_config(read_hf_config(self.path)).get("vocab_size")
        if vocabulary not in (None, spec.vocab_size):
            raise UserError(
                f"the draft {self.path} has {vocabulary} tokens, the policy {spec.vocab_size}",
                why="drafts are compared with the policy's tokens by their numbers",
                fix="take a draft that was made for this policy",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the draft's weights; 0 if no safetensors files of it are on this host."""
        sizes = tensor_sizes(self.path)
        if not self.is_own_layers or not sizes:
            return sum(sizes.values())
        layers = int(decoder_config(read_hf_config(self.path))["num_hidden_layers"])
        return sum(sizes[name] for name in prediction_layers(sizes, layers))


def prediction_layers(names: Iterable[str], num_layers: int) -> list[str]:
    """Return the tensors of multi-token prediction: with a prefix of their own, or in layers
    behind the decoder's.

    Example:
        >>> prediction_layers(["mtp.fc.weight", "model.layers.1.eh_proj.weight", "lm_head"], 1)
        ['model.layers.1.eh_proj.weight', 'mtp.fc.weight']
    """
    return sorted(
        name
        for name in names
        if _OWN_PREFIX.match(name)
        or ((layer := _LAYER.match(name)) is not None and int(layer[1]) >= num_layers)
    )


def tensor_sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of each tensor in a directory's safetensors files, from their headers.

    Raises:
        UserError: a file is damaged.
    """
    sizes: dict[str, int] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with safe_open(path, "np") as file:
                for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                    stored = file.get_slice(name)
                    sizes[name] = prod(stored.get_shape()) * _bytes_of(stored.get_dtype())
        except SafetensorError as error:
            raise UserError(f"{path} is damaged", why=str(error), fix="copy it again") from error
    return sizes


def _bytes_of(dtype: str) -> int:
    """Return the bytes of an entry, by safetensors' name of its dtype: BF16, F8_E4M3, BOOL."""
    bits = re.search(r"\d+", dtype)
    return int(bits[0]) // 8 if bits else 1
