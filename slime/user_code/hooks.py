"""All hooks for users' own code: one Protocol per hook, and how hooks are found, checked and
called.

A hook is named on the command line by a dotted path, ``--custom-rm-path my_project.rewards.score``
(or ``my_project.rewards:score``). Before anything starts, `check_hooks` loads each one and compares
its signature with the Protocol here, so that a wrong argument list costs a second instead of the
first rollout.

How a Protocol is read: parameters without a default are always passed (keyword-only ones by name);
parameters with a default are passed by name, and only to functions that accept them. ``args`` is
`Config.flat()`: all flags as attributes. Every hook may be sync or async, unless its docstring says
otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.errors import UserError
from slime.samples.types import Group, Sample
from slime.user_code.loading import check_class, check_signature, file_of, load_function

if TYPE_CHECKING:
    import torch

# -- what hooks return -----------------------------------------------------------------------------


@dataclass
class RolloutFnTrainOutput:
    """What one training rollout delivers; ``metrics`` are logged under their own names."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """What one evaluation delivers: per data set ``{"rewards": [...], "truncated": [...],
    "samples": [...]}``."""

    data: dict[str, dict[str, list[Any]]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """Verdict on one group.

    Attributes:
        keep: train on it.
        reason: counted as ``rollout/dynamic_filter/drop_<reason>`` when dropped.
        keep_when_insufficient: keep the group anyway if dropping it would leave too few groups in
            progress.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


# -- data source -----------------------------------------------------------------------------------


class DataSource(abc.ABC):
    """The source of prompts: ``--data-source-path`` names a subclass, which is built as
    ``cls(args)``.

    A group is the list of ``args.n_samples_per_prompt`` samples of one prompt draw, with
    ``group_index`` and ``index`` set.

    A source that can resume implements ``save`` and ``load``, which write their own files (by
    convention ``<args.save>/rollout/global_dataset_state_dict_<rollout_id>.pt``, read from
    ``args.load``), or ``state_dict`` and ``load_state_dict``, whose state is saved in the
    checkpoint; the defaults do nothing. Groups are drawn ahead of training: with over-sampling, and
    up to ``args.async_buffer_size`` rollouts in train_async.py. So save the groups that
    ``mark_consumed`` and ``mark_discarded`` have named, not those that ``get_samples`` has
    returned: all others must be drawn again after a resume. If --max-restarts restarts the trainer,
    a new object replaces the source, built with ``args.load`` as in a resume.
    """

    @abc.abstractmethod
    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return ``num_samples`` groups, or fewer if there is no more data."""

    @abc.abstractmethod
    def add_samples(self, samples: list[list[Sample]]) -> None:
        """Take back groups that were aborted or not needed; `get_samples` returns them first."""

    def __len__(self) -> int:
        raise UserError(
            f"{type(self).__name__} does not say how many prompts it has",
            fix="give it a __len__, or pass --num-rollout instead of --num-epoch",
        )

    def save(self, rollout_id: int) -> None:  # noqa: B027  (optional by contract)
        """Write what `load` needs, under ``args.save``; called before the checkpoint of
        ``rollout_id`` is written."""

    def load(self, rollout_id: int | None = None) -> None:  # noqa: B027
        """Restore what `save` wrote for ``rollout_id``, from ``args.load``; called when a run
        resumes from it."""

    def mark_consumed(self, group_indices: Iterable[int]) -> None:  # noqa: B027
        """Record groups that training has used: they are not drawn again after a resume."""

    def mark_discarded(self, group_indices: Iterable[int]) -> None:  # noqa: B027
        """Record groups that a filter has dropped: they are not drawn again after a resume."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`; saved with each checkpoint."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027
        """Restore what `state_dict` returned."""


# -- protocols: rollout ----------------------------------------------------------------------------


class RolloutFunction(Protocol):
    """``--rollout-function-path``, ``--eval-function-path``: replaces the whole rollout (or
    evaluation).

    Training: a `RolloutFnTrainOutput`, or bare samples as ``list[group][Sample]`` (with fan-out
    ``list[group][trajectory][Sample]``, siblings with one ``rollout_id``),
    ``args.rollout_batch_size`` groups. Evaluation (only where there is evaluation data): a
    `RolloutFnEvalOutput`, or its ``data``. Samples need tokens and a reward.
    `slime.rollout.loop.generate_rollout` is the built-in one; sync functions run in a thread.
    """

    def __call__(
        self, args: Any, rollout_id: int, data_source: DataSource, /, *, evaluation: bool
    ) -> Any: ...


class GenerateFunction(Protocol):
    """``--custom-generate-function-path``: one sample in, the same sample (or its fan-out, a list)
    back. Async.

    ``sampling_params`` is the sample's own copy, as SGLang spells them. The sample comes back with
    ``tokens`` [prompt + response], ``response_length``, and, one entry per response token,
    ``rollout_log_probs`` and ``loss_mask`` (`Sample.append_response_tokens` keeps them together),
    or with ``response`` alone, which is then tokenised: without log-probs, and where the text holds
    no end token, without the end (a warning). PENDING counts as COMPLETED.

    Checked on return: types of all fields, lengths, ids inside the vocabulary, at least one prompt
    token before the response, masks of 0 and 1, log-probs that are finite and not above 0, rewards.
    Arrays, tensors and tuples become lists. ``index`` and ``group_index`` are reset to those of the
    prompt if they differ (a warning); the samples that one call returns get one ``rollout_id``.

    At the end of a rollout all requests are aborted and return with the finish reason "abort".
    Return the sample with ``Sample.Status.ABORTED`` (`slime.rollout.generate.generate` sets it), so
    that it is continued later. If the function raises because of the abort, the sample is put back
    unchanged. Weight updates in flight and concurrent rollouts also interrupt answers: `generate`
    and `post` continue them, and ``token_weight_versions`` of the answer gives the weight versions;
    a sample that is returned ABORTED is retried at most 8 times. If the engine refuses a request
    that exceeds its context, the sample is TRUNCATED and keeps its tokens; other exceptions fail
    the sample, and too many of them fail the run. For agents that call an API see docs/agents.md.
    """

    def __call__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: dict[str, Any],
        /,
        *,
        evaluation: bool = False,
    ) -> Any: ...


class SampleHook(Protocol):
    """``--rollout-sample-hook-path``: after generate, before the reward; None keeps the given
    sample.

    The flag may be repeated. Called for every finished sample of the built-in rollout and
    evaluation, in the order of the flags. The sample is checked like the result of a generate
    function; index, group_index and rollout_id keep the values of the given sample.
    """

    def __call__(
        self,
        args: Any,
        sample: Sample,
        /,
        *,
        rollout_id: int | None = None,
        evaluation: bool = False,
    ) -> Sample | None: ...


class RewardFunction(Protocol):
    """``--custom-rm-path``: a number for a sample, or a dict: ``--reward-key`` names the one to
    train on, the means of its other numbers are metrics (``rollout/reward_part/<key>``); or a list
    with one number per response token, or per turn (run of tokens with loss mask 1), whose sum is
    the sample's reward. Estimators that discount give each token its own.

    With ``--group-rm``, and when one generate call returned several samples, it is called with the
    list of samples and returns a list of rewards. Sync functions run in threads, several at once. A
    reward is one finite number between -1e18 and 1e18 of Python, NumPy or torch (bools, decimals
    and fractions too). It may set ``metadata``, ``train_metadata``, ``remove_sample`` and
    ``teacher_log_probs`` of its sample, but must not change what was generated.

    Example:
        >>> def reward_func(args, sample, **kwargs):
        ...     return float(sample.response.strip() == sample.label)
    """

    def __call__(self, args: Any, sample: Any, /) -> Any: ...


class DynamicFilter(Protocol):
    """``--dynamic-sampling-filter-path``: keep this finished group? A bool or a
    `DynamicFilterOutput`.

    ``samples`` are all scored samples of the group: ``n_samples_per_prompt``, or more where
    trajectories fanned out. A filter that removes entries of the list, or changes what was
    generated, is refused.
    """

    def __call__(self, args: Any, samples: list[Sample], /) -> DynamicFilterOutput | bool: ...


class BufferFilter(Protocol):
    """``--buffer-filter-path``: chooses the next of the groups that were put back. Sync.

    Choose at most ``num_samples`` groups and remove them from ``buffer`` (``list[group][Sample]``,
    the oldest first). ``rollout_id`` is None: the buffer does not know the rollout.
    """

    def __call__(
        self, args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int, /
    ) -> list[list[Sample]]: ...


class RolloutSampleFilter(Protocol):
    """``--rollout-sample-filter-path``: sets ``remove_sample`` on samples of the kept groups.

    ``groups`` is ``list[group][Sample]``, the batch, at the end of the rollout. A removed sample is
    trained on with a loss mask of zeros; it still counts in the statistics of its group. A filter
    that removes groups or samples from the lists is refused: they would still be trained on.
    """

    def __call__(self, args: Any, groups: list[list[Sample]], /) -> None: ...


class AllSamplesProcess(Protocol):
    """``--rollout-all-samples-process-path``: sees every finished group, including dropped ones.

    ``all_groups`` is ``list[group][Sample]``, at the end of the rollout; ``data_source`` is the
    rollout's.
    """

    def __call__(
        self, args: Any, all_groups: list[list[Sample]], data_source: DataSource, /
    ) -> None: ...


class RolloutLog(Protocol):
    """``--custom-rollout-log-function-path``: a true result replaces the default logging.

    ``samples`` is the whole batch, flat; ``extra_metrics`` what the rollout has counted;
    ``rollout_time`` is in seconds. Supervised rollouts call it, too.
    """

    def __call__(
        self,
        rollout_id: int,
        args: Any,
        samples: list[Sample],
        extra_metrics: dict[str, Any],
        rollout_time: float,
        /,
    ) -> bool | None: ...


class EvalLog(Protocol):
    """``--custom-eval-rollout-log-function-path``: a true result replaces the default logging.

    ``data`` is that of `RolloutFnEvalOutput`: by data set, lists with one entry per sample.
    """

    def __call__(
        self, rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, Any], /
    ) -> bool | None: ...


# -- protocols: samples ----------------------------------------------------------------------------


class RewardPostProcess(Protocol):
    """``--custom-reward-post-process-path``: (raw rewards, rewards), one number per sample. Sync.

    ``samples`` are the trained samples of the batch, flat, group after group. The second list
    replaces the group-normalised rewards, the scalar advantage of each sample; the first is
    logged. Each is a finite number between -1e18 and 1e18. The function may set
    ``teacher_log_probs``; the list and what was generated stay as they are.
    """

    def __call__(self, args: Any, samples: list[Sample], /) -> tuple[list[float], list[float]]: ...


class ConvertSamples(Protocol):
    """``--custom-convert-samples-to-train-data-path``: lists, one entry per sample, in place of the
    conversion. Sync.

    Needed: ``tokens`` (list[int], prompt + response), ``response_lengths`` (int), ``rewards``
    (float, as after post-processing). Optional: ``raw_reward`` (float), ``truncated`` (0 or 1),
    ``sample_indices``, ``rollout_ids`` (int, one per trajectory), ``loss_masks`` (0 or 1 per
    response token), ``rollout_log_probs`` and ``teacher_log_probs`` (float per response token),
    ``metadata`` (dict or None); and, as in `Sample`, ``rollout_routed_experts``,
    ``rollout_top_p_token_ids``, ``rollout_top_p_token_offsets``, ``token_rewards``,
    ``teacher_prompt_tokens`` and ``teacher_top_tokens``. Other names are refused.
    """

    def __call__(self, args: Any, samples: list[Sample], /) -> dict[str, list[Any]]: ...


# -- protocols: training; all sync, called on every trainer rank -----------------------------------


class RolloutDataPostprocess(Protocol):
    """``--rollout-data-postprocess-path``: after the advantages, before the first optimizer step.

    ``rollout_data`` is a dict with one list entry per sample of this rank; L is a sample's length
    in tokens, R its response's. To read: ``tokens`` (int64 [L], prompt and response),
    ``response_lengths``, ``total_lengths``, ``rewards`` (normalised), ``raw_reward``,
    ``truncated``, ``sample_indices``, ``group_indices``, ``rollout_ids``, ``metadata``,
    ``teacher_log_probs`` and ``kl`` (float32 [R], or None).

    To read and to assign, float32 [R] on the trainer's device (lists of numbers will do):
    ``advantages``, ``returns``, ``loss_masks`` (0 or 1), ``log_probs`` (of the policy before the
    first step), ``ref_log_probs``, ``rollout_log_probs`` (the engine's). Assigned values are
    trained on; another key, or one that the flags leave unused, is refused by name. The loss is
    divided by the trained tokens of the original masks. Pipeline stages without the output layer
    call the function too, with None for log-probs and advantages.
    """

    def __call__(self, args: Any, rollout_id: int, rollout_data: Any, /) -> None: ...


class LossFunction(Protocol):
    """``--custom-loss-function-path`` with ``--loss-type custom_loss``: (loss, dict of metrics).

    Called for each micro-batch that has samples, on the ranks that hold the output layer. Let T be
    the micro-batch's response tokens, R those of a sample. ``batch`` is a dict with one list entry
    per sample: ``sample_indices``, ``response_lengths`` (R), ``total_lengths``, ``loss_masks``
    (float32 [R]), ``current_log_probs`` (float32 [R], of the response tokens under the weights that
    are trained, with gradient), and without gradient ``log_probs`` (of the policy before the first
    step), ``ref_log_probs``, ``rollout_log_probs``, ``advantages``: float32 [R] each, the whole
    entry None where flags or samples give none.

    ``logits`` are float32 [T, V / tp] with gradient, the samples' rows one after the other: row t
    is the distribution from which response token t was sampled, divided by
    ``--rollout-temperature``, over the real vocabulary without padding. Under tensor parallelism a
    rank has its shard of the vocabulary only; ``current_log_probs`` are those over the whole of it,
    and their gradients are right on every rank.

    ``sum_of_sample_mean`` takes [T] and gives the sum over samples of each sample's mean over its
    trained tokens (with ``--calculate-per-token-loss`` the sum over trained tokens). The loss and
    each metric are to be such sums: they are added up over micro-batches and ranks and divided by
    the step's trajectories (per token: by its trained tokens). A metric ``loss`` is the loss,
    whatever is returned by that name.

    Example:
        >>> def loss_function(args, batch, logits, sum_of_sample_mean):
        ...     log_probs = torch.cat(batch["current_log_probs"])
        ...     advantages = torch.cat(batch["advantages"])
        ...     loss = -sum_of_sample_mean(log_probs * advantages)
        ...     return loss, {"reinforce": loss.detach()}
    """

    def __call__(
        self,
        args: Any,
        batch: Any,
        logits: torch.Tensor,
        sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
        /,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


class AdvantageFunction(Protocol):
    """``--custom-advantage-function-path``: sets ``advantages`` and ``returns`` of
    ``rollout_data``.

    In place of the estimator, also with ``--disable-compute-advantages-and-returns``; on the ranks
    that hold the output layer. ``rollout_data`` is that of ``--rollout-data-postprocess-path``;
    ``kl`` is 0 unless ``--kl-coef`` asks for it. ``returns`` that are not set are the advantages.
    ``--normalize-advantages`` acts on the result.
    """

    def __call__(self, args: Any, rollout_data: Any, /) -> None: ...


class TisFunction(Protocol):
    """``--custom-tis-function-path``: corrects the policy loss for the train–rollout mismatch.

    ``pg_loss`` is [T], the loss of each response token of a micro-batch; the lists have one tensor
    [R] per sample. Returns the corrected loss [T], the loss masks to be in force (0 or 1), [R] per
    sample, and metrics [T] by name (or one number for all tokens), averaged as the loss is. A token
    that the masks leave out adds nothing to the policy loss; what that is divided by stays. With
    ``--get-mismatch-metrics`` alone only the metrics are taken.
    """

    def __call__(
        self,
        args: Any,
        /,
        *,
        pg_loss: torch.Tensor,
        train_log_probs: list[torch.Tensor],
        rollout_log_probs: list[torch.Tensor],
        loss_masks: list[torch.Tensor],
        total_lengths: list[int],
        response_lengths: list[int],
    ) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]: ...


class PgLossReducer(Protocol):
    """``--custom-pg-loss-reducer-function-path``: builds the function that reduces the policy loss
    to a number.

    ``loss_masks`` are those in force, [R] per sample: what ``--custom-tis-function-path`` returned,
    where there is one. The function takes the loss of each token [T] and returns a sum over
    samples, which is divided by the step's trajectories (with ``calculate_per_token_loss`` by its
    trained tokens).
    """

    def __call__(
        self,
        total_lengths: list[int],
        response_lengths: list[int],
        loss_masks: list[torch.Tensor],
        calculate_per_token_loss: bool,
        /,
    ) -> Callable[[torch.Tensor], torch.Tensor]: ...


class ModelProvider(Protocol):
    """``--custom-model-provider-path``: builds the model of this pipeline stage.

    It must be, or be derived from, what ``slime.trainer.megatron.provider.default_model`` makes of
    the same arguments.
    """

    def __call__(
        self, pre_process: bool, post_process: bool, /, *, vp_stage: int | None = None
    ) -> Any: ...


class LayerSpec(Protocol):
    """``--spec MODULE NAME``: megatron-core's layer specification of this pipeline stage.

    Returns ``TransformerBlockSubmodules``, or the ``ModuleSpec`` that all layers share; start from
    ``slime.trainer.megatron.provider.default_layer_spec``, which takes the same arguments.
    ``config`` is Megatron's ``TransformerConfig``.
    """

    def __call__(self, args: Any, config: Any, vp_stage: int | None, /) -> Any: ...


class MegatronInit(Protocol):
    """``--custom-megatron-init-path``: on every rank, after the process groups are initialised and
    before the model is built."""

    def __call__(self, args: Any, /) -> None: ...


class BeforeLogProb(Protocol):
    """``--custom-megatron-before-log-prob-hook-path``: before each forward-only pass.

    ``model`` is the list of model chunks of this rank (one without virtual pipeline stages);
    ``store_prefix`` is "ref_" for the reference's log-probs, "engine_" for those of
    --measure-quantisation, else "".
    """

    def __call__(self, args: Any, model: Any, store_prefix: str, /) -> None: ...


class BeforeTrainStep(Protocol):
    """``--custom-megatron-before-train-step-hook-path``: before the forward and backward passes of
    each optimizer step.

    ``step_id`` counts the optimizer steps of this rollout from 0; ``model`` is the list of model
    chunks of this rank; gradients have been set to zero.
    """

    def __call__(
        self,
        args: Any,
        rollout_id: int,
        step_id: int,
        model: Any,
        optimizer: Any,
        opt_param_scheduler: Any,
        /,
    ) -> None: ...


#: Flag (as an attribute of ``args``) → the Protocol of its hook. ``--data-source-path`` is a class,
#: checked separately.
HOOKS: dict[str, type] = {
    "rollout_function_path": RolloutFunction,
    "eval_function_path": RolloutFunction,
    "custom_generate_function_path": GenerateFunction,
    "rollout_sample_hook_path": SampleHook,
    "custom_rm_path": RewardFunction,
    "dynamic_sampling_filter_path": DynamicFilter,
    "buffer_filter_path": BufferFilter,
    "rollout_sample_filter_path": RolloutSampleFilter,
    "rollout_all_samples_process_path": AllSamplesProcess,
    "custom_rollout_log_function_path": RolloutLog,
    "custom_eval_rollout_log_function_path": EvalLog,
    "custom_reward_post_process_path": RewardPostProcess,
    "custom_convert_samples_to_train_data_path": ConvertSamples,
    "rollout_data_postprocess_path": RolloutDataPostprocess,
    "custom_loss_function_path": LossFunction,
    "custom_advantage_function_path": AdvantageFunction,
    "custom_tis_function_path": TisFunction,
    "custom_pg_loss_reducer_function_path": PgLossReducer,
    "custom_model_provider_path": ModelProvider,
    "custom_megatron_init_path": MegatronInit,
    "custom_megatron_before_log_prob_hook_path": BeforeLogProb,
    "custom_megatron_before_train_step_hook_path": BeforeTrainStep,
}

# -- checking --------------------------------------------------------------------------------------


def check_hooks(args: Any) -> None:
    """Load and check every hook that is set in ``args`` (`Config.flat()`); call it before anything
    starts.

    Raises:
        UserError: for the first hook that cannot be loaded or called.
    """
    for flag, value in vars(args).items():
        paths = value if isinstance(value, (list, tuple)) else [value]
        for path in paths if flag in HOOKS else ():
            if path:
                check_signature(load_function(path), HOOKS[flag], path)
    if spec := vars(args).get("spec"):
        check_signature(load_function(":".join(spec)), LayerSpec, ":".join(spec))
    source_path = vars(args).get("data_source_path")
    if source_path:
        check_class(load_function(source_path), DataSource, source_path)


def hook_files(args: Any) -> list[Path]:
    """The source files of all users' functions and classes that are set in ``args``, each once."""
    paths = [args.data_source_path, ":".join(args.spec)]
    for flag in HOOKS:
        value = vars(args)[flag]
        paths += value if isinstance(value, (list, tuple)) else [value]
    found = [file_of(path) for path in paths if path]
    return list(dict.fromkeys(file for file in found if file is not None and file.suffix == ".py"))
