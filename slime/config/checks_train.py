"""Equations between flags of the trainer: layout, batches, algorithm, schedule, determinism."""

from __future__ import annotations

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
from slime.errors import UserError

#: NCCL's algorithms that add up in the same order every time.
_DETERMINISTIC_NCCL = ("Tree", "Ring", "CollnetDirect", "CollnetChain", "^NVLS")


def parallel(draft: Draft) -> None:
    if draft["debug_rollout_only"]:
        # there is no trainer: fewer GPUs than its layout needs are what people take this for
        return
    _divides(draft, "actor")
    if _has_own_gpus(draft):
        _divides(draft, "critic")
    expert = draft["expert_model_parallel_size"]
    experts = draft.values.get("num_experts")
    if expert > 1 and experts is not None and experts % expert:
        raise UserError(
            f"--num-experts {experts} cannot be divided by --expert-model-parallel-size {expert}"
        )
    _context_exchange(draft)
    _virtual_stages(draft, draft["pipeline_model_parallel_size"])


def _has_own_gpus(draft: Draft) -> bool:
    """Tell whether there is a critic on GPUs of its own.

    Raises:
        UserError: it has nodes without GPUs, or GPUs on no node.
    """
    nodes = draft["critic_num_nodes"]
    per_node = draft["critic_num_gpus_per_node"]
    if bool(nodes) != bool(per_node):
        raise UserError(
            f"--critic-num-nodes {nodes} and --critic-num-gpus-per-node {per_node} contradict "
            "each other",
            why="both are numbers of a critic on GPUs of its own; without such a critic both are 0",
            fix="pass both with at least 1, or leave both out",
        )
    return nodes > 0


def _divides(draft: Draft, role: str) -> None:
    """
    Raises:
        UserError: the GPUs of a role hold no whole copies of its model.
    """
    who = "critic" if role == "critic" else "trainer"
    of_role = "critic_" if role == "critic" else ""
    tensor = draft[f"{of_role}tensor_model_parallel_size"]
    pipeline = draft[f"{of_role}pipeline_model_parallel_size"]
    context = draft[f"{of_role}context_parallel_size"]
    expert = draft[f"{of_role}expert_model_parallel_size"]
    nodes = draft[f"{role}_num_nodes"]
    per_node = draft[f"{role}_num_gpus_per_node"]
    world = nodes * per_node
    model = tensor * pipeline * context
    gpus = f"{role}_num_nodes × {role}_num_gpus_per_node = {nodes} × {per_node} = {world}"
    own = [
        option_of(f"critic_{size}_parallel_size")
        for size in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")
        if draft.is_given(f"critic_{size}_parallel_size")
    ]
    whose = ""
    if of_role:
        whose = f" ({'; '.join([*own, 'other sizes are those of the policy'])})"
    if world % model:
        raise UserError(
            f"{world} {who} GPUs cannot be divided by {model}",
            why=f"{gpus}; tensor × pipeline × context parallel size = {tensor} × {pipeline} × "
            f"{context} = {model}{whose}",
            fix="let the product of the parallel sizes divide the number of GPUs",
        )
    expert_tensor = draft[f"{of_role}expert_tensor_parallel_size"] or tensor
    if expert > 1 and world % (expert_tensor * expert * pipeline):
        raise UserError(
            f"{world} {who} GPUs cannot be divided by {expert_tensor * expert * pipeline}",
            why=f"{gpus}; expert tensor × expert × pipeline parallel size = {expert_tensor} × "
            f"{expert} × {pipeline}{whose}",
            fix="let that product divide the number of GPUs; "
            f"{option_of(of_role + 'expert_tensor_parallel_size')} 1 is usual",
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
    ranks = pipeline
    group = draft.values.get(dest)
    if group is not None and group < ranks:
        raise UserError(
            f"{option_of(dest)} {group} is less than the pipeline parallel size {ranks}",
            why="a pipeline rank would wait for the micro-batch that it has just sent on",
            fix=f"pass {ranks} or more, or leave it out",
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
    is_asked = draft.is_given("rollout_batch_size") or draft.is_given("global_batch_size")
    if not (is_static and is_asked):
        return
    for role in ("actor", *(["critic"] if draft["critic_num_gpus_per_node"] else [])):
        of_role = "critic_" if role == "critic" else ""
        model = math.prod(
            draft[f"{of_role}{size}_parallel_size"]
            for size in ("tensor_model", "pipeline_model", "context")
        )
        data_parallel = draft[f"{role}_num_nodes"] * draft[f"{role}_num_gpus_per_node"] // model
        if batch % (micro * data_parallel):
            raise UserError(
                f"global_batch_size {batch} cannot be divided by {micro * data_parallel}",
                why=f"micro_batch_size × data-parallel size{' of the critic' if of_role else ''} = "
                f"{micro} × {data_parallel} = {micro * data_parallel}",
                fix="change --global-batch-size or --micro-batch-size, or leave --micro-batch-size "
                "out: samples are then packed by tokens",
            )


def _algorithm(draft: Draft) -> None:
    estimator = draft["advantage_estimator"]
    if draft["kl_coef"] != 0 and draft["kl_loss_coef"] != 0:
        raise UserError(
            "--kl-coef and --kl-loss-coef are both set",
            fix="choose the penalty in the reward or in the loss",
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
            why="it trains on the data's own answers, one row per prompt",
            fix="pass --n-samples-per-prompt 1",
        )


#: Estimators whose flags are those of GRPO: only baseline and divisor of their rewards differ.
_GRPO_BUT_FOR_REWARDS = tuple(
    name
    for name, facts in FACTS.items()
    if name != "grpo" and replace(facts, name="grpo", std_normalized=True) == FACTS["grpo"]
)
#: Flags that replace baseline and divisor.
_OWN_REWARDS = (
    "disable_rewards_normalization",
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_advantage_function_path",
)


def _check_baseline(draft: Draft) -> None:
    estimator = draft["advantage_estimator"]
    own = [option_of(dest) for dest in _OWN_REWARDS if draft[dest]]
    if estimator in _GRPO_BUT_FOR_REWARDS and own:
        draft.warnings.append(
            f"--advantage-estimator {estimator} has no effect with {' and '.join(own)}: it is "
            "grpo but for what rewards become within their group"
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
            why="each token is drawn from one alone, so that its probability is 1 whatever the "
            "policy, and its gradient 0",
            fix="pass a larger --rollout-top-k",
        )
    if flags and not draft["use_sampling_mask"] and draft["loss_type"] not in DATA_LOSSES:
        draft.warnings.append(
            f"{flags} leaves tokens out of what is sampled from, and log-probs are of the whole "
            "vocabulary: ratios are those of another distribution, of which long runs have "
            "collapsed (--use-sampling-mask corrects it; a generate function has to ask the engine "
            "for return_sampling_mask)"
        )
    engine = draft["rollout_engine"]
    unbounded = ENGINE_OPTIONS[engine].mask_needs_top_k and draft["rollout_top_k"] <= 0
    if draft["use_sampling_mask"] and unbounded:
        raise UserError(
            f"--use-sampling-mask with {flags}",
            why=f"{engine} tells which tokens were left to be sampled from only where their number "
            "is bounded, and without them log-probs are not those of what was sampled",
            fix="leave --rollout-top-k out, or --no-use-sampling-mask for log-probs of the whole "
            "vocabulary",
        )


def _trained(draft: Draft) -> None:
    """Refuse flags of training that exclude each other."""
    if draft["only_train_params_name_list"] and draft["freeze_params_name_list"]:
        raise UserError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other",
            fix="give one",
        )
    if draft["use_checkpoint_opt_param_scheduler"] and draft["override_opt_param_scheduler"]:
        raise UserError(
            "--use-checkpoint-opt-param-scheduler and --override-opt-param-scheduler exclude each "
            "other",
            fix="give the first to keep the checkpoint's settings; without either, those of the "
            "flags are taken",
        )
    if draft["update_weight_transport"] == "disk" and draft["update_weight_disk_dir"] is None:
        raise UserError("--update-weight-transport disk needs --update-weight-disk-dir")
    if draft["offload_optimizer_states"] and draft["optimizer_cpu_offload"]:
        raise UserError(
            "--offload-optimizer-states and --optimizer-cpu-offload exclude each other",
            why="with the first the moments live in host memory, with the second the master "
            "weights too",
            fix="give one",
        )
    if draft["optimizer_cpu_offload"]:
        _streamed(draft)
    if draft["min_lr"] > draft["lr"]:
        raise UserError(f"--min-lr {draft['min_lr']:g} is more than --lr {draft['lr']:g}")
    if draft["lr_warmup_init"] > draft["lr"]:
        raise UserError(
            f"--lr-warmup-init {draft['lr_warmup_init']:g} is more than --lr {draft['lr']:g}"
        )


def _streamed(draft: Draft) -> None:
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
            why="streamed master weights are copied to weights in 16 bits",
            fix="leave one out",
        )
    narrow = "bf16" in map(draft.values.get, ("exp_avg_dtype", "exp_avg_sq_dtype"))
    if draft["use_precision_aware_optimizer"] and not narrow:
        draft.warnings.append(
            "--use-precision-aware-optimizer has no effect with --optimizer-cpu-offload, which "
            "reads --exp-avg-dtype and --exp-avg-sq-dtype itself"
        )


#: Values of flags about the precision of optimizer states that --optimizer-cpu-offload knows.
_STREAMED_DTYPES = {
    "exp_avg_dtype": ("fp32", "bf16"),
    "exp_avg_sq_dtype": ("fp32", "bf16"),
    "main_params_dtype": ("fp32",),
    "main_grads_dtype": ("fp32",),
}

#: Learning rates below this one are those of full training.
_FULL_TRAINING_LR = 1e-5


#: Flags that PPO cannot be used with, and why.
_WITHOUT_CRITIC = {
    "custom_advantage_function_path": "the critic learns the returns of generalised advantage "
    "estimation, which the function would replace",
    "disable_compute_advantages_and_returns": "the critic learns the returns",
    "custom_model_provider_path": "the function builds a model of the vocabulary, and the critic "
    "is built by the model's own table",
    "spec": "the critic is built by the model's own table",
}


def _critic(draft: Draft) -> None:
    for dest, why in _WITHOUT_CRITIC.items():
        if draft[dest]:
            raise UserError(
                f"{option_of(dest)} and --advantage-estimator ppo exclude each other",
                why=why,
                fix=f"leave {option_of(dest)} out, or choose an estimator without a critic",
            )
    alone = draft["num_critic_only_steps"]
    length = draft["num_rollout"]
    if length and alone >= length:
        draft.warnings.append(
            f"--num-critic-only-steps {alone} is the whole run of {length} rollouts: the policy is "
            "not trained"
        )


#: Flags that a reward model cannot be trained with, and why.
_WITHOUT_REWARD_MODEL = {
    "lora_rank": "its head is trained with all other weights, and an adapter has no head",
    "eval_prompt_data": "engines would generate with it, and it has no vocabulary",
    "eval_config": "engines would generate with it, and it has no vocabulary",
    "custom_model_provider_path": "the function builds a model of the vocabulary",
    "spec": "it is built by the model's own table",
    "fake_quantisation": "no engine serves it",
}


def _preferences(draft: Draft) -> None:
    if draft["loss_type"] != "preference_loss":
        return
    loss = draft["preference_loss"]
    if draft.is_given("label_key") and PREFERENCE_FACTS[loss].takes_pairs:
        draft.warnings.append(
            f"--label-key {draft['label_key']} has no effect with --preference-loss {loss}: which "
            "answer is the better one is told by the columns"
        )
    if loss == "kto" and draft["rollout_batch_size"] < 2:
        raise UserError(
            "--preference-loss kto with --rollout-batch-size 1",
            why="each prompt is scored with the answer of another row, too",
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
                why="with adapters all weights of the base are frozen, and nothing else",
                fix=f"leave {option_of(dest)} out; --lora-target-modules chooses the layers",
            )
    if draft["ref_update_interval"]:
        raise UserError(
            "--ref-update-interval and --lora-rank exclude each other",
            why="the reference model is the base without adapters, or with that at --ref-load",
            fix="leave --ref-update-interval out",
        )
    if draft.values.get("moe_router_bias_update_rate"):
        raise UserError(
            "--moe-router-bias-update-rate and --lora-rank exclude each other",
            why="it changes the base's routers, which a push of adapters does not bring to engines",
            fix="leave --moe-router-bias-update-rate out",
        )
    if draft["lora_dropout"] and draft["loss_type"] not in DATA_LOSSES:
        draft.warnings.append(
            f"--lora-dropout {draft['lora_dropout']:g}: the policy that is trained differs from "
            "the one that generated and was scored, which reinforcement learning takes for a step"
        )
    if draft["lr"] < _FULL_TRAINING_LR:
        draft.warnings.append(
            f"--lr {draft['lr']:g} is typical of full training: adapters usually need about ten "
            "times as much, 1e-5 to 1e-4 for reinforcement learning"
        )


def _deterministic(draft: Draft) -> None:
    """``--deterministic-mode``: what is known to add up in another order each time is refused."""
    if not draft.values.get("deterministic_mode"):
        return
    algorithm = os.environ.get("NCCL_ALGO")
    if algorithm and algorithm not in _DETERMINISTIC_NCCL:
        raise UserError(
            f"--deterministic-mode with NCCL_ALGO={algorithm}",
            why=f"deterministic are {', '.join(_DETERMINISTIC_NCCL)}",
            fix="unset NCCL_ALGO (Ring is taken then), or set it to one of these",
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
                    fix="names are searched with Python's re.search; write \\( for a bracket that "
                    "is meant",
                ) from error


def _loss_scale(draft: Draft) -> None:
    scale = draft.values.get("loss_scale")
    if scale not in (None, 1.0) and not draft["fp16"]:
        raise UserError(
            f"--loss-scale {scale:g} needs --fp16",
            why="only a loss in float16 is scaled, and Megatron would divide the gradients by it "
            "all the same",
            fix="leave it out",
        )


def _schedule(draft: Draft) -> None:
    """Refuse flags with which Megatron's schedule of learning rate and weight decay would stop, or
    would have to choose."""
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
            why="it is the length of the last phase, in which the learning rate decays",
            fix="pass the number of optimizer steps",
        )
    start = draft["start_weight_decay"]
    end = draft["end_weight_decay"]
    style = draft["weight_decay_incr_style"]
    if end < start:
        raise UserError(
            f"--end-weight-decay {end:g} is less than --start-weight-decay {start:g}",
            why="Megatron's schedule of the weight decay only rises",
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


def _ci_test(draft: Draft) -> None:
    """Name what ``--ci-test`` asserts in the reference system and cannot assert of this run."""
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
                "the KL to the reference, as --use-rollout-routing-replay routes the policy's "
                "tokens alone"
            )
    if draft["use_fault_tolerance"]:
        left_out.append(
            "the recovery from engines that the CI itself kills, as nothing is killed here"
        )
    if left_out:
        draft.warnings.append(f"--ci-test does not check {'; nor '.join(left_out)}")


#: What refuses contradictions, in its order: each raises a `UserError`. `slime.config.checks` goes
#: through them.
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
