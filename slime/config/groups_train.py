"""Groups about training: algorithm, batches, checkpoints, weight sync."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from slime.config.flag import (
    GENERATES,
    NONE_OR_SOME,
    POLICY_LOSS,
    SAMPLES,
    SEED,
    SOME,
    Interval,
    Process,
    at_least,
    derived,
    finite,
    flag,
    on,
    unless,
)

_NO_CRITIC = "the PPO critic is not in this version"
_NO_OPD = "on-policy distillation is not in this version"
_NO_DELTA = "delta weight updates are not in this version; leave --update-weight-mode at full"
_NO_DEEPGEMM = "the DeepGEMM alignment kernels are not in this version"
_NO_TEACHER_SERVER = "the Megatron teacher server is not in this version"
_NO_OLD_ACTOR = "a lagged copy of the policy is not in this version; the old log-probs are those of the trained weights"

_PENALTY = finite(0, "a penalty; below 0 it would reward leaving the reference model")
_CLIP = at_least(0, "a distance from the ratio 1")
_OWN_REWARDS = unless("custom_reward_post_process_path", why="it replaces the group's statistics")
_OWN_COLUMNS = unless(
    "custom_convert_samples_to_train_data_path",
    why="only that function can read it: the rewards are its own",
    warns=True,
)
_CUSTOM_MAY_READ = unless("loss_type", "custom_loss", why="only the custom loss function can read it", warns=True)


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Loss, advantages, and corrections between the sampling and the trained policy."""

    SERVES: ClassVar[tuple[Process, ...]] = ("trainer",)

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag(
        "policy_loss", serves=("driver", "rollout", "trainer")
    )
    """policy_loss for RL, sft_loss for supervised fine-tuning, custom_loss for a function of your own."""
    custom_loss_function_path: str | None = flag(None, needs=on("loss_type", "custom_loss"))
    """Function (args, batch, logits, sum_of_sample_mean) -> (loss, metrics), with --loss-type custom_loss."""
    advantage_estimator: Literal[
        "grpo", "gspo", "cispo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"
    ] = flag("grpo", refused_values={"ppo": _NO_CRITIC}, needs=SAMPLES)
    """How rewards become advantages."""
    disable_compute_advantages_and_returns: bool = flag(
        False,
        needs=(
            unless("loss_type", "policy_loss", why="the policy loss weighs tokens by their advantages"),
            unless("custom_advantage_function_path", why="it computes them"),
        ),
    )
    """Train without advantages (SFT, custom losses)."""
    custom_advantage_function_path: str | None = flag(None, needs=SAMPLES)
    """Function (args, rollout_data) that sets advantages and returns."""
    eps_clip: float = flag(0.2, range=_CLIP, needs=(SAMPLES, _CUSTOM_MAY_READ))
    """Lower clip range of the policy ratio."""
    eps_clip_high: float = derived("eps_clip", range=_CLIP, needs=(SAMPLES, _CUSTOM_MAY_READ))
    """Upper clip range of the policy ratio."""
    eps_clip_c: float | None = flag(
        None,
        range=Interval(1, above=True, what="a ratio beyond the clip range"),
        needs=(
            SAMPLES,
            _CUSTOM_MAY_READ,
            unless("advantage_estimator", "cispo", why="CISPO clips the importance weight, not the loss"),
        ),
    )
    """Bound of dual-clip PPO, > 1."""
    value_clip: float = flag(0.2, refused=_NO_CRITIC)
    """Clip range of the value loss."""
    kl_coef: float = flag(
        0.0,
        range=_PENALTY,
        needs=(
            SAMPLES,
            unless(
                "advantage_estimator",
                "grpo",
                "gspo",
                "cispo",
                why="its advantage is the group-normalised reward alone; use --use-kl-loss"
                " --kl-loss-coef 0.01 --kl-loss-type low_var_kl",
            ),
        ),
    )
    """Coefficient of the KL penalty in the reward."""
    use_kl_loss: bool = flag(False, needs=SAMPLES)
    """Add a KL loss against the reference model (--ref-load)."""
    kl_loss_coef: float = flag(0.0, range=_PENALTY, needs=(on("use_kl_loss"), _CUSTOM_MAY_READ))
    """Coefficient of the KL loss."""
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag(
        "k1", needs=on("use_kl_loss", why="launch scripts keep it without the loss", warns=True) | on("kl_coef")
    )
    """KL estimator (Schulman, http://joschu.net/blog/kl-approx.html). In the loss, k1 pulls nowhere on policy: the
    expectation of its gradient is 0 there; use low_var_kl (k3, clamped) or k2."""
    use_unbiased_kl: bool = flag(False, needs=(on("use_kl_loss"), _CUSTOM_MAY_READ))
    """Weight the KL estimator by the importance ratio."""
    entropy_coef: float = flag(
        0.0,
        range=Interval(-math.inf, below=True, above=True, what="a bonus, or a penalty below 0"),
        needs=(SAMPLES, _CUSTOM_MAY_READ),
    )
    """Coefficient of the entropy bonus."""
    gamma: float = flag(
        1.0,
        range=Interval(0, 1, what="a discount; above 1 returns would grow with the length"),
        needs=on("advantage_estimator", "reinforce_plus_plus")
        | on(
            "custom_advantage_function_path",
            why="every token of a sample has the sample's own reward; only reinforce_plus_plus discounts",
        ),
    )
    """Discount per token (REINFORCE++)."""
    lambd: float = flag(1.0, refused=_NO_CRITIC)
    """Lambda of generalised advantage estimation."""
    normalize_advantages: bool = flag(False, needs=SAMPLES & unless("disable_compute_advantages_and_returns"))
    """Whiten advantages over the batch."""
    disable_grpo_std_normalization: bool = flag(
        False,
        needs=(
            SAMPLES,
            on("advantage_estimator", "grpo", "gspo", "cispo", why="the other estimators do not divide by it"),
            _OWN_REWARDS,
            _OWN_COLUMNS,
        ),
        serves="config",
    )
    """Do not divide by the group's standard deviation (Dr. GRPO)."""
    grpo_std_normalization: bool = derived(
        "not disable_grpo_std_normalization, and n_samples_per_prompt > 1", serves="rollout"
    )
    """The opposite of --disable-grpo-std-normalization, as hooks read it."""
    disable_rewards_normalization: bool = flag(False, needs=(SAMPLES, _OWN_REWARDS, _OWN_COLUMNS), serves="config")
    """Use raw rewards, without the group mean."""
    rewards_normalization: bool = derived("not disable_rewards_normalization", serves="rollout")
    """The opposite of --disable-rewards-normalization, as hooks read it."""
    use_rollout_entropy: bool = flag(
        False, refused="there is no metric rollout/entropy; train/entropy_loss is the entropy of the same tokens"
    )
    """Log the entropy of the rollout tokens."""
    use_rollout_logprobs: bool = flag(False, needs=SAMPLES)
    """Take the engine's log-probs as the old policy's, instead of recomputing them."""
    use_tis: bool = flag(False, needs=POLICY_LOSS)
    """Truncated importance sampling between the engine's and the trainer's policy."""
    tis_clip: float = flag(
        2.0,
        range=Interval(0, above=True, what="an importance weight"),
        needs=on("use_tis") | on("get_mismatch_metrics"),
    )
    """Upper bound of the importance weight."""
    tis_clip_low: float = flag(
        0.0, range=finite(0, "an importance weight"), needs=on("use_tis") | on("get_mismatch_metrics")
    )
    """Lower bound of the importance weight."""
    tis_mode: Literal["truncate", "icepop"] = flag(
        "truncate", needs=(on("use_tis"), unless("custom_tis_function_path", why="it replaces both"))
    )
    """A weight outside the bounds: truncate takes the bound, icepop leaves the token out (published with 0.5 and 5)."""
    custom_tis_function_path: str | None = flag(None, needs=on("use_tis") | on("get_mismatch_metrics"))
    """Function that replaces truncated importance sampling."""
    get_mismatch_metrics: bool = flag(False, needs=POLICY_LOSS)
    """Log the mismatch between engine and trainer as --custom-tis-function-path measures it, without correcting."""
    custom_pg_loss_reducer_function_path: str | None = flag(None, needs=POLICY_LOSS)
    """Function that makes the reducer of the policy loss."""
    calculate_per_token_loss: bool = flag(False)
    """Average the loss over tokens instead of over rollouts."""
    use_opsm: bool = flag(False, needs=POLICY_LOSS)
    """Off-policy sequence masking."""
    opsm_delta: float = flag(1e-4, range=at_least(0, "a KL divergence"), needs=on("use_opsm"))
    """Sequence KL above which a sample of negative advantage is masked."""
    use_opd: bool = flag(False, refused=_NO_OPD)
    """On-policy distillation."""
    opd_type: Literal["sglang", "megatron"] | None = flag(None, refused=_NO_OPD)
    """Where the teacher runs."""
    opd_kl_coef: float = flag(1.0, refused=_NO_OPD)
    """Coefficient of the distillation term."""
    opd_teacher_load: str | None = flag(None, refused=_NO_OPD)
    """Checkpoint of the teacher."""
    opd_teacher_ckpt_step: int | None = flag(None, refused=_NO_OPD)
    """Iteration of the teacher's checkpoint."""
    num_critic_only_steps: int = flag(0, refused=_NO_CRITIC)
    """Steps that train the critic alone."""

    @property
    def needs_reference(self) -> bool:
        """Something compares the policy with the reference model: the KL loss, or the KL penalty in the reward."""
        return self.loss_type != "sft_loss" and (self.use_kl_loss or self.kl_coef != 0)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Batches, packing, what is trained, and hooks of the trainer."""

    SERVES: ClassVar[tuple[Process, ...]] = ("trainer",)

    seed: int = flag(1234, range=SEED)
    """Seed of the trainer."""
    global_batch_size: int = derived("rollout_batch_size × n_samples_per_prompt ÷ num_steps_per_rollout", range=SOME)
    """Samples (executions) per optimizer step, over all data-parallel ranks."""
    num_steps_per_rollout: int = derived("rollout_batch_size × n_samples_per_prompt ÷ global_batch_size", range=SOME)
    """Optimizer steps per rollout."""
    micro_batch_size: int = flag(
        1, range=SOME, needs=unless("use_dynamic_batch_size", why="micro-batches are packed by tokens")
    )
    """Samples per micro-batch, when batches are not dynamic."""
    use_dynamic_batch_size: bool = flag(False)
    """Pack micro-batches by tokens, up to --max-tokens-per-gpu."""
    max_tokens_per_gpu: int | None = flag(None, range=SOME, needs=on("use_dynamic_batch_size"))
    """Most tokens of a micro-batch on one GPU, with --use-dynamic-batch-size."""
    log_probs_max_tokens_per_gpu: int | None = flag(
        None, refused="one packing serves all passes over a batch; use --max-tokens-per-gpu"
    )
    """The same for passes that only compute log-probs."""
    balance_data: bool = derived("balance_by_flops")
    """Spread samples over data-parallel ranks so that each has the same work."""
    balance_by_flops: bool = flag(False, needs=on("use_dynamic_batch_size"))
    """Balance by floating-point operations instead of tokens."""
    data_pad_size_multiplier: int = flag(128, range=SOME)
    """Packed micro-batches are padded to a multiple of this many tokens times the tensor-parallel size."""
    log_probs_chunk_size: int = flag(
        -1, range=Interval(1, or_minus_one=True, what="-1 leaves the choice to the program")
    )
    """Rows of logits computed at a time for log-probs; -1: chosen from the vocabulary size."""
    recompute_loss_function: bool = flag(
        False, refused="log-probs are always computed in chunks that keep no logits; see --log-probs-chunk-size"
    )
    """Recompute the loss in the backward pass instead of keeping its intermediates."""
    seq_length: int | None = flag(None, range=at_least(2, "a prompt token and a response token"))
    """Hard cap of prompt plus response: generation is limited to it, longer samples are refused."""
    only_train_params_name_list: tuple[str, ...] = flag(())
    """Regular expressions (re.search) of the parameters to train; all others are frozen."""
    freeze_params_name_list: tuple[str, ...] = flag(())
    """Regular expressions (re.search) of the parameters to freeze."""
    keep_old_actor: bool = flag(False, refused=_NO_OLD_ACTOR)
    """Take the old policy from a lagged copy of the weights."""
    transformer_impl: Literal["auto", "local", "transformer_engine"] = flag("auto")
    """Layer implementation; auto is local. transformer_engine needs it installed (2.9 to 2.11)."""
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag("auto")
    """Attention kernel, with or without Transformer Engine; one that is not there is refused by name. On GPUs auto is
    flash-attn-4 where it is installed (SGLang brings it) and knows the GPU, else, like flash, torch's packed kernel."""
    custom_model_provider_path: str | None = flag(None)
    """Function (pre_process, post_process, vp_stage) -> GPTModel that builds the model."""
    custom_megatron_init_path: str | None = flag(None)
    """Function (args) run after Megatron is initialised."""
    custom_megatron_before_log_prob_hook_path: str | None = flag(None, needs=SAMPLES)
    """Function (args, model, store_prefix) run before each forward-only pass."""
    custom_megatron_before_train_step_hook_path: str | None = flag(None)
    """Function (args, rollout_id, step_id, model, optimizer, opt_param_scheduler) run before each step's passes."""
    use_routing_replay: bool = derived("use_rollout_routing_replay")
    """Experts of the old-policy pass are used again in training, their weights computed anew."""
    use_rollout_routing_replay: bool = flag(False, needs=SAMPLES)
    """Experts that the engine chose (rollout_routed_experts of the samples) are used in the old-policy pass and in
    training; implies --use-routing-replay."""
    enable_mtp_training: bool = flag(False, refused="training of multi-token-prediction layers is not here")
    """Train the multi-token-prediction layers."""
    qwen_gdn_backend: Literal["fla", "flashqla"] = flag("fla", refused="Qwen3-Next layers are not in this version")
    """Kernels of Gated DeltaNet layers."""
    freeze_indexer: bool = flag(False, refused="DeepSeek sparse attention is not in this version")
    """Freeze the indexer of DeepSeek sparse attention."""
    allgather_cp: bool = flag(False, refused="DeepSeek sparse attention is not in this version")
    """Contiguous context parallelism for DeepSeek sparse attention."""
    megatron_config_path: str | None = flag(None, refused=_NO_CRITIC + ", and so are role files")
    """YAML file of settings per role."""
    megatron_deepgemm_forward_layers: tuple[int, ...] = flag((), refused=_NO_DEEPGEMM)
    """Layers that use DeepGEMM in the forward pass."""
    megatron_deepgemm_forward_modules: tuple[str, ...] = flag((), refused=_NO_DEEPGEMM)
    """Modules that use DeepGEMM in the forward pass."""
    megatron_deepgemm_moe_forward_layers: tuple[int, ...] = flag((), refused=_NO_DEEPGEMM)
    """MoE layers that use DeepGEMM in the forward pass."""
    megatron_deepgemm_moe_forward_modules: tuple[str, ...] = flag((), refused=_NO_DEEPGEMM)
    """MoE modules that use DeepGEMM in the forward pass."""
    teacher_port: int = flag(7999, refused=_NO_TEACHER_SERVER)
    """Port of the Megatron teacher server."""
    teacher_warmup_port: int | None = flag(None, refused=_NO_TEACHER_SERVER)
    """Port of the teacher server while it warms up."""
    teacher_warmup_timeout_s: int = flag(3000, refused=_NO_TEACHER_SERVER)
    """Deadline of the teacher server's warm-up."""
    teacher_sample_reduction_chunk_size: int = flag(4096, refused=_NO_TEACHER_SERVER)
    """Chunk size of the teacher server."""
    teacher_label_reduction_chunk_size: int = flag(4096, refused=_NO_TEACHER_SERVER)
    """Chunk size of the teacher server."""
    megatron_server_max_length: int = flag(0, refused=_NO_TEACHER_SERVER)
    """Longest input of the teacher server."""
    megatron_server_update_timeout_s: int = flag(3600, refused=_NO_TEACHER_SERVER)
    """Deadline of the teacher server's weight update."""
    megatron_server_warmup: bool = flag(True, refused=_NO_TEACHER_SERVER)
    """Warm the teacher server up."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is loaded and what is saved."""

    SERVES: ClassVar[tuple[Process, ...]] = ("trainer",)

    hf_checkpoint: str | None = flag(None)
    """Hugging Face directory, or org/name on the hub: tokenizer, config, engine weights, and the trainer's weights for
    a fresh start."""
    model_name: str | None = flag(None)
    """Model family of the weight converter; unset: found from the Hugging Face config."""
    load: str | None = flag(None)
    """Checkpoint to start from; equal to --save: resume, or start fresh when there is nothing yet. Unset: start
    from --ref-load or --hf-checkpoint."""
    ckpt_step: int | None = flag(None, range=NONE_OR_SOME, needs=on("load"))
    """Iteration of --load; unset: the latest."""
    save: str | None = flag(None)
    """Directory of the run's own checkpoints; {run} in it, in --load and in --save-hf is the run folder:
    --save {run}/checkpoints. Without it and --save-hf nothing of the training is kept."""
    save_interval: int | None = flag(None, range=SOME, needs=on("save") | on("save_hf"), serves="driver")
    """Save every so many rollouts, and after the last. Unset: with --save every tenth of the run, or half an hour where
    that is sooner, of which --save-retain keeps 2; with --save-hf alone after the last."""
    save_retain: int | None = derived("2 with --save and no --save-interval, else all", range=SOME, needs=on("save"))
    """Keep only the last N checkpoints."""
    save_hf: str | None = flag(None)
    """Also write a Hugging Face directory with each checkpoint: {rollout_id} in it, with a format where wanted
    ({rollout_id:04d}), is the rollout; without it each replaces the last."""
    export_model: bool = flag(True, needs=on("save"), serves="driver")
    """With --save and no --save-hf: when the run ends, write its model into the run folder (model/) as a Hugging Face
    directory, to load, chat with or train on. 2 bytes per parameter; of a model of 30B that takes minutes
    (--no-export-model: none, `slime convert megatron-to-hf` makes it from a checkpoint)."""
    async_save: bool = flag(False, needs=on("save"))
    """Copy a checkpoint to host memory and write it behind training."""
    no_save_optim: bool = flag(False, needs=on("save"))
    """Leave the optimizer out of checkpoints."""
    no_save_rng: bool = flag(False, needs=on("save"))
    """Leave the random number generators out of checkpoints."""
    no_load_optim: bool = flag(False, needs=on("load"))
    """Do not load the optimizer."""
    no_load_rng: bool = flag(False, needs=on("load"))
    """Do not load the random number generators."""
    finetune: bool = flag(False, needs=on("load"))
    """Load the weights only and start at rollout 0."""
    ref_load: str | None = derived("hf_checkpoint, when a reference model is needed")
    """Checkpoint of the reference model."""
    ref_ckpt_step: int | None = flag(None, range=NONE_OR_SOME, needs=on("ref_load"))
    """Iteration of --ref-load."""
    ref_update_interval: int | None = flag(
        None, range=SOME, needs=(SAMPLES, on("use_kl_loss") | on("kl_coef", why="no reference model is loaded"))
    )
    """Copy the trained weights into the reference model every so many rollouts."""
    reset_optimizer_states: bool = flag(False)
    """Reset Adam's moments at each rollout."""
    use_stateless_adam: bool = flag(False, refused="stateless Adam is not in this version")
    """Adam without kept moments."""


_TRAINS = unless("debug_rollout_only", why="nothing is trained", warns=True)


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """Weights from trainer to engines."""

    @property
    def staleness(self) -> int:
        """Most rollouts trained on since the push of the weights that generate one, as the flags have it."""
        most, bound = self.max_staleness, self._staleness_unpaced
        return bound if most is None else min(most, bound)

    @property
    def _staleness_unpaced(self) -> int:
        return self.async_buffer_size + self.update_weights_interval - 1

    @property
    def paced(self) -> str:
        """Where rollouts wait for a push before they begin: by what, and what the bound would be; else ""."""
        if self.staleness == self._staleness_unpaced:
            return ""
        return (
            f" (--max-staleness): fewer are ahead than --async-buffer-size {self.async_buffer_size} allows for,"
            f" by which it would be {self._staleness_unpaced}"
        )

    SERVES: ClassVar[tuple[Process, ...]] = ("trainer",)

    update_weight_mode: Literal["full", "delta"] = flag("full", refused_values={"delta": _NO_DELTA}, serves="config")
    """Push all weights, or only what changed."""
    update_weight_transport: Literal["nccl", "disk"] = flag("nccl")
    """nccl: by memory or network (IPC or shared memory when colocated, NCCL or gloo else); disk: a directory."""
    update_weight_buffer_size: int = flag(512 * 1024 * 1024, range=SOME)
    """Bytes per bucket."""
    update_weights_interval: int = flag(1, range=SOME, needs=GENERATES, serves=("driver", "engine"))
    """Push the weights every so many rollouts."""
    async_buffer_size: int = derived(
        "0 for train, 1 for train-async and for supervised fine-tuning",
        range=NONE_OR_SOME,
        needs=_TRAINS,
        serves="driver",
    )
    """Most rollouts finished or under way ahead of the trainer. 0 is lock step. What a rollout draws anew is trained on
    at most async_buffer_size + update_weights_interval - 1 rollouts after its weights were pushed, less with
    --max-staleness; what was put back may be older. Fine-tuning, whose data depend on no weights, makes one ahead."""
    update_weights_in_flight: bool = flag(
        False,
        needs=(
            SAMPLES,
            _TRAINS,
            on("async_buffer_size", why="in lock step nothing is generated while weights are pushed"),
            unless("deterministic_rollout", why="which token is the first of new weights depends on timing"),
        ),
        serves="driver",
    )
    """Push the weights while answers are being generated, which go on with them, instead of waiting until the rollouts
    under way have ended. Every token keeps the version that sampled it."""
    max_staleness: int | None = flag(
        None,
        range=NONE_OR_SOME,
        needs=(SAMPLES, unless("debug_rollout_only", why="nothing is trained")),
        serves="driver",
    )
    """Most rollouts that the trainer may have trained on since it pushed the weights that sampled a sample's first
    token. Where async_buffer_size and update_weights_interval allow for more, a rollout begins only after the push that
    makes its samples young enough: nothing is generated in vain, and no answer is left out for its length. What is too
    old all the same is --stale-samples' business."""
    stale_samples: Literal["correct", "requeue", "drop"] = derived(
        "correct with mask_offpolicy_in_partial_rollout, else requeue",
        needs=on("max_staleness"),
        serves=("driver", "rollout"),
    )
    """What becomes of groups with tokens older than --max-staleness: those that earlier rollouts, or an earlier life of
    the run, had begun or finished and put back, and what a generate function of your own brings. correct: they are
    trained on, with the correction that is on (--use-tis, --use-rollout-logprobs, --mask-offpolicy-in-partial-rollout);
    requeue: they are generated anew; drop: their prompts are passed over, and others take their place."""
    update_weight_disk_dir: str | None = flag(None, needs=on("update_weight_transport", "disk"))
    """Directory for --update-weight-transport disk."""
    update_weight_disk_keep_files: bool = flag(False, needs=on("update_weight_transport", "disk"))
    """Keep the directories of earlier weight versions."""
    update_weight_delta_encoding: Literal["xor", "overwrite"] = flag("xor", refused=_NO_DELTA)
    """Encoding of deltas."""
    update_weight_delta_checksum: Literal["xxh3-128", "blake3", "adler32"] = flag("xxh3-128", refused=_NO_DELTA)
    """Checksum of deltas."""
    update_weight_local_checkpoint_dir: str | None = flag(None, refused=_NO_DELTA)
    """Local directory on engine hosts to which deltas are applied."""
    custom_update_weight_post_write_path: str | None = flag(None, refused="this hook is not in this version")
    """Function (args, version_dir, rollout_engines) run on every rank after a disk push is written."""
