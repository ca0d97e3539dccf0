"""Groups as they are drawn and generated, and what a journal has of them."""

from __future__ import annotations

from typing import Any

from slime.rollout.journal import Journal, RecordKind, drawn_as
from slime.samples.types import Sample


def drawn(group: int, prompt: str = "1+1=") -> list[Sample]:
    return [
        Sample(group_index=group, index=2 * group + k, prompt=prompt, tokens=[5, 6], label="2")
        for k in range(2)
    ]


def generated(group: int, tokens: tuple[int, ...] = (7, 8), **fields: Any) -> list[Sample]:
    found = drawn(group)
    for sample in found:
        meta = {"weight_version": "3", "finish_reason": {"type": "stop"}}
        sample.append_response_tokens(
            tokens=list(tokens), log_probs=[-0.5] * len(tokens), meta_info=meta, text="2"
        )
        sample.reward = 1.0
        for name, value in fields.items():
            setattr(sample, name, value)
    return found


def restored(journal: Journal, rollout_id: int, group: int, prompt: str = "1+1=") -> list[Sample]:
    group_drawn = drawn(group, prompt)
    return journal.restore(rollout_id, group_drawn, drawn_as(group_drawn))[0]


def note(journal: Journal, kind: RecordKind, rollout_id: int, samples: list[Sample]) -> None:
    assert samples[0].group_index is not None
    journal.note(kind, rollout_id, drawn_as(drawn(samples[0].group_index)), samples)
