"""Numbers that make no sense, and flags that would be ignored, are refused by name: every row of both tables."""

from __future__ import annotations

import doctest
import math
from pathlib import Path
from typing import Any

import pytest

import slime.config.ranges
from slime.config import make_config
from slime.config.needs import ACTS_WITH
from slime.config.ranges import INTERVALS, check_number
from slime.config.registry import all_flags
from slime.config.specs import FlagSpec
from slime.errors import UserError
from slime.rollout.eval_datasets import eval_datasets

#: Numbers that say how the model is made; those are compared with the checkpoint's. And details of FP8.
MODEL = {
    "num_layers", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "hidden_size",
    "num_attention_heads", "num_query_groups", "ffn_hidden_size", "kv_channels", "hidden_dropout", "attention_dropout",
    "norm_epsilon", "num_experts", "init_method_std", "embedding_init_method_std", "qk_clip_alpha",
    "qk_clip_threshold", "moe_shared_expert_intermediate_size", "moe_layer_freq", "moe_ffn_hidden_size",
    "moe_router_topk", "moe_router_num_groups", "moe_router_group_topk", "moe_router_topk_scaling_factor",
}  # fmt: skip
FP8 = {
    "fp8_margin", "fp8_interval", "fp8_amax_history_len", "num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16",
}  # fmt: skip


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
        and not (spec.meta.refused or spec.meta.refused_at_launch or spec.meta.no_effect)
        and not {"sglang", "router", "model"} & set(spec.sections)
    }


# -- ranges ------------------------------------------------------------------------------------------------


def test_examples() -> None:
    assert doctest.testmod(slime.config.ranges).failed == 0


def test_every_number_has_a_range() -> None:
    """A new flag needs a decision: a row in the table, or a reason here."""
    assert numbers().keys() - MODEL - FP8 == INTERVALS.keys()


@pytest.mark.parametrize("dest", sorted(INTERVALS))
def test_its_ends_and_what_lies_beyond(dest: str) -> None:
    interval, spec = INTERVALS[dest], all_flags()[dest]
    step = 1 if spec.kind == "int" else 1e-6
    if math.isfinite(interval.low):
        inside = interval.low + step if interval.above else interval.low
        check_number(dest, inside)
        outside = interval.low if interval.above else interval.low - step
        if not (interval.or_minus_one and outside == -1):
            with pytest.raises(UserError, match=f"{spec.option} is "):
                check_number(dest, outside)
        with pytest.raises(UserError, match=r"at least|more than"):
            check_number(dest, interval.low - 7)
    if interval.high < math.inf:
        check_number(dest, interval.high - step if interval.below else interval.high)
        with pytest.raises(UserError, match=r"at most|less than"):
            check_number(dest, interval.high + 7)
    if spec.kind == "float":
        with pytest.raises(UserError, match="is nan"):
            check_number(dest, math.nan)
    for value in spec.default if isinstance(spec.default, tuple) else (spec.default,):
        check_number(dest, value)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"gamma": 2.0, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True}, "a discount"),
        ({"kl_loss_coef": -0.1, "use_kl_loss": True}, "would reward leaving the reference model"),
        ({"adam_beta2": 1.0}, "at least 0 and less than 1"),
        ({"adam_eps": 0.0}, "divided by 0"),
        ({"lr": math.inf}, "finite"),
        ({"clip_grad": -1.0}, "a norm; 0 does not clip"),
        ({"moe_aux_loss_coeff": [0.1, -0.1]}, "--moe-aux-loss-coeff is -0.1"),
        ({"seed": 2**32}, "at most 4294967295"),
        ({"eval_pass_k": [0]}, "--eval-pass-k is 0"),
        ({"seq_length": 1}, "--seq-length is 1"),
    ],
)
def test_a_configuration_is_looked_at(flags: dict[str, Any], said: str) -> None:
    assert said in str(refusal(**flags))


def test_numbers_that_are_unusual_and_meant() -> None:
    open_above = {"eps_clip": 1.0, "eps_clip_high": math.inf, "tis_clip": math.inf, "use_tis": True}
    make_config(**open_above, lr=0.0, clip_grad=0.0, entropy_coef=-0.01, eval_temperature=0.0, log_probs_chunk_size=-1)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("temperature: -1", "evaluation set aime: temperature is -1"),
        ("top_p: 1.5", "evaluation set aime: top_p is 1.5"),
        ("n_samples_per_eval_prompt: many", "must be a whole number, not 'many'"),
    ],
)
def test_numbers_of_an_evaluation_set(entry: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "eval.yaml"
    path.write_text(f"datasets: [{{name: aime, path: aime.jsonl, {entry}}}]")
    with pytest.raises(UserError) as caught:
        eval_datasets(make_config(eval_config=str(path)))
    assert said in caught.value.what


# -- flags that need others --------------------------------------------------------------------------------


def other_than_default(spec: FlagSpec) -> Any:
    if spec.kind == "bool":
        return not spec.default
    if spec.choices:
        return next(choice for choice in spec.choices if choice != spec.default)
    if spec.kind == "str":
        return "x"
    return 7 if spec.dest not in INTERVALS or 7 in INTERVALS[spec.dest] else 0.5


@pytest.mark.parametrize("dest", sorted(ACTS_WITH))
def test_a_flag_that_would_be_ignored_is_refused(dest: str) -> None:
    spec = all_flags()[dest]
    needed, value = ACTS_WITH[dest]
    error = refusal(**{dest: other_than_default(spec)})
    asked = all_flags()[needed].option + (f" {value}" if value else "")
    assert error.what == f"{spec.option} has no effect without {asked}" and f"pass {asked} too" in error.fix
    make_config(**{dest: spec.default})


@pytest.mark.parametrize(
    "flags",
    [
        {"loss_scale": 128.0, "fp16": True},
        {"exp_avg_dtype": "bf16", "use_precision_aware_optimizer": True},
        {"optimizer_offload_fraction": 0.5, "optimizer_cpu_offload": True},
        {"overlap_param_gather": True, "overlap_grad_reduce": True, "ddp_bucket_size": 1},
        {"lr_decay_style": "WSD", "lr_wsd_decay_iters": 3, "lr_wsd_decay_style": "linear"},
        {"sgd_momentum": 0.5, "optimizer": "sgd"},
        {"start_weight_decay": 0.0, "end_weight_decay": 0.1, "weight_decay_incr_style": "linear"},
        {"gamma": 0.9, "custom_advantage_function_path": "a.b"},
        {"gamma": 0.9, "advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True},
    ],
)
def test_together_they_are_accepted(flags: dict[str, Any]) -> None:
    assert make_config(**flags).warnings == ()


OVERLAP = {"overlap_param_gather": True, "overlap_grad_reduce": True}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({**OVERLAP, "use_distributed_optimizer": False}, "--overlap-param-gather has no effect without --use-dist"),
        ({**OVERLAP, "optimizer": "sgd"}, "--overlap-param-gather has no effect with --optimizer sgd"),
        ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": False}, "without --use-distributed"),
        ({"microbatch_group_size_per_vp_stage": 4}, "without --num-virtual-stages-per-pipeline-rank"),
        ({"gamma": 0.9}, "--gamma has no effect with --advantage-estimator grpo"),
        ({"eps_clip_c": 3.0, "advantage_estimator": "cispo"}, "--eps-clip-c has no effect"),
        ({"tis_clip_low": 3.0, "use_tis": True}, "--tis-clip-low 3 is more than --tis-clip 2"),
        ({"lr_decay_iters": 3, "lr_decay_samples": 3}, "--lr-decay-iters and --lr-decay-samples say the same"),
        ({"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "say the same thing"),
        ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters"),
        ({"start_weight_decay": 0.2, "end_weight_decay": 0.1}, "only rises"),
        ({"end_weight_decay": 0.1}, "--weight-decay-incr-style is constant"),
        ({"softmax_type": "learnable"}, "no model family of this version has such layers"),
        ({"qk_l2_norm": True}, "no model family of this version has such layers"),
        ({"apply_rope_fusion": True}, "the trainer's own rotation"),
        ({"bias_activation_fusion": True}, "SwiGLU is one kernel anyway"),
        ({"loss_scale": 128.0}, "--loss-scale 128 needs --fp16"),
        ({"tp_comm_overlap": True}, "another shape at each step"),
        ({"perform_initialization": False}, "weights are loaded from a checkpoint"),
        ({"num_distributed_optimizer_instances": 2}, "sharded over all replicas"),
    ],
)
def test_what_would_be_ignored_or_fail_later(flags: dict[str, Any], said: str) -> None:
    assert said in str(refusal(**flags))


def test_what_is_about_speed_alone_is_said_and_accepted() -> None:
    config = make_config(cross_entropy_loss_fusion=True, persist_layer_norm=False, initial_loss_scale=4096.0)
    assert config.warnings[0].startswith("--cross-entropy-loss-fusion has no effect: log-probs are computed")
    assert config.warnings[1:] == ("--initial-loss-scale: no effect without --fp16",)
