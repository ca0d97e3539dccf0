"""Measure what quantised rollouts cost a toy model in learning, and which corrections help.

    python -m benchmarks.quantised_learning outputs/quantised      # 33 runs of 15 steps: minutes
    python -m benchmarks.quantised_learning outputs/quantised \\
        --picture docs/images/quantised-learning.svg

The trainer and its pushes run in this process on the CPU, and one embedded engine per format in a
process of its own; there is no Ray, so that a run takes seconds. From random weights, one set per
seed, a small Llama (`benchmarks.toy_models`) learns to say one digit: 4 prompts with 4 answers of
8 tokens a step. All of its Linear layers are quantised, including the output layer, which is the
one that learns; this is harder than any recommended list. Finished runs are not repeated, so that
an interrupted call continues.
"""

from __future__ import annotations

import argparse
import json
import statistics
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

FORMATS = ("bf16", "FP8", "INT4")
#: Correction → its flags.
CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "TIS": {"use_tis": True, "tis_clip": 2.0},
    "IcePop": {"use_tis": True, "tis_mode": "icepop", "tis_clip_low": 0.5, "tis_clip": 5.0},
    "fake-quantised": {"fake_quantisation": "linears"},
}
_PROMPTS = 4
_ANSWERS = 4
_LENGTH = 8
Rows = list[dict[str, float]]
Found = dict[tuple[str, str], list[Rows]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    found: Found = {}
    for kind in FORMATS:
        _of_format(options.folder, kind, options.seeds, options.steps, found)
    print(table(found))
    if options.picture is not None:
        options.picture.write_text(_picture(found), encoding="utf-8")


def table(found: Found) -> str:
    """A row for each format and correction, over the seeds."""
    lines = [
        "| engines | correction | reward, last 3 steps | of the worst seed | trainer − engine |",
        "|---|---|--:|--:|--:|",
    ]
    for (kind, name), runs in found.items():
        ends = [statistics.fmean(row["reward"] for row in rows[-3:]) for rows in runs]
        apart = statistics.fmean(row["apart"] for rows in runs for row in rows)
        lines.append(
            f"| {kind} | {name} | {statistics.fmean(ends):.2f} | {min(ends):.2f} | {apart:.4f} |"
        )
    return "\n".join(lines)


def _of_format(folder: Path, kind: str, seeds: int, steps: int, found: Found) -> None:
    """All runs with engines of one kind, which are one server: each run begins with a push of its
    own weights."""
    from benchmarks.engine import server

    wanted = [
        (name, seed)
        for name in CORRECTIONS
        for seed in range(seeds)
        if (kind, name) != ("bf16", "fake-quantised")
    ]
    places = {seed: _models(folder / "models", seed) for seed in range(seeds)}
    with server(places[0][kind], "bfloat16", 1, ["--device", "cpu"]) as url:
        for name, seed in wanted:
            path = folder / f"{kind}-{name}-{seed}.json".lower()
            rows: Rows = json.loads(path.read_text()) if path.is_file() else []
            if len(rows) < steps:
                rows = learn(url, places[seed], kind, seed, steps, CORRECTIONS[name])
                path.write_text(json.dumps(rows))
            found.setdefault((kind, name), []).append(rows)


def _models(folder: Path, seed: int) -> dict[str, Path]:
    """A seed's random weights in each format."""
    from benchmarks.toy_models import write_model
    from slime.checkpoints.quantised_files import quantise_directory
    from slime.models.quantised import Fp8, Int4, Quantisation

    places = {kind: folder / f"{kind}-{seed}" for kind in FORMATS}
    if not places["bf16"].is_dir():
        write_model(places["bf16"], "llama", seed)
    formats = {
        "FP8": Quantisation("fp8", Fp8((16, 16)), ()),
        "INT4": Quantisation("compressed-tensors", Int4(16), ("model.embed_tokens.weight",)),
    }
    for kind, quantisation in formats.items():
        if not places[kind].is_dir():
            quantise_directory(places["bf16"], places[kind], quantisation)
    return places


def learn(
    url: str,
    models: Mapping[str, Path],
    kind: str,
    seed: int,
    steps: int,
    correction: Mapping[str, Any],
) -> Rows:
    """Mean reward, and how far apart trainer and engine are, of each step."""
    from slime.config import make_config
    from slime.processes.host import free_port
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.trainer.megatron.parallel import RankInfo
    from slime.weights.sync import WeightSync

    config = make_config(
        hf_checkpoint=str(models[kind]),
        ref_load=str(models["bf16"]),
        bf16=True,
        seed=seed,
        num_rollout=steps,
        rollout_batch_size=_PROMPTS,
        n_samples_per_prompt=_ANSWERS,
        lr=1e-2,
        lr_decay_style="constant",
        weight_decay=0.0,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=1024,
        **correction,
    )
    backend = MegatronBackend(config, RankInfo(0, 1, 0, "127.0.0.1", free_port()))
    backend.setup()
    assert backend.hf_config is not None
    sync = WeightSync(config, backend.model_chunks, backend.hf_config)
    sync.connect([url])
    rows: Rows = []
    try:
        for step in range(steps):
            sync.push()
            batch = _batch(url, step)
            metrics = backend.train(batch)
            apart = metrics["train/train_rollout_logprob_abs_diff"]
            rows.append({"reward": statistics.fmean(batch.raw_rewards), "apart": apart})
    finally:
        sync.close()
        backend.close()
    return rows


def _batch(url: str, step: int) -> Any:
    """Answers of the engine to four sums, rewarded by the share of one digit in them."""
    import torch

    from benchmarks.toy_models import DIGIT, VOCABULARY
    from slime.algorithms.baseline import normalise_rewards
    from slime.samples.batch import StepPlan, TrainBatch

    sums = [f"{(step * _PROMPTS + number) % 10}+{number}=" for number in range(_PROMPTS)]
    prompts = [
        [VOCABULARY[character] for character in text] for text in sums for _ in range(_ANSWERS)
    ]
    count = len(prompts)

    def answer(prompt: list[int]) -> tuple[list[int], list[float]]:
        params = {"temperature": 1.0, "max_new_tokens": _LENGTH, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        request = urllib.request.Request(
            f"{url}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60.0) as response:
            said = json.load(response)["meta_info"]["output_token_logprobs"]
        return [entry[1] for entry in said], [entry[0] for entry in said]

    with ThreadPoolExecutor(count) as pool:
        answers = list(pool.map(answer, prompts))
    rewards = [tokens.count(VOCABULARY[DIGIT]) / len(tokens) for tokens, _ in answers]
    groups = [number // _ANSWERS for number in range(count)]
    samples = list(range(count))
    lengths = [len(tokens) for tokens, _ in answers]
    return TrainBatch(
        rollout_id=step,
        tokens=[torch.tensor(prompt + tokens) for prompt, (tokens, _) in zip(prompts, answers)],
        response_lengths=lengths,
        loss_masks=[torch.ones(length) for length in lengths],
        rewards=normalise_rewards(rewards, groups, samples),
        raw_rewards=rewards,
        sample_indices=samples,
        group_indices=groups,
        trajectory_ids=samples,
        rollout_mask_sums=[float(length) for length in lengths],
        truncated=[True] * count,
        steps=[StepPlan([samples], global_batch_size=count, num_loss_tokens=sum(lengths))],
        rollout_log_probs=[torch.tensor(log_probs) for _, log_probs in answers],
    )


def _picture(found: Found) -> str:
    """The mean reward of the seeds by step: each kind of engine as it is, and INT4 with each
    correction."""
    from tools.plot_runs import picture

    curves = []
    for (kind, name), runs in found.items():
        if kind == "INT4" or name == "none":
            by_step: list[Sequence[float]] = list(
                zip(*([row["reward"] for row in rows] for rows in runs))
            )
            points = [
                (float(number + 1), statistics.fmean(values))
                for number, values in enumerate(by_step)
            ]
            curves.append((kind if name == "none" else f"{kind}, {name}", points))
    return picture(curves, "reward", "Share of the digit by step, mean of the seeds")


if __name__ == "__main__":
    main()
