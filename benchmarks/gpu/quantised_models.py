"""Random weights for `benchmarks.gpu.quantised`, their directories, and what pushes bring of them.

Matrices have a spread of 1/√columns and embeddings of 2/√columns, so that log-probs spread over
some nats and every layer counts. Weights of one seed are the same wherever they are made: the
directories have those of `SERVED`.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.setting import byte_tokenizer
from benchmarks.gpu.trainer import SHAPES

Weights = dict[str, torch.Tensor]

#: Seed of the weights that the directories have, and of others.
SERVED = 1
OTHER = 2
#: Format → words of `slime convert`, without the sizes of groups and blocks.
FORMATS: dict[str, tuple[str, ...]] = {
    "bf16": (),
    "fp8-block": ("hf-to-fp8", "--block_size", "{block}", "{block}"),
    "int4": ("hf-to-int4", "--group_size", "{group}"),
    "fp8-tensor": ("hf-to-fp8", "--per_tensor"),
}


@dataclass(frozen=True)
class Sizes:
    """What of a shape is measured.

    Attributes:
        layers: the first of the model, at most.
        group, block: columns that share a scale in INT4; rows and columns in FP8.
    """

    layers: int
    group: int
    block: int


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def plain(config: dict[str, Any], seed: int) -> Weights:
    """All weights of a model in bfloat16, on the GPU if there is one."""
    from slime.models import family_of

    family = family_of(config)
    found = {}
    for number, (name, shape) in enumerate(family.hf_tensors(family.describe(config))):
        generator = torch.Generator(device()).manual_seed(100_000 * seed + number)
        values = torch.randn(shape, generator=generator, device=device())
        if len(shape) == 1:
            values = 1 + 0.1 * values
        else:
            values *= (2 if "embed_tokens" in name or "lm_head" in name else 1) * shape[-1] ** -0.5
        found[name] = values.bfloat16()
    return found


def stored(
    weights: Iterable[tuple[str, torch.Tensor]], directory: Path
) -> Iterator[tuple[str, torch.Tensor]]:
    """What engines hold of them in the format of a directory. Runs of experts stay runs."""
    from slime.engines.wire.expert_runs import ExpertRun
    from slime.engines.wire.quantised import quantise, quantise_run
    from slime.models import family_of, read_hf_config
    from slime.models.ignore_list import check
    from slime.models.quantised import Quantisation

    config = read_hf_config(directory)
    quantisation = Quantisation.read(config)
    if quantisation is None:
        yield from weights
        return
    family = family_of(config)
    chosen = {
        matrix.weight: matrix.module
        for matrix in check(family, family.describe(config), quantisation).quantised
    }
    for name, weight in weights:
        run = ExpertRun.parse(name)
        if run is not None and run.expert_name(run.first) in chosen:
            yield from quantise_run(run, weight, quantisation.scheme).items()
        elif name in chosen:
            yield from quantise(chosen[name], weight, quantisation.scheme).items()
        else:
            yield name, weight


def differing_bits(weights: Weights, directory: Path) -> int:
    """How many of the first eight weights with their parts come out otherwise on the GPU than on
    the CPU."""
    some: Weights = {}
    for name, weight in weights.items():
        if weight.dim() == 2 and "layers.0" in name and len(some) < 8:
            some[name] = weight
    here = dict(stored(some.items(), directory))
    there = dict(stored(((name, weight.cpu()) for name, weight in some.items()), directory))
    bits = {
        name: (
            part.cpu().contiguous().view(torch.uint8),
            there[name].contiguous().view(torch.uint8),
        )
        for name, part in here.items()
    }
    return sum(not torch.equal(one, other) for one, other in bits.values())


def in_runs(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """With all experts of a projection as one tensor, as pushes of plain weights bring them."""
    from slime.engines.wire.expert_runs import run_name

    stacks: dict[str, list[torch.Tensor]] = {}
    for name, weight in weights.items():
        owner, mark, rest = name.partition(".experts.")
        if mark:
            stacks.setdefault(f"{owner}.experts.0.{rest.partition('.')[2]}", []).append(weight)
        else:
            yield name, weight
    for name, stack in stacks.items():
        yield run_name(name, len(stack) - 1), torch.stack(stack)


def settings_of(shape: str, sizes: Sizes) -> dict[str, Any]:
    """A shape's, with fewer layers. Those with experts get an output layer of their own, as
    published ones have: SGLang gives Qwen3-MoE one whatever config.json says, and nothing would
    load it, so that all answers were alike."""
    settings = dict(SHAPES[shape])
    if "num_experts" in settings:
        settings["tie_word_embeddings"] = False
    return {**settings, "num_hidden_layers": min(sizes.layers, settings["num_hidden_layers"])}


def write_models(shape: str, sizes: Sizes, folder: Path) -> None:
    """folder/bf16, folder/int4, …: complete as soon as they are there. In a process of its own: it
    fills the GPU."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    from slime.checkpoints.hf_files import HfWriter
    from slime.models import read_hf_config

    settings = settings_of(shape, sizes)
    kind = settings.pop("model_type")
    config = AutoConfig.for_model(kind, **settings, eos_token_id=257, bos_token_id=None)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    config.dtype = torch.bfloat16
    assets = folder / "assets"
    config.save_pretrained(assets)
    byte_tokenizer().save_pretrained(assets)
    started = time.perf_counter()
    with HfWriter(folder / "bf16", assets, shard_bytes=1 << 30) as writer:
        for name, weight in plain(read_hf_config(assets), SERVED).items():
            writer.add(name, weight)
    torch.cuda.empty_cache()
    _note(folder, "bf16", started)
    quantise_on_gpu()
    for name, words in FORMATS.items():
        if words:
            started = time.perf_counter()
            said = convert(name, sizes, folder / "bf16", folder / name)
            _note(folder, name, started, said)


def convert(form: str, sizes: Sizes, source: Path, target: Path) -> str:
    """`slime convert` into one of `FORMATS`; what it says, or why it failed."""
    from slime.cli.convert import main

    told = [word.format(group=sizes.group, block=sizes.block) for word in FORMATS[form]]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            main([*told, "--hf_model_path", str(source), "--save_path", str(target)])
    except Exception as error:  # the other formats may work
        print(f"{target}: {error!r}", file=sys.stderr, flush=True)
        return repr(error)
    return said.getvalue()


def quantise_on_gpu() -> None:
    """The converter reads, writes and verifies; what it computes for each weight is computed on the
    GPU here."""
    from slime.checkpoints import quantised_files
    from slime.engines.wire.quantised import Stored, quantise

    def there_and_back(module: str, weight: torch.Tensor, scheme: Any) -> Stored:
        return {
            name: part.cpu() for name, part in quantise(module, weight.to(device()), scheme).items()
        }

    quantised_files.quantise = there_and_back


def _note(folder: Path, name: str, started: float, said: str = "") -> None:
    row = {"format": name, "seconds": round(time.perf_counter() - started, 2), "said": said[:600]}
    with open(folder / "made.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
