"""The Triton kernels give what torch gives, and so do their gradients: on a GPU, or through
triton's interpreter.

triton comes with torch's CUDA builds and is no dependency of slime; without it there is nothing to
run here.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import kernel_cases

ROOT = Path(__file__).parents[2]
_SECONDS = 150.0


@pytest.fixture(scope="module")
def interpreted() -> dict[str, Any]:
    """What `kernel_cases` prints. A process of its own: triton reads the variable when it is first
    imported."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("triton is not installed: it comes with torch's CUDA builds")
    env = {
        **os.environ,
        "TRITON_INTERPRET": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
    }
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, kernel_cases.__file__],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if answer["fault"]:
        pytest.skip(f"triton's interpreter does not work here: {answer['fault']}")
    return answer["results"]


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_interpreted_kernels_equal_torch(name: str, interpreted: dict[str, Any]) -> None:
    assert isinstance(interpreted[name], float), interpreted[name]
    assert interpreted[name] <= kernel_cases.tolerance(name, interpreted=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_kernels_equal_torch(name: str) -> None:
    torch.manual_seed(0)
    assert kernel_cases.CASES[name](torch.device("cuda")) <= kernel_cases.tolerance(
        name, interpreted=False
    )
