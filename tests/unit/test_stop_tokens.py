"""Tokens that are to stop an answer are tokens of the model, its files agree on them, and answers
fit its context."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.errors import UserError
from slime.log import get_logger
from slime.prompts.tokenizer import end_token_conflicts
from slime.run.preflight import check_architecture, check_context
from tests.support.prompt_fixtures import make_tokenizer

_SHAPE = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "head_dim": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(_SHAPE))
    return str(tmp_path)


def test_an_id_beyond_the_vocabulary_is_refused(model: str) -> None:
    check_architecture(
        make_config(num_rollout=1, hf_checkpoint=model, rollout_stop_token_ids=[0, 99])
    )
    with pytest.raises(UserError, match="100, 5000 can stop no answer") as refused:
        check_architecture(
            make_config(num_rollout=1, hf_checkpoint=model, rollout_stop_token_ids=[5000, 7, 100])
        )
    assert "0 to 99" in str(refused.value.why)


def test_those_of_an_evaluation_set_too(model: str, tmp_path: Path) -> None:
    sets = tmp_path / "sets.yaml"
    sets.write_text(
        f"datasets: [{{name: a, path: {tmp_path}/rows.jsonl, rm_type: math, stop_token_ids: "
        f"[101]}}]"
    )
    with pytest.raises(UserError, match="101 can stop no answer"):
        check_architecture(
            make_config(num_rollout=1, hf_checkpoint=model, eval_config=str(sets), eval_interval=1)
        )


# -- context ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({"rollout_max_response_len": 64}, "--rollout-max-response-len 64 does not fit"),
        ({"rollout_max_response_len": 1024}, "the model's context of 64 tokens"),
        ({"rollout_max_response_len": 1024, "rollout_max_context_len": 512}, "does not fit"),
        (
            {
                "rollout_max_response_len": 8,
                "eval_max_response_len": 100,
                "eval_prompt_data": ("a", "b"),
                "eval_interval": 1,
            },
            "--eval-max-response-len 100",
        ),
        ({"rollout_max_response_len": 1024, "rollout_max_context_len": 64}, ""),
        ({"rollout_max_response_len": 32}, ""),
        ({"rollout_max_response_len": 63, "loss_type": "sft_loss"}, ""),
    ],
)
def test_answers_longer_than_the_models_context_are_refused(
    model: str, flags: dict[str, Any], refused: str
) -> None:
    config = make_config(num_rollout=1, hf_checkpoint=model, **flags)
    if not refused:
        return check_context(config)
    with pytest.raises(UserError, match=refused) as error:
        check_context(config)
    assert f"engines take 64 tokens by {model}" in error.value.why


@pytest.mark.parametrize(("prompt", "is_warned"), [(8, False), (32, False), (33, True)])
def test_prompts_and_answers_that_are_longer_together_are_warned_of(
    model: str,
    prompt: int,
    is_warned: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(get_logger("slime"), "propagate", True)
    config = make_config(
        num_rollout=1,
        hf_checkpoint=model,
        rollout_max_prompt_len=prompt,
        rollout_max_response_len=32,
    )
    with caplog.at_level(logging.WARNING):
        check_context(config)
    assert ("--rollout-max-context-len 64" in caplog.text) == is_warned


# -- end tokens ------------------------------------------------------------------------------------


def ends(folder: Path, config: Any, generation: Any) -> list[str]:
    tokenizer = make_tokenizer()
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        written = {} if value is None else {"eos_token_id": value}
        (folder / name).write_text(json.dumps(written))
    return end_token_conflicts(tokenizer, str(folder))


@pytest.mark.parametrize("value", [None, "own", ["own", 3]])
def test_files_that_name_the_tokenizers_end_token_agree(value: Any, tmp_path: Path) -> None:
    own = make_tokenizer().eos_token_id
    ids = (
        [own if one == "own" else one for one in value]
        if isinstance(value, list)
        else own
        if value
        else None
    )
    assert ends(tmp_path, ids, ids) == []


@pytest.mark.parametrize(("config", "generation"), [(3, None), (None, 3), ([3, 4], None), (3, 4)])
def test_files_that_name_another_end_token_are_told_with_what_follows(
    config: Any, generation: Any, tmp_path: Path
) -> None:
    tokenizer = make_tokenizer()
    assert tokenizer.eos_token_id not in (3, 4)
    (told,) = ends(tmp_path, config, generation)
    assert f"tokenizer {tokenizer.eos_token!r} ({tokenizer.eos_token_id})" in told
    assert ("config.json " in told.replace("generation_config.json", "")) == (config is not None)
    assert ("generation_config.json" in told) == (generation is not None)
    assert (
        "Generation stops at each of" in told
        and "cuts answers" in told
        and "correct eos_token_id in" in told
    )


# -- longrope --------------------------------------------------------------------------------------

_LONGROPE = {
    "model_type": "phi3",
    "architectures": ["Phi3ForCausalLM"],
    "max_position_embeddings": 512,
    "original_max_position_embeddings": 64,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
}


@pytest.mark.parametrize(
    ("flags", "refused"),
    [
        ({}, "no flag bounds the length"),
        ({"rollout_max_response_len": 32}, "no flag bounds the length"),
        ({"rollout_max_context_len": 64}, ""),
        ({"rollout_max_context_len": 65}, "--rollout-max-context-len: 65"),
        ({"rollout_max_prompt_len": 32, "rollout_max_response_len": 32}, ""),
        (
            {"rollout_max_prompt_len": 33, "rollout_max_response_len": 32},
            "--rollout-max-prompt-len and --rollout-max-response-len: 65",
        ),
        ({"seq_length": 64}, ""),
        ({"loss_type": "sft_loss", "rollout_max_context_len": 64}, "no flag bounds the length"),
        ({"loss_type": "sft_loss", "seq_length": 64}, ""),
    ],
)
def test_sequences_that_may_be_longer_than_longrope_is_computed_for_are_refused(
    model: str, flags: dict[str, Any], refused: str
) -> None:
    (Path(model) / "config.json").write_text(json.dumps(_SHAPE | _LONGROPE))
    config = make_config(num_rollout=1, hf_checkpoint=model, **flags)
    if not refused:
        return check_architecture(config)
    with pytest.raises(UserError, match=f"longer than 64 tokens(.|\n)*{refused}") as error:
        check_architecture(config)
    assert error.value.fix == "pass --seq-length 64"
