"""Prompts and rewards for tests of the whole loop, with the models of `benchmarks.toy_models`.

The prompts are sums ("3+4="), and the reward is the share of a chosen digit in the response. A
policy learns it from random weights within a dozen steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.toy_models import DIGIT, EOS, VOCABULARY, character_tokenizer, write_model
from slime.samples.types import Sample
from slime.user_code.hooks import DataSource


def write_answering_model(folder: Path) -> Path:
    """A Llama that answers a sum ("3+4=") with a digit by chance and ends its turn: each token
    follows from the one before alone, as the layers between embedding and output add nothing
    yet."""
    import torch
    from transformers import AutoModelForCausalLM

    write_model(folder, "llama")
    model = AutoModelForCausalLM.from_pretrained(folder)
    digits = [VOCABULARY[str(digit)] for digit in range(10)]
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(*model.model.embed_tokens.weight.shape))
        model.lm_head.weight.fill_(0.0)
        # the norm makes 8 of the 1 in the embedding
        model.lm_head.weight[digits, VOCABULARY["="]] = 2.0
        model.lm_head.weight[VOCABULARY[EOS], digits] = 2.0
    model.save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path, chat_template: str | None = None) -> Path:
    """A directory with the tokenizer alone: what a look at data needs of a model."""
    tokenizer = character_tokenizer()
    tokenizer.chat_template = chat_template or tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return folder


def write_data(path: Path, count: int = 50) -> Path:
    """``count`` different sums with their results."""
    assert count <= 100
    rows = [
        {"prompt": f"{i // 10}+{i % 10}=", "label": f"{i // 10 + i % 10}"} for i in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# -- hooks, named by path in the flags -------------------------------------------------------------


def digit_share(args: Any, sample: Sample, **_: Any) -> float:
    """Share of `DIGIT` among the tokens of the response."""
    response = sample.tokens[-sample.response_length :]
    return sum(token == VOCABULARY[DIGIT] for token in response) / max(1, len(response))


def distinct_share(args: Any, sample: Sample, **_: Any) -> float:
    """Share of distinct tokens: differs between responses under any policy, so that there is always
    a gradient."""
    response = sample.tokens[-sample.response_length :]
    return len(set(response)) / max(1, len(response))


async def with_a_tool(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Two turns of the model, a tool's answer after each."""
    from slime.rollout.generate import generate

    for length in (3, 8):
        sample = await generate(args, sample, {**sampling_params, "max_new_tokens": length})
        sample.append_response_tokens(tokens=[VOCABULARY["="], VOCABULARY["1"]], trainable=False)
    return sample


async def at_temperature_one(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The mistake of a user's function: the engine is not told --rollout-temperature."""
    from slime.rollout.generate import generate

    return await generate(args, sample, {**sampling_params, "temperature": 1.0})


async def with_other_experts(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """`with_a_tool`, and experts (of four) that the engine did not choose."""
    sample = await with_a_tool(args, sample, sampling_params)
    sample.rollout_routed_experts = 3 - sample.rollout_routed_experts
    return sample


def group_rank(args: Any, samples: list[Sample], **_: Any) -> list[float]:
    """A reward of the whole group: each sample's rank by `digit_share`, from 0 to 1."""
    shares = [digit_share(args, sample) for sample in samples]
    return [sum(other < share for other in shares) / max(1, len(shares) - 1) for share in shares]


def engines_look_remote(args: Any) -> None:
    """Runs in the trainer (``--custom-megatron-init-path``): engines of this host pass for those of
    another one, to which no memory leads, so that weights go by broadcast."""
    from slime.weights import route

    route.is_local = lambda url: False


class SumSource(DataSource):
    """Sums made on the spot; resumes through files of its own, at what training has taken."""

    def __init__(self, args: Any) -> None:
        self.args, self.next, self.consumed = args, 0, 0

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        first, self.next = self.next, self.next + num_samples
        return [self._group(number) for number in range(first, self.next)]

    def _group(self, number: int) -> list[Sample]:
        n, prompt = self.args.n_samples_per_prompt, f"{number % 10}+{number // 10}="
        return [Sample(group_index=number, index=number * n + i, prompt=prompt) for i in range(n)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        raise AssertionError("a deterministic rollout without a filter draws what it needs")

    def mark_consumed(self, group_indices: Iterable[int]) -> None:
        self.consumed = max([self.consumed, *(index + 1 for index in group_indices)])

    def save(self, rollout_id: int) -> None:
        folder = Path(self.args.save) / "rollout"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"sums_{rollout_id}").write_text(str(self.consumed))

    def load(self, rollout_id: int | None = None) -> None:
        self.next = self.consumed = int(
            (Path(self.args.load) / "rollout" / f"sums_{rollout_id}").read_text()
        )
