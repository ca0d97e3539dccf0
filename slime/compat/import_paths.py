"""Import paths of existing slime plugins → where the same things live here.

    from slime.utils.types import Sample                      is  slime.samples.types.Sample
    from slime.rollout.sglang_rollout import GenerateState    is
    slime.compat.generating.PluginGenerateState

What such a plugin reads is what it was written for: where a hook of a run imports an old path
(`slime.user_code.overrides.old_plugin`), responses
keep their special tokens and labels their type, unless a flag says otherwise.

The old modules do not exist as files. `install`, called when `slime` is imported, adds a finder to
`sys.meta_path` that makes them up from the table below, one name at a time: importing an old path
costs nothing until a name of it is used. What needs more than a name, another signature say, is in
`slime.compat`, which calls our own code.

Names are looked up when they are called, as there: a plugin that puts a function of its own in
place of one of `REPLACEABLE` has it called by the run (`slime.user_code.overrides`). A name that
has no counterpart is an ImportError that says what to use (`NO_COUNTERPART`).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType
from typing import Any

from slime.documentation import doc_url
from slime.user_code.overrides import Part, register_old_modules, set_override

_HOOKS = "slime.user_code.hooks"
_LOOP = "slime.rollout.loop"
_PLUGIN = "slime.rollout.plugin_api"
_FILTERS = "slime.rollout.filters"
_TEXT = "slime.rollout.rewards.text"
_TYPES = "slime.samples.types"
_OLD = "slime.compat"
_GENERATING = f"{_OLD}.generating"
_GRADING = f"{_OLD}.grading"
_DATA = f"{_OLD}.data"
_CALLS = f"{_OLD}.calls"
_TENSORS = f"{_OLD}.tensors"
_METRICS = f"{_OLD}.metrics"
_CONTEXT = f"{_OLD}.context_parallel"
_ACCELERATOR = f"{_OLD}.accelerator"


def _same(module: str, *names: str) -> dict[str, str]:
    """Rows of names that are the same in ``module``."""
    return {name: f"{module}:{name}" for name in names}


_REWARDS = _same(_PLUGIN, "async_rm", "batched_async_rm")
_HTTP = _same(_PLUGIN, "post", "get")
_OUTPUTS = _same(_HOOKS, "RolloutFnTrainOutput", "RolloutFnEvalOutput")
_FILTERING = {
    **_same(_HOOKS, "DynamicFilterOutput"),
    **_same(_FILTERS, "MetricGatherer", "should_drop_dynamic_filter_output"),
    **_same(_CALLS, "call_dynamic_filter"),
}
_METRIC_UTILS = {
    **_same(
        _METRICS,
        "compute_rollout_step",
        "compute_statistics",
        "dict_add_prefix",
        "compute_pass_rate",
    ),
    "has_repetition": "slime.rollout.metrics:is_repetitive",
}
_BOXES = _same(_GRADING, "last_boxed_only_string", "remove_boxed")

#: Old module → name in it → "module:name" here. Packages stand for themselves with an empty table.
OLD_MODULES: dict[str, dict[str, str]] = {
    "slime.utils": {},
    "slime.utils.types": {**_same(_TYPES, "Sample"), "RolloutBatch": "builtins:dict"},
    "slime.utils.http_utils": {
        **_HTTP,
        **_same(
            _CALLS, "init_http_client", "find_available_port", "is_port_available", "get_host_info"
        ),
    },
    "slime.utils.async_utils": _same(_CALLS, "run", "get_async_loop", "AsyncLoopThread"),
    "slime.utils.misc": {
        "load_function": "slime.user_code.loading:load_function",
        "should_run_periodic_action": "slime.run.schedule:is_due",
        **_same(_CALLS, "SingletonMeta", "get_free_port", "get_current_node_ip", "exec_command"),
    },
    "slime.utils.data": _same(_DATA, "Dataset", "read_file", "filter_long_prompt"),
    "slime.utils.mask_utils": _same(_DATA, "MultiTurnLossMaskGenerator", "get_response_lengths"),
    "slime.utils.processing_utils": _same(_DATA, "load_tokenizer", "load_processor"),
    "slime.utils.eval_config": _same(
        _DATA, "EvalDatasetConfig", "build_eval_dataset_configs", "ensure_dataset_list"
    ),
    "slime.utils.ppo_utils": _same(
        _TENSORS,
        *(
            "compute_approx_kl",
            "compute_policy_loss",
            "compute_cispo_loss",
            "compute_gspo_kl",
            "compute_opsm_mask",
        ),
        *(
            "get_grpo_returns",
            "get_reinforce_plus_plus_returns",
            "get_reinforce_plus_plus_baseline_advantages",
        ),
        *(
            "get_advantages_and_returns",
            "get_advantages_and_returns_batch",
            "vanilla_gae",
            "chunked_gae",
        ),
        "chunked_discounted_returns",
    ),
    "slime.utils.dp_schedule": _same(_TENSORS, "build_dp_schedule"),
    "slime.utils.logging_utils": _same(_METRICS, "log"),
    "slime.utils.tracking_utils": _same(_METRICS, "log"),
    "slime.utils.metric_utils": _METRIC_UTILS,
    "slime.utils.trace_utils": _same(_CALLS, "trace_span", "trace_function"),
    "slime.utils.accelerator": _same(
        _ACCELERATOR,
        *(
            "device_type",
            "current_device",
            "device",
            "device_name",
            "device_count",
            "set_device",
            "synchronize",
        ),
        *(
            "empty_cache",
            "mem_get_info",
            "memory_allocated",
            "memory_reserved",
            "manual_seed",
            "autocast",
        ),
        "process_group_backend",
    ),
    "slime.observability": {},
    "slime.observability.logging_utils": _same(_METRICS, "log"),
    "slime.observability.tracking_utils": _same(_METRICS, "log"),
    "slime.observability.metric_utils": _METRIC_UTILS,
    "slime.observability.trace_utils": _same(_CALLS, "trace_span", "trace_function"),
    "slime.backends": {},
    "slime.backends.megatron_utils": {},
    "slime.backends.megatron_utils.cp_utils": _same(
        _CONTEXT, "all_gather_with_cp", "slice_log_prob_with_cp", "get_sum_of_sample_mean"
    ),
    "slime.rollout.base_types": {**_OUTPUTS, **_same(_CALLS, "call_rollout_fn")},
    "slime.rollout.data_source": {
        **_same(_HOOKS, "DataSource"),
        **_same(f"{_OLD}.sources", "RolloutDataSource", "RolloutDataSourceWithBuffer"),
        **_same("slime.samples.buffer", "pop_first"),
    },
    "slime.rollout.sglang_rollout": {
        **_same(
            _GENERATING,
            *("generate", "abort", "generate_rollout_async"),
            *(
                "generate_and_rm",
                "generate_and_rm_group",
                "eval_rollout",
                "eval_rollout_single_dataset",
            ),
        ),
        "GenerateState": f"{_GENERATING}:PluginGenerateState",
        **_same(_PLUGIN, "get_model_url"),
        **_same(_LOOP, "generate_rollout"),
        **_REWARDS,
        **_HTTP,
        **_OUTPUTS,
        **_FILTERING,
        **_same(_TYPES, "Sample"),
        **_same(_CALLS, "run", "SingletonMeta"),
        **_same(_DATA, "Dataset", "EvalDatasetConfig", "load_tokenizer", "load_processor"),
        "load_function": "slime.user_code.loading:load_function",
    },
    "slime.rollout.sglang_streaming_rollout": {"generate_streaming": f"{_GENERATING}:generate"},
    "slime.rollout.sample_hooks": _same(_GENERATING, "apply_rollout_sample_hooks"),
    "slime.rollout.sft_rollout": {"generate_rollout": f"{_PLUGIN}:generate_sft_rollout"},
    "slime.rollout.fully_async_rollout": {
        "generate_rollout_fully_async": f"{_LOOP}:generate_rollout"
    },
    "slime.rollout.on_policy_distillation": _same(
        f"{_OLD}.distillation", "reward_func", "post_process_rewards"
    ),
    "slime.rollout.rm_hub": {
        **_REWARDS,
        **_same(
            _GRADING,
            "remote_rm",
            "grade_answer_verl",
            "get_deepscaler_rule_based_reward",
            "f1_score",
        ),
        "compute_gpqa_reward": f"{_TEXT}:grade_gpqa",
        "compute_score_dapo": f"{_GRADING}:compute_score",
        "extract_boxed_answer": f"{_GRADING}:extract_answer",
    },
    "slime.rollout.rm_hub.math_utils": {
        **_BOXES,
        **_same(_GRADING, "extract_answer", "extract_boxed_answer"),
        **_same(_GRADING, "grade_answer_verl", "grade_answer_sympy", "grade_answer_mathd"),
    },
    "slime.rollout.rm_hub.math_dapo_utils": {
        **_BOXES,
        **_same(_GRADING, "compute_score", "verify", "is_correct_minerva", "is_correct_strict_box"),
        **_same(_GRADING, "normalize_final_answer"),
    },
    "slime.rollout.rm_hub.deepscaler": _same(_GRADING, "get_deepscaler_rule_based_reward"),
    "slime.rollout.rm_hub.f1": _same(_GRADING, "f1_score", "normalize_answer"),
    "slime.rollout.rm_hub.gpqa": {"compute_gpqa_reward": f"{_TEXT}:grade_gpqa"},
    "slime.rollout.rm_hub.ifbench": _same(_GRADING, "compute_ifbench_reward"),
    "slime.rollout.filter_hub": {},
    "slime.rollout.filter_hub.base_types": _FILTERING,
    "slime.rollout.filter_hub.dynamic_sampling_filters": _same(
        _FILTERS, "check_reward_nonzero_std", "check_reward_nonzero_std_with_fallback"
    ),
}

_NO_MEDIA = (
    "samples are text in this version; a generate function of your own may send images to the "
    "engine itself"
)
_NO_LOGITS = (
    "a function of --custom-loss-function-path finds batch['current_log_probs'], with gradient "
    "and over the whole "
    "vocabulary"
)
_WHOLE_SAMPLES = "functions of losses see whole samples here, under context parallelism too"
_TRACKERS = (
    "--use-wandb and --use-tensorboard; the run starts them, and log(args, metrics, step_key) "
    "reaches them"
)
_NO_WORKER = (
    f"rollouts overlap with training by themselves in train_async.py: {doc_url('asynchronous.md')}"
)

#: "Module:name", or a module with all that is in it, that has no counterpart → what to use instead.
NO_COUNTERPART: dict[str, str] = {
    "slime.utils.types:ParamInfo": (
        "weights are described by slime.models.spec, and pushed by slime.weights"
    ),
    "slime.utils.types:MultimodalTypes": _NO_MEDIA,
    "slime.utils.http_utils:run_router": (
        "the run starts its routers; slime.engines.router has their command line"
    ),
    "slime.utils.http_utils:terminate_process": (
        "children die with their owner: slime.processes.owner"
    ),
    "slime.utils.misc:Box": "batches go to the trainer as slime.samples.batch.TrainBatch",
    "slime.utils.data:process_rollout_data": (
        "batches go to the trainer as slime.samples.batch.TrainBatch"
    ),
    "slime.utils.data:get_minimum_num_micro_batch_size": "slime.samples.packing.plan_steps",
    "slime.utils.processing_utils:process_vision_info": _NO_MEDIA,
    "slime.utils.processing_utils:build_processor_kwargs": _NO_MEDIA,
    "slime.utils.processing_utils:prepare_model_inputs": _NO_MEDIA,
    "slime.utils.processing_utils:encode_image_for_rollout_engine": _NO_MEDIA,
    "slime.utils.ppo_utils:compute_log_probs": _NO_LOGITS,
    "slime.utils.ppo_utils:compute_entropy_from_logits": _NO_LOGITS,
    "slime.utils.ppo_utils:calculate_log_probs_and_entropy": _NO_LOGITS,
    "slime.rollout.rm_hub.math_utils:are_equal_under_sympy": (
        "grade_answer_sympy, which math-verify answers"
    ),
    "slime.rollout.rm_hub.math_utils:mathd_normalize_answer": (
        "grade_answer_mathd compares two answers"
    ),
    "slime.rollout.sample_hooks:set_current_rollout_id": (
        "hooks that have a parameter rollout_id are given it"
    ),
    "slime.rollout.fully_async_rollout:AsyncRolloutWorker": _NO_WORKER,
    "slime.rollout.fully_async_rollout:get_global_worker": _NO_WORKER,
    "slime.rollout.fully_async_rollout:stop_global_worker": _NO_WORKER,
    "slime.rollout.sleep_rollout": (
        "--debug-rollout-only keeps engines without a trainer; slime serve one model alone"
    ),
    "slime.rollout.forge_load": (
        "--load-debug-rollout-data replays rollouts that --save-debug-rollout-data has kept"
    ),
    "slime.utils.arguments": "slime.config.parse_args and make_config",
    "slime.utils.tracking_utils:init_tracking": _TRACKERS,
    "slime.utils.logging_utils:init_tracking": _TRACKERS,
    "slime.utils.logging_utils:configure_logger": (
        "logging.getLogger; what a hook logs is in the run's logs/ folder"
    ),
    "slime.utils.wandb_utils": _TRACKERS,
    "slime.utils.tensorboard_utils": _TRACKERS,
    "slime.utils.seqlen_balancing": "slime.samples.packing.plan_steps",
    "slime.utils.flops_utils": "slime.models.flops.sequence_cost",
    "slime.utils.routing_replay": "--use-routing-replay and --use-rollout-routing-replay do it",
    "slime.utils.timer": (
        f"slime.observe.trace.span; the phases of a step are metrics: {doc_url('metrics.md')}"
    ),
    "slime.utils.memory_utils": f"the peak of each phase is a metric: {doc_url('memory.md')}",
    "slime.utils.health_monitor": "--use-fault-tolerance",
    "slime.ray": f"processes are started by slime.cluster: {doc_url('architecture.md')}",
    **{
        f"slime.backends.megatron_utils.cp_utils:{name}": _WHOLE_SAMPLES
        for name in (
            "get_logits_and_tokens_offset_with_cp",
            "get_chunked_loss_masks",
            "slice_with_cp",
        )
    },
    **dict.fromkeys(
        (
            *(
                f"slime.backends.megatron_utils.{name}"
                for name in ("actor", "arguments", "checkpoint", "data", "loss")
            ),
            *(
                f"slime.backends.megatron_utils.{name}"
                for name in ("initialize", "model", "model_provider", "server")
            ),
            *(
                "slime.backends.megatron_utils.update_weight",
                "slime.backends.megatron_utils.megatron_to_hf",
            ),
            *("slime.backends.sglang_utils", "slime.backends.fsdp_utils"),
        ),
        f"training is slime.trainer, engines are slime.engines: {doc_url('architecture.md')}",
    ),
    **dict.fromkeys(
        (
            f"slime.observability.{name}"
            for name in ("communication_timeline", "profile_utils", "weight_sync_trace")
        ),
        f"spans of every phase are in the run's trace: {doc_url('watching.md')}; py-spy works on "
        "every process",
    ),
    **dict.fromkeys(
        (
            f"slime.observability.{name}"
            for name in ("rollout_metrics", "train_metric_utils", "train_data_utils")
        ),
        f"metrics of rollouts and of training are logged by themselves: {doc_url('metrics.md')}",
    ),
    "slime.observability.rollout_data_utils": (
        "--save-debug-rollout-data and --load-debug-rollout-data"
    ),
    "slime.observability.wandb_utils": _TRACKERS,
    "slime.utils.disk_delta": (
        "delta weight updates are not in this version; --update-weight-transport disk writes all"
    ),
    **{
        f"slime.utils.accelerator:{name}": (
            "the accelerator is CUDA, or the CPU where there is no GPU"
        )
        for name in (
            "get_accelerator",
            "set_accelerator",
            "register_accelerator",
            "initialize_accelerator",
        )
    },
    "slime.agent": f"agents that speak an API get an endpoint per sample: {doc_url('agents.md')}",
}

#: Modules of our own that plugins import and that have moved, with what is below them.
MOVED: dict[str, str] = {
    "slime.api": "slime.run.api",
    "slime.hooks": "slime.user_code.hooks",
    "slime.hook_loading": "slime.user_code.loading",
    "slime.notebook": "slime.observe.notebook",
    "slime.rollout.agents": "slime.agents",
    "slime.rollout.environments": "slime.environments",
    "slime.rollout.sandbox": "slime.sandbox",
    "slime.engines.embedded": "slime.embedded",
}

_HUB = "slime.rollout.rm_hub"
_ROLLOUT = "slime.rollout.sglang_rollout"
#: Old names that a plugin may replace for the whole run → the part of the run that looks there.
#: What replaces another name is called by those who import it only.
REPLACEABLE: dict[str, Part] = {
    f"{_ROLLOUT}:generate": "generate",
    f"{_ROLLOUT}:generate_and_rm": "generate_and_reward",
    f"{_ROLLOUT}:generate_and_rm_group": "generate_and_reward_group",
    f"{_ROLLOUT}:generate_rollout": "rollout",
    f"{_ROLLOUT}:eval_rollout": "evaluation",
    f"{_ROLLOUT}:post": "post",
    f"{_HUB}:async_rm": "reward",
    f"{_HUB}:batched_async_rm": "batched_reward",
    f"{_HUB}:remote_rm": "remote_reward",
    f"{_HUB}:grade_answer_verl": "grade_math",
    f"{_HUB}:get_deepscaler_rule_based_reward": "grade_deepscaler",
    f"{_HUB}:f1_score": "grade_f1",
    f"{_HUB}:compute_gpqa_reward": "grade_gpqa",
    f"{_HUB}:compute_score_dapo": "grade_dapo",
    f"{_HUB}.ifbench:compute_ifbench_reward": "grade_ifbench",
    "slime.rollout.data_source:pop_first": "pop_first",
}


def _target(old: str) -> str:
    module, _, name = old.partition(":")
    return OLD_MODULES[module][name]


#: The same by what the old name stands for here, so that it may be replaced in any old module that
#: has it.
_PART_OF: dict[str, Part] = {_target(old): part for old, part in REPLACEABLE.items()}


class _OldModule(ModuleType):
    """A module whose names are looked up in the table when they are first used."""

    def __getattr__(self, name: str) -> Any:
        names = OLD_MODULES[self.__name__]
        if reason := NO_COUNTERPART.get(f"{self.__name__}:{name}"):
            raise ImportError(
                f"{self.__name__}.{name} has no counterpart in this version; use: {reason}"
            )
        if name not in names:
            raise AttributeError(
                f"{self.__name__} is a path of earlier slime versions; of its names these live on: "
                f"{', '.join(sorted(names)) or 'none'}; {name!r} has no counterpart",
                name=name,
                obj=self,
            )
        value = _own(names[name])
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        target = OLD_MODULES.get(self.__name__, {}).get(name)
        if target is not None:
            _note_replacement(f"{self.__name__}.{name}", target, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if (part := _PART_OF.get(OLD_MODULES[self.__name__].get(name, ""))) is not None:
            set_override(part, None)

    def __dir__(self) -> list[str]:
        return sorted([*OLD_MODULES[self.__name__], *super().__dir__()])


def _own(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def _note_replacement(path: str, target: str, value: Any) -> None:
    is_ours = value is _own(target)
    if (part := _PART_OF.get(target)) is not None:
        set_override(part, None if is_ours else value)
    elif not is_ours:
        logging.getLogger("slime").warning(
            "%s was replaced, and no part of the run looks it up there: what imports it from "
            "there gets the new one",
            path,
        )


def _moved_to(fullname: str) -> str | None:
    for old, new in MOVED.items():
        if fullname == old or fullname.startswith(old + "."):
            return new + fullname.removeprefix(old)
    return None


class _MovedModule(ModuleType):
    """A module of an earlier version at its new place."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        target = importlib.import_module(_moved_to(self.__name__) or self.__name__)
        return getattr(target, name)


#: Packages that are here for old paths alone, so that whatever else is asked of them is an old
#: path, too.
_OLD_PACKAGES = ("slime.utils.", "slime.observability.", "slime.backends.", "slime.rollout.rm_hub.")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if reason := NO_COUNTERPART.get(fullname):
            # without a name: with its own, "from package import module" would drop it for "cannot
            # import name"
            raise ModuleNotFoundError(
                f"{fullname} has no counterpart in this version; use: {reason}"
            )
        if new := _moved_to(fullname):
            found = importlib.util.find_spec(new)
            if found is None:
                return None
            is_package = found.submodule_search_locations is not None
            return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)
        if fullname not in OLD_MODULES:
            if fullname.startswith(_OLD_PACKAGES):
                raise ModuleNotFoundError(
                    f"{fullname} has no counterpart in this version; see "
                    f"{doc_url('import-paths.md')}"
                )
            return None
        is_package = any(name.startswith(fullname + ".") for name in OLD_MODULES)
        return importlib.machinery.ModuleSpec(
            fullname, self, origin="slime.compat.import_paths", is_package=is_package
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        if new := _moved_to(spec.name):
            return _MovedModule(spec.name, f"Moved to {new}.")
        return _OldModule(spec.name, f"Names of earlier slime versions; see {__name__}.")

    def exec_module(self, module: ModuleType) -> None:
        pass

    def get_code(self, fullname: str) -> CodeType:
        """What ``python -m`` of a moved module runs."""
        new = _moved_to(fullname)
        return compile(
            f"import runpy; runpy.run_module({new!r}, run_name='__main__')", new or "", "exec"
        )


def install() -> None:
    """Make the old paths importable. Calling it again changes nothing."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
        register_old_modules(OLD_MODULES)
