"""Flags of training: batches, checkpoints, weight sync."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.flag import (
    DATA_LOSSES,
    GENERATES,
    NONE_OR_SOME,
    SAMPLES,
    SEED,
    SOME,
    Interval,
    Part,
    at_least,
    derived,
    finite,
    flag,
    on,
    unless,
)

_NO_DELTA = "delta weight updates are not in this version; leave --update-weight-mode at full"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batches, packing, what is trained, and hooks of the trainer."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    seed: int = flag(1234, range=SEED, read_by="trainer")
    """Seed of the trainer."""
    global_batch_size: int = derived(
        "rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout",
        range=SOME,
        read_by=("samples", "training"),
    )
    """Samples (trajectories) per optimizer step, over all data-parallel ranks."""
    num_steps_per_rollout: int = derived(
        "rollout_batch_size × n_samples_per_prompt ÷ global_batch_size", range=SOME
    )
    """Optimizer steps per rollout."""
    micro_batch_size: int = flag(
        1,
        range=SOME,
        needs=unless(
            "use_dynamic_batch_size", why="micro-batches are packed by tokens", warns=True
        ),
        read_by="samples",
    )
    """Samples per micro-batch. If it is given, micro-batches are not packed by tokens."""
    use_dynamic_batch_size: bool = derived(
        "on, unless micro_batch_size is given", read_by="samples"
    )
    """Pack micro-batches by tokens, up to --max-tokens-per-gpu. Loss and gradient equal those of
    unpacked micro-batches, in less time."""
    max_tokens_per_gpu: int | None = derived(
        "from the memory plan when the run starts: a power of two, at most 16384 on a GPU and 4096 "
        "on a CPU",
        range=SOME,
        needs=on("use_dynamic_batch_size"),
        read_by="samples",
    )
    """Maximum tokens of a micro-batch on one GPU, with --use-dynamic-batch-size. A longer sample
    gets a micro-batch of its own."""
    ref_micro_batch_size: int | None = flag(
        None,
        no_effect="one packing serves all passes over a batch; see --micro-batch-size and "
        "--max-tokens-per-gpu",
    )
    """Samples per micro-batch of the reference policy's pass."""
    balance_data: bool = derived("balance_by_flops", read_by="samples")
    """Give all data-parallel ranks about the same number of tokens (or of FLOPs with
    --balance-by-flops)."""
    balance_by_flops: bool = flag(False, needs=on("use_dynamic_batch_size"), read_by="samples")
    """Balance by floating-point operations instead of tokens."""
    data_pad_size_multiplier: int = flag(128, range=SOME, read_by="trainer")
    """Packed micro-batches are padded to a multiple of this many tokens times the tensor-parallel
    size."""
    log_probs_chunk_size: int = flag(
        -1,
        range=Interval(1, or_minus_one=True, what="-1 stands for 8192"),
        needs=unless(
            "preference_loss", "reward_model", why="its head has one output per token", warns=True
        ),
        read_by="trainer",
    )
    """Maximum rows of logits computed at a time for log-probs; -1: 8192."""
    seq_length: int | None = flag(
        None,
        range=at_least(2, "a prompt token and a response token"),
        read_by=("driver", "collection", "generation", "samples"),
    )
    """Maximum tokens of prompt plus response: generation stops there, and longer samples are
    refused."""
    only_train_params_name_list: tuple[str, ...] = flag((), read_by="trainer")
    """Regular expressions (re.search) of the parameters to train; all others are frozen."""
    freeze_params_name_list: tuple[str, ...] = flag((), read_by="trainer")
    """Regular expressions (re.search) of the parameters to freeze."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = flag(
        "auto", read_by="trainer"
    )
    """Layer implementation; auto is local. transformer_engine needs that package, 2.9 to 2.11."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto", read_by="trainer"
    )
    """Attention kernel, with or without Transformer Engine; one that is not installed is refused.
    On GPUs, auto is flash-attn-4 if it is installed (SGLang installs it) and supports the GPU; else
    auto, like flash, is torch's packed kernel."""
    custom_model_provider_path: str | None = flag(None, read_by="trainer")
    """Function (pre_process, post_process, vp_stage) -> GPTModel that builds the model."""
    spec: tuple[str, ...] = flag((), read_by="trainer")
    """Module and name of a function (args, config, vp_stage) that returns megatron-core's layer
    specification of a pipeline stage: --spec my_package.layers my_spec. The reference system's
    modules for built-in families select slime's tables of these families."""
    custom_megatron_init_path: str | None = flag(None, read_by="trainer")
    """Function (args) run after Megatron is initialised."""
    custom_megatron_before_log_prob_hook_path: str | None = flag(
        None,
        needs=(
            SAMPLES,
            unless("use_rollout_logprobs")
            | on("use_kl_loss")
            | on("kl_coef")
            | on("use_opd")
            | on("use_routing_replay")
            | on("get_mismatch_metrics")
            | on(
                "measure_quantisation",
                why="there is no pass that only computes log-probs",
                warns=True,
            ),
        ),
    )
    """Function (args, model, store_prefix) run before each forward-only pass. With it, the old
    policy's log-probs always have a pass of their own."""
    custom_megatron_before_train_step_hook_path: str | None = flag(None)
    """Function (args, rollout_id, step_id, model, optimizer, opt_param_scheduler) run before each
    step's passes."""
    use_routing_replay: bool = derived(
        "use_rollout_routing_replay",
        needs=unless(
            "loss_type",
            *DATA_LOSSES,
            why="losses of the data's own answers compare with no old policy, whose experts could "
            "be replayed",
        ),
    )
    """Training reuses the experts that the old-policy pass chose, and recomputes their weights. In
    the first optimizer step of a rollout both passes have the same weights."""
    use_rollout_routing_replay: bool = flag(
        False, needs=SAMPLES, read_by=("generation", "training", "engine")
    )
    """The old-policy pass and training reuse the experts that the engine chose
    (rollout_routed_experts of the samples); implies --use-routing-replay."""

    @property
    def packed_tokens(self) -> int | None:
        """Return the maximum tokens of a micro-batch on one GPU; None if micro-batches are not
        packed, or before the memory plan has set it."""
        return self.max_tokens_per_gpu if self.use_dynamic_batch_size else None


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Loading and saving of models and checkpoints."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("trainer",)

    hf_checkpoint: str | None = flag(
        None,
        read_by=(
            "driver",
            "collection",
            "generation",
            "samples",
            "trainer",
            "training",
            "push",
            "engine",
        ),
    )
    """Hugging Face directory, or org/name on the hub: tokenizer, config, engine weights, and the
    trainer's weights for a fresh start."""
    trust_remote_code: bool = flag(
        False, read_by=("driver", "collection", "generation", "samples", "training", "engine")
    )
    """Run Python code from the model's directory (its tokenizer, its model in SGLang). Off: a model
    that needs it is refused."""
    model_name: str | None = flag(
        None, read_by=("generation", "samples", "trainer", "push", "engine")
    )
    """Model family of the weight converter; unset: as the Hugging Face config says."""
    load: str | None = flag(None)
    """Checkpoint to start from. The directory of --save: resume, or start fresh if it has none yet.
    Unset: start from --ref-load or --hf-checkpoint."""
    ckpt_step: int | None = flag(None, range=NONE_OR_SOME, needs=on("load"))
    """Iteration of --load; unset: the latest."""
    save: str | None = derived(
        "{run}/checkpoints, unless save_hf is given or nothing is trained",
        off="no-save",
        read_by="training",
    )
    """Directory of the run's checkpoints; {run} in it, in --load and in --save-hf stands for the
    run folder. With --no-save and without --save-hf no trained weights are kept."""
    save_interval: int | None = flag(
        None, range=SOME, needs=on("save") | on("save_hf"), read_by="training"
    )
    """Save every N rollouts, and after the last. Unset, with --save: after every tenth of the run
    or every half hour, whichever is sooner, but not more often than --save-min-seconds;
    --save-retain keeps 2. Unset, with --save-hf alone: after the last."""
    save_min_seconds: float = derived(
        "120, or 0 with save_interval",
        range=finite(0),
        needs=on("save") | on("save_hf"),
        read_by="training",
    )
    """Minimum seconds between checkpoints: one that is due sooner is written after the first step
    at which they have passed. The last step, and a run that is stopped, always save. If
    --save-interval is given too, both apply."""
    save_retain: int | None = derived(
        "2 with --save and no --save-interval, else all",
        range=SOME,
        needs=on("save"),
        read_by="training",
    )
    """Keep only the last N checkpoints."""
    save_hf: str | None = flag(None, read_by="training")
    """Also write a Hugging Face directory with each checkpoint. {rollout_id} in its name, or with
    a format {rollout_id:04d}, stands for the rollout; without it each replaces the last."""
    export_model: bool = flag(True, needs=on("save"), read_by="training")
    """With --save and without --save-hf: when the run ends, write its model to model/ in the run
    folder as a Hugging Face directory, 2 bytes per parameter. A model of 30B takes minutes; with
    --no-export-model, `slime convert megatron-to-hf` makes it from a checkpoint."""
    async_save: bool = flag(False, needs=on("save"), read_by="training")
    """Copy checkpoints to host memory and write them while training continues."""
    no_save_optim: bool = flag(False, needs=on("save"), read_by="training")
    """Leave the optimizer out of checkpoints."""
    no_save_rng: bool = flag(False, needs=on("save"), read_by="training")
    """Leave the random number generators out of checkpoints."""
    no_load_optim: bool = flag(False, needs=on("load"))
    """Do not load the optimizer."""
    no_load_rng: bool = flag(False, needs=on("load"))
    """Do not load the random number generators."""
    finetune: bool = flag(False, needs=on("load"))
    """Load the weights only and start at rollout 0."""
    ref_load: str | None = derived("hf_checkpoint, when a reference model is needed")
    """Checkpoint of the reference model. With --lora-rank it may be a PEFT adapter of the policy's
    rank and layers: the reference model is then --hf-checkpoint with this adapter. Without
    --ref-load it is --hf-checkpoint alone."""
    ref_ckpt_step: int | None = flag(None, range=NONE_OR_SOME, needs=on("ref_load"))
    """Iteration of --ref-load."""
    ref_update_interval: int | None = flag(
        None,
        range=SOME,
        needs=(SAMPLES, on("use_kl_loss") | on("kl_coef", why="no reference model is loaded")),
        read_by="training",
    )
    """Copy the trained weights into the reference model every N rollouts."""
    reset_optimizer_states: bool = flag(False, read_by="training")
    """Reset Adam's moments at each rollout."""

    @property
    def model_dir(self) -> str:
        """--hf-checkpoint, which the checks of a whole run require."""
        assert self.hf_checkpoint is not None
        return self.hf_checkpoint


_TRAINS = unless("debug_rollout_only", why="nothing is trained", warns=True)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weights from trainer to engines."""

    @property
    def staleness(self) -> int:
        """Return the maximum number of rollouts trained on between a push and the training on a
        rollout that its weights generate, by the flags."""
        limit = self.max_staleness
        bound = self._staleness_unpaced
        return bound if limit is None else min(limit, bound)

    @property
    def _staleness_unpaced(self) -> int:
        return self.async_buffer_size + self.update_weights_interval - 1

    @property
    def paced(self) -> str:
        """Return text that says why rollouts wait for a push before they start, and what the bound
        would be otherwise; "" if they do not wait."""
        if self.staleness == self._staleness_unpaced:
            return ""
        return (
            f" (--max-staleness); with --async-buffer-size {self.async_buffer_size} alone it would "
            f"be {self._staleness_unpaced}"
        )

    READ_BY: ClassVar[tuple[Part, ...]] = ("push",)

    update_weight_mode: Literal["full", "delta"] = flag(
        "full", refused_values={"delta": _NO_DELTA}, read_by="config"
    )
    """Push all weights, or only what changed."""
    update_weight_transport: Literal["nccl", "disk"] = flag(
        "nccl",
        needs=unless("lora_rank", why="adapters travel in requests to the engines", warns=True),
        read_by=("push", "engine"),
    )
    """nccl: CUDA IPC or shared memory if colocated, else NCCL or gloo; disk: files in a
    directory."""
    update_weight_buffer_size: int = flag(
        512 * 1024 * 1024,
        range=SOME,
        needs=unless("lora_rank", why="an adapter is pushed as a whole", warns=True),
    )
    """Bytes per bucket. A bucket grows for a larger tensor, and for tensors that engines fuse and
    that must share one."""
    update_weights_interval: int = flag(1, range=SOME, needs=GENERATES, read_by=("push", "engine"))
    """Push the weights every N rollouts."""
    async_buffer_size: int = derived(
        "0 for train, 1 for train-async and, unless its evaluations have colocated engines, for "
        "supervised fine-tuning",
        range=NONE_OR_SOME,
        needs=_TRAINS,
        read_by=("collection", "samples"),
    )
    """Maximum rollouts, finished or in progress, ahead of the trainer; 0: synchronous training. New
    samples are trained on at most async_buffer_size + update_weights_interval - 1 rollouts after
    the push of their weights, earlier with --max-staleness; samples that were put back may be
    older. Supervised fine-tuning, whose data depend on no weights, prepares one ahead."""
    update_weights_in_flight: bool = flag(
        False,
        needs=(
            SAMPLES,
            _TRAINS,
            on(
                "async_buffer_size",
                why="a synchronous run generates nothing while weights are pushed",
            ),
            unless(
                "deterministic_rollout",
                why="which token is the first of new weights depends on timing",
            ),
        ),
    )
    """Push weights while responses are generated, which continue with the new weights, instead of
    waiting for the rollouts in progress. Every token records the version that sampled it."""
    max_staleness: int | None = flag(
        None,
        range=NONE_OR_SOME,
        needs=(SAMPLES, unless("debug_rollout_only", why="nothing is trained")),
        read_by="collection",
    )
    """Maximum number of rollouts trained on since the push of the weights that sampled a sample's
    first token. Where async_buffer_size and update_weights_interval allow more, a rollout starts
    only after the push that keeps its samples within the limit: none is generated in vain, and no
    response is dropped because it is long. --stale-samples says what happens to samples that are
    older nevertheless."""
    stale_samples: Literal["correct", "requeue", "drop"] = derived(
        "correct with mask_offpolicy_in_partial_rollout, else requeue",
        needs=on("max_staleness"),
        read_by="collection",
    )
    """What to do with groups that have tokens older than --max-staleness: groups that earlier
    rollouts, or the run before a resume, began or finished and put back, and groups of a custom
    generate function. correct: train on them, with the correction that is on (--use-tis,
    --use-rollout-logprobs, --mask-offpolicy-in-partial-rollout); requeue: generate them again;
    drop: skip their prompts and draw others."""
    update_weight_disk_dir: str | None = flag(None, needs=on("update_weight_transport", "disk"))
    """Directory for --update-weight-transport disk."""
    update_weight_disk_keep_files: bool = flag(False, needs=on("update_weight_transport", "disk"))
    """Keep the directories of earlier weight versions."""
