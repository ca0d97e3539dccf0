"""Generate and reward functions of a model that may look something up: several turns, one training
sample.

user         How high is the Zugspitze?
assistant    <search>Zugspitze</search>       sampled, trained on; ends at the stop string
tool         The Zugspitze is 2962 m high.    appended, never trained on
assistant    2962                             sampled, trained on
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

import bm25s

from slime.rollout.generate import append_message
from slime.rollout.generate import generate as one_turn
from slime.samples.types import Sample

CORPUS = Path(__file__).with_name("corpus.jsonl")
MOST_SEARCHES = 3
STOP = "</search>"


@functools.cache
def index() -> tuple[bm25s.BM25, list[str]]:
    """The searchable corpus and its texts; made once in a process."""
    texts = [json.loads(line)["text"] for line in CORPUS.read_text(encoding="utf-8").splitlines()]
    found = bm25s.BM25()
    found.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
    return found, texts


def search(query: str) -> str:
    """The text that fits best; put your own search in its place (`await` it where it is slow)."""
    corpus, texts = index()
    best, scores = corpus.retrieve(
        bm25s.tokenize([query], show_progress=False), k=1, show_progress=False
    )
    return texts[best[0, 0]] if scores[0, 0] > 0 else "Nothing was found."


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Turns of the model, until one asks for no search. What is cut short comes back as it is; its
    status says so."""
    sampling_params["stop"] = [*sampling_params.get("stop", ()), STOP]
    for _ in range(MOST_SEARCHES):
        sample = await one_turn(args, sample, sampling_params)
        asked = re.search(r"<search>([^<]*)</search>\s*$", sample.response)
        if asked is None or sample.status is not Sample.Status.COMPLETED:
            return sample
        append_message(sample, {"role": "tool", "content": search(asked[1])})
    return await one_turn(args, sample, sampling_params)


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    """1 where the last line is the answer. What a tool says ends with its line, so that it is
    none."""
    return float(sample.response.rpartition("\n")[2].strip() == sample.label)
