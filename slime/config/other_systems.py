"""Names that other systems have for flags, and what has their place here.

An unknown flag is looked up here before a similar spelling is suggested, and so is a word given to
`slime flags`. docs/coming-from.md shows the same rows.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class OtherName:
    """Names of one setting in other systems.

    Attributes:
        names: as other systems write them; the last part of a dotted name is looked up, too.
        answer: Markdown: the flags that do the same, or why there is none.
    """

    names: tuple[str, ...]
    answer: str

    @property
    def text(self) -> str:
        """The answer without Markdown."""
        return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", self.answer).replace("`", "")


TRL: tuple[OtherName, ...] = (
    OtherName(
        ("model", "model_name_or_path"), "`--hf-checkpoint` (a folder, or a name on the hub)"
    ),
    OtherName(
        ("train_dataset", "dataset_name"),
        "`--prompt-data FILE --input-key prompt`; chat messages with `--apply-chat-template`; "
        "plain text gets the tokenizer's BOS, where it puts one, as in a server",
    ),
    OtherName(
        ("reward_funcs",),
        "`--custom-rm-path file.py:f`, `f(args, sample)` for one sample: `sample.response`, "
        "`sample.label`, `sample.metadata`; from Python `slime.train(…, reward=f)` with "
        "`f(response, label)`",
    ),
    OtherName(("num_generations",), "`--n-samples-per-prompt`"),
    OtherName(
        (
            "batch_size",
            "train_batch_size",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
        ),
        "`--rollout-batch-size` (prompts of a step) × `--n-samples-per-prompt`, and "
        "`--global-batch-size` (samples of an optimizer step); micro-batches are packed by tokens "
        "(`--max-tokens-per-gpu`), so that gradient accumulation needs no flag",
    ),
    OtherName(
        ("num_iterations", "mu"),
        "none: each sample is trained on once; `--num-steps-per-rollout` splits a rollout into "
        "several updates",
    ),
    OtherName(
        ("max_prompt_length",), "`--rollout-max-prompt-len`: longer prompts are left out, not cut"
    ),
    OtherName(
        ("max_completion_length", "max_new_tokens", "max_tokens", "max_response_length"),
        "`--rollout-max-response-len`",
    ),
    OtherName(
        ("temperature",), "`--rollout-temperature` (and `--eval-temperature` for evaluations)"
    ),
    OtherName(("top_p",), "`--rollout-top-p` (and `--eval-top-p` for evaluations)"),
    OtherName(("top_k",), "`--rollout-top-k` (and `--eval-top-k` for evaluations)"),
    OtherName(
        ("beta", "kl_coefficient", "kl_penalty"),
        "`--use-kl-loss --kl-loss-coef BETA`: a penalty in the loss, with TRL's estimator (k3) by "
        "default; `--kl-coef` for one in the reward",
    ),
    OtherName(
        ("epsilon", "cliprange", "clip_range", "clip_ratio", "clip_eps", "eps_clip_low"),
        "`--eps-clip`",
    ),
    OtherName(("epsilon_high", "clip_ratio_high"), "`--eps-clip-high`"),
    OtherName(("scale_rewards",), "`--disable-grpo-std-normalization` for `scale_rewards=False`"),
    OtherName(
        ("loss_type",),
        'the default is `"grpo"`: a mean over each sample\'s tokens, then over the samples; '
        '`--calculate-per-token-loss` is `"dapo"` (TRL\'s default) and `"bnpo"`: a mean over all '
        'tokens of an update; `"dr_grpo"` has a constant divisor: a function for '
        "`--custom-pg-loss-reducer-function-path`",
    ),
    OtherName(("importance_sampling_level",), '`--advantage-estimator gspo` for `"sequence"`'),
    OtherName(
        ("use_vllm", "vllm_mode", "vllm", "vllm_gpu_memory_utilization"),
        "SGLang or the embedded engine generates (`--rollout-engine`); `--colocate` for trainer "
        "and engine on the same GPUs, else engines get GPUs of their own, `--rollout-num-gpus`; "
        "their memory is `--sglang-mem-fraction-static`",
    ),
    OtherName(("learning_rate",), "`--lr`"),
    OtherName(
        ("max_grad_norm", "grad_clip", "gradient_clip", "gradient_clipping"), "`--clip-grad`"
    ),
    OtherName(("warmup_steps",), "`--lr-warmup-iters`"),
    OtherName(("warmup_ratio", "lr_warmup_steps_ratio"), "`--lr-warmup-fraction`"),
    OtherName(("lr_scheduler_type", "lr_scheduler", "scheduler"), "`--lr-decay-style`"),
    OtherName(("adam_epsilon",), "`--adam-eps`"),
    OtherName(
        (
            "max_steps",
            "steps",
            "num_steps",
            "total_steps",
            "train_steps",
            "iterations",
            "num_iters",
        ),
        "`--num-rollout`, or `--num-epoch` for passes over the data",
    ),
    OtherName(("num_train_epochs", "epochs", "num_epochs", "total_epochs"), "`--num-epoch`"),
    OtherName(("save_steps", "save_freq"), "`--save-interval`"),
    OtherName(("save_total_limit", "max_actor_ckpt_to_keep", "max_ckpt_num"), "`--save-retain`"),
    OtherName(("eval_steps", "test_freq", "eval_freq"), "`--eval-interval`"),
    OtherName(
        ("logging_steps",),
        "none: every step is logged, to the terminal, metrics.jsonl and TensorBoard",
    ),
    OtherName(
        ("report_to", "wandb", "logger", "log_with"),
        "`--use-wandb` (`--wandb-project`, `--wandb-mode`); metrics.jsonl and TensorBoard are "
        "always written",
    ),
    OtherName(
        ("resume_from_checkpoint", "resume", "resume_mode"),
        "`slime resume outputs/<run>`, or `--load`",
    ),
    OtherName(
        ("gradient_checkpointing", "enable_gradient_checkpointing", "use_gradient_checkpointing"),
        "`--recompute-activations`",
    ),
    OtherName(
        (
            "lora",
            "lora_rank",
            "lora_r",
            "lora_alpha",
            "lora_dropout",
            "peft",
            "use_peft",
            "use_lora",
            "qlora",
            "target_modules",
            "adapter",
            "load_in_4bit",
        ),
        "LoRA is not in this version: all parameters are trained, or those that "
        "`--only-train-params-name-list` names; with little memory take `--recompute-activations` "
        "and `--offload-optimizer-states`",
    ),
    OtherName(
        (
            "ppo",
            "critic",
            "value_model",
            "critic_lr",
            "critic_model",
            "vf_coef",
            "gae",
            "gae_lambda",
            "lam",
        ),
        "there is no PPO critic in this version; `--advantage-estimator` has the estimators "
        "without one (grpo, gspo, cispo, reinforce_plus_plus, …)",
    ),
    OtherName(
        ("dpo", "kto", "orpo", "rloo", "reward_model", "rm_model"),
        "not in this version: `--advantage-estimator` has the estimators that there are; a reward "
        "model is asked by `--rm-type remote_rm --rm-url URL` or by a function "
        "(`--custom-rm-path`)",
    ),
    OtherName(
        ("sft", "sfttrainer"),
        "`--loss-type sft_loss`; as in TRL, plain text ends with the end token. [What is trained "
        "of a conversation](conversations.md#what-is-trained) needs no `{% generation %}` marks "
        "in the template",
    ),
    OtherName(
        ("dtype", "torch_dtype", "mixed_precision", "precision"),
        "`--bf16` (the default), `--fp16` or `--fp32`",
    ),
    OtherName(
        ("packing", "use_remove_padding", "remove_padding", "padding_free"),
        "on by default: samples are packed by tokens without padding "
        "(`--use-dynamic-batch-size`, `--max-tokens-per-gpu`)",
    ),
    OtherName(
        ("deepspeed", "zero_stage", "fsdp", "fsdp_config"),
        "Megatron's distributed optimizer is on by default; `--tensor-model-parallel-size`, "
        "`--pipeline-model-parallel-size`, `--context-parallel-size` divide the model, "
        "`--offload-optimizer-states` moves the optimizer to host memory",
    ),
    OtherName(
        ("num_gpus", "gpus", "n_gpus", "world_size", "nproc_per_node"),
        "`--actor-num-gpus-per-node` and `--actor-num-nodes` for the trainer, "
        "`--rollout-num-gpus` for engines",
    ),
    OtherName(
        (
            "max_seq_length",
            "max_length",
            "max_seq_len",
            "cutoff_len",
            "context_length",
            "max_model_len",
        ),
        "`--rollout-max-context-len` (prompt and response), or `--seq-length` as a hard cap",
    ),
    OtherName(
        ("system_prompt", "prompt_template"),
        "put it into the data as a message of the role system, with `--apply-chat-template`",
    ),
)

VERL: tuple[OtherName, ...] = (
    OtherName(("actor_rollout_ref.model.path",), "`--hf-checkpoint`"),
    OtherName(("data.train_files", "prompt_file"), "`--prompt-data`"),
    OtherName(("data.val_files",), "`--eval-prompt-data NAME FILE`"),
    OtherName(("data.prompt_key",), "`--input-key`"),
    OtherName(("data.train_batch_size",), "`--rollout-batch-size` (prompts)"),
    OtherName(("actor_rollout_ref.rollout.n",), "`--n-samples-per-prompt`"),
    OtherName(
        ("actor.ppo_mini_batch_size", "mini_batch_size", "minibatch_size"),
        "`--global-batch-size` (samples, not prompts), or `--num-steps-per-rollout`",
    ),
    OtherName(
        ("actor.ppo_micro_batch_size_per_gpu", "ppo_micro_batch_size"),
        "none is needed: micro-batches are packed by tokens; `--micro-batch-size` turns that off",
    ),
    OtherName(("actor.ppo_max_token_len_per_gpu",), "`--max-tokens-per-gpu`"),
    OtherName(("actor.use_dynamic_bsz",), "`--use-dynamic-batch-size`, which is on by default"),
    OtherName(("data.max_prompt_length",), "`--rollout-max-prompt-len`"),
    OtherName(("data.max_response_length",), "`--rollout-max-response-len`"),
    OtherName(("algorithm.adv_estimator",), "`--advantage-estimator`"),
    OtherName(("algorithm.kl_ctrl.kl_coef", "init_kl_coef"), "`--kl-coef`"),
    OtherName(
        ("actor.kl_loss_coef", "actor.kl_loss_type", "actor.use_kl_loss"),
        "`--use-kl-loss`, `--kl-loss-coef`, `--kl-loss-type` (`low_var_kl` by default, as in verl)",
    ),
    OtherName(("actor.clip_ratio_low",), "`--eps-clip`"),
    OtherName(("actor.entropy_coeff", "ent_coef"), "`--entropy-coef`"),
    OtherName(("rollout.tensor_model_parallel_size",), "`--rollout-num-gpus-per-engine`"),
    OtherName(("rollout.gpu_memory_utilization",), "`--sglang-mem-fraction-static`"),
    OtherName(
        ("actor.megatron.tensor_model_parallel_size", "tp", "pp", "cp", "ep", "tp_size"),
        "`--tensor-model-parallel-size`, `--pipeline-model-parallel-size`, "
        "`--context-parallel-size`,"
        " `--expert-model-parallel-size`",
    ),
    OtherName(
        ("custom_reward_function.path", "custom_reward_function.name"),
        "`--custom-rm-path file.py:name`",
    ),
    OtherName(("trainer.n_gpus_per_node",), "`--actor-num-gpus-per-node`"),
    OtherName(("trainer.nnodes", "num_nodes"), "`--actor-num-nodes`"),
    OtherName(("trainer.total_training_steps",), "`--num-rollout`"),
    OtherName(("trainer.save_freq", "trainer.test_freq"), "`--save-interval`, `--eval-interval`"),
    OtherName(
        ("trainer.default_local_dir", "save_path"),
        "`--save`; the run folder is `--output-dir/--run-name`",
    ),
    OtherName(("trainer.experiment_name", "exp_name"), "`--run-name`"),
    OtherName(("trainer.project_name",), "`--wandb-project`"),
)


def _key(name: str) -> str:
    return name.strip().lstrip("-").replace("-", "_").lower()


@functools.lru_cache(maxsize=1)
def _by_name() -> dict[str, OtherName]:
    """Whole names first, then their last parts; of two with one name the first wins."""
    table: dict[str, OtherName] = {}
    for row in (*TRL, *VERL):
        for name in row.names:
            table.setdefault(_key(name), row)
    for row in (*TRL, *VERL):
        for name in row.names:
            last = _key(name).rpartition(".")[2]
            if len(last) > 1:
                table.setdefault(last, row)
    return table


def other_name(name: str) -> OtherName | None:
    """What another system's name stands for here; None: no other system is known to have it.

    Example:
        >>> other_name("--learning-rate").text
        '--lr'
        >>> other_name("actor_rollout_ref.actor.ppo_mini_batch_size").text
        '--global-batch-size (samples, not prompts), or --num-steps-per-rollout'
    """
    key = _key(name)
    return _by_name().get(key) or _by_name().get(key.rpartition(".")[2])


def table(rows: tuple[OtherName, ...], system: str) -> str:
    """A Markdown table for docs/coming-from.md."""
    lines = [f"| {system} | here |", "|---|---|"]
    for row in rows:
        names = ", ".join(f"`{name}`" for name in row.names)
        lines.append(f"| {names} | {row.answer} |")
    return "\n".join(lines)
