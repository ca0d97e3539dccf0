"""What ranks tell each other is data: it arrives as it was sent, and nothing that is sent runs
code."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.trainer_ranks import Pools

_ROOT = Path(__file__).parents[2]
#: One host's memory, and handles of it that only torch can rebuild; docs/security.md names it.
_EXCEPTIONS = {"slime/weights/ipc.py"}


def test_no_collective_of_pickles() -> None:
    pattern = re.compile(r"\b(all_gather|gather|scatter|send|recv|broadcast)_object(_list)?\(")
    found = {
        str(p.relative_to(_ROOT))
        for p in (_ROOT / "slime").rglob("*.py")
        if pattern.search(p.read_text())
    }
    assert found == _EXCEPTIONS
    text = (_ROOT / "docs" / "security.md").read_text()
    assert all(Path(name).name in text for name in _EXCEPTIONS)


def everything(info: Any) -> list[Any]:
    from torch.distributed import get_rank, init_process_group, new_group

    from slime.processes.json_collectives import all_gather, broadcast, gather, gather_tensors

    address = f"tcp://{info.master_addr}:{info.master_port}"
    init_process_group("gloo", init_method=address, rank=info.rank, world_size=info.world_size)
    own = {
        "rank": get_rank(),
        "text": "é" * (1000 * get_rank()),
        "none": None,
        "some": [1, 0.1, True],
    }
    group = new_group([1, 0], backend="gloo")
    tensors = gather_tensors(
        {"x": torch.full((get_rank() + 1,), 2.5, dtype=torch.bfloat16), "y": own}
    )
    told = None if tensors is None else [(found["x"].tolist(), found["y"]) for found in tensors]
    return [
        all_gather(own),
        gather(own),
        broadcast(own),
        all_gather(None, group),
        gather(own, group),
        told,
    ]


@pytest.mark.slow
def test_it_arrives_as_it_was_sent(ranks: Pools) -> None:
    first, second = ranks.run(2, everything)
    both = [
        {"rank": k, "text": "é" * (1000 * k), "none": None, "some": [1, 0.1, True]}
        for k in range(2)
    ]
    assert first == [
        both,
        both,
        both[0],
        [None, None],
        both,
        [([2.5], both[0]), ([2.5, 2.5], both[1])],
    ]
    assert second == [both, None, both[0], [None, None], None, None]


def test_write_results_of_torch_come_back() -> None:
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import MetadataIndex
    from torch.distributed.checkpoint.storage import WriteResult

    from slime.checkpoints.sharded_store import plain_results, results_of

    place = _StorageInfo("__0_0.distcp", 8, 16)
    results = [
        WriteResult(MetadataIndex("a.b", [3, 0], 1), 16, place),
        WriteResult(MetadataIndex("c"), 4, place),
    ]
    assert results_of(plain_results(results)) == results
    stream = io.BytesIO()
    torch.save(results_of(plain_results(results)), stream)  # as the table of contents has them
    assert torch.load(io.BytesIO(stream.getvalue()), weights_only=False) == results
