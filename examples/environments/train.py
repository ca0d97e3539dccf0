"""Train a small model in one of the environments.

python -m examples.environments.train openenv|verifiers|harbor [steps]
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import slime
from examples.environments import letters

FOLDER = Path(__file__).parent
PROMPTS = Path("outputs/environments")


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The environment of OpenEnv, as its own container would be: a server."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, str(FOLDER / "openenv_server.py"), str(port)])
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.2)
        else:
            raise SystemExit("openenv_server.py ended before it answered; its last words are above")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def main(kind: str, steps: int) -> None:
    PROMPTS.mkdir(parents=True, exist_ok=True)
    prompts = PROMPTS / f"{kind}.jsonl"
    with contextlib.ExitStack() as stack:
        if kind == "openenv":
            os.environ["OPENENV_URL"] = stack.enter_context(server())
            from examples.environments.openenv_rollout import WORLD

            WORLD.write_prompts(prompts, [{"seed": seed} for seed in range(200)])
        elif kind == "verifiers":
            from examples.environments.verifiers_rollout import TASKSET

            TASKSET.write_prompts(prompts)
        else:
            from examples.environments.harbor_rollout import TASKS, write_tasks

            write_tasks(PROMPTS / "harbor", 64)
            TASKS.write_prompts(PROMPTS / "harbor", prompts)
        run = slime.train(
            letters.model("write" if kind == "harbor" else "say"),
            prompts,
            custom_generate_function_path=f"{FOLDER}/{kind}_rollout.py:generate",
            input_key="prompt",
            metadata_key="metadata",
            num_rollout=steps,
            rollout_batch_size=8,
            n_samples_per_prompt=8,
            rollout_max_response_len=24,
            rollout_max_context_len=128,
            lr=1e-3,
            fp32=True,
            lr_decay_style="constant",
            weight_decay=0.0,
            colocate=True,
        )
    print("score, step by step:", [round(value, 2) for value in run.series("rollout/raw_reward")])


if __name__ == "__main__":
    main(sys.argv[1], int((sys.argv[2:] or ["25"])[0]))
