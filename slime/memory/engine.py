"""What one engine rank holds: its part of the weights, and keys and values of as many tokens as memory is left for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

from slime.config import Config
from slime.models import table_of
from slime.models.layouts import FusedQKV, Latent
from slime.models.spec import ModelSpec
from slime.models.table import ATTENTION, Parameter

#: What SGLang about chooses when ``--sglang-mem-fraction-static`` is not set: on a small GPU it leaves at least these
#: bytes, beside a part of all.
_AUTOMATIC_FRACTION, _AUTOMATIC_PART, _AUTOMATIC_REST = 0.88, 0.95, 5.9e9

#: CUDA context, kernels, CUDA graphs and the workspace of a prefill; part of them stays while the engine sleeps (2.6
#: GB on an H200).
AWAKE_BYTES, ASLEEP_BYTES = 3.5e9, 2.7e9

_VOCABULARY_UNIT = 64  # SGLang pads the vocabulary to a multiple of it
_KV_BYTES = {"fp8_e5m2": 1, "fp8_e4m3": 1, "fp4_e2m1": 0.5}


@dataclass(frozen=True)
class EngineSettings:
    """Attributes:
    spec: the model, its vocabulary not padded.
    is_sglang: else the embedded engine, one process that holds everything.
    tensor, pipeline: how the engine's GPUs divide the model.
    attention: ranks that divide the attention: fewer than ``tensor`` with data-parallel attention.
    element, kv_element: bytes of a weight and of an entry of the KV cache.
    fraction: of the GPU's memory for weights and KV cache together; None: SGLang chooses.
    sequences: requests that the embedded engine keeps at once.
    longest: tokens of the longest sequence, prompt and response.
    """

    spec: ModelSpec
    is_sglang: bool
    tensor: int
    pipeline: int
    attention: int
    element: int
    kv_element: float
    fraction: float | None
    sequences: int
    longest: int

    @staticmethod
    def of(config: Config, spec: ModelSpec, longest: int, *, on_gpu: bool) -> EngineSettings:
        options: dict[str, Any] = config.engine.sglang
        is_sglang = config.engine.rollout_engine == "sglang" or (config.engine.rollout_engine == "auto" and on_gpu)
        ranks = config.cluster.rollout_num_gpus_per_engine if is_sglang else 1
        pipeline = int(options.get("pp_size") or 1) if is_sglang else 1
        tensor = max(1, ranks // pipeline)
        replicas = int(options.get("dp_size") or 1) if options.get("enable_dp_attention") else 1
        element = 4 if _engine_dtype(config, is_sglang) == "float32" else 2
        kv_element = _KV_BYTES.get(str(options.get("kv_cache_dtype")), element) if is_sglang else element
        fraction = options.get("mem_fraction_static") if is_sglang else None
        return EngineSettings(
            spec=spec,
            is_sglang=is_sglang,
            tensor=tensor,
            pipeline=pipeline,
            attention=max(1, tensor // replicas),
            element=element,
            kv_element=kv_element,
            fraction=float(fraction) if fraction is not None else None,
            sequences=min(config.engine.embedded_max_slots, _requests_at_once(config)),
            longest=longest,
        )

    @cached_property
    def weights(self) -> float:
        """Bytes on the rank that has most."""
        return max(self._stage_weights(stage) for stage in range(self.pipeline)) * self.element

    def _stage_weights(self, stage: int) -> float:
        spec, size = self.spec, -(-self.spec.num_layers // self.pipeline)
        layers = range(stage * size, min((stage + 1) * size, spec.num_layers))
        padded = spec.padded(1, _VOCABULARY_UNIT) if self.is_sglang else spec
        last = stage == self.pipeline - 1
        return sum(map(self._held, table_of(spec).parameters(padded, layers, first=stage == 0, last=last)))

    def _held(self, parameter: Parameter) -> float:
        """Entries on a rank: keys and values are repeated when there are too few, norms, routers and what makes latents
        are not cut at all."""
        rule = parameter.rule
        if rule.layout.tp_axis is None or isinstance(rule.layout, Latent):
            return float(parameter.numel)
        if isinstance(rule.layout, FusedQKV):
            query, *key_value = map(prod, parameter.shapes)
            return query / self.attention + sum(key_value) / min(self.attention, self.spec.num_query_groups)
        return parameter.numel / (self.attention if rule.megatron_names[0].startswith(ATTENTION) else self.tensor)

    @property
    def kv_per_token(self) -> float:
        """Bytes of the KV cache per token and rank. Latent attention keeps one latent for all heads."""
        layers = -(-self.spec.num_layers // self.pipeline)
        if self.spec.is_mla and self.is_sglang:
            width = self.spec.width("key rank, position")
        elif self.spec.is_mla:
            width = self.spec.width("query") + self.spec.width("attended")
        else:
            groups = max(1, self.spec.num_query_groups // self.attention)
            width = 2 * groups * self.spec.head_dim
        return layers * width * self.kv_element

    def static_fraction(self, memory: float) -> float:
        """Of a device of ``memory`` bytes: as the user set it, or as SGLang would about choose."""
        if self.fraction is not None:
            return self.fraction
        if memory <= 0:  # a server without a GPU, as tests start it
            return 0.0
        return max(0.0, round(min(_AUTOMATIC_FRACTION, _AUTOMATIC_PART - _AUTOMATIC_REST / memory), 3))

    def kv_cache(self, memory: float) -> float:
        """Bytes of the KV cache on a device of ``memory`` bytes: what the fraction leaves, or, of the embedded engine,
        what its sequences need at most."""
        if not self.is_sglang:
            return self.sequences * self.longest * self.kv_per_token
        return max(0.0, self.static_fraction(memory) * memory - self.weights)

    def kv_tokens(self, memory: float) -> int:
        """How many tokens that is, over all running requests of one engine."""
        return int(self.kv_cache(memory) / self.kv_per_token)


def _requests_at_once(config: Config) -> int:
    """Most requests that one engine gets at a time."""
    rollout, cluster = config.rollout, config.cluster
    engines = max(1, (cluster.rollout_num_gpus or 1) // cluster.rollout_num_gpus_per_engine)
    return -(-rollout.over_sampling_batch_size * rollout.n_samples_per_prompt // engines)


def _engine_dtype(config: Config, is_sglang: bool) -> str:
    if is_sglang:
        return str(config.engine.sglang.get("dtype") or "auto")
    chosen = str(config.engine.embedded_dtype)
    return ("float32" if config.megatron.fp32 else "bfloat16") if chosen == "auto" else chosen
