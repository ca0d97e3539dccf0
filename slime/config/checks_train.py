"""Constraints between flags of the trainer: layout, batches, algorithm, schedule, determinism."""

from __future__ import annotations

import inspect
import math
import os
import re
from dataclasses import replace

from slime.config.checks_distillation import distillation
from slime.config.checks_images import images
from slime.config.draft import Draft
from slime.config.engine_flags import ENGINE_OPTIONS
from slime.config.estimators import FACTS
from slime.config.flag import DATA_LOSSES, option_of
from slime.config.preferences import PREFERENCE_FACTS
from slime.config.resolve import PARALLEL_SIZES
from slime.config.schedule import schedule_lengths
from slime.errors import UserError

#: NCCL's algorithms that sum in the same order every time.
_DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def parallel(draft: Draft) -> None:
    if draft["debug_rollout_only"]:
        return  # there is no trainer; this mode is often used where its layout would not fit
    _check_divisible(draft, "actor")
    has_own_gpus = _has_critic_gpus(draft)
    if has_own_gpus or FACTS[draft["advantage_estimator"]].needs_critic:
        _check_divisible(draft, "critic", gpus_of="critic" if has_own_gpus else "actor")
    expert = draft["expert_model_parallel_size"]
    experts = draft.values.get("num_experts")
    if expert > 1 and experts is not None and experts % expert:
        raise UserError(
            f"--num-experts {experts} cannot be divided by --expert-model-parallel-size {expert}"
        )
    _context_exchange(draft)
    _virtual_stages(draft, draft["pipeline_model_parallel_size"])


def _has_critic_gpus(draft: Draft) -> bool:
    """Tell whether there is a critic on GPUs of its own.

    Raises:
        UserError: only one of its number of nodes and its GPUs per node is 0.
    """
    nodes = draft["critic_num_nodes"]
    per_node = draft["critic_num_gpus_per_node"]
    if bool(nodes) != bool(per_node):
        raise UserError(
            f"--critic-num-nodes {nodes} and --critic-num-gpus-per-node {per_node} contradict "
            "each other",
            why="both are above 0 for a critic on GPUs of its own, and both are 0 without one",
            fix="pass both with at least 1, or leave both out",
        )
    return nodes > 0


def _check_divisible(draft: Draft, role: str, gpus_of: str = "actor") -> None:
    """Check the number of GPUs of a role.

    Args:
        gpus_of: the role that the GPUs belong to.
    Raises:
        UserError: the number of GPUs of a role is not a multiple of its model-parallel size.
    """
    who = "critic" if gpus_of == "critic" else "trainer"
    prefix = "critic_" if role == "critic" else ""
    tensor = draft[f"{prefix}tensor_model_parallel_size"]
    pipeline = draft[f"{prefix}pipeline_model_parallel_size"]
    context = draft[f"{prefix}context_parallel_size"]
    expert = draft[f"{prefix}expert_model_parallel_size"]
    nodes = draft[f"{gpus_of}_num_nodes"]
    per_node = draft[f"{gpus_of}_num_gpus_per_node"]
    world = nodes * per_node
    model = tensor * pipeline * context
    gpus = f"{gpus_of}_num_nodes × {gpus_of}_num_gpus_per_node = {nodes} × {per_node} = {world}"
    own = [
        option_of(f"critic_{size}_parallel_size")
        for size in PARALLEL_SIZES
        if draft.is_given(f"critic_{size}_parallel_size")
    ]
    origin = ""
    if prefix:
        origin = f" ({'; '.join([*own, 'other sizes are those of the policy'])})"
    if world % model:
        raise UserError(
            f"{world} {who} GPUs cannot be divided by {model}",
            why=f"{gpus}; tensor × pipeline × context parallel size = {tensor} × {pipeline} × "
            f"{context} = {model}{origin}",
            fix="let the product of the parallel sizes divide the number of GPUs",
        )
    expert_tensor = draft[f"{prefix}expert_tensor_parallel_size"] or tensor
    if expert > 1 and world % (expert_tensor * expert * pipeline):
        raise UserError(
            f"{world} {who} GPUs cannot be divided by {expert_tensor * expert * pipeline}",
            why=f"{gpus}; expert tensor × expert × pipeline parallel size = {expert_tensor} × "
            f"{expert} × {pipeline}{origin}",
            fix="let that product divide the number of GPUs; "
            f"{option_of(prefix + 'expert_tensor_parallel_size')} 1 is usual",
        )


def _precision(draft: Draft) -> None:
    if sum(bool(draft[name]) for name in ("bf16", "fp16", "fp32")) != 1:
        chosen = [f"--{name}" for name in ("bf16", "fp16", "fp32") if draft[name]]
        raise UserError(
            f"{' and '.join(chosen) or 'none of the precisions'} cannot be chosen",
            fix="choose one of --bf16, --fp16, --fp32",
        )


def _context_exchange(draft: Draft) -> None:
    asked = draft.values.get("cp_comm_type")
    kinds = {asked} if isinstance(asked, str) else set(asked or ())
    if kinds - {"a2a"} and draft.values.get("transformer_impl") != "transformer_engine":
        raise UserError(
            f"--cp-comm-type {' '.join(sorted(kinds))} needs Transformer Engine",
            why="without it, context parallelism exchanges heads for tokens (a2a) around each "
            "attention",
            fix="leave the flag out, or pass a2a",
        )


def _virtual_stages(draft: Draft, pipeline: int) -> None:
    by_layers = draft["num_layers_per_virtual_pipeline_stage"]
    by_count = draft["num_virtual_stages_per_pipeline_rank"]
    if by_layers is not None and by_count is not None:
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank "
            "say the same thing",
            fix="give one of them",
        )
    if (by_layers is not None or by_count is not None) and pipeline == 1:
        raise UserError("virtual pipeline stages need --pipeline-model-parallel-size of at least 2")
    dest = "microbatch_group_size_per_vp_stage"
    group = draft.values.get(dest)
    if group is not None and group < pipeline:
        raise UserError(
            f"{option_of(dest)} {group} is less than the pipeline parallel size {pipeline}",
            why="a pipeline rank would wait for a micro-batch that is still in later stages",
            fix=f"pass {pipeline} or more, or leave it out",
        )


def _batches(draft: Draft) -> None:
    if draft["use_dynamic_batch_size"] and draft["max_tokens_per_gpu"] is None and not draft.is_run:
        raise UserError(
            "--use-dynamic-batch-size needs --max-tokens-per-gpu",
            why="it packs micro-batches up to that many tokens",
            fix="start with rollout_max_response_len ÷ context_parallel_size: --max-tokens-per-gpu "
            f"{-(-draft['rollout_max_response_len'] // draft['context_parallel_size'])}",
        )
    micro = draft["micro_batch_size"]
    batch = draft["global_batch_size"]
    is_static = not draft["use_dynamic_batch_size"] and not draft["debug_rollout_only"]
    is_given = draft.is_given("rollout_batch_size") or draft.is_given("global_batch_size")
    if not (is_static and is_given):
        return
    has_critic = FACTS[draft["advantage_estimator"]].needs_critic
    for prefix in ("", *(["critic_"] if has_critic else [])):
        role = "critic" if prefix and draft["critic_num_gpus_per_node"] else "actor"
        model = math.prod(
            draft[f"{prefix}{size}_parallel_size"]
            for size in ("tensor_model", "pipeline_model", "context")
        )
        data_parallel = draft[f"{role}_num_nodes"] * draft[f"{role}_num_gpus_per_node"] // model
        if batch % (micro * data_parallel):
            raise UserError(
                f"global_batch_size {batch} cannot be divided by {micro * data_parallel}",
                why=f"micro_batch_size × data-parallel size{' of the critic' if prefix else ''} = "
                f"{micro} × {data_parallel} = {micro * data_parallel}",
                fix="change --global-batch-size or --micro-batch-size, or leave --micro-batch-size "
                "out: samples are then packed by tokens",
            )


def _algorithm(draft: Draft) -> None:
    estimator = draft["advantage_estimator"]
    if draft["kl_coef"] != 0 and draft["kl_loss_coef"] != 0:
        raise UserError(
            "--kl-coef and --kl-loss-coef are both set",
            fix="choose the KL penalty in the reward (--kl-coef) or in the loss (--kl-loss-coef)",
        )
    if FACTS[estimator].needs_critic:
        _critic(draft)
    if FACTS[estimator].needs_whitening and not draft["normalize_advantages"]:
        raise UserError(f"--advantage-estimator {estimator} needs --normalize-advantages")
    if draft["use_rollout_logprobs"] and draft["use_tis"]:
        raise UserError(
            "--use-rollout-logprobs and --use-tis exclude each other",
            why="with the engine's log-probs as the old policy's there is no mismatch left to "
            "correct",
            fix="choose one",
        )
    if draft["tis_clip_low"] > draft["tis_clip"]:
        raise UserError(
            f"--tis-clip-low {draft['tis_clip_low']:g} is more than --tis-clip "
            f"{draft['tis_clip']:g}"
        )
    _check_baseline(draft)
    _check_sampling_mask(draft)
    if draft["rs_lower_bound"] > draft["rs_upper_bound"]:
        raise UserError(
            f"--rs-lower-bound {draft['rs_lower_bound']:g} is more than --rs-upper-bound "
            f"{draft['rs_upper_bound']:g}"
        )
    if draft["get_mismatch_metrics"] and draft["custom_tis_function_path"] is None:
        raise UserError("--get-mismatch-metrics needs --custom-tis-function-path")
    if draft["loss_type"] == "custom_loss" and draft["custom_loss_function_path"] is None:
        raise UserError("--loss-type custom_loss needs --custom-loss-function-path")
    loss = draft["loss_type"]
    if loss in DATA_LOSSES and draft["n_samples_per_prompt"] != 1:
        raise UserError(
            f"--loss-type {loss} with --n-samples-per-prompt {draft['n_samples_per_prompt']}",
            why="this loss trains on the answers in the data, one per row",
            fix="pass --n-samples-per-prompt 1",
        )
    evaluates = draft["eval_prompt_data"] or draft["eval_config"]
    if loss in DATA_LOSSES and draft.is_given("rollout_max_response_len") and not evaluates:
        draft.warnings.append(
            f"--rollout-max-response-len {draft['rollout_max_response_len']} cuts no answer with "
            f"--loss-type {loss}: those of the data are trained on as they are. --seq-length "
            "leaves out rows that are longer"
        )


#: Estimators that differ from GRPO only in how a reward becomes an advantage within its group.
_GRPO_WITH_OTHER_BASELINE = tuple(
    name
    for name, facts in FACTS.items()
    if name != "grpo" and replace(facts, name="grpo", std_normalized=True) == FACTS["grpo"]
)
#: Flags that replace the baseline and the divisor of rewards.
_REPLACES_BASELINE = (
    "disable_rewards_normalization",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_advantage_function_path",
)


def _check_baseline(draft: Draft) -> None:
    estimator = draft["advantage_estimator"]
    own = [option_of(dest) for dest in _REPLACES_BASELINE if draft[dest]]
    if estimator in _GRPO_WITH_OTHER_BASELINE and own:
        draft.warnings.append(
            f"--advantage-estimator {estimator} has no effect with {' and '.join(own)}: it differs "
            "from grpo only in how rewards are normalised within their group"
        )


def _check_sampling_mask(draft: Draft) -> None:
    flags = " and ".join(draft.truncations())
    if draft["use_sampling_mask"] and not flags:
        raise UserError(
            "--use-sampling-mask has no effect",
            why="without --rollout-top-k, --rollout-top-p or --rollout-min-p every token is drawn "
            "from the whole vocabulary",
            fix="leave it out",
        )
    if (
        draft["use_sampling_mask"]
        and draft["rollout_top_k"] == 1
        and draft["opd_loss"] == "sampled"
    ):
        raise UserError(
            "with --use-sampling-mask and --rollout-top-k 1 nothing is learned",
            why="only one token can be drawn at each position, so its probability is 1 under every "
            "policy and its gradient is 0",
            fix="pass a larger --rollout-top-k",
        )
    if flags and not draft["use_sampling_mask"] and draft["loss_type"] not in DATA_LOSSES:
        draft.warnings.append(
            f"{flags} excludes tokens from sampling, but log-probs are over the whole vocabulary: "
            "importance ratios are of another distribution than the sampled one, and long runs "
            "have collapsed (--use-sampling-mask corrects this; a generate function has to ask the "
            "engine for return_sampling_mask)"
        )
    engine = draft["rollout_engine"]
    unbounded = ENGINE_OPTIONS[engine].mask_needs_top_k and draft["rollout_top_k"] <= 0
    if draft["use_sampling_mask"] and unbounded:
        raise UserError(
            f"--use-sampling-mask with {flags}",
            why=f"{engine} reports which tokens could be sampled only if top-k bounds their "
            "number, and the mask is made of these tokens",
            fix="leave --rollout-top-k out for the default bound, or pass --no-use-sampling-mask "
            "for log-probs over the whole vocabulary",
        )


def _trained(draft: Draft) -> None:
    """Check flags of trained parameters, schedule, optimizer and weight updates."""
    if draft["only_train_params_name_list"] and draft["freeze_params_name_list"]:
        raise UserError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other",
            fix="give one",
        )
    if draft["use_checkpoint_opt_param_scheduler"] and draft["override_opt_param_scheduler"]:
        raise UserError(
            "--use-checkpoint-opt-param-scheduler and --override-opt-param-scheduler exclude each "
            "other",
            fix="pass --use-checkpoint-opt-param-scheduler to keep the checkpoint's settings; "
            "without both, the settings of the flags are used",
        )
    if draft["update_weight_transport"] == "disk" and draft["update_weight_disk_dir"] is None:
        raise UserError("--update-weight-transport disk needs --update-weight-disk-dir")
    if draft["offload_optimizer_states"] and draft["optimizer_cpu_offload"]:
        raise UserError(
            "--offload-optimizer-states and --optimizer-cpu-offload exclude each other",
            why="the first keeps Adam's moments in host memory, the second moments and master "
            "weights",
            fix="give one",
        )
    if draft["optimizer_cpu_offload"]:
        _streamed_states(draft)
    if draft["min_lr"] > draft["lr"]:
        raise UserError(f"--min-lr {draft['min_lr']:g} is more than --lr {draft['lr']:g}")
    if draft["lr_warmup_init"] > draft["lr"]:
        raise UserError(
            f"--lr-warmup-init {draft['lr_warmup_init']:g} is more than --lr {draft['lr']:g}"
        )


def _streamed_states(draft: Draft) -> None:
    """Check the precision of optimizer states in host memory."""
    for dest, possible in _STREAMED_DTYPES.items():
        value = draft.values.get(dest)
        if value not in (None, *possible):
            raise UserError(
                f"{option_of(dest)} {value} with --optimizer-cpu-offload",
                why=f"streamed states can be {' or '.join(possible)} there",
                fix=f"leave {option_of(dest)} out",
            )
    if draft.values.get("fp8_param_gather"):
        raise UserError(
            "--fp8-param-gather with --optimizer-cpu-offload",
            why="master weights from host memory are copied to 16-bit weights",
            fix="leave one out",
        )
    narrow = "bf16" in map(draft.values.get, ("exp_avg_dtype", "exp_avg_sq_dtype"))
    if draft["use_precision_aware_optimizer"] and not narrow:
        draft.warnings.append(
            "--use-precision-aware-optimizer has no effect with --optimizer-cpu-offload, which "
            "reads --exp-avg-dtype and --exp-avg-sq-dtype itself"
        )


#: Precisions of optimizer states that --optimizer-cpu-offload supports, by flag.
_STREAMED_DTYPES = {
    "exp_avg_dtype": ("fp32", "bf16"),
    "exp_avg_sq_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32",),
    "main_grads_dtype": ("fp32",),
}

#: Learning rates below this are typical of full training.
_FULL_TRAINING_LR = 1e-5


#: Flags that PPO cannot be used with, and why.
_WITHOUT_CRITIC = {
    "custom_advantage_function_path": "the critic learns the returns of generalised advantage "
    "estimation, which the function would replace",
    "disable_compute_advantages_and_returns": "the critic learns the returns",
    "custom_model_provider_path": "the function builds only the policy; the critic is built by "
    "slime",
    "spec": "the critic is built by slime, without the custom spec",
}


def _critic(draft: Draft) -> None:
    for dest, why in _WITHOUT_CRITIC.items():
        if draft[dest]:
            raise UserError(
                f"{option_of(dest)} and --advantage-estimator ppo exclude each other",
                why=why,
                fix=f"leave {option_of(dest)} out, or choose an estimator without a critic",
            )
    critic_only = draft["num_critic_only_steps"]
    length = draft["num_rollout"]
    if length and critic_only >= length:
        draft.warnings.append(
            f"--num-critic-only-steps {critic_only} is the whole run of {length} rollouts: the "
            "policy is not trained"
        )


#: Flags that a reward model cannot be trained with, and why.
_WITHOUT_REWARD_MODEL = {
    "lora_rank": "a reward model has a new head, which an adapter does not contain",
    "eval_prompt_data": "engines cannot generate with a reward model",
    "eval_config": "engines cannot generate with a reward model",
    "custom_model_provider_path": "the function builds a language model, without a reward head",
    "spec": "reward models are built by slime, without the custom spec",
    "fake_quantisation": "no engine serves a reward model",
}


def _preferences(draft: Draft) -> None:
    if draft["loss_type"] != "preference_loss":
        return
    loss = draft["preference_loss"]
    if draft.is_given("label_key") and PREFERENCE_FACTS[loss].takes_pairs:
        draft.warnings.append(
            f"--label-key {draft['label_key']} has no effect with --preference-loss {loss}: "
            "--chosen-key and --rejected-key tell which answer is better"
        )
    if loss == "kto" and draft["rollout_batch_size"] < 2:
        raise UserError(
            "--preference-loss kto with --rollout-batch-size 1",
            why="KTO also scores each prompt with the answer of another row",
            fix="pass --rollout-batch-size 2 or more",
        )
    if loss != "reward_model":
        return
    for dest, why in _WITHOUT_REWARD_MODEL.items():
        if draft[dest] and draft[dest] != "none":
            raise UserError(
                f"{option_of(dest)} and --preference-loss reward_model exclude each other",
                why=why,
                fix=f"leave {option_of(dest)} out",
            )


def _lora(draft: Draft) -> None:
    if not draft["lora_rank"]:
        return
    for dest in ("only_train_params_name_list", "freeze_params_name_list"):
        if draft[dest]:
            raise UserError(
                f"{option_of(dest)} and --lora-rank exclude each other",
                why="with adapters exactly the weights of the base model are frozen",
                fix=f"leave {option_of(dest)} out; --lora-target-modules chooses the layers",
            )
    if draft["ref_update_interval"]:
        raise UserError(
            "--ref-update-interval and --lora-rank exclude each other",
            why="the reference is the base model, without adapters or with the one at --ref-load",
            fix="leave --ref-update-interval out",
        )
    if draft.values.get("moe_router_bias_update_rate"):
        raise UserError(
            "--moe-router-bias-update-rate and --lora-rank exclude each other",
            why="it changes routers of the base model, and only adapters are pushed to engines",
            fix="leave --moe-router-bias-update-rate out",
        )
    if draft["lora_dropout"] and draft["loss_type"] not in DATA_LOSSES:
        draft.warnings.append(
            f"--lora-dropout {draft['lora_dropout']:g}: with dropout the trained policy's "
            "log-probs differ from those of the policy that generated, even before the first step"
        )
    rates = ["lr"]
    if draft.is_given("critic_lr") and draft["critic_lora_rank"]:
        rates.append("critic_lr")
    for rate in rates:
        if draft[rate] < _FULL_TRAINING_LR:
            draft.warnings.append(
                f"{option_of(rate)} {draft[rate]:g} is typical of full training: adapters usually "
                "need about ten times as much, 1e-5 to 1e-4 for reinforcement learning"
            )


def _deterministic(draft: Draft) -> None:
    """Refuse settings that sum in varying order, with ``--deterministic-mode``."""
    if not draft.values.get("deterministic_mode"):
        return
    algorithm = os.environ.get("NCCL_ALGO")
    if algorithm and algorithm not in _DETERMINISTIC_NCCL:
        raise UserError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}",
            why=f"only {', '.join(_DETERMINISTIC_NCCL)} are deterministic",
            fix="unset NCCL_ALGO (Ring is used then), or set it to one of these",
        )
    if os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "1":
        raise UserError(
            "--deterministic-mode with NVTE_ALLOW_NONDETERMINISTIC_ALGO=1",
            fix="unset it, or set it to 0",
        )


def _expressions(draft: Draft) -> None:
    for dest in ("only_train_params_name_list", "freeze_params_name_list"):
        for expression in draft[dest]:
            try:
                re.compile(expression)
            except re.error as error:
                raise UserError(
                    f"{option_of(dest)} {expression} is no regular expression",
                    why=str(error),
                    fix="names are matched by Python's re.search; write \\( for a literal bracket",
                ) from error


def _loss_scale(draft: Draft) -> None:
    scale = draft.values.get("loss_scale")
    if scale not in (None, 1.0) and not draft["fp16"]:
        raise UserError(
            f"--loss-scale {scale:g} needs --fp16",
            why="only float16 losses are scaled, but Megatron would divide all gradients by the "
            "scale",
            fix="leave it out",
        )


def _schedule(draft: Draft) -> None:
    """Check the schedules of learning rate and weight decay: Megatron rejects some, and others are
    ambiguous or do not fit the run."""
    for same in (
        ("lr_decay_iters", "lr_decay_samples"),
        ("lr_warmup_fraction", "lr_warmup_samples", "lr_warmup_iters"),
    ):
        given = [option_of(dest) for dest in same if draft[dest]]
        if len(given) > 1:
            raise UserError(f"{' and '.join(given)} say the same thing", fix="give one of them")
    if draft["lr_decay_style"] == "WSD" and draft["lr_wsd_decay_iters"] is None:
        raise UserError(
            "--lr-decay-style WSD needs --lr-wsd-decay-iters",
            why="the last phase, in which the learning rate decays, needs a length",
            fix="pass the number of optimizer steps",
        )
    start = draft["start_weight_decay"]
    end = draft["end_weight_decay"]
    has_both = draft.is_given("start_weight_decay") and draft.is_given("end_weight_decay")
    if draft.differs("weight_decay") and has_both:
        draft.warnings.append(
            f"--weight-decay {draft['weight_decay']:g} has no effect: it goes from "
            f"--start-weight-decay {start:g} to --end-weight-decay {end:g}"
        )
    style = draft["weight_decay_incr_style"]
    if end < start:
        raise UserError(
            f"--end-weight-decay {end:g} is less than --start-weight-decay {start:g}",
            why="Megatron's weight decay schedule can only increase",
        )
    if style != "constant" and start == end:
        raise UserError(
            f"--weight-decay-incr-style {style} has no effect",
            why=f"the weight decay starts and ends at {start:g}",
            fix="pass --start-weight-decay and --end-weight-decay, or leave it out",
        )
    if style == "constant" and start != end:
        raise UserError(
            f"--start-weight-decay {start:g} and --end-weight-decay {end:g} differ",
            why="--weight-decay-incr-style is constant",
            fix="pass --weight-decay-incr-style linear or cosine, or --weight-decay alone",
        )
    if not draft["num_rollout"] or draft["debug_rollout_only"]:
        return
    names = inspect.signature(schedule_lengths).parameters
    warmup, _, total = schedule_lengths(**{name: draft[name] for name in names})
    if warmup > total:
        draft.warnings.append(
            f"the learning rate warms up for {warmup} samples, and the run trains on {total}: it "
            f"never reaches --lr {draft['lr']:g}"
        )


def _ci_test(draft: Draft) -> None:
    """Warn of assertions of the reference system's ``--ci-test`` that this run leaves out."""
    if not draft["ci_test"]:
        return
    left_out = []
    if not draft["ci_disable_kl_checker"]:
        if draft["use_rollout_logprobs"]:
            left_out.append(
                "the KL to the old policy, as --use-rollout-logprobs takes the engine's log-probs "
                "for it"
            )
        if draft["use_kl_loss"] and draft["use_rollout_routing_replay"]:
            left_out.append(
                "the KL to the reference, as --use-rollout-routing-replay replays routing only in "
                "the policy"
            )
    if draft["use_fault_tolerance"]:
        left_out.append("the recovery from killed engines, as this system's --ci-test kills none")
    if left_out:
        draft.warnings.append(f"--ci-test does not check {'; nor '.join(left_out)}")


#: Checks in the order in which `slime.config.checks` runs them; each raises a `UserError`.
STEPS = (
    parallel,
    _precision,
    _batches,
    _algorithm,
    distillation,
    _preferences,
    _trained,
    _lora,
    images,
    _deterministic,
    _expressions,
    _loss_scale,
    _schedule,
    _ci_test,
)
