"""Read dumps of a run as samples to compare. ``--save-debug-train-data`` holds the log-probs of
both sides, ``--save-debug-rollout-data`` only those of the engine. With both dumps of a rollout,
token ids can be compared, too."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.diagnosis.align.evidence import Scored
from slime.errors import UserError
from slime.models.vision import ImageSpan
from slime.rollout.debug_data import load_samples
from slime.samples.media import Media, media_of
from slime.samples.types import Sample


def read(paths: Sequence[Path]) -> list[Scored]:
    """Read the samples of a dump, or of the two dumps of one rollout.

    Raises:
        UserError: a file is missing or not a dump, two are of one kind, or there are no log-probs.
    """
    trained: list[dict[str, Any]] | None = None
    generated: list[Sample] | None = None
    for path in paths:
        held = _train_data(path)
        if held is None and generated is None:
            generated = load_samples(path)
        elif held is not None and trained is None:
            trained = held
        else:
            raise UserError(
                f"{path} is a second dump of its kind", fix="pass one, or the two of one rollout"
            )
    if trained is not None:
        found = [
            _from_train_data(*pair)
            for pair in zip(trained, _partners(trained, generated or ()), strict=True)
        ]
    else:
        found = [_from_rollout(sample) for sample in generated or ()]
    kept = [sample for sample in found if sample is not None and sample.counted.any()]
    if not kept:
        names = ", ".join(map(str, paths))
        raise UserError(
            f"{names}: no sample with log-probs of the engine",
            why="samples hold them in rollout_log_probs, for the tokens whose loss_mask is 1",
            fix="let the generate function keep them: sample.append_response_tokens(tokens=…, "
            "log_probs=…)",
        )
    return kept


def _train_data(path: Path) -> list[dict[str, Any]] | None:
    """Return the samples of --save-debug-train-data; None if the file is something else."""
    if not path.is_file():
        return None  # `load_samples` reports it
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError):
        return None  # not tensors only: `load_samples` reads it or reports it
    return list(data["samples"]) if isinstance(data, Mapping) and "dp_shards" in data else None


def _partners(
    trained: Sequence[dict[str, Any]], generated: Sequence[Sample]
) -> list[Sample | None]:
    """Find the generated sample of each trained sample: equal tokens and index, else the only
    unmatched sample of that index. Samples of one trajectory share an index."""
    waiting: dict[int | None, list[Sample]] = {}
    for sample in generated:
        waiting.setdefault(sample.index, []).append(sample)
    found: list[Sample | None] = []
    for held in trained:
        here = waiting.get(held["sample_index"], [])
        tokens = held["tokens"].tolist()
        same = next((place for place, sample in enumerate(here) if sample.tokens == tokens), None)
        found.append(None if same is None else here.pop(same))
    alone = Counter(
        held["sample_index"]
        for held, partner in zip(trained, found, strict=True)
        if partner is None
    )
    for place, held in enumerate(trained):
        left = waiting.get(held["sample_index"], [])
        if found[place] is None and len(left) == 1 and alone[held["sample_index"]] == 1:
            found[place] = left.pop()
    return found


def _from_train_data(held: Mapping[str, Any], generated: Sample | None) -> Scored | None:
    if held.get("rollout_log_probs") is None:
        return None
    count = int(held["response_length"])
    trainer = held.get("log_probs")
    scored = _scored(
        f"sample {held['sample_index']}",
        held["tokens"].long(),
        held["rollout_log_probs"].double(),
        None if trainer is None else trainer.double(),
        held["loss_mask"] if held.get("loss_mask") is not None else torch.ones(count),
    )
    version = held.get("weight_version")
    if isinstance(version, int):
        scored.versions = [version] * count
    if generated is not None:
        _add(scored, generated)
    if "images" in held:
        scored.media = [Media(ImageSpan(*span), path) for path, *span in held["images"]]
    return scored


def _from_rollout(sample: Sample) -> Scored | None:
    if not sample.response_length or not sample.rollout_log_probs:
        return None
    mask = [1] * sample.response_length if sample.loss_mask is None else sample.loss_mask
    engine = torch.tensor(sample.rollout_log_probs, dtype=torch.float64)
    scored = _scored(
        f"sample {sample.index}", torch.tensor(sample.tokens), engine, None, torch.tensor(mask)
    )
    _add(scored, sample)
    return scored


def _scored(
    name: str, tokens: Tensor, engine: Tensor, trainer: Tensor | None, mask: Tensor
) -> Scored:
    counted = (mask > 0) & engine.isfinite()
    if trainer is not None:
        counted &= trainer.isfinite()
    return Scored(name, tokens, engine, trainer, counted)


def _add(scored: Scored, sample: Sample) -> None:
    """Add fields that only the rollout's dump has."""
    scored.prompt = sample.prompt
    scored.media = media_of(sample.multimodal_inputs, sample.multimodal_train_inputs)
    if sample.rollout_routed_experts is not None:
        scored.experts = torch.as_tensor(sample.rollout_routed_experts).long()
    if sample.token_spans:
        scored.versions = [None] * scored.response_length
        for span in sample.token_spans:
            scored.versions[span.start : span.end] = [span.weight_version] * (span.end - span.start)
    sent = torch.tensor(sample.tokens)
    if sent.shape != scored.tokens.shape or not torch.equal(sent, scored.tokens):
        scored.sent = sent


def most_telling(samples: Sequence[Scored], most: int) -> list[Scored]:
    """Choose the samples that differ most, with at most ``most`` tokens in all, in their original
    order. Longer samples are cut."""

    def apart(sample: Scored) -> float:
        if sample.trainer is None:
            return 0.0
        return float((sample.trainer - sample.engine)[sample.counted].abs().mean())

    kept: list[int] = []
    left = most
    short = [cut(sample, most) for sample in samples]
    for i in sorted(range(len(samples)), key=lambda number: -apart(samples[number])):
        if not kept or short[i].tokens.numel() <= left:
            kept.append(i)
            left -= int(short[i].tokens.numel())
    return [short[i] for i in sorted(kept)]


def cut(sample: Scored, most: int) -> Scored:
    """Cut a sample to its first ``most`` tokens, or before an image that extends beyond them. A
    sample without counted tokens before the cut stays whole."""
    most = min([most, *(one.span.start for one in sample.media if one.span.end > most)])
    surplus = int(sample.tokens.numel()) - most
    kept = sample.response_length - surplus
    if surplus <= 0 or kept <= 0 or not sample.counted[:kept].any():
        return sample
    return replace(
        sample,
        tokens=sample.tokens[:most],
        engine=sample.engine[:kept],
        trainer=None if sample.trainer is None else sample.trainer[:kept],
        counted=sample.counted[:kept],
        versions=None if sample.versions is None else sample.versions[:kept],
        sent=None if sample.sent is None else sample.sent[:most],
        media=[one for one in sample.media if one.span.end <= most],
    )
