"""Checks of a run's inputs, outputs and flags before anything starts; the launch and `slime doctor`
call them.

Together they take a second or two, mostly to import the tokenizer. They import neither torch nor
Ray.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime import deadlines
from slime.checkpoints.load_plan import (
    LoadPlan,
    check_length,
    reference_adapter,
    resolve_critic,
    resolve_reference,
    resolve_teacher,
    unused_reference,
    unused_schedule,
)
from slime.cluster.engine_fit import (
    EngineInfo,
    check_fit,
    external_urls,
    fetch_engine_info,
    image_faults,
)
from slime.compat.plugin_imports import check_plugin_imports
from slime.config.checks_distillation import may_score, only_teacher
from slime.config.config import Config
from slime.config.flag import option_of
from slime.config.te_flags import is_installed, missing
from slime.config.teachers import BASE, SELF, engine_teachers
from slime.engines.kinds import engine_of
from slime.engines.model_groups import idle_options
from slime.errors import UserError
from slime.http_access import host_in_url
from slime.hub import fetch_model, is_hub_name, local_data
from slime.log import get_logger
from slime.memory.hardware import gpu_majors
from slime.models import family_name, family_of
from slime.models.context import engine_context
from slime.models.layout_rules import check_critic_layout, check_layout
from slime.models.layouts import Layout
from slime.models.model_flags import check_model_flags, merge_transformer
from slime.models.quantised import Quantisation
from slime.models.spec import ModelSpec, check_same_model, read_hf_config
from slime.models.vision import seeing
from slime.observe.run_folder import RunFolder, check_no_run_writes
from slime.paths import FIELDS, fill, fixed_folder
from slime.placement import (
    PlacementPlan,
    joined_cluster,
    needs_engines,
    requests_in_flight,
)
from slime.processes.host import num_cpus, num_gpus
from slime.prompts.dataset_folders import split_notice
from slime.prompts.images import images_of, sees_images
from slime.prompts.labels import compares_labels
from slime.prompts.readers import iter_rows
from slime.prompts.row_format import rewards_may_be_missing
from slime.prompts.tokenizer import tokenizer_for_checks
from slime.rollout.eval_datasets import eval_datasets
from slime.trainer.expert_rules import check_experts
from slime.trainer.gpu_kernels import delta_net_gap, finds_windows, no_windows
from slime.user_code.hooks import GenerateFunction, RewardFunction, check_hooks, hook_files
from slime.user_code.loading import check_signature, load_function
from slime.user_code.overrides import follows_old_plugin, old_plugin

if TYPE_CHECKING:
    from slime.rollout.validate_rows import DataReport, DataSize

logger = get_logger(__name__)

#: Learning rate above which Adam destroys a model of any size; toys learn with 4e-3.
_HIGHEST_LR = 5e-3
#: Number of parameters from which a model is no toy.
_NO_TOY = 200_000_000

#: Least process slots of a host without GPUs, and slots per core. More than one per core is
#: possible, because trainer and engines alternate.
_MIN_SLOTS = 8
_SLOTS_PER_CORE = 4
#: The gRPC method of Ray's own health check of the GCS.
_CHECK_ALIVE = "/ray.rpc.NodeInfoGcsService/CheckAlive"


def from_the_hub(config: Config) -> Config:
    """Replace names on the Hugging Face hub by local paths, after downloading what is missing.

    The names stay in ``origins``, and so in config.json.

    Raises:
        UserError: something is neither local nor available from the hub.
    """
    flags = config.checkpoint
    model = flags.hf_checkpoint
    folder = str(fetch_model(model)) if model is not None and is_hub_name(model) else model
    prompts = config.data.prompt_data
    held_out = config.preference.eval_preference_data
    distillation = config.distillation
    local: list[tuple[str, str, Any]] = [
        ("checkpoint", "hf_checkpoint", folder),
        (
            "distillation",
            "opd_teacher_load",
            tuple(
                f"{teacher.name}={fetch_model(teacher.source)}"
                if is_hub_name(teacher.source)
                else value
                for teacher, value in zip(distillation.teachers, distillation.opd_teacher_load)
            ),
        ),
        ("data", "prompt_data", prompts and local_data(prompts)),
        ("preference", "eval_preference_data", held_out and local_data(held_out)),
        (
            "eval",
            "eval_prompt_data",
            tuple(
                local_data(value) if number % 2 else value  # names and paths take turns
                for number, value in enumerate(config.eval.eval_prompt_data)
            ),
        ),
    ]
    if config.eval.eval_config:
        for dataset in eval_datasets(config):  # later calls of local_data find the copies
            local_data(dataset.path)
    if flags.ref_load == model:
        config = replace(config, checkpoint=replace(flags, ref_load=folder))
    for group, flag, value in local:
        values = getattr(config, group)
        given = getattr(values, flag)
        if value != given:
            name = given if isinstance(given, str) else " ".join(given)
            config = replace(
                config,
                **{group: replace(values, **{flag: value})},
                origins=config.origins | {flag: f"{config.origins[flag]}: {name}"},
            )
    return config


def check_flags(config: Config) -> None:
    """Check the hooks, rewards and output directories that flags name."""
    check_functions(config.flat())
    warn_of_old_plugins(config)
    check_rewards(config)
    check_outputs(config)


def check_functions(args: Any) -> None:
    """Check that users' functions can be imported and called, and that what they import from slime
    exists.

    Args:
        args: all flags (`Config.flat`).
    """
    check_hooks(args)
    check_plugin_imports(hook_files(args))


def warn_of_old_plugins(config: Config) -> None:
    """Warn if a plugin for earlier versions makes some flags default to the behaviour of those
    versions."""
    effects = {
        "rollout_skip_special_tokens": "responses keep their special tokens",
        "label_type": "labels their type",
    }
    active = {flag: text for flag, text in effects.items() if follows_old_plugin(config, flag)}
    if active:
        logger.warning(
            "%s is written for the import paths of earlier versions, and so %s; %s give it what "
            "new code gets",
            old_plugin(config),
            " and ".join(active.values()),
            " and ".join(
                f"{option_of(flag)} {'text' if flag == 'label_type' else ''}".strip()
                for flag in active
            ),
        )


# -- models ----------------------------------------------------------------------------------------


def check_architecture(config: Config) -> None:
    """Check that the model's family is known, that no flag contradicts the model or has no effect,
    and that the parallel layout fits. Reads only config.json."""
    from slime.memory.plan import run_hf_config

    flags = config.checkpoint
    hf_config = run_hf_config(config)
    spec = family_of(hf_config, flags.model_name).model_spec(hf_config)
    check_model_flags(config.megatron, spec)
    _check_longest_sequence(config, spec)
    if spec.vision is not None:
        images_of(config)  # refuses a directory without an image processor
    if config.algorithm.trains_reward_model:
        from slime.checkpoints.reward_models import classifier_of

        classifier_of(hf_config)
    if needs_engines(config):
        engine_of(config).check_model(spec, hf_config)
        draft = engine_of(config).draft_model(config)
        if draft is not None:
            draft.check(spec)
    check_experts(merge_transformer(spec.transformer, config.megatron.transformer))
    check_layouts(config, spec)
    stop_ids = {
        *config.rollout.rollout_stop_token_ids,
        *(token for dataset in eval_datasets(config) for token in dataset.stop_token_ids),
    }
    if beyond := sorted(token for token in stop_ids if token >= spec.vocab_size):
        why = f"{flags.hf_checkpoint} has tokens 0 to {spec.vocab_size - 1}"
        fix = (
            "pass ids of its tokenizer (--rollout-stop-token-ids, stop_token_ids of an evaluation "
            "set)"
        )
        raise UserError(
            f"{', '.join(map(str, beyond))} can stop no answer: there is no such token", why, fix
        )


def check_layouts(config: Config, spec: ModelSpec) -> None:
    """Check that the parallel layouts of policy and critic divide the model."""
    check_layout(spec.padded(config.megatron.tensor_model_parallel_size), config)
    if config.critic.has_own_gpus or config.critic_has_own_layout:
        check_critic_layout(spec, config)


def _check_longest_sequence(config: Config, spec: ModelSpec) -> None:
    """Check that flags limit sequences to the length for which the rotary frequencies are
    computed."""
    limit = spec.longest_sequence
    if limit is None or config.debug.debug_rollout_only:
        return
    prompt = config.data.rollout_max_prompt_len
    bounds = {"--seq-length": config.train.seq_length}
    if not config.algorithm.trains_on_data:
        bounds["--rollout-max-context-len"] = config.rollout.rollout_max_context_len
        if prompt is not None:
            longest = prompt + config.rollout.rollout_max_response_len
            bounds["--rollout-max-prompt-len and --rollout-max-response-len"] = longest
    given = {option: bound for option, bound in bounds.items() if bound is not None}
    if min(given.values(), default=limit + 1) <= limit:
        return
    said = ", ".join(f"{option}: {bound}" for option, bound in given.items())
    raise UserError(
        f"sequences may be longer than {limit} tokens, for which the model has other rotary "
        "frequencies",
        why="it has longrope: transformers and engines change the frequencies of a whole sequence "
        f"that is longer; here those of up to {limit} tokens are computed "
        f"({said or 'no flag bounds the length'})",
        fix=f"pass --seq-length {limit}",
    )


def check_weights(config: Config, plan: LoadPlan) -> None:
    """Check that all Hugging Face directories of the run hold the same, complete model, that a
    fully trained model is not quantised, and that the checkpoint to load is not past the run's
    end."""
    from slime.checkpoints.hf_files import HfReader
    from slime.checkpoints.peft_files import check_adapter

    if not config.debug.debug_rollout_only:  # debug runs always start at the first rollout
        check_length(config, plan)
        for warning in filter(None, (unused_reference(config), unused_schedule(config, plan))):
            logger.warning("%s", warning)
    flags = config.checkpoint
    assert flags.hf_checkpoint is not None
    family = family_of(flags.hf_checkpoint, flags.model_name)
    served = {Path(flags.hf_checkpoint)} if needs_engines(config) else set()
    plans = [plan, *([resolve_reference(config)] if config.algorithm.needs_reference else [])]
    plans += [
        resolve_teacher(config, teacher)
        for teacher in config.distillation.teachers
        if teacher.source not in (SELF, BASE)
    ]
    critics = set[Path]()
    if config.algorithm.needs_critic and not plan.is_resume:
        plans.append(resolve_critic(config, plan))
        critics = {plans[-1].path}
    trained = {
        one.path for one in plans if one.kind == "hf" and not config.debug.debug_rollout_only
    }
    spec = family.model_spec(flags.hf_checkpoint)
    trunks = critics - served - {one.path for one in plans[:-1]}
    for folder in sorted(served | trained):
        own = family_of(folder, flags.model_name).model_spec(folder)
        check_same_model(spec, own, folder)
        quantisation = Quantisation.read(read_hf_config(folder))
        if quantisation is not None and config.lora.lora_rank and folder in critics:
            _check_quantised_critic(config, folder, quantisation)
        # a frozen base is read as engines read it
        is_frozen = bool(config.lora.lora_rank) and folder == Path(flags.hf_checkpoint)
        if quantisation is not None and (folder not in trained or is_frozen):
            # imports torch
            from slime.checkpoints.quantised_check import verify_quantised

            verify_quantised(folder, family, own, quantisation)
        else:
            reader = HfReader(folder, names_only=True, as_trunk=folder in trunks)
            reader.verify(family, own)
            if folder in served and reader.has_transposed_stacks:
                engine_of(config).check_transposed_experts(folder)
    for adapter in (config.lora.lora_adapter_path, reference_adapter(config)):
        if adapter:
            check_adapter(adapter)


def _check_quantised_critic(config: Config, folder: Path, quantisation: Quantisation) -> None:
    """Refuse quantised weights as the start of a critic, unless they are the base that stays frozen
    in policy and critic."""
    has_adapters = bool(config.critic.critic_lora_rank)
    if has_adapters and folder.resolve() == resolve_reference(config).path.resolve():
        return
    raise UserError(
        f"a critic cannot start from {folder}, which holds weights quantised to {quantisation}",
        why="only the policy's base is read with the values of the engines"
        if has_adapters
        else "adapters are trained beside them, the critic is trained as a whole",
        fix="name plain weights with --critic-load (slime convert quantised-to-hf makes some of "
        "these), or leave --critic-load and --critic-lora-rank out",
    )


def check_teachers(config: Config) -> None:
    """Check that teachers have the policy's vocabulary.

    Raises:
        UserError: there is none, one has another vocabulary, or its engine does not answer.
    """
    from slime.prompts.same_vocabulary import check_same_vocabulary

    student = config.checkpoint.hf_checkpoint
    for name, folder, info in _teacher_folders(config):
        check_same_vocabulary(
            str(student), folder, name, trust_remote_code=config.checkpoint.trust_remote_code
        )
        if config.images.multimodal_keys and not config.distillation.in_trainer:
            _check_sight(config, name, Path(folder), info)


def _check_sight(config: Config, name: str, folder: Path, info: EngineInfo | None) -> None:
    """Check that a teacher in an engine sees images, and that the engine computes them correctly. A
    family that is not known here is left to the canary.

    Args:
        info: of an engine that others have started.
    """
    hf_config = read_hf_config(folder)
    if not family_name(hf_config):
        return
    if not sees_images(folder):
        raise UserError(
            f"teacher {name} ({folder}) sees no images",
            why="its family has no vision tower here, or its directory no preprocessor_config.json",
            fix="use a teacher that sees images, or leave --multimodal-keys out",
        )
    described = seeing(hf_config)
    spec = family_of(described).model_spec(described)
    if info is None:
        engine_of(config).check_model(spec, described)
        return
    for is_so, why, fix in image_faults(spec, info):
        if is_so:
            raise UserError(f"the engine of teacher {name} cannot take part", why=why, fix=fix)


def _teacher_folders(config: Config) -> Iterator[tuple[str, str, EngineInfo | None]]:
    """Yield each teacher whose directory is on this host: its name, the directory, and what its
    engine reports if others have started it."""
    flags = config.distillation
    found: list[tuple[str, str, EngineInfo | None]] = [
        (teacher.name, teacher.source, None) for teacher in flags.teachers
    ]
    if flags.use_opd and not flags.in_trainer and needs_engines(config):
        served = {
            model.name: model.path
            for model in engine_of(config).served_models(config)
            if not model.is_policy
        }
        teachers = engine_teachers(flags.opd_teacher_urls, served.keys())
        if not teachers and not may_score(config.flat()):
            raise UserError(
                "--use-opd has no teacher",
                why="--sglang-config has no model but the policy",
                fix="add the teacher's model to it, or pass --opd-teacher-urls or "
                "--opd-teacher-load",
            )
        key = flags.opd_teacher_key
        is_idle = len(teachers) == 1 and key != type(flags).opd_teacher_key
        if is_idle and not flags.opd_teacher_urls:  # of the flag's teachers resolution warns
            logger.warning("%s", only_teacher(key, teachers[0].name))
        for teacher in teachers:
            path = served.get(teacher.source)
            info = None if path is not None else fetch_engine_info(teacher.source)
            if info is not None:
                path = str(info.model.get("model_path"))
            assert path is not None
            found.append((teacher.name, path, info))
    for name, path, info in found:
        if path not in (SELF, BASE) and Path(path).is_dir():
            yield name, path, info
        elif info is not None:
            logger.warning(
                "teacher %s: its vocabulary could not be compared with the policy's, since its "
                "engine serves %s, which is not on this host. With another tokenizer it would "
                "score other text: compare both, or put its directory there",
                name,
                path,
            )


def check_engine_flags(config: Config) -> None:
    """Check that the engines support the flags of this run."""
    if needs_engines(config):
        engine = engine_of(config)
        engine.check_flags(config)
        models = engine.served_models(config)
        for warning in idle_options(config, models):
            logger.warning("%s", warning)
        for model in models:
            if not model.is_policy and not joins_cluster(config) and not Path(model.path).is_dir():
                raise UserError(
                    f"--sglang-config: model {model.name} has the model_path {model.path}, which "
                    "is no folder here",
                    fix="name a Hugging Face directory",
                )


def check_engine(config: Config) -> None:
    """Check that engines of the chosen kind can start on this host. On a cluster each node checks
    this itself."""
    if needs_engines(config) and PlacementPlan.of(config).num_engines and not joins_cluster(config):
        engine_of(config).check_installed()


def check_external_engines(config: Config) -> None:
    """Check that external engines answer and fit this run. Whether they fit each other is checked
    at the launch."""
    for url in external_urls(config) if needs_engines(config) else ():
        check_fit(
            config, url, replace(fetch_engine_info(url), tokens=None), None, lambda warning: None
        )


def check_transformer_engine(config: Config) -> None:
    """Check that flags which need Transformer Engine find it, if the trainer runs on this host. On
    a cluster each trainer rank checks this itself."""
    if joins_cluster(config) or config.debug.debug_rollout_only:
        return
    error = missing(vars(config.flat()), installed=is_installed())
    if error is not None:
        raise error


def check_windows(config: Config) -> None:
    """Check that a kernel for windowed attention is installed, if the trainer runs on GPUs of this
    host. On other hosts, a missing kernel fails in the first pass.

    Raises:
        UserError: neither torch nor flash-attn-4 supports windows here.
    """
    spec = _trained_on_gpus_here(config)
    uses_own_kernels = config.train.transformer_impl == "transformer_engine" or config.train.spec
    if spec is None or spec.has_sinks or config.megatron.fp32 or uses_own_kernels:
        return
    window = next(filter(None, map(spec.window, range(spec.num_layers))), None)
    torch_only = config.train.attention_backend == "flash"
    torch_only |= bool(config.megatron.transformer.get("deterministic_mode"))
    if window and not finds_windows(gpu_majors(), spec.head_dim, torch_only=torch_only):
        raise no_windows(importlib.metadata.version("torch"), window)


def warn_of_small_graphs(config: Config) -> None:
    """Warn if an engine gets more requests at once than it has CUDA graphs for."""
    largest = engine_of(config).largest_graph(config.engine.sglang)
    engines = PlacementPlan.of(config).num_engines
    replicas = engines * int(config.engine.sglang.get("dp_size") or 1)
    if largest is None or not replicas:
        return
    requests = -(-requests_in_flight(config) // replicas)
    if requests > largest:
        logger.warning(
            "an engine decodes up to %d requests at once, and has CUDA graphs for %d at most "
            "(--sglang-cuda-graph-…): larger batches are decoded several times slower; raise the "
            "limit to %d, or lower --sglang-server-concurrency",
            requests,
            largest,
            requests,
        )


def warn_of_slow_delta_nets(config: Config) -> None:
    """Warn if the trainer runs on GPUs of this host and finds no kernels for gated delta nets."""
    spec = _trained_on_gpus_here(config)
    if spec is None or not any(spec.transformer.get("linear_attention_freq") or ()):
        return
    gap = delta_net_gap(gpu_majors())
    if gap:
        logger.warning(
            "gated delta nets would be computed by torch, many times slower than by kernels: %s; "
            "pip install 'slime-rl[delta-net]'",
            gap,
        )


def warn_of_high_learning_rate(config: Config) -> None:
    """Warn of a learning rate with which Adam destroys the model: of any model above 5e-3; of one
    that is trained in full and is no toy, above 100 times what is usual."""
    from slime.memory.trainer import rank_parameters

    if config.megatron.optimizer_name != "adam" or config.debug.debug_rollout_only:
        return
    flags = config.checkpoint
    loss = config.algorithm.loss_type
    usual = "1e-5 to 5e-5" if loss == "sft_loss" else "5e-7 to 1e-5"
    limit = _HIGHEST_LR
    if config.lora.lora_rank:
        usual = "1e-5 to 2e-4"
    else:
        num_parameters = 0
        with contextlib.suppress(UserError):  # `check_architecture` reports it
            family = family_of(str(flags.hf_checkpoint), flags.model_name)
            spec = family.model_spec(str(flags.hf_checkpoint))
            num_parameters = sum(held.numel for held in rank_parameters(spec, Layout(), 0))
        if num_parameters >= _NO_TOY:
            limit = 1e-3 if loss == "sft_loss" else 1e-4
    rates = {"lr": config.megatron.lr}
    if config.algorithm.needs_critic:
        rates["critic_lr"] = config.critic.critic_lr
    for name, rate in rates.items():
        if rate > (limit if name == "lr" else _HIGHEST_LR):
            logger.warning(
                "%s %g is far above what is usual with Adam (%s), whose steps change each weight "
                "by about the learning rate, while most weights are hundredths: the model may "
                "soon answer nonsense; lower it, unless this is meant",
                option_of(name),
                rate,
                "about 1e-5" if name == "critic_lr" else usual,
            )


def _trained_on_gpus_here(config: Config) -> ModelSpec | None:
    """Return the model, if its trainer runs on GPUs of this host."""
    flags = config.checkpoint
    if not num_gpus() or joins_cluster(config) or config.debug.debug_rollout_only:
        return None
    path = str(flags.hf_checkpoint)
    return family_of(path, flags.model_name).model_spec(path)


def check_context(config: Config) -> None:
    """Check that prompt and response limits fit into the model's context.

    Raises:
        UserError: responses may exceed the context even without a prompt. If only prompt and
            response together may exceed it, a warning is logged.
    """
    context = engine_context(config)
    if context is None or config.algorithm.trains_on_data:
        return
    limits = {"--rollout-max-response-len": config.rollout.rollout_max_response_len}
    if config.eval.eval_prompt_data or config.eval.eval_config:
        limits["--eval-max-response-len"] = config.eval.eval_max_response_len
    asked = config.values().get("sglang_context_length")
    source = "--sglang-context-length" if asked else config.checkpoint.hf_checkpoint
    why = f"engines take {context} tokens by {source}"
    capped = config.rollout.rollout_max_context_len
    for option, limit in limits.items():
        if limit >= context and (capped is None or capped > context):
            raise UserError(
                f"{option} {limit} does not fit into the model's context of {context} tokens",
                why=f"{why}; a prompt takes part of it, and answers beyond it are noise",
                fix=f"pass {option} {max(1, context // 2)}, or --rollout-max-context-len {context}",
            )
    prompt = config.data.rollout_max_prompt_len
    longest = config.rollout.rollout_max_response_len + (prompt or 0)
    longest = min(longest, config.rollout.rollout_max_context_len or longest)
    if longest > context:
        logger.warning(
            "prompts of up to %s tokens and responses of up to %d are more than the model's "
            "context of %d tokens (%s): long answers are cut there; --rollout-max-context-len %d "
            "states the limit",
            prompt,
            config.rollout.rollout_max_response_len,
            context,
            why,
            context,
        )


# -- rewards ---------------------------------------------------------------------------------------


def check_rewards(config: Config) -> None:
    """Check that samples get rewards, and that the functions which evaluation sets name exist."""
    from slime.rollout.rewards import reward_model
    from slime.rollout.rewards.pool import check_rm_type

    reward = config.reward
    datasets = eval_datasets(config)
    given = (reward.rm_type, *(dataset.rm_type for dataset in datasets))
    rm_types = [rm_type for rm_type in given if rm_type]
    for rm_type in rm_types:
        check_rm_type(rm_type)
    for dataset in datasets:
        if dataset.rm_type and (judge := dataset.custom_rm_path or reward.custom_rm_path):
            logger.warning(
                "evaluation set %s: its rm_type %s has no effect, as %s gives the rewards (and "
                "may read it)",
                dataset.name,
                dataset.rm_type,
                judge,
            )
        for path, kind in (
            (dataset.custom_rm_path, RewardFunction),
            (dataset.custom_generate_function_path, GenerateFunction),
        ):
            if path:
                check_signature(load_function(path), kind, path)
    if reward.custom_rm_path and _rows_name_rewards(config, unreadable=False):
        logger.warning(
            "--prompt-data: the rm_type in its rows has no effect, as %s gives the rewards (and "
            "may read it)",
            reward.custom_rm_path,
        )
    if (
        compares_labels(reward.rm_type)
        and config.data.label_key is None
        and not reward.custom_rm_path
        and rewards_may_be_missing(config)
    ):
        logger.warning(
            "--rm-type %s compares with labels, and without --label-key there are none: rewards "
            "are 0, and the teacher of --use-opd alone gives what is learnt",
            reward.rm_type,
        )
    if not _may_have_rewards(config):
        raise UserError(
            "there is no reward function",
            why="neither --rm-type nor --custom-rm-path is set, and the first rows name no "
            "rm_type in their metadata",
            fix="pass one of them; --rm-type math compares with the label",
        )
    if reward_model.NAME in rm_types:  # it has no variant with boxed_
        reward_model.check_directory(reward.rm_path, images=bool(config.images.multimodal_keys))
    if {"remote_rm", "boxed_remote_rm"}.intersection(rm_types) and not reward.rm_url:
        raise UserError(
            "--rm-type remote_rm needs an address", fix="pass --rm-url http://host:port/path"
        )


def _may_have_rewards(config: Config) -> bool:
    """Return whether samples get a reward or need none, or users' functions may set one."""
    rollout = config.rollout
    data = config.data
    return bool(
        config.reward.rm_type
        or config.reward.custom_rm_path
        or config.algorithm.trains_on_data
        or config.distillation.use_opd
        or rollout.custom_generate_function_path
        or rollout.rollout_function_path
        or data.data_source_path
        or rollout.num_rollout == 0
        or config.debug.debug_train_only
        or not data.prompt_data
        or _rows_name_rewards(config, unreadable=True)
    )


def _rows_name_rewards(config: Config, *, unreadable: bool) -> bool:
    """Return whether one of the first rows has an rm_type.

    Args:
        unreadable: the result if the rows cannot be read, which `check_data` reports.
    """
    data = config.data
    if not data.prompt_data or config.debug.debug_train_only:
        return False
    try:
        first = [
            row.get(data.metadata_key)
            for _, row in itertools.islice(iter_rows(data.prompt_data), 10)
        ]
    except UserError:
        return unreadable
    return any(isinstance(metadata, dict | str) and "rm_type" in metadata for metadata in first)


# -- data ------------------------------------------------------------------------------------------


def check_data(config: Config) -> None:
    """Check that rows of all data sets are valid (`slime.rollout.validate_rows`), and that the
    debug dumps to load exist.

    Raises:
        UserError: lists everything that is wrong with the data.
    """
    from slime.prompts.prepare import remember

    report = data_report(config)
    for line in report.notes:
        logger.info("%s", line)
    for line in (*report.warnings, *report.templated):
        logger.warning("%s", line)
    if report.error is not None:
        raise report.error
    remember(report.checked)


def data_report(config: Config, tokenizer: Any = None) -> DataReport:
    """Return the findings of `check_data`.

    Args:
        tokenizer: the model's tokenizer; loaded if None.
    Raises:
        UserError: the tokenizer cannot be read, or a dump does not exist.
    """
    from slime.rollout.debug_data import check_dumps
    from slime.rollout.validate_rows import data_inputs, validate_data

    check_dumps(config)
    for one in data_inputs(config):
        if notice := split_notice(one.path, one.splits):
            logger.info("%s", notice)
    if tokenizer is None:
        tokenizer = tokenizer_for_checks(config)
    report = validate_data(config, tokenizer)
    size = report.sizes.get(str(config.data.prompt_data))
    if size is not None and not report.errors:
        try:
            _check_batch(config, size)
        except UserError as error:
            report.errors.append(error)
    return report


def _check_batch(config: Config, size: DataSize) -> None:
    """Raise if --num-epoch is set and an epoch has less than one whole batch."""
    wanted = config.rollout.rollout_batch_size
    if config.data.num_epoch is None or size.num_kept >= wanted:
        return
    left_out = size.num_rows - size.num_kept
    raise UserError(
        f"{config.data.prompt_data} has {size.num_kept} prompts, less than one "
        f"--rollout-batch-size of {wanted}",
        why=f"{left_out} of {size.num_rows} are left out, as the warnings say" if left_out else "",
        fix="lower --rollout-batch-size, or pass --num-rollout instead of --num-epoch (prompts "
        "are then used again in a new epoch)",
    )


# -- outputs ---------------------------------------------------------------------------------------


def check_outputs(config: Config) -> None:
    """Check that output directories can be written and belong to no other run."""
    flags = {
        "--output-dir": config.observe.output_dir,
        "--save": config.checkpoint.save,
        "--save-hf": config.checkpoint.save_hf,
        "--update-weight-disk-dir": config.sync.update_weight_disk_dir,
        "--save-debug-rollout-data": config.debug.save_debug_rollout_data,
        "--save-debug-train-data": config.debug.save_debug_train_data,
        "--dump-details": config.debug.dump_details,
    }
    observe = config.observe
    claimed = (
        Path(observe.output_dir, observe.run_name),
        Path(config.checkpoint.save or observe.output_dir),
    )
    own = [folder.resolve() for folder in claimed]
    for flag, value in flags.items():
        if value:
            place = fixed_folder(value) if flag[2:].replace("-", "_") in FIELDS else Path(value)
            _check_writable(flag, place)
            check_no_run_writes(place, flag, own)
    _check_export(config)


def warn_if_nothing_is_kept(config: Config) -> None:
    """Warn if the run saves neither a checkpoint nor a model."""
    keeps = config.checkpoint.save or config.checkpoint.save_hf
    if not (keeps or config.debug.debug_rollout_only or config.rollout.num_rollout == 0):
        logger.warning(
            "nothing of this training will be kept: leave --no-save out for checkpoints and the "
            "model at the end, both in the run folder, or pass --save-hf DIR for the model alone"
        )


def _check_export(config: Config) -> None:
    """Check that the export, which replaces its directory, deletes nothing else of the run."""
    from slime.checkpoints.hf_files import check_export

    flags = config.checkpoint
    observe = config.observe
    kept = {
        "--save": flags.save,
        "--load": flags.load,
        "--ref-load": flags.ref_load,
        "--hf-checkpoint": flags.hf_checkpoint,
        "--lora-adapter-path": config.lora.lora_adapter_path,
        "--critic-load": config.critic.critic_load,
    }
    kept |= {
        f"--opd-teacher-load {teacher.name}": teacher.source
        for teacher in config.distillation.teachers
    }
    if flags.save_hf:
        kept["--output-dir"] = observe.output_dir
        target = fill(flags.save_hf, 0)
    elif flags.save and flags.export_model:
        target = RunFolder(Path(observe.output_dir) / observe.run_name, observe.stage or None).model
    else:
        return
    check_export(target, {flag: Path(path) for flag, path in kept.items() if path})


def _check_writable(flag: str, path: Path) -> None:
    nearest = path.absolute()
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        why = f"{nearest} is a file"
    elif not os.access(nearest, os.W_OK | os.X_OK):
        why = f"{nearest} cannot be written by this user"
    else:
        return
    raise UserError(
        f"{flag} {path} cannot be made",
        why=why,
        fix=f"pass {flag} with a directory you can write to",
    )


# -- size ------------------------------------------------------------------------------------------


def joins_cluster(config: Config) -> bool:
    """Return whether the run joins a running Ray cluster instead of starting one on this host."""
    return joined_cluster(config) is not None


def check_slots(config: Config) -> None:
    """Check that this host has enough GPUs or process slots for a local Ray, or that the cluster to
    join answers."""
    address = joined_cluster(config)
    if address is not None:
        _check_answers(address)
        return  # the number of slots is known only after joining
    plan = PlacementPlan.of(config)
    gpus = num_gpus()
    cores = num_cpus()
    if gpus and config.cluster.num_gpus_per_node > gpus:
        raise UserError(
            f"--num-gpus-per-node is {config.cluster.num_gpus_per_node}, and this host has {gpus} "
            "GPUs",
            fix="leave it out, or join a Ray cluster of such hosts with --ray-address",
        )
    limit = gpus or max(_MIN_SLOTS, _SLOTS_PER_CORE * cores)
    if plan.total <= limit:
        return
    here = f"this host has no GPU, and its {cores} cores carry {limit}"
    if gpus:
        here = f"this host has {gpus} GPUs"
    raise UserError(
        f"this run needs {plan.total} {'GPUs' if gpus else 'process slots (CPUs)'}, {here}",
        why=plan.formula,
        fix="lower --actor-num-gpus-per-node or --rollout-num-gpus, pass --colocate to share them, "
        + ("leave --critic-num-gpus-per-node out, " if plan.num_critic else "")
        + "or join a Ray cluster with --ray-address",
    )


def _check_answers(address: str) -> None:
    """Raise unless a Ray cluster answers. Ray itself would retry for more than a minute and print
    each attempt."""
    fix = "start one with 'ray start --head', or unset --ray-address and RAY_ADDRESS to run here"
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit():
        raise UserError(
            f"'{address}' is no address of a Ray cluster",
            why="the driver joins the cluster itself: host and port of its GCS, 6379 by default",
            fix="pass --ray-address host:port or auto",
        )
    try:
        answers = _is_gcs(host.strip("[]"), int(port))
    except OSError as error:
        raise UserError(f"no Ray cluster answers at {address}", why=str(error), fix=fix) from error
    if not answers:
        raise UserError(
            f"no Ray cluster answers at {address}",
            why="somebody listens there, but does not answer as Ray does (waited for at most "
            f"{deadlines.PREFLIGHT_CONNECT:.0f} s)",
            fix=f"the address is that of Ray's GCS (6379 by default), not of its dashboard; {fix}",
        )


def _is_gcs(host: str, port: int) -> bool:
    """Return whether Ray's GCS listens there. One that requires a token counts as well; with Ray's
    TLS enabled, any server counts.

    Raises:
        OSError: no server listens.
    """
    end = time.monotonic() + deadlines.PREFLIGHT_CONNECT
    with socket.create_connection((host, port), timeout=deadlines.PREFLIGHT_CONNECT):
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return True
    import grpc

    address = f"{host_in_url(host)}:{port}"
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            channel.unary_unary(_CHECK_ALIVE)(b"", timeout=max(0.1, end - time.monotonic()))
        except grpc.RpcError as error:
            code = grpc.StatusCode
            return error.code() in (code.UNAUTHENTICATED, code.PERMISSION_DENIED)
    return True
