"""What a model that sees images costs on text alone, against the text model inside it.

    python benchmarks/text_of_seeing.py --rounds 15 --out text_of_seeing.json

Sides, each a process with one thread:
    text     Qwen3
    control  Qwen3 again, which tells how far apart equal sides come out
    part     Qwen3-VL without --multimodal-keys: its text part
    frozen   Qwen3-VL with --multimodal-keys and a frozen tower, on rows without images
    trained  the same with a tower that is trained: the optimizer has its parameters, too

A round is one supervised step of each side's trainer, and one batch of prompts through each side's
embedded engine; the sides take turns in an order that changes. Compared is CPU time, which other
processes of the machine disturb little: of each round a side's time over that of `text`, and of
these the median with its quartiles.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

VOCABULARY = 2048
SAMPLES = 8
PROMPT = 64
RESPONSE = 64
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}
#: A fifth of the decoder's parameters, as published models of 2B have it.
TOWER: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_heads": 4,
    "patch_size": 16,
    "out_hidden_size": 256,
    "num_position_embeddings": 256,
    "deepstack_visual_indexes": [0, 1],
}
KEYS: dict[str, Any] = {"multimodal_keys": {"image": "images"}}
FROZEN: dict[str, Any] = {"freeze_vision_tower": True, "freeze_vision_projector": True}
#: Side → which model, and the flags of its trainer.
SIDES: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("text", {}),
    "control": ("text", {}),
    "part": ("seeing", {}),
    "frozen": ("seeing", KEYS | FROZEN),
    "trained": ("seeing", KEYS),
}


def write_models(folder: Path) -> dict[str, Path]:
    """Write a text model, and one that sees images around another of the same shape."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    torch.manual_seed(0)
    transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)).save_pretrained(
        folder / "text"
    )
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [6, 5, 5]}
    config = transformers.Qwen3VLConfig(
        text_config={**SHAPE, "rope_parameters": rope | {"mrope_interleaved": True}},
        vision_config=TOWER,
        image_token_id=VOCABULARY - 1,
        video_token_id=VOCABULARY - 2,
        vision_start_token_id=VOCABULARY - 3,
        vision_end_token_id=VOCABULARY - 4,
        tie_word_embeddings=True,
    )
    model = transformers.Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(folder / "seeing")
    Qwen2VLImageProcessorPil(patch_size=16).save_pretrained(folder / "seeing")
    return {name: folder / name for name in ("text", "seeing")}


def text_tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, VOCABULARY - 8), k=length)


def trainer_of(model: Path, flags: dict[str, Any]) -> Callable[[], None]:
    """Return a function that trains one step on samples without images."""
    from slime.config import make_config
    from slime.processes.host import reserve_port
    from slime.samples.batch import StepPlan, TrainBatch
    from slime.trainer.megatron.backend import MegatronBackend
    from slime.trainer.megatron.parallel import RankInfo

    config = make_config(
        hf_checkpoint=str(model),
        loss_type="sft_loss",
        rollout_batch_size=1,
        num_rollout=1,
        fp32=True,
        **flags,
    )
    place = RankInfo(0, 1, 0, "127.0.0.1", reserve_port("127.0.0.1").port)
    backend = MegatronBackend(config, place)
    backend.setup()
    batch = TrainBatch(
        rollout_id=0,
        tokens=[torch.tensor(text_tokens(PROMPT + RESPONSE, seed)) for seed in range(SAMPLES)],
        response_lengths=[RESPONSE] * SAMPLES,
        loss_masks=[torch.ones(RESPONSE)] * SAMPLES,
        rewards=[0.0] * SAMPLES,
        raw_rewards=[0.0] * SAMPLES,
        sample_indices=list(range(SAMPLES)),
        group_indices=list(range(SAMPLES)),
        trajectory_ids=list(range(SAMPLES)),
        rollout_mask_sums=[float(RESPONSE)] * SAMPLES,
        truncated=[False] * SAMPLES,
        steps=[StepPlan([list(range(SAMPLES))], SAMPLES, SAMPLES * RESPONSE)],
    )

    def step() -> None:
        backend.train(batch)

    return step


def engine_of(model: Path, sees_images: bool) -> Callable[[], None]:
    """Return a function that generates answers to prompts without images."""
    from slime.embedded.architecture import Architecture
    from slime.embedded.kv_cache import KVCache
    from slime.embedded.scheduler import Scheduler
    from slime.embedded.sequence import Sequence
    from slime.embedded.weights import make_store
    from slime.engines.request_fields import parse_params

    arch = Architecture.from_dir(model, sees_images)
    store = make_store(model, arch, "float32", torch.device("cpu"), 512, False)
    cache = KVCache(arch, store.dtype, store.device, SAMPLES, 1 << 30, False)
    scheduler = Scheduler(store, cache, 2048, False)
    params = {"max_new_tokens": RESPONSE, "ignore_eos": True, "sampling_seed": 1}

    def generate() -> None:
        scheduler.flush()
        parsed = parse_params(params, VOCABULARY)
        scheduler.submit(
            [
                Sequence(str(seed), text_tokens(PROMPT, seed), parsed, RESPONSE, frozenset(), seed)
                for seed in range(SAMPLES)
            ]
        )
        while scheduler.has_work:
            scheduler.step()

    return generate


def side(pipe: Connection, model: Path, flags: dict[str, Any]) -> None:
    """Serve one side: answer each name of a part with its CPU seconds."""
    torch.set_num_threads(1)
    parts = {"engine": engine_of(model, bool(flags)), "trainer": trainer_of(model, flags)}
    pipe.send("ready")
    while (name := pipe.recv()) is not None:
        started = time.process_time()
        parts[name]()
        pipe.send(time.process_time() - started)


def measure(rounds: int, folder: Path) -> dict[str, dict[str, list[float]]]:
    """Return part → side → CPU seconds of each round."""
    models = write_models(folder)
    context = mp.get_context("spawn")
    pipes = {}
    for name, (model, flags) in SIDES.items():
        pipes[name], theirs = context.Pipe()
        context.Process(target=side, args=(theirs, models[model], flags), daemon=True).start()
        assert pipes[name].recv() == "ready"
    order = list(SIDES)
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(rounds + 1):
        random.Random(number).shuffle(order)
        for part in ("trainer", "engine"):
            for name in order:
                pipes[name].send(part)
                taken = pipes[name].recv()
                if number:  # the first round warms up
                    seconds.setdefault(part, {}).setdefault(name, []).append(taken)
    for pipe in pipes.values():
        pipe.send(None)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write the seconds of all rounds there")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(options.rounds, Path(folder))
    for part, sides in seconds.items():
        base = sides["text"]
        print(f"{part}: text {statistics.median(base):.3f} CPU s")
        for name in list(SIDES)[1:]:
            ratios = [own / other for own, other in zip(sides[name], base, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"  {name:8} {middle:.4f} ({low:.4f} to {high:.4f})")
    if options.out is not None:
        options.out.write_text(json.dumps(seconds))


if __name__ == "__main__":
    main()
