"""Reasoning in what a model writes: what it thinks before it answers, between marks.

>>> THINK.split("<think>\nTwo and two.\n</think>\n\n4")
Thought(reasoning='Two and two.', rest='4')
>>> THINK.split("Two and", opened=True)  # after a prompt that ends with the mark; cut short
Thought(reasoning='Two and', rest='')
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class SplitReasoning:
    """``reasoning`` is None where there was none, not even an empty block."""

    reasoning: str | None
    rest: str


@dataclass(frozen=True)
class ReasoningFormat:
    """A pair of marks."""

    begin: str
    end: str

    def split(self, text: str, *, opened: bool = False) -> SplitReasoning:
        """Take a whole answer apart.

        Args:
            opened: the answer begins within reasoning, since the prompt has opened it.
        """
        start = text.lstrip()
        if start.startswith(self.begin):
            start = start[len(self.begin) :]
            opened = True
        if not opened:
            return SplitReasoning(None, text)
        reasoning, _, rest = start.partition(self.end)
        return SplitReasoning(reasoning.strip("\n"), rest.lstrip("\n"))

    def opens(self, prompt_end: str) -> bool:
        """Whether a prompt that ends so has begun the reasoning."""
        return prompt_end.rstrip().endswith(self.begin)


THINK = ReasoningFormat("<think>", "</think>")
#: By the marks in a model's chat template: Qwen3, DeepSeek-R1 and V3.1, GLM-4.5; Magistral.
FORMATS = (THINK, ReasoningFormat("[THINK]", "[/THINK]"))


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """How a model with this chat template marks its reasoning; None where the template knows of
    none."""
    return next((found for found in FORMATS if template and found.end in template), None)
