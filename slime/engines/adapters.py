"""Low-rank adapters in engines: a name for each version, and the routes that load and use them.

    POST /load_lora_adapter_from_tensors   {"lora_name": "policy-7", "config_dict": PEFT's,
                                            "serialized_tensors": one text for all ranks}
    POST /generate                         {…, "lora_path": "policy-7"}
    POST /unload_lora_adapter              {"lora_name": "policy-6"}

The routes are SGLang's. A loaded name cannot be overwritten, and running requests keep their
adapter. So each version has its own name: requests continue while the next version is loaded, and
the name tells which weights sampled a token. A request without a name uses the base.

The embedded engine also reports fingerprints of an adapter's tensors, under the names and in the
form in which they were sent: ``POST /weights_checker {"action": "fingerprint", "lora_name":
"policy-7", "names": null}`` → ``{"fingerprints": {name: hex}}``. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from slime.models.adapters import AdapterConfig, adaptable_by_name, served_rank
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily

LOAD_ADAPTER = "/load_lora_adapter_from_tensors"
UNLOAD_ADAPTER = "/unload_lora_adapter"
#: Field of a request that names its adapter.
ADAPTER_FIELD = "lora_path"
#: Routes whose requests may name an adapter.
GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions")

#: Layers that engines fuse, in order. Engines accept their adapters only as complete sets.
FUSED_SETS = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

_PREFIX = "policy-"
_NAME = re.compile(re.escape(_PREFIX) + r"(\d+)")


def adapter_name(version: int) -> str:
    """Return the name of the policy's adapter of a weight version.

    Example:
        >>> adapter_name(7), version_of("policy-7"), version_of("translator")
        ('policy-7', 7, None)
    """
    return f"{_PREFIX}{version}"


def as_served(adapters: AdapterConfig, family: ModelFamily, spec: ModelSpec) -> AdapterConfig:
    """Return the adapters as engines hold them: of one rank, in whole sets of fused layers."""
    rank = served_rank(family, adapters)
    known = adaptable_by_name(family, spec)
    targets = frozenset(served_targets(adapters.targets, known))
    return replace(adapters, rank=rank, expert_rank=rank, targets=targets)


def served_targets(targets: Collection[str], known: Collection[str]) -> list[str]:
    """Return the layers that have an adapter in engines: the trained ones, and layers fused with
    them.

    Args:
        targets: last parts of the names of the trained layers.
        known: the same of all layers of the model that can have an adapter.

    Example:
        >>> served_targets(["q_proj", "o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"])
        ['k_proj', 'o_proj', 'q_proj', 'v_proj']
    """
    sets = [members for members in FUSED_SETS if set(members) & set(targets)]
    fused = {leaf for members in sets for leaf in members if leaf in known}
    return sorted({*targets, *fused})


def version_of(name: str) -> int | None:
    """Return the weight version of an adapter's name; None for other adapters."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def with_version(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an engine's answer with the weight version of the requested adapter.

    The engine itself reports the version that was loaded last when the answer ended.

    Args:
        answer: the answer of ``/generate`` to one or several prompts, or of an OpenAI route.
    """
    version = version_of(name)
    if version is None:
        return answer
    if isinstance(answer.get("items"), list):
        items = [
            with_version(one, name) if isinstance(one, dict) else one for one in answer["items"]
        ]
        return {**answer, "items": items}
    marked = dict(answer)
    for place in ("meta_info", "metadata"):
        if isinstance(said := answer.get(place), Mapping):
            kept = {key: value for key, value in said.items() if key != "token_weight_versions"}
            marked[place] = {**kept, "weight_version": str(version)}
    return marked
