"""Tokens that are to stop an answer are tokens of the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.preflight import check_architecture

_SHAPE = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 100, "hidden_size": 32, "head_dim": 8,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu",
    "rope_theta": 10000.0,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(_SHAPE))
    return str(tmp_path)


def test_an_id_beyond_the_vocabulary_is_refused(model: str) -> None:
    check_architecture(make_config(num_rollout=1, hf_checkpoint=model, rollout_stop_token_ids=[0, 99]))
    with pytest.raises(UserError, match="100, 5000 can stop no answer") as refused:
        check_architecture(make_config(num_rollout=1, hf_checkpoint=model, rollout_stop_token_ids=[5000, 7, 100]))
    assert "0 to 99" in str(refused.value.why)


def test_those_of_an_evaluation_set_too(model: str, tmp_path: Path) -> None:
    sets = tmp_path / "sets.yaml"
    sets.write_text(f"datasets: [{{name: a, path: {tmp_path}/rows.jsonl, rm_type: math, stop_token_ids: [101]}}]")
    with pytest.raises(UserError, match="101 can stop no answer"):
        check_architecture(make_config(num_rollout=1, hf_checkpoint=model, eval_config=str(sets), eval_interval=1))
