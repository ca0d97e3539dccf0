"""Names that `slime doctor` compares: of network interfaces, and of weights in an ignore list."""

from __future__ import annotations

from slime.diagnosis.checks_host import absent_interfaces
from slime.diagnosis.checks_model import unspared


def test_names_of_interfaces() -> None:
    there = {"eth0": [], "eth1": [], "lo": []}
    assert absent_interfaces("eth", there) == absent_interfaces("=eth0,lo", there) == []
    assert absent_interfaces("^ib,docker", there) == absent_interfaces("", there) == []
    assert absent_interfaces("=eth", there) == ["eth"] and absent_interfaces("eth,ib0", there) == ["ib0"]


def test_the_ignore_list_of_the_guide_spares_what_is_no_linear_layer() -> None:
    weights = ["model.embed_tokens.weight", "model.layers.3.mlp.gate.weight"]
    assert unspared(weights, ["lm_head", "model.embed_tokens.weight", r"re:.*mlp\.gate\..*"]) == []
    assert unspared(weights, ["lm_head", r"re:.*mlp\.gate_proj.*", "model.embed_tokens"]) == weights[1:]
