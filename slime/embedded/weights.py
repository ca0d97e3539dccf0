"""The weights of the engine, addressed by Hugging Face names although some of them are fused.

For example, ``…q_proj.weight`` is a view of the fused qkv matrix, so writing to it updates the
matrix in place. Names that share a fused matrix are updated independently; the blocked copies with
which the CPU multiplies are rebuilt afterwards.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from slime.checkpoints.hf_files import HfReader
from slime.embedded.architecture import Architecture, ExpertLayers
from slime.embedded.layers import ExpertMLP, Linear, Mlp, TokenEmbedding
from slime.embedded.model import Decoder, DecoderLayer
from slime.embedded.quantised_weights import StoredForm
from slime.engines.wire.buckets import dtype_in, dtype_name, fingerprint
from slime.errors import UserError, first_few
from slime.models import Match, read_hf_config
from slime.models.activations import ACTIVATIONS
from slime.models.layouts import INTERLEAVED_GATE_UP, Transposed
from slime.models.mixers import mixer_of
from slime.models.parameters import ModelParameters
from slime.models.quantised import Quantisation
from slime.models.rules import VISION_MODEL
from slime.models.table import single_experts
from slime.models.tower import build_tower
from slime.models.vision import VisionSpec


class WeightError(Exception):
    """An update cannot be applied: unknown name, wrong shape, missing tensor. It changed
    nothing."""


@dataclass
class _StackedExpert:
    """One expert's slice of stacked weights [experts, …], whose memory may move."""

    number: int
    weights: torch.Tensor
    biases: torch.Tensor | None
    is_transposed: bool
    linear: Linear = field(init=False)

    @property
    def weight(self) -> torch.Tensor:
        own = self.weights[self.number]
        return own.t() if self.is_transposed else own

    @property
    def bias(self) -> torch.Tensor | None:
        return None if self.biases is None else self.biases[self.number]


class WeightStore:
    """Owns every parameter of a decoder.

    Attributes:
        named: Hugging Face name → view of the parameter; write only with `update`.
        form: stored form of quantised weights; None for unquantised weights.
        version: weight version that responses report, as a string.
        epoch: number of updates; a cached prefix never mixes keys and values of different epochs.
        pushed: names updated under the current version.
        linears: all linear layers.
        tower: the vision tower; None for text-only models.
        parts: Hugging Face name of each weight that can have an adapter → (its layer, its slice of
            the layer's outputs).
        broken: why the weights are not one consistent version, or ""; a complete update resets it.
    """

    def __init__(
        self,
        arch: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        num_positions: int,
        fixed_rows: bool = False,
        quantisation: Quantisation | None = None,
    ) -> None:
        self.arch = arch
        self.dtype = dtype
        self.device = device
        self.named: dict[str, torch.Tensor] = {}
        self._linears_of: dict[str, list[Linear]] = {}
        self.linears: list[Linear] = []
        self.parts: dict[str, tuple[Linear | TokenEmbedding, slice]] = {}
        self._fixed_rows = fixed_rows
        self._snapshot: dict[str, torch.Tensor] | None = None
        self._shapes = ModelParameters(arch.family, arch.spec).stored
        self.model = self._build(num_positions)
        assert set(self.named) == set(self._shapes)
        self.form = None if quantisation is None else StoredForm(arch, quantisation, dtype)
        self.version = "0"
        self.epoch = 0
        self.pushed: set[str] = set()
        self.broken = ""

    # -- updates -----------------------------------------------------------------------------------

    def update(
        self, tensors: Iterable[tuple[str, torch.Tensor]], version: str | None = None
    ) -> int:
        """Write all tensors into place, or none; return their number.

        Args:
            tensors: (Hugging Face name, tensor of the parameter's shape); cast to the engine's
                dtype.
            version: version of the tensors; None keeps the current version.
        Raises:
            WeightError: the model lacks a name or has another shape, or a name occurs twice.
        """
        table = list(tensors)
        self.check((name, tuple(tensor.shape)) for name, tensor in table)
        for name, tensor in table:
            dtype = dtype_name(tensor.dtype)
            if self.form and name in self.form and (problem := self.form.problem(name, dtype)):
                raise WeightError(problem)
        if version is not None and version != self.version:
            self.version = version
            self.pushed = set()
            if self.form is not None:
                self.form.begin()
        for name, tensor in table:
            whole: tuple[str, torch.Tensor] | None = name, tensor
            if self.form is not None and name in self.form:
                whole = self.form.take(name, tensor)
            if whole is not None and whole[0] in self.named:  # else it is a tied head
                self._write(*whole)
        self.pushed.update(name for name, _ in table)
        # a cheap count first, because a directory is loaded with one update per tensor
        if self.broken and len(self.pushed) >= len(self._stored_names) and not self.missing():
            self.broken = ""
        self.epoch += 1
        return len(table)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        self.named[name].copy_(tensor)
        for linear in self._linears_of.get(name, ()):
            linear.invalidate()

    def check(self, names_and_shapes: Iterable[tuple[str, tuple[int, ...]]]) -> None:
        """Check that an update fits the model; a tied head is accepted and ignored.

        Raises:
            WeightError: as in `update`.
        """
        seen: set[str] = set()
        for name, shape in names_and_shapes:
            if name in seen:
                raise WeightError(f"{name} comes twice in one update")
            seen.add(name)
            if name in self._tied_names:
                continue
            if self.form is not None and name in self.form:
                expected = self.form.shape(name)
            elif name in self.named and (self.form is None or name in self.form.names):
                expected = tuple(self.named[name].shape)
            else:
                raise self._unknown([name])
            if shape != expected:
                raise WeightError(
                    f"{name} has shape {list(shape)}, the model's is {list(expected)}"
                )

    def missing(self) -> list[str]:
        """Return the parameters that were not updated under the current version."""
        return [name for name in self.names if name not in self.pushed]

    @property
    def names(self) -> Iterable[str]:
        """The names of all tensors of a complete update."""
        return self.named if self.form is None else self.form.names

    @property
    def held(self) -> Mapping[str, torch.Tensor]:
        """The engine's tensors by `names`; quantised weights as they were received."""
        return self.named if self.form is None else self.form.held(self.named)

    def load_directory(self, path: str | Path, version: str | None = None) -> int:
        """Load a Hugging Face directory, after a check that it has exactly the model's parameters;
        return the number of tensors.

        Raises:
            UserError: there are no safetensors, or a shard is missing or damaged.
            WeightError: parameters are missing, unknown, or of another shape.
        """
        reader = HfReader(path)
        reader.arrange(self.arch.family, self.arch.spec)
        names = sorted(filter(self._takes, reader.names()))
        shapes = {name: tuple(reader[name].shape) for name in names}
        absent = [name for name in self.names if name not in shapes]
        if absent:
            raise WeightError(
                f"{path} lacks {len(absent)} parameters of the model: {first_few(absent)}"
            )
        self.check(shapes.items())
        self.broken = f"an update from {path} stopped half way"
        self.pushed = set()
        for name in names:
            self.update([(name, reader[name][...])], version)
        return len(names)

    def _takes(self, name: str) -> bool:
        """Tell whether to read this tensor of a directory; ignored tensors are skipped."""
        return name in self._stored_names or not self.arch.family.is_ignored(name, self.arch.spec)

    @cached_property
    def _stored_names(self) -> frozenset[str]:
        return frozenset(self.names)

    # -- checks ------------------------------------------------------------------------------------

    def parameter(self, name: str) -> torch.Tensor:
        """Return the parameter of a Hugging Face name; a tied head is the embedding.

        Raises:
            WeightError: the model has no such parameter.
        """
        found = self.named.get(self._tied_names.get(name, name))
        if found is None:
            raise self._unknown([name])
        return found

    def _unknown(self, names: list[str]) -> WeightError:
        near = nearest(names[0], self.named)
        return WeightError(f"the model has no parameter {first_few(names)}{near}")

    def fingerprints(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return name → xxh3-128 of the parameter's bytes in the engine's dtype.

        Raises:
            WeightError: the model has no parameter of a name.
        """
        held = self.held
        chosen = list(names if names is not None else held)
        tied = self._tied_names
        unknown = [name for name in chosen if tied.get(name, name) not in held]
        if unknown:
            raise self._unknown(unknown)
        return {name: fingerprint(held[tied.get(name, name)]) for name in chosen}

    def take_snapshot(self) -> None:
        self._snapshot = {
            name: tensor.detach().to("cpu", copy=True) for name, tensor in self.held.items()
        }

    def reset(self) -> None:
        """Overwrite every parameter with noise, so that a push that leaves one out is noticed."""
        for tensor in self.named.values():
            tensor.normal_(std=0.02)
        for linear in self.linears:
            linear.invalidate()
        if self.form is not None:
            self.form.reset()
        self.epoch += 1

    def compare(self) -> None:
        """Compare the parameters with the snapshot.

        Raises:
            WeightError: there is no snapshot, or parameters differ from it (the message has names).
        """
        if self._snapshot is None:
            raise WeightError("compare needs a snapshot: send the action snapshot first")
        snapshot = self._snapshot
        differing = [
            name for name, tensor in self.held.items() if not _same(tensor.cpu(), snapshot[name])
        ]
        if differing:
            raise WeightError(
                f"{len(differing)} parameters differ from the snapshot: {first_few(differing)}"
            )

    # -- memory ------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        unpacked = sum(tensor.nbytes for tensor in self.named.values())
        return unpacked + sum(linear.packed_nbytes for linear in self.linears)

    def release(self) -> None:
        """Free memory: on a GPU move the parameters to the host; on a CPU drop only the blocked
        copies."""
        for linear in self.linears:
            linear.invalidate()
        if self.device.type != "cpu":
            self._move(torch.device("cpu"))

    def resume(self) -> None:
        if self.device.type != "cpu":
            self._move(self.device)

    def _move(self, device: torch.device) -> None:
        for owner in self._owners:
            owner.data = owner.data.to(device)
        self._bind()

    # -- construction ------------------------------------------------------------------------------

    def _build(self, num_positions: int) -> Decoder:
        """Build the decoder from Megatron's parameter names; the family's table maps each to its
        Hugging Face tensors."""
        arch = self.arch
        self._owners: list[torch.Tensor] = []
        self._bindings: list[tuple[str, torch.Tensor, int, int]] = []
        self._stacks: dict[str, torch.Tensor] = {}
        self._stacked_experts: list[_StackedExpert] = []
        self._tower_parameters: list[tuple[nn.Parameter, torch.Tensor]] = []
        embedding = self.tensor("embedding.word_embeddings.weight")
        layers = [
            self._build_layer(f"decoder.layers.{number}.", number)
            for number in range(arch.spec.num_layers)
        ]
        norm = self.tensor("decoder.final_layernorm.weight")
        self.tower = None if arch.spec.vision is None else self._build_tower(arch.spec.vision)
        if arch.spec.tie_embeddings:
            match = arch.family.match_megatron("output_layer.weight", arch.spec)
            assert match is not None
            head = self._bound(Linear(embedding, None, self._fixed_rows), match.sources)
        else:
            head = self.linear("output_layer")
        self._bind()
        lookup = TokenEmbedding(embedding, self._fixed_rows)
        if not arch.spec.tie_embeddings:
            self.parts[self._embedding_name] = (lookup, slice(0, lookup.out_features))
        return Decoder(arch, lookup, layers, norm, head, num_positions)

    @property
    def _tied_names(self) -> dict[str, str]:
        """For a tied model: name of the output layer → name of the embedding that replaces it."""
        if not self.arch.spec.tie_embeddings:
            return {}
        rules = [rule for rule in self.arch.family.rules if rule.is_output]
        return {name: self._embedding_name for rule in rules for name in rule.hf_names}

    @property
    def _embedding_name(self) -> str:
        names = self._hf_names("embedding.word_embeddings.weight")
        assert names is not None
        return names[0]

    def _build_tower(self, vision: VisionSpec) -> nn.Module:
        tower = build_tower(vision, self.dtype).requires_grad_(False).to(self.device)
        for name, parameter in tower.named_parameters():
            self._tower_parameters.append((parameter, self.tensor(VISION_MODEL + name)))
        return tower

    def _build_layer(self, prefix: str, number: int) -> DecoderLayer:
        attention = f"{prefix}self_attention."
        mlp = f"{prefix}mlp."
        experts = self.arch.experts
        mixer = pkgutil.resolve_name(mixer_of(self.arch.spec.transformer, number).embedded)
        return DecoderLayer(
            input_norm=self.tensor_if_there(f"{prefix}input_layernorm.weight"),
            attention=mixer.build(self, attention),
            output=self.linear(f"{attention}linear_proj"),
            post_attention_norm=self.tensor_if_there(f"{prefix}post_self_attn_layernorm.weight"),
            mlp_norm=self.tensor_if_there(f"{prefix}pre_mlp_layernorm.weight"),
            mlp=self._experts(mlp, experts)
            if experts and experts.in_layer[number]
            else self._mlp(mlp),
            post_mlp_norm=self.tensor_if_there(f"{prefix}post_mlp_layernorm.weight"),
        )

    def _mlp(self, prefix: str, expert: str = "") -> Mlp:
        facts = self.arch.spec.transformer
        match = self.arch.family.match_megatron(
            f"{prefix}linear_fc1.weight{expert}", self.arch.spec
        )
        assert match is not None
        return Mlp(
            self.linear(f"{prefix}linear_fc1", expert),
            self.linear(f"{prefix}linear_fc2", expert),
            ACTIVATIONS[self.arch.spec.activation],
            limit=facts.get("activation_func_clamp_value"),
            offset=float(facts.get("glu_linear_offset", 0.0)),
            interleaved=match.rule.layout == Transposed(INTERLEAVED_GATE_UP),
        )

    def _experts(self, prefix: str, facts: ExpertLayers) -> ExpertMLP:
        has_shared = self._hf_names(f"{prefix}shared_experts.linear_fc1.weight") is not None
        return ExpertMLP(
            facts,
            gate=self.tensor(f"{prefix}router.weight"),
            bias=self.tensor_if_there(f"{prefix}router.expert_bias"),
            experts=[self._mlp(f"{prefix}experts.", str(number)) for number in range(facts.count)],
            shared=self._mlp(f"{prefix}shared_experts.") if has_shared else None,
            shared_gate=self.tensor_if_there(f"{prefix}shared_experts.gate_weight"),
            gate_bias=self.tensor_if_there(f"{prefix}router.bias"),
        )

    def _hf_names(self, name: str) -> tuple[str, ...] | None:
        """Return the Hugging Face names of a Megatron parameter; None if the model has no such
        parameter."""
        match = self.arch.family.match_megatron(name, self.arch.spec)
        return None if match is None else match.sources

    def linear(self, name: str, expert: str = "") -> Linear:
        match = self.arch.family.match_megatron(f"{name}.weight{expert}", self.arch.spec)
        assert match is not None, name
        names = match.sources
        biases = self._hf_names(f"{name}.bias{expert}")
        if match.rule.is_stacked:
            return self._expert_of_stack(match, biases)
        bias = None if biases is None else self._allocate(biases)
        linear = Linear(self._allocate(names), bias, self._fixed_rows)
        first = 0
        for source in names:
            last = first + self._shapes[source][0]
            self.parts[source] = (linear, slice(first, last))
            first = last
        return self._bound(linear, names)

    def _expert_of_stack(self, match: Match, biases: tuple[str, ...] | None) -> Linear:
        """Build the layer of one expert from its slice of stacked Hugging Face tensors, without a
        copy."""
        (name,) = match.sources
        is_transposed = isinstance(match.rule.layout, Transposed)
        one = _StackedExpert(
            match.expert,
            self._stack(name),
            None if biases is None else self._stack(biases[0]),
            is_transposed,
        )
        self._stacked_experts.append(one)
        one.linear = Linear(one.weight, one.bias, self._fixed_rows)
        parts = [
            hf.format(layer=match.layer, expert=match.expert)
            for hf in single_experts(match.rule).hf_names
        ]
        for index, part in enumerate(parts):
            if match.rule.layout == Transposed(INTERLEAVED_GATE_UP):
                rows = slice(index, None, len(parts))
            else:
                count = one.linear.out_features // len(parts)
                rows = slice(index * count, (index + 1) * count)
            self.parts[part] = (one.linear, rows)
        return self._bound(one.linear, match.sources)

    def _stack(self, name: str) -> torch.Tensor:
        if name not in self._stacks:
            self._stacks[name] = self._allocate((name,))
        return self._stacks[name]

    def _bound(self, linear: Linear, names: tuple[str, ...]) -> Linear:
        self.linears.append(linear)
        for name in names:
            self._linears_of.setdefault(name, []).append(linear)
        return linear

    def tensor(self, name: str) -> torch.Tensor:
        found = self.tensor_if_there(name)
        assert found is not None, name
        return found

    def tensor_if_there(self, name: str) -> torch.Tensor | None:
        names = self._hf_names(name)
        return None if names is None else self._allocate(names)

    def _allocate(self, names: tuple[str, ...]) -> torch.Tensor:
        """Allocate one tensor for these parameters, concatenated along axis 0; `_bind` makes their
        views."""
        rows = [self._shapes[name][0] for name in names]
        dtype = dtype_in(self.dtype, names[0], self.dtype)
        owner = torch.zeros(
            (sum(rows), *self._shapes[names[0]][1:]), dtype=dtype, device=self.device
        )
        self._owners.append(owner)
        first = 0
        for name, count in zip(names, rows):
            self._bindings.append((name, owner, first, first + count))
            first += count
        return owner

    def _bind(self) -> None:
        self.named = {name: owner[first:last] for name, owner, first, last in self._bindings}
        for one in self._stacked_experts:
            one.linear.weight = one.weight
            one.linear.bias = one.bias
        for parameter, owner in self._tower_parameters:
            parameter.data = owner


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (nearest: …)" with the known name closest to ``name``; "" if none is close."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (nearest: {close[0]})" if close else ""


def make_store(
    model_path: str | Path,
    arch: Architecture,
    dtype_or_auto: str,
    device: torch.device,
    num_positions: int,
    fixed_rows: bool,
) -> WeightStore:
    """Build the decoder of ``arch`` and fill it from a directory.

    Args:
        dtype_or_auto: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
    Raises:
        UserError: the dtype is unknown, or the directory is no complete checkpoint of this model.
    """
    name = arch.dtype if dtype_or_auto == "auto" else dtype_or_auto
    dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}.get(
        name
    )
    if dtype is None:
        named_by = f"config.json of {model_path}:" if dtype_or_auto == "auto" else "--dtype:"
        raise UserError(
            f"{named_by} dtype {name} is not known",
            why="the engine computes in bfloat16, float16 (if the checkpoint has it) or float32",
            fix="pass --dtype bfloat16 or float32",
        )
    store = WeightStore(
        arch,
        dtype,
        device,
        num_positions,
        fixed_rows,
        Quantisation.read(read_hf_config(model_path)),
    )
    try:
        store.load_directory(model_path)
    except WeightError as error:
        raise UserError(
            f"{model_path} is not a complete {arch.model_type} checkpoint", why=str(error)
        ) from error
    store.pushed = set()
    return store


def describe(store: WeightStore) -> Mapping[str, object]:
    """Return the state of the last push, for ``/server_info``."""
    missing = store.missing() if store.pushed else []
    return {
        "weight_version": store.version,
        "dtype": dtype_name(store.dtype),
        "quantisation": None if store.form is None else str(store.form.quantisation),
        "pushed_parameters": len(store.pushed),
        "total_parameters": len(list(store.names)),
        "missing_parameters": missing[:10],
        "broken": store.broken,
    }


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.element_size() == 1:  # float8 does not support comparison
        one = one.view(torch.uint8)
        other = other.view(torch.uint8)
    return torch.equal(one, other)
