"""Causes that need answers of the engine: the weights that it holds, and whether other requests in
its batch change its log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slime.diagnosis.align.case import AskableEngine, Discrepancy, Tried, Untested
from slime.diagnosis.align.evidence import explained, size
from slime.diagnosis.align.reference import Reference
from slime.engines.wire.buckets import fingerprint
from slime.errors import first_few

_NAMED = 5
#: Dtypes in which an engine may hold its weights.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: Factor for the share of a difference between two answers of the engine, which has many possible
#: causes.
_UNSPECIFIC = 0.9


def weights(case: Discrepancy) -> Iterator[Tried]:
    """Test whether the engine holds other weights than the trainer."""
    model = case.model()
    tried = False
    for label, directory in (case.facts.get("other_weights") or {}).items():
        other = Reference(directory, model.dtype, images=model.images)
        with model.holding(other.store.named):
            yield case.tried(
                f"log-probs are those of the weights in {label}", model.of_all(case.samples)
            )
        tried = True
    if case.facts.get("weights_compared"):
        yield Tried(
            "all weights arrived: the round has compared them after its push",
            "",
            0.0,
            case.differences.mean,
        )
        return
    if case.engine is None:
        if tried:
            return
        raise Untested("there is no engine to ask: --engine URL, or a fresh round")
    held = case.engine.fingerprints()
    differing, compared = _differing(case, held)
    if not compared:
        raise Untested("the engine names its tensors otherwise than the model")
    remedies = ("--check-weight-update-equal names them at every push",)
    if not differing:
        what = (
            f"all {compared} of {len(held)} tensors of the engine that can be compared are the "
            "trainer's"
        )
        yield Tried(what, "", 0.0, case.differences.mean)
        return
    what = f"{len(differing)} of {compared} tensors differ: {first_few(differing, _NAMED)}"
    theirs, kept_back = _given_out(case.engine, _weights_of(case, differing))
    with model.holding(theirs):
        engine = model.of_all(case.samples)
    change = case.flat(case.base) - case.flat(engine)
    yield case.tried_change(
        what,
        {"engine": change},
        details=(*_how(model.store.named, theirs), *kept_back),
        remedies=remedies,
    )


def _given_out(engine: AskableEngine, names: Sequence[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Return the engine's tensors, and the reasons for tensors that it does not return."""
    theirs = {}
    kept_back = []
    for name in names:
        try:
            theirs[name] = engine.tensor(name).float()
        except Untested as reason:
            kept_back.append(f"not computed with: {reason}")
    return theirs, kept_back


def _differing(case: Discrepancy, held: Mapping[str, str]) -> tuple[list[str], int]:
    """Return the names of engine tensors that differ from the reference in every dtype, and the
    number of compared tensors. Quantised tensors are compared in the form that a push sends."""
    model = case.model()
    found = []
    compared = 0
    parts = case.stored_parts.values() if case.stored is not None else ()
    stored = {name: tensor for tensors in parts for name, tensor in tensors.items()}
    for name, theirs in held.items():
        mine = stored.get(name, model.store.named.get(name))
        if mine is None:
            continue
        compared += 1
        dtypes = (mine.dtype,) if name in stored else _DTYPES
        if all(fingerprint(mine.to(dtype).cpu()) != theirs for dtype in dtypes):
            found.append(name)
    return found, compared


def _weights_of(case: Discrepancy, names: Sequence[str]) -> list[str]:
    """Return the weights of tensors, which may be quantised parts of a weight."""
    modules = case.stored_parts.items() if case.stored is not None else ()
    weight_of = {name: f"{module}.weight" for module, parts in modules for name in parts}
    return list(dict.fromkeys(weight_of.get(name, name) for name in names))


def _how(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Describe the tensors that differ most: by how much, or which other tensor they equal."""
    lines = []
    apart = {}
    for name, value in theirs.items():
        mine = ours[name].to(value.device)
        apart[name] = float((value - mine).norm() / mine.norm().clamp(min=1e-12))
    for name in sorted(apart, key=lambda key: -apart[key])[:_NAMED]:
        value = theirs[name]
        alike = (n for n, t in ours.items() if n != name and t.shape == value.shape)
        twin = next((n for n in alike if torch.allclose(ours[n].to(value.device), value)), None)
        kind = (
            "all zeros"
            if not value.any()
            else f"it is {twin}"
            if twin
            else f"off by {apart[name]:.1%} of its norm"
        )
        lines.append(f"{name}: {kind}")
    return tuple(lines)


def batch(case: Discrepancy) -> Iterator[Tried]:
    """Test whether the engine's log-probs depend on other requests in its batch."""
    if case.engine is None:
        raise Untested("there is no engine to ask: --engine URL, or a fresh round")
    alone, together = (
        _as_tensors(case, case.engine.score(case.samples, together=both)) for both in (False, True)
    )
    change = case.flat(alone) - case.flat(together)
    apart = size(change)
    what = f"asked alone it differs by {apart:.3g} on average from what it says in company"
    remedies = (
        "--sglang-enable-deterministic-inference",
        "--sglang-disable-radix-cache, to see whether it is the cache",
    )
    yield case.tried_change(what, {"engine": change}, remedies=remedies)
    if case.sampling.temperature != 1.0:
        return  # engines score given tokens at temperature 1, not at the run's temperature
    again = case.flat(alone) - torch.cat([sample.engine[sample.counted] for sample in case.samples])
    share = explained(case.differences.values, again)
    what = (
        "asked again, alone, it says other log-probs than when it sampled: of its cache, its batch "
        "or its decoding"
    )
    left = size(case.differences.values - again)
    yield Tried(what, "engine", share * _UNSPECIFIC, left, remedies=remedies)


def _as_tensors(case: Discrepancy, answers: Sequence[Sequence[float]]) -> list[Tensor]:
    """Return the response's part of each answer, [R]."""
    return [
        torch.tensor(answer[-sample.response_length :], dtype=torch.float64)
        for sample, answer in zip(case.samples, answers, strict=True)
    ]
