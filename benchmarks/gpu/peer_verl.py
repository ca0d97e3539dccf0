"""A colocated GRPO step of verl against one of this loop: one GPU, the same SGLang, the same work.

    pip install --no-deps "verl==0.9.1" "tensordict==0.10.*" hydra-core omegaconf codetiming \\
        torchdata TransferQueue
    python -m benchmarks.gpu.peer_verl --models MODELS --steps 5 --out peer.jsonl \\
        --engine-flags "--attention-backend fa3 --sampling-backend pytorch --grammar-backend none"
    # without a GPU: compose verl's configuration and read the data
    python -m benchmarks.gpu.peer_verl --shape tiny --prepare FOLDER

The work: random weights of --shape, --prompts × --samples responses of exactly --new-tokens tokens
(both engines ignore the end token), prompts of the same bytes, temperature 1, a reward by lot, no
KL, no reference, AdamW with float32 masters, one optimizer step per rollout. verl runs as its
documentation has it for speed: FSDP2, packed sequences, micro-batches by tokens, parameters and
optimizer on the GPU while SGLang sleeps, no gradient checkpointing; attention is flash-attn-4, as
ours. In the case "verl" it computes old log-probs in a pass of its own, as is its default; in
"verl-bypass" it takes the engine's, which saves that pass. Ours takes those of the training pass.
The first --warm-up steps do not count. The ratio is against the faster of verl's cases.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.report import BudgetSpent, Report, Row, at_least
from benchmarks.gpu.setting import (
    made_up_prompts,
    make_model,
    median,
    new_run_parser,
    run_training,
    workspace,
)

HERE = Path(__file__).resolve().parent
CASES = ("slime", "verl", "verl-bypass")
PROMPT_TOKENS = 256  # at most, as in `run_training`
_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_TURN_END = "<|im_end|>"
_FIXED_LENGTH = '{"ignore_eos":true}'
_PHASES = ("gen", "old_log_prob", "adv", "update_actor", "update_weights", "step")


# -- verl ------------------------------------------------------------------------------------------


def write_data(args: argparse.Namespace, folder: Path) -> Path:
    """Write the prompts as verl reads them."""
    import pyarrow
    import pyarrow.parquet

    rows = [
        {
            "data_source": "made_up",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, text in enumerate(made_up_prompts(4 * args.prompts))
    ]
    path = folder / "prompts.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def write_tokenizer(model: Path, folder: Path) -> Path:
    """Write the model's tokenizer with what verl needs of a Qwen3: a token that ends a turn, and a
    template, which adds nothing here."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if tokenizer.convert_tokens_to_ids(_TURN_END) in (None, tokenizer.unk_token_id):
        tokenizer.add_tokens([_TURN_END], special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
    path = folder / "tokenizer"
    tokenizer.save_pretrained(path)
    shutil.copy(model / "config.json", path)
    return path


def overrides(
    args: argparse.Namespace, model: Path, tokenizer: Path, data: Path, bypass: bool
) -> list[str]:
    """verl's settings, as its command line takes them."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    hf = "actor_rollout_ref.model"
    length = PROMPT_TOKENS + args.new_tokens
    given: dict[str, Any] = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "algorithm.rollout_correction.bypass_mode": bypass,
        "data.train_files": data,
        "data.val_files": data,
        "data.train_batch_size": args.prompts,
        "data.max_prompt_length": PROMPT_TOKENS,
        "data.max_response_length": args.new_tokens,
        "data.val_max_samples": 8,
        "data.dataloader_num_workers": 1,
        f"{hf}.path": model,
        f"{hf}.tokenizer_path": tokenizer,
        f"{hf}.use_remove_padding": True,
        f"{hf}.enable_gradient_checkpointing": False,
        f"+{hf}.override_config.attn_implementation": args.attention,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.reshard_after_forward": False,
        f"{actor}.optim.lr": "1e-6",
        f"{actor}.ppo_mini_batch_size": args.prompts,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": args.verl_tokens,
        f"{actor}.use_kl_loss": False,
        f"{actor}.entropy_coeff": 0,
        f"{rollout}.name": "sglang",
        f"{rollout}.n": args.samples,
        f"{rollout}.temperature": 1.0,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.gpu_memory_utilization": args.verl_memory,
        f"{rollout}.max_num_seqs": 1024,
        f"{rollout}.max_model_len": length + 8,
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": args.verl_tokens,
        f"+{rollout}.engine_kwargs.sglang.preferred_sampling_params": _quoted(_FIXED_LENGTH),
        "reward.custom_reward_function.path": HERE / "verl_side.py",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.logger": '["console","file"]',
        "trainer.project_name": "peer",
        "trainer.experiment_name": "run",
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.total_training_steps": args.steps,
        "trainer.total_epochs": args.steps,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.resume_mode": "disable",
        # its actors reserve CPUs for themselves; this counts them, it does not pin
        "ray_kwargs.ray_init.num_cpus": max(24, os.cpu_count() or 1),
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init.address": "local",
    }
    for name, value in _engine_options(args.engine_flags).items():
        given[f"+{rollout}.engine_kwargs.sglang.{name}"] = value
    return [*(f"{key}={value}" for key, value in given.items()), *args.verl_more.split()]


def _quoted(text: str) -> str:
    """As a string in Hydra's grammar."""
    return "'" + text.replace("'", "\\'") + "'"


def _engine_options(flags: str) -> dict[str, str]:
    """``--attention-backend fa3 --disable-x`` → attention_backend: fa3, disable_x: true."""
    found: dict[str, str] = {}
    name = ""
    for word in flags.split():
        if word.startswith("--"):
            name = word[2:].replace("-", "_")
            found[name] = "true"
        else:
            found[name] = word
    return found


def environment(metrics: Path) -> dict[str, str]:
    """verl's variables: no network, its metrics into a file, this folder's module everywhere."""
    root = HERE.parents[1]
    known = os.environ.get("PYTHONPATH")
    path = [str(HERE), str(root), *([known] if known else [])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path),
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "VERL_USE_EXTERNAL_MODULES": "verl_side",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        # SGLang is imported in actors without a GPU too, and looks at it
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "HYDRA_FULL_ERROR": "1",
        # compiled kernels of attention serve the next process too, as on our side
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
    }


def measure_verl(args: argparse.Namespace, model: Path, folder: Path, case: str) -> Row:
    """Run verl and return its seconds by phase.

    Raises:
        RuntimeError: it failed; its last lines are on stderr.
    """
    folder.mkdir(parents=True, exist_ok=True)
    metrics = folder / "metrics.jsonl"
    data, tokenizer = write_data(args, folder), write_tokenizer(model, folder)
    words = overrides(args, model, tokenizer, data, bypass=case == "verl-bypass")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *words]
    arrivals: list[float] = []
    ended = threading.Event()
    clock = threading.Thread(target=_note_arrivals, args=(metrics, arrivals, ended), daemon=True)
    started = time.monotonic()
    clock.start()
    try:
        run_peer(command, folder, environment(metrics), lambda: len(arrivals) >= args.warm_up + 2)
    finally:
        ended.set()
        clock.join()
    rows = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if "timing_s/step" in row]
    found = verl_row(args, rows)
    found["start_seconds"] = (arrivals[0] if arrivals else time.monotonic()) - started
    between = [b - a for a, b in itertools.pairwise(arrivals)]
    # from one step's metrics to the next one's, what verl does outside its own "step" included
    if steady := between[max(args.warm_up - 1, 0) :]:
        found["wall_seconds"] = median(steady)
    return found


def verl_row(args: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> Row:
    """Medians behind the warm-up."""
    steady = list(rows[args.warm_up :] or rows)
    seconds = {
        name: median([row.get(f"timing_s/{name}", 0.0) for row in steady]) for name in _PHASES
    }
    lengths = [row["response_length/mean"] for row in steady if "response_length/mean" in row]
    return {
        **speed(args, seconds["step"], median(lengths)),
        "seconds": seconds,
        "memory_gb": max(
            (row.get("perf/max_memory_reserved_gb", 0.0) for row in rows), default=0.0
        ),
        "raw": [
            {key: value for key, value in row.items() if key.startswith(("timing_s/", "perf/"))}
            for row in rows
        ],
    }


def _note_arrivals(path: Path, arrivals: list[float], ended: threading.Event) -> None:
    """Append the time at which each line was there."""
    while not ended.wait(0.05):
        if not path.exists():
            continue
        lines = path.read_bytes().count(b"\n")
        arrivals.extend([time.monotonic()] * (lines - len(arrivals)))


# -- slime -----------------------------------------------------------------------------------------


def measure_slime(args: argparse.Namespace, model: Path, folder: Path) -> Row:
    folder.mkdir(parents=True, exist_ok=True)
    options = argparse.Namespace(**vars(args))
    if args.engine == "sglang":
        options.engine_flags += f" --preferred-sampling-params {_FIXED_LENGTH}"
    more = ["--colocate", "--actor-num-gpus-per-node", "1"]
    if args.slime_tokens:
        more += ["--max-tokens-per-gpu", str(args.slime_tokens)]
    stage = run_training(
        "train.py", options, model, folder, [*more, *args.more.split()],
        prompt_tokens=PROMPT_TOKENS,
    )  # fmt: skip
    rows = [row for row in stage.rows if "perf/step_time" in row]
    steady = rows[args.warm_up :] or rows
    names = sorted({name for row in steady for name in row if name.endswith("_time")})
    seconds = {
        name.removeprefix("perf/"): median([row.get(name, 0.0) for row in steady]) for name in names
    }
    lengths = [
        row["rollout/response_len/mean"] for row in steady if "rollout/response_len/mean" in row
    ]
    return {
        **speed(args, seconds["step_time"], median(lengths)),
        "seconds": seconds,
        "raw": rows,
    }


# -- both ------------------------------------------------------------------------------------------


def run_peer(
    command: list[str], folder: Path, variables: dict[str, str], enough: Callable[[], bool]
) -> None:
    """Run the other system in ``folder``, with its output in log.txt there.

    Where the time of --budget ends first, it is ended; that is no error if it had done ``enough``.

    Raises:
        RuntimeError: it failed; its last lines are on stderr.
    """
    log = folder / "log.txt"
    with open(log, "wb") as output:
        process = subprocess.Popen(command, cwd=folder, env=variables, stdout=output, stderr=output)
        try:
            status = process.wait()
        except BaseException as error:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            if not isinstance(error, BudgetSpent) or not enough():
                _show_end(log)
                raise
            status = 0
    if status:
        _show_end(log)
        raise RuntimeError(f"{' '.join(command[:3])} ended with exit status {status}")


def _show_end(log: Path, lines: int = 80) -> None:
    text = log.read_text(errors="replace").splitlines()[-lines:]
    print("\n".join(text), file=sys.stderr, flush=True)


def speed(args: argparse.Namespace, step: float, length: float) -> Row:
    samples = args.prompts * args.samples
    prompt = len(made_up_prompts(1)[0])
    return {
        "shape": str(args.model or args.shape),
        "step_seconds": step,
        "mean_length": length,
        "samples_per_second": samples / step,
        "new_tokens_per_second": samples * length / step,
        "tokens_per_second": samples * (prompt + length) / step,
    }


def compare(rows: list[Row], peer: str) -> Row:
    """Ours against the fastest of the cases whose names begin with ``peer``."""
    speeds = {row["case"]: row["samples_per_second"] for row in rows if "samples_per_second" in row}
    peers = {case: found for case, found in speeds.items() if case.startswith(peer)}
    if "slime" not in speeds or not peers:
        return {"skipped": "no result of one side"}
    best = max(peers, key=lambda case: peers[case])
    ratio = speeds["slime"] / peers[best]
    print(
        f"slime {speeds['slime']:.2f} samples/s, {best} {peers[best]:.2f} samples/s: {ratio:.2f} ×",
        flush=True,
    )
    return {**speeds, "goals": [at_least(f"samples/s, slime ÷ {best}", ratio, 1.5)]}


def run_cases(
    args: argparse.Namespace, peer: str, measure_peer: Callable[..., Row], title: str = ""
) -> int:
    """Measure --cases and compare them; return the exit status.

    Args:
        peer: the other system, with whose name its cases begin.
        measure_peer: measures one of its cases: (args, model, folder, case) → row.
        title: the system's name in the report; default: ``peer``.
    """
    report = Report(f"colocated step against {title or peer}", args)
    with workspace() as scratch:
        folder = args.keep.resolve() if args.keep is not None else scratch
        folder.mkdir(parents=True, exist_ok=True)
        model = make_model(args, scratch).resolve()
        for case in args.cases:
            if case == "slime":
                measure = partial(measure_slime, args, model, folder / case)
            else:
                measure = partial(measure_peer, args, model, folder / case, case)
            report.case(case, measure)
        report.case("ratio", partial(compare, report.rows, peer))
    return report.finish()


def prepare(args: argparse.Namespace, folder: Path) -> None:
    """Write model, data and command line; compose verl's configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    model = make_model(args, folder).resolve()
    data, tokenizer = write_data(args, folder), write_tokenizer(model, folder)
    words = overrides(args, model, tokenizer, data, bypass=False)
    (folder / "overrides.txt").write_text("\n".join(words) + "\n")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job", "--resolve", *words]
    done = subprocess.run(
        command, env=environment(folder / "metrics.jsonl"), capture_output=True, text=True
    )
    (folder / "config.yaml").write_text(done.stdout)
    print(done.stderr[-2000:] if done.returncode else f"composed: {folder / 'config.yaml'}")
    done.check_returncode()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    parser = new_run_parser(__doc__, prompts=64, samples=8, new_tokens=1024, steps=5)
    add = parser.add_argument
    add("--cases", nargs="+", choices=CASES, default=list(CASES))
    add("--warm-up", type=int, default=2, help="steps that do not count")
    add("--attention", default="flash_attention_4", help="verl's: transformers' name of it")
    add("--verl-tokens", type=int, default=16384, help="of a micro-batch of verl (its default)")
    add("--verl-memory", type=float, default=0.7, help="share of the GPU for verl's SGLang")
    add("--verl-more", default="", help="more overrides for verl, in one word")
    add("--slime-tokens", type=int, help="of a micro-batch of ours (default: the memory plan's)")
    add("--keep", type=Path, help="keep logs and metrics in this folder")
    add("--prepare", type=Path, metavar="FOLDER", help="run nothing")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    if args.prepare is not None:
        prepare(args, args.prepare.resolve())
        return 0
    return run_cases(args, "verl", measure_verl)


if __name__ == "__main__":
    sys.exit(main())
