"""The agent of one sample: its requests become turns, generated as the rollout generates."""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from slime.agents.conversation import Ask, Speech
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


class Refusal(Exception):
    """A request that gets no answer, and will get none if it is sent again.

    Attributes:
        status: the HTTP status.
        kind, code: ``type`` and ``code`` of OpenAI's error object.
    """

    def __init__(self, message: str, status: int, kind: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.code = code


class AgentSession:
    """Turns of one sample.

    Args:
        sample: as it was drawn; its index, session and trace go with every turn.
        sampling_params: the rollout's. Of a client's own only a lower ``max_tokens`` and further
            stop strings count: log-probs are of the run's distribution.
        max_turns: more requests are refused. One that the chat template refuses does not count.

    Attributes:
        failure: an engine's error, which the agent got as status 503.
        was_cut: a request was refused, or its answer cut short, because the rollout ends.
        generation_seconds: in which a request was under way.
        refused: why the last request was refused that was; "" if none was.
    """

    def __init__(
        self,
        state: GenerateState,
        sample: Sample,
        sampling_params: dict[str, Any],
        speech: Speech,
        *,
        dropped_reasoning: DroppedReasoning = "branch",
        max_turns: int | None = None,
    ) -> None:
        self.state = state
        self.sample = sample
        self.params = sampling_params
        self.tree = TurnTree(speech, dropped_reasoning)
        self.max_turns = max_turns
        self.failure: EngineError | None = None
        self.was_cut = False
        self.refused = ""
        self._is_over = False
        self._started = 0
        # of a request that the context had no room for, if none was answered since
        self._full: TurnPosition | None = None
        # the generate function's: its state, and its span of the trace
        self._context = contextvars.copy_context()
        self._waiting: set[asyncio.Task[Any]] = set()
        self.generation_seconds = 0.0
        self._since = 0.0
        self._template_kwargs = dict(state.template_kwargs_for(sample))

    @property
    def images(self) -> AgentImages | None:
        """Images in messages; None: the model reads text alone."""
        return self.tree.speech.images

    def read_messages(
        self, read: Callable[[ImageParts | None], Messages], field: str = "messages"
    ) -> Messages:
        """Read the messages of a request, with their images where the model sees some; see
        `AgentImages.read`."""
        return read(None) if self.images is None else self.images.read(read, field)

    def with_kwargs(self, ask: Ask) -> Ask:
        """Add the run's arguments of the chat template to a request, where it brings none of its
        own."""
        if not self._template_kwargs:
            return ask
        return dataclasses.replace(
            ask, template_kwargs={**self._template_kwargs, **ask.template_kwargs}
        )

    async def answer(self, ask: Ask) -> Turn:
        """Generate the model's answer to a request.

        Raises:
            BadRequest: the chat template refuses it.
            Refusal: the context is full, too many turns, the sample is done or has failed, the
                rollout ends, or no engine answers.
        """
        if self._is_over:  # the sample ended while the body arrived
            raise Refusal("this sample is done", 401, "authentication_error", "invalid_api_key")
        # agents repeat a 503 some thirty times, but not a 400; no engine is asked again
        if self.failure is not None:
            raise Refusal(
                f"this sample has failed: {self.failure}",
                400,
                "invalid_request_error",
                "sample_failed",
            )
        if self.max_turns is not None and self._started >= self.max_turns:
            raise Refusal(
                f"this agent may take {self.max_turns} turns",
                400,
                "invalid_request_error",
                "max_turns",
            )
        ask = self.with_kwargs(ask)
        full_before = self._full
        place = self.tree.place(ask)
        self._started += 1  # a request that the template refuses is no turn
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
            raise Refusal("the rollout ends: this sample will be begun anew", 503, "unavailable")
        if not sample.response_length:
            self._full = place
            said = f"the prompt is too long: {len(place.prompt)} tokens fill the context"
            raise Refusal(said, 400, "invalid_request_error", "context_length_exceeded")
        # the agent has gone on with a shorter prompt; a refusal that came meanwhile still counts
        if self._full is full_before:
            self._full = None
        output = sample.tokens[sample.prompt_length :]
        opened = self.tree.speech.opens_reasoning(place.prompt)
        reading = self.tree.speech.read(output, ask, opened=opened, stop=params.get("stop") or ())
        return self.tree.record(place, ask, sample, reading)

    async def _generate(self, sample: Sample, params: dict[str, Any]) -> None:
        work = generate(self.state.args, sample, params)
        try:
            await asyncio.create_task(work, context=self._context.copy())
        except RequestRefused as error:
            raise Refusal(error.what, 400, "invalid_request_error") from error
        except EngineError as error:
            self.failure = error
            raise Refusal(str(error), 503, "unavailable") from error

    def _params_for(self, ask: Ask, place: TurnPosition) -> dict[str, Any]:
        params = dict(self.params)
        if ask.max_tokens is not None:
            params["max_new_tokens"] = min(params["max_new_tokens"], ask.max_tokens)
        own = params.get("stop") or []
        if stops := list(dict.fromkeys([*([own] if isinstance(own, str) else own), *ask.stop])):
            params["stop"] = stops
        if params.get("sampling_seed") is not None:  # whoever asks the same twice wants two answers
            params["sampling_seed"] = (params["sampling_seed"] + place.twin) & _LARGEST_SEED
        return params

    def cut_short(self, ends: Sequence[Turn]) -> Turn | None:
        """Return the branch that the agent would have continued, had its last request not
        been too long."""
        if self._full is None:
            return None
        if self._full.parent in self.tree.branches():
            return self._full.parent if self._full.parent in ends else None
        # it was rewritten: most likely of the last one
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
        """Cancel the requests in progress and refuse new ones: nobody will read the answers."""
        self._is_over = True
        for task in self._waiting:
            task.cancel()
