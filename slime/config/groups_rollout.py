"""Groups about what is generated: data, rollout, reward, evaluation, engines."""

# ruff: noqa: RUF009 -- flag() makes a dataclass field
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from slime.config.flag import (
    ENGINES,
    EVALUATES,
    EVALUATION_SETTING,
    FRACTION,
    GENERATES,
    NONE_OR_SOME,
    POSITIVE,
    PROBABILITY,
    SAMPLES,
    SEED,
    SOME,
    TOP_K,
    Interval,
    Part,
    at_least,
    derived,
    finite,
    flag,
    on,
    unless,
)

_HAS_ENGINES = unless("debug_train_only", why="no engine is started that could answer", warns=True)
_PORT = Interval(0, 65535, what="0 is a free one")
_AGENTS = (
    on("custom_generate_function_path")
    | on("rollout_function_path")
    | on("eval_function_path")
    | on("eval_config", why="only a function of yours can open the API for agents", warns=True)
)
_TRAINS_TOO = unless("num_rollout", 0, why="the run is one evaluation", warns=True)
#: The reference system's rollout function for supervised fine-tuning, which launch scripts pass.
_SFT_PATH = "slime.rollout.sft_rollout.generate_rollout"


@dataclass(frozen=True, kw_only=True)
class RewardType:
    """Facts about a built-in reward.

    Attributes:
        uses_workers: it is computed in worker processes, because it may hang.
        compares_label: it compares the response with the label, which is then text, a number, a
            boolean or a date.
    """

    uses_workers: bool = False
    compares_label: bool = False


#: The built-in rewards, by their names in --rm-type, which may have the prefix "boxed_".
#: `slime.rollout.rewards.pool` computes them.
REWARD_TYPES = {
    "math": RewardType(uses_workers=True, compares_label=True),
    "deepscaler": RewardType(uses_workers=True, compares_label=True),
    "dapo": RewardType(compares_label=True),
    "f1": RewardType(compares_label=True),
    "gpqa": RewardType(compares_label=True),
    "ifbench": RewardType(uses_workers=True),
    "remote_rm": RewardType(),
    "reward_model": RewardType(),
    "random": RewardType(),
}
_WITH_WORKERS = [name for name, facts in REWARD_TYPES.items() if facts.uses_workers]
_WITHOUT_WORKERS = [
    prefix + name for name in REWARD_TYPES for prefix in ("", "boxed_") if name not in _WITH_WORKERS
]


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompt data set and how its rows become prompts."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("collection",)

    prompt_data: str | None = flag(None)
    """JSONL, JSON, CSV, Parquet or Arrow file, data set folder, or org/name on the hub;
    `path/config:split` names a configuration and a split (default: train), `path@[a:b]` takes a
    slice of the rows."""
    input_key: str = flag("input")
    """Column of the prompt: text, chat messages, or token ids."""
    label_key: str | None = flag(None)
    """Column of the expected answer, handed to the reward function as sample.label."""
    label_type: Literal["text", "raw"] = flag("text", read_by=("collection", "generation"))
    """text: numbers and booleans become text, as the data writes them (5.10 is "5.10"; lists and
    dicts stay), and can be compared with a response. raw: labels stay Python numbers; hooks
    written for the import paths of earlier versions always get raw labels."""
    metadata_key: str = flag("metadata", read_by=("collection", "generation"))
    """Column of a dict that becomes sample.metadata."""
    tool_key: str = flag("tools")
    """Column of the tool schemas for the chat template."""
    apply_chat_template: bool = flag(False, read_by=("collection", "generation"))
    """Render chat messages with the chat template; else the tokenizer encodes the text, with its
    BOS token."""
    apply_chat_template_kwargs: dict[str, Any] = flag({}, read_by=("collection", "generation"))
    """Keyword arguments of the chat template, as JSON."""
    num_epoch: int | None = flag(None, range=SOME, read_by=("driver", "collection"))
    """Passes over the data; sets num_rollout when that is unset."""
    rollout_shuffle: bool = derived(
        "on; off with streaming_data, data_source_path or rollout_function_path, and for a resume "
        "of a run without"
    )
    """Shuffle the prompts anew in each epoch."""
    num_data_workers: int = flag(
        0,
        range=NONE_OR_SOME,
        needs=unless(
            "streaming_data", why="rows are read lazily, in the rollout process", warns=True
        ),
    )
    """Processes that check, tokenise and filter the rows before the launch; 0: one process, more if
    this takes long."""
    streaming_data: bool = flag(False)
    """Read rows lazily instead of loading the data set."""
    data_source_path: str | None = flag(None)
    """Dotted path of a class that replaces the prompt source."""
    rollout_global_dataset: bool = flag(True, off="disable-rollout-global-dataset")
    """Draw prompts from --prompt-data; off: the rollout function brings its own."""
    rollout_max_prompt_len: int | None = derived(
        "rollout_max_context_len − 1 when that is set", range=SOME, read_by=("driver", "collection")
    )
    """Prompts longer than this many tokens are left out."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """Generation: batch sizes, sampling, limits, and user functions."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("generation",)

    num_rollout: int | None = flag(
        None, range=NONE_OR_SOME, read_by=("driver", "generation", "samples", "training")
    )
    """Rollouts (steps of the loop) in the whole run; 0 only evaluates. Required unless --num-epoch
    is given."""
    rollout_batch_size: int = derived(
        "global_batch_size × num_steps_per_rollout ÷ n_samples_per_prompt when the first is set, "
        "else 32",
        range=SOME,
        read_by="collection",
    )
    """Prompts per rollout."""
    n_samples_per_prompt: int = derived(
        "by the equation where rollout_batch_size and global_batch_size are set, else 8; 1 where "
        "nothing that is built in compares the samples of a prompt (SFT, reinforce_plus_plus, your "
        "own loss, advantages, reward normalisation, conversion, rollout or data source)",
        range=SOME,
        read_by="collection",
    )
    """Samples per prompt: the size of a group."""
    start_rollout_id: int | None = flag(None, range=NONE_OR_SOME, read_by=("driver", "trainer"))
    """First rollout id; unset: taken from the checkpoint, 0 for a fresh start."""
    rollout_temperature: float = flag(
        1.0,
        range=finite(0, "log-probs are divided by it", above=True),
        needs=GENERATES,
        read_by=("generation", "training"),
    )
    """Sampling temperature, > 0; log-probs are of the tempered distribution."""
    rollout_top_p: float = flag(1.0, range=PROBABILITY, needs=GENERATES)
    """Nucleus sampling: smallest set of tokens with this probability."""
    rollout_top_k: int = derived(
        "-1; 512 with use_sampling_mask and SGLang", range=TOP_K, needs=GENERATES
    )
    """Sample among the k most probable tokens; -1: all."""
    rollout_min_p: float = flag(
        0.0, range=Interval(0, 1, what="a fraction of a probability"), needs=GENERATES
    )
    """Leave out tokens less probable than this fraction of the most probable."""
    rollout_max_context_len: int | None = flag(
        None,
        range=at_least(2, "a prompt token and a response token"),
        read_by=("driver", "collection", "generation", "push", "engine"),
    )
    """Maximum tokens of prompt plus response."""
    rollout_max_response_len: int = derived(
        "rollout_max_context_len or seq_length minus 1 when set, else 1024",
        range=SOME,
        read_by=("driver", "generation", "samples", "training"),
    )
    """Maximum new tokens per sample."""
    rollout_request_tokens: int | None = derived(
        "2048 with use_fault_tolerance, but for deterministic rollouts and rollout_stop; else no "
        "limit",
        range=SOME,
        needs=GENERATES
        & unless("rollout_stop", why="a stop string may begin in one request and end in the next"),
    )
    """Maximum new tokens of one request to an engine. A longer answer takes several requests; if an
    engine dies, only the tokens of the current one are lost. Requests with penalties, grammars or
    stop strings of their own are not divided."""
    rollout_skip_special_tokens: bool = flag(True, needs=GENERATES)
    """Leave special tokens, such as the end of a turn, out of the response text that rewards read;
    response tokens always keep them. Off for hooks written for the import paths of earlier
    versions, which kept them in the text."""
    rollout_stop: tuple[str, ...] = flag((), needs=GENERATES)
    """Strings that end a response."""
    rollout_stop_token_ids: tuple[int, ...] = flag((), range=NONE_OR_SOME, needs=GENERATES)
    """Token ids that end a response."""
    rollout_seed: int = flag(42, range=SEED, read_by=("collection", "generation", "engine"))
    """Seed of the prompt order and, in deterministic mode, of sampling."""
    rollout_timeout: float = flag(14400.0, range=POSITIVE, needs=GENERATES, read_by="driver")
    """Time-out of the generation of one rollout batch, or of one evaluation, in seconds."""
    deterministic: bool = flag(
        False, name="deterministic-rollout", needs=GENERATES, read_by=("generation", "engine")
    )
    """Seed every request by its sample; tokens then do not depend on how requests are batched."""
    over_sampling_batch_size: int = derived(
        "rollout_batch_size", range=SOME, needs=SAMPLES, read_by="collection"
    )
    """Prompts drawn at a time while a dynamic filter drops groups; at least rollout_batch_size."""
    dynamic_sampling_filter_path: str | None = flag(None, needs=SAMPLES, read_by="collection")
    """Function (args, samples) -> bool that decides whether a finished group is kept."""
    partial_rollout: bool = flag(False, needs=SAMPLES, read_by="collection")
    """Keep samples that are unfinished when the batch is full, and finish them in the next rollout.
    There are some with --over-sampling-batch-size or a dynamic filter."""
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, needs=on("partial_rollout"), read_by="collection"
    )
    """Do not train on tokens that an earlier policy sampled."""
    rollout_max_failed_fraction: float = flag(
        0.1, range=FRACTION, needs=GENERATES, read_by="collection"
    )
    """Fraction of a rollout's prompts that may fail permanently (others replace them) before the
    run stops; see docs/hooks.md."""
    rollout_stall_timeout: float = flag(600.0, range=POSITIVE, needs=GENERATES)
    """Seconds without any progress after which hanging user functions are cancelled and their
    samples fail; if no user function hangs, the rollout stops and reports what waits for what."""
    rollout_function_path: str | None = flag(
        None, needs=SAMPLES | on("rollout_function_path", _SFT_PATH), read_by="collection"
    )
    """Function (args, rollout_id, data_source, evaluation) that replaces the whole rollout loop."""
    custom_generate_function_path: str | None = flag(None, needs=GENERATES)
    """Async function (args, sample, sampling_params) that replaces the generation of one sample."""
    agent_host: str | None = flag(None, needs=GENERATES & _AGENTS)
    """Address of the API server for agents (docs/agents.md); set it for agents in containers or on
    other hosts. Unset: loopback, or the host's network address with --listen-on-network."""
    agent_port: int = flag(0, range=_PORT, needs=GENERATES & _AGENTS)
    """Port of the API server for agents; 0: a free one."""
    rollout_sample_hook_path: tuple[str, ...] = flag((), append=True, needs=GENERATES)
    """Function (args, sample) run on each generated sample before its reward; may be repeated."""
    buffer_filter_path: str | None = flag(None, needs=SAMPLES, read_by="collection")
    """Function (args, rollout_id, buffer, num_samples) that takes groups from the buffer."""
    rollout_sample_filter_path: str | None = flag(None, needs=SAMPLES, read_by="collection")
    """Function (args, groups) run at the end of a rollout; sets sample.remove_sample."""
    rollout_all_samples_process_path: str | None = flag(None, needs=SAMPLES, read_by="collection")
    """Function (args, all_groups, data_source) run at the end of a rollout; all_groups includes
    filtered ones."""
    custom_rollout_log_function_path: str | None = flag(None, read_by="collection")
    """Function that logs a rollout; returns true to skip the default log."""
    custom_eval_rollout_log_function_path: str | None = flag(None, needs=EVALUATES)
    """Function that logs an evaluation; returns true to skip the default log."""
    rollout_data_postprocess_path: str | None = flag(None, read_by="training")
    """Function (args, rollout_id, rollout_data) run in the trainer after the advantages are
    known."""
    loss_mask_type: Literal["qwen", "qwen3", "qwen3_5", "distill_qwen"] | None = flag(
        None,
        needs=on(
            "loss_type", "sft_loss", why="only supervised conversations have such masks", warns=True
        ),
        read_by="collection",
    )
    """The reference system's rule for the loss mask of conversations, only for comparison: masks
    always come from the chat template. The first turn whose mask differs is reported."""
    rollout_data_transport: Literal["object-store", "nixl"] = flag(
        "object-store",
        instead={"nixl": ("object-store", "ways of transport differ in speed alone")},
        read_by="config",
    )
    """Transport of training data from rollout to trainer."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Reward functions."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("generation",)

    rm_type: str | None = flag(
        None,
        needs=GENERATES
        & unless(
            "custom_rm_path",
            why="that function gives the rewards, and alone could read it",
            warns=True,
        ),
    )
    """Built-in reward: math, dapo, deepscaler, f1, gpqa, ifbench (pip install 'slime-rl[ifbench]'),
    remote_rm, reward_model, random; metadata["rm_type"] wins."""
    custom_rm_path: str | None = flag(None, needs=GENERATES)
    """Reward function (args, sample), sync or async, by dotted path or file.py:function."""
    group_rm: bool = flag(
        False,
        needs=on("custom_rm_path")
        | on("eval_config", why="built-in rewards judge one sample at a time"),
    )
    """Call the reward function once per group, with the list of its samples."""
    reward_key: str | None = flag(None, needs=GENERATES, read_by=("generation", "samples"))
    """Key of the number to train on if rewards are dicts; means of their other numbers are logged
    as metrics."""
    eval_reward_key: str | None = derived("reward_key", needs=EVALUATION_SETTING)
    """Key of the number that evaluations report if rewards are dicts."""
    rm_url: str | None = flag(
        None,
        needs=GENERATES
        & (
            on("rm_type", "remote_rm", "boxed_remote_rm")
            | on(
                "custom_rm_path",
                why="only rows and evaluation sets whose own rm_type is remote_rm ask there",
                warns=True,
            )
        ),
    )
    """Address of the remote reward model (--rm-type remote_rm)."""
    rm_path: str | None = flag(
        None,
        needs=GENERATES
        & (
            on("rm_type", "reward_model")
            | on(
                "custom_rm_path",
                why="only rows and evaluation sets whose own rm_type is reward_model ask it",
                warns=True,
            )
        ),
    )
    """Directory of the reward model of --rm-type reward_model: a sequence classifier with one
    output, as --preference-loss reward_model trains it. It runs on the CPU in the rollout process;
    serve a large one, and pass --rm-type remote_rm."""
    rm_timeout: float = flag(60.0, range=POSITIVE, needs=GENERATES)
    """Time-out of a reward call in seconds."""
    rm_num_workers: int = derived(
        "CPU cores of this host, at most 8",
        range=SOME,
        needs=(
            GENERATES,
            unless(
                "custom_rm_path",
                why="that function gives the rewards; workers grade only if it calls a built-in "
                "reward",
                warns=True,
            ),
            unless(
                "rm_type",
                *_WITHOUT_WORKERS,
                why="only rows and evaluation sets whose own rm_type is one of "
                f"{', '.join(_WITH_WORKERS)} use workers",
                warns=True,
            ),
        ),
    )
    """Worker processes of the built-in rewards math, deepscaler and ifbench."""
    overlong_buffer_len: int | None = flag(
        None,
        range=SOME,
        needs=(
            SAMPLES,
            unless("custom_reward_post_process_path", why="it computes the rewards itself"),
            unless(
                "custom_convert_samples_to_train_data_path", why="it computes the rewards itself"
            ),
            unless(
                "advantage_estimator",
                "maxrl",
                why="it divides by the mean reward of a group, which has to be a success rate, and "
                "a penalty would make rewards negative",
            ),
        ),
        read_by="samples",
    )
    """Over the last N tokens before --rollout-max-response-len, lower the reward linearly by up to
    --overlong-penalty-factor (DAPO's overlong penalty; published: 4096 of 20480). Only generated
    tokens count."""
    overlong_penalty_factor: float = flag(
        1.0,
        range=finite(0, "what the longest answers lose of their reward", above=True),
        needs=on("overlong_buffer_len"),
        read_by="samples",
    )
    """Amount subtracted from the reward of an answer at the length limit."""
    custom_reward_post_process_path: str | None = flag(
        None,
        needs=SAMPLES
        & unless(
            "custom_convert_samples_to_train_data_path",
            why="the conversion is yours, its rewards included",
        ),
        read_by="samples",
    )
    """Function (args, samples) -> (raw_rewards, rewards) that replaces group normalisation."""
    custom_convert_samples_to_train_data_path: str | None = flag(None, read_by="samples")
    """Function (args, samples) -> dict that replaces the conversion to training data."""


@dataclass(frozen=True, kw_only=True)
class EvalConfig:
    """Evaluation during the run."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("generation",)

    eval_interval: int | None = flag(
        None,
        range=SOME,
        needs=(EVALUATES | on("eval_preference_data"), _TRAINS_TOO),
        read_by=("driver", "generation"),
    )
    """Evaluate every N rollouts, and always before the first, at the end of each epoch and after
    the last."""
    eval_prompt_data: tuple[str, ...] = flag(
        (), needs=(unless("eval_config", why="that file names the sets"), _HAS_ENGINES)
    )
    """Name and path of each evaluation set: --eval-prompt-data gsm8k test.jsonl aime aime.jsonl. A
    path without a name is named after its file. Default split: test, else validation."""
    eval_config: str | None = flag(None, needs=_HAS_ENGINES)
    """YAML file of evaluation sets with settings of their own; replaces --eval-prompt-data."""
    skip_eval_before_train: bool = flag(
        False,
        needs=(EVALUATION_SETTING | on("eval_preference_data"), _TRAINS_TOO),
        read_by=("driver", "generation"),
    )
    """No evaluation before the first step."""
    eval_function_path: str | None = derived("rollout_function_path", needs=EVALUATION_SETTING)
    """Function that replaces the whole evaluation."""
    eval_input_key: str = derived("input_key", needs=EVALUATION_SETTING)
    """Column of the prompt."""
    eval_label_key: str | None = derived("label_key", needs=EVALUATION_SETTING)
    """Column of the expected answer."""
    eval_tool_key: str = derived("tool_key", needs=EVALUATION_SETTING)
    """Column of the tool schemas."""
    n_samples_per_eval_prompt: int = flag(1, range=SOME, needs=EVALUATION_SETTING)
    """Samples per prompt in evaluation."""
    eval_pass_k: tuple[int, ...] = flag((), range=SOME, needs=EVALUATION_SETTING)
    """Values of k for which pass@k is reported; unset: powers of two up to the samples per
    prompt."""
    eval_temperature: float = derived(
        "rollout_temperature", range=finite(0, "0 is greedy"), needs=EVALUATION_SETTING
    )
    """Sampling temperature of evaluation; 0: greedy."""
    eval_top_p: float = derived("rollout_top_p", range=PROBABILITY, needs=EVALUATION_SETTING)
    """Nucleus sampling in evaluation."""
    eval_top_k: int = derived(
        "rollout_top_k, if that is given", range=TOP_K, needs=EVALUATION_SETTING
    )
    """Top-k sampling in evaluation."""
    eval_max_response_len: int = derived(
        "rollout_max_response_len", range=SOME, needs=EVALUATION_SETTING
    )
    """Maximum new tokens per sample in evaluation."""
    eval_max_prompt_len: int | None = derived(
        "rollout_max_prompt_len", range=SOME, needs=EVALUATION_SETTING
    )
    """Prompts longer than this many tokens are left out of evaluation."""
    eval_max_context_len: int | None = derived(
        "rollout_max_context_len",
        range=at_least(2, "a prompt token and a response token"),
        needs=EVALUATION_SETTING,
    )
    """Maximum tokens of prompt plus response in evaluation."""
    eval_min_new_tokens: int = flag(0, range=NONE_OR_SOME, needs=EVALUATION_SETTING)
    """Minimum new tokens per sample in evaluation."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The engines and the router in front of them.

    `sglang` and `router` hold what the user set with --sglang-* and --router-*, without the prefix:
    ``router["policy"]`` is --router-policy. `slime.config.engine_flags.to_argv` reads them.
    """

    READ_BY: ClassVar[tuple[Part, ...]] = ("engine",)

    rollout_engine: Literal["auto", "sglang", "embedded"] = derived(
        "auto: sglang where this host has a GPU and SGLang is installed, else embedded",
        needs=ENGINES,
    )
    """Engine implementation."""
    embedded_dtype: Literal["auto", "bfloat16", "float32"] = flag(
        "auto", needs=on("rollout_engine", "embedded") & ENGINES
    )
    """Data type of the embedded engine's weights; auto: that of the trainer."""
    embedded_max_slots: int = flag(64, range=SOME, needs=on("rollout_engine", "embedded") & ENGINES)
    """Requests that the embedded engine decodes at once; others wait in its queue."""
    rollout_external_engine_addrs: tuple[str, ...] = flag((), needs=ENGINES)
    """HOST:PORT of engines started outside the run, in addition to the engines of
    --rollout-num-gpus or instead of them. They get weight pushes and requests; the run does not
    start or stop them."""
    sglang_server_concurrency: int = flag(512, range=SOME, needs=GENERATES, read_by="generation")
    """Maximum requests in flight per engine."""
    sglang_router_request_timeout_secs: int = flag(
        14400, range=SOME, needs=GENERATES, read_by=("generation", "router")
    )
    """Time-out of a request in the router, in seconds."""
    sglang_config: str | None = flag(None, needs=ENGINES)
    """YAML file of server groups, and of models beside the policy; also for embedded engines."""
    prefill_num_servers: int | None = flag(
        None,
        range=SOME,
        needs=on(
            "rollout_engine", "sglang", why="the embedded engine has no prefill servers", warns=True
        )
        & unless("sglang_config", why="that file names the server groups"),
    )
    """Number of engines that only prefill; the others only decode. Short for two server groups in
    --sglang-config."""
    sglang: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
