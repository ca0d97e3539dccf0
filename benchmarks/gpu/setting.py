"""What the measurements of engines and of whole runs share: random weights, engines and routers as
processes, runs."""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.trainer import SHAPES
from slime.cluster.server_process import ServerProcess
from slime.config import Config
from slime.engines.kinds import engine_kind
from slime.engines.launch import EnginePlace, LaunchSpec
from slime.engines.router import router_command
from slime.errors import UserError
from slime.observe.console import phase_seconds
from slime.observe.run_data import Stage, read_run
from slime.processes.host import num_gpus, reserve_port
from slime.samples.types import Sample

HOST = "127.0.0.1"
ROOT = Path(__file__).parents[2]


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """With the arguments that every measurement has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", choices=list(SHAPES), default="qwen3-0.6b", help="random weights of this shape"
    )
    parser.add_argument(
        "--model", type=Path, help="a Hugging Face directory instead of random weights"
    )
    parser.add_argument(
        "--models", type=Path, help="keep random weights in this folder and use them again"
    )
    parser.add_argument("--engine", choices=["sglang", "embedded"], default="sglang")
    parser.add_argument(
        "--engine-flags", default="", help="of its server, in one word: --engine-flags='--x 1'"
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="measurements; medians are reported (default: 5)"
    )
    report.add_arguments(parser)
    return parser


def new_run_parser(
    description: str | None, *, prompts: int, samples: int, new_tokens: int, steps: int
) -> argparse.ArgumentParser:
    """`new_parser` with what `run_training` needs; the numbers are defaults."""
    parser = new_parser(description)
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="of the trainer, and of engines that have their own")
    add("--prompts", type=int, default=prompts)
    add("--samples", type=int, default=samples)
    add("--new-tokens", type=int, default=new_tokens)
    add("--steps", type=int, default=steps)
    add("--more", default="", help="more flags for the run, in one word: --more='--no-save'")
    return parser


# -- random weights --------------------------------------------------------------------------------


def make_model(args: argparse.Namespace, folder: Path) -> Path:
    """``--model``, or a directory with random weights in bfloat16 and a byte tokenizer."""
    if args.model is not None:
        return Path(args.model)
    path = (args.models or folder) / args.shape
    if (path / "tokenizer.json").exists():  # it is written last
        return path
    write_apart(_write_model, args.shape, path)
    return path


def write_apart(write: Callable[[str, Path], None], shape: str, path: Path) -> None:
    """Write random weights; on a GPU in a process of its own, which gives back the memory that it
    fills.

    Raises:
        RuntimeError: that process failed.
    """
    if not num_gpus():
        write(shape, path)
        return
    process = mp.get_context("spawn").Process(target=write, args=(shape, path))
    process.start()
    process.join()
    if process.exitcode:
        raise RuntimeError(f"writing random weights ended with exit status {process.exitcode}")


def _write_model(shape: str, path: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from benchmarks.gpu import vision_models

    settings = dict(SHAPES[shape])
    kind = settings.pop("model_type")
    if kind in ("qwen3_5_text", "qwen3_5_moe_text"):
        vision_models.write_qwen3_5(settings, path)
        return
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        config = AutoConfig.for_model(kind, **settings, eos_token_id=257, bos_token_id=None)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)


def byte_tokenizer() -> Any:
    """A token for each byte, without merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {
        character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    vocabulary |= {"<pad>": 256, "<eos>": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


@contextmanager
def workspace() -> Iterator[Path]:
    """A folder for a while; this process and its children may open as many files as the host
    allows, for a thousand requests in flight take more than the usual 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory(
        prefix="slime-benchmark-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def gpu_ids(first: int, count: int) -> tuple[str, ...]:
    """Some of the GPUs that this process sees, as CUDA_VISIBLE_DEVICES spells them; () on a CPU.

    Raises:
        ValueError: it sees fewer.
    """
    here = num_gpus()
    if not here:
        return ()
    if first + count > here:
        raise ValueError(f"this takes {first + count} GPUs, {here} are here")
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = seen.split(",") if seen else [str(number) for number in range(here)]
    return tuple(names[first : first + count])


# -- servers ---------------------------------------------------------------------------------------


@contextmanager
def engine(
    args: argparse.Namespace,
    config: Config,
    model: Path,
    folder: Path,
    gpus: tuple[str, ...] = (),
    tp: int = 1,
    wait: bool = True,
) -> Iterator[str]:
    """Base URL of an engine.

    Args:
        gpus: ids of those that it sees; () for the environment's.
        tp: its tensor-parallel size.
        wait: until it is ready; else see `await_engine`.
    """
    with ExitStack() as stack:
        held = [reserve_port(HOST), reserve_port(HOST)]
        for reservation in held:
            stack.callback(reservation.release)
        port = held[0].port
        spec = engine_kind(args.engine).command(
            config, str(model), HOST, port, EnginePlace(0, gpus, tp, held[1].port)
        )
        spec.argv.extend(args.engine_flags.split())
        url = _served(stack, "engine", spec, port, folder, wait)
        try:
            yield url
        except BaseException:
            _show_log(folder / "engine.log")
            raise


@contextmanager
def router(config: Config, folder: Path, url: str) -> Iterator[str]:
    """Base URL of a router in front of an engine."""
    import asyncio

    from slime.engines.router import register_workers

    with ExitStack() as stack:
        reservation = reserve_port(HOST)
        stack.callback(reservation.release)
        spec = router_command(config, HOST, reservation.port, [url])
        front = _served(stack, "router", spec, reservation.port, folder)
        asyncio.run(register_workers(front, [url], timeout=60.0))
        yield front


def await_engine(url: str, seconds: float = 400.0) -> None:
    """Until an engine that was started without waiting answers.

    Raises:
        TimeoutError: it does not.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass  # it does not listen yet
        time.sleep(0.5)
    raise TimeoutError(f"{url} was not ready within {seconds:.0f} s")


def _served(
    stack: ExitStack, name: str, spec: LaunchSpec, port: int, folder: Path, wait: bool = True
) -> str:
    process = ServerProcess(name, spec, f"http://{HOST}:{port}", folder / f"{name}.log")
    process.start()
    stack.callback(process.stop)
    if not wait:
        return process.url
    started = time.perf_counter()
    try:
        process.wait_ready()
    except BaseException:
        _show_log(folder / f"{name}.log")
        raise
    print(f"{name} ready after {time.perf_counter() - started:.0f} s", flush=True)
    return process.url


def _show_log(path: Path, lines: int = 60) -> None:
    print(
        "\n".join(path.read_text(errors="replace").splitlines()[-lines:]),
        file=sys.stderr,
        flush=True,
    )


# -- whole runs ------------------------------------------------------------------------------------


def reward(args: Any, sample: Sample) -> float:
    """A coin, the same for the same response: random weights have nothing better to be judged
    by."""
    return float(sum(sample.tokens) % 2)


def made_up_prompts(count: int) -> list[str]:
    """Texts of which the byte tokenizer makes the same number of tokens."""
    return [f"Tell me about the number {i:06d}. " * 4 for i in range(count)]


def run_training(
    script: str,
    args: argparse.Namespace,
    model: Path,
    folder: Path,
    more: Sequence[str],
    rows: Iterable[Mapping[str, Any]] | None = None,
    prompt_tokens: int = 256,
) -> Stage:
    """``script`` (train.py, train_async.py) as users run it, on made-up prompts; the rows of its
    metrics.

    Where the time of --budget ends first, and two steps have been done, it returns the rows until
    then (`Report.case` marks the case as cut).

    Random weights answer with noise until the limit, so that every sample has the full length.

    Args:
        args: of `new_run_parser`.
        folder: for data and outputs; a fresh one.
        rows: of the data, instead of made-up text.
        prompt_tokens: no prompt has more.
    Raises:
        RuntimeError: the run failed; its last lines are on stderr.
    """
    data = folder / "prompts.jsonl"
    if rows is None:
        rows = ({"prompt": text, "label": ""} for text in made_up_prompts(4 * args.prompts))
    length = args.new_tokens + prompt_tokens
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = {
        "--hf-checkpoint": model,
        "--prompt-data": data,
        "--input-key": "prompt",
        "--label-key": "label",
        "--rollout-engine": args.engine,
        "--rollout-batch-size": args.prompts,
        "--n-samples-per-prompt": args.samples,
        "--num-rollout": args.steps,
        "--rollout-max-response-len": args.new_tokens,
        "--rollout-max-context-len": length,
        "--custom-rm-path": "benchmarks.gpu.setting.reward",
        "--lr": "1e-6",
        "--output-dir": folder,
        "--run-name": "run",
    }
    words = [str(word) for pair in given.items() for word in pair]
    command = [sys.executable, str(ROOT / script), *words, *engine_flags(args), *more]
    with subprocess.Popen(command, cwd=ROOT) as driver:
        try:
            status = driver.wait()
        except BaseException as error:
            driver.terminate()  # it ends its processes when it is asked to
            with suppress(subprocess.TimeoutExpired):
                driver.wait(30)
            driver.kill()
            stage = None
            if isinstance(error, report.BudgetSpent):
                with suppress(UserError):  # the run had not begun
                    stage = read_run(folder / "run").stages[-1]
            if stage is None or sum("perf/step_time" in row for row in stage.rows) < 2:
                raise
            return stage
    if status:
        for log in sorted((folder / "run" / "logs").glob("*.log")):
            tail = log.read_text(errors="replace").splitlines()[-25:]
            print(f"-- {log.name}\n" + "\n".join(tail), file=sys.stderr, flush=True)
        raise RuntimeError(f"{script} ended with exit status {status}")
    return read_run(folder / "run").stages[-1]


def engine_flags(args: argparse.Namespace) -> list[str]:
    """``--engine-flags`` as a run takes them: ``--attention-backend`` is its
    ``--sglang-attention-backend``."""
    prefix = "--sglang-" if args.engine == "sglang" else "--"
    words = args.engine_flags.split()
    return [prefix + word.removeprefix("--") if word.startswith("--") else word for word in words]


def named_share(steps: Sequence[dict[str, Any]]) -> float:
    """Share of the time of these steps that was in phases with a name."""
    named = sum(sum(phase_seconds(row).values()) for row in steps)
    return float(named / sum(row["perf/step_time"] for row in steps))


def median(values: Sequence[float]) -> float:
    return float(statistics.median(values))
