"""The agent of one sample: the rollout generates an answer, a turn, to each of its requests."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slime.agents.conversation import AgentRequest, ChatFormat
from slime.agents.images import AgentImages
from slime.agents.turns import DroppedReasoning, Turn, TurnPosition, TurnTree
from slime.engines.api import EngineError
from slime.engines.client import RequestRefused
from slime.log import get_logger
from slime.prompts.conversation import ImageParts, Messages
from slime.rollout.generate import GenerateState, generate
from slime.samples.media import IMAGES
from slime.samples.types import Sample, SampleStatus

logger = get_logger(__name__)

_LARGEST_SEED = (1 << 31) - 1
#: HTTP status of a refusal → its ``type`` in OpenAI's error object.
_KINDS = {400: "invalid_request_error", 401: "authentication_error", 503: "unavailable"}


class Refusal(Exception):
    """A request was refused, and a retry would be refused too.

    Attributes:
        status: the HTTP status.
        kind, code: ``type`` and ``code`` of OpenAI's error object.
    """

    def __init__(self, message: str, code: str | None = None, *, status: int = 400) -> None:
        super().__init__(message)
        self.status = status
        self.kind = _KINDS[status]
        self.code = code


class AgentSession:
    """The turns of one sample.

    Args:
        sample: as drawn from the data; every turn has its index, session and trace.
        sampling_params: the rollout's. A client can only lower ``max_tokens`` and add stop strings,
            so that log-probs belong to the run's distribution.
        max_turns: see `slime.agents.endpoint.agent_endpoint`.

    Attributes:
        failure: an engine's error, which the agent got as status 503.
        was_cut: a request was refused, or its answer cut short, because the rollout ended.
        generation_seconds: time with at least one request in progress.
        refused: reason of the last refusal; "" if there was none.
    """

    def __init__(
        self,
        state: GenerateState,
        sample: Sample,
        sampling_params: dict[str, Any],
        chat_format: ChatFormat,
        *,
        dropped_reasoning: DroppedReasoning = "branch",
        max_turns: int | None = None,
    ) -> None:
        self.state = state
        self.sample = sample
        self.params = sampling_params
        self.tree = TurnTree(chat_format, dropped_reasoning)
        self.max_turns = max_turns
        self.failure: EngineError | None = None
        self.was_cut = False
        self.refused = ""
        self._is_over = False
        self._num_turns = 0
        # the request that did not fit into the context, if none was answered since
        self._overflowing: TurnPosition | None = None
        # of the generate function: the rollout's state, and the current trace span
        self._context = contextvars.copy_context()
        self._waiting: set[asyncio.Task[Any]] = set()
        self.generation_seconds = 0.0
        self._since = 0.0
        self._template_kwargs = dict(state.template_kwargs_for(sample))

    @property
    def images(self) -> AgentImages | None:
        """Reader of images in messages; None: the model reads only text."""
        return self.tree.chat_format.images

    def read_messages(
        self, read: Callable[[ImageParts | None], Messages], field: str = "messages"
    ) -> Messages:
        """Read the messages of a request, and their images if the model reads images; see
        `AgentImages.read`."""
        return read(None) if self.images is None else self.images.read(read, field)

    def with_kwargs(self, ask: AgentRequest) -> AgentRequest:
        """Add the run's chat-template arguments to a request; the request's own take precedence."""
        if not self._template_kwargs:
            return ask
        return dataclasses.replace(
            ask, template_kwargs={**self._template_kwargs, **ask.template_kwargs}
        )

    async def answer(self, ask: AgentRequest) -> Turn:
        """Generate the model's answer to a request.

        Raises:
            BadRequest: the chat template refuses it.
            Refusal: the context is full, the turns are used up, the sample is done or has failed,
                the rollout ends, or no engine answers.
        """
        if self._is_over:  # the sample ended while the body arrived
            raise Refusal("this sample is done", "invalid_api_key", status=401)
        # agents retry a 503 some thirty times, but not a 400; a retry would not reach an engine
        if self.failure is not None:
            raise Refusal(f"this sample has failed: {self.failure}", "sample_failed")
        if self.max_turns is not None and self._num_turns >= self.max_turns:
            raise Refusal(f"this agent may take {self.max_turns} turns", "max_turns")
        ask = self.with_kwargs(ask)
        overflowing_before = self._overflowing
        place = self.tree.place(ask)
        self._num_turns += 1  # after `place`, where the template may refuse the request
        sample = Sample(
            index=self.sample.index,
            group_index=self.sample.group_index,
            session_id=self.sample.session_id,
            tokens=list(place.prompt),
            trace=self.sample.trace,
        )
        if place.images:
            assert self.images is not None
            self.images.check(place.images)
            sample.multimodal_inputs = {IMAGES: list(place.images)}
        params = self._params_for(ask, place)
        with self._in_flight():
            await self._generate(sample, params)
        self.sample.trace = sample.trace
        if sample.status is SampleStatus.ABORTED:
            self.was_cut = True
            raise Refusal("the rollout ends: this sample will be begun anew", status=503)
        if not sample.response_length:
            self._overflowing = place
            said = f"the prompt is too long: {len(place.prompt)} tokens fill the context"
            raise Refusal(said, "context_length_exceeded")
        # the agent continued with a shorter prompt; keep a refusal from during this request
        if self._overflowing is overflowing_before:
            self._overflowing = None
        output = sample.tokens[sample.prompt_length :]
        opened = self.tree.chat_format.opens_reasoning(place.prompt)
        reading = self.tree.chat_format.read(
            output, ask, opened=opened, stop=params.get("stop") or ()
        )
        return self.tree.record(place, ask, sample, reading)

    async def _generate(self, sample: Sample, params: dict[str, Any]) -> None:
        work = generate(self.state.args, sample, params)
        try:
            await asyncio.create_task(work, context=self._context.copy())
        except RequestRefused as error:
            raise Refusal(error.what) from error
        except EngineError as error:
            self.failure = error
            raise Refusal(str(error), status=503) from error

    def _params_for(self, ask: AgentRequest, place: TurnPosition) -> dict[str, Any]:
        params = dict(self.params)
        if ask.max_tokens is not None:
            params["max_new_tokens"] = min(params["max_new_tokens"], ask.max_tokens)
        own = params.get("stop") or []
        if stops := list(dict.fromkeys([*([own] if isinstance(own, str) else own), *ask.stop])):
            params["stop"] = stops
        if params.get("sampling_seed") is not None:  # equal requests get different answers
            params["sampling_seed"] = (params["sampling_seed"] + place.twin) & _LARGEST_SEED
        return params

    def cut_short(self, ends: Sequence[Turn]) -> Turn | None:
        """Return the branch that the agent would have continued if its last request had fitted into
        the context."""
        if self._overflowing is None:
            return None
        if self._overflowing.parent in self.tree.branches():
            return self._overflowing.parent if self._overflowing.parent in ends else None
        # the history was rewritten: most likely that of the last branch
        return max(ends, key=self.tree.turns.index, default=None)

    # -- time --------------------------------------------------------------------------------------

    @contextmanager
    def _in_flight(self) -> Iterator[None]:
        task = asyncio.current_task()
        assert task is not None
        if not self._waiting:
            self._since = time.monotonic()
        self._waiting.add(task)
        try:
            yield
        finally:
            self._waiting.discard(task)
            if not self._waiting:
                self.generation_seconds += time.monotonic() - self._since

    def end(self) -> None:
        """Cancel the requests in progress and refuse new ones."""
        self._is_over = True
        for task in self._waiting:
            task.cancel()
