"""Numbers that make no sense are refused by name, whatever flag declares which it takes."""

from __future__ import annotations

import doctest
import importlib
import math
from pathlib import Path
from typing import Any

import pytest

from slime.config import make_config
from slime.config.flag import FlagSpec
from slime.config.flags import all_flags
from slime.config.values import check_number
from slime.errors import UserError
from slime.rollout.eval_datasets import eval_datasets

#: Numbers that say how the model is made; those are compared with the checkpoint's. And details of
#: FP8.
MODEL = {
    "num_layers", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "hidden_size", "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels",
    "hidden_dropout", "attention_dropout", "norm_epsilon", "num_experts",
    "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk",
    "moe_router_topk_scaling_factor", "window_size", "window_attn_skip_freq", "glu_linear_offset",
    "activation_func_clamp_value", "linear_attention_freq", "linear_conv_kernel_dim",
    "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads"
}  # fmt: skip
FP8 = {
    "fp8_margin",
    "fp8_interval",
    "fp8_amax_history_len",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
}
RANGES = {dest: spec for dest, spec in all_flags().items() if spec.meta.range is not None}


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")


def refusal(**flags: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        make_config(**flags)
    return caught.value


def numbers() -> dict[str, FlagSpec]:
    """Flags of ours and of Megatron's with numbers that can be set."""
    return {
        dest: spec
        for dest, spec in all_flags().items()
        if spec.kind in ("int", "float", "int_or_list")
        and not (spec.meta.refused or spec.meta.no_effect)
        and not {"sglang", "router", "model"} & set(spec.sections)
    }


@pytest.mark.parametrize(
    "module", ["config.flag", "config.flags", "config.help", "config.values", "models.model_flags"]
)
def test_examples(module: str) -> None:
    flags = doctest.IGNORE_EXCEPTION_DETAIL
    assert (
        doctest.testmod(importlib.import_module(f"slime.{module}"), optionflags=flags).failed == 0
    )


def test_every_number_has_a_range() -> None:
    """A new flag needs a decision: a range in its declaration, or a reason here."""
    assert numbers().keys() - MODEL - FP8 == RANGES.keys()


@pytest.mark.parametrize("dest", sorted(RANGES))
def test_its_ends_and_what_lies_beyond(dest: str) -> None:
    spec = RANGES[dest]
    interval = spec.meta.range
    assert interval is not None
    step = 1 if spec.kind == "int" else 1e-6
    if math.isfinite(interval.low):
        inside = interval.low + step if interval.above else interval.low
        check_number(spec, inside)
        outside = interval.low if interval.above else interval.low - step
        if not (interval.or_minus_one and outside == -1):
            with pytest.raises(UserError, match=f"{spec.option} is "):
                check_number(spec, outside)
        with pytest.raises(UserError, match=r"at least|more than"):
            check_number(spec, interval.low - 7)
    if interval.high < math.inf:
        check_number(spec, interval.high - step if interval.below else interval.high)
        with pytest.raises(UserError, match=r"at most|less than"):
            check_number(spec, interval.high + 7)
    if spec.kind == "float":
        with pytest.raises(UserError, match="is nan"):
            check_number(spec, math.nan)
    for value in spec.default if isinstance(spec.default, tuple) else (spec.default,):
        check_number(spec, value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {
                "gamma": 2.0,
                "advantage_estimator": "reinforce_plus_plus",
                "normalize_advantages": True,
            },
            "a discount",
        ),
        ({"kl_loss_coef": -0.1, "use_kl_loss": True}, "would reward leaving the reference model"),
        ({"adam_beta2": 1.0}, "at least 0 and less than 1"),
        ({"adam_eps": 0.0}, "divided by 0"),
        ({"lr": math.inf}, "finite"),
        ({"clip_grad": -1.0}, "a norm; 0 does not clip"),
        ({"moe_aux_loss_coeff": [0.1, -0.1]}, "--moe-aux-loss-coeff is -0.1"),
        ({"seed": 2**32}, "at most 4294967295"),
        ({"eval_pass_k": [0]}, "--eval-pass-k is 0"),
        ({"seq_length": 1}, "--seq-length is 1"),
        # nearly every sample has a token below 1, so nothing would be trained on
        ({"rs_veto_threshold": 1.0, "use_rs": True}, "more than 0 and less than 1"),
    ],
)
def test_a_configuration_is_looked_at(flags: dict[str, Any], said: str) -> None:
    assert said in str(refusal(**flags))


def test_numbers_that_are_unusual_and_meant() -> None:
    open_above = {"eps_clip": 1.0, "eps_clip_high": math.inf, "tis_clip": math.inf, "use_tis": True}
    make_config(**open_above, lr=0.0, clip_grad=0.0, entropy_coef=-0.01, log_probs_chunk_size=-1)
    make_config(eval_temperature=0.0, eval_prompt_data=["a", "a.jsonl"])


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("temperature: -1", "evaluation set aime: temperature is -1"),
        ("top_p: 1.5", "evaluation set aime: top_p is 1.5"),
        ("n_samples_per_eval_prompt: many", "must be a whole number, not 'many'"),
        ("multimodal_keys: {image: picture}", "multimodal_keys, and the run reads no images"),
    ],
)
def test_numbers_of_an_evaluation_set(entry: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(f"datasets: [{{name: aime, path: aime.jsonl, {entry}}}]")
    with pytest.raises(UserError) as caught:
        eval_datasets(make_config(eval_config=str(path)))
    assert said in caught.value.what
