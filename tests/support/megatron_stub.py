"""A module with the parameter names and shapes of a Megatron GPT, for tests that need weights and
no forward pass."""

from __future__ import annotations

import torch
from torch import nn

from slime.models import Match, ModelFamily, ModelSpec
from slime.models.layouts import OneExpert, Shard, TensorSource


class Layer(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number


class MegatronStub(nn.Module):
    """Layers ``first`` to ``last`` (half open) of a model; embedding and output layer where they
    belong.

    Args:
        hf: Hugging Face tensors that the parameters are made of.
        shard: tensor-parallel piece of this rank.
    """

    def __init__(
        self,
        family: ModelFamily,
        spec: ModelSpec,
        hf: dict[str, torch.Tensor],
        layers: range | None = None,
        shard: Shard | None = None,
    ) -> None:
        super().__init__()
        layers = layers if layers is not None else range(spec.num_layers)
        self.decoder = nn.Module()
        self.decoder.layers = nn.ModuleList([Layer(number + 1) for number in layers])
        for name in megatron_names(family, spec):
            match = family.match_megatron(name, spec)
            assert match is not None
            if match.layer >= 0 and match.layer not in layers:
                continue
            if name.startswith("embedding.") and layers.start > 0:
                continue
            if (
                name.startswith(("output_layer.", "decoder.final"))
                and layers.stop < spec.num_layers
            ):
                continue
            if name.startswith("output_layer.") and spec.tie_embeddings and layers.start == 0:
                continue
            piece = (
                shard if shard is not None and match.rule.layout.tp_axis is not None else Shard()
            )
            value = match.rule.layout.load(sources_of(match, hf), piece, spec)
            local = name.replace(f"layers.{match.layer}.", f"layers.{match.layer - layers.start}.")
            self._place(local, value)

    def _place(self, name: str, value: torch.Tensor) -> None:
        *path, leaf = name.split(".")
        module: nn.Module = self
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module._modules[part]  # type: ignore[assignment]
        module.register_parameter(leaf, nn.Parameter(value.clone()))


def sources_of(match: Match, hf: dict[str, torch.Tensor]) -> list[TensorSource]:
    """What a layout reads, of stacks one expert's part."""
    found: list[TensorSource] = [hf[source] for source in match.sources]
    return [OneExpert(stack, match.expert) for stack in found] if match.rule.is_stacked else found


def megatron_names(family: ModelFamily, spec: ModelSpec) -> list[str]:
    """Every Megatron parameter of a model, by the first spelling of each rule."""
    names = []
    for rule in family.rules:
        template = rule.megatron_names[0]
        for layer in range(spec.num_layers) if "{layer}" in template else [-1]:
            if rule.when is None or rule.when(spec, layer):
                experts = range(spec.num_experts) if rule.is_expert else [-1]
                names += [template.format(layer=layer, expert=expert) for expert in experts]
    return names


def random_hf(
    family: ModelFamily, spec: ModelSpec, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict:
    """Random Hugging Face tensors of the right shapes for a decoder."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(dtype)
        for name, shape in family.hf_tensors(spec)
    }
