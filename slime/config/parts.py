"""Parts that a run lacks, and flags that only these parts read.

Runs of half the loop, evaluations without training and supervised fine-tuning without engines lack
parts. A flag for a missing part causes a warning, as launch scripts keep the flags of a whole run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from slime.config.draft import Draft
from slime.config.flag import EVALUATES, EVALUATION_SETTING, GENERATES, SAMPLES, FlagSpec, Part

_ENGINES: tuple[Part, ...] = ("generation", "engine", "router", "push")
#: These parts also read sampling flags, even if samples are loaded instead of generated.
_TAKE_SAMPLES: tuple[Part, ...] = ("samples", "training")


def absent(values: Mapping[str, Any]) -> dict[Part, str]:
    """Return the parts that a run with these flag values lacks, and why.

    Example:
        >>> absent({**make_config().flat().__dict__, "debug_rollout_only": True})["trainer"]
        'no trainer is started (--debug-rollout-only)'
    """
    found: dict[Part, str] = {}

    def lacks(parts: Iterable[Part], why: str) -> None:
        for part in parts:
            found.setdefault(part, why)

    if values["load_debug_rollout_data"] is not None:
        why = "samples are loaded, and no engine is started (--load-debug-rollout-data)"
        lacks(_ENGINES, why)
        if values["num_epoch"] is None:  # with --num-epoch the run's length needs the data set
            lacks(("collection",), why)
    if values["debug_train_only"]:
        lacks(_ENGINES, "no engine is started (--debug-train-only)")
    if not GENERATES.holds(values):
        lacks(_ENGINES, "there is no engine, as nothing is generated")
    if values["debug_rollout_only"]:
        lacks(("trainer", "training", "push"), "no trainer is started (--debug-rollout-only)")
    if values["num_rollout"] == 0:
        lacks(("training", "collection", "samples"), "nothing is trained (--num-rollout 0)")
    return found


def left_out(draft: Draft) -> list[str]:
    """Return a warning that names the given flags that only missing parts read; [] if there are
    none.

    Flags whose unmet `needs` already caused an error or a warning are skipped, as are flags from
    which a value for a present part is derived.
    """
    missing = absent(draft.values)
    if not missing:
        return []
    ignored: dict[str, str] = {}
    for dest in draft.given.values:
        spec = draft.specs[dest]
        if not _is_requested(draft, spec) or not all(
            need.holds(draft.values) for need in spec.meta.needs
        ):
            continue
        if why := _why_left_out(draft, spec, missing):
            ignored[spec.option] = why
    if not ignored:
        return []
    reasons = " and ".join(dict.fromkeys(ignored.values()))
    return [f"{reasons}; left out: {', '.join(sorted(ignored))}"]


def _is_requested(draft: Draft, spec: FlagSpec) -> bool:
    """Tell whether the user set another value than the default; False for a derived switch is not
    counted."""
    if spec.meta.refused or spec.meta.no_effect:
        return False
    return draft.differs(spec.dest) and not (spec.meta.derived and draft[spec.dest] is False)


def _why_left_out(draft: Draft, spec: FlagSpec, missing: Mapping[Part, str]) -> str:
    """Return why no part of the run reads the flag, or "" if one does."""
    needs = spec.meta.needs
    if SAMPLES in needs and "collection" in missing and "samples" in missing:
        return missing["samples"]
    takes_samples = any(part in spec.meta.read_by and part not in missing for part in _TAKE_SAMPLES)
    if (
        {GENERATES, EVALUATES, EVALUATION_SETTING} & set(needs)
        and "generation" in missing
        and not takes_samples
    ):
        return missing["generation"]
    readers = [
        part for dest in _with_derived(draft, spec.dest) for part in draft.specs[dest].meta.read_by
    ]
    readers = [part for part in readers if part != "config"]
    return missing[readers[0]] if readers and all(part in missing for part in readers) else ""


def _with_derived(draft: Draft, dest: str) -> list[str]:
    """Return the flag, and all flags whose formulas depend on it directly or indirectly."""
    found = [dest]
    for one in found:  # also those that the loop adds
        name = re.compile(rf"\b{one}\b")
        found += [
            other
            for other, origin in draft.origins.items()
            if other not in found and origin.startswith("derived: ") and name.search(origin)
        ]
    return found
