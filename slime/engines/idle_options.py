"""Options that have no effect in the server groups of ``--sglang-config``.

Without that file, the checks of flags warn of such options (`slime.config.checks`). With it, an
override of a group may make an option act, or be one that does not act.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime.config.engine_flags import ENGINE_OPTIONS
from slime.config.flag import FlagSpec
from slime.config.flags import all_flags
from slime.engines.launch import ServedModel, group_options

if TYPE_CHECKING:
    from slime.config.config import Config


def idle_options(config: Config, models: Sequence[ServedModel]) -> Iterator[str]:
    """Yield a warning for each option of the command line that has no effect in any group, and for
    each override that has none in its group.

    Args:
        models: those of ``--sglang-config``; without that file nothing is yielded.
    """
    file = config.engine.sglang_config
    if file is None:
        return
    section = ENGINE_OPTIONS[config.engine.rollout_engine].section
    if not section:
        return
    given: Mapping[str, Any] = getattr(config.engine, section)
    dests = {f"{section}_{name}" for name in given}
    reasons_by_option: dict[str, list[str]] = {name: [] for name in given}
    for model in models:
        for number, group in enumerate(model.groups):
            if not group.num_engines:
                continue
            options = group_options(given, group.overrides, is_policy=model.is_policy)
            values = {dest: value for dest, value in config.values().items() if dest not in dests}
            values |= {f"{section}_{name}": value for name, value in options.items()}
            values["prefill_num_servers"] = group.worker_type in ("prefill", "decode")
            if not model.is_policy:  # the trained adapters are the policy's
                values["lora_rank"] = 0
            for name in group.overrides:
                if reason := _why_idle(all_flags()[f"{section}_{name}"], values):
                    place = f"server group {number} of {model.name}"
                    yield f"{file}: {name} of {place} has no effect{reason}"
            for name in options.keys() - group.overrides.keys():
                reasons_by_option[name].append(_why_idle(all_flags()[f"{section}_{name}"], values))
    for name, reasons in reasons_by_option.items():
        if reasons and all(reasons):
            yield f"{all_flags()[f'{section}_{name}'].option} has no effect{reasons[0]}"


def _why_idle(spec: FlagSpec, values: Mapping[str, Any]) -> str:
    """Return the end of a sentence that says why a value has no effect; "" if it has one, or is the
    default."""
    if values[spec.dest] == spec.default:
        return ""
    if spec.meta.no_effect:
        return f": {spec.meta.no_effect}"
    missing = (need for need in spec.meta.needs if not need.holds(values))
    return next((f" {need.words(values)}: {need.why}" for need in missing), "")
