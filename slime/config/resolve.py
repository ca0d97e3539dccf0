"""Resolution of flags: defaults, then derived values.

given values ─► defaults ─► derived values, step by step ─► `checks` ─► `Config`
"""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Mapping
from pathlib import Path

from slime import paths as path_patterns
from slime.config.draft import Draft, UserFlags
from slime.config.engine_flags import ENGINE_OPTIONS
from slime.config.estimators import FACTS
from slime.config.flag import DATA_LOSSES, GENERATES, SAMPLES, FlagSpec, option_of
from slime.config.parts import absent
from slime.config.preferences import PREFERENCE_FACTS
from slime.errors import UserError, is_debugging
from slime.processes.host import num_cpus, num_gpus

EQUATION = "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout"
#: Defaults of a run if flags and the equation leave them open, as in the reference system's
#: example: 32 × 8 = 256 × 1.
DEFAULT_PROMPTS = 32
DEFAULT_SAMPLES = 8
#: Minimum seconds between checkpoints; without it a short run may spend a third of its time saving.
_CHECKPOINT_SPACING = 120.0
#: Default top-k with a sampling mask, for engines that need a bound. A nucleus is seldom larger.
MASKED_TOP_K = 512


def resolve(
    given: UserFlags, specs: Mapping[str, FlagSpec], entry: str = "train", is_run: bool = False
) -> Draft:
    """Derive the values that are not given. `slime.config.checks` checks the result.

    Args:
        is_run: see `Draft`.
    """
    draft = Draft.with_defaults(given, specs, entry, is_run)
    for step in (
        _replacements,
        _placement,
        _overlap,
        _run,
        _run_folder,
        _debug_dumps,
        _precision_and_memory,
        _schedule,
        _lengths,
        _data,
        derive_batch_sizes,
        _micro_batches,
        _sampling,
        _engine,
        _sampling_mask,
        _evaluation,
        _algorithm,
        _references,
        _profiler,
        _checkpoints,
    ):
        step(draft)
    return draft


def _replacements(draft: Draft) -> None:
    """Replace unsupported values that affect only speed, so that launch scripts with them run."""
    for dest in draft.given.values:
        spec = draft.specs[dest]
        value = draft[dest]
        if isinstance(value, str) and value in spec.meta.instead:
            taken, why = spec.meta.instead[value]
            draft.values[dest] = taken
            draft.warnings.append(f"{spec.option} {value} has no effect, {taken} is taken: {why}")
    if draft["sequence_parallel"] and draft["tensor_model_parallel_size"] == 1:
        draft.values["sequence_parallel"] = False
        if draft.given.values.get("critic_tensor_model_parallel_size", 1) == 1:
            draft.warnings.append(
                "--sequence-parallel has no effect with --tensor-model-parallel-size 1: it splits "
                "activations over the tensor-parallel ranks"
            )


def _overlap(draft: Draft) -> None:
    # engines of evaluations that have the trainer's GPUs wait for it
    takes_turns = draft["colocate"] and GENERATES.holds(draft.values)
    if draft["loss_type"] in DATA_LOSSES and not takes_turns:
        draft.derive("async_buffer_size", 1, "the data's own answers depend on no weights")
    draft.derive(
        "async_buffer_size",
        int(draft.entry == "train_async"),
        f"slime {draft.entry.replace('_', '-')}",
    )
    if draft["mask_offpolicy_in_partial_rollout"]:
        draft.derive(
            "stale_samples",
            "correct",
            "mask_offpolicy_in_partial_rollout: older tokens are not trained on",
        )
    draft.derive("stale_samples", "requeue", "no older tokens are trained on")


#: The flags ``--…-parallel-size`` of the policy that a critic has too.
PARALLEL_SIZES = ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")


def _critic_layout(draft: Draft) -> None:
    pair = ("num_nodes", "num_gpus_per_node")
    own = any(draft.is_given(f"critic_{one}") and draft[f"critic_{one}"] for one in pair)
    for one in pair:
        value = draft[f"actor_{one}"] if own else 0
        draft.derive(f"critic_{one}", value, f"actor_{one}" if own else "it shares the policy's")
    for size in PARALLEL_SIZES:
        draft.copy(f"critic_{size}_parallel_size", f"{size}_parallel_size")
    splits = draft["critic_tensor_model_parallel_size"] > 1
    draft.derive(
        "critic_sequence_parallel",
        draft.given.values.get("sequence_parallel", False) and splits,
        "sequence_parallel where the critic's matrices are split",
    )


def _placement(draft: Draft) -> None:
    here = num_gpus()
    per_host = max(1, min(8, here))
    formula = f"GPUs of this host = {here}" + (", at most 8" if here > 8 else "")
    if here == 0:
        formula = "no GPU on this host: one CPU process slot"
    draft.derive("actor_num_gpus_per_node", per_host, formula)
    draft.derive("num_gpus_per_node", per_host, formula)
    actor = draft["actor_num_nodes"] * draft["actor_num_gpus_per_node"]
    if draft["rollout_external_engine_addrs"]:
        draft.derive(
            "rollout_num_gpus", 0, "rollout_external_engine_addrs: others have started the engines"
        )
    elif draft["colocate"]:
        product = f"{draft['actor_num_nodes']} × {draft['actor_num_gpus_per_node']}"
        draft.derive(
            "rollout_num_gpus",
            actor,
            f"colocate: actor_num_nodes × actor_num_gpus_per_node = {product}",
        )
    else:
        draft.derive("rollout_num_gpus", draft["rollout_num_gpus_per_engine"], "one engine")
    _critic_layout(draft)
    for dest in ("offload_train", "offload_rollout"):
        if draft["offload"]:
            draft.derive(dest, True, "offload")
        else:
            draft.derive(dest, draft["colocate"], "colocate")
    draft.derive("offload_rollout_weights", draft["offload_rollout"], "offload_rollout")
    timeout = os.environ.get("NCCL_TIMEOUT", "")
    if timeout.isdigit() and int(timeout) > 0:  # else refused by the checks
        draft.derive(
            "distributed_timeout_minutes", int(timeout) / 60, f"NCCL_TIMEOUT ÷ 60 = {timeout} ÷ 60"
        )
    draft.derive("distributed_timeout_minutes", 10.0, "10, as NCCL_TIMEOUT is not set")


def _run(draft: Draft) -> None:
    source = draft["config"] or draft["hf_checkpoint"] or "run"
    stem = Path(source.rstrip("/")).name
    name = Path(stem).stem if draft["config"] else stem
    draft.derive(
        "run_name",
        f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
        "name of the recipe or model, and the time",
    )
    debug = is_debugging()
    draft.derive(
        "log_level",
        "DEBUG" if debug else "INFO",
        "SLIME_DEBUG=1" if debug else "INFO without SLIME_DEBUG=1",
    )
    cores = num_cpus()
    draft.derive("rm_num_workers", min(8, cores), f"min(8, CPU cores = {cores})")


def _run_folder(draft: Draft) -> None:
    if draft["save"] == "":  # --no-save
        draft.values["save"] = None
    elif draft.is_run and draft["save_hf"] is None and _trains(draft):
        draft.derive(
            "save", "{run}/checkpoints", "{run}/checkpoints, as neither save nor save_hf is given"
        )
    folder = os.path.join(draft["output_dir"] or ".", draft["run_name"])
    for dest in ("load", "save", "dump_details", *path_patterns.FIELDS):
        if draft[dest] is not None:
            named = path_patterns.literal(folder) if dest in path_patterns.FIELDS else folder
            draft.values[dest] = draft[dest].replace("{run}", named)


def _trains(draft: Draft) -> bool:
    only = ("debug_rollout_only", "debug_train_only", "load_debug_rollout_data")
    return draft["num_rollout"] != 0 and not any(draft[dest] for dest in only)


def _debug_dumps(draft: Draft) -> None:
    loading = draft["load_debug_rollout_data"] is not None
    draft.derive(
        "debug_train_only",
        loading,
        "load_debug_rollout_data is set" if loading else "not loading dumps",
    )
    _name_rollouts(draft)
    folder = draft["dump_details"]
    if folder is not None:
        folder = path_patterns.literal(folder.rstrip("/"))
        draft.derive(
            "save_debug_rollout_data", f"{folder}/rollout_data/{{rollout_id}}.pt", "dump_details"
        )
        draft.derive(
            "save_debug_train_data", f"{folder}/train_data/{{rollout_id}}.pt", "dump_details"
        )


def _name_rollouts(draft: Draft) -> None:
    """Add {rollout_id} to --save-debug-rollout-data without it, so that each rollout gets its own
    file."""
    dest = "save_debug_rollout_data"
    given = draft[dest]
    if given is not None and draft["num_rollout"] != 1 and not path_patterns.has_fields(given):
        draft.values[dest] = path_patterns.with_rollout(given)
        draft.warnings.append(
            f"{option_of(dest)} {given} has no {{rollout_id}} in it, and each rollout would "
            f"overwrite the last: {draft[dest]} is taken"
        )


def _precision_and_memory(draft: Draft) -> None:
    draft.derive("bf16", not (draft["fp16"] or draft["fp32"]), "not fp16 and not fp32")
    draft.derive("accumulate_allreduce_grads_in_fp32", True, "gradients are summed in float32")
    if draft["recompute_activations"] and draft["recompute_granularity"] is None:
        draft.derive(
            "recompute_granularity",
            "full",
            "recompute_activations: whole layers, whatever the attention",
        )
        draft.derive("recompute_method", "uniform", "recompute_activations")
        draft.derive("recompute_num_layers", 1, "recompute_activations: layer by layer")
    elif draft["recompute_granularity"] == "full":
        draft.derive("recompute_method", "uniform", "recompute_granularity is full")
        draft.derive("recompute_num_layers", 1, "recompute_granularity is full: layer by layer")


def _schedule(draft: Draft) -> None:
    draft.copy("start_weight_decay", "weight_decay")
    draft.copy("end_weight_decay", "weight_decay")


def _lengths(draft: Draft) -> None:
    if draft["seq_length"] is not None:
        draft.derive("rollout_max_context_len", draft["seq_length"], "seq_length")
    context = draft["rollout_max_context_len"]
    if context is not None:
        formula = f"rollout_max_context_len − 1 = {context} − 1"
        draft.derive("rollout_max_prompt_len", context - 1, formula)
        draft.derive("rollout_max_response_len", context - 1, formula)
    draft.derive("rollout_max_response_len", 1024, "1024, as no length is given")


def _data(draft: Draft) -> None:
    """Derive shuffling: on, so that epochs do not repeat the order of the file, unless the user's
    code decides the order."""
    if not draft.is_run:
        draft.derive(
            "rollout_shuffle", False, "a part of the system, without the defaults of a run"
        )
    elif draft["streaming_data"]:
        draft.derive(
            "rollout_shuffle", False, "streaming_data: a shuffled stream fills a buffer first"
        )
    elif draft["data_source_path"] is not None or draft["rollout_function_path"] is not None:
        draft.derive(
            "rollout_shuffle", False, "where prompts come from, or how they are used, is the user's"
        )
    else:
        draft.derive("rollout_shuffle", True, "on, as nothing says otherwise")


def _sampling(draft: Draft) -> None:
    draft.copy("over_sampling_batch_size", "rollout_batch_size")
    if draft["use_fault_tolerance"] and not (
        draft["deterministic_rollout"] or draft["rollout_stop"]
    ):
        draft.derive("rollout_request_tokens", 2048, "use_fault_tolerance")


def _evaluation(draft: Draft) -> None:
    for dest, source in (
        ("eval_function_path", "rollout_function_path"),
        ("eval_input_key", "input_key"),
        ("eval_label_key", "label_key"),
        ("eval_tool_key", "tool_key"),
        ("eval_temperature", "rollout_temperature"),
        ("eval_top_p", "rollout_top_p"),
        ("eval_top_k", "rollout_top_k"),
        ("eval_max_response_len", "rollout_max_response_len"),
        ("eval_max_prompt_len", "rollout_max_prompt_len"),
        ("eval_max_context_len", "rollout_max_context_len"),
        ("eval_reward_key", "reward_key"),
    ):
        draft.copy(dest, source)


def _algorithm(draft: Draft) -> None:
    draft.copy("eps_clip_high", "eps_clip")
    std = not draft["disable_grpo_std_normalization"] and draft["n_samples_per_prompt"] > 1
    draft.derive(
        "grpo_std_normalization",
        std,
        "not disable_grpo_std_normalization, and n_samples_per_prompt > 1",
    )
    draft.derive(
        "rewards_normalization",
        not draft["disable_rewards_normalization"],
        "not disable_rewards_normalization",
    )
    draft.derive(
        "kl_loss_type",
        "low_var_kl" if draft["use_kl_loss"] else "k1",
        "low_var_kl with use_kl_loss, else k1",
    )
    preference = draft["preference_loss"]
    draft.derive(
        "preference_beta", PREFERENCE_FACTS[preference].beta or 0.1, f"preference_loss {preference}"
    )
    draft.derive(
        "rs_lower_bound",
        1 / (draft["rs_upper_bound"] or 1.0),  # the checks refuse 0
        f"1 / rs_upper_bound {draft['rs_upper_bound']:g}",
    )
    draft.copy("critic_lr", "lr")
    draft.copy("critic_lr_warmup_iters", "lr_warmup_iters")
    draft.copy("critic_lora_rank", "lora_rank")
    draft.copy("critic_lambd", "lambd")
    if draft["use_opd"]:
        in_trainer = bool(draft["opd_teacher_load"])
        draft.derive(
            "opd_type",
            "megatron" if in_trainer else "sglang",
            "megatron with opd_teacher_load, else sglang",
        )
    draft.copy("balance_data", "balance_by_flops")
    draft.copy("use_routing_replay", "use_rollout_routing_replay")
    estimator = draft["advantage_estimator"]
    if FACTS[estimator].clips_weight and draft["eps_clip"] < 1:
        draft.warnings.append(
            f"--advantage-estimator {estimator} with --eps-clip {draft['eps_clip']:g}: "
            f"{estimator.upper()} clips the importance weight from above only; its lower clip is "
            "off when --eps-clip is 1 or more"
        )


def _sampling_mask(draft: Draft) -> None:
    flags = draft.truncations()
    generates = ("custom_generate_function_path", "rollout_function_path")
    own = [option_of(dest) for dest in generates if draft[dest]]
    reason = f"with {' and '.join(flags)}" if flags else "no token is left out of the sampling"
    if flags and own:
        reason = f"{' and '.join(own)} asks the engine itself"
    draft.derive(
        "use_sampling_mask",
        bool(flags) and not own and draft["loss_type"] not in DATA_LOSSES,
        reason,
    )
    engine = ENGINE_OPTIONS[draft["rollout_engine"]]
    if draft["use_sampling_mask"] and engine.mask_needs_top_k:
        if draft["rollout_top_k"] is None:
            draft.derive("eval_top_k", -1, "-1, as rollout_top_k bounds the sampling mask alone")
        draft.derive(
            "rollout_top_k",
            MASKED_TOP_K,
            f"{MASKED_TOP_K}, as the engine tells which tokens were left to be sampled from only "
            "where their number is bounded",
        )
    draft.derive("rollout_top_k", -1, "-1")


def _profiler(draft: Draft) -> None:
    steps = draft["profile_steps"]
    first = 10
    end = 12
    ends = [option_of(d) for d in ("profile_step_start", "profile_step_end") if draft.is_given(d)]
    if steps is not None:
        if ends:
            raise UserError(f"--profile-steps and {ends[0]} say the same", fix="give one of them")
        words = str(steps).split(":")
        if len(words) != 2 or not all(word.isdecimal() for word in words):
            raise UserError(
                f"--profile-steps {steps} names no steps", fix="--profile-steps 3:5 is 3 and 4"
            )
        first, end = map(int, words)
        if first >= end:
            raise UserError(
                f"--profile-steps {steps} has no steps", fix="--profile-steps 3:5 is 3 and 4"
            )
    elif draft.is_given("profile_step_end"):
        first = min(first, draft["profile_step_end"] - 1)
    draft.derive("use_pytorch_profiler", steps is not None, "true with profile_steps")
    draft.derive("profile_step_start", first, "that of profile_steps, else 10 or less")
    end = max(end, draft["profile_step_start"] + 1)
    draft.derive("profile_step_end", end, "that of profile_steps, else 12 or more")
    if draft["use_pytorch_profiler"]:
        window = f"{draft['profile_step_start']}:{draft['profile_step_end']}"
        draft.derive("profile_steps", window, "profile_step_start:profile_step_end")


def _references(draft: Draft) -> None:
    if draft["kl_coef"] != 0 or draft["use_kl_loss"]:
        draft.derive(
            "ref_load",
            draft["hf_checkpoint"],
            "hf_checkpoint, as a KL term needs a reference model",
        )
    preference = PREFERENCE_FACTS[draft["preference_loss"]]
    if draft["loss_type"] == "preference_loss" and preference.needs_reference:
        why = f"hf_checkpoint, as {preference.name} compares with a reference model"
        draft.derive("ref_load", draft["hf_checkpoint"], why)


def _checkpoints(draft: Draft) -> None:
    timed = draft["save_interval"] is None
    draft.derive(
        "save_min_seconds", _CHECKPOINT_SPACING if timed else 0.0, "120, or 0 with save_interval"
    )
    if draft["save"] is not None and timed:
        draft.derive(
            "save_retain",
            2,
            "2, as --save-interval is not given: the newest, and one to go back to",
        )
    fills = (
        draft["save"] is not None
        and SAMPLES.holds(draft.values)
        and not draft["debug_rollout_only"]
    )
    draft.derive(
        "journal",
        fills,
        "on with save" if fills else "nothing is generated that waits for a checkpoint",
    )


def _engine(draft: Draft) -> None:
    has_sglang = num_gpus() > 0 and importlib.util.find_spec("sglang") is not None
    chosen = "sglang" if has_sglang else "embedded"
    why = "this host has no GPU, or SGLang is not installed"
    if has_sglang:
        why = "a GPU and SGLang are there"
    if draft["rollout_engine"] == "auto":
        draft.values["rollout_engine"] = None
    draft.derive("rollout_engine", chosen, why)
    given = [draft.specs[dest] for dest in draft.given.values]
    engine = draft["rollout_engine"]
    others = {options.section for options in ENGINE_OPTIONS.values()} - {
        ENGINE_OPTIONS[engine].section
    }
    ignored = ", ".join(sorted(spec.option for spec in given if set(spec.sections) & others))
    if ignored and "engine" not in absent(draft.values):
        draft.warnings.append(
            f"the {engine} engine does not have SGLang's options; left out: {ignored}"
        )


def derive_batch_sizes(draft: Draft) -> None:
    """Derive the batch sizes that the user left out of `EQUATION`.

    Raises:
        UserError: the equation does not hold, or has no solution in whole numbers; shows the
            equation with the user's numbers.

    Example:
        32 × 8 samples and --num-steps-per-rollout 2 give a global_batch_size of 128.
    """
    for dest in (
        "rollout_batch_size",
        "n_samples_per_prompt",
        "global_batch_size",
        "num_steps_per_rollout",
    ):
        if draft[dest] is not None and draft[dest] < 1:
            raise UserError(
                f"{option_of(dest)} is {draft[dest]}",
                why="it must be at least 1",
                fix="pass 1 or more",
            )
    draft.derive("n_samples_per_prompt", *_samples(draft))
    samples = draft["n_samples_per_prompt"]
    if draft["rollout_batch_size"] is None:
        draft.derive("rollout_batch_size", *_prompts(draft, samples))
    prompts = draft["rollout_batch_size"]
    batch = draft["global_batch_size"]
    steps = draft["num_steps_per_rollout"]
    total = prompts * samples
    product = f"{prompts} × {samples}"
    if batch is not None and steps is not None:
        if total != batch * steps:
            raise _contradiction(prompts, samples, batch, steps)
    elif batch is not None:
        if total % batch:
            raise _not_whole(product, total, "global_batch_size", batch)
        formula = "rollout_batch_size × n_samples_per_prompt ÷ global_batch_size"
        draft.derive("num_steps_per_rollout", total // batch, f"{formula} = {product} ÷ {batch}")
    else:
        if steps is None:
            steps = 1
            draft.derive("num_steps_per_rollout", 1, "1, as global_batch_size is not given either")
        if total % steps:
            raise _not_whole(product, total, "num_steps_per_rollout", steps)
        formula = "rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout"
        draft.derive("global_batch_size", total // steps, f"{formula} = {product} ÷ {steps}")


def _micro_batches(draft: Draft) -> None:
    """Derive whether micro-batches are packed. `slime.memory.micro_batches` derives
    --max-tokens-per-gpu at the launch, because it needs the model."""
    if not draft.is_run:
        packs = draft.is_given("max_tokens_per_gpu")
        draft.derive(
            "use_dynamic_batch_size", packs, "a part of the system: with max_tokens_per_gpu"
        )
    elif draft.is_given("micro_batch_size"):
        draft.derive("use_dynamic_batch_size", False, "micro_batch_size is given")
    draft.derive("use_dynamic_batch_size", True, "micro_batch_size is not given")


def _samples(draft: Draft) -> tuple[int, str]:
    """Return the default of n_samples_per_prompt, and why. Estimators that compare samples of a
    prompt need several."""
    prompts, batch, steps = (
        draft[d] for d in ("rollout_batch_size", "global_batch_size", "num_steps_per_rollout")
    )
    if None not in (prompts, batch):
        total = batch * (steps or 1)
        if total % prompts == 0 or (steps is None and prompts % batch == 0):
            formula = "global_batch_size × num_steps_per_rollout ÷ rollout_batch_size, at least 1"
            return max(1, total // prompts), formula
    if not draft.is_run:
        return 1, "a part of the system, without the defaults of a run"
    for dest, value in _SINGLE_SAMPLES:
        if draft[dest] == value if value is not None else draft[dest]:
            return 1, f"1, with {dest}{f' {value}' if value else ''}"
    estimator = draft["advantage_estimator"]
    if not FACTS[estimator].group_relative:
        return 1, f"1, with advantage_estimator {estimator}"
    return DEFAULT_SAMPLES, f"{DEFAULT_SAMPLES}, as --advantage-estimator {estimator} compares them"


#: Settings (a value, or None for any) with which no built-in code compares the samples of a prompt.
#: The default of --n-samples-per-prompt is then 1, as in the reference system.
_SINGLE_SAMPLES: tuple[tuple[str, str | None], ...] = (
    ("loss_type", "sft_loss"),
    ("loss_type", "preference_loss"),
    ("loss_type", "custom_loss"),
    ("disable_rewards_normalization", None),
    ("custom_reward_post_process_path", None),
    ("custom_advantage_function_path", None),
    ("custom_convert_samples_to_train_data_path", None),
    ("rollout_function_path", None),
    ("data_source_path", None),
)


def _prompts(draft: Draft, samples: int) -> tuple[int, str]:
    """Return the default of rollout_batch_size, and why."""
    batch = draft["global_batch_size"]
    steps = draft["num_steps_per_rollout"]
    if draft.is_run and batch is None and (DEFAULT_PROMPTS * samples) % (steps or 1) == 0:
        return DEFAULT_PROMPTS, f"{DEFAULT_PROMPTS}, as neither it nor global_batch_size is given"
    total = (batch or samples) * (steps or 1)
    if total % samples:
        raise UserError(
            f"no whole rollout_batch_size fits {EQUATION}",
            why=f"global_batch_size × num_steps_per_rollout = {total}, no multiple of "
            f"n_samples_per_prompt {samples}",
            fix="pass --rollout-batch-size",
        )
    return total // samples, "global_batch_size × num_steps_per_rollout ÷ n_samples_per_prompt"


def _contradiction(prompts: int, samples: int, batch: int, steps: int) -> UserError:
    total = prompts * samples
    ways = []
    if total % steps == 0:
        ways.append(f"--global-batch-size {total // steps}")
    if total % batch == 0:
        ways.append(f"--num-steps-per-rollout {total // batch}")
    if (batch * steps) % samples == 0:
        ways.append(f"--rollout-batch-size {batch * steps // samples}")
    return UserError(
        f"the batch sizes contradict each other: {EQUATION}",
        why=f"{prompts} × {samples} = {total}, but {batch} × {steps} = {batch * steps}",
        fix=f"pass {' or '.join(ways)}; or leave one of the last two out"
        if ways
        else "leave one of the last two out",
    )


def _not_whole(product: str, total: int, name: str, divisor: int) -> UserError:
    option = option_of(name)
    below = next(d for d in range(min(divisor, total), 0, -1) if total % d == 0)
    above = next((d for d in range(divisor, total + 1) if total % d == 0), None)
    near = f"{option} {below}" + (f" or {option} {above}" if above is not None else "")
    return UserError(
        f"the batch sizes do not divide: {EQUATION}",
        why=f"{product} = {total} is not a multiple of {name} {divisor}",
        fix=f"pass {near}",
    )
