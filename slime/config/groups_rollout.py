"""Groups about what is generated: data, rollout, reward, evaluation, engines."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from slime.config.field import derived, flag

_OWN_ROUTER = "the router is started here, with the engines of this run, on a port that is reserved for it"
_NO_AGENTS = "the rollout buffer service is not in this version"


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompt data set and how its rows become prompts."""

    prompt_data: str | None = flag(None)
    """JSONL or Parquet file, directory, or Hugging Face data set; `path@[a:b]` takes a slice of the rows."""
    input_key: str = flag("input")
    """Column of the prompt: text, chat messages, or token ids."""
    label_key: str | None = flag(None)
    """Column of the expected answer, handed to the reward function as sample.label."""
    metadata_key: str = flag("metadata")
    """Column of a dict that becomes sample.metadata."""
    tool_key: str = flag("tools")
    """Column of the tool schemas for the chat template."""
    multimodal_keys: dict[str, Any] | None = flag(None, refused="vision-language models are not in this version")
    """Columns of images and other media, as JSON."""
    apply_chat_template: bool = flag(False)
    """Render chat messages with the tokenizer's chat template."""
    apply_chat_template_kwargs: dict[str, Any] = flag({})
    """Keyword arguments of the chat template, as JSON."""
    num_epoch: int | None = flag(None)
    """Passes over the data; sets num_rollout when that is unset."""
    rollout_shuffle: bool = flag(False)
    """Shuffle the prompts anew in each epoch."""
    num_data_workers: int = flag(0)
    """Processes that tokenise and filter the prompts; 0: in the rollout process."""
    streaming_data: bool = flag(False)
    """Read rows lazily instead of loading the data set."""
    data_source_path: str | None = flag(None)
    """Dotted path of a class that replaces the prompt source."""
    rollout_global_dataset: bool = flag(True, off="disable-rollout-global-dataset")
    """Draw prompts from --prompt-data; off: the rollout function brings its own."""
    rollout_max_prompt_len: int | None = derived("rollout_max_context_len − 1 when that is set")
    """Prompts longer than this many tokens are left out."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Sampling: how many, how, and the functions that users may put in."""

    num_rollout: int | None = flag(None)
    """Rollouts (steps of the loop) in the whole run; 0 only evaluates. Required unless --num-epoch is given."""
    rollout_batch_size: int = derived("required")
    """Prompts per rollout."""
    n_samples_per_prompt: int = flag(1)
    """Samples per prompt: the size of a group."""
    start_rollout_id: int | None = flag(None)
    """First rollout id; unset: taken from the checkpoint, 0 for a fresh start."""
    rollout_temperature: float = flag(1.0)
    """Sampling temperature, > 0; log-probs are of the tempered distribution."""
    rollout_top_p: float = flag(1.0)
    """Nucleus sampling: smallest set of tokens with this probability."""
    rollout_top_k: int = flag(-1)
    """Sample among the k most probable tokens; -1: all."""
    rollout_min_p: float = flag(0.0)
    """Leave out tokens less probable than this fraction of the most probable."""
    rollout_max_context_len: int | None = flag(None)
    """Most tokens of prompt plus response."""
    rollout_max_response_len: int = derived("rollout_max_context_len or seq_length minus 1 when set, else 1024")
    """Most new tokens per sample."""
    rollout_skip_special_tokens: bool = flag(False)
    """Leave special tokens out of the response text (never out of the tokens)."""
    rollout_stop: tuple[str, ...] = flag(())
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = flag(())
    """Token ids that end a response."""
    rollout_seed: int = flag(42)
    """Seed of the prompt order and, in deterministic mode, of sampling."""
    rollout_timeout: float = flag(14400.0)
    """Seconds after which the generation of one rollout batch, or one evaluation, is given up."""
    deterministic: bool = flag(False, name="deterministic-rollout")
    """Seed every request by its sample, so that tokens do not depend on how requests are batched together."""
    over_sampling_batch_size: int = derived("rollout_batch_size")
    """Prompts drawn at a time while a dynamic filter drops groups; at least rollout_batch_size."""
    dynamic_sampling_filter_path: str | None = flag(None)
    """Function (args, samples) -> bool that decides whether a finished group is kept."""
    partial_rollout: bool = flag(False)
    """Keep samples that were under way when the batch was full, and finish them in the next rollout."""
    mask_offpolicy_in_partial_rollout: bool = flag(False)
    """Do not train on tokens that an earlier policy sampled."""
    rollout_max_failed_fraction: float = flag(0.1)
    """Fraction of a rollout's prompts that may fail for good (others replace them) before the run stops."""
    rollout_stall_timeout: float = flag(600.0)
    """Seconds without any sign of progress after which a rollout stops and reports who waits for whom."""
    rollout_function_path: str | None = flag(None)
    """Function (args, rollout_id, data_source, evaluation) that replaces the whole rollout loop."""
    custom_generate_function_path: str | None = flag(None)
    """Async function (args, sample, sampling_params) that replaces the generation of one sample."""
    rollout_sample_hook_path: tuple[str, ...] = flag((), append=True)
    """Function (args, sample) run on each generated sample before its reward; may be repeated."""
    buffer_filter_path: str | None = flag(None)
    """Function (args, rollout_id, buffer, num_samples) that picks groups out of the buffer."""
    rollout_sample_filter_path: str | None = flag(None)
    """Function (args, groups) run at the end of a rollout; sets sample.remove_sample."""
    rollout_all_samples_process_path: str | None = flag(None)
    """Function (args, all_groups, data_source) run at the end of a rollout, filtered groups included."""
    custom_rollout_log_function_path: str | None = flag(None)
    """Function that logs a rollout; returns true to skip the default log."""
    custom_eval_rollout_log_function_path: str | None = flag(None)
    """Function that logs an evaluation; returns true to skip the default log."""
    rollout_data_postprocess_path: str | None = flag(None)
    """Function (args, rollout_id, rollout_data) run in the trainer after the advantages are known."""
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] = flag(
        "qwen", refused="the loss mask of chat data is found through the model's own chat template"
    )
    """How the loss mask of multi-turn SFT data is found."""
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store", refused_values={"nixl": "training data travels through Ray's object store"}
    )
    """How training data gets from rollout to trainer."""
    rollout_buffer_url: str | None = flag(None, refused=_NO_AGENTS)
    """Address of a rollout buffer service."""
    fetch_trajectory_retry_times: int = flag(-1, refused=_NO_AGENTS)
    """Retries when fetching from the buffer service."""
    min_batch_collection_ratio: float = flag(1.0, refused=_NO_AGENTS)
    """Fraction of a batch that the buffer service must have."""
    rollout_task_type: str = flag("math", refused=_NO_AGENTS)
    """Task type for the buffer service."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward functions."""

    rm_type: str | None = flag(None)
    """Built-in reward: math, dapo, deepscaler, f1, gpqa, remote_rm, random; metadata["rm_type"] wins."""
    custom_rm_path: str | None = flag(None)
    """Reward function (args, sample), sync or async, by dotted path or file.py:function."""
    group_rm: bool = flag(False)
    """Call the reward function once per group, with the list of its samples."""
    reward_key: str | None = flag(None)
    """Key of the number to train on, when rewards are dicts."""
    eval_reward_key: str | None = derived("reward_key")
    """The same for evaluation."""
    rm_url: str | None = flag(None)
    """Address of the remote reward model (--rm-type remote_rm)."""
    rm_timeout: float = flag(60.0)
    """Seconds after which a reward call is given up."""
    rm_num_workers: int = derived("CPU cores of this host, at most 8")
    """Worker processes of CPU-bound reward functions."""
    custom_reward_post_process_path: str | None = flag(None)
    """Function (args, samples) -> (raw_rewards, rewards) that replaces group normalisation."""
    custom_convert_samples_to_train_data_path: str | None = flag(None)
    """Function (args, samples) -> dict that replaces the conversion to training data."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during the run."""

    eval_interval: int | None = flag(None)
    """Evaluate every so many rollouts."""
    eval_prompt_data: tuple[str, ...] = flag(())
    """Name and path of each evaluation set: --eval-prompt-data gsm8k test.jsonl aime aime.jsonl."""
    eval_config: str | None = flag(None)
    """YAML file of evaluation sets with settings of their own; overrides --eval-prompt-data."""
    skip_eval_before_train: bool = flag(False)
    """No evaluation before the first step."""
    eval_function_path: str | None = derived("rollout_function_path")
    """Function that replaces the whole evaluation."""
    eval_input_key: str = derived("input_key")
    """Column of the prompt."""
    eval_label_key: str | None = derived("label_key")
    """Column of the expected answer."""
    eval_tool_key: str = derived("tool_key")
    """Column of the tool schemas."""
    n_samples_per_eval_prompt: int = flag(1)
    """Samples per prompt in evaluation."""
    eval_pass_k: tuple[int, ...] = flag(())
    """Values of k for which pass@k is reported; unset: powers of two up to the samples per prompt."""
    eval_temperature: float = derived("rollout_temperature")
    """Sampling temperature of evaluation; 0: greedy."""
    eval_top_p: float = derived("rollout_top_p")
    """Nucleus sampling in evaluation."""
    eval_top_k: int = derived("rollout_top_k")
    """Top-k sampling in evaluation."""
    eval_max_response_len: int = derived("rollout_max_response_len")
    """Most new tokens per sample in evaluation."""
    eval_max_prompt_len: int | None = derived("rollout_max_prompt_len")
    """Longer prompts are left out of evaluation."""
    eval_max_context_len: int | None = derived("rollout_max_context_len")
    """Most tokens of prompt plus response in evaluation."""
    eval_min_new_tokens: int = flag(0)
    """Least new tokens per sample in evaluation."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engines and the router in front of them.

    `sglang` and `router` hold what the user set with --sglang-* and --router-*, without the prefix, ready for
    `slime.config.foreign.to_argv`: ``router["policy"]`` is --router-policy, for example.
    """

    rollout_engine: Literal["auto", "sglang", "embedded"] = derived(
        "auto: sglang where this host has a GPU and SGLang is installed, else embedded"
    )
    """Engine implementation."""
    embedded_dtype: Literal["auto", "bfloat16", "float32"] = flag("auto")
    """Weights of the embedded engine; auto: as the trainer's."""
    embedded_max_slots: int = flag(64)
    """Requests that the embedded engine decodes at once; more wait in its queue."""
    rollout_external_engine_addrs: tuple[str, ...] = flag((), refused="external engines are not in this version")
    """host:port of engines that are already running."""
    sglang_server_concurrency: int = flag(512)
    """Most requests in flight per engine."""
    sglang_router_ip: str | None = flag(None, refused=_OWN_ROUTER)
    """Address of the router, as hooks read it."""
    sglang_router_port: int | None = flag(None, refused=_OWN_ROUTER)
    """Port of the router, as hooks read it."""
    sglang_router_request_timeout_secs: int = flag(14400)
    """Seconds after which the router gives a request up."""
    sglang_config: str | None = flag(None)
    """YAML file of server groups."""
    prefill_num_servers: int | None = flag(None, refused="prefill and decode servers are groups of --sglang-config")
    """Number of prefill servers."""
    sglang_custom_pull_weights_pre_read_hook: str | None = flag(None, refused="needs a patched SGLang")
    """Engine-side hook before weights are read from disk."""
    sglang: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
