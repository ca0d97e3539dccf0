"""``Sample`` and ``Group``: the output of rollouts.

    prompts ─► rollout ─ list[Group] ─► samples ─ TrainBatch per data-parallel rank ─► train

Users build and read ``Sample`` in their hooks, so it is a plain mutable dataclass with the public
fields and methods of the reference system. It is validated once, when it leaves user code
(`Sample.validate`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from slime.errors import UserError
from slime.samples.media import media_before
from slime.samples.routed_experts import decode_routed_experts
from slime.samples.sample_fields import as_list, kind_problem, number_problem, reward_number
from slime.samples.sampling_mask import extended_mask, mask_problem, sampling_log_probs
from slime.user_code.loading import FunctionFailed, described, shown


class SampleStatus(StrEnum):
    """The state of a sample. PENDING and ABORTED samples may still be generated; the others are
    final."""

    PENDING = "pending"
    COMPLETED = "completed"  # ended by a stop token or stop string
    TRUNCATED = "truncated"  # ended by a length limit
    ABORTED = "aborted"  # interrupted, may be resumed
    FAILED = "failed"  # generation failed for good; never trained on


_STATUS_OF_FINISH_REASON = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass(slots=True)
class TokenSpan:
    """A run of response tokens of one origin.

    Attributes:
        start, end: half-open range of response positions.
        weight_version: version of the weights that sampled these tokens; None for other tokens
            (tools, environment).
    """

    start: int
    end: int
    weight_version: int | None


#: Names of accepted and of proposed draft tokens in an engine's answer, newest first.
_ACCEPTED_DRAFTS = ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accept_token_num")
_PROPOSED_DRAFTS = ("spec_num_proposed_drafts", "spec_proposed_drafts", "spec_draft_token_num")


def _first_count(meta_info: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((int(meta_info[name]) for name in names if name in meta_info), 0)


@dataclass(slots=True)
class SpecInfo:
    """Counters of speculative decoding, summed over the engine calls of one sample."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        self.spec_accept_token_num += _first_count(meta_info, _ACCEPTED_DRAFTS)
        self.spec_draft_token_num += _first_count(meta_info, _PROPOSED_DRAFTS)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    @property
    def spec_accept_rate(self) -> float:
        drafted = self.spec_draft_token_num
        return self.spec_accept_token_num / drafted if drafted else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, int]) -> SpecInfo:
        return SpecInfo(**data)


@dataclass(slots=True)
class PrefixCacheInfo:
    """Prompt tokens found in the engine's KV cache, summed over the engine calls of one sample."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: dict[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens else 0.0

    def to_dict(self) -> dict[str, int]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_dict(data: dict[str, int]) -> PrefixCacheInfo:
        return PrefixCacheInfo(**data)


_SpecInfo = SpecInfo  # the class attributes below hide the module's names
_PrefixCacheInfo = PrefixCacheInfo


@dataclass
class Sample:
    """One prompt with (at most) one response.

    Lengths: ``tokens`` holds prompt and response ids; ``tokens[-response_length:]`` is the
    response; ``loss_mask`` and ``rollout_log_probs``, when set, have ``response_length`` entries.

    Example (a user's two-turn generate function):
        >>> sample = Sample(prompt="2+2=?", tokens=[5, 6])
        >>> sample.append_response_tokens(tokens=[7], log_probs=[-0.1], text="calc(2+2)")
        >>> sample.append_response_tokens(tokens=[8, 9], trainable=False, text="4")  # tool output
        >>> sample.loss_mask, sample.response_length
        ([1, 0, 0], 3)
    """

    Status = SampleStatus
    SpecInfo: ClassVar[type[_SpecInfo]] = _SpecInfo
    PrefixCacheInfo: ClassVar[type[_PrefixCacheInfo]] = _PrefixCacheInfo

    group_index: int | None = None
    """Counter of prompt draws: all samples of one group share it."""
    index: int | None = None
    """Global sample counter; rollout output is sorted by it and per-request seeds derive from
    it."""
    rollout_id: int | None = None
    """Id of one *trajectory*: samples that one trajectory fanned out into share it. The unit of
    ``global_batch_size`` and of the loss denominator. None: the sample is a separate trajectory."""
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    """None means every response token is trained on."""
    weight_versions: list[str] = field(default_factory=list)
    """One entry per finished engine call."""
    rollout_log_probs: list[float] | None = None
    """The engine's log-prob of each response token under the temperature-scaled distribution; 0 for
    tokens that it did not sample."""
    rollout_top_p_token_ids: Any = None
    """Sampling masks of the response tokens, concatenated; see `slime.samples.sampling_mask`."""
    rollout_top_p_token_offsets: Any = None
    """[response_length + 1]: where the mask of each response token begins and ends."""
    rollout_routed_experts: Any = None
    remove_sample: bool = False
    """Train on it with a loss mask of zeros: it counts in the batch, and adds no trained tokens."""
    teacher_log_probs: list[float] | None = None
    status: SampleStatus = SampleStatus.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds spent in tools and environments."""
    spec_info: _SpecInfo = field(default_factory=_SpecInfo)
    prefix_cache_info: _PrefixCacheInfo = field(default_factory=_PrefixCacheInfo)
    token_spans: list[TokenSpan] = field(default_factory=list)
    """Origin of the response tokens, in order; see `TokenSpan`."""
    trace: dict[str, Any] | None = None
    """Spans recorded for this sample; see `slime.observe.trace`."""
    source: str | None = None
    token_rewards: list[float] | None = None
    """The reward of each response token, if the reward function returned a list; ``reward`` is
    their sum."""
    teacher_prompt_tokens: list[int] | None = None
    """The teacher's prompt, if it differs (--opd-teacher-prompt-key)."""
    teacher_top_tokens: Any = None
    """The teacher's most likely tokens; see `slime.samples.teacher_scores`."""
    drawn_as: int | None = None
    """While its group waits to be drawn again: the group's key in the journal."""
    as_drawn: dict[str, Any] | None = None
    """While its group waits to be drawn again: `to_dict` of the drawn prompt, if the sample has
    changed since."""

    # -- reading -----------------------------------------------------------------------------------

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def effective_response_length(self) -> int:
        """Number of trained response tokens."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> float:
        """Return the reward as a number; a dict reward is looked up under ``args.reward_key``."""
        origin = "a function of yours"
        if self.reward is None:
            raise UserError(
                f"sample {self.index} has no reward",
                why=f"its status is '{self.status.value}'",
                fix="let the reward function return a number for it, or drop the sample in a "
                "filter",
            )
        if not isinstance(self.reward, dict):
            return reward_number(self.reward, origin, f"the reward of sample {self.index}")
        key = getattr(args, "reward_key", None)
        if key not in self.reward:
            raise UserError(
                f"the reward of sample {self.index} is a dict without the key {key!r}",
                why=f"its keys are: {', '.join(map(str, self.reward))}",
                fix="pass --reward-key with one of them",
            )
        role = f"the reward {key!r} of sample {self.index}"
        return reward_number(self.reward[key], origin, role)

    def token_versions(self) -> tuple[int, ...]:
        """Return the distinct weight versions of its tokens, sorted; () if none is known."""
        return tuple(
            sorted({v for span in self.token_spans if (v := span.weight_version) is not None})
        )

    # -- writing -----------------------------------------------------------------------------------

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = (),
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: dict[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append sampled tokens (``trainable``) or tool/environment tokens to the response.

        Sampled tokens need one log-prob each; others must not have any (they get log-prob 0 and
        mask 0). Both may be lists, or arrays or tensors of one axis. Without tokens, only
        ``meta_info`` is recorded. ``meta_info`` is the engine's; it gives status, weight version
        and cache counters. An engine whose weights changed during the call reports it in
        ``token_weight_versions``: ``[[start, version], ...]``, counted from the call's first token.
        The answer to a request with ``return_sampling_mask`` has log-probs over the sampling mask,
        ``output_token_sampling_logprobs``: they replace ``log_probs``, because training computes
        over the same tokens.

        Raises:
            UserError: there is not one log-prob or sampling mask per sampled token.
        """
        tokens = as_list(tokens) or []
        log_probs = as_list(log_probs)
        if trainable and len(log_probs or ()) != len(tokens):
            given = "none" if log_probs is None else str(len(log_probs))
            raise UserError(
                f"{len(tokens)} sampled tokens were appended with {given} log-probs",
                fix="pass one log-prob per token, or trainable=False for tokens the model did not "
                "sample",
            )
        if not trainable and log_probs:
            raise UserError(
                "tokens that the model did not sample were appended with log-probs",
                fix="leave log_probs out when trainable=False",
            )
        meta = meta_info or {}
        of_tokens = meta if trainable and tokens else {}
        if (within := of_tokens.get("output_token_sampling_logprobs")) is not None:
            log_probs = sampling_log_probs(within, len(tokens))
        before = self.response_length
        if self.loss_mask is None:
            self.loss_mask = [1] * before
        if self.rollout_log_probs is None:
            self.rollout_log_probs = [0.0] * before
        self.tokens.extend(tokens)
        self.response_length = before + len(tokens)
        self.loss_mask.extend([int(trainable)] * len(tokens))
        self.rollout_log_probs.extend(log_probs if trainable and log_probs else [0.0] * len(tokens))
        if text is not None:
            self.response += text
        self._extend_sampling_mask(before, len(tokens), of_tokens.get("output_token_sampling_mask"))
        runs: list[list[Any]] = [[0, None]]
        if trainable:
            runs = meta.get("token_weight_versions") or [[0, meta.get("weight_version")]]
        bounds = [before + int(start) for start, _ in runs] + [self.response_length]
        for (_, version), start, end in zip(runs, bounds, bounds[1:]):
            if start < end:
                is_number = version is not None and str(version).isdigit()
                self._extend_spans(start, end, int(version) if is_number else None)
        if meta_info is not None and update_terminal_info:
            self._update_experts(args, meta_info)
            self._apply_terminal_info(meta_info)

    append = append_response_tokens

    def _extend_sampling_mask(self, before: int, count: int, kept: Any) -> None:
        if kept is None and self.rollout_top_p_token_offsets is None:
            return
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = extended_mask(
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets, before, kept, count
        )

    def _update_experts(self, args: Any, meta_info: dict[str, Any]) -> None:
        """Record the experts to which the engine routed each token: int32 [tokens - 1, layers,
        experts per token]. The last two axes are flat if ``args`` lacks ``num_layers`` or
        ``moe_router_topk``. Tokens of an earlier call keep their experts."""
        if not meta_info.get("routed_experts"):
            return
        layers = getattr(args, "num_layers", None)
        topk = getattr(args, "moe_router_topk", None)
        self.rollout_routed_experts = decode_routed_experts(
            meta_info["routed_experts"],
            len(self.tokens),
            start=int(meta_info.get("routed_experts_start_len") or 0),
            before=self.rollout_routed_experts,
            shape=(int(layers), int(topk)) if layers and topk else None,
        )

    def _extend_spans(self, start: int, end: int, weight_version: int | None) -> None:
        last = self.token_spans[-1] if self.token_spans else None
        if last is not None and last.end == start and last.weight_version == weight_version:
            last.end = end
        else:
            self.token_spans.append(TokenSpan(start, end, weight_version))

    def _apply_terminal_info(self, meta_info: dict[str, Any]) -> None:
        reason = meta_info.get("finish_reason")
        if reason is None:
            return
        self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        if meta_info.get("weight_version") is not None:
            self.weight_versions.append(str(meta_info["weight_version"]))
        kind = reason["type"] if isinstance(reason, dict) else str(reason)
        self.status = _STATUS_OF_FINISH_REASON.get(kind, self.status)

    def reset_response(self) -> None:
        """Remove the response, e.g. to generate again from scratch."""
        self.tokens = self.tokens[: self.prompt_length]
        self.multimodal_inputs, self.multimodal_train_inputs = media_before(
            self.multimodal_inputs, self.multimodal_train_inputs, len(self.tokens)
        )
        self.response = ""
        self.response_length = 0
        self.loss_mask = self.rollout_log_probs = self.teacher_log_probs = None
        self.rollout_routed_experts = None
        self.rollout_top_p_token_ids = self.rollout_top_p_token_offsets = None
        self.teacher_top_tokens = None
        self.weight_versions = []
        self.token_spans = []
        self.spec_info = SpecInfo()
        self.prefix_cache_info = PrefixCacheInfo()
        self.reward = self.token_rewards = None
        self.status = SampleStatus.PENDING

    # -- validation --------------------------------------------------------------------------------

    def validate(self, origin: str = "sample") -> None:
        """Check types and lengths of all fields (`slime.samples.sample_fields`) when the sample
        leaves user code.

        Arrays and tensors become lists. A loss mask over prompt and response is cut to the
        response; any other length is refused.

        Args:
            origin: names what made the sample in messages, e.g. the path of the user's function.
        Raises:
            UserError: a field has an invalid type, a length does not match, a mask value is neither
                0 nor 1, training would ignore a field, or the status is unknown.
        """

        def refuse(what: str, fix: str) -> None:
            raise UserError(f"{origin} returned a sample (index {self.index}) with {what}", fix=fix)

        if (problem := kind_problem(self)) is not None:
            refuse(*problem)
        if self.response_length < 0 or self.response_length > len(self.tokens):
            refuse(
                f"response_length {self.response_length} but {len(self.tokens)} tokens",
                "tokens must hold the prompt and the response; use sample.append_response_tokens",
            )
        if self.loss_mask is not None:
            if len(self.loss_mask) == len(self.tokens) != self.response_length:
                self.loss_mask = list(self.loss_mask[self.prompt_length :])
            if len(self.loss_mask) != self.response_length:
                refuse(
                    f"a loss_mask of {len(self.loss_mask)} entries for {self.response_length} "
                    "response tokens",
                    "give one entry per response token (or one per token of prompt and response)",
                )
            if odd := number_problem("loss_mask", self.loss_mask):
                refuse(odd, "use 1 for trained tokens, else 0")
        for name in ("rollout_log_probs", "teacher_log_probs"):
            if (values := getattr(self, name)) is not None and len(values) != self.response_length:
                refuse(
                    f"{len(values)} {name} for {self.response_length} response tokens",
                    "give one entry per token",
                )
        mask = (self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets)
        if mask_fault := mask_problem(*mask, self.response_length):
            refuse(
                mask_fault,
                "pass the engine's meta_info to sample.append_response_tokens, which sets both",
            )
        if not isinstance(self.status, str) or self.status not in list(SampleStatus):
            refuse(f"status {shown(self.status)}", f"set it to one of: {', '.join(SampleStatus)}")
        self.status = SampleStatus(self.status)

    # -- storage -----------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        data = {key: copy.copy(value) for key, value in self.__dict__.items()}
        data["status"] = self.status.value
        data["spec_info"] = self.spec_info.to_dict()
        data["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        data["token_spans"] = [[s.start, s.end, s.weight_version] for s in self.token_spans]
        return data

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        """Invert `to_dict`. Unknown keys become attributes, so dumps of plugins survive."""
        data = dict(data)
        data["status"] = SampleStatus(data.get("status", "pending"))
        data["spec_info"] = SpecInfo.from_dict(data.get("spec_info") or {})
        data["prefix_cache_info"] = PrefixCacheInfo.from_dict(data.get("prefix_cache_info") or {})
        data["token_spans"] = [TokenSpan(*span) for span in data.get("token_spans") or []]
        known = {f.name for f in dataclasses.fields(Sample)}
        sample = Sample(**{key: value for key, value in data.items() if key in known})
        for key in data.keys() - known:
            setattr(sample, key, data[key])
        return sample


@dataclass
class Group:
    """The samples of one prompt draw: the unit of group statistics, filters and the buffer.

    Attributes:
        index: the draw's ``group_index``.
        trajectories: one entry per trajectory; each holds the samples that it fanned out into
            (usually one).

    Example (the second trajectory fanned out):
        >>> group = Group(0, [[Sample(index=0)], [Sample(index=1), Sample(index=1)]])
        >>> len(group.samples), group.num_trajectories
        (3, 2)
    """

    index: int
    trajectories: list[list[Sample]]

    @property
    def samples(self) -> list[Sample]:
        return [sample for trajectory in self.trajectories for sample in trajectory]

    @property
    def executions(self) -> list[list[Sample]]:
        """`trajectories`, for users' functions that read it under this name."""
        return self.trajectories

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectories)

    def weight_versions(self) -> set[int]:
        """Return the weight versions of all tokens that have one."""
        return {version for sample in self.samples for version in sample.token_versions()}


def groups_from_nested(nested: list[Any], origin: str = "the rollout function") -> list[Group]:
    """Make groups from ``list[group][Sample]`` or, with fan-out,
    ``list[group][trajectory][Sample]`` (Groups pass through).

    Samples of one group that share a ``rollout_id`` are one trajectory; in the three-level form
    they must have one.

    Example:
        >>> a, b, c = Sample(index=0), Sample(index=1, rollout_id=7), Sample(index=1, rollout_id=7)
        >>> groups_from_nested([[a, b, c]])[0].num_trajectories
        2

    Raises:
        UserError: an entry is neither, or siblings of one trajectory have no common ``rollout_id``.
    """
    if not isinstance(nested, (list, tuple)):
        raise FunctionFailed(
            f"{origin} returned {described(nested)} as its samples", fix="return list[list[Sample]]"
        )
    groups = []
    for position, entry in enumerate(nested):
        if isinstance(entry, Group):
            groups.append(entry)
            continue
        trajectories: dict[Any, list[Sample]] = {}
        for item in entry if isinstance(entry, list) else [entry]:
            samples = item if isinstance(item, list) else [item]
            if not all(isinstance(sample, Sample) for sample in samples):
                raise UserError(
                    f"{origin} returned something other than samples",
                    fix="return list[list[Sample]]",
                )
            for sample in samples:
                if (problem := kind_problem(sample)) is not None:
                    what = f"{origin} returned a sample (index {sample.index}) with {problem[0]}"
                    raise FunctionFailed(what, fix=problem[1])
            ids = {sample.rollout_id for sample in samples}
            if isinstance(item, list) and (None in ids or len(ids) > 1):
                given = ", ".join(sorted(map(str, ids)))
                raise UserError(
                    f"{origin} returned a trajectory of {len(samples)} samples with rollout_id "
                    f"{given}",
                    why="samples that one trajectory fanned out into are counted and averaged "
                    "together",
                    fix="set the same sample.rollout_id on each of them",
                )
            for sample in samples:
                key = id(sample) if sample.rollout_id is None else ("rollout_id", sample.rollout_id)
                trajectories.setdefault(key, []).append(sample)
        group = Group(position, list(trajectories.values()))
        if samples := group.samples:
            if samples[0].group_index is not None:
                group.index = samples[0].group_index
            groups.append(group)
    return groups


class VersionWindow(NamedTuple):
    """The weight versions that samples of a rollout may have.

    A run that goes back to a checkpoint pushes weights of earlier steps under later numbers, so
    numbers alone do not tell which versions are too old or too new.

    Attributes:
        oldest: samples begun with an older version are stale.
        newest: the newest version that was pushed; None if unknown.
        stale: versions newer than ``oldest`` that are stale nevertheless.
        ahead: versions up to ``newest`` that belong to later steps than training has reached. The
            journal does not restore groups of these or of newer versions.
        unreachable: versions pushed after a checkpoint from which the run has since continued
            differently (`slime.run.ancestry`). The run will never have such weights: groups begun
            or finished with them are generated again.
    """

    oldest: int = 0
    newest: int | None = None
    stale: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()
    unreachable: frozenset[int] = frozenset()

    @property
    def allowed(self) -> str:
        """The versions that are young enough, in words."""
        allowed = f"weights {self.oldest} and newer"
        if self.stale:
            allowed += f", without {', '.join(map(str, sorted(self.stale)))} of other steps"
        return allowed

    def stale_among(self, versions: Iterable[int]) -> int | None:
        """Return the oldest stale one of ``versions``; None if none is stale."""
        return min((v for v in versions if v < self.oldest or v in self.stale), default=None)


ANY_VERSION = VersionWindow()
