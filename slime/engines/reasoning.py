"""Separate the reasoning in a model's answer, which is enclosed by marks, from the rest.

>>> THINK.split("<think>\nTwo and two.\n</think>\n\n4")
SplitReasoning(reasoning='Two and two.', rest='4')
>>> THINK.split("Two and", opened=True)  # after a prompt that ends with the mark; cut short
SplitReasoning(reasoning='Two and', rest='')
"""

from __future__ import annotations

from dataclasses import dataclass

from slime.engines import harmony


@dataclass(frozen=True)
class SplitReasoning:
    """An answer in two parts; ``reasoning`` is None if there was none, not even an empty block."""

    reasoning: str | None
    rest: str


@dataclass(frozen=True)
class ReasoningFormat:
    """The marks that a model puts around its reasoning.

    Attributes:
        in_template: text by which a chat template is recognised; "": the closing mark.
    """

    begin: str
    end: str
    in_template: str = ""

    def split(self, text: str, *, opened: bool = False) -> SplitReasoning:
        """Split a whole answer.

        Args:
            opened: the prompt ends with the opening mark, so the answer begins within reasoning.
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
        """Return whether a prompt with this end has opened the reasoning."""
        return prompt_end.rstrip().endswith(self.begin)


class ChannelReasoning(ReasoningFormat):
    """Reasoning on a separate channel (`slime.engines.harmony`)."""

    def split(self, text: str, *, opened: bool = False) -> SplitReasoning:
        """Split a whole answer; the rest keeps tool calls as written, and the text of other
        messages."""
        found = list(harmony.messages(self.begin + text if opened else text))
        if all(not one.channel for one in found):
            return SplitReasoning(None, text)
        thoughts = [one.content for one in found if one.is_reasoning]
        rest = "".join(
            one.written() if one.recipient else one.content for one in found if not one.is_reasoning
        )
        return SplitReasoning("\n\n".join(thoughts) if thoughts else None, rest)


THINK = ReasoningFormat("<think>", "</think>")
_ANALYSIS = "<|channel|>analysis<|message|>"
#: The first is that of Qwen3, DeepSeek-R1 and V3.1 and GLM-4.5, the second that of Magistral, the
#: third that of gpt-oss.
FORMATS = (
    THINK,
    ReasoningFormat("[THINK]", "[/THINK]"),
    ChannelReasoning(_ANALYSIS, "<|end|><|start|>assistant", _ANALYSIS),
)


def reasoning_format(template: str | None) -> ReasoningFormat | None:
    """Find the marks of a model with this chat template; None if the template has none."""
    return next(
        (found for found in FORMATS if template and (found.in_template or found.end) in template),
        None,
    )
