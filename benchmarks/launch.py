"""Seconds of launches of a toy model on CPU: a first one, and others in the same Ray.

    python benchmarks/launch.py
    SLIME_PRELOAD=0 python benchmarks/launch.py       # every process imports its own modules

A launch ends when trainer and engine have the first weights. CPU seconds are those of all
processes, this one and Ray's daemons included.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import ray

from benchmarks.toy_models import write_model
from slime.cluster.ray_session import start_ray
from slime.config import make_config
from slime.run.session import open_session


def cpu_seconds() -> float:
    """Return what this process and all its descendants have computed."""
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system + times.children_user + times.children_system
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--launches", type=int, default=3, help="how many (default: %(default)s)")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="launch-"))
    model = write_model(folder / "qwen3", "qwen3")
    data = folder / "prompts.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": f"{i}+1=", "label": "1"}) + "\n" for i in range(9))
    )
    for number in range(args.launches):
        load = os.getloadavg()[0]
        began = time.perf_counter()
        before = cpu_seconds()
        config = make_config(
            hf_checkpoint=str(model),
            prompt_data=str(data),
            input_key="prompt",
            label_key="label",
            rm_type="random",
            num_rollout=1,
            rollout_batch_size=2,
            n_samples_per_prompt=2,
            global_batch_size=4,
            rollout_max_response_len=4,
            rollout_max_context_len=32,
            colocate=True,
            fp32=True,
            output_dir=str(folder / "outputs"),
            run_name=f"launch-{number}",
        )
        if number == 0:
            start_ray(config, 4)
        with open_session(config):
            wall = time.perf_counter() - began
            used = cpu_seconds() - before
        print(
            f"launch {number}: {wall:.1f} s, {used:.1f} CPU s, load before {load:.1f}", flush=True
        )
    ray.shutdown()


if __name__ == "__main__":
    main()
