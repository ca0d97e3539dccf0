"""A reward function that holds a rollout up, so that tests can hit a run at a known place.

SLIME_TEST_HOLD=<folder>: rollout k waits (at most a minute) while <folder>/hold-<k> exists; then it
has written <folder>/held-<k>. <folder>/raise-<k> makes it fail, and <folder>/daemons leave
processes behind.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

from slime.rollout.generate import is_in_run
from slime.samples.types import Sample
from tests.support.moments import leave_daemons


def reward(args: Any, sample: Sample, **_: Any) -> float:
    if not is_in_run():  # the launch tries it on a label
        return 0.0
    assert sample.index is not None
    rollout_id = sample.index // (args.rollout_batch_size * args.n_samples_per_prompt)
    folder = Path(os.environ["SLIME_TEST_HOLD"])
    if (folder / "daemons").exists():
        leave_daemons()
    end = time.monotonic() + 60
    while (folder / f"hold-{rollout_id}").exists() and time.monotonic() < end:
        (folder / f"held-{rollout_id}").touch()
        time.sleep(0.05)
    if (folder / f"raise-{rollout_id}").exists():
        raise ZeroDivisionError("a mistake in the reward function")
    return float(len(sample.response))


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """--custom-generate-function-path: requests of rollout k wait as rewards do, for
    <folder>/hold-request-<k>."""
    from slime.rollout.generate import generate

    assert sample.index is not None
    rollout_id = sample.index // (args.rollout_batch_size * args.n_samples_per_prompt)
    folder, end = Path(os.environ["SLIME_TEST_HOLD"]), time.monotonic() + 60
    while (folder / f"hold-request-{rollout_id}").exists() and time.monotonic() < end:
        (folder / f"held-request-{rollout_id}").touch()
        await asyncio.sleep(0.05)
    return await generate(args, sample, sampling_params)


def hold_saves(args: Any) -> None:
    """--custom-megatron-init-path: checkpoints wait (at most a minute) while <folder>/hold-save
    exists."""
    from slime.checkpoints.sharded_store import FingerprintedFile

    folder, write = Path(os.environ["SLIME_TEST_HOLD"]), FingerprintedFile.write

    def held(file: FingerprintedFile, data: Any) -> int:
        end = time.monotonic() + 60
        while (folder / "hold-save").exists() and time.monotonic() < end:
            time.sleep(0.05)
        return write(file, data)

    FingerprintedFile.write = held  # type: ignore[method-assign]


def ask_the_router(args: Any, sample: Sample, **_: Any) -> float:
    """A reward that uses a client which goes by the environment's proxies; 1 when the run's router
    answers it."""
    if not is_in_run():
        return 0.0
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/liveness"
    with urllib.request.urlopen(url, timeout=30) as answer:
        return float(answer.status == 200)


# -- what reaches which process --------------------------------------------------------------------


def reward_and_note(args: Any, sample: Sample, **_: Any) -> float:
    """`reward` in the rollout actor, which also writes its environment down."""
    if is_in_run():
        _note_environment("rollout")
    return reward(args, sample)


def trainer_init(args: Any) -> None:
    """--custom-megatron-init-path: the trainer writes its environment down."""
    _note_environment("trainer")


def _note_environment(who: str) -> None:
    import ray

    file = Path(os.environ["SLIME_TEST_HOLD"]) / f"{who}-{os.getpid()}.json"
    text = json.dumps({**os.environ, "node": ray.get_runtime_context().get_node_id()})
    partial = file.with_suffix(f".{threading.get_ident()}")
    partial.write_text(text)
    partial.rename(file)  # whole or not at all


def die_once(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    """--custom-megatron-before-train-step-hook-path: the trainer rank kills itself, or stops,
    before it trains on the rollout that a file beside --save names, die-<k> or stop-<k>; once. With
    the driver's pid in that file it asks the run to stop before, as a scheduler does that signals
    all processes of a job."""
    for word, number in (("die", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        marker = Path(args.save).parent / f"{word}-{rollout_id}"
        if marker.exists():
            if driver := marker.read_text():
                os.kill(int(driver), signal.SIGTERM)
                time.sleep(0.3)
            marker.unlink()
            os.kill(os.getpid(), number)


# -- what is scored, and when ----------------------------------------------------------------------


def reward_and_count(args: Any, sample: Sample, **_: Any) -> float:
    """Takes a moment, waits while <folder>/hold-sample-<index> exists, and appends "index pid time"
    to <folder>/scored in one write, so that it is there whatever is killed next."""
    if not is_in_run():
        return 0.0
    folder, end = Path(os.environ["SLIME_TEST_HOLD"]), time.monotonic() + 240
    time.sleep(0.05)
    while (folder / f"hold-sample-{sample.index}").exists() and time.monotonic() < end:
        (folder / f"held-sample-{sample.index}").touch()
        time.sleep(0.05)
    with open(folder / "scored", "ab", buffering=0) as file:
        file.write(f"{sample.index} {os.getpid()} {time.time()}\n".encode())
    return sum(token % 7 == 0 for token in sample.tokens[-sample.response_length :]) / max(
        1, sample.response_length
    )


async def reward_by_worker(args: Any, sample: Sample, **_: Any) -> float:
    """The reward of `reward_and_count`, if a reward worker can tell that 1 is 1: what it is asked
    must not be lost. Groups from the number in <folder>/hold-groups-from on wait (two minutes at
    most) while it is there."""
    from slime.rollout.loop import current_loop

    if not is_in_run():
        return 0.0
    end = time.monotonic() + 120
    while _is_held(sample) and time.monotonic() < end:
        await asyncio.sleep(0.05)
    grade = await current_loop().rewards._grading.grade("math", "1", "1", 60.0)
    # counted where nothing is to come
    return grade.score * await asyncio.to_thread(reward_and_count, args, sample)


def _is_held(sample: Sample) -> bool:
    file = Path(os.environ["SLIME_TEST_HOLD"]) / "hold-groups-from"
    return (
        sample.group_index is not None
        and file.exists()
        and sample.group_index >= int(file.read_text())
    )


def drop_every_third(args: Any, samples: list[Sample], **_: Any) -> bool:
    """--dynamic-sampling-filter-path: appends "group content" to <folder>/judged, where the content
    is a digest of what was generated: a group that was finished twice is there with two of them."""
    content = [[sample.tokens, sample.rollout_log_probs, sample.reward] for sample in samples]
    digest = hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]
    with open(Path(os.environ["SLIME_TEST_HOLD"]) / "judged", "ab", buffering=0) as file:
        file.write(f"{samples[0].group_index} {digest}\n".encode())
    assert samples[0].group_index is not None
    return samples[0].group_index % 3 != 2


# -- phases of the trainer -------------------------------------------------------------------------


def hold_phases(args: Any) -> None:
    """--custom-megatron-init-path: the trainer waits (a minute at most) where a phase begins while
    <folder>/hold-<phase> exists; then it has written <folder>/held-<phase>: launch, train, save,
    export, sleep, update_weights, paused (in a push), end."""
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.weights.sync import WeightSync

    for owner, method, phase in (
        (MegatronBackend, "train", "train"),
        (MegatronBackend, "save", "save"),
        (MegatronBackend, "export", "export"),
        (MegatronBackend, "sleep", "sleep"),
        (WeightSync, "push", "update_weights"),
        (WeightSync, "_send", "paused"),
        (MegatronBackend, "close", "end"),
    ):
        setattr(owner, method, _held_at(phase, getattr(owner, method)))
    wait_at("launch")


def _held_at(phase: str, method: Any) -> Any:
    def held(*given: Any, **named: Any) -> Any:
        wait_at(phase)
        return method(*given, **named)

    return held


def wait_at(phase: str) -> None:
    folder, end = Path(os.environ["SLIME_TEST_HOLD"]), time.monotonic() + 60
    while (folder / f"hold-{phase}").exists() and time.monotonic() < end:
        (folder / f"held-{phase}").touch()
        time.sleep(0.05)


def critic_dies_once(args: Any) -> None:
    """--custom-megatron-init-path: a rank of a critic of its own dies while it learns, once for
    each file die-critic-<rollout> beside --save."""
    from slime.trainer.megatron.critic_process import CriticProcess

    folder, learn = Path(args.save).parent, CriticProcess.learn

    def dying(process: CriticProcess, *found: Any) -> dict[str, float]:
        assert process._update is not None
        sign = folder / f"die-critic-{process._update.batch.rollout_id}"
        if sign.exists():
            sign.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return learn(process, *found)

    CriticProcess.learn = dying  # type: ignore[method-assign]
