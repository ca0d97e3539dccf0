"""All hooks for users' own code: one Protocol per hook, and how hooks are found, checked and
called.

A hook is named on the command line by a dotted path, ``--custom-rm-path my_project.rewards.score``
(or ``my_project.rewards:score``). Before anything starts, `check_hooks` loads each one and compares
its signature with the Protocol here, so that a wrong argument list costs a second instead of the
first rollout.

How a Protocol is read: parameters without a default are always passed (keyword-only ones by name);
parameters with a default are passed by name, and only to functions that accept them. ``args`` is
`Config.shared_args`: all flags as attributes. Every hook may be sync or async, unless its docstring
says otherwise.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from slime.errors import UserError
from slime.samples.types import Group, Sample
from slime.user_code.loading import check_class, check_signature, file_of, is_async, load_function

if TYPE_CHECKING:
    import torch

# -- what hooks return -----------------------------------------------------------------------------


@dataclass
class RolloutFnTrainOutput:
    """The result of a training rollout; ``metrics`` are logged under their own names."""

    samples: list[Group]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """The result of an evaluation: per data set ``{"rewards": [...], "truncated": [...],
    "samples": [...]}``."""

    data: dict[str, dict[str, list[Any]]]
    metrics: dict[str, Any] | None = None


@dataclass
class DynamicFilterOutput:
    """The decision on one group.

    Attributes:
        keep: whether it is trained on.
        reason: dropped groups are counted as ``rollout/dynamic_filter/drop_<reason>``.
        keep_when_insufficient: keep the group anyway if dropping it would leave too few groups in
            progress.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False


# -- data source -----------------------------------------------------------------------------------


class DataSource(abc.ABC):
    """``--data-source-path``: the source of prompts, a subclass that is built as ``cls(args)``.

    A group is the list of ``args.n_samples_per_prompt`` samples of one prompt draw. All of them
    have the same ``group_index``; ``index`` is a counter over all samples. New samples have no
    response and no reward. Lists and dicts that samples share are copied. The methods are sync.

    A source that can resume implements one of two pairs of methods. ``state_dict`` and
    ``load_state_dict`` keep the state in the checkpoint. ``save`` and ``load`` write their own
    files, by convention
    ``<args.save>/rollout/global_dataset_state_dict_<rollout_id>.pt``, read from ``args.load``. The
    defaults do nothing.

    Groups are drawn ahead of training: with over-sampling, and up to ``args.async_buffer_size``
    rollouts ahead in train_async.py. So save which groups ``mark_consumed`` and ``mark_discarded``
    have named, not which ones ``get_samples`` has returned: a resumed run must draw all others
    again. If --max-restarts restarts the trainer, a new object replaces the source. It is built
    with ``args.load`` as in a resume.

    Example:
        >>> class Sums(DataSource):
        ...     def __init__(self, args):
        ...         self.size = args.n_samples_per_prompt
        ...         self.drawn = 0
        ...         self.put_back = []
        ...
        ...     def get_samples(self, num_samples):
        ...         groups = self.put_back[:num_samples]
        ...         del self.put_back[:num_samples]
        ...         while len(groups) < num_samples:
        ...             group, a, b = self.drawn, self.drawn % 10, self.drawn // 10
        ...             self.drawn += 1
        ...             groups.append(
        ...                 [
        ...                     Sample(
        ...                         group_index=group,
        ...                         index=group * self.size + i,
        ...                         prompt=f"{a} + {b} =",
        ...                         label=str(a + b),
        ...                     )
        ...                     for i in range(self.size)
        ...                 ]
        ...             )
        ...         return groups
        ...
        ...     def add_samples(self, samples):
        ...         self.put_back += samples
        ...
        ...     def state_dict(self):
        ...         return {"drawn": self.drawn}
        ...
        ...     def load_state_dict(self, state):
        ...         self.drawn = state["drawn"]
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
    """``--rollout-function-path``, ``--eval-function-path``: replaces the whole rollout, or the
    whole evaluation.

    For training it returns ``args.rollout_batch_size`` groups, as a `RolloutFnTrainOutput` or as
    bare samples, ``list[group][Sample]``. With fan-out these are
    ``list[group][trajectory][Sample]``, where the samples of one trajectory share one
    ``rollout_id``. Each sample needs tokens and a reward.

    For evaluation (only if there is evaluation data) it returns a `RolloutFnEvalOutput`, or its
    ``data``. `slime.rollout.loop.generate_rollout` is the built-in rollout function.

    Example:
        >>> def rollout(args, rollout_id, data_source, *, evaluation):
        ...     if evaluation:
        ...         rewards = [0.5, 1.0]
        ...         return RolloutFnEvalOutput({"mine": {"rewards": rewards}})
        ...     groups = data_source.get_samples(args.rollout_batch_size)
        ...     for group in groups:
        ...         for sample in group:
        ...             fill(sample)  # your code: sets tokens, response_length, reward, status
        ...     return RolloutFnTrainOutput(groups, {"rollout/mine": 1.0})
    """

    def __call__(
        self, args: Any, rollout_id: int, data_source: DataSource, /, *, evaluation: bool
    ) -> RolloutFnTrainOutput | RolloutFnEvalOutput | list[Any] | dict[str, Any]: ...


class GenerateFunction(Protocol):
    """``--custom-generate-function-path``: generates the response of one sample.

    It must be async; the launch refuses a function whose source shows that it returns the sample
    itself. It returns the sample that it was given, or a list of samples (fan-out), all
    of which are trained on. ``sampling_params`` is a dict of this sample alone, with SGLang's
    names.

    A returned sample has either

    - ``tokens`` (prompt + response) and ``response_length``, and per response token an entry of
      ``rollout_log_probs`` and of ``loss_mask``; `Sample.append_response_tokens` keeps them
      consistent; or
    - ``response`` alone, which is then tokenised. There are no log-probs then, and no end token
      unless the text contains it (a warning says so).

    A status of PENDING counts as COMPLETED. The returned sample is checked: types of all fields,
    lengths, token ids inside the vocabulary, at least one prompt token before the response, masks
    of 0 and 1, log-probs that are finite and not above 0, rewards. Arrays, tensors and tuples
    become lists. ``index`` and ``group_index`` are reset to those of the prompt if they differ (a
    warning says so). All samples that one call returns get one ``rollout_id``.

    At the end of a rollout all requests are aborted and return with the finish reason "abort".
    Return such a sample with ``Sample.Status.ABORTED``, as `slime.rollout.generate.generate` does,
    so that a later rollout continues it. If the function raises because of the abort, the sample is
    put back unchanged. A sample that is returned ABORTED is retried at most 8 times.

    Weight updates in flight and concurrent rollouts interrupt requests, too. `generate` and `post`
    continue these; ``token_weight_versions`` of the answer has the weight versions. If the engine
    refuses a request because it exceeds the context, the sample is TRUNCATED and keeps its tokens.
    For agents that call an API see docs/agents.md.

    Example (built-in generation with another stop string; `slime.rollout.generate.generate`):
        >>> async def generate_line(args, sample, sampling_params):
        ...     sampling_params["stop"] = ["\\n"]
        ...     sample = await generate(args, sample, sampling_params)
        ...     sample.metadata["is_empty"] = not sample.response.strip()
        ...     return sample
    """

    async def __call__(
        self,
        args: Any,
        sample: Sample,
        sampling_params: dict[str, Any],
        /,
        *,
        evaluation: bool = False,
    ) -> Sample | list[Sample]: ...


class SampleHook(Protocol):
    """``--rollout-sample-hook-path``: changes or replaces a sample after it was generated and
    before its reward is computed.

    It is called for every finished sample of the built-in rollout and evaluation. The flag may be
    repeated; the hooks are called in the order of the flags. None keeps the given sample. A
    returned sample is checked like that of a generate function; ``index``, ``group_index`` and
    ``rollout_id`` keep the values of the given sample.

    Example:
        >>> def count_lines(args, sample, **kwargs):
        ...     sample.metadata["lines"] = sample.response.count("\\n") + 1
        ...     sample.remove_sample = sample.metadata["lines"] > 100  # not trained on
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
    """``--custom-rm-path``: computes the reward of a sample.

    It returns one of:

    - a number: finite, between -1e18 and 1e18, of Python, NumPy or torch (bools, decimals and
      fractions are numbers);
    - a dict: ``--reward-key`` names the entry to train on. The means of its other numbers are
      metrics (``rollout/reward_part/<key>``);
    - a list with one number per response token, or per turn (a run of tokens with loss mask 1). The
      sum is the sample's reward. Estimators that discount give each token its own reward.

    With ``--group-rm``, and when one generate call returned several samples, ``sample`` is the list
    of samples, and the function returns a list of rewards.

    Example:
        >>> def reward_func(args, sample, **kwargs):
        ...     return float(sample.response.strip() == sample.label)
    """

    def __call__(
        self, args: Any, sample: Sample | list[Sample], /
    ) -> float | dict[str, Any] | list[Any]: ...


class DynamicFilter(Protocol):
    """``--dynamic-sampling-filter-path``: decides whether a finished group is trained on.

    ``samples`` are all scored samples of the group: ``n_samples_per_prompt``, or more with fan-out.
    A dropped group is replaced by another prompt. The function must not remove entries of the list.

    Example:
        >>> def has_signal(args, samples):
        ...     rewards = {sample.get_reward_value(args) for sample in samples}
        ...     return DynamicFilterOutput(keep=len(rewards) > 1, reason="equal_rewards")
    """

    def __call__(self, args: Any, samples: list[Sample], /) -> DynamicFilterOutput | bool: ...


class BufferFilter(Protocol):
    """``--buffer-filter-path``: chooses which of the groups that were put back are used next.

    It must be sync. It removes at most ``num_samples`` groups from ``buffer``
    (``list[group][Sample]``, oldest first) and returns these groups, no others.
    ``rollout_id`` is always None: the buffer does not know the rollout.

    Example:
        >>> def newest_first(args, rollout_id, buffer, num_samples):
        ...     return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]
    """

    def __call__(
        self, args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int, /
    ) -> list[list[Sample]]: ...


class RolloutSampleFilter(Protocol):
    """``--rollout-sample-filter-path``: excludes samples of the finished batch from training.

    It sets ``remove_sample`` on samples of ``groups`` (``list[group][Sample]``), at the end of the
    rollout. A removed sample is trained on with a loss mask of zeros, and still counts in the
    statistics of its group. A filter that returns something, or removes groups or samples from the
    lists, is refused: they would still be trained on.

    Example:
        >>> def drop_truncated(args, groups):
        ...     for group in groups:
        ...         for sample in group:
        ...             sample.remove_sample = sample.status is Sample.Status.TRUNCATED
    """

    def __call__(self, args: Any, groups: list[list[Sample]], /) -> None: ...


class AllSamplesProcess(Protocol):
    """``--rollout-all-samples-process-path``: receives every finished group at the end of a
    rollout, including dropped ones.

    ``all_groups`` is ``list[group][Sample]``; ``data_source`` is the rollout's.
    """

    def __call__(
        self, args: Any, all_groups: list[list[Sample]], data_source: DataSource, /
    ) -> None: ...


class RolloutLog(Protocol):
    """``--custom-rollout-log-function-path``: logs a rollout, in addition to the default metrics or
    in their place.

    If it returns True, the default metrics are not logged; False or None log them. ``samples`` is
    the whole batch, flat; ``extra_metrics`` holds the rollout's counters, and entries that the
    function adds are logged with the default metrics; ``rollout_time`` is in seconds. Supervised
    rollouts call it, too.

    Example:
        >>> def log_lengths(rollout_id, args, samples, extra_metrics, rollout_time):
        ...     longest = max(sample.response_length for sample in samples)
        ...     extra_metrics["rollout/longest_response"] = longest
        ...     return False  # log the default metrics, too
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
    """``--custom-eval-rollout-log-function-path``: logs an evaluation, in addition to the default
    metrics or in their place.

    If it returns True, the default metrics are not logged; False or None log them. ``data`` is that
    of `RolloutFnEvalOutput`: per data set, lists with one entry per sample.
    """

    def __call__(
        self, rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: dict[str, Any], /
    ) -> bool | None: ...


# -- protocols: samples ----------------------------------------------------------------------------


class RewardPostProcess(Protocol):
    """``--custom-reward-post-process-path``: replaces the normalisation of rewards within groups.

    It must be sync. ``samples`` are the trained samples of the batch, flat, group after group. It
    returns two lists with one number per sample, (raw rewards, rewards). The first is logged. The
    second is used as the scalar advantage of each sample. Each number is finite and between -1e18
    and 1e18.

    Example:
        >>> def centre_over_batch(args, samples):
        ...     raw = [sample.get_reward_value(args) for sample in samples]
        ...     mean = sum(raw) / len(raw)
        ...     return raw, [reward - mean for reward in raw]
    """

    def __call__(self, args: Any, samples: list[Sample], /) -> tuple[list[float], list[float]]: ...


class ConvertSamples(Protocol):
    """``--custom-convert-samples-to-train-data-path``: replaces the conversion of samples to
    training data.

    It must be sync. It returns a dict of lists with one entry per sample.

    - Required: ``tokens`` (list[int], prompt + response), ``response_lengths`` (int), ``rewards``
      (float, as after post-processing).
    - Optional: ``raw_reward`` (float), ``truncated`` (0 or 1), ``sample_indices`` (int),
      ``rollout_ids`` (int, one per trajectory), ``loss_masks`` (0 or 1 per response token),
      ``rollout_log_probs`` and ``teacher_log_probs`` (float per response token), ``metadata`` (dict
      or None).
    - Optional, as in `Sample`: ``rollout_routed_experts``, ``rollout_top_p_token_ids``,
      ``rollout_top_p_token_offsets``, ``token_rewards``, ``teacher_prompt_tokens`` and
      ``teacher_top_tokens``.

    Other names are refused.
    """

    def __call__(self, args: Any, samples: list[Sample], /) -> dict[str, list[Any]]: ...


# -- protocols: training; all sync, called on every trainer rank -----------------------------------


class RolloutDataPostprocess(Protocol):
    """``--rollout-data-postprocess-path``: changes advantages, masks or log-probs before the first
    optimizer step of a rollout.

    ``rollout_data`` is a dict with one list entry per sample of this rank. L is the length of a
    sample in tokens, R that of its response.

    - Read only: ``tokens`` (int64 [L], prompt and response), ``response_lengths``,
      ``total_lengths``, ``rewards`` (normalised), ``raw_reward``, ``truncated``,
      ``sample_indices``, ``group_indices``, ``rollout_ids``, ``metadata``, ``teacher_log_probs``
      and ``kl`` (float32 [R], or None).
    - Read and assign, float32 [R] on the trainer's device (lists of numbers are converted):
      ``advantages``, ``returns``, ``loss_masks`` (0 or 1), ``log_probs`` (of the policy before the
      first step), ``ref_log_probs``, ``rollout_log_probs`` (the engine's).

    Assigned values are trained on. Assigning another key, or one that the flags leave unused, is an
    error. The loss is divided by the number of trained tokens of the original masks. Pipeline
    stages without the output layer call the function, too; log-probs and advantages are None there.
    """

    def __call__(self, args: Any, rollout_id: int, rollout_data: dict[str, Any], /) -> None: ...


class LossFunction(Protocol):
    """``--custom-loss-function-path``: replaces the policy loss; needs ``--loss-type custom_loss``.

    It is called for each micro-batch that has samples, on the ranks that hold the output layer, and
    returns (loss, dict of metrics). T is the number of response tokens of the micro-batch, R that
    of a sample, V the vocabulary size, tp the tensor-parallel size.

    ``batch`` is a dict with one list entry per sample:

    - ``sample_indices``, ``response_lengths`` (R), ``total_lengths``, ``loss_masks`` (float32 [R]);
    - ``current_log_probs``: float32 [R], with gradient, of the response tokens under the weights
      that are trained;
    - without gradient, float32 [R] each: ``log_probs`` (of the policy before the first step),
      ``ref_log_probs``, ``rollout_log_probs``, ``advantages``. An entry is None if flags or samples
      do not provide it.

    ``logits`` are float32 [T, V / tp] with gradient, sample after sample. Row t is the distribution
    from which response token t was sampled, divided by ``--rollout-temperature``, over the real
    vocabulary without padding. With tensor parallelism a rank has only its shard of the vocabulary.
    ``current_log_probs`` are over the whole vocabulary, and their gradients are right on every
    rank.

    ``sum_of_sample_mean`` takes [T] and returns the sum over trajectories of each one's mean over
    its trained tokens, as the built-in losses do (with ``--calculate-per-token-loss`` the sum over
    trained tokens). A trajectory of several samples counts once: each sample adds its part of the
    mean. The loss and each metric must be such sums: they are added up over micro-batches and
    ranks, and divided by the step's number of trajectories (per token: of trained tokens). The
    metric ``loss`` is always the returned loss. In a trainer without data or context parallelism,
    the function is also called for each sample of the first micro-batch of several: a warning tells
    if their losses do not add up. It must not call ``backward``.

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
        batch: dict[str, Any],
        logits: torch.Tensor,
        sum_of_sample_mean: Callable[[torch.Tensor], torch.Tensor],
        /,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]: ...


class AdvantageFunction(Protocol):
    """``--custom-advantage-function-path``: replaces the advantage estimator.

    It sets ``advantages``, and optionally ``returns``, of ``rollout_data``, which is that of
    ``--rollout-data-postprocess-path``. It is called on the ranks that hold the output layer, also
    with ``--disable-compute-advantages-and-returns``. ``kl`` is 0 without ``--kl-coef``.
    ``returns`` that are not set equal the advantages. ``--normalize-advantages`` acts on the
    result.

    Example:
        >>> def last_half_only(args, rollout_data):
        ...     rollout_data["advantages"] = [
        ...         torch.cat([torch.zeros(n // 2), torch.full((n - n // 2,), float(reward))])
        ...         for reward, n in zip(rollout_data["rewards"], rollout_data["response_lengths"])
        ...     ]
    """

    def __call__(self, args: Any, rollout_data: dict[str, Any], /) -> None: ...


class TisFunction(Protocol):
    """``--custom-tis-function-path``: corrects the policy loss for the mismatch between trainer and
    engine.

    ``pg_loss`` is [T], the loss of each response token of a micro-batch; the lists have one tensor
    [R] per sample. It returns (corrected loss [T], loss masks, metrics). The loss masks (0 or 1,
    [R] per sample) are used from here on: a masked token adds nothing to the policy loss, and the
    denominator does not change. Metrics are [T] by name, or one number for all tokens, and are
    averaged as the loss is. With ``--get-mismatch-metrics`` alone only the metrics are used.
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

    ``loss_masks`` are [R] per sample, after ``--custom-tis-function-path``. The returned function
    takes the loss of each token [T] and returns a sum over samples, which is compared with those of
    single samples once. It is divided by the step's number of trajectories (with
    ``calculate_per_token_loss`` by its number of trained tokens).
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
    """``--custom-model-provider-path``: builds the model of a pipeline stage.

    It returns what ``slime.trainer.megatron.provider.default_model`` builds from the same
    arguments, or a model derived from it.
    """

    def __call__(
        self, pre_process: bool, post_process: bool, /, *, vp_stage: int | None = None
    ) -> Any: ...


class LayerSpec(Protocol):
    """``--spec MODULE NAME``: returns Megatron-core's layer specification of a pipeline stage.

    It returns ``TransformerBlockSubmodules``, or the ``ModuleSpec`` that all layers share. Start
    from ``slime.trainer.megatron.provider.default_layer_spec``, which takes the same arguments.
    ``config`` is Megatron's ``TransformerConfig``.
    """

    def __call__(self, args: Any, config: Any, vp_stage: int | None, /) -> Any: ...


class MegatronInit(Protocol):
    """``--custom-megatron-init-path``: runs after the process groups are initialised and before the
    model is built."""

    def __call__(self, args: Any, /) -> None: ...


class BeforeLogProb(Protocol):
    """``--custom-megatron-before-log-prob-hook-path``: runs before each forward-only pass.

    ``model`` is the list of model chunks of this rank (one without virtual pipeline stages).
    ``store_prefix`` is "ref_" for log-probs of the reference model, "engine_" for those of
    --measure-quantisation, else "".
    """

    def __call__(self, args: Any, model: Any, store_prefix: str, /) -> None: ...


class BeforeTrainStep(Protocol):
    """``--custom-megatron-before-train-step-hook-path``: runs before the forward and backward
    passes of each optimizer step.

    ``step_id`` counts the optimizer steps of this rollout from 0. ``model`` is the list of model
    chunks of this rank. Gradients have been set to zero.
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

#: Hooks that are called without ``await``: of an async function nothing would run.
_SYNC = frozenset(
    {
        BufferFilter,
        RewardPostProcess,
        ConvertSamples,
        RolloutDataPostprocess,
        LossFunction,
        AdvantageFunction,
        TisFunction,
        PgLossReducer,
        ModelProvider,
        LayerSpec,
        MegatronInit,
        BeforeLogProb,
        BeforeTrainStep,
    }
)

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
                _check(path, HOOKS[flag])
    if spec := vars(args).get("spec"):
        _check(":".join(spec), LayerSpec)
    source_path = vars(args).get("data_source_path")
    if source_path:
        source = load_function(source_path)
        check_class(source, DataSource, source_path)
        for name in [name for name in vars(DataSource) if not name.startswith("_")]:
            _check_sync(getattr(source, name), f"{source_path}.{name}")


def _check(path: str, protocol: type) -> None:
    fn = load_function(path)
    check_signature(fn, protocol, path)
    if protocol in _SYNC:
        _check_sync(fn, path)


def _check_sync(fn: Any, path: str) -> None:
    if is_async(fn):
        raise UserError(
            f"'{path}' is async",
            why="it is called without await, so that nothing in it would run",
            fix="declare it with 'def'; for coroutines of yours call asyncio.run in it",
        )


def hook_files(args: Any) -> list[Path]:
    """Return the source files of all users' functions and classes that are set in ``args``, each
    once."""
    paths = [args.data_source_path, ":".join(args.spec)]
    for flag in HOOKS:
        value = vars(args)[flag]
        paths += value if isinstance(value, (list, tuple)) else [value]
    found = [file_of(path) for path in paths if path]
    return list(dict.fromkeys(file for file in found if file is not None and file.suffix == ".py"))
