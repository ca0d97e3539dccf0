"""What follows from the flags: derived values and their formulas, and the contradictions that are
refused."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.config import Config, FlatArgs, make_config, parse_args
from slime.config.flags import own_flags
from slime.errors import UserError
from slime.processes.host import num_gpus


@pytest.fixture(autouse=True)
def cpu_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIME_NUM_GPUS", "0")
    monkeypatch.delenv("NCCL_TIMEOUT", raising=False)
    monkeypatch.delenv("SLIME_DEBUG", raising=False)


def refused(expected: str, **flags: Any) -> None:
    with pytest.raises(UserError) as caught:
        make_config(**flags)
    assert expected in str(caught.value)


# -- the batch equation ----------------------------------------------------------------------------


def test_batch_sizes_from_steps_and_back() -> None:
    config = make_config(rollout_batch_size=32, n_samples_per_prompt=8, num_steps_per_rollout=2)
    assert config.train.global_batch_size == 128
    assert config.origins["global_batch_size"].endswith("= 32 × 8 ÷ 2")
    config = make_config(rollout_batch_size=32, n_samples_per_prompt=8, global_batch_size=256)
    assert config.train.num_steps_per_rollout == 1
    config = make_config(rollout_batch_size=32, n_samples_per_prompt=8)
    assert (config.train.global_batch_size, config.train.num_steps_per_rollout) == (256, 1)


def test_contradiction_prints_the_equation_with_the_numbers() -> None:
    with pytest.raises(UserError) as caught:
        make_config(
            rollout_batch_size=32,
            n_samples_per_prompt=8,
            global_batch_size=100,
            num_steps_per_rollout=2,
        )
    text = str(caught.value)
    assert (
        "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout"
        in text
    )
    assert "32 × 8 = 256, but 100 × 2 = 200" in text
    assert "--global-batch-size 128" in text and "--rollout-batch-size 25" in text
    sizes = {"rollout_batch_size": 32, "n_samples_per_prompt": 8}
    refused(
        "32 × 8 = 256 is not a multiple of global_batch_size 100", **sizes, global_batch_size=100
    )
    refused(
        "pass --num-steps-per-rollout 2 or --num-steps-per-rollout 4",
        **sizes,
        num_steps_per_rollout=3,
    )
    refused("--rollout-batch-size is 0", rollout_batch_size=0)


RUN = ("--hf-checkpoint", "m", "--prompt-data", "p.jsonl", "--num-rollout", "3")


def of_run(*words: str) -> Config:
    return parse_args([*RUN, *words])


@pytest.mark.parametrize(
    ("words", "prompts", "samples", "batch", "steps"),
    [
        ("", 32, 8, 256, 1),
        ("--rollout-batch-size 16", 16, 8, 128, 1),
        ("--n-samples-per-prompt 4", 32, 4, 128, 1),
        ("--num-steps-per-rollout 2", 32, 8, 128, 2),
        ("--global-batch-size 64", 8, 8, 64, 1),
        ("--global-batch-size 64 --num-steps-per-rollout 2", 16, 8, 64, 2),
        # sizes that say how many samples there are
        ("--rollout-batch-size 32 --global-batch-size 128", 32, 4, 128, 1),
        ("--rollout-batch-size 32 --global-batch-size 64 --num-steps-per-rollout 4", 32, 8, 64, 4),
        # what nothing built in compares has one sample, as it always had
        ("--loss-type sft_loss", 32, 1, 32, 1),
        ("--advantage-estimator reinforce_plus_plus --normalize-advantages", 32, 1, 32, 1),
        ("--disable-rewards-normalization", 32, 1, 32, 1),
        ("--custom-reward-post-process-path a.b", 32, 1, 32, 1),
        ("--data-source-path a.B", 32, 1, 32, 1),
        (
            "--advantage-estimator reinforce_plus_plus_baseline --normalize-advantages",
            32,
            8,
            256,
            1,
        ),
    ],
)
def test_what_a_run_has_of_the_equation_where_flags_say_less(
    words: str, prompts: int, samples: int, batch: int, steps: int
) -> None:
    config = of_run(*words.split())
    rollout, train = config.rollout, config.train
    assert (rollout.rollout_batch_size, rollout.n_samples_per_prompt) == (prompts, samples)
    assert (train.global_batch_size, train.num_steps_per_rollout) == (batch, steps)


@settings(max_examples=100)
@given(prompts=st.integers(1, 24), batch=st.integers(1, 24))
def test_sizes_of_scripts_that_left_the_samples_out_keep_their_meaning(
    prompts: int, batch: int
) -> None:
    """One sample where one fits, as before there was another default."""
    named = {"rollout_batch_size": prompts, "global_batch_size": batch}
    if prompts % batch == 0:
        # else one sample is refused, which was useless before
        own = ("--custom-generate-function-path", "a.b")
        config = of_run(
            "--rollout-batch-size", str(prompts), "--global-batch-size", str(batch), *own
        )
        assert config.rollout.n_samples_per_prompt == 1
        assert (
            config.train.num_steps_per_rollout == make_config(**named).train.num_steps_per_rollout
        )


def test_prompts_of_a_run_are_shuffled_where_they_are_drawn_here() -> None:
    assert of_run().data.rollout_shuffle and of_run("--loss-type", "sft_loss").data.rollout_shuffle
    assert of_run().origins["rollout_shuffle"].startswith("derived: ")
    for words in ("--no-rollout-shuffle", "--streaming-data", "--data-source-path a.B"):
        assert not of_run(*words.split()).data.rollout_shuffle
    assert of_run("--streaming-data", "--rollout-shuffle").data.rollout_shuffle
    assert not make_config().data.rollout_shuffle, "a part of the system has no defaults of a run"


sizes = st.integers(1, 24)
optional = st.none() | sizes


@settings(max_examples=150)
@given(prompts=optional, samples=sizes, batch=optional, steps=optional)
def test_the_equation_holds_for_whatever_is_accepted(
    prompts: int | None, samples: int, batch: int | None, steps: int | None
) -> None:
    named = {
        "rollout_batch_size": prompts,
        "n_samples_per_prompt": samples,
        "global_batch_size": batch,
        "num_steps_per_rollout": steps,
    }
    if batch is not None and steps is not None:
        if prompts is None:
            possible = (batch * steps) % samples == 0
        else:
            possible = prompts * samples == batch * steps
    else:
        # of a missing rollout_batch_size there is always a fitting one, except with a batch alone
        total = prompts * samples if prompts is not None else (batch or samples) * (steps or 1)
        possible = total % samples == 0 and total % (batch or steps or 1) == 0
    try:
        config = make_config(**named)
    except UserError:
        assert not possible
        return
    assert possible
    train, rollout = config.train, config.rollout
    assert (
        rollout.rollout_batch_size * samples
        == train.global_batch_size * train.num_steps_per_rollout
    )
    for name, value in named.items():
        assert value is None or {**vars(train), **vars(rollout)}[name] == value


# -- round trips -----------------------------------------------------------------------------------

settings_of_runs = st.fixed_dictionaries(
    {},
    optional={
        "rollout_batch_size": sizes,
        "n_samples_per_prompt": st.integers(1, 8),
        "rollout_temperature": st.floats(0.1, 2.0),
        "rollout_stop": st.lists(st.text(max_size=5), max_size=3),
        "colocate": st.booleans(),
        "offload_train": st.just(False),
        "actor_num_gpus_per_node": st.just(1),
        "reward_key": st.text(min_size=1, max_size=5),
        "rollout_max_context_len": st.integers(8, 10000),
        "eps_clip": st.floats(0.01, 0.5),
        "train_env_vars": st.dictionaries(
            st.text(min_size=1, max_size=4), st.text(max_size=4), max_size=2
        ),
        "moe_layer_freq": st.sampled_from([2, "([0]*1+[1]*2)"]),
        "sglang_mem_fraction_static": st.floats(0.1, 0.9),
        "sglang_cuda_graph_bs": st.lists(st.integers(1, 8), min_size=1, max_size=3),
        "norm_epsilon": st.floats(1e-7, 1e-3),
        "router_policy": st.sampled_from(["random", "round_robin"]),
        "recompute_activations": st.booleans(),
        "use_kl_loss": st.booleans(),
        "hf_checkpoint": st.just("model"),
        "fp32": st.booleans(),
    },
)


@settings(max_examples=25)
@given(flags=settings_of_runs)
def test_saved_and_resolved_again_nothing_changes(
    flags: dict[str, Any], tmp_path_factory: Any
) -> None:
    config = make_config(**flags)
    path = tmp_path_factory.getbasetemp() / "config.json"
    config.save(path)
    assert Config.load(path) == config
    # every derived value given: resolve has nothing to change
    again = make_config(**config.values())
    assert again.values() == config.values()
    assert make_config(**flags, run_name=config.observe.run_name).values() == config.values()
    assert pickle.loads(pickle.dumps(config)) == config


@settings(max_examples=20)
@given(flags=settings_of_runs)
def test_origins_cover_every_flag(flags: dict[str, Any]) -> None:
    config = make_config(**flags)
    assert set(own_flags()) <= set(config.origins)
    for dest in flags:
        assert config.origins[dest] == "flag"
    for dest, spec in own_flags().items():
        origin = config.origins[dest]
        assert origin in ("flag", "default") or origin.startswith("derived: ")
        if origin == "default":
            assert config.values()[dest] == spec.default
        if origin.startswith("derived"):
            assert spec.meta.derived or dest == "rollout_max_context_len"


def test_what_is_written_to_disk(tmp_path: Path) -> None:
    flags = {
        "use_wandb": True,
        "wandb_key": "secret",
        "num_layers": 3,
        "router_oracle_password": "secret",
    }
    config = make_config(
        rollout_batch_size=2, train_env_vars={"HF_TOKEN": "secret", "A": "b"}, **flags
    )
    config.save(tmp_path / "config.json")
    text = (tmp_path / "config.json").read_text()
    data = json.loads(text)
    assert data["rollout"]["rollout_batch_size"] == 2 and data["megatron"]["num_layers"] == 3
    assert data["origins"]["rollout_batch_size"] == "flag"
    assert "secret" not in text and "secret" not in config.describe()
    assert (
        config.observe.wandb_key == "secret" and config.engine.router["oracle_password"] == "secret"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_broken_config_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in ("{", "[]", '{"origins": {}}'):
        path.write_text(text)
        with pytest.raises(UserError, match="not a configuration of a run"):
            Config.load(path)
    config = make_config()
    config.save(path)
    data = json.loads(path.read_text())
    data["train"]["brand_new"], data["origins"]["brand_new"] = 1, "flag"
    del data["rollout"]["rollout_seed"], data["checksum"]
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="not known here: brand_new; missing: rollout_seed"):
        Config.load(path)


def test_config_is_frozen() -> None:
    config = make_config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 3  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train = None  # type: ignore[misc, assignment]


# -- derived values --------------------------------------------------------------------------------


def test_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    assert (config.cluster.actor_num_gpus_per_node, config.cluster.rollout_num_gpus) == (1, 1)
    assert "no GPU on this host" in config.origins["actor_num_gpus_per_node"]
    config = make_config(
        colocate=True, actor_num_nodes=2, actor_num_gpus_per_node=4, global_batch_size=8
    )
    assert config.cluster.rollout_num_gpus == 8 and config.origins["rollout_num_gpus"].endswith(
        "= 2 × 4"
    )
    assert config.cluster.offload_train and config.cluster.offload_rollout
    assert not make_config(colocate=True, offload_train=False).cluster.offload_train
    assert make_config(rollout_num_gpus_per_engine=4).cluster.rollout_num_gpus == 4
    monkeypatch.setenv("SLIME_NUM_GPUS", "4")
    assert make_config(global_batch_size=8).cluster.actor_num_gpus_per_node == 4


def test_counting_gpus(tmp_path: Path) -> None:
    assert num_gpus({}, tmp_path) == 0
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert num_gpus({}, tmp_path) == 2
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "1"}, tmp_path) == 1
    assert num_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert num_gpus({"CUDA_VISIBLE_DEVICES": "0,1", "SLIME_NUM_GPUS": "7"}, tmp_path) == 7
    with pytest.raises(UserError, match="SLIME_NUM_GPUS is 'two'"):
        num_gpus({"SLIME_NUM_GPUS": "two"}, tmp_path)


def test_the_engine_that_auto_stands_for_is_told_as_derived() -> None:
    assert make_config(rollout_engine="auto").origins["rollout_engine"].startswith("derived: ")


def test_nccl_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_config().cluster.distributed_timeout_minutes == 10
    monkeypatch.setenv("NCCL_TIMEOUT", "1800")
    config = make_config()
    assert config.cluster.distributed_timeout_minutes == 30
    assert config.origins["distributed_timeout_minutes"] == "derived: NCCL_TIMEOUT ÷ 60 = 1800 ÷ 60"
    assert make_config(distributed_timeout_minutes=5).cluster.distributed_timeout_minutes == 5
    monkeypatch.setenv("NCCL_TIMEOUT", "soon")
    refused("NCCL_TIMEOUT is 'soon'")


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make_config().observe.log_level == "INFO"
    monkeypatch.setenv("SLIME_DEBUG", "1")
    assert make_config().observe.log_level == "DEBUG"
    assert make_config(log_level="ERROR").observe.log_level == "ERROR"


def test_run_name(tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text("rollout_batch_size: 2\n")
    assert make_config(config=str(recipe), hf_checkpoint="m").observe.run_name.startswith("tiny-2")
    assert make_config(hf_checkpoint="/models/Qwen3-0.6B/").observe.run_name.startswith(
        "Qwen3-0.6B-2"
    )
    assert make_config(run_name="mine").observe.run_name == "mine"


def test_lengths_follow_from_seq_length() -> None:
    config = make_config(seq_length=2048)
    rollout = config.rollout
    assert (rollout.rollout_max_context_len, config.data.rollout_max_prompt_len) == (2048, 2047)
    assert rollout.rollout_max_response_len == 2047
    assert make_config().rollout.rollout_max_response_len == 1024
    refused(
        "--rollout-max-context-len 4096 is more than --seq-length 2048",
        seq_length=2048,
        rollout_max_context_len=4096,
    )
    refused("leaves no token to generate", rollout_max_context_len=100, rollout_max_prompt_len=100)


def test_evaluation_follows_rollout() -> None:
    data: dict[str, Any] = {"eval_prompt_data": ["a", "a.jsonl"]}
    config = make_config(
        **data,
        rollout_temperature=0.7,
        input_key="q",
        label_key="a",
        reward_key="score",
        eval_top_p=0.5,
    )
    assert config.eval.eval_temperature == 0.7 and config.eval.eval_input_key == "q"
    assert config.eval.eval_label_key == "a" and config.reward.eval_reward_key == "score"
    assert (
        config.eval.eval_top_p == 0.5
        and make_config(**data, eval_temperature=0).eval.eval_temperature == 0
    )


@pytest.mark.parametrize(
    ("flags", "warns"),
    [
        ({"advantage_estimator": "rloo", "disable_rewards_normalization": True}, True),
        ({"advantage_estimator": "maxrl", "custom_advantage_function_path": "a.b"}, True),
        ({"advantage_estimator": "dr_grpo", "custom_advantage_function_path": "a.b"}, False),
        ({"advantage_estimator": "rloo"}, False),
    ],
)
def test_an_estimator_of_which_nothing_is_left_is_told(flags: dict[str, Any], warns: bool) -> None:
    warnings = make_config(**flags).warnings
    assert any("has no effect with --" in warning for warning in warnings) is warns


def test_a_policy_distils_greedy_answers() -> None:
    flags = {"use_opd": True, "opd_teacher_load": ["x"], "opd_loss": "reverse_kl"}
    assert make_config(**flags, rollout_top_k=1).algorithm.use_sampling_mask


def test_an_evaluation_is_not_cut_to_what_bounds_the_sampling_mask() -> None:
    flags = {"rollout_top_p": 0.9, "rollout_engine": "sglang"}
    config = make_config(**flags)
    assert (config.rollout.rollout_top_k, config.eval.eval_top_k) == (512, -1)
    assert config.eval.eval_top_p == 0.9
    config = make_config(**flags, rollout_top_k=40)
    assert config.eval.eval_top_k == 40


def test_dumps() -> None:
    config = make_config(dump_details="d/")
    assert config.debug.save_debug_rollout_data == "d/rollout_data/{rollout_id}.pt"
    assert config.debug.save_debug_train_data == "d/train_data/{rollout_id}.pt"
    assert make_config(load_debug_rollout_data="x_{rollout_id}.pt").debug.debug_train_only
    refused(
        "are both x.pt", save_debug_rollout_data="x.pt", save_debug_train_data="x.pt", num_rollout=1
    )
    for asked, taken in (("d.d/a.pt", "d.d/a_{rollout_id}.pt"), ("a", "a_{rollout_id}")):
        config = make_config(save_debug_rollout_data=asked, num_rollout=3)
        (said,) = [warning for warning in config.warnings if "--save-debug-rollout-data" in warning]
        assert config.debug.save_debug_rollout_data == taken and f"{taken} is taken" in said
    assert (
        make_config(save_debug_rollout_data="a.pt", num_rollout=1).debug.save_debug_rollout_data
        == "a.pt"
    )
    refused("there is no {rolloutid}", save_debug_rollout_data="{rolloutid}.pt", num_rollout=3)
    refused("cannot be filled in", save_debug_rollout_data="{.pt", num_rollout=3)
    assert make_config(save_debug_train_data="{rollout_id:04d}_{rank:02d}.pt", num_rollout=3)
    assert make_config(save_debug_rollout_data="d/{rollout_id:04d}.pt", save_hf="hf", num_rollout=3)
    both = {"save_debug_rollout_data": "a_{rollout_id}.pt", "save_debug_train_data": "a_{rank}.pt"}
    refused("for rollout 0 that is a_0.pt", **both, num_rollout=1)
    in_this_folder = make_config(output_dir="", run_name="r", dump_details="{run}/all")
    assert in_this_folder.debug.dump_details == "./r/all"
    here = {"output_dir": "out", "run_name": "a{b}"}
    debug = make_config(
        **here, dump_details="{run}/all", load_debug_rollout_data="{run}/{rollout_id}.pt"
    ).debug
    assert (
        debug.dump_details == "out/a{b}/all"
        and debug.load_debug_rollout_data == "out/a{{b}}/{rollout_id}.pt"
    )
    assert debug.save_debug_train_data == "out/a{{b}}/all/train_data/{rollout_id}.pt"
    refused("exclude each other", debug_rollout_only=True, load_debug_rollout_data="x{rollout_id}")


def test_what_a_missing_half_would_need_is_not_asked_for() -> None:
    eight = {"tensor_model_parallel_size": 8, "actor_num_gpus_per_node": 8, "num_gpus_per_node": 8}
    few = {"rollout_num_gpus": 1, "debug_rollout_only": True}
    assert make_config(**{**eight, "actor_num_gpus_per_node": 2, "num_gpus_per_node": 1}, **few)
    refused("cannot be divided by 8", **{**eight, "actor_num_gpus_per_node": 2})
    engines = {"rollout_num_gpus": 24, "rollout_num_gpus_per_engine": 16, "num_gpus_per_node": 8}
    assert make_config(
        **engines,
        load_debug_rollout_data="{rollout_id}.pt",
        save_debug_rollout_data="{rollout_id}.pt",
    )
    assert make_config(**engines, loss_type="sft_loss", n_samples_per_prompt=1)
    refused("not a multiple of", **engines)


def test_recompute_activations_recomputes_layers() -> None:
    megatron = make_config(recompute_activations=True).megatron
    assert (
        megatron.recompute_granularity,
        megatron.recompute_method,
        megatron.recompute_num_layers,
    ) == ("full", "uniform", 1)
    chosen = make_config(recompute_activations=True, recompute_granularity="selective").megatron
    assert chosen.recompute_granularity == "selective" and chosen.recompute_method is None


def test_group_statistics_of_single_samples() -> None:
    assert make_config(n_samples_per_prompt=2).algorithm.grpo_std_normalization
    assert not make_config(n_samples_per_prompt=1).algorithm.grpo_std_normalization
    assert not make_config(
        n_samples_per_prompt=2, disable_grpo_std_normalization=True
    ).algorithm.grpo_std_normalization


def test_reference_model() -> None:
    assert make_config(use_kl_loss=True, hf_checkpoint="m").checkpoint.ref_load == "m"
    assert make_config(hf_checkpoint="m").checkpoint.ref_load is None


def test_a_weight_decay_that_its_schedule_replaces_is_warned_of() -> None:
    ends = {"start_weight_decay": 0.0, "end_weight_decay": 0.1}
    flags = {"weight_decay": 0.5, "weight_decay_incr_style": "linear"}
    (warning,) = make_config(**flags, **ends).warnings
    assert warning.startswith("--weight-decay 0.5 has no effect: it goes from --start-weight-decay")
    assert make_config(**flags, start_weight_decay=0.0).megatron.end_weight_decay == 0.5
    assert make_config(**flags, start_weight_decay=0.0).warnings == ()
    assert make_config(weight_decay_incr_style="linear", **ends).warnings == ()


def test_warning_on_what_the_embedded_engine_cannot_honour() -> None:
    config = make_config(
        sglang_mem_fraction_static=0.8, sglang_disable_cuda_graph=True, router_policy="random"
    )
    assert config.warnings[0].endswith(
        "left out: --sglang-disable-cuda-graph, --sglang-mem-fraction-static"
    )
    assert make_config(router_policy="random").warnings == ()


def test_warning_on_options_of_engines_that_are_not_there() -> None:
    passed_on = {"sglang_mem_fraction_static": 0.5, "router_policy": "random"}
    (warning,) = make_config(loss_type="sft_loss", **passed_on).warnings
    assert warning == (
        "there is no engine, as nothing is generated; left out: --router-policy, "
        "--sglang-mem-fraction-static"
    )
    evaluated = make_config(loss_type="sft_loss", eval_prompt_data=("a", "a.jsonl"), **passed_on)
    assert not any("--router-policy" in warning for warning in evaluated.warnings)


@pytest.mark.parametrize("reward", [{}, {"rm_type": "math"}, {"eval_config": "sets.yaml"}])
def test_rows_and_evaluation_sets_may_ask_a_reward_model_of_their_own(
    reward: dict[str, Any],
) -> None:
    """Their rm_type wins over --rm-type, so an address for it is never refused."""
    config = make_config(rm_url="http://judge:1", **reward)
    assert config.reward.rm_url == "http://judge:1"
    assert [w for w in config.warnings if "rows and evaluation sets" in w]


def test_warning_on_cispo() -> None:
    assert "CISPO" in make_config(advantage_estimator="cispo").warnings[0]
    assert make_config(advantage_estimator="cispo", eps_clip=1.0).warnings == ()


def test_what_depends_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    refused("--attention-backend flash is not available without GPUs", attention_backend="flash")
    refused("--distributed-backend nccl cannot be used", distributed_backend="nccl")
    assert make_config(offload_optimizer_states=True, attention_backend="unfused") is not None
    monkeypatch.setenv("SLIME_NUM_GPUS", "1")
    assert make_config(attention_backend="flash", distributed_backend="nccl") is not None
    refused("--attention-backend unfused is not available on GPUs", attention_backend="unfused")
    assert make_config(offload_optimizer_states=True) is not None
    assert make_config(offload_train=True, colocate=True).cluster.offload_train
    engine = make_config(transformer_impl="transformer_engine", attention_backend="fused")
    assert engine.train.attention_backend == "fused"


# -- what would change speed alone, or nothing -----------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "section", "taken"),
    [
        (
            {"moe_token_dispatcher_type": "flex"},
            "transformer",
            {"moe_token_dispatcher_type": "alltoall"},
        ),
        (
            {"moe_token_dispatcher_type": "allgather"},
            "transformer",
            {"moe_token_dispatcher_type": "alltoall"},
        ),
        ({"sglang_moe_a2a_backend": "deepep"}, "sglang", {"moe_a2a_backend": "none"}),
    ],
)
def test_a_value_for_speed_alone_is_warned_of_and_another_taken(
    flags: dict[str, Any], section: str, taken: dict[str, Any]
) -> None:
    config = make_config(**flags, rollout_engine="sglang")
    ((name, value),) = flags.items()
    assert (
        f"--{name.replace('_', '-')} {value} has no effect, {next(iter(taken.values()))} is taken"
        in " ".join(config.warnings)
    )
    assert (
        config.engine.sglang if section == "sglang" else config.megatron.transformer
    ).items() >= taken.items()


def test_deepep_and_sequence_parallel_without_tensor_parallel_are_warned_of() -> None:
    config = make_config(moe_enable_deepep=True, sequence_parallel=True)
    said = " ".join(config.warnings)
    assert "--moe-enable-deepep has no effect: it is about speed alone" in said
    assert "--sequence-parallel has no effect with --tensor-model-parallel-size 1" in said
    assert not config.megatron.sequence_parallel


# -- contradictions --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "flags"),
    [
        (
            "--max-tokens-per-gpu has no effect without --use-dynamic-batch-size",
            {"max_tokens_per_gpu": 10, "use_dynamic_batch_size": False},
        ),
        (
            "--max-tokens-per-gpu 512",
            {"use_dynamic_batch_size": True, "rollout_max_response_len": 512},
        ),
        ("--cp-comm-type p2p needs Transformer Engine", {"cp_comm_type": "p2p"}),
        ("1 trainer GPUs cannot be divided by 2", {"tensor_model_parallel_size": 2}),
        ("4 × 1 × 1 = 4", {"tensor_model_parallel_size": 4, "actor_num_gpus_per_node": 6}),
        ("virtual pipeline stages need", {"num_layers_per_virtual_pipeline_stage": 2}),
        (
            "--rollout-num-gpus 3 is not a multiple",
            {"rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
        ),
        (
            "global_batch_size 3 cannot be divided by 2",
            {"actor_num_gpus_per_node": 2, "global_batch_size": 3},
        ),
        (
            "micro_batch_size × data-parallel size = 2 × 1",
            {"micro_batch_size": 2, "global_batch_size": 3},
        ),
        ("--offload has no effect without --colocate", {"offload": True}),
        ("--offload-train has no effect without --colocate", {"offload_train": True}),
        ("--kl-loss-coef has no effect without --use-kl-loss", {"kl_loss_coef": 0.1}),
        ("--kl-coef has no effect with --advantage-estimator grpo", {"kl_coef": 0.1}),
        (
            "are both set",
            {
                "kl_coef": 0.1,
                "kl_loss_coef": 0.1,
                "use_kl_loss": True,
                "normalize_advantages": True,
                "advantage_estimator": "reinforce_plus_plus",
            },
        ),
        ("needs --normalize-advantages", {"advantage_estimator": "reinforce_plus_plus"}),
        ("exclude each other", {"use_tis": True, "use_rollout_logprobs": True}),
        ("--tis-clip has no effect without --use-tis", {"tis_clip": 3.0}),
        ("needs --custom-tis-function-path", {"get_mismatch_metrics": True}),
        ("needs --custom-loss-function-path", {"loss_type": "custom_loss"}),
        ("no effect without --loss-type custom_loss", {"custom_loss_function_path": "a.b"}),
        ("pass --n-samples-per-prompt 1", {"loss_type": "sft_loss", "n_samples_per_prompt": 2}),
        (
            "is more than --num-gpus-per-node 2",
            {"num_gpus_per_node": 2, "rollout_num_gpus_per_engine": 4},
        ),
        ("--save-interval has no effect without --save", {"save_interval": 2}),
        ("--ckpt-step has no effect without --load", {"ckpt_step": 2}),
        (
            "--eval-interval has no effect without --eval-prompt-data or --eval-config",
            {"eval_interval": 2},
        ),
        ("--eval-pass-k 4 needs", {"eval_prompt_data": ["a", "b"], "eval_pass_k": [2, 4]}),
        ("is no name of a folder", {"run_name": "../x"}),
        ("--stage 'a/b' is no name of a folder", {"stage": "a/b"}),
        ("--ref-update-interval has no effect", {"ref_update_interval": 2}),
        ("the only field is {rollout_id}; there is no {step}", {"save_hf": "hf/{step}"}),
        (
            "the only field is {rollout_id}; there is no {rank}",
            {"load_debug_rollout_data": "{rollout_id}_{rank}.pt"},
        ),
        ("Unknown format code 'z'", {"save_debug_rollout_data": "d/{rollout_id:04z}.pt"}),
        (
            "gives rollouts 1 and 10 the same file",
            {"save_debug_train_data": "{rollout_id!s:.1}", "num_rollout": 20},
        ),
        (
            "second moments and master weights",
            {"offload_optimizer_states": True, "optimizer_cpu_offload": True},
        ),
        ("needs --update-weight-disk-dir", {"update_weight_transport": "disk"}),
        ("no effect without --update-weight-transport disk", {"update_weight_disk_dir": "d"}),
        ("--rollout-temperature is 0", {"rollout_temperature": 0}),
        ("must be more than 1", {"eps_clip_c": 1.0}),
        ("it must be more than 0 and at most 1", {"rollout_top_p": 1.5}),
        ("-1 is the whole vocabulary", {"rollout_top_k": 0}),
        ("--rs-upper-bound is 0", {"use_rs": True, "rs_upper_bound": 0}),
        (
            "--overlong-buffer-len 11 is more than --rollout-max-response-len 10",
            {"overlong_buffer_len": 11, "rollout_max_response_len": 10},
        ),
        (
            "--overlong-buffer-len has no effect with --advantage-estimator maxrl",
            {"overlong_buffer_len": 4, "advantage_estimator": "maxrl"},
        ),
        ("and --rollout-top-k 1 nothing is learned", {"rollout_top_k": 1}),
        ("--bf16 and --fp16", {"bf16": True, "fp16": True}),
        ("--min-lr 1 is more than --lr 1e-06", {"min_lr": 1.0, "lr_decay_style": "cosine"}),
        (
            "is less than --rollout-batch-size",
            {"rollout_batch_size": 4, "over_sampling_batch_size": 2},
        ),
        (
            "--num-experts 6 cannot be divided by",
            {
                "num_experts": 6,
                "expert_model_parallel_size": 4,
                "actor_num_gpus_per_node": 4,
                "global_batch_size": 4,
            },
        ),
        (
            "2 × 4 × 1",
            {
                "expert_model_parallel_size": 4,
                "expert_tensor_parallel_size": 2,
                "actor_num_gpus_per_node": 4,
                "global_batch_size": 4,
            },
        ),
        ("--update-weights-interval is 0", {"update_weights_interval": 0}),
        (
            "--partial-rollout cannot be combined",
            {"partial_rollout": True, "deterministic_rollout": True},
        ),
        ("--num-epoch needs the number of prompts", {"num_epoch": 1, "streaming_data": True}),
        (
            "--actor-num-gpus-per-node 4 is more than",
            {"actor_num_gpus_per_node": 4, "num_gpus_per_node": 2, "global_batch_size": 4},
        ),
        ("--save-retain is 0", {"save_retain": 0, "save": "s"}),
    ],
)
def test_contradictions(expected: str, flags: dict[str, Any]) -> None:
    refused(expected, **flags)


def test_colocate_in_async_training() -> None:
    refused("--colocate cannot be used with train_async", colocate=True, entry="train_async")
    refused(
        "--colocate cannot be used with --async-buffer-size 2", colocate=True, async_buffer_size=2
    )
    refused(
        "is too little for --update-weights-interval 3", max_staleness=1, update_weights_interval=3
    )
    assert make_config(max_staleness=0, entry="train_async").sync.staleness == 0
    assert make_config(colocate=True, entry="train_async", async_buffer_size=0).cluster.colocate
    for half in (
        "debug_train_only",
        "debug_rollout_only",
    ):  # of a run, which shares its GPUs with nobody
        assert make_config(colocate=True, entry="train_async", **{half: True}).cluster.colocate
    assert (
        make_config(colocate=True).cluster.colocate and make_config(entry="train_async") is not None
    )


@pytest.mark.parametrize(("colocate", "evaluates"), [(True, True), (True, False), (False, True)])
def test_engines_of_evaluations_take_turns_with_supervised_fine_tuning(
    colocate: bool, evaluates: bool
) -> None:
    """The refusal named a flag that nobody had passed."""
    flags = {"eval_prompt_data": ("a", "a.jsonl")} if evaluates else {}
    config = make_config(loss_type="sft_loss", colocate=colocate, **flags)
    assert config.sync.async_buffer_size == (0 if colocate and evaluates else 1)


@pytest.mark.parametrize(
    "surplus",
    [
        {"over_sampling_batch_size": 33},
        {"dynamic_sampling_filter_path": "filters.keep"},
        {"rollout_function_path": "mine.rollout"},
        {"data_source_path": "mine.Source"},
    ],
)
def test_partial_rollouts_without_surplus_groups_are_warned_of(surplus: dict[str, Any]) -> None:
    flags = {"partial_rollout": True, "rollout_batch_size": 32}
    [warning] = make_config(**flags).warnings
    assert warning.startswith("--partial-rollout hardly ever acts: a rollout draws the 32 prompts")
    [warning] = make_config(**flags, mask_offpolicy_in_partial_rollout=True).warnings
    assert warning.startswith("--partial-rollout and --mask-offpolicy-in-partial-rollout hardly")
    warnings = make_config(**flags, **surplus).warnings
    assert not any("--partial-rollout" in warning for warning in warnings)


def test_what_becomes_of_stale_samples() -> None:
    """A flag of what --max-staleness leaves; what trains on older tokens says what corrects for
    it."""
    refused("--stale-samples has no effect without --max-staleness", stale_samples="drop")
    assert make_config(max_staleness=1).sync.stale_samples == "requeue"
    masked = make_config(
        max_staleness=1,
        over_sampling_batch_size=64,
        partial_rollout=True,
        mask_offpolicy_in_partial_rollout=True,
    )
    assert masked.sync.stale_samples == "correct" and masked.warnings == ()
    [warning] = make_config(max_staleness=1, stale_samples="correct").warnings
    assert (
        "--stale-samples correct has nothing to correct with" in warning and "--use-tis" in warning
    )
    for correction in ("use_tis", "use_rollout_logprobs"):
        assert (
            make_config(max_staleness=1, stale_samples="correct", **{correction: True}).warnings
            == ()
        )


@pytest.mark.parametrize(
    ("drop", "expected"),
    [
        ("--num-rollout", "--num-rollout is required"),
        ("--hf-checkpoint", "--hf-checkpoint is required"),
        ("--prompt-data", "--prompt-data is required"),
    ],
)
def test_a_launch_needs(drop: str, expected: str) -> None:
    words = {"--num-rollout": "1", "--hf-checkpoint": "m", "--prompt-data": "p"}
    parse_args([word for pair in words.items() for word in pair])
    del words[drop]
    with pytest.raises(UserError, match=expected):
        parse_args([word for pair in words.items() for word in pair])


def test_a_launch_without_engines_or_data() -> None:
    base = ["--rollout-batch-size", "4", "--hf-checkpoint", "m"]
    with pytest.raises(UserError, match="there would be no engine"):
        parse_args([*base, "--num-rollout", "1", "--prompt-data", "p", "--rollout-num-gpus", "0"])
    with pytest.raises(UserError, match="only evaluates"):
        parse_args([*base, "--num-rollout", "0"])
    with pytest.raises(UserError, match="--start-rollout-id 1 leaves nothing to train"):
        parse_args([*base, "--num-rollout", "1", "--prompt-data", "p", "--start-rollout-id", "1"])
    with pytest.raises(UserError, match="give one of them"):
        parse_args([*base, "--num-rollout", "1", "--num-epoch", "1", "--prompt-data", "p"])
    parse_args([*base, "--num-rollout", "0", "--eval-prompt-data", "a", "a.jsonl"])
    pairs = ["--loss-type", "preference_loss", "--preference-loss", "dpo"]
    parse_args([*base, "--num-rollout", "0", *pairs, "--eval-preference-data", "a.jsonl"])
    parse_args([*base, "--num-rollout", "1", "--load-debug-rollout-data", "x_{rollout_id}.pt"])


# -- the view for hooks ----------------------------------------------------------------------------


def test_flat_args_are_mutable_copies(tmp_path: Path) -> None:
    import copy

    config = make_config(
        rollout_stop=("a",), train_env_vars={"A": "1"}, num_layers=3, sglang_mem_fraction_static=0.5
    )
    args = config.flat()
    assert isinstance(args, FlatArgs) and args.rollout_stop == ["a"] and args.num_layers == 3
    args.rollout_stop.append("b")
    args.train_env_vars["B"] = "2"
    args.lr = 5.0
    args.brand_new = 1
    assert config.rollout.rollout_stop == ("a",) and config.data is not None
    assert config.cluster.train_env_vars == {"A": "1"} and config.megatron.lr == 1e-6
    assert config.flat().rollout_stop == ["a"]
    for other in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert vars(other) == vars(args)


def test_flat_args_have_every_flag_under_its_name() -> None:
    args = vars(make_config(deterministic_rollout=True, router_policy="random").flat())
    assert set(own_flags()) <= set(args)
    assert args["deterministic_rollout"] is True and args["optimizer"] == "adam"
    # unset: the default
    assert args["num_experts"] is None and args["sglang_mem_fraction_static"] is None
    assert args["router_policy"] == args["sglang_router_strategy"] == "random"
    # plugins may read what this version refuses
    assert args["use_opd"] is False and args["lambd"] == 1.0


def test_flat_args_name_the_nearest_flag() -> None:
    args = make_config().flat()
    with pytest.raises(AttributeError) as caught:
        _ = args.n_sample_per_prompt
    assert (
        str(caught.value)
        == "args has no 'n_sample_per_prompt'; the nearest flag is 'n_samples_per_prompt'"
    )
    assert getattr(args, "no_such_thing", 3) == 3 and not hasattr(args, "no_such_thing")


def test_describe_shows_what_is_not_default() -> None:
    text = make_config(rollout_batch_size=4, n_samples_per_prompt=2).describe()
    assert "rollout_batch_size = 4   (flag)" in text
    assert "global_batch_size = 8   (derived: " in text and "rollout_seed" not in text


@pytest.mark.parametrize("loss", ["sft_loss", "preference_loss"])
def test_a_limit_of_responses_that_cuts_no_answer_of_the_data_is_told(loss: str) -> None:
    flags = {"loss_type": loss, "rollout_batch_size": 4, "rollout_max_response_len": 8}
    [told] = make_config(**flags).warnings
    assert "--rollout-max-response-len 8 cuts no answer" in told
    assert not make_config(**flags, eval_prompt_data=["held-out", "held-out.jsonl"]).warnings
