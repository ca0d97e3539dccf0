"""An API endpoint for each sample, for agents that call a model API.

async def generate(args, sample, sampling_params):
    async with agent_endpoint(args, sample, sampling_params) as endpoint:
        await run_my_agent(endpoint.base_url, endpoint.api_key)
    return endpoint.samples()
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from slime.agents.conversation import ChatFormat
from slime.agents.images import AgentImages
from slime.agents.programs import Finished, run_program
from slime.agents.server import AgentServer, shared_server
from slime.agents.session import AgentSession
from slime.agents.turns import DroppedReasoning, Turn, samples_of
from slime.http_access import host_in_url
from slime.models import family_name
from slime.processes.host import own_addresses, past_proxies
from slime.rollout.generate import GenerateState, current_state
from slime.samples.types import Sample

_LOOPBACK = "127.0.0.1"
_EVERYWHERE = ("0.0.0.0", "::")


class AgentError(Exception):
    """An agent got no answer from the model, so there is nothing to train on. The sample fails."""


class RolloutEnds(Exception):
    """The rollout ended while the agent was running. Its sample is put back, and restarted in the
    next rollout."""


class AgentEndpoint:
    """The endpoint of one sample, made by `agent_endpoint`.

    Attributes:
        base_url: for OpenAI clients, with "/v1".
        anthropic_base_url: for Anthropic clients, without "/v1".
        api_key: the sample's own key, which clients send with every request.
        environ: variables that give URLs and key to clients in a subprocess or a container.
    """

    def __init__(self, session: AgentSession) -> None:
        self._session = session
        self._server: AgentServer | None = None
        self._task: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._cancelled_before = 0
        self._ended_by_rollout = False
        self._began = 0.0
        self._finished: Finished | None = None
        self.api_key = ""
        self._host = _LOOPBACK

    # -- where it is -------------------------------------------------------------------------------

    @property
    def port(self) -> int:
        """Port of the server that all endpoints of this process share."""
        assert self._server is not None, "the endpoint is used outside 'async with'"
        return self._server.port

    @property
    def anthropic_base_url(self) -> str:
        return self._url(self._host)

    def _url(self, host: str) -> str:
        return f"http://{host_in_url(host)}:{self.port}"

    @property
    def base_url(self) -> str:
        return f"{self.anthropic_base_url}/v1"

    @property
    def keyed_base_url(self) -> str:
        """`base_url` with the key in its path, for clients that cannot send a key. Clients may log
        it."""
        return f"{self.anthropic_base_url}/key/{self.api_key}/v1"

    @property
    def environ(self) -> dict[str, str]:
        return self.environ_for(self._host)

    def environ_for(self, host: str) -> dict[str, str]:
        """Return `environ` for an agent that reaches this host by another name, such as
        "host.docker.internal"."""
        url = self._url(host)
        return {
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_API_KEY": self.api_key,
            **past_proxies([host]),
        }

    async def run(
        self,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        timeout: float | None = None,
        cwd: str | Path | None = None,
    ) -> Finished:
        """Run an agent program with the variables of `environ` and those of the argument; see
        `slime.agents.programs.run_program`."""
        given = {**self.environ, **(environ or {})}
        self._finished = await run_program(command, given, timeout=timeout, cwd=cwd)
        return self._finished

    # -- results -----------------------------------------------------------------------------------

    @property
    def turns(self) -> list[Turn]:
        """Return every answer so far, in order."""
        return list(self._session.tree.turns)

    def branches(self) -> list[Turn]:
        """Return the last turn of every branch. A branch is one version of the conversation."""
        return self._session.tree.branches()

    def samples(self, branches: Sequence[Turn] | None = None, reward: Any = None) -> list[Sample]:
        """Return the trajectory as samples, one for each branch.

        Args:
            branches: the branches to train on; None: all. Shared turns are trained in the first
                branch that has them.
            reward: for all samples; None: keep the sample's own, or call the reward function later.
        Raises:
            AgentError: the agent got no answer; the message says why a request was refused, or how
                the agent's program ended.
            RolloutEnds: the rollout ended before the agent did.
            EngineError: an engine failed during an answer.
        """
        session = self._session
        if session.was_cut:
            raise RolloutEnds("the rollout ended before the agent did")
        if session.failure is not None:
            raise session.failure
        ends = list(self.branches() if branches is None else branches)
        if not ends:
            raise AgentError(f"the agent has got no answer of the model{self._why_nothing()}")
        if reward is not None:
            session.sample.reward = reward
        return samples_of(session.sample, ends, session.cut_short(ends))

    def _why_nothing(self) -> str:
        if self._session.refused:
            return f": its last request was refused: {self._session.refused}"
        if self._finished is None:
            return ": it has asked for none"
        lines = self._finished.output.strip().splitlines()
        last = f"; its last line: {lines[-1][:300]}" if lines else ", and wrote nothing"
        if self._finished.status is None:
            status = "was ended at its deadline"
        else:
            status = f"ended with {self._finished.status}"
        return f": it has asked for none, and {status}{last}"

    # -- start and end -----------------------------------------------------------------------------

    async def __aenter__(self) -> AgentEndpoint:
        state = self._session.state
        listen = _address(state)
        self._server = await shared_server(listen, state.args.agent_port)
        self._host = _reachable(listen, state)
        self.api_key = self._server.open(self._session)
        self._began = time.monotonic()
        self._task = asyncio.current_task()
        assert self._task is not None
        self._cancelled_before = self._task.cancelling()
        self._watch = asyncio.create_task(self._end_with_rollout(self._task))
        return self

    async def _end_with_rollout(self, task: asyncio.Task[Any]) -> None:
        """Cancel the agent when the rollout ends: it may be running a long tool."""
        await self._session.state.client.wait_for_abort()
        self._ended_by_rollout = True
        task.cancel()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._server is not None and self._watch is not None and self._task is not None
        self._watch.cancel()
        self._server.revoke(self.api_key)
        elapsed = time.monotonic() - self._began
        self._session.sample.non_generation_time += max(
            0.0, elapsed - self._session.generation_seconds
        )
        if self._ended_by_rollout:  # as `asyncio.timeout` does
            alone = self._task.uncancel() <= self._cancelled_before
            # the block ended before the cancellation arrived: take the cancellation, and ignore it
            if alone and kind is None:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0)
            if alone and kind is not None and issubclass(kind, asyncio.CancelledError):
                raise RolloutEnds("the rollout ended before the agent did") from error


def agent_endpoint(
    args: Any,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    dropped_reasoning: DroppedReasoning = "branch",
    max_turns: int | None = None,
) -> AgentEndpoint:
    """Return an endpoint for one sample, to be used with ``async with`` in a generate function.

    It serves OpenAI's chat completions and responses and Anthropic's messages. The rollout's
    engines generate every answer; its tokens, log-probs and weight versions are recorded.

    Args:
        sampling_params: of the rollout; ``max_new_tokens`` limits one answer, the run's context
            limits apply to the whole conversation.
        dropped_reasoning: if a client leaves the model's reasoning out of the history: "branch"
            begins a branch in which the model does not see it, as at inference; "continue" keeps
            the answer as it was generated.
        max_turns: further requests are refused. Requests that the chat template refuses do not
            count.
    Raises:
        UserError: called outside a rollout, or for a model without chat template.
    """
    state = current_state(args)
    chat_format = _chat_format_of(
        state.tokenizer, state.args.hf_checkpoint, state.end_tokens, _images_of(state)
    )
    options: dict[str, Any] = {"dropped_reasoning": dropped_reasoning, "max_turns": max_turns}
    return AgentEndpoint(AgentSession(state, sample, sampling_params, chat_format, **options))


@lru_cache(maxsize=4)
def _chat_format_of(
    tokenizer: Any, model: str | None, end_tokens: frozenset[int], images: AgentImages | None
) -> ChatFormat:
    """Read the chat template and the markers of a model, once."""
    return ChatFormat.of(tokenizer, family_name(model) if model else "", end_tokens, images)


def _images_of(state: GenerateState) -> AgentImages | None:
    if state.images is None:
        return None
    return _agent_images(
        state.images, state.tokenizer, state.media_folder, state.args.images_per_sample
    )


#: Made once for a run and shared by its conversations.
_agent_images = lru_cache(maxsize=4)(AgentImages)


def _address(state: GenerateState) -> str:
    """Return the address to listen on: loopback, unless the user says otherwise."""
    if state.args.agent_host:
        return str(state.args.agent_host)
    router = urlsplit(state.client.base_url).hostname
    return router if router and state.args.listen_on_network else _LOOPBACK


def _reachable(listen: str, state: GenerateState) -> str:
    """Return the address for agents; for a server on all addresses, the router's address."""
    if listen not in _EVERYWHERE:
        return listen
    router = urlsplit(state.client.base_url).hostname
    return router if router in own_addresses() else _LOOPBACK
