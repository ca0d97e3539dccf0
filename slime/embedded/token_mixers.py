"""Token mixers of the decoder: attention and gated delta nets.

`slime.models.mixers` names these classes. `slime.embedded.weights` calls their ``build``, and
`slime.embedded.model` their ``mix``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from slime.embedded.architecture import Architecture
from slime.embedded.layers import Linear, rms_norm
from slime.embedded.model import Heads, MixerInput
from slime.embedded.states import StateRows, block_reads
from slime.embedded.weights import WeightStore
from slime.models import delta_rule
from slime.models.delta_rule import CHUNK
from slime.models.rotary import yarn_mscale

#: Epsilon of the norms in multi-latent attention; the config's epsilon is for the other norms.
_LATENT_EPS = 1e-6


@dataclass
class GroupedAttention:
    """Grouped-query attention: one matrix computes queries, keys and values, and several query
    heads share a head of keys and values."""

    arch: Architecture
    qkv: Linear
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    sinks: torch.Tensor | None

    @staticmethod
    def build(store: WeightStore, prefix: str) -> GroupedAttention:
        return GroupedAttention(
            store.arch,
            store.linear(f"{prefix}linear_qkv"),
            q_norm=store.tensor_if_there(f"{prefix}q_layernorm.weight"),
            k_norm=store.tensor_if_there(f"{prefix}k_layernorm.weight"),
            sinks=store.tensor_if_there(f"{prefix}core_attention.softmax_offset"),
        )

    def mix(self, given: MixerInput) -> torch.Tensor:
        projected = self.qkv(given.normed, adapted=given.adapted)
        return given.attend(given.layer, self._heads(projected, *given.rotary))

    def _heads(self, mixed: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Heads:
        arch = self.arch
        heads = arch.spec.num_heads
        kv_heads = arch.num_kv_heads
        head_dim = arch.head_dim
        projected = mixed.view(-1, heads + 2 * kv_heads, head_dim)
        rotated = projected[:, : heads + kv_heads]
        values = projected[:, heads + kv_heads :]
        if arch.spec.rotates_first:
            rotated = self._both_normalised(arch.rope.rotate(rotated, cos, sin))
        else:
            rotated = arch.rope.rotate(self._both_normalised(rotated), cos, sin)
        queries = rotated[:, :heads]
        if "softmax_scale" in arch.spec.transformer:
            # the kernels scale by 1 / sqrt(head_dim)
            queries = queries * (arch.spec.score_scale * head_dim**0.5)
        return Heads(queries, rotated[:, heads:], values, self.sinks)

    def _both_normalised(self, both: torch.Tensor) -> torch.Tensor:
        """Normalise [tokens, query and key heads, head_dim], if the layer has norms."""
        if self.q_norm is None or self.k_norm is None:
            return both
        heads = self.arch.spec.num_heads
        return torch.cat(
            [
                self._normalised(both[:, :heads], self.q_norm),
                self._normalised(both[:, heads:], self.k_norm),
            ],
            dim=1,
        )

    def _normalised(self, heads: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Normalise [tokens, heads, head_dim] over each head or, with ``wide_qk_norms``, over all
        heads together."""
        arch = self.arch
        if arch.spec.wide_qk_norms:
            return rms_norm(heads.flatten(1), weight, arch.rms_norm_eps).view_as(heads)
        return rms_norm(heads, weight, arch.rms_norm_eps, arch.zero_centred)


@dataclass
class GatedAttention(GroupedAttention):
    """Grouped-query attention whose output is multiplied by the sigmoid of a gate. Each query head
    is followed by its gate."""

    @staticmethod
    def build(store: WeightStore, prefix: str) -> GatedAttention:
        return GatedAttention(**vars(GroupedAttention.build(store, prefix)))

    def mix(self, given: MixerInput) -> torch.Tensor:
        arch = self.arch
        width = arch.spec.num_heads * arch.head_dim
        projected = self.qkv(given.normed, adapted=given.adapted)
        paired = projected[:, : 2 * width].view(-1, arch.spec.num_heads, 2, arch.head_dim)
        mixed = torch.cat([paired[:, :, 0].flatten(1), projected[:, 2 * width :]], dim=1)
        gate = paired[:, :, 1].flatten(1).float().sigmoid()
        out = given.attend(given.layer, self._heads(mixed, *given.rotary))
        return (out * gate).to(given.normed.dtype)


@dataclass
class GatedDeltaNet:
    """A gated delta net: a convolution over the last tokens, and a state for each head.

    Attributes:
        in_proj: queries, keys, values, gates of the output, write strengths (b), decays (a).
        by_head: rows of the first four, and of the last two, are grouped by key head (Qwen3-Next);
            otherwise they are grouped by kind.
        conv: [channels, 1, width], over queries, keys and values of all heads.
    """

    arch: Architecture
    in_proj: Linear
    by_head: bool
    conv: torch.Tensor
    a_log: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor

    @staticmethod
    def build(store: WeightStore, prefix: str) -> GatedDeltaNet:
        match = store.arch.family.match_megatron(f"{prefix}in_proj.weight", store.arch.spec)
        assert match is not None
        return GatedDeltaNet(
            store.arch,
            store.linear(f"{prefix}in_proj"),
            by_head=len(match.sources) == 2,
            conv=store.tensor(f"{prefix}conv_weight"),
            a_log=store.tensor(f"{prefix}A_log"),
            dt_bias=store.tensor(f"{prefix}dt_bias"),
            norm=store.tensor(f"{prefix}norm_weight"),
        )

    def mix(self, given: MixerInput) -> torch.Tensor:
        projected = self.in_proj(given.normed, adapted=given.adapted)
        states = given.attend.states
        assert states is not None
        number = states.cache.numbers[given.layer]
        assert number is not None
        if not states.fixed_shapes:
            compute = self._tokens if states.spans is None else self._spans
            return compute(projected, states, number)
        if states.spans is not None:
            return self._blocks(projected, states, number)
        rows = [StateRows(states.cache, None, first=row) for row in range(len(projected))]
        return torch.cat([self._tokens(projected[row.first, None], row, number) for row in rows])

    def _split(
        self, projected: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split into (queries, keys and values; gates; b; a), [tokens, …] each, by kind."""
        sizes = self.arch.spec.delta_net
        query, key, values, gates, _, _ = sizes.of_key_head
        heads = sizes.value_heads
        if not self.by_head:
            mixed, gate, b, a = projected.split(
                [sizes.mixed, sizes.key_heads * gates, heads, heads], dim=1
            )
            return mixed, gate, b, a
        main, scalars = (
            x.unflatten(1, (sizes.key_heads, -1))
            for x in projected.split([projected.shape[1] - 2 * heads, 2 * heads], dim=1)
        )
        q, k, v, gate = (x.flatten(1) for x in main.split([query, key, values, gates], dim=2))
        b, a = (x.flatten(1) for x in scalars.chunk(2, dim=2))
        return torch.cat([q, k, v], dim=1), gate, b, a

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        sizes = self.arch.spec.delta_net
        width = sizes.key_heads * sizes.key
        query, key, value = convolved.split([width, width, convolved.shape[1] - 2 * width], dim=1)
        query, key = delta_rule.normalised(
            *(x.unflatten(1, (sizes.key_heads, -1)) for x in (query, key))
        )
        return query, key, value.float().unflatten(1, (sizes.value_heads, -1))

    def _gates(self, b: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return delta_rule.decay_of(a, self.a_log, self.dt_bias), b.float().sigmoid()

    def _gated(self, output: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gate = gate.reshape(output.shape)
        return delta_rule.gated_norm(output, gate, self.norm, self.arch.rms_norm_eps).flatten(1)

    def _tokens(self, projected: torch.Tensor, states: StateRows, number: int) -> torch.Tensor:
        """Compute one token of each sequence."""
        mixed, gate, b, a = self._split(projected)
        slots = slice(states.first, states.first + len(mixed))
        history = states.cache.conv[number, slots]
        window = torch.cat([history, mixed[:, :, None]], dim=2)
        history.copy_(window[:, :, 1:])
        heads = self._heads(delta_rule.convolved_step(window, self.conv[:, 0]))
        state = states.cache.rule[number, slots]
        output, new = delta_rule.recurrent_step(*heads, *self._gates(b, a), state)
        state.copy_(new)
        return self._gated(output, gate)

    def _spans(self, projected: torch.Tensor, states: StateRows, number: int) -> torch.Tensor:
        """Compute the new tokens of several sequences."""
        spans = states.spans
        assert spans is not None
        mixed, gate, b, a = self._split(projected)
        cache = states.cache
        width = self.arch.spec.delta_net.conv
        slots = torch.tensor([span.slot for span in spans], device=mixed.device)
        is_new = torch.tensor([span.start == 0 for span in spans], device=mixed.device)
        before = cache.conv[number, slots].masked_fill_(is_new[:, None, None], 0.0)
        initial = cache.rule[number, slots].masked_fill_(is_new[:, None, None, None], 0.0)
        rows = torch.cat([mixed, before.transpose(1, 2).flatten(0, 1)])
        convolved = delta_rule.CausalConv.apply(rows, self.conv[:, 0], states.reads(width))

        def keep(run: int, count: int, state: torch.Tensor) -> None:
            span = spans[run]
            if span.start + count in span.keep:
                end = span.offset + count
                states.keep(run, span.start + count, mixed[end - width + 1 : end].t(), state)

        output, finals = delta_rule.chunked(
            *self._heads(convolved), *self._gates(b, a), states.runs, initial, keep
        )
        cache.rule[number, slots] = finals
        for span, old in zip(spans, before):
            new = mixed[span.offset : span.offset + span.count].t()
            cache.conv[number, span.slot] = torch.cat([old, new], dim=1)[:, span.count :]
        return self._gated(output, gate)

    def _blocks(self, projected: torch.Tensor, states: StateRows, number: int) -> torch.Tensor:
        """Compute the new tokens of several sequences in blocks of `CHUNK` rows. Spans begin at
        block boundaries; the last block is padded with zeros."""
        spans = states.spans
        assert spans is not None
        outputs = []
        for index, span in enumerate(spans):
            for first in range(0, span.count, CHUNK):
                count = min(CHUNK, span.count - first)
                begin = span.offset + first
                rows = projected[begin : begin + count]
                outputs.append(self._block(rows, span.slot, span.start + first, states, number))
                end = span.start + first + count
                if end in span.keep and first + count < span.count:
                    place = (number, span.slot)
                    states.keep(index, end, states.cache.conv[place], states.cache.rule[place])
        return torch.cat(outputs)

    def _block(
        self, projected: torch.Tensor, slot: int, start: int, states: StateRows, number: int
    ) -> torch.Tensor:
        count = len(projected)
        filled = F.pad(projected, (0, 0, 0, CHUNK - count))
        mixed, gate, b, a = self._split(filled)
        width = self.arch.spec.delta_net.conv
        history = states.cache.conv[number, slot]
        state = states.cache.rule[number, slot]
        if start == 0:
            history.zero_()
            state.zero_()
        rows = torch.cat([mixed, history.t()])
        reads = block_reads(width).to(mixed.device)
        convolved = delta_rule.CausalConv.apply(rows, self.conv[:, 0], reads)
        runs = delta_rule.TokenRuns.of([count], device=mixed.device, size=CHUNK)
        output, finals = delta_rule.chunked(
            *self._heads(convolved), *self._gates(b, a), runs, state[None]
        )
        state.copy_(finals[0])
        history.copy_(torch.cat([history, mixed[:count].t()], dim=1)[:, count:])
        filled_output = F.pad(output, (0, 0, 0, 0, 0, CHUNK - count))
        return self._gated(filled_output, gate)[:count]


@dataclass
class LatentAttention:
    """Multi-latent attention with expanded keys and values in the cache.

    Attributes:
        scale: factor of the scores.
        query: q_proj, or q_b_proj after ``query_down`` and ``query_norm``.
    """

    arch: Architecture
    scale: float
    query_down: Linear | None
    query_norm: torch.Tensor | None
    query: Linear
    key_down: Linear
    key_norm: torch.Tensor
    key_value: Linear

    @staticmethod
    def build(store: WeightStore, prefix: str) -> LatentAttention:
        spec = store.arch.spec
        facts = spec.transformer
        mscale = yarn_mscale(facts["rotary_scaling_factor"], facts["mscale_all_dim"])
        low_rank = facts["q_lora_rank"] is not None
        query = "linear_q_up_proj" if low_rank else "linear_q_proj"
        return LatentAttention(
            store.arch,
            scale=spec.head_dim**-0.5 * mscale**2,
            query_down=store.linear(f"{prefix}linear_q_down_proj") if low_rank else None,
            query_norm=store.tensor_if_there(f"{prefix}q_layernorm.weight"),
            query=store.linear(f"{prefix}{query}"),
            key_down=store.linear(f"{prefix}linear_kv_down_proj"),
            key_norm=store.tensor(f"{prefix}kv_layernorm.weight"),
            key_value=store.linear(f"{prefix}linear_kv_up_proj"),
        )

    def mix(self, given: MixerInput) -> torch.Tensor:
        """Attend with heads padded to one width, and remove the padding afterwards."""
        mixed = given.attend(given.layer, self._heads(given))
        width = self.arch.head_dim
        value_dim = self.arch.spec.value_dim
        if value_dim == width:
            return mixed
        return mixed.view(-1, self.arch.spec.num_heads, width)[..., :value_dim].flatten(1)

    def _heads(self, given: MixerInput) -> Heads:
        arch = self.arch
        normed = given.normed
        adapted = given.adapted
        heads = arch.spec.num_heads
        position = arch.spec.rotary_dim
        plain = arch.spec.head_dim - position
        compressed = normed
        if self.query_down is not None:
            compressed = _latent_norm(self.query_down(normed, adapted=adapted), self.query_norm)
        queries = self.query(compressed, adapted=adapted).view(-1, heads, plain + position)
        down, key_position = self.key_down(normed, adapted=adapted).split(
            [len(self.key_norm), position], dim=-1
        )
        latent = _latent_norm(down, self.key_norm)
        expanded = self.key_value(latent, adapted=adapted).unflatten(-1, (heads, -1))
        keys = expanded[..., :plain]
        values = expanded[..., plain:]
        rotated = arch.rope.rotate(
            torch.cat([queries[..., plain:], key_position[:, None]], 1), *given.rotary
        )
        queries = torch.cat([queries[..., :plain], rotated[:, :heads]], dim=-1)
        keys = torch.cat([keys, rotated[:, heads:].expand(-1, heads, -1)], dim=-1)
        width = arch.head_dim
        queries = queries * (self.scale * width**0.5)  # the kernels scale by 1 / sqrt(head_dim)
        return Heads(*(_padded(x, width) for x in (queries, keys, values)))


def _latent_norm(latent: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return F.rms_norm(latent, latent.shape[-1:], weight, _LATENT_EPS)


def _padded(x: torch.Tensor, width: int) -> torch.Tensor:
    """Pad the last axis with zeros up to ``width``."""
    return F.pad(x, (0, width - x.shape[-1])) if x.shape[-1] < width else x
