"""Memory of one engine rank: its part of the weights, the served adapters, and the KV cache, which
fills the rest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from slime.config.config import Config
from slime.engines.adapters import as_served
from slime.engines.kinds import engine_of
from slime.engines.launch import EngineFootprint
from slime.models import table_of
from slime.models.adapters import AdapterConfig, adapter_family
from slime.models.ignore_list import examine, matrices
from slime.models.layouts import FusedQKV, LatentProjection
from slime.models.mixers import FLOAT32_BYTES, mixer_of
from slime.models.quantised import Quantisation
from slime.models.rules import ATTENTION
from slime.models.spec import ModelSpec
from slime.models.table import Parameter

#: CUDA context, kernels, CUDA graphs and the workspace of a prefill. A sleeping engine keeps part
#: of them (2.6 GB on an H200).
AWAKE_BYTES = 3.5e9
ASLEEP_BYTES = 2.7e9
#: Bytes per entry of tensors that store quantised weights; other dtypes are the engine's.
_STORED_BYTES = {"int32": 4, "int64": 8, "float32": 4, "float8_e4m3fn": 1}


@dataclass(frozen=True, kw_only=True)
class EngineSettings(EngineFootprint):
    """Facts that an engine's memory depends on.

    Attributes:
        spec: the model, with unpadded vocabulary.
        longest: tokens of the longest sequence, prompt and response.
        adapters: the adapters that the engine serves; None: none.
        quantisation: of the weights in --hf-checkpoint; None: not quantised.
        returns_routes: it reports the experts of each token (--use-rollout-routing-replay).
    """

    spec: ModelSpec
    longest: int
    adapters: AdapterConfig | None = None
    quantisation: Quantisation | None = None
    returns_routes: bool = False

    @staticmethod
    def of(
        config: Config, spec: ModelSpec, longest: int, quantisation: Quantisation | None = None
    ) -> EngineSettings:
        held = engine_of(config).footprint(config)
        if held.sequences is not None:
            held = replace(held, sequences=min(held.sequences, _requests_at_once(config)))
        return EngineSettings(
            **vars(held),
            spec=spec,
            longest=longest,
            adapters=AdapterConfig.of(config),
            quantisation=quantisation,
            returns_routes=config.train.use_rollout_routing_replay,
        )

    @cached_property
    def weights(self) -> float:
        """Bytes of weights on the rank that holds most."""
        return max(self._stage_weights(stage) for stage in range(self.pipeline))

    def _stage_weights(self, stage: int) -> float:
        spec = self.spec
        size = -(-self.spec.num_layers // self.pipeline)
        layers = range(stage * size, min((stage + 1) * size, spec.num_layers))
        padded = spec.padded(1, self.vocabulary_unit)
        last = stage == self.pipeline - 1
        parameters = table_of(spec).parameters(padded, layers, first=stage == 0, last=last)
        return sum(self._held(one) * self._entry_bytes(one) for one in parameters)

    def _entry_bytes(self, parameter: Parameter) -> float:
        """Return the bytes per entry; for a quantised weight, including its scales and other
        tensors."""
        scheme = self.quantisation.scheme if self.quantisation is not None else None
        first_expert = "0" if parameter.is_expert else ""
        match = table_of(self.spec).match_megatron(parameter.name + first_expert, self.spec)
        if scheme is None or match is None or self._quantised.isdisjoint(match.exports):
            return self.element
        parts = [
            part for shape in parameter.shapes for part in scheme.parts(_matrix(shape), "").values()
        ]
        nbytes = sum(prod(size) * _STORED_BYTES.get(kind, self.element) for kind, size in parts)
        plain = self.element if self.dequantises else 0
        return plain + nbytes / sum(map(prod, parameter.shapes))

    @cached_property
    def _quantised(self) -> frozenset[str]:
        """Names of the weights that the engine holds quantised."""
        if self.quantisation is None:
            return frozenset()
        found = examine(matrices(table_of(self.spec), self.spec), self.quantisation).quantised
        return frozenset(matrix.weight for matrix in found)

    def _held(self, parameter: Parameter) -> float:
        """Return the entries on a rank. KV heads are replicated if there are fewer than ranks;
        norms, routers and projections to latents are not split."""
        rule = parameter.rule
        if rule.layout.tp_axis is None or isinstance(rule.layout, LatentProjection):
            return float(parameter.numel)
        if isinstance(rule.layout, FusedQKV):
            query, *key_value = map(prod, parameter.shapes)
            return query / self.attention + sum(key_value) / min(
                self.attention, self.spec.num_query_groups
            )
        return parameter.numel / (
            self.attention if rule.megatron_names[0].startswith(ATTENTION) else self.tensor
        )

    @cached_property
    def adapter_pool(self) -> float:
        """Bytes of all adapters that the engine serves at once, with all targets."""
        if self.adapters is None:
            return 0.0
        spec = self.spec
        family = table_of(spec)
        table = adapter_family(family, spec, as_served(self.adapters, family, spec))
        size = -(-spec.num_layers // self.pipeline)
        held = 0.0
        for parameter in table.parameters(spec, range(size)):
            # each rank holds the whole adapter of the embedding
            is_cut = parameter.rule.layout.tp_axis is not None and not parameter.is_embedding
            held += parameter.numel / (self.tensor if is_cut else 1)
        return self.adapters_at_once * held * self.element

    @property
    def kv_per_token(self) -> float:
        """Bytes of the KV cache per token and rank."""
        layers = range(-(-self.spec.num_layers // self.pipeline))
        mixers = [mixer_of(self.spec.transformer, layer) for layer in layers]
        kept = sum(one.kept(self.spec, self.attention, self.keeps_latents) for one in mixers)
        return kept * self.kv_element

    @property
    def state_per_sequence(self) -> float:
        """Bytes of the states of gated delta nets per sequence and rank, at any length."""
        held = 0.0
        for layer in range(-(-self.spec.num_layers // self.pipeline)):
            mixer = mixer_of(self.spec.transformer, layer)
            if mixer.state is not None:
                inputs, state = mixer.state(self.spec, self.attention)
                held += inputs * self.element + state * FLOAT32_BYTES
        return held * (1 + self.state_copies)

    @property
    def routes_per_token(self) -> float:
        """Bytes of host memory for the experts of a token, which are int32 in all layers."""
        if not self.returns_routes:
            return 0.0
        return float(4 * self.spec.num_layers * int(self.spec.transformer["moe_router_topk"]))

    def static_fraction(self, memory: float) -> float:
        """Return the fraction of a device of ``memory`` bytes for weights and KV cache: the user's
        choice, or approximately the engine's default."""
        return self.automatic_fraction(memory) if self.fraction is None else self.fraction

    def kv_cache(self, memory: float) -> float:
        """Return the bytes of the KV cache on a device of ``memory`` bytes: the rest of the static
        fraction, or the maximum that its sequences need."""
        if self.sequences is not None:
            own = self.longest * self.kv_per_token + self.state_per_sequence
            return self.sequences * own
        fixed = self.weights + self.adapter_pool + self.draft
        return max(0.0, self.static_fraction(memory) * memory - fixed)

    def kv_tokens(self, memory: float) -> int:
        """Return the tokens that the KV cache holds, over all running requests of one engine. If
        sequences also have states, these are counted as for sequences of the maximum length."""
        per_token = self.kv_per_token + self.state_per_sequence / self.longest
        return int(self.kv_cache(memory) / per_token)


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    rows, columns = shape
    return rows, columns


def _requests_at_once(config: Config) -> int:
    """Return the maximum number of requests that one engine gets at a time."""
    rollout = config.rollout
    cluster = config.cluster
    engines = max(1, (cluster.rollout_num_gpus or 1) // cluster.rollout_num_gpus_per_engine)
    return -(-rollout.over_sampling_batch_size * rollout.n_samples_per_prompt // engines)
