"""The command line of a stock SGLang server, from the configuration and the engine's place.

--sglang-<name> VALUE is passed as --<name> VALUE. Options that must agree with the rest of the run
(model, ports, seed, parallel sizes, memory saver) are set here and take precedence.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from huggingface_hub.constants import HF_HOME

from slime import deadlines
from slime.config.engine_flags import SGLANG_INSTEAD, SGLANG_RESERVED, sglang_args, to_argv
from slime.engines.adapters import served_targets
from slime.engines.api import WEIGHT_LOADER, WEIGHT_PROBE
from slime.engines.kinds import named_paths
from slime.engines.launch import (
    ONE_GPU,
    RESIDENT_ADAPTERS,
    EngineFootprint,
    EnginePlace,
    LaunchSpec,
    group_options,
)
from slime.engines.model_groups import GroupRules
from slime.engines.sglang.drafts import check_drafts, draft_model, draft_options
from slime.engines.sglang.versions import check_version, installed_version
from slime.errors import UserError
from slime.models import family_of
from slime.models.adapters import AdapterConfig, adaptable, adapted_layers, served_rank
from slime.models.mixers import DELTA_PROJECTIONS
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily
from slime.processes.host import python_module, version_of

if TYPE_CHECKING:
    from slime.config.config import Config

#: The health check of engines that are awake. The router calls /health at any time, which
#: `HEALTH_GENERATES` keeps cheap.
HEALTH_PATH = "/health_generate"

#: The first version without the route by which the router compares engines' loads.
_WITHOUT_GET_LOAD = (0, 5, 21)
#: The first version whose requests have ``return_sampling_mask``.
_WITH_SAMPLING_MASKS = (0, 5, 16)

#: Whether SGLang's /health generates a token, as /health_generate always does, or only answers.
HEALTH_GENERATES = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
#: Values that SGLang reads as false there; anything else, including typing errors, is true.
_FALSE = ("false", "0", "no", "n")

#: Approximation of SGLang's choice if ``--sglang-mem-fraction-static`` is not set: on a small GPU
#: it leaves at least these bytes, and a share of all.
_AUTOMATIC_FRACTION = 0.88
_AUTOMATIC_PART = 0.95
_AUTOMATIC_REST = 5.9e9
_VOCABULARY_UNIT = 64
_KV_BYTES = {"fp8_e5m2": 1, "fp8_e4m3": 1, "fp4_e2m1": 0.5}

#: SGLang's expert kernels that also compute adapters of experts.
_RUNNERS_WITH_ADAPTERS = ("triton", "marlin")
_MIXTRAL_EXPERTS = frozenset({"w1", "w2", "w3"})
#: Kernels that support prefills which need only few rows of the output layer.
_BACKENDS_OF_HEAD = ("csgmv", "triton")


def sglang_command(
    config: Config, model_path: str, host: str, port: int, place: EnginePlace = ONE_GPU
) -> LaunchSpec:
    """Return how to start a stock SGLang server, or one node's part of it.

    Raises:
        UserError: SGLang is not installed, its version is unsupported, or it does not support a
            flag.
    """
    check_sglang(config)
    check_version(installed_version())
    options = sglang_options(config, model_path, host, port, place)
    return LaunchSpec(
        [*python_module("slime.engines.sglang.engine_process"), *to_argv(options)],
        env=sglang_environment(config, place),
        # other nodes of an engine only serve this path
        health_path="/health" if place.node_rank else HEALTH_PATH,
        startup_timeout=deadlines.SGLANG_STARTUP,
        health_timeout=deadlines.SGLANG_HEALTH,
    )


def check_sglang(config: Config) -> None:
    """Refuse flags that SGLang engines do not support in this run. Reads only flags, environment
    variables and the installed version.

    Raises:
        UserError: names the flag or variable.
    """
    if config.cluster.offload_rollout:
        _check_health_checks(config)
    version = installed_version() or ""
    by_load = config.engine.router.get("policy") == "power_of_two"
    if by_load and version_of(version)[:3] >= _WITHOUT_GET_LOAD:
        raise UserError(
            f"--router-policy power_of_two does not go with SGLang {version}",
            why="the router asks engines for /get_load, which SGLang removed in 0.5.21, and would "
            "choose at random",
            fix="pass another policy, such as cache_aware",
        )
    with_masks = config.algorithm.use_sampling_mask
    if with_masks and version and version_of(version)[:3] < _WITH_SAMPLING_MASKS:
        raise UserError(
            f"--use-sampling-mask does not go with SGLang {version}",
            why="it does not tell from which tokens each one was sampled",
            fix=f"install SGLang {'.'.join(map(str, _WITH_SAMPLING_MASKS))} or newer, or pass "
            "--no-use-sampling-mask for log-probs of the whole vocabulary",
        )
    flags = config.engine.sglang
    num_gpus = config.cluster.rollout_num_gpus_per_engine
    if flags.get("disaggregation_mode") not in (None, "null"):
        raise UserError(
            f"--sglang-disaggregation-mode {flags['disaggregation_mode']} would make every engine "
            "one half of a pair",
            fix="give server groups with --sglang-config, or leave the flag out",
        )
    if num_gpus % int(flags.get("pp_size") or 1):
        raise UserError(
            f"--rollout-num-gpus-per-engine {num_gpus} is not a multiple of --sglang-pp-size "
            f"{flags['pp_size']}",
            why="an engine's tensor-parallel size is the former divided by the latter",
        )
    check_pushes(config, flags)
    check_adapters(config, flags)
    if config.images.image_max_pixels is not None:
        raise UserError(
            "--image-max-pixels is not passed on to SGLang",
            why="its engines would scale images to other sizes than the trainer",
            fix="write the limit into size.longest_edge of preprocessor_config.json in "
            "--hf-checkpoint, which both read",
        )
    if config.images.multimodal_keys and flags.get("enable_multimodal") is False:
        raise UserError(
            "--no-sglang-enable-multimodal does not go with --multimodal-keys",
            fix="leave one of them out",
        )


def check_adapters(config: Config, options: Mapping[str, Any], where: str = "") -> None:
    """Refuse options with which an engine could not serve the trained adapters.

    Args:
        options, where: see `check_pushes`.
    Raises:
        UserError: names the option.
    """
    if not config.lora.lora_rank:
        return
    _check_adapted_layers(config)

    def refuse(option: str, why: str, fix: str = "leave it out") -> NoReturn:
        what = f"{_named(option, options, where)} does not go with --lora-rank"
        raise UserError(what, why=why, fix=fix)

    if int(options.get("dp_size") or 1) > 1:
        refuse(
            "dp_size",
            "SGLang loads adapters into engines of one replica only",
            "start more engines instead (raise --rollout-num-gpus)",
        )
    if options.get("max_loaded_loras") is not None:
        refuse(
            "max_loaded_loras",
            "SGLang would unload the policy's adapter for another one, and cannot load it again: "
            "it came from the trainer and is in no file",
        )
    if options.get("enable_lora") is False:
        refuse("enable_lora", "requests are answered with the adapter that is trained")
    vocabulary = {"embed_tokens", "lm_head"} & set(config.lora.lora_target_modules)
    if vocabulary and options.get("enable_attn_tp_input_scattered"):
        refuse(
            "enable_attn_tp_input_scattered",
            f"SGLang computes adapters of {' and '.join(sorted(vocabulary))} for inputs that are "
            "whole on each rank",
        )
    if "lm_head" in vocabulary and options.get("lora_backend") not in (None, *_BACKENDS_OF_HEAD):
        refuse(
            "lora_backend",
            "in a prefill it applies adapters of lm_head to the wrong rows",
            f"pass {' or '.join(_BACKENDS_OF_HEAD)}",
        )
    if "lm_head" in vocabulary and options.get("enable_fp32_lm_head"):
        refuse("enable_fp32_lm_head", "SGLang ignores it if lm_head has an adapter")
    if 0 < int(options.get("max_loras_per_batch") or 3) < 2:
        refuse(
            "max_loras_per_batch",
            "it counts the base as one, so that no adapter could be used beside it",
            "pass 3, the default here: the base and two versions of the policy",
        )


def _check_adapted_layers(config: Config) -> None:
    adapters = AdapterConfig.of(config)
    targets = adapters.targets if adapters is not None else frozenset[str]()
    for what, layers in (
        ("gated delta nets", DELTA_PROJECTIONS),
        ("experts with Mixtral's names", _MIXTRAL_EXPERTS),
    ):
        if found := sorted(layers & targets):
            raise UserError(
                f"adapters of {what} are not served by SGLang",
                why=f"the targets include {', '.join(found)}, which SGLang 0.5.16 gives no "
                "adapters",
                fix=f"pass --lora-exclude-modules {' '.join(found)}, or --rollout-engine embedded",
            )


def adapter_options(
    config: Config, given: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the options with which the policy's engines serve the trained adapters, and defaults
    for other options.

    Args:
        given: the user's options.
    Raises:
        UserError: an option does not work with adapters of experts.
    """
    adapters = AdapterConfig.of(config)
    if adapters is None:
        return {}, {}
    path = str(config.checkpoint.hf_checkpoint)
    family = family_of(path, config.checkpoint.model_name)
    spec = family.model_spec(path)
    targets = served_targets(adapters.targets, adaptable(family, spec))
    ours: dict[str, Any] = {
        "enable_lora": True,
        "max_lora_rank": max(served_rank(family, adapters), int(given.get("max_lora_rank") or 0)),
        "lora_target_modules": sorted({*targets, *(given.get("lora_target_modules") or ())}),
    }
    # the base, which the canary uses, and two versions of the policy; SGLang's default kernels
    # (csgmv) are slower than triton's (docs/performance.md), and may ignore adapters of experts
    defaults: dict[str, Any] = {"max_loras_per_batch": 3, "lora_backend": "triton"}
    if adapts_experts(family, spec, adapters):
        if adapters.experts == "shared-outer":
            ours["experts_shared_outer_loras"] = True
        defaults["moe_runner_backend"] = "triton"  # others may ignore or refuse them
        runner = str(given.get("moe_runner_backend") or "triton")
        if runner not in _RUNNERS_WITH_ADAPTERS:
            raise UserError(
                f"--sglang-moe-runner-backend {runner} does not go with adapters of experts",
                why=f"SGLang computes these only with {' and '.join(_RUNNERS_WITH_ADAPTERS)}",
                fix="leave it out, or take the experts out with --lora-exclude-modules",
            )
    return ours, defaults


def adapts_experts(family: ModelFamily, spec: ModelSpec, adapters: AdapterConfig) -> bool:
    """Return whether routed experts have adapters."""
    return any(layer.base.is_expert for layer in adapted_layers(family, spec, adapters))


def check_pushes(config: Config, options: Mapping[str, Any], where: str = "") -> None:
    """Refuse options with which pushes cannot update all of an engine's weights, or others could
    change them.

    Args:
        options: SGLang's options by name: those of the command line, or merged with those of a
            server group.
        where: "FILE: server group 0 of policy" for the latter.
    Raises:
        UserError: names the option.
    """
    check_drafts(config, options, lambda option: _named(option, options, where))
    if int(options.get("tokenizer_worker_num") or 1) > 1:
        raise UserError(
            f"{_named('tokenizer_worker_num', options, where)} cannot require the run's key",
            why="SGLang requires keys only with one tokenizer worker, and anyone who reaches an "
            "engine without a key can replace its weights",
            fix="leave it out",
        )
    if int(options.get("pp_size") or 1) > 1:
        raise UserError(
            f"{_named('pp_size', options, where)} cannot take weight pushes",
            why="stock SGLang numbers the members of a weight-update group by tensor-parallel "
            "rank only",
            fix="leave it out; more GPUs per engine (--rollout-num-gpus-per-engine) make engines "
            "tensor-parallel",
        )
    if int(options.get("dp_size") or 1) > 1 and not options.get("enable_dp_attention"):
        raise UserError(
            f"{_named('dp_size', options, where)} cannot take weight pushes without DP attention "
            "(--sglang-enable-dp-attention)",
            why="stock SGLang refuses them",
            fix="start more engines instead (raise --rollout-num-gpus), or add enable_dp_attention",
        )


def _named(option: str, options: Mapping[str, Any], where: str) -> str:
    """Name an option and its value in a sentence, as a flag or in a server group."""
    value = options[option]
    if where:
        return f"{where} has {option} {value}, which"
    return f"--sglang-{option.replace('_', '-')} {value}"


def _check_override(name: str, value: Any) -> None:
    if name in SGLANG_RESERVED:
        raise UserError(f"cannot override {name}", why=SGLANG_RESERVED[name])
    if instead := SGLANG_INSTEAD.get(name, {}).get(str(value)):
        raise UserError(
            f"cannot set {name} to {value}",
            why=instead[1],
            fix=f"leave it out, or set {instead[0]}",
        )
    version, arguments = sglang_args()
    if name not in {argument.name for argument in arguments}:
        raise UserError(f"overrides {name}, which SGLang {version} does not have")


def _check_policy(config: Config, overrides: Mapping[str, Any], where: str) -> None:
    options = group_options(config.engine.sglang, overrides, is_policy=True)
    check_pushes(config, options, where)
    check_adapters(config, options, where)


#: Rules for the server groups of --sglang-config.
GROUP_RULES = GroupRules(
    ("regular", "prefill", "decode", "placeholder"), _check_override, _check_policy
)


def _check_health_checks(config: Config) -> None:
    """Refuse router health checks that generate a token: they also run while memory is released,
    when generation would crash the engine."""
    said = os.environ.get(HEALTH_GENERATES)
    path = str(config.engine.router.get("health_check_endpoint") or "")
    if said is not None and said.lower() not in _FALSE:
        raise UserError(
            f"{HEALTH_GENERATES}={said} does not go with --offload-rollout",
            why="the router asks engines for /health once a minute, also during training; to "
            "answer, SGLang would generate a token with memory that it has released, and crash",
            fix=f"unset {HEALTH_GENERATES}: engines are then started with false, and their own "
            "checks still generate",
        )
    if "health_generate" in path:
        raise UserError(
            f"--router-health-check-endpoint {path} does not go with --offload-rollout",
            why="the router asks also during training; to answer, SGLang would generate a token "
            "with memory that it has released, and crash",
            fix="leave the flag out",
        )


def sglang_options(
    config: Config, model_path: str, host: str, port: int, place: EnginePlace
) -> dict[str, Any]:
    """Return all options by name: the user's, those of the server group, then ours."""
    is_policy = place.model_path is None
    given = group_options(config.engine.sglang, place.overrides, is_policy=is_policy)
    stages = int(given.get("pp_size") or 1)
    ours: dict[str, Any] = {
        "model_path": place.model_path or model_path,
        "host": host,
        "port": port,
        "tp_size": place.num_gpus // stages,
        "random_seed": config.rollout.rollout_seed + place.number,
        "skip_server_warmup": True,
        "custom_weight_loader": (
            *(given.get("custom_weight_loader") or ()),
            WEIGHT_PROBE,
            WEIGHT_LOADER,
        ),
    }
    if config.checkpoint.trust_remote_code:
        ours["trust_remote_code"] = True
    defaults: dict[str, Any] = {
        "dtype": dtype_of(config) if is_policy else "auto",
        "log_level": config.observe.log_level.lower(),
        "weight_version": "0",
        "dist_timeout": int(60 * config.cluster.distributed_timeout_minutes),
    }
    if config.cluster.offload_rollout:
        ours["enable_memory_saver"] = True
        # without a push in between, engines must restore the weights that they held before the
        # sleep
        releases = config.cluster.offload_rollout_weights
        if (releases and config.sync.update_weights_interval > 1) or not is_policy:
            defaults["enable_weights_cpu_backup"] = True
        # the base is never pushed
        if releases and config.lora.lora_rank:
            ours["enable_weights_cpu_backup"] = True
    if is_policy:
        of_adapters, their_defaults = adapter_options(config, given)
        ours |= of_adapters
        defaults |= their_defaults | draft_options(config, given)
    if config.rollout.deterministic:
        defaults["enable_deterministic_inference"] = True
    if config.train.use_rollout_routing_replay and is_policy:
        ours["enable_return_routed_experts"] = True
    if place.nccl_port is not None:
        ours["nccl_port"] = place.nccl_port
    if place.num_nodes > 1:
        assert place.dist_init_addr is not None, "an engine over several nodes has a meeting point"
        ours |= {
            "nnodes": place.num_nodes,
            "node_rank": place.node_rank,
            "dist_init_addr": place.dist_init_addr,
        }
    return {**defaults, **given, **ours}


def dtype_of(config: Config) -> str:
    """Return SGLang's name for the dtype of the policy's weights: --sglang-dtype, by default the
    trainer's precision."""
    return str(config.engine.sglang.get("dtype") or config.megatron.dtype)


def sglang_footprint(config: Config) -> EngineFootprint:
    """Return the memory layout that SGLang's options give an engine's GPUs."""
    options = config.engine.sglang
    pipeline = int(options.get("pp_size") or 1)
    tensor = max(1, config.cluster.rollout_num_gpus_per_engine // pipeline)
    replicas = int(options.get("dp_size") or 1) if options.get("enable_dp_attention") else 1
    element = 4 if dtype_of(config) in ("float32", "float") else 2
    fraction = options.get("mem_fraction_static")
    draft = draft_model(config)
    return EngineFootprint(
        tensor=tensor,
        pipeline=pipeline,
        attention=max(1, tensor // replicas),
        element=element,
        kv_element=_KV_BYTES.get(str(options.get("kv_cache_dtype")), element),
        vocabulary_unit=_VOCABULARY_UNIT,
        keeps_latents=True,
        fraction=float(fraction) if fraction is not None else None,
        automatic_fraction=_automatic_fraction,
        fraction_option="--sglang-mem-fraction-static",
        # the base takes one place
        adapters_at_once=int(options.get("max_loras_per_batch") or 1 + RESIDENT_ADAPTERS),
        draft=draft.nbytes / tensor if draft is not None else 0.0,
    )


def adapter_words(adapters: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the options for adapters that are served from the start. The base takes one of the
    adapter places of a batch."""
    at_once = str(len(adapters) + 1)
    paths = named_paths(adapters)
    return ("--enable-lora", "--max-loras-per-batch", at_once, "--lora-paths", *paths)


def _automatic_fraction(nbytes: float) -> float:
    if nbytes <= 0:  # a server without a GPU, as in tests
        return 0.0
    return max(0.0, round(min(_AUTOMATIC_FRACTION, _AUTOMATIC_PART - _AUTOMATIC_REST / nbytes), 3))


def largest_graph(flags: Mapping[str, Any]) -> int | None:
    """Return the largest batch that the flags let SGLang capture a CUDA graph for; None where they
    leave it to SGLang, or switch graphs off."""
    if flags.get("disable_cuda_graph") or flags.get("disable_decode_cuda_graph"):
        return None
    for name in ("cuda_graph_bs_decode", "cuda_graph_bs"):
        if flags.get(name):
            return max(flags[name])
    return flags.get("cuda_graph_max_bs_decode") or flags.get("cuda_graph_max_bs")


def sglang_environment(config: Config, place: EnginePlace) -> dict[str, str]:
    """Return the environment variables of the server's processes, on top of the run's."""
    # The router's health check must need neither memory nor time, because engines sleep, and pause
    # for pushes. /health_generate checks generation while engines are awake.
    environment = {HEALTH_GENERATES: os.environ.get(HEALTH_GENERATES, "false")}
    if place.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
    if config.cluster.offload_rollout:
        # the memory saver cannot release memory that NCCL maps itself, nor expandable segments
        environment["NCCL_CUMEM_ENABLE"] = os.environ.get("NCCL_CUMEM_ENABLE", "0")
        environment["PYTORCH_CUDA_ALLOC_CONF"] = ""
    # transformers copies a model's Python files there and imports the copies: engines that start at
    # the same time on hosts with a shared home would read half-written files
    modules = Path(os.environ.get("HF_MODULES_CACHE") or Path(HF_HOME, "modules"))
    environment["HF_MODULES_CACHE"] = str(modules / f"{socket.gethostname()}-engine-{place.number}")
    return environment
