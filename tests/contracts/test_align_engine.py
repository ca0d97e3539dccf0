"""`slime align` asks an engine that runs: its log-probs of given tokens, and its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from slime.diagnosis.align.case import Discrepancy
from slime.diagnosis.align.engines import EngineHere, EngineThere
from slime.diagnosis.align.evidence import Scored
from slime.diagnosis.align.examine import CAUSES, examine
from slime.diagnosis.align.reference import Reference
from slime.errors import UserError
from slime.processes.host import free_port
from tests.support.contract_servers import PROMPT, Server

TOKENS = [PROMPT, [*PROMPT, 5, 9, 200], [7, 7, 64, 12]]
#: All but the first token of each are its response.
SAMPLES = [
    Scored(
        f"sample {number}",
        torch.tensor(ids),
        torch.zeros(len(ids) - 1).double(),
        None,
        torch.ones(len(ids) - 1).bool(),
    )
    for number, ids in enumerate(TOKENS)
]


def test_it_scores_given_tokens_alone_and_in_company(engine: Server, model_dir: Path) -> None:
    there, here = EngineThere(engine.url), EngineHere(model_dir, "float32", longest=64)
    for together in (False, True):
        said, expected = (
            there.score(SAMPLES, together=together),
            here.score(SAMPLES, together=together),
        )
        assert [len(one) for one in said] == [len(ids) - 1 for ids in TOKENS]
        for one, other in zip(said, expected):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-4, rtol=0)


def test_its_weights_are_compared(engine: Server, model_dir: Path, other_dir: Path) -> None:
    there, reference = EngineThere(engine.url), Reference(model_dir, torch.float32)
    sample = Scored(
        "sample 0", torch.tensor(TOKENS[1]), torch.zeros(6).double(), None, torch.ones(6).bool()
    )
    trained = replace(sample, trainer=reference.log_probs(sample))
    case = Discrepancy([trained], reference=reference, engine=there)
    weights = [cause for cause in CAUSES if cause.trouble.name == "align-weights"]
    same = examine(case, weights, always=True)
    assert "are the trainer's" in same.ranked[0].best.what
    engine.ok("/update_weights_from_disk", {"model_path": str(other_dir), "weight_version": "1"})
    said = torch.tensor(there.score([SAMPLES[1]], together=False)[0][-6:]).double()
    found = examine(replace(case, samples=[replace(trained, engine=said)]), weights)
    best = found.reported[0].best
    assert best.share > 0.99 and "tensors differ" in best.what and "of its norm" in best.details[0]


def test_nobody_answers() -> None:
    with pytest.raises(UserError, match="no engine answers at http"):
        EngineThere(f"http://127.0.0.1:{free_port()}")
