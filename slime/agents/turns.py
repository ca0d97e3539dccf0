"""The turns of one trajectory as a tree, and its branches as samples.

    turn 0 ─► turn 1 ─► turn 2            branch 0: turns 0, 1, 2, all trained
                 └────► turn 3            branch 1: turns 0, 1, 3, of which 3 is trained
    turn 4                                branch 2: the client had compacted its history

A turn follows another turn if its prompt begins with the tokens of that turn's prompt and answer.
The messages that a client sends back are matched with the answers that it received. If the client
has changed or left out messages, a branch begins: its prompt is rendered again, but known answers
keep their sampled tokens. So the model's tokens are never re-tokenised, and each is trained once.
"""

from __future__ import annotations

import copy
import dataclasses
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from slime.agents.conversation import (
    AgentRequest,
    ChatFormat,
    ParsedAnswer,
    call_ids,
    digest,
    key_of,
)
from slime.agents.images import images_in
from slime.prompts.conversation import Messages
from slime.samples.media import IMAGES
from slime.samples.sampling_mask import mask_rows
from slime.samples.types import PrefixCacheInfo, Sample, SampleStatus, SpecInfo

#: What happens if a client leaves the model's reasoning out of the history; see `TurnTree`.
DroppedReasoning = Literal["branch", "continue"]


@dataclass(eq=False)
class Turn:
    """One answer of the model.

    Attributes:
        parent: the turn before this one; None: this turn begins a conversation.
        lead: prompt tokens between the parent's answer and this answer; not the model's.
        output, log_probs: the answer's tokens, including the one that ended it, and the log-prob of
            each.
        weight_runs: [[first token, weight version], …] of the answer.
        said: the texts between the parent's answer and this answer.
        sampling_mask: for each token of the answer, the tokens it was sampled from; None without
            --use-sampling-mask.
        length: number of tokens up to the answer's end, including all earlier turns.
        images: references of the images before the answer, including those of earlier turns.
        media: their positions, as in ``Sample.multimodal_train_inputs``; None without images.
    """

    parent: Turn | None
    lead: list[int]
    output: list[int]
    log_probs: list[float]
    status: SampleStatus
    text: str = ""
    weight_runs: list[list[Any]] = field(default_factory=list)
    weight_versions: list[str] = field(default_factory=list)
    ask: AgentRequest = field(default_factory=lambda: AgentRequest([]))
    reading: ParsedAnswer = field(default_factory=lambda: ParsedAnswer(""))
    said: list[str] = field(default_factory=list)
    cache: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    speculation: SpecInfo = field(default_factory=SpecInfo)
    routed_experts: Any = None
    sampling_mask: list[list[int]] | None = None
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    length: int = 0
    images: list[str] = field(default_factory=list)
    media: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.length = (self.parent.length if self.parent else 0) + len(self.lead) + len(self.output)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the engine's cache. An answer of several requests finds its own
        first part there, too."""
        return min(self.cache.cached_tokens, self.length - len(self.output))

    def path(self) -> list[Turn]:
        """Return the turns from the first one of the conversation to this one."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        return turns[::-1]

    def tokens(self) -> list[int]:
        """Return all tokens, prompts and answers, up to the end of this turn."""
        found: list[int] = []
        for turn in self.path():
            found += turn.lead
            found += turn.output
        return found


@dataclass(frozen=True)
class TurnPosition:
    """The place of a request in the tree of turns.

    Attributes:
        parent, lead: as in `Turn`.
        prompt: all tokens before the answer.
        history: digest of the request's conversation.
        twin: number of earlier requests with the same history.
        said: the texts in ``lead``.
        known: number of the request's messages that the parent already has.
        images: references of the images in ``prompt``.
    """

    parent: Turn | None
    lead: list[int]
    prompt: list[int]
    history: bytes
    twin: int = 0
    said: list[str] = field(default_factory=list)
    known: int = 0
    images: list[str] = field(default_factory=list)


class TurnTree:
    """The turns of one trajectory, linked by ``Turn.parent``.

    Args:
        dropped_reasoning: "branch": reasoning that a client leaves out of the history is not in the
            next prompt, as at inference; "continue": an answer without its reasoning counts as the
            whole answer.

    Attributes:
        turns: in the order in which they were answered.
    """

    def __init__(
        self, chat_format: ChatFormat, dropped_reasoning: DroppedReasoning = "branch"
    ) -> None:
        self.chat_format = chat_format
        self.turns: list[Turn] = []
        self._with_reasoning = dropped_reasoning == "branch"
        self._by_history: dict[bytes, list[Turn]] = {}
        self._by_reply: dict[bytes, list[Turn]] = {}
        self._by_visible: dict[bytes, list[Turn]] = {}
        self._asked: Counter[bytes] = Counter()

    # -- from messages to tokens -------------------------------------------------------------------

    def place(self, ask: AgentRequest) -> TurnPosition:
        """Find the place and the tokens of a request, and count it for ``TurnPosition.twin``.

        Raises:
            BadRequest: the chat template refuses the messages.
        """
        place = self.find_place(ask)
        self._asked[place.history] += 1
        return place

    def find_place(self, ask: AgentRequest) -> TurnPosition:
        """Do as `place` for a request that will not be answered; it is not counted."""
        self.chat_format.check_tools(ask.tools)
        history, parent, count = self._longest_known(ask)
        rest = ask.messages[count:]
        lead = self._tokens(ask, rest, parent)
        before = parent.tokens() if parent is not None else []
        images = images_in(ask.messages)
        if parent is None:  # the client may have written the same history differently
            continued = [
                turn
                for turn in self.turns
                if turn.images == images[: len(turn.images)] and _is_beginning(turn, lead)
            ]
            parent = max(continued, key=lambda turn: turn.length, default=None)
            if parent is not None:
                before = parent.tokens()
                lead = lead[len(before) :]
                rest = self._behind(parent, rest)
        said = [message["content"] for message in rest] if parent is not None else []
        twin = self._asked[history]
        return TurnPosition(parent, lead, before + lead, history, twin, said, count, images)

    def _longest_known(self, ask: AgentRequest) -> tuple[bytes, Turn | None, int]:
        """Return (digest of all messages, the turn of the last known answer among them, number of
        messages up to that answer)."""
        history = digest(
            b"", orjson.dumps([ask.tools, ask.template_kwargs], option=orjson.OPT_SORT_KEYS)
        )
        parent = None
        count = 0
        for number, message in enumerate(ask.messages, 1):
            history = digest(history, self._key(message))
            if message["role"] == "assistant" and (known := self._by_history.get(history)):
                parent = _meant(known, message)
                count = number
        return history, parent, count

    def _behind(self, turn: Turn, messages: Messages) -> Messages:
        """Return the messages after the turn's answer."""
        key = self._key(turn.reading.message())
        ends = [n for n, message in enumerate(messages, 1) if self._key(message) == key]
        return messages[max(ends, default=0) :]

    def _key(self, message: dict[str, Any]) -> bytes:
        return key_of(message, with_reasoning=self._with_reasoning)

    def _tokens(self, ask: AgentRequest, messages: Messages, parent: Turn | None) -> list[int]:
        """Return the tokens of messages up to the start of the next answer; known answers keep
        their sampled tokens."""
        ids: list[int] = []
        last = parent.output if parent is not None else None
        calls = parent.reading.message().get("tool_calls") if parent is not None else None
        waiting: Messages = []
        for message in messages:
            answer, whole = self._known_answer(message)
            if not answer or (last is None and not waiting):
                waiting.append(message)
                continue
            ids += self._rendered(ask, last, calls, waiting, to_past=not whole) + answer
            last = answer
            calls = message.get("tool_calls")
            waiting = []
        return ids + self._rendered(ask, last, calls, waiting)

    def _rendered(
        self,
        ask: AgentRequest,
        last: list[int] | None,
        calls: list[dict[str, Any]] | None,
        messages: Messages,
        *,
        to_past: bool = False,
    ) -> list[int]:
        if last is None:
            return self.chat_format.opening(ask, messages, to_past=to_past)
        return self.chat_format.between(ask, last, messages, calls=calls, to_past=to_past)

    def _known_answer(self, message: dict[str, Any]) -> tuple[list[int], bool]:
        """Return the tokens of a message that the model wrote, and whether they are the whole
        answer; [] for any other message."""
        thought = self._with_reasoning and message.get("reasoning_content")
        if message["role"] != "assistant" or not (
            message["content"] or message.get("tool_calls") or thought
        ):
            return [], False
        key = self._key(message)
        if whole := self._by_reply.get(key):
            return _meant(whole, message).output, True
        if part := self._by_visible.get(key):
            return self.chat_format.visible_part(_meant(part, message).output), False
        return [], False

    # -- what was answered -------------------------------------------------------------------------

    def record(
        self, place: TurnPosition, ask: AgentRequest, answer: Sample, reading: ParsedAnswer
    ) -> Turn:
        """Add an answer to the tree.

        Args:
            answer: generated from ``place.prompt``, with nothing before it.
        """
        parent = place.parent
        experts = answer.rollout_routed_experts
        if parent is not None and parent.routed_experts is not None and experts is not None:
            # keep the experts that sampled a token, not those of its prefill in a later request
            experts = np.concatenate([parent.routed_experts, experts[len(parent.routed_experts) :]])
        if parent is not None and place.known:  # share one copy of the history
            history = [*parent.ask.messages, parent.reading.message(), *ask.messages[place.known :]]
            ask = dataclasses.replace(ask, messages=history)
        turn = Turn(
            parent=parent,
            lead=place.lead,
            output=answer.tokens[answer.prompt_length :],
            log_probs=list(answer.rollout_log_probs or []),
            status=answer.status,
            text=answer.response,
            weight_runs=[[span.start, span.weight_version] for span in answer.token_spans],
            weight_versions=list(answer.weight_versions),
            ask=ask,
            reading=reading,
            said=place.said,
            cache=answer.prefix_cache_info,
            speculation=answer.spec_info,
            routed_experts=experts,
            sampling_mask=mask_rows(
                answer.rollout_top_p_token_ids, answer.rollout_top_p_token_offsets
            ),
            images=place.images,
            media=answer.multimodal_train_inputs,
        )
        self.turns.append(turn)
        message = reading.message()
        key = self._key(message)
        self._by_history.setdefault(digest(place.history, key), []).append(turn)
        self._by_reply.setdefault(key, []).append(turn)
        if reading.reasoning is not None and self._with_reasoning:
            self._by_visible.setdefault(key_of(message, with_reasoning=False), []).append(turn)
        return turn

    # -- branches ----------------------------------------------------------------------------------

    def branches(self) -> list[Turn]:
        """Return the last turn of every branch, in the order in which they were answered."""
        followed = {id(turn.parent) for turn in self.turns}
        return [turn for turn in self.turns if id(turn) not in followed]


def _is_beginning(turn: Turn, tokens: list[int]) -> bool:
    """Tell whether ``tokens`` begin with all tokens up to a turn's end, and continue after it."""
    end = turn.length
    if end >= len(tokens) or tokens[end - len(turn.output) : end] != turn.output:
        return False
    return tokens[:end] == turn.tokens()


def _meant(turns: list[Turn], message: dict[str, Any]) -> Turn:
    """Choose among turns with equivalent answers: the latest whose calls have the message's ids,
    then the latest with exactly the same text, then the latest."""
    ids = call_ids(message)
    content = message["content"]

    def likeness(turn: Turn) -> tuple[bool, bool]:
        return call_ids(turn.reading.message()) == ids, turn.reading.text == content

    return max(reversed(turns), key=likeness)


# -- samples ---------------------------------------------------------------------------------------


def samples_of(drawn: Sample, ends: Sequence[Turn], cut_short: Turn | None = None) -> list[Sample]:
    """Make a sample for each branch. A turn that branches share is trained in the first of them.

    The first sample is ``drawn`` itself; the others are copies without its trace. All have its
    reward.

    Args:
        ends: the last turn of each branch.
        cut_short: the one of ``ends`` that did not fit into the context any more; its sample is
            TRUNCATED.
    """
    samples = []
    trained = set[int]()
    for number, end in enumerate(ends):
        sample = drawn
        if number:
            sample = copy.copy(drawn)
            sample.metadata = copy.deepcopy(drawn.metadata)
            sample.trace = None
            sample.non_generation_time = 0.0
        path = end.path()
        own = [turn for turn in path if id(turn) not in trained]
        _fill(sample, path, trained)
        if end is cut_short:
            sample.status = SampleStatus.TRUNCATED
        sample.metadata["agent"] = {
            "branch": number,
            "branches": len(ends),
            "turns": len(path),
            "trained_turns": len(own),
            "model": end.ask.model,
            "answer": end.reading.text,
        }
        trained |= {id(turn) for turn in path}
        samples.append(sample)
    return samples


def _fill(sample: Sample, path: list[Turn], trained: set[int]) -> None:
    """Fill ``sample`` with these turns; those in ``trained`` get a loss mask of zeros."""
    reward = sample.reward
    sample.tokens = list(path[0].lead)
    sample.response_length = 0
    sample.reset_response()
    sample.reward = reward
    for turn in path:
        if turn is not path[0]:
            text = "".join(f"\n{said}\n" for said in turn.said)
            sample.append_response_tokens(tokens=turn.lead, text=text, trainable=False)
        meta: dict[str, Any] = {"token_weight_versions": turn.weight_runs}
        if turn.sampling_mask is not None:
            meta["output_token_sampling_mask"] = turn.sampling_mask
        sample.append_response_tokens(
            tokens=turn.output,
            log_probs=turn.log_probs,
            meta_info=meta,
            text=turn.text,
            update_terminal_info=False,
        )
        if id(turn) in trained:
            assert sample.loss_mask is not None
            sample.loss_mask[-len(turn.output) :] = [0] * len(turn.output)
        else:  # counters of requests, each counted once
            sample.spec_info = _sum(sample.spec_info, turn.speculation)
            sample.prefix_cache_info = _sum(sample.prefix_cache_info, turn.cache)
        sample.weight_versions += turn.weight_versions
    end = path[-1]
    if end.images:
        sample.multimodal_inputs = {IMAGES: list(end.images)}
        sample.multimodal_train_inputs = copy.deepcopy(end.media)
    else:
        sample.multimodal_inputs = sample.multimodal_train_inputs = None
    sample.rollout_routed_experts = end.routed_experts
    sample.status = end.status


def _sum(one: Any, other: Any) -> Any:
    """Add the counters of two records of the same type."""
    return type(one)(
        **{f.name: getattr(one, f.name) + getattr(other, f.name) for f in dataclasses.fields(one)}
    )
