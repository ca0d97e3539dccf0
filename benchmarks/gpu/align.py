"""Whether `slime align` names what parts trainer and engine, with a real engine that does it.

    python -m benchmarks.gpu.align --model models/smollm2 \\
        --engine-flags "--attention-backend fa3" --out align.jsonl
    # dry
    python -m benchmarks.gpu.align --engine embedded --shape tiny --prompts 2 --new-tokens 16

Each mistake is made by the engine, or by what asks it: another rotary base, other weights, weights
or cache in 8 bits, a repetition penalty of generation_config.json, a temperature or a chat template
that only one side knows, log-probs or tokens that move on their way. The trainer is Megatron's
model in this process. A mistake is found when its cause comes first; and where nothing is wrong,
nothing may part them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.report import Report, Row, at_least
from benchmarks.gpu.setting import await_engine, engine, make_model, new_parser, workspace
from slime.config import make_config
from slime.diagnosis.align.evidence import Scored
from slime.diagnosis.align.examine import Result, text
from slime.diagnosis.align.prepare import Options, examined
from slime.diagnosis.align.trainer_here import TrainerHere
from slime.engines.client import RolloutClient
from slime.prompts.chat_template import render_prompt
from slime.prompts.tokenizer import load_tokenizer

_QUESTIONS = (
    "What is the capital of {}?",
    "Tell me a tale of {}.",
    "Why do people go to {}?",
    "Count to ten in {}.",
)
_PLACES = (
    "France", "the moon", "Peru", "a small town by the sea", "Kenya", "the old library", "Norway",
    "a farm",
)  # fmt: skip
_PENALTY = 1.3
_OTHER_BASE = 10_000.0


@dataclass(frozen=True)
class Mistake:
    """A way in which the engine, or who asks it, goes wrong.

    Attributes:
        cause: name of the cause that must come first; "" where nothing may part the sides.
        server: which engine answers, see `_SERVERS`.
        params: of the request, besides those that all have.
        bare: the engine gets the question without the chat template.
        on_the_way: what happens to a sample between engine and trainer.
        with_penalty: the model's generation_config.json asks for it.
        sglang: the embedded engine has nothing like it.
    """

    cause: str
    server: str = "sound"
    params: dict[str, Any] = field(default_factory=dict)
    bare: bool = False
    on_the_way: Callable[[Scored], Scored] | None = None
    with_penalty: bool = False
    sglang: bool = False


def _moved(sample: Scored) -> Scored:
    return replace(sample, engine=torch.cat([sample.engine[1:], sample.engine[-1:]]))


def _other_ids(sample: Scored) -> Scored:
    """The trainer gets two other ids than the engine had."""
    tokens = sample.tokens.clone()
    tokens[[sample.prompt_length - 3, sample.prompt_length + 2]] += 1
    return replace(sample, tokens=tokens, sent=sample.tokens)


#: Engine → its flags; what its model directory has otherwise is in `_directory`.
_SERVERS: dict[str, list[str]] = {
    "sound": [],
    "rotary base": [],
    "older weights": [],
    "fp8 weights": ["--quantization", "fp8"],
    "fp8 cache": ["--kv-cache-dtype", "fp8_e5m2", "--attention-backend", "triton"],
}
MISTAKES: dict[str, Mistake] = {
    "nothing": Mistake(""),
    "temperature": Mistake("align-temperature", params={"temperature": 1.0}),
    "bare-question": Mistake("align-template", bare=True),
    "shift": Mistake("align-shift", on_the_way=_moved),
    "other-ids": Mistake("align-tokens", on_the_way=_other_ids),
    "rotary-base": Mistake("align-position", "rotary base"),
    "older-weights": Mistake("align-weights", "older weights"),
    "penalty": Mistake(
        "align-filters", params={"repetition_penalty": _PENALTY}, with_penalty=True, sglang=True
    ),
    "fp8-cache": Mistake("align-quantisation", "fp8 cache", sglang=True),
    "fp8-weights": Mistake("align-quantisation", "fp8 weights", sglang=True),
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=1500, help="that are looked at")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--mistakes", nargs="+", choices=list(MISTAKES), default=list(MISTAKES))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    report = Report("align", args)
    mistakes = {name: MISTAKES[name] for name in args.mistakes}
    if args.engine == "embedded":
        mistakes = {name: mistake for name, mistake in mistakes.items() if not mistake.sglang}
    with workspace() as folder:
        asked: dict[str, tuple[Path, list[Scored]]] = {}
        report.case("answers", lambda: _ask_all(args, folder, mistakes, asked))
        report.case("the trainer's log-probs", lambda: _train(args, asked))
        found = 0
        for name in asked:
            report.case(name, partial(_examine, args, mistakes[name], *asked[name], folder))
            found += bool(report.rows[-1].get("found"))
        report.add("all", {"goals": [at_least("mistakes that are named first", found, len(asked))]})
    return report.finish()


def _config(args: argparse.Namespace, directory: Path) -> Any:
    return make_config(
        hf_checkpoint=str(directory),
        rollout_engine=args.engine,
        rollout_temperature=args.temperature,
        apply_chat_template=True,
        bf16=args.engine == "sglang",
        fp32=args.engine == "embedded",
        rollout_batch_size=1,
        num_rollout=1,
    )


# -- answers ---------------------------------------------------------------------------------------


def _ask_all(
    args: argparse.Namespace,
    folder: Path,
    mistakes: dict[str, Mistake],
    asked: dict[str, tuple[Path, list[Scored]]],
) -> Row:
    """Start all engines at once, ask each what it is needed for, and end them."""
    model = make_model(args, folder)
    urls = dict[str, str]()
    began = time.monotonic()
    directories = {
        name: _directory(name, model, folder) for name in {m.server for m in mistakes.values()}
    }
    with ExitStack() as stack:
        for name, directory in directories.items():
            place = folder / f"logs of {name}"
            place.mkdir()
            given = argparse.Namespace(**vars(args))
            given.engine_flags = " ".join([args.engine_flags, *_SERVERS[name]])
            config = _config(args, directory)
            urls[name] = stack.enter_context(engine(given, config, directory, place, wait=False))
        ready = {name: _is_ready(url, name) for name, url in urls.items()}
        seconds = time.monotonic() - began
        templated = load_tokenizer(str(model)).chat_template
        for name, mistake in mistakes.items():
            if ready[mistake.server] and (templated or not mistake.bare):
                directory = _with_penalty(model, folder) if mistake.with_penalty else model
                samples = asyncio.run(_ask(args, urls[mistake.server], directory, mistake))
                asked[name] = directory, samples
    return {"engines": ready, "seconds_until_all_were_ready": seconds}


def _is_ready(url: str, name: str) -> bool:
    try:
        await_engine(url, 120.0)
    except TimeoutError as error:
        print(f"{name}: {error}", flush=True)
        return False
    return True


def _directory(server: str, model: Path, folder: Path) -> Path:
    """The model as this engine has it."""
    if server not in ("rotary base", "older weights"):
        return model
    place = folder / server
    shutil.copytree(model, place)
    if server == "older weights":
        _change_weights(place)
        return place
    config = json.loads((place / "config.json").read_text())
    if config.get("rope_parameters"):
        config["rope_parameters"]["rope_theta"] = _OTHER_BASE
    config["rope_theta"] = _OTHER_BASE
    (place / "config.json").write_text(json.dumps(config))
    return place


def _with_penalty(model: Path, folder: Path) -> Path:
    place = folder / "a repetition penalty"
    shutil.copytree(model, place)
    path = place / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "repetition_penalty": _PENALTY}))
    return place


def _change_weights(place: Path) -> None:
    """As some steps of training with a large learning rate would."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(place)
    noise = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and ".mlp." in name:
                drawn = torch.randn(weight.shape, generator=noise) * weight.float().std() * 0.05
                weight.add_(drawn.to(weight.dtype))
    model.save_pretrained(place)


async def _ask(
    args: argparse.Namespace, url: str, directory: Path, mistake: Mistake
) -> list[Scored]:
    tokenizer = load_tokenizer(str(directory))
    params = {"max_new_tokens": args.new_tokens, "temperature": args.temperature, **mistake.params}
    texts = [
        _QUESTIONS[i % len(_QUESTIONS)].format(_PLACES[i // len(_QUESTIONS) % len(_PLACES)])
        for i in range(args.prompts)
    ]

    async def one(client: RolloutClient, index: int, words: str) -> Scored:
        rendered = render_prompt(tokenizer, words) if tokenizer.chat_template else words
        prompt = tokenizer.encode(rendered, add_special_tokens=False)
        sent = tokenizer.encode(words, add_special_tokens=False) if mistake.bare else prompt
        answer = await client.generate(sent, params)
        sample = _sample(f"sample {index}", prompt, list(answer.token_ids), list(answer.log_probs))
        return mistake.on_the_way(sample) if mistake.on_the_way else sample

    async with RolloutClient(url, max_concurrency=len(texts)) as client:
        answers = await asyncio.gather(*(one(client, i, words) for i, words in enumerate(texts)))
    return [sample for sample in answers if sample.response_length > 3]


def _sample(name: str, prompt: list[int], ids: list[int], log_probs: list[float]) -> Scored:
    engine_said = torch.tensor(log_probs, dtype=torch.float64)
    return Scored(
        name,
        torch.tensor([*prompt, *ids]),
        engine_said,
        None,
        torch.ones(len(ids), dtype=torch.bool),
    )


# -- the other side, and the verdict ---------------------------------------------------------------


def _train(args: argparse.Namespace, asked: dict[str, tuple[Path, list[Scored]]]) -> Row | None:
    """Add what the trainer says: the weights are the same in all directories that a trainer has
    here."""
    directory = asked["nothing"][0] if "nothing" in asked else next(iter(asked.values()))[0]
    with TrainerHere(_config(args, directory), str(directory)) as trainer:
        for name, (place, samples) in asked.items():
            scores: list[Tensor] = trainer.log_probs(samples, args.temperature)
            asked[name] = (
                place,
                [replace(s, trainer=score) for s, score in zip(samples, scores, strict=True)],
            )
    return None


def _examine(
    args: argparse.Namespace, mistake: Mistake, directory: Path, samples: list[Scored], folder: Path
) -> Row:
    began = time.monotonic()
    older = folder / "older weights"
    also = older if mistake.server == "older weights" else None
    options = Options(
        directory, also=also, most_tokens=args.max_tokens, always=True, with_parts=not mistake.cause
    )
    result = examined(_config(args, directory), samples, options)
    print(text(result), flush=True)
    return {
        "cause": mistake.cause,
        "found": _is_found(result, mistake),
        "mean_difference": result.case.differences.mean,
        "tolerance": result.case.tolerance,
        "seconds": time.monotonic() - began,
        "from_reference": result.case.from_reference,
        "tokens": int(result.case.differences.values.numel()),
        "ranking": [
            (r.cause.trouble.name, r.best.side, r.best.what, r.best.share)
            for r in result.ranked[:4]
        ],
    }


def _is_found(result: Result, mistake: Mistake) -> bool:
    if not mistake.cause:
        return not result.sides_differ
    return bool(result.reported) and result.reported[0].cause.trouble.name == mistake.cause


if __name__ == "__main__":
    sys.exit(main())
