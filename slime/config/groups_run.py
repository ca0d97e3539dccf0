"""Groups about the run as a whole: cluster, fault tolerance, observation, debugging."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from slime.config.estimators import estimators_where
from slime.config.flag import (
    DATA_LOSSES,
    ENGINES,
    GENERATES,
    NONE_OR_SOME,
    POSITIVE,
    SAMPLES,
    SOME,
    Interval,
    Part,
    derived,
    finite,
    flag,
    on,
    unless,
)

_TRAINS_STEPS = unless("num_rollout", 0, why="there is no step to profile", warns=True)


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Placement: how many GPUs trainer and engines get, and how their processes are connected.

    On a host without a GPU, a "GPU" is one CPU process slot.
    """

    READ_BY: ClassVar[tuple[Part, ...]] = ("driver",)

    actor_num_nodes: int = flag(1, range=SOME, read_by="trainer")
    """Nodes of the trainer."""
    actor_num_gpus_per_node: int = derived(
        "GPUs of this host (at most 8), 1 without a GPU", range=SOME, read_by="trainer"
    )
    """GPUs of the trainer on each of its nodes."""
    rollout_num_gpus: int = derived(
        "0 with external engines, actor_num_nodes × actor_num_gpus_per_node with colocate, else "
        "one engine",
        range=NONE_OR_SOME,
        needs=ENGINES,
        read_by=("generation", "engine"),
    )
    """Total GPUs of the engines that the run starts; 0: it starts none."""
    rollout_num_gpus_per_engine: int = flag(1, range=SOME, needs=ENGINES, read_by="engine")
    """GPUs of one engine (its tensor-parallel times pipeline-parallel size)."""
    num_gpus_per_node: int = derived("GPUs of this host (at most 8), 1 without a GPU", range=SOME)
    """GPUs of a node, only for checks of the other flags; Ray places processes where it finds GPUs.
    An SGLang engine with more GPUs than this spans several nodes; an embedded engine cannot."""
    colocate: bool = flag(
        False,
        needs=(
            ENGINES,
            unless("load_debug_rollout_data", why="no engine takes turns with it", warns=True)
            | on("advantage_estimator", *estimators_where("needs_critic")),
        ),
        read_by=("trainer", "push", "engine"),
    )
    """Trainer and engines share the same GPUs and take turns."""
    offload: bool = flag(
        False,
        needs=on("colocate", why="trainer and engines have GPUs of their own"),
        read_by="config",
    )
    """Short for --offload-train --offload-rollout."""
    offload_train: bool = derived(
        "colocate",
        needs=on("colocate", why="trainer and engines have GPUs of their own"),
        read_by="trainer",
    )
    """Free the trainer's GPU memory while the engines generate."""
    offload_rollout: bool = derived(
        "colocate",
        needs=on("colocate", why="trainer and engines have GPUs of their own"),
        read_by="engine",
    )
    """Free the engines' GPU memory while the trainer trains."""
    offload_rollout_weights: bool = derived(
        "offload_rollout",
        needs=on("offload_rollout", why="the engines keep all of their memory"),
        read_by="engine",
    )
    """Free the engines' weights, too, and not only KV caches and CUDA graphs. Where a push does not
    bring all weights, as with adapters, each step copies them to host memory and back."""
    distributed_backend: Literal["auto", "nccl", "gloo"] = flag(
        "auto", read_by=("config", "trainer")
    )
    """torch.distributed backend of the trainer's process groups; auto: nccl where the trainer has
    GPUs, else gloo."""
    distributed_timeout_minutes: float = derived(
        "NCCL_TIMEOUT / 60 when that variable is set, else 10",
        range=POSITIVE,
        read_by=("driver", "samples", "trainer", "push", "engine"),
    )
    """Time-out of all process groups except the one for checkpoints, and of each step of a launch
    (docs/deadlines.md)."""
    train_env_vars: dict[str, Any] = flag({}, read_by="trainer")
    """Environment variables of the trainer's processes, as JSON."""
    listen_on_network: bool = flag(
        False,
        needs=unless(
            "ray_address", why="the processes of a cluster listen on the addresses of its nodes"
        ),
        read_by=("driver", "generation"),
    )
    """For a run that starts its own Ray: engines, router and Ray listen on the host's network
    address instead of loopback, for agents in containers or on other hosts (docs/security.md)."""
    placement_timeout: float = flag(300.0, range=POSITIVE)
    """Seconds to wait for the cluster to have the GPUs that were asked for."""
    gpu_memory_gb: float | None = flag(None, range=POSITIVE)
    """Memory of a GPU in 10⁹ bytes, for the memory plan; unset: as the GPU driver reports, 80
    without one. On a host without GPUs it makes --dry-run plan for GPUs."""
    memory_plan: Literal["refuse", "warn"] = flag("refuse")
    """If the memory plan does not fit the GPUs, refuse to start, or warn and start."""
    ray_address: str | None = flag(None)
    """Ray cluster to join ("auto", "host:port"). Unset: RAY_ADDRESS if set, else a local Ray is
    started."""
    train_backend: Literal["megatron"] = flag("megatron", read_by="config")
    """Training backend."""


@dataclass(frozen=True, kw_only=True)
class FaultToleranceConfig:
    """Watching engines and replacing dead ones."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("engine",)

    use_fault_tolerance: bool = flag(
        False, needs=GENERATES, read_by=("generation", "push", "engine")
    )
    """Restart engines that die or hang; they rejoin at the next weight push, and other engines
    take over their requests. Without it the death of an engine ends the run."""
    rollout_health_check_interval: float = flag(
        30.0, range=POSITIVE, needs=on("use_fault_tolerance")
    )
    """Seconds between two health checks of an engine while it generates, with
    --use-fault-tolerance."""
    rollout_health_check_timeout: float = flag(
        30.0, range=POSITIVE, needs=on("use_fault_tolerance"), read_by=("push", "engine")
    )
    """Time-out of a health check in seconds; an engine that exceeds it counts as hung and is
    killed."""
    rollout_health_check_first_wait: float = flag(
        0.0, range=finite(0), needs=on("use_fault_tolerance")
    )
    """Seconds before the first health check of each rollout, for engines that compile on first
    use."""
    max_restarts: int = flag(0, range=finite(0), needs=on("save"), read_by="training")
    """How many times trainer ranks that die or hang are restarted from the newest checkpoint, while
    the engines keep running; the steps since that checkpoint are repeated. At 0 such a failure ends
    the run."""
    journal: bool = derived(
        "on with save, where something is trained",
        needs=(on("save"), SAMPLES),
        read_by="collection",
    )
    """Keep generated samples in the run folder until a checkpoint covers them; a run resumed after
    a crash then generates nothing twice."""


@dataclass(frozen=True, kw_only=True)
class ObserveConfig:
    """The run folder, logs and metrics."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("driver",)

    output_dir: str = flag("outputs", read_by=("driver", "collection"))
    """Directory of run folders; `tensorboard --logdir` reads it."""
    run_name: str = derived("<model>-<YYYYMMDD-HHMMSS>", read_by=("driver", "collection"))
    """Name of the run folder inside --output-dir."""
    stage: str | None = flag(None, read_by=("driver", "samples"))
    """Name of this stage, when several runs (SFT, then RL) share one run folder and its
    metrics.jsonl."""
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = derived(
        "DEBUG when SLIME_DEBUG=1, else INFO", read_by=("driver", "samples", "trainer", "engine")
    )
    """Verbosity of the logs."""
    trace: bool = flag(True)
    """Record the spans of every sample (queue, prefill and decode, reward) for Perfetto."""
    use_tensorboard: bool = flag(True)
    """Write TensorBoard event files into the run folder."""
    tb_project_name: str | None = flag(None, needs=on("use_tensorboard"))
    """First level of the TensorBoard directory: tensorboard/<project>/<experiment>."""
    tb_experiment_name: str | None = flag(None, needs=on("use_tensorboard"))
    """Second level of the TensorBoard directory."""
    use_wandb: bool = flag(False)
    """Log to Weights & Biases (pip install 'slime-rl[wandb]')."""
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(None, needs=on("use_wandb"))
    """Mode of Weights & Biases; unset: its own default."""
    wandb_dir: str | None = flag(None, needs=on("use_wandb"))
    """Directory of the W&B files; unset: the run folder."""
    wandb_key: str | None = flag(None, needs=on("use_wandb"))
    """W&B API key; better given as WANDB_API_KEY. Never written to config.json."""
    wandb_host: str | None = flag(None, needs=on("use_wandb"))
    """W&B server."""
    wandb_team: str | None = flag(None, needs=on("use_wandb"))
    """W&B entity."""
    wandb_group: str | None = flag(None, needs=on("use_wandb"))
    """W&B group."""
    wandb_project: str | None = flag(None, needs=on("use_wandb"))
    """W&B project; unset: slime."""
    wandb_run_id: str | None = flag(None, needs=on("use_wandb"))
    """Resume this W&B run."""
    disable_wandb_random_suffix: bool = flag(False, needs=on("wandb_group"))
    """Leave the group name as given, without a random suffix."""
    use_mlflow: bool = flag(False)
    """Log to MLflow (pip install 'slime-rl[mlflow]')."""
    mlflow_uri: str | None = flag(None, needs=on("use_mlflow"))
    """MLflow server or database; unset: MLFLOW_TRACKING_URI, or mlflow.db in --output-dir."""
    mlflow_experiment: str = flag("slime", needs=on("use_mlflow"))
    """MLflow experiment."""
    use_trackio: bool = flag(False)
    """Log to Trackio (pip install 'slime-rl[trackio]'), into trackio/ in --output-dir unless
    TRACKIO_DIR is set."""
    trackio_project: str = flag("slime", needs=on("use_trackio"))
    """Trackio project."""
    trackio_space: str | None = flag(None, needs=on("use_trackio"))
    """Hugging Face Space that shows the metrics ("user/space"); unset: nothing leaves this host."""
    use_swanlab: bool = flag(False)
    """Log to SwanLab (pip install 'slime-rl[swanlab]'); its key is SWANLAB_API_KEY."""
    swanlab_mode: Literal["online", "local", "offline", "disabled"] = flag(
        "online", needs=on("use_swanlab")
    )
    """Mode of SwanLab."""
    swanlab_project: str = flag("slime", needs=on("use_swanlab"))
    """SwanLab project."""
    log_multi_turn: bool = flag(False, needs=GENERATES, read_by="collection")
    """Log the number of turns and their lengths."""
    log_passrate: bool = flag(False, needs=GENERATES, read_by="collection")
    """Log pass@k of the training samples."""
    log_reward_category: str | None = flag(None, needs=GENERATES, read_by="collection")
    """Key of the reward dict whose values are counted per category."""
    log_correct_samples: bool = flag(False, needs=GENERATES, read_by="collection")
    """Log the lengths of correct samples separately."""


@dataclass(frozen=True, kw_only=True)
class DebugConfig:
    """Configuration files, dry runs, and running one half of the loop alone."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("driver",)

    config: str | None = flag(None, read_by="config")
    """YAML file that sets flags by name (with dashes or underscores); flags on the command line
    win."""
    megatron_config_path: str | None = flag(None, read_by="config")
    """YAML file of settings per role, which win over flags: ``megatron: [{name: default, role:
    critic, num_gpus_per_node: 2, overrides: {lr: 1.0e-5}}]``. The actor's settings are flags; the
    critic's are --critic-lr, --critic-lr-warmup-iters, --critic-load, --critic-lora-rank, its GPUs
    and its layout."""
    custom_config_path: str | None = flag(None, read_by="config")
    """YAML file of attributes that `args` gets for hooks; names that are flags set the flag."""
    dry_run: bool = flag(False)
    """Resolve, plan placement and memory, print, and start nothing."""
    debug_rollout_only: bool = flag(False, read_by=("driver", "engine"))
    """Start the engines only, no trainer."""
    debug_train_only: bool = derived("true when load_debug_rollout_data is set")
    """Start the trainer only, no engines."""
    save_debug_rollout_data: str | None = derived(
        "<dump_details>/rollout_data/{rollout_id}.pt with --dump-details",
        needs=unless(
            "load_debug_rollout_data",
            why="samples that were loaded are not written again",
            warns=True,
        ),
        read_by=("collection", "generation"),
    )
    """Write every rollout's samples to this path. {rollout_id}, optionally with a format
    ({rollout_id:04d}), stands for the rollout's number, with eval_ before it for an evaluation;
    {run} stands for the run folder."""
    load_debug_rollout_data: str | None = flag(None, read_by=("driver", "collection", "samples"))
    """Train on samples that --save-debug-rollout-data wrote to this path, instead of generating;
    implies --debug-train-only."""
    load_debug_rollout_data_subsample: float | None = flag(
        None,
        range=Interval(0, 1, above=True, what="a fraction"),
        needs=on("load_debug_rollout_data"),
        read_by="samples",
    )
    """Fraction of the loaded samples to keep."""
    save_debug_train_data: str | None = derived(
        "<dump_details>/train_data/{rollout_id}.pt with --dump-details", read_by="training"
    )
    """Write every rollout's training tensors to this path, with {rollout_id} as in
    --save-debug-rollout-data. One file holds the tensors of all ranks; {rank}, which older scripts
    use, is replaced by 0."""
    dump_details: str | None = flag(None, read_by=("config", "samples"))
    """Directory for the samples and training tensors of all rollouts, and the tokenizer."""
    check_weight_update_equal: bool = flag(
        False,
        needs=GENERATES
        & unless("lora_rank", why="every push of adapters compares all tensors", warns=True),
        read_by="push",
    )
    """Verify every weight on the engines after the first sync."""
    check_canary: bool = flag(True, read_by="push")
    """Compare the trainer's and the engines' log-probs of a few fixed tokens after every weight
    push and every wake-up of an engine."""
    ci_test: bool = flag(
        False,
        needs=unless(
            "loss_type",
            *DATA_LOSSES,
            why="it compares with engines and earlier policies, and there are none",
            warns=True,
        ),
        read_by="training",
    )
    """Check the assertions of the reference system's CI in each step, and stop if one fails: the KL
    to the old policy is 0 in the first step of a rollout, the KL to the reference is 0 in the first
    step of the run, and trainer and engine agree to
    --ci-train-rollout-logprob-abs-diff-threshold."""
    ci_disable_kl_checker: bool = flag(False, needs=on("ci_test"), read_by="training")
    """Leave the checks of the KL out of --ci-test."""
    ci_train_rollout_logprob_abs_diff_threshold: float = flag(
        0.1, range=finite(0), needs=on("ci_test"), read_by="training"
    )
    """Largest mean difference between the log-probs of trainer and engine that --ci-test
    accepts."""
    ci_save_grad_norm: str | None = flag(None, read_by="training")
    """Write the gradient norm of each step to this path, which may contain {role}, {rollout_id} and
    {step_id}."""
    ci_load_grad_norm: str | None = flag(
        None, needs=unless("ci_save_grad_norm", why="the norm is written"), read_by="training"
    )
    """Compare the gradient norm of each step with the one that --ci-save-grad-norm wrote to this
    path, to 1 % or 0.01, and stop where it differs."""
    use_pytorch_profiler: bool = derived(
        "true with profile_steps", needs=_TRAINS_STEPS, read_by="config"
    )
    """Profile some steps with torch.profiler and the engines' own profiler, into one file in the
    run folder's profile/, for https://ui.perfetto.dev (docs/debugging.md)."""
    profile_steps: str | None = derived(
        "profile_step_start:profile_step_end with use_pytorch_profiler",
        needs=_TRAINS_STEPS,
        read_by="config",
    )
    """Steps to profile, FIRST:END; 3:5 is steps 3 and 4. Short for --use-pytorch-profiler,
    --profile-step-start and --profile-step-end."""
    profile_step_start: int = derived(
        "that of profile_steps, else 10 or less",
        range=NONE_OR_SOME,
        needs=on("use_pytorch_profiler"),
        read_by="config",
    )
    """First step that is profiled, counted from 0."""
    profile_step_end: int = derived(
        "that of profile_steps, else 12 or more",
        range=SOME,
        needs=on("use_pytorch_profiler"),
        read_by="config",
    )
    """First step that is no longer profiled."""
    profile_ranks: tuple[int, ...] = flag(
        (0,), range=NONE_OR_SOME, needs=on("use_pytorch_profiler"), read_by="trainer"
    )
    """Trainer ranks that are profiled."""
    record_memory_history: bool = flag(False, read_by="trainer")
    """Record allocations of GPU memory and write a snapshot per rank, for
    https://pytorch.org/memory_viz."""
    memory_snapshot_num_steps: int | None = flag(
        None, range=SOME, needs=on("record_memory_history"), read_by="training"
    )
    """Steps of this launch after which the snapshot is written; unset: at the end of the run and
    when memory runs out."""
    memory_snapshot_dir: str = flag(".", needs=on("record_memory_history"), read_by="training")
    """Directory of the snapshots."""

    @property
    def profiled(self) -> range:
        """The steps that are profiled."""
        if not self.use_pytorch_profiler:
            return range(0)
        return range(self.profile_step_start, self.profile_step_end)
