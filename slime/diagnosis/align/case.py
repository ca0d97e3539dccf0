"""The difference under examination, and records of how much of it a cause explains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from slime.diagnosis.align.evidence import Differences, Scored, explained, size
from slime.diagnosis.align.reference import Reference, Sampling
from slime.diagnosis.troubles import Finding, Trouble
from slime.engines.wire.quantised import quantise
from slime.models.ignore_list import examine, matrices
from slime.models.quantised import Quantisation

Side = Literal["engine", "trainer", ""]
#: Mean difference in nats up to which two sides in float32 count as alike: a hundred times that of
#: correct sides.
ALIKE = 1e-3
#: A single token may differ by this multiple of the allowed mean.
_OUTLIER = 50.0
#: Allowed mean, as a multiple of the change by rounding to 16 bits.
_TIMES_ROUNDING = 3.0


class Untested(Exception):
    """Raised with the reason if a cause cannot be tested here."""


class AskableEngine(Protocol):
    """An engine that still answers requests."""

    def score(self, samples: Sequence[Scored], *, together: bool) -> list[list[float]]:
        """Return each sample's log-probs at temperature 1, for all tokens except the first. Sends
        one request at a time, or all at once (``together``)."""

    def fingerprints(self) -> dict[str, str]:
        """Return the fingerprint of each tensor, by its Hugging Face name.

        Raises:
            Untested: this engine gives no fingerprints.
        """

    def tensor(self, name: str) -> Tensor:
        """Return a whole parameter, by its Hugging Face name.

        Raises:
            Untested: this engine does not return whole parameters.
        """


@dataclass
class Discrepancy:
    """A difference between trainer and engine, with everything that is known about it.

    Attributes:
        samples: samples with the log-probs of both sides.
        sampling: the run's sampling parameters.
        reference: None if the model is not available.
        without_reference: why there is no reference.
        engine: the engine; None if it does not answer requests any more.
        tokenizer: the model's tokenizer, or None.
        facts: other facts of the run, for details: "quantization", "dtypes", flags, ….
        stored: how the engine stores weights, if --hf-checkpoint has a quantization_config.
    """

    samples: list[Scored]
    sampling: Sampling = field(default_factory=Sampling)
    reference: Reference | None = None
    without_reference: str = "the model is not available"
    engine: AskableEngine | None = None
    tokenizer: Any = None
    facts: dict[str, Any] = field(default_factory=dict)
    stored: Quantisation | None = None

    # -- the difference ----------------------------------------------------------------------------

    @cached_property
    def base(self) -> list[Tensor]:
        """Log-probs of the reference, [R] per sample."""
        return self.model().of_all(self.samples)

    @cached_property
    def trainer(self) -> list[Tensor]:
        """Log-probs of the trainer, [R] per sample; those of the reference if the run did not keep
        the trainer's."""
        return [
            self.base[i] if s.trainer is None else s.trainer for i, s in enumerate(self.samples)
        ]

    @cached_property
    def differences(self) -> Differences:
        return Differences.of(self.samples, self.trainer)

    @property
    def is_recorded(self) -> bool:
        """Whether the run kept the trainer's log-probs."""
        return all(sample.trainer is not None for sample in self.samples)

    def flat(self, values: Sequence[Tensor]) -> Tensor:
        """Concatenate the values of all counted tokens: [R] per sample → [N]."""
        return torch.cat(
            [value[sample.counted] for value, sample in zip(values, self.samples, strict=True)]
        )

    def model(self) -> Reference:
        """Return the reference.

        Raises:
            Untested: there is no reference.
        """
        if self.reference is None:
            raise Untested(self.without_reference)
        return self.reference

    @cached_property
    def stored_parts(self) -> dict[str, dict[str, Tensor]]:
        """Module → name → tensor: the quantised tensors that a push of the reference's weights
        sends."""
        model = self.model()
        assert self.stored is not None
        chosen = examine(matrices(model.arch.family, model.arch.spec), self.stored).quantised
        weights = {
            one.module: model.store.named[one.weight].to(model.dtype).cpu() for one in chosen
        }
        return {
            module: quantise(module, weight, self.stored.scheme)
            for module, weight in weights.items()
        }

    @cached_property
    def rounding(self) -> float:
        """Mean change of log-probs if the reference rounds to 16 bits like the run; 0 for a run in
        float32."""
        if self.reference is None or not self.reference.as_the_run().rounded:
            return 0.0
        return size(
            self.flat(self.reference.of_all(self.samples, self.reference.as_the_run()))
            - self.flat(self.base)
        )

    @property
    def tolerance(self) -> float:
        """Mean difference up to which the sides count as alike."""
        return max(ALIKE, _TIMES_ROUNDING * self.rounding)

    @property
    def sides_differ(self) -> bool:
        """Whether the sides differ by more than rounding, on average or at a single token."""
        mean = self.differences.mean
        largest = self.differences.largest
        # negated, because NaN differs
        return not (mean <= self.tolerance and largest <= _OUTLIER * self.tolerance)

    @cached_property
    def from_reference(self) -> dict[str, float]:
        """Side → mean absolute difference from the reference."""
        if self.reference is None:
            return {}
        base = self.flat(self.base)
        sides = {"engine": [s.engine for s in self.samples], "trainer": self.trainer}
        return {name: size(self.flat(values) - base) for name, values in sides.items()}

    # -- tries -------------------------------------------------------------------------------------

    def tried(self, what: str, variant: Sequence[Tensor], **more: Any) -> Tried:
        """Measure how much is explained if one side computes like the reference, and the other like
        ``variant``, [R] per sample."""
        change = self.flat(self.base) - self.flat(variant)
        return self.tried_change(what, {"engine": change, "trainer": -change}, **more)

    def tried_change(self, what: str, predicted: Mapping[Side, Tensor], **more: Any) -> Tried:
        """Measure how much of the difference each prediction explains. ``predicted`` is side at
        fault → trainer minus engine, [N]."""
        whole = self.differences.values
        shares = {side: explained(whole, values.nan_to_num()) for side, values in predicted.items()}
        side = max(shares, key=lambda name: shares[name])
        left = size(whole - predicted[side].nan_to_num())
        known = {name: values.nan_to_num() for name, values in predicted.items()}
        return Tried(what, side, shares[side], left, predicted=known, **more)

    def with_setting(
        self,
        what: str,
        *,
        details: tuple[str, ...] = (),
        remedies: tuple[str, ...] = (),
        **changes: Any,
    ) -> Tried:
        """Call `tried` for the reference with changes to its `ReferenceSettings`."""
        model = self.model()
        variant = model.of_all(self.samples, replace(model.setting, **changes))
        return self.tried(what, variant, details=details, remedies=remedies)


@dataclass(frozen=True)
class Tried:
    """A hypothesis with this run's values, and how much it explains.

    Attributes:
        what: the hypothesis, about ``side``: "log-probs are at temperature 1".
        side: the side at fault; "" if the measurement does not show it.
        share: explained share of the mean absolute difference, 0 to 1.
        left: mean absolute difference that stays unexplained, nats per token.
        details: other observations, one per line.
        remedies: remedies with this run's values.
        predicted: side at fault → predicted trainer minus engine, [N]; {} if nothing was
            predicted.
    """

    what: str
    side: Side
    share: float
    left: float
    details: tuple[str, ...] = ()
    remedies: tuple[str, ...] = ()
    predicted: Mapping[Side, Tensor] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class Cause:
    """A cause of differences.

    Attributes:
        trouble: its ``symptom`` is the evidence that the cause leaves; its ``test`` is the
            measurement that tells it from other causes.
        measure: runs the test; each `Tried` is one form of the cause. Raises `Untested`.
    """

    trouble: Trouble
    measure: Callable[[Discrepancy], Iterable[Tried]]

    def finding(self, tried: Tried) -> Finding:
        """Report one form of the cause with this run's values."""
        who = f"the {tried.side}: " if tried.side else ""
        detail = (
            f"{who}{tried.what}; explains {tried.share:.0%}, {tried.left:.3g} nats per token are "
            "left"
        )
        return Finding(self.trouble, "\n".join([detail, *tried.details]), tried.remedies)
