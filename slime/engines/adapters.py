"""Low-rank adapters as engines know them: a name for each version, and the routes that take them.

    POST /load_lora_adapter_from_tensors   {"lora_name": "policy-7", "config_dict": PEFT's,
                                            "serialized_tensors": one text for all ranks}
    POST /generate                         {…, "lora_path": "policy-7"}
    POST /unload_lora_adapter              {"lora_name": "policy-6"}

The routes are SGLang's. A name cannot be loaded over, and requests that have begun keep the adapter
of their name, so each version has a name of its own: requests go on while the next one is loaded,
and the name says exactly which weights made a token. A request without a name is for the base.

The embedded engine also says what it holds of an adapter, under the names and in the form in which
it came: ``POST /weights_checker {"action": "fingerprint", "lora_name": "policy-7", "names": null}``
→ ``{"fingerprints": {name: hex}}``. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

LOAD_ADAPTER = "/load_lora_adapter_from_tensors"
UNLOAD_ADAPTER = "/unload_lora_adapter"
#: Field of a request that names its adapter; the engines' word for it.
ADAPTER_FIELD = "lora_path"
#: Routes whose requests may name an adapter.
GENERATING = ("/generate", "/v1/chat/completions", "/v1/completions")

#: Layers that engines fuse, in their order there, and whose adapters they take as complete sets.
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


def served_targets(targets: Collection[str], known: Collection[str]) -> list[str]:
    """Return the layers that have an adapter in engines: those that are trained, and those that
    engines fuse them with.

    Args:
        targets: last parts of the names of the layers that are trained.
        known: of all layers of the model that can have one.

    Example:
        >>> served_targets(["q_proj", "o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"])
        ['k_proj', 'o_proj', 'q_proj', 'v_proj']
    """
    sets = [members for members in FUSED_SETS if set(members) & set(targets)]
    fused = {leaf for members in sets for leaf in members if leaf in known}
    return sorted({*targets, *fused})


def version_of(name: str) -> int | None:
    """Return the weight version that a name stands for; None for an adapter of another origin."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


def with_version(answer: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an engine's answer with the weight version of the adapter that was asked for.

    An engine's own word is the version that was loaded last when the answer ended.

    Args:
        answer: of ``/generate``, of one prompt or of several, or of an OpenAI route.
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
