"""Contradictions between flags, found before anything starts. Each error names the flags and what
to do.

The declarations of each flag (refusals, range, needs) are checked first, then the constraints
between flags of the run. `checks_train` has the constraints between flags of the trainer.

`violations` applies to every configuration. `incomplete` adds the flags that only a whole run
needs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from slime import paths as path_patterns
from slime.config import checks_train
from slime.config.addresses import engine_url
from slime.config.draft import Draft, UserFlags
from slime.config.engine_flags import ENGINE_OPTIONS
from slime.config.estimators import FACTS
from slime.config.flag import DATA_LOSSES, GENERATES, FlagSpec, option_of
from slime.config.missing_families import BUILT_IN, described_by, missing_family
from slime.config.parts import absent
from slime.config.resolve import resolve
from slime.config.values import check_number
from slime.errors import UserError
from slime.processes.host import num_gpus

#: A refusal's reason that contains these words starts with the name of a missing feature.
_MISSING = "in this version"


def unsupported(
    given: UserFlags, specs: Mapping[str, FlagSpec]
) -> Iterator[tuple[list[str], UserError]]:
    """Yield (dests of flags, error) for each missing feature. Flags that ask for the same feature
    share an error; flags that describe a model of a missing family share the error that names the
    family."""
    differing = frozenset(
        dest for dest, value in given.values.items() if value != specs[dest].default
    )
    by_reason: dict[str, list[tuple[str, str]]] = {}
    family = missing_family(given, differing)
    for dest, value in given.values.items():
        reason, shown = _refusal(specs[dest], value)
        if reason and not described_by(family, dest):
            origin = given.origins[dest]
            where = f"{origin.removeprefix('yaml ')}: " if origin.startswith("yaml ") else ""
            by_reason.setdefault(reason, []).append((dest, where + shown))
    if family is None:
        errors = []
    else:
        errors = [([dest for dest in differing if described_by(family, dest)], family)]
    errors += [
        ([dest for dest, _ in flags], _unsupported(reason, [shown for _, shown in flags]))
        for reason, flags in by_reason.items()
    ]
    for dests, found in errors:
        try:
            raise found
        except UserError as error:  # `slime.diagnosis` identifies an error by its traceback
            yield dests, error


def _refusal(spec: FlagSpec, value: Any) -> tuple[str, str]:
    """Return (reason, flag as the error shows it) of a refused value; ("", "") if accepted."""
    if spec.meta.refused and (value != spec.default or spec.meta.is_reserved):
        return spec.meta.refused, spec.option
    for item in value if isinstance(value, tuple) else (value,):
        if isinstance(item, str) and item in spec.meta.refused_values:
            return spec.meta.refused_values[item], f"{spec.option} {value}"
    return "", ""


def _unsupported(reason: str, flags: list[str]) -> UserError:
    """Return the error for ``flags``, which are refused for the same reason."""
    named = ", ".join(flags)
    if _MISSING in reason:
        feature, _, rest = reason.partition(_MISSING)
        return UserError(
            f"{feature}{_MISSING}", why=f"asked for by {named}", fix=rest.lstrip(";, ")
        )
    return UserError(f"{named} cannot be set", why=reason)


def violations(draft: Draft) -> Iterator[UserError]:
    """Yield all contradictions. Checking stops after an error in ranges or in the parallel layout,
    because later checks compute with these numbers."""
    for step in (
        _ranges,
        _needs,
        _staleness,
        _overlap,
        _entry,
        _host,
        _placement,
        _nccl_timeout,
        _external_engines,
        _external_alone,
        _lengths,
        _sampling,
        _unread_data,
        _evaluation,
        _debug,
        _profile,
        _names,
        _environment,
        _layer_spec,
        *checks_train.STEPS,
    ):
        try:
            step(draft)
        except UserError as error:
            yield error
            if step in (_ranges, checks_train.parallel):
                return


# -- declarations of single flags ------------------------------------------------------------------


def _ranges(draft: Draft) -> None:
    # the user's values first: derived values may be out of range because of them
    for dest in (*draft.given.values, *draft.values):
        check_number(draft.specs[dest], draft[dest])


def _needs(draft: Draft) -> None:
    """Refuse flags that would be ignored; warn if the declaration asks only for a warning."""
    for dest in draft.given.values:
        if not draft.differs(dest):
            continue
        spec = draft.specs[dest]
        if _is_checked_elsewhere(draft, spec):
            continue
        if spec.meta.no_effect:
            draft.warnings.append(f"{spec.option} has no effect: {spec.meta.no_effect}")
        for need in spec.meta.needs:
            if need.holds(draft.values) or _equals_derived(draft, spec):
                continue
            what = f"{spec.option} has no effect {need.words(draft.values)}"
            if not need.warns:
                raise UserError(what, why=need.why, fix=need.fix(spec.option))
            draft.warnings.append(f"{what}: {need.why}")


def _is_checked_elsewhere(draft: Draft, spec: FlagSpec) -> bool:
    """Tell whether this is an option of engines of which the run starts none, so that another
    warning names it, or of engines in server groups (`slime.engines.model_groups.idle_options`)."""
    section = ENGINE_OPTIONS[draft["rollout_engine"]].section
    if not spec.sections or "engine" not in spec.meta.read_by:
        return False
    starts_some = section in spec.sections and not _has_external_only(draft)
    return not starts_some or draft["sglang_config"] is not None


def _equals_derived(draft: Draft, spec: FlagSpec) -> bool:
    """Tell whether leaving the flag out would derive the same value. Such flags are accepted so
    that the values of a resolved configuration can be passed again."""
    if not spec.meta.derived:
        return False
    derived = resolve(
        draft.given.without(spec.dest), draft.specs, draft.entry, draft.is_run
    ).values[spec.dest]
    return bool(derived == draft[spec.dest])


# -- the run ---------------------------------------------------------------------------------------


def _staleness(draft: Draft) -> None:
    limit = draft["max_staleness"]
    interval = draft["update_weights_interval"]
    if limit is not None and limit < interval - 1:
        raise UserError(
            f"--max-staleness {limit} is too little for --update-weights-interval {interval}",
            why=f"the last of the {interval} rollouts between two pushes is {interval - 1} "
            "rollouts old when it is trained on; such a rollout would never start, and the next "
            "push would wait for it",
            fix=f"pass --max-staleness {interval - 1} or more, or --update-weights-interval "
            f"{limit + 1} or less",
        )
    corrections = ("use_tis", "use_rs", "use_rollout_logprobs", "mask_offpolicy_in_partial_rollout")
    trains_on_stale = (
        limit is not None
        and draft["stale_samples"] == "correct"
        and draft["loss_type"] == "policy_loss"
    )
    if trains_on_stale and not any(draft[name] for name in corrections):
        draft.warnings.append(
            "--stale-samples correct has nothing to correct with: groups older than "
            "--max-staleness are trained on like fresh ones; --use-tis weighs their tokens, "
            "--use-rollout-logprobs takes the engine's log-probs as the old policy's"
        )


#: Import path of a rollout function of earlier versions that generated during training.
_FULLY_ASYNC = "slime.rollout.fully_async_rollout.generate_rollout_fully_async"


def _overlap(draft: Draft) -> None:
    if draft["rollout_function_path"] == _FULLY_ASYNC and not draft["async_buffer_size"]:
        draft.warnings.append(
            "--rollout-function-path asks for generation during training, but generation and "
            "training take turns: use train_async.py (or --async-buffer-size) and engines on GPUs "
            "of their own"
        )


def _has_engines(draft: Draft) -> bool:
    return GENERATES.holds(draft.values) and not draft["debug_train_only"]


def _entry(draft: Draft) -> None:
    has_engines = _has_engines(draft)
    is_whole = has_engines and not draft["debug_rollout_only"]
    per_request = (
        draft["rollout_request_tokens"] if "rollout_request_tokens" in draft.given.values else None
    )
    longest = max(draft["rollout_max_response_len"], draft["eval_max_response_len"])
    if per_request is not None and per_request >= longest:
        draft.warnings.append(
            f"--rollout-request-tokens {per_request} has no effect: answers have at most {longest} "
            "tokens"
        )
    if draft["async_buffer_size"] > 0 and draft["colocate"] and is_whole:
        if draft.entry == "train_async":
            other = "train_async"
        else:
            other = f"--async-buffer-size {draft['async_buffer_size']}"
        raise UserError(
            f"--colocate cannot be used with {other}",
            why="engines generate while the trainer trains, so they cannot share its GPUs by turns",
            fix="remove --colocate and give the engines GPUs of their own with --rollout-num-gpus, "
            "or use train.py",
        )


def _host(draft: Draft) -> None:
    """Check flags that depend on whether the trainer has GPUs. This host's GPUs decide, or
    SLIME_NUM_GPUS if it is set."""
    on_gpu = num_gpus() > 0
    where = "without GPUs (SLIME_NUM_GPUS=<n> says that the trainer's hosts have some)"
    if on_gpu:
        where = "on GPUs"
    wrong = {"nccl"} if not on_gpu else {"gloo"}
    if draft["distributed_backend"] in wrong:
        raise UserError(
            f"--distributed-backend {draft['distributed_backend']} cannot be used {where}",
            fix="leave it at auto",
        )
    missing = {"fused", "unfused", "local"} if on_gpu else {"flash", "fused"}
    if on_gpu and draft["transformer_impl"] == "transformer_engine":
        missing = set()  # Transformer Engine has all backends, and reports what the GPU cannot run
    if draft["attention_backend"] in missing:
        raise UserError(
            f"--attention-backend {draft['attention_backend']} is not available {where}",
            why="torch's variable-length flash attention is used"
            if on_gpu
            else "torch's own attention is used",
            fix="pass auto or flash" if on_gpu else "pass auto, unfused or local",
        )
    if not on_gpu and draft.differs("data_pad_size_multiplier"):
        draft.warnings.append(
            "--data-pad-size-multiplier has no effect without GPUs: it only makes GPU kernels "
            "faster"
        )


def _placement(draft: Draft) -> None:
    gpus = draft["rollout_num_gpus"]
    per_engine = draft["rollout_num_gpus_per_engine"]
    has_engines = _has_engines(draft)
    if has_engines and gpus % per_engine:
        raise UserError(
            f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine "
            f"{per_engine}",
            fix=f"pass --rollout-num-gpus {max(1, gpus // per_engine) * per_engine}",
        )
    prefill = draft["prefill_num_servers"]
    splits = prefill is not None and ENGINE_OPTIONS[draft["rollout_engine"]].splits_prefill
    if has_engines and splits and prefill * per_engine >= gpus:
        raise UserError(
            f"--prefill-num-servers {prefill} leaves no engine that decodes",
            why=f"--rollout-num-gpus {gpus} is {gpus // per_engine} engines of {per_engine} GPUs",
            fix=f"pass --rollout-num-gpus {(prefill + 1) * per_engine} or more, or fewer prefill "
            "servers",
        )
    per_node = draft["num_gpus_per_node"]
    if has_engines and draft.is_given("num_gpus_per_node") and per_engine > per_node:
        if not ENGINE_OPTIONS[draft["rollout_engine"]].spans_nodes:
            raise UserError(
                f"--rollout-num-gpus-per-engine {per_engine} is more than --num-gpus-per-node "
                f"{per_node}",
                why="an embedded engine runs on one node",
                fix="pass --rollout-engine sglang",
            )
        if per_engine % per_node:
            raise UserError(
                f"--rollout-num-gpus-per-engine {per_engine} is not a multiple of "
                f"--num-gpus-per-node {per_node}",
                why="an engine that spans nodes has the same number of GPUs on each",
            )
    for role, who in (("actor", "trainer"), ("critic", "critic")):
        own = draft[f"{role}_num_gpus_per_node"]
        flag = option_of(f"{role}_num_gpus_per_node")
        both_given = draft.is_given("num_gpus_per_node") and draft.is_given(
            f"{role}_num_gpus_per_node"
        )
        if both_given and own > per_node and not draft["debug_rollout_only"]:
            raise UserError(
                f"{flag} {own} is more than --num-gpus-per-node {per_node}",
                fix=f"spread the {who} over more nodes with --{role}-num-nodes",
            )


def _nccl_timeout(draft: Draft) -> None:
    timeout = os.environ.get("NCCL_TIMEOUT", "")
    if timeout and (not timeout.isdigit() or int(timeout) == 0):
        raise UserError(f"NCCL_TIMEOUT is {timeout!r}", fix="set it to a number of seconds")


def _external_engines(draft: Draft) -> None:
    urls = [
        engine_url(address, "--rollout-external-engine-addrs")
        for address in draft["rollout_external_engine_addrs"]
    ]
    for url in urls:
        if urls.count(url) > 1:
            raise UserError(
                f"--rollout-external-engine-addrs names {url} {urls.count(url)} times",
                fix="name it once",
            )


#: Flags of engines that other parts read too: the trainer rounds a quantised base to this type.
_READ_WITHOUT_ENGINE = ("sglang_dtype", "embedded_dtype")


def _has_external_only(draft: Draft) -> bool:
    return bool(draft["rollout_external_engine_addrs"]) and not draft["rollout_num_gpus"]


def _external_alone(draft: Draft) -> None:
    """Warn of options of engines where the run starts none. External ones have their own."""
    if not _has_external_only(draft) or "engine" in absent(draft.values):
        return
    section = ENGINE_OPTIONS[draft["rollout_engine"]].section
    given = [
        option_of(dest)
        for dest in sorted(draft.given.values)
        if draft.differs(dest)
        and (
            section in draft.specs[dest].sections
            or dest.startswith("embedded_")
            or dest == "rollout_num_gpus_per_engine"
        )
        and dest not in _READ_WITHOUT_ENGINE
    ]
    if given:
        draft.warnings.append(
            "the run starts no engine of its own (--rollout-num-gpus 0), and external engines have "
            f"the options that they were started with; left out: {', '.join(given)}"
        )


def _lengths(draft: Draft) -> None:
    cap = draft["seq_length"]
    context = draft["rollout_max_context_len"]
    for dest in ("rollout_max_context_len", "eval_max_context_len"):
        if cap is not None and draft[dest] is not None and draft[dest] > cap:
            raise UserError(
                f"{option_of(dest)} {draft[dest]} is more than --seq-length {cap}",
                why="--seq-length is the upper limit of prompt plus response",
                fix=f"lower {option_of(dest)} or raise --seq-length",
            )
    prompt = draft["rollout_max_prompt_len"]
    if context is not None and prompt is not None and prompt > context - 1:
        raise UserError(
            f"--rollout-max-prompt-len {prompt} leaves no token to generate",
            why=f"the context is {context} tokens (--rollout-max-context-len or --seq-length)",
            fix=f"pass at most {context - 1}",
        )
    overlong = draft["overlong_buffer_len"]
    longest = draft["rollout_max_response_len"]
    if overlong is not None and overlong > longest:
        raise UserError(
            f"--overlong-buffer-len {overlong} is more than --rollout-max-response-len {longest}",
            why="the penalty begins that many tokens before the limit, so every answer would be "
            "penalised",
            fix=f"pass at most {longest}; the paper uses a fifth, {max(longest // 5, 1)}",
        )


def _sampling(draft: Draft) -> None:
    if draft["deterministic_rollout"] and draft["partial_rollout"]:
        raise UserError(
            "--partial-rollout cannot be combined with --deterministic-rollout",
            why="where a sample is cut at the end of a rollout depends on timing",
            fix="leave one of them out",
        )
    _partial_rollout(draft)
    if draft["num_epoch"] is not None and draft["streaming_data"]:
        raise UserError(
            "--num-epoch needs the number of prompts, which is unknown for a streamed data set",
            fix="pass --num-rollout, or leave --streaming-data out",
        )
    if draft["over_sampling_batch_size"] < draft["rollout_batch_size"]:
        raise UserError(
            f"--over-sampling-batch-size {draft['over_sampling_batch_size']} is less than "
            f"--rollout-batch-size {draft['rollout_batch_size']}",
            fix=f"pass --over-sampling-batch-size {draft['rollout_batch_size']} or more",
        )


def _partial_rollout(draft: Draft) -> None:
    """Warn of --partial-rollout where the built-in rollout draws no more groups than it needs."""
    draws_more = draft["over_sampling_batch_size"] > draft["rollout_batch_size"] or any(
        draft[dest]
        for dest in ("dynamic_sampling_filter_path", "data_source_path", "rollout_function_path")
    )
    draws_none = draft["load_debug_rollout_data"] is not None or draft["num_rollout"] == 0
    if not draft["partial_rollout"] or draws_more or draws_none:
        return
    flags = ["--partial-rollout"]
    if draft["mask_offpolicy_in_partial_rollout"]:
        flags.append("--mask-offpolicy-in-partial-rollout")
    draft.warnings.append(
        f"{' and '.join(flags)} hardly ever {'act' if len(flags) > 1 else 'acts'}: a rollout draws "
        f"the {draft['rollout_batch_size']} prompts that it needs and waits for all of them, so "
        "none is unfinished when the batch is full, unless a group failed and was replaced; pass "
        "--over-sampling-batch-size as well"
    )


def _unread_data(draft: Draft) -> None:
    """Warn of flags of the data set where none is drawn from."""
    if draft["rollout_global_dataset"] or draft["data_source_path"] is not None:
        return
    given = [
        option_of(dest)
        for dest in ("prompt_data", "streaming_data", "num_data_workers")
        if draft.differs(dest)
    ]
    if given:
        draft.warnings.append(
            f"{' and '.join(given)} with --disable-rollout-global-dataset: no prompts are drawn, "
            "and only your functions can read the flag"
        )


def _evaluation(draft: Draft) -> None:
    samples = draft["n_samples_per_eval_prompt"]
    largest = max(draft["eval_pass_k"] or (0,))
    if largest > samples and not draft["eval_config"]:
        raise UserError(
            f"--eval-pass-k {largest} needs at least as many samples of each evaluation prompt",
            why=f"--n-samples-per-eval-prompt is {samples}",
            fix=f"pass --n-samples-per-eval-prompt {largest} or more, or a smaller --eval-pass-k",
        )


def _layer_spec(draft: Draft) -> None:
    spec = draft["spec"]
    if not spec:
        return
    if len(spec) != 2:
        raise UserError(
            f"--spec takes a module and a name, but {len(spec)} words were given: {' '.join(spec)}",
            fix="write --spec my_package.layers my_spec",
        )
    if family := BUILT_IN.get(spec[0]):
        draft.values["spec"] = ()
        draft.warnings.append(
            f"--spec {' '.join(spec)} is not imported: slime builds the layers of {family} itself"
        )


def _names(draft: Draft) -> None:
    if (stage := draft["stage"]) is not None and re.search(r"[\s()~]|^.{101}", stage):
        why = (
            "a stage's settings are stored as config.<stage>.json, which must not look like the "
            "copies that file managers make"
        )
        raise UserError(
            f"--stage {stage!r} is no single word",
            why=why,
            fix="use at most 100 characters, without blanks, brackets or ~",
        )
    for dest, fix in (
        ("run_name", "put the path into --output-dir"),
        ("stage", "give it a single word"),
    ):
        name = draft[dest]
        if name is not None and (name in ("", ".", "..") or "/" in name):
            raise UserError(
                f"{option_of(dest)} {name!r} is no name of a folder",
                why="the run folder is --output-dir/--run-name, one level deep, where TensorBoard "
                "finds all runs; folders of a stage are inside it",
                fix=f"leave the slash out; {fix}",
            )


def _environment(draft: Draft) -> None:
    for name, value in draft["train_env_vars"].items():
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise UserError(
                f"--train-env-vars sets {name} to {value!r}, which is neither text nor a whole "
                "number",
                why="variables are text, and it is not clear which: YAML reads on as True, and "
                "1.10 as 1.1",
                fix=f'write it in quotes: {{"{name}": "…"}}',
            )


def _debug(draft: Draft) -> None:
    if draft["debug_rollout_only"] and draft["debug_train_only"]:
        why = ""
        if draft["load_debug_rollout_data"]:
            why = "--load-debug-rollout-data implies --debug-train-only"
        raise UserError(
            "--debug-rollout-only and --debug-train-only exclude each other",
            why=why,
            fix="choose one",
        )
    for dest, fields in path_patterns.FIELDS.items():
        if (pattern := draft[dest]) is not None:
            path_patterns.check(
                pattern,
                option_of(dest),
                fields=fields,
                num_rollout=_rollouts_to_tell_apart(draft, dest),
            )
    samples = draft["save_debug_rollout_data"]
    tensors = draft["save_debug_train_data"]
    if None not in (samples, tensors) and path_patterns.fill(samples, 0) == path_patterns.fill(
        tensors, 0
    ):
        if samples == tensors:
            both = ""
        else:
            both = f" and {tensors}: for rollout 0 that is {path_patterns.fill(samples, 0)}"
        raise UserError(
            f"--save-debug-rollout-data and --save-debug-train-data are both {samples}{both}",
            why="one would overwrite the other",
            fix="give them different paths",
        )


def _profile(draft: Draft) -> None:
    if not draft["use_pytorch_profiler"]:
        return
    first = draft["profile_step_start"]
    end = draft["profile_step_end"]
    rollouts = draft["num_rollout"]
    if first >= end:
        raise UserError(
            f"--profile-step-start {first} is not before --profile-step-end {end}",
            why="--profile-step-end is the first step that is no longer profiled",
            fix="write for example --profile-steps 3:5 to profile steps 3 and 4",
        )
    if rollouts and first >= rollouts:
        raise UserError(
            f"no step would be profiled: the first is --profile-step-start {first}, and the steps "
            f"of --num-rollout {rollouts} are 0 to {rollouts - 1}",
            fix=f"pass --profile-steps 0:{min(rollouts, 2)}",
        )
    ranks = draft["actor_num_nodes"] * draft["actor_num_gpus_per_node"]
    highest = max(draft["profile_ranks"], default=0)
    if highest >= ranks and not draft["debug_rollout_only"]:
        raise UserError(
            f"--profile-ranks {highest} is no trainer rank",
            why=f"trainer ranks are 0 to {ranks - 1}",
        )


def _rollouts_to_tell_apart(draft: Draft, dest: str) -> int:
    """Return how many rollouts need distinct paths. One is enough for a file that is only read, and
    for --save-hf without the rollout in its path, where each export replaces the last."""
    one_for_all = dest == "ci_load_grad_norm" or (
        dest == "save_hf" and not path_patterns.names_rollout(draft[dest])
    )
    return 1 if one_for_all else draft["num_rollout"] or 1


#: Functions of the user that may set advantages or form groups.
_OWN_SIGNAL = (
    "custom_reward_post_process_path",
    "custom_convert_samples_to_train_data_path",
    "custom_advantage_function_path",
    "rollout_data_postprocess_path",
    "rollout_function_path",
    "custom_generate_function_path",
    "data_source_path",
    "load_debug_rollout_data",
)


def _check_signal(draft: Draft) -> None:
    """Refuse flags with which every advantage, or the KL term, would be 0."""
    if draft["loss_type"] != "policy_loss":
        return
    estimator = draft["advantage_estimator"]
    own = any(draft[dest] for dest in _OWN_SIGNAL) or not draft["rewards_normalization"]
    implied = draft.is_given("rollout_batch_size") and draft.is_given("global_batch_size")
    asked = draft.is_given("n_samples_per_prompt") or implied
    if FACTS[estimator].group_relative and draft["n_samples_per_prompt"] == 1 and asked and not own:
        if not draft["use_opd"]:
            raise UserError(
                f"--advantage-estimator {estimator} learns nothing from one sample per prompt",
                why="an advantage is a reward relative to the other samples of its prompt, so "
                "every advantage would be 0",
                fix="pass --n-samples-per-prompt 8, or --advantage-estimator reinforce_plus_plus "
                "--normalize-advantages",
            )
        if draft["rm_type"]:
            draft.warnings.append(
                f"--rm-type {draft['rm_type']} has no effect on training: {estimator} compares "
                "rewards within a prompt, and there is one sample per prompt; the policy learns "
                "from its teacher alone"
            )
    _check_drift(draft)
    if draft["use_kl_loss"] and draft["kl_loss_coef"] == 0:
        if not draft.is_given("kl_loss_coef"):
            raise UserError(
                "--use-kl-loss has no effect without --kl-loss-coef",
                why="its coefficient is 0: the reference model would be loaded and run in every "
                "step for nothing",
                fix="pass --kl-loss-coef 0.01 too, or leave --use-kl-loss out; an explicit 0 "
                "measures the KL",
            )
        draft.warnings.append(
            "--use-kl-loss with --kl-loss-coef 0 only measures the KL to the reference model, at "
            "the cost of a forward pass in every step"
        )
    elif draft["use_kl_loss"] and draft["kl_loss_type"] == "k1" and not draft["use_unbiased_kl"]:
        # ∇(log π - log π_ref) = ∇ log π, whose mean over samples of π is 0
        draft.warnings.append(
            "--use-kl-loss with --kl-loss-type k1 hardly keeps the model near the reference: the "
            "expectation of its gradient is 0 on policy; leave --kl-loss-type out (low_var_kl), or "
            "pass k2 or --use-unbiased-kl"
        )


#: Flags that act on a policy, or a critic, that has moved since the rollout's first step.
_ACT_ON_DRIFT = ("use_opsm", "eps_clip_c", "sapo_tau_pos", "sapo_tau_neg")
#: Settings with which the first step already meets other log-probs, or a rollout may have more
#: steps than the flags say.
_MAKE_DRIFT = (
    "lora_dropout",
    "attention_dropout",
    "hidden_dropout",
    "rollout_data_postprocess_path",
    "custom_advantage_function_path",
    "custom_convert_samples_to_train_data_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "rollout_function_path",
    "load_debug_rollout_data",
)


def _check_drift(draft: Draft) -> None:
    """Warn of flags that need a second optimizer step per rollout if there is one step."""
    if draft["num_steps_per_rollout"] != 1 or any(draft.values.get(d) for d in _MAKE_DRIFT):
        return
    if not draft["use_rollout_logprobs"]:
        for option in (option_of(dest) for dest in _ACT_ON_DRIFT if draft.differs(dest)):
            draft.warnings.append(
                f"{option} has no effect with one optimizer step per rollout: the policy is then "
                "the old policy, and every ratio is 1; pass --num-steps-per-rollout 2 or more, or "
                "--use-rollout-logprobs to compare with the policy that sampled"
            )
    if draft.differs("value_clip"):
        draft.warnings.append(
            "--value-clip has no effect with one optimizer step per rollout: values have not "
            "moved yet; pass --num-steps-per-rollout 2 or more"
        )


def incomplete(draft: Draft) -> Iterator[UserError]:
    """Yield an error for each missing flag that only a whole run needs."""
    for step in (
        _length,
        _model,
        _evaluation_only,
        _prompts,
        _start,
        _saved_samples,
        _some_engine,
        _signal,
    ):
        try:
            step(draft)
        except UserError as error:
            yield error


def _length(draft: Draft) -> None:
    rollouts = draft["num_rollout"]
    epochs = draft["num_epoch"]
    if rollouts is None and epochs is None:
        raise UserError(
            "--num-rollout is required",
            fix="pass --num-rollout, or --num-epoch to count passes over the data",
        )
    if rollouts is not None and epochs is not None:
        raise UserError(
            "--num-rollout and --num-epoch both say how long to train", fix="give one of them"
        )


def _model(draft: Draft) -> None:
    if draft["hf_checkpoint"] is None:
        raise UserError(
            "--hf-checkpoint is required",
            why="the tokenizer and the architecture are read from it",
            fix="pass a Hugging Face model directory (config.json, *.safetensors, tokenizer)",
        )


def _evaluation_only(draft: Draft) -> None:
    data = ("eval_prompt_data", "eval_config", "eval_preference_data")
    if draft["num_rollout"] == 0 and not any(draft[dest] for dest in data):
        raise UserError(
            "--num-rollout 0 only evaluates, but there is no evaluation data",
            fix="pass --eval-prompt-data, or --eval-preference-data for preference losses",
        )


def _prompts(draft: Draft) -> None:
    draws = (
        draft["rollout_global_dataset"]
        and draft["data_source_path"] is None
        and draft["num_rollout"] != 0
    )
    if draws and draft["prompt_data"] is None and draft["load_debug_rollout_data"] is None:
        raise UserError(
            "--prompt-data is required",
            fix="pass a JSONL or Parquet file, or --disable-rollout-global-dataset if the rollout "
            "function has its own prompts",
        )


def _start(draft: Draft) -> None:
    rollouts = draft["num_rollout"]
    start = draft["start_rollout_id"]
    if rollouts and start is not None and start >= rollouts:
        raise UserError(
            f"--start-rollout-id {start} leaves nothing to train: --num-rollout is {rollouts}",
            why="--num-rollout counts all rollouts of the run, those before the start included",
            fix=f"pass --num-rollout of at least {start + 1}, or leave --start-rollout-id out",
        )


def _saved_samples(draft: Draft) -> None:
    has_samples = draft["load_debug_rollout_data"] is not None or draft["loss_type"] in DATA_LOSSES
    if draft["debug_train_only"] and not has_samples and draft["num_rollout"] != 0:
        raise UserError(
            "--debug-train-only has nothing to train on",
            why="no engine is started, and no samples are loaded",
            fix="pass --load-debug-rollout-data PATTERN with files that --save-debug-rollout-data "
            "wrote",
        )


def _some_engine(draft: Draft) -> None:
    generates = (
        not draft["debug_train_only"]
        and draft["loss_type"] not in DATA_LOSSES
        and draft["num_rollout"] != 0
    )
    if not generates or draft["rollout_num_gpus"] != 0:
        return
    if not draft["rollout_external_engine_addrs"]:
        raise UserError("--rollout-num-gpus is 0: there would be no engine", fix="pass at least 1")
    if draft["debug_rollout_only"]:
        raise UserError(
            "--debug-rollout-only with external engines alone has nothing to start",
            why="without a trainer no weights are pushed to external engines",
            fix="pass --rollout-num-gpus 1 to start an engine as well, or leave "
            "--debug-rollout-only out",
        )


def _signal(draft: Draft) -> None:
    if draft["num_rollout"] != 0 and not draft["debug_rollout_only"]:
        _check_signal(draft)
