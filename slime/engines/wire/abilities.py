"""An engine's abilities in a weight push and in the checks after it, from its ``/server_info``.

A server states its `Abilities` as a JSON object under the key "abilities". SGLang does not: its
abilities follow from its arguments, which ``/server_info`` has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from slime.engines.api import WEIGHT_LOADER
from slime.processes.host import version_of

#: SGLang's first version that loads weights only between ``/begin_weight_update`` and
#: ``/end_weight_update``.
_UPDATE_SESSIONS = (0, 5, 21)
#: Its first version that takes an adapter as a list of texts, one per rank.
_ADAPTERS_BY_RANK = (0, 5, 17)
#: Its first version that computes images of hybrid models (Qwen3.5) with all rows of positions.
SEES_IN_HYBRIDS = (0, 5, 19)
#: Its thresholds below which a draft token is accepted that the policy would not have sampled.
ACCEPT_THRESHOLDS = (
    "speculative_accept_threshold_single",
    "speculative_accept_threshold_acc",
)
#: Its flags that move experts to other places than their numbers.
_MOVES_EXPERTS = ("enable_eplb", "ep_num_redundant_experts")


@dataclass(frozen=True)
class Abilities:
    """One engine's abilities.

    Attributes:
        engine: its name in messages.
        transports: kinds of transport that reach it (`slime.weights.route.choose_route`).
        check: how it proves which weights it holds: "tensors": fingerprints of whole tensors;
            "slices": of each rank's slices (`slime.engines.sglang.weight_probe`); "" if it cannot.
        can_pause: requests can be paused while weights arrive.
        update_sessions: weights are loaded, and ranks asked about them, only in a session.
        takes_expert_runs: it loads neighbouring experts from one tensor.
        packs_quantised: it packs quantised weights for its kernels; only the routes of
            `slime.engines.sglang.quantised_routes` work.
        quantises: it quantises plain weights itself.
        coarse_cache: its KV cache has fewer than 16 bits.
        rounds_activations: its FP8 kernels round activations, too.
        num_ranks: processes that hold weights.
        adapters: it can load adapters (LoRA) while it runs.
        adapters_by_rank: each rank reads a text of its own, instead of one for all.
        adapter_rank: the largest rank of these; 0 for any.
        adapter_targets: last name parts of the layers that may have an adapter; () for all.
        adapters_at_once: adapters per batch at most, counting the base model as one; 0 for any
            number.
        shares_outer_experts: all experts share the outer matrices of routed experts' adapters; None
            if both forms can be loaded.
        adapts_lone_queries: an adapter of ``q_proj`` can be loaded if the layer has no ``k_proj``
            and ``v_proj`` (latent attention).
        samples_exactly: every token is sampled from the policy's distribution.
        sees_in_hybrids: it computes image positions correctly in models with gated delta nets.
        sees_both_ways: tokens of an image always attend to each other in both directions, if the
            model wants that.
    """

    engine: str
    transports: tuple[str, ...]
    check: str
    can_pause: bool = True
    update_sessions: bool = False
    takes_expert_runs: bool = False
    packs_quantised: bool = False
    quantises: bool = False
    coarse_cache: bool = False
    rounds_activations: bool = False
    num_ranks: int = 1
    adapters: bool = False
    adapters_by_rank: bool = False
    adapter_rank: int = 0
    adapter_targets: tuple[str, ...] = ()
    adapters_at_once: int = 0
    shares_outer_experts: bool | None = None
    adapts_lone_queries: bool = True
    samples_exactly: bool = True
    sees_in_hybrids: bool = True
    sees_both_ways: bool = True

    @staticmethod
    def read(info: Mapping[str, Any]) -> Abilities:
        """Read the abilities from an engine's ``/server_info``."""
        stated = info.get("abilities")
        if stated is None:
            return _from_sglang_arguments(info)
        lists = {
            name: tuple(stated[name])
            for name in ("transports", "adapter_targets")
            if name in stated
        }
        return Abilities(**stated | lists)

    def to_json(self) -> dict[str, Any]:
        """Return the value of "abilities" in ``/server_info``."""
        return asdict(self)


SGLANG = Abilities(
    "SGLang",
    ("ipc", "broadcast", "disk"),
    "slices",
    packs_quantised=True,
    rounds_activations=True,
    adapts_lone_queries=False,
    sees_both_ways=False,
)


def sglang_sees_in_hybrids(version: str) -> bool:
    """Tell whether a version of SGLang computes images of hybrid models (Qwen3.5) correctly. Up to
    0.5.18 its kernel ``fused_qk_gemma_rmsnorm_rope_gate`` reads only one of the three rows of
    positions.
    """
    return version_of(version)[:3] >= SEES_IN_HYBRIDS


def _from_sglang_arguments(info: Mapping[str, Any]) -> Abilities:
    weights = info.get("quantization") or info.get("torchao_config")
    version = version_of(str(info.get("version")))[:3]
    return replace(
        SGLANG,
        update_sessions=version >= _UPDATE_SESSIONS,
        takes_expert_runs=WEIGHT_LOADER in (info.get("custom_weight_loader") or ())
        and info.get("init_expert_location") in (None, "trivial")
        and not any(info.get(flag) for flag in _MOVES_EXPERTS),
        quantises=weights not in (None, "", "unquant"),
        coarse_cache=(info.get("kv_cache_dtype") or "auto") not in ("auto", "bf16", "bfloat16"),
        num_ranks=int(info.get("tp_size") or 1),
        samples_exactly=all(float(info.get(name) or 1.0) >= 1.0 for name in ACCEPT_THRESHOLDS),
        sees_in_hybrids=sglang_sees_in_hybrids(str(info.get("version"))),
        **_adapters_of_sglang(info),
    )


def _adapters_of_sglang(info: Mapping[str, Any]) -> dict[str, Any]:
    # SGLang 0.5.16 loads adapters into only one replica
    if not info.get("enable_lora") or int(info.get("dp_size") or 1) > 1:
        return {}
    targets = info.get("lora_target_modules") or ()
    return {
        "adapters": True,
        "adapters_by_rank": version_of(str(info.get("version")))[:3] >= _ADAPTERS_BY_RANK,
        "adapter_rank": int(info.get("max_lora_rank") or 0),
        "adapter_targets": () if "all" in targets else tuple(sorted(targets)),
        "adapters_at_once": int(info.get("max_loras_per_batch") or 0),
        "shares_outer_experts": bool(info.get("experts_shared_outer_loras")),
    }
