"""Tools of the trainer tests: tiny models, random batches, and one pool of rank processes for all
parallel layouts."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import logging
import multiprocessing as mp
import multiprocessing.util
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from slime.config import Config, make_config
from slime.models.spec import ModelSpec
from slime.processes.garbage import freeze_gc
from slime.processes.host import free_port
from slime.samples.batch import StepPlan, TrainBatch
from tests.support.gloo_loop import end_gloo_loop, share_gloo_loop

JOB_DEADLINE = 120.0
#: That `Pools.once` keeps.
_MOST_ANSWERS = 8
VOCAB = 97


def tiny_spec(
    *, tie: bool = True, qk_norm: bool = True, padded: int = 100, layers: int = 2
) -> ModelSpec:
    """A Llama or Qwen3 of a few thousand parameters whose vocabulary of 97 is padded to
    ``padded``."""
    return ModelSpec(
        family="qwen3" if qk_norm else "llama",
        transformer={
            "num_layers": layers,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "kv_channels": 16,
            "normalization": "RMSNorm",
            "layernorm_epsilon": 1e-5,
            "gated_linear_unit": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "qk_layernorm": qk_norm,
            "init_method_std": 0.2,
        },
        activation="silu",
        vocab_size=VOCAB,
        rotary_base=1000.0,
        tie_embeddings=tie,
        padded_vocab_size=padded,
    )


def trainer_config(**flags: Any) -> Config:
    """float32, one optimizer step, a learning rate large enough to see; ``flags`` override."""
    defaults: dict[str, Any] = {
        "rollout_batch_size": 6,
        "num_rollout": 10,
        "fp32": not flags.get("bf16", False),
        "lr": 1e-2,
        "rollout_temperature": 0.8,
    }
    if flags.get("loss_type") == "sft_loss":  # only an evaluation has a sampling temperature then
        defaults["eval_prompt_data"] = ("held-out", "held-out.jsonl")
    if flags.get("loss_type") == "preference_loss":
        del defaults["rollout_temperature"]
    config = make_config(**{**defaults, **flags})
    return config


def make_batch(
    micro_batches: Sequence[Sequence[int]] | None = None,
    *,
    num_samples: int = 6,
    seed: int = 0,
    num_steps: int = 1,
) -> TrainBatch:
    """Samples of 4 to 24 tokens for one data-parallel rank; two of them are one trajectory."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    lengths = [integer(4, 25) for _ in range(num_samples)]
    responses = [integer(1, length) for length in lengths]
    masks = [(torch.rand(r, generator=generator) > 0.2).float() for r in responses]
    for mask in masks:
        mask[0] = 1.0
    trajectories = [0, 0, *range(1, num_samples - 1)]
    sums = [
        sum(float(masks[j].sum()) for j in range(num_samples) if trajectories[j] == e)
        for e in trajectories
    ]
    if micro_batches is None:
        micro_batches = [
            list(range(start, min(start + 2, num_samples))) for start in range(0, num_samples, 2)
        ]
    per_step = len(micro_batches) // num_steps
    steps = [
        StepPlan(
            [list(mb) for mb in micro_batches[k * per_step : (k + 1) * per_step]],
            global_batch_size=num_samples - 1,
            num_loss_tokens=int(sum(float(m.sum()) for m in masks)),
        )
        for k in range(num_steps)
    ]
    return TrainBatch(
        rollout_id=0,
        tokens=[torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths],
        response_lengths=responses,
        loss_masks=masks,
        rewards=[(-1.0) ** i * (1 + i / 4) for i in range(num_samples)],
        raw_rewards=[0.0] * num_samples,
        sample_indices=[100 + i for i in range(num_samples)],
        group_indices=[0] * num_samples,
        trajectory_ids=trajectories,
        rollout_mask_sums=sums,
        truncated=[False] * num_samples,
        steps=steps,
        positions=list(range(num_samples)),
        rollout_log_probs=[-3 * torch.rand(r, generator=generator) for r in responses],
    )


def preference_batch(
    pairs: Sequence[Sequence[Sequence[int]]] = (((0, 1), (2, 3)), ((4, 5),), ((6, 7),)),
    *,
    seed: int = 0,
    mismatched: bool = False,
    at_end: bool = False,
) -> TrainBatch:
    """Eight answers for one data-parallel rank: pairs (chosen, rejected), or answers by label.

    Args:
        pairs: the micro-batches, each a list of trajectories.
        mismatched: each trajectory is an answer with a label, and one of reward 0 that is scored.
        at_end: one token of each answer is trained, the last one, as for a reward model.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCAB, (3 + i,), generator=generator) for i in range(4)]
    answers = [torch.randint(0, VOCAB, (2 + (3 * i) % 7,), generator=generator) for i in range(8)]
    masks = [(torch.rand(len(answer), generator=generator) > 0.3).float() for answer in answers]
    masks[3][:] = 0.0  # an answer that trains nothing
    if at_end:
        masks = [torch.tensor([0.0] * (len(answer) - 1) + [1.0]) for answer in answers]
    micro_batches = [[i for trajectory in part for i in trajectory] for part in pairs]
    scored = [[i for i in part if i % 2] for part in micro_batches] if mismatched else []
    if mismatched:
        micro_batches = [[i for i in part if i % 2 == 0] for part in micro_batches]
        rewards = [0.0 if i % 2 else (1.0 if i in (0, 4, 6) else -1.0) for i in range(8)]
    else:
        rewards = [(-1.0) ** i for i in range(8)]
    return TrainBatch(
        rollout_id=0,
        tokens=[torch.cat([prompts[i // 2], answers[i]]) for i in range(8)],
        response_lengths=[len(answer) for answer in answers],
        loss_masks=masks,
        rewards=rewards,
        raw_rewards=list(rewards),
        sample_indices=list(range(8)),
        group_indices=[i // 2 for i in range(8)],
        trajectory_ids=[i // 2 for i in range(8)],
        rollout_mask_sums=[1.0] * 8,
        truncated=[False] * 8,
        steps=[StepPlan(micro_batches, 4, int(sum(float(m.sum()) for m in masks)), scored)],
    )


def shard(
    batch: TrainBatch,
    members: Sequence[int],
    micro_batches: Sequence[Sequence[int]],
    scored: Sequence[Sequence[int]] = (),
) -> TrainBatch:
    """The data-parallel rank that has these samples of ``batch``; ``micro_batches`` and ``scored``
    index into ``members``."""

    def pick(values: Any) -> Any:
        return None if values is None else [values[i] for i in members]

    first = batch.steps[0]
    return TrainBatch(
        rollout_id=batch.rollout_id,
        tokens=pick(batch.tokens),
        response_lengths=pick(batch.response_lengths),
        loss_masks=pick(batch.loss_masks),
        rewards=pick(batch.rewards),
        raw_rewards=pick(batch.raw_rewards),
        sample_indices=pick(batch.sample_indices),
        group_indices=pick(batch.group_indices),
        trajectory_ids=pick(batch.trajectory_ids),
        rollout_mask_sums=pick(batch.rollout_mask_sums),
        truncated=pick(batch.truncated),
        steps=[
            StepPlan(
                [list(mb) for mb in micro_batches],
                first.global_batch_size,
                first.num_loss_tokens,
                [list(mb) for mb in scored],
            )
        ],
        positions=pick(batch.positions) if batch.positions else [],
        rollout_log_probs=pick(batch.rollout_log_probs),
        media=pick(batch.media) if batch.media else [],
        images=batch.images,
        payloads={name: pick(column) for name, column in batch.payloads.items()},
        global_stats=dict(batch.global_stats),
    )


def _context() -> Any:
    """How ranks are started: forked from a process that has imported, once for all of them, what
    they need (see `fork_rank_server`). A GPU that was looked at cannot be used after a fork."""
    if torch.cuda.is_available():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(
        [
            "pytest",
            "hypothesis",
            "tests.support.tiny_models",
            "tests.support.megatron_jobs",
            "tests.support.parity",
            # what many test modules import, which each rank would import with them
            "slime.run.session",
            "slime.rollout.loop",
            "slime.embedded.server",
            "tests.support.embedded_models",
            "transformers.modeling_utils",
            "transformers.quantizers.auto",
            "tests.support.frozen_imports",  # the last one
        ]
    )
    return context


def fork_rank_server() -> None:
    """Start the process that ranks are forks of as a fork of this one, which has imported most of
    what they need: 7 CPU seconds less than a new Python. A fork loses threads, so if there are any,
    or a GPU, this does nothing, and the first pool starts a new Python."""
    names = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
    # pyarrow's allocator starts its thread again in a fork
    if torch.cuda.is_available() or len(names) - names.count("jemalloc_bg_thd") > 1:
        return
    _context()
    resource_tracker.ensure_running()  # which stays a new Python
    with patch.object(mp.util, "spawnv_passfds", _fork_server):
        forkserver.ensure_running()


def _fork_server(path: str, argv: Sequence[str], kept: Sequence[int]) -> int:
    """`multiprocessing.util.spawnv_passfds` of ``python -c program``, without a new Python."""
    pid = os.fork()
    if pid:
        return pid
    try:
        # among them the end of the pipe by which the server knows that this process lives
        for name in os.listdir("/proc/self/fd"):
            if int(name) > 2 and int(name) not in kept:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        for logger in (logging.getLogger(), *logging.Logger.manager.loggerDict.values()):
            handlers = getattr(logger, "handlers", [])
            # one of pytest's writes to a descriptor that is closed
            handlers[:] = [
                one for one in handlers if not type(one).__module__.startswith("_pytest")
            ]
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115  (pytest's were closed)
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
        faulthandler.enable()
        exec(argv[-1], {})
    except SystemExit:  # the server's end
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


class RankPool:
    """Processes that stay: each job makes its process groups, runs a function on every rank, and
    leaves them again."""

    def __init__(self, size: int) -> None:
        context = _context()
        self.size = size
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, size), daemon=True)
            process.start()
            self.pipes.append(ours)
            self.processes.append(process)

    def run(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """``job(rank_info, *args)`` on every rank; results in rank order. A rank's exception is
        raised here, and ends the pool."""
        port = free_port()
        for pipe in self.pipes:
            pipe.send((job, port, args))
        results: dict[int, Any] = {}
        end = time.monotonic() + JOB_DEADLINE
        while len(results) < self.size:
            for pipe in wait(
                [p for i, p in enumerate(self.pipes) if i not in results], timeout=1.0
            ):
                ok, value = pipe.recv()  # type: ignore[union-attr]
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                if not ok:  # the other ranks may wait for this one for ever
                    self.kill()
                    raise AssertionError(f"rank {rank}:\n{value}")
                results[rank] = value
            if time.monotonic() > end:
                self.kill()
                raise TimeoutError(
                    f"no result within {JOB_DEADLINE:.0f} s from all but ranks {sorted(results)}"
                )
        return [results[rank] for rank in range(self.size)]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()


class _KeyPickler(pickle.Pickler):
    """Writes a tensor by its values: pickled, equal ones differ."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return str, (f"{value.dtype} {tuple(value.shape)} {value.tolist()}",)
        return NotImplemented


def _key_of(value: Any) -> bytes:
    buffer = io.BytesIO()
    _KeyPickler(buffer).dump(value)
    return buffer.getvalue()


class Pools:
    """The pools that all tests share, by number of processes; started on first use, and anew after
    a failure."""

    def __init__(self) -> None:
        self._pools: dict[int, RankPool] = {}
        self._answers: dict[bytes, list[Any]] = {}

    def once(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """`run`, done once for equal arguments: what several cases are compared with. Of a job
        that leaves nothing behind; the caller changes nothing in the answer."""
        key = _key_of((size, job, args))
        if key not in self._answers:
            while len(self._answers) >= _MOST_ANSWERS:
                del self._answers[next(iter(self._answers))]
            self._answers[key] = self.run(size, job, *args)
        return self._answers[key]

    def run(self, size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
        """``job(rank_info, *args)`` on each of ``size`` ranks; see `RankPool.run`."""
        if size not in self._pools:
            self._pools[size] = RankPool(size)
        pool = self._pools[size]
        try:
            return pool.run(job, *args)
        except (AssertionError, OSError, EOFError):  # its processes have ended, or are ended there
            self._pools.pop(size).close()
            raise

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def _serve(pipe: Connection, rank: int, size: int) -> None:
    torch.set_num_threads(1)
    from slime.trainer.megatron.backend import MegatronBackend  # noqa: F401  (installs the device redirect)
    from slime.trainer.megatron.parallel import RankInfo, shut_down

    share_gloo_loop()
    freeze_gc()
    while True:
        try:
            job, port, args = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            result = (True, job(RankInfo(rank, size, rank, "127.0.0.1", port), *args))
        except BaseException:
            result = (False, traceback.format_exc())
        finally:
            shut_down()
            end_gloo_loop()
            gc.collect()  # groups are in cycles, and each has threads
        pipe.send(result)
