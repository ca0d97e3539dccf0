"""A taskset of verifiers with an agent of its own, as its packages are: it asks for a letter, and
rewards it."""

from __future__ import annotations

import random

import httpx
import verifiers.v1 as vf


class LettersTask(vf.Task[vf.TaskData]):
    @vf.reward(weight=1.0)
    async def says_it(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.prompt_text.split()[-1])


class LettersConfig(vf.TasksetConfig):
    num_tasks: int = 64


class LettersTaskset(vf.Taskset[LettersTask, LettersConfig]):
    def load(self) -> list[LettersTask]:
        letters = random.Random(0).choices("wxyz", k=self.config.num_tasks)
        return [
            LettersTask(vf.TaskData(prompt=f"say {letter}"), self.config.task) for letter in letters
        ]


class LettersHarness(vf.Harness[vf.HarnessConfig]):
    """One question, in this process. The package's own agents start a program by `uv`, which
    fetches its packages."""

    NEEDS_CONTAINER = EXECUTES_CODE = False

    async def launch(
        self,
        ctx: vf.ModelContext,
        trace: vf.Trace,
        runtime: vf.Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> vf.ProgramResult:
        body = {
            "model": ctx.model,
            "messages": [{"role": "user", "content": self.resolve_text_prompt(data)[1]}],
        }
        headers = {"Authorization": f"Bearer {secret}"}
        async with httpx.AsyncClient(timeout=None, trust_env=False) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
        return vf.ProgramResult(int(answer.is_error), "", answer.text if answer.is_error else "")


__all__ = ["LettersHarness", "LettersTaskset"]
