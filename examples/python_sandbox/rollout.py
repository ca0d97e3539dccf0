"""A model that may run Python: several turns with a sandbox between them, as one training sample.

user         What is 37 times 46?
assistant    <python>print(37*46)</python>    sampled, trained on; ends at the stop string
tool         1702                             the sandbox's output, appended, never trained on
assistant    1702                             sampled, trained on
"""

from __future__ import annotations

import re
import time
from typing import Any

from slime.rollout.generate import append_message
from slime.rollout.generate import generate as one_turn
from slime.samples.types import Sample
from slime.sandbox.sandbox import Limits, Sandbox

MOST_PROGRAMS = 3
STOP = "</python>"
SANDBOX = Sandbox(Limits(seconds=10, cpu_seconds=5, memory=256 << 20, output_bytes=2000))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns of the model, until one has no program. What is cut short comes back as it is; its
    status says so."""
    sampling_params["stop"] = [*sampling_params.get("stop", ()), STOP]
    for _ in range(MOST_PROGRAMS):
        sample = await one_turn(args, sample, sampling_params)
        program = re.search(
            r"<python>((?:(?!<python>).)*)</python>\s*$", sample.response, re.DOTALL
        )
        if program is None or sample.status is not Sample.Status.COMPLETED:
            return sample
        began = time.monotonic()
        ran = await SANDBOX.python(program[1])
        sample.non_generation_time += time.monotonic() - began
        append_message(sample, {"role": "tool", "content": ran.text.strip() or "(no output)"})
    return await one_turn(args, sample, sampling_params)


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 where the last line is the answer. What a program prints ends with its line, so that it is
    none."""
    return float(sample.response.rpartition("\n")[2].strip() == sample.label)
