"""Sessions of agents without a server: asked turn by turn, and what holds for their samples."""

from __future__ import annotations

import asyncio
import contextvars
from typing import Any

from slime.agents.conversation import AgentRequest, ChatFormat, clean
from slime.agents.session import AgentSession
from slime.agents.turns import samples_of
from slime.prompts.conversation import Messages
from slime.rollout.generate import bind_state
from slime.samples.types import Sample
from tests.support.agents import Play


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def session_of(play: Play, **options: Any) -> AgentSession:
    chat_format = ChatFormat.of(play.model.tokenizer, "", play.state.end_tokens)

    def in_a_rollout() -> AgentSession:
        bind_state(play.state)
        return AgentSession(
            play.state, play.sample, play.state.params_for(play.sample), chat_format, **options
        )

    return contextvars.copy_context().run(in_a_rollout)


def talk(play: Play, *conversations: Messages | AgentRequest, **options: Any) -> AgentSession:
    """Ask one after the other. A message that is a number stands for what was said in that turn."""
    session = session_of(play, **options)

    async def run() -> None:
        for asked in conversations:
            ask = asked if isinstance(asked, AgentRequest) else AgentRequest([])
            messages = ask.messages if isinstance(asked, AgentRequest) else asked
            said = [
                session.tree.turns[m].reading.message() if isinstance(m, int) else m
                for m in messages
            ]
            await session.answer(AgentRequest(**{**vars(ask), "messages": clean(said)}))

    asyncio.run(run())
    return session


def samples(session: AgentSession) -> list[Sample]:
    ends = session.tree.branches()
    return samples_of(session.sample, ends, session.cut_short(ends))


def check(play: Play, session: AgentSession) -> list[Sample]:
    """What holds for any tree; its samples."""
    found = samples(session)
    for turn, asked, said in zip(
        session.tree.turns, play.model.asked, play.model.said, strict=True
    ):
        assert turn.tokens() == asked + said
    for end, sample in zip(session.tree.branches(), found, strict=True):
        sample.validate()
        assert sample.tokens == end.tokens()
    trained = [
        log_prob
        for sample in found
        for log_prob, counts in zip(
            sample.rollout_log_probs or [], sample.loss_mask or [], strict=True
        )
        if counts
    ]
    assert sorted(trained, reverse=True) == [
        -1.0 - i for i in range(sum(map(len, play.model.said)))
    ]
    return found
