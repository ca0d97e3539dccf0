"""Detect inputs of a run that have changed between two launches: data, models, users' functions.

Each launch writes fingerprints of its inputs to ``run.json``. The next launch compares them and
warns of the consequences.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.config.flag import option_of
from slime.config.teachers import BASE, SELF
from slime.data_path import split_name, split_slice
from slime.errors import UserError
from slime.files import content_fingerprint
from slime.rollout.journal import MAKERS
from slime.run.ancestry import affects_training
from slime.user_code.hooks import HOOKS
from slime.user_code.loading import fingerprint

#: Flags for data that is only scored, never trained on.
_HELD_OUT = ("eval_prompt_data", "eval_preference_data")
_AGAIN = "groups in the journal are generated again"
_STAYS = "what was trained on before stays in the weights"


def fingerprints(config: Config) -> dict[str, str]:
    """Return "flag value" → a hash of the content, for each input that exists.

    Example:
        >>> fingerprints(config)  # doctest: +SKIP
        {'--prompt-data sums.jsonl': '9b1f…', '--hf-checkpoint Qwen3-4B': '03ac…', …}
    """
    return {
        f"{option_of(flag)} {value}": found
        for flag, value in _inputs(config)
        if (found := _fingerprint(flag, value))
    }


def changes(
    config: Config, now: Mapping[str, str], before: Mapping[str, Any], checkpoint: Path | None
) -> list[str]:
    """Return a warning for each input whose content has changed since an earlier launch.

    Args:
        now, before: `fingerprints` of this launch and the earlier one. Flags whose value differs
            were changed on purpose and are left out.
        checkpoint: the checkpoint from which the run resumes; None if it has none yet.
    """
    weights = "the run begins anew with the weights of it"
    if checkpoint:
        weights = f"the weights are those of {checkpoint}"
    return [
        f"{name} has changed since the last launch of this run: {_consequence(flag, weights)}"
        for flag, value in _inputs(config)
        if (name := f"{option_of(flag)} {value}") in now
        and before.get(name) not in (None, now[name])
    ]


def _consequence(flag: str, weights: str) -> str:
    if flag == "prompt_data":
        return (
            "groups in the journal whose prompt and label are the same are trained on as they are, "
            "others are generated again; the position in the data is kept if the number of rows "
            "and the first, middle and last of them are the same, else prompts are drawn from the "
            f"beginning; {_STAYS}"
        )
    if flag in _HELD_OUT:
        return (
            "scores before and after do not compare; training, the journal and the position in "
            "the data stay"
        )
    if flag == "hf_checkpoint":
        return (
            f"{weights}, its config, tokenizer and chat template are taken from now on; {_AGAIN}; "
            "the position in the data stays"
        )
    if flag == "lora_adapter_path":
        return f"{weights}; groups in the journal by weights that come no more are generated again"
    if flag == "ref_load":
        return f"the KL term compares with it from now on; {_training_consequence()}"
    if flag in MAKERS:
        return f"{_AGAIN} with it; the position in the data and the weights stay"
    if flag == "data_source_path":
        return (
            "groups in the journal whose prompt and label are the same stay; where it draws is "
            f"its own; {_STAYS}"
        )
    if affects_training(flag):
        return _training_consequence()
    return (
        "it counts from the next rollout on; the journal and the position in the data stay; "
        f"{_STAYS}"
    )


def _training_consequence() -> str:
    return (
        "groups in the journal by weights that were pushed after the checkpoint are generated "
        f"again, others stay, as does the position in the data; {_STAYS}"
    )


def _inputs(config: Config) -> Iterator[tuple[str, str]]:
    """Yield (flag, value) for each input that the run reads."""
    flags = config.values()
    reads = ["prompt_data", "hf_checkpoint", "lora_adapter_path", *HOOKS, "data_source_path"]
    reads.append("eval_preference_data")
    if config.algorithm.needs_reference and flags["ref_load"] != flags["hf_checkpoint"]:
        reads.append("ref_load")
    for flag in reads:
        value = flags.get(flag)
        yield from (
            (flag, one) for one in (value if isinstance(value, (list, tuple)) else [value]) if one
        )
    yield from (
        ("opd_teacher_load", teacher.source)
        for teacher in config.distillation.teachers
        if teacher.source not in (SELF, BASE)
    )
    yield from (("eval_prompt_data", path) for path in (flags["eval_prompt_data"] or ())[1::2])


def _fingerprint(flag: str, value: str) -> str:
    """Return a hash of the content, "" if the input does not exist."""
    if flag in ("hf_checkpoint", "ref_load", "lora_adapter_path", "opd_teacher_load"):
        return content_fingerprint(Path(value))
    if flag not in ("prompt_data", *_HELD_OUT):
        return fingerprint(None, [value])
    try:
        return content_fingerprint(Path(split_name(split_slice(value)[0])[0]), whole=True)
    except UserError:  # the check of the data reports it
        return ""
