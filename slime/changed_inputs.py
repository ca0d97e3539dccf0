"""What a run reads that may change between two of its launches: data, models, functions of the user's own.

Each launch notes fingerprints of them in ``run.json``. The next launch compares, and says what follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slime.config.config import Config
from slime.config.flag import option_of
from slime.data_path import split_name, split_slice
from slime.errors import UserError
from slime.files import content_fingerprint
from slime.hook_loading import fingerprint
from slime.hooks import HOOKS
from slime.pushes import trains_with
from slime.rollout.journal import MAKERS

_AGAIN = "groups in the journal are generated again"
_STAYS = "what was trained on before stays in the weights"


def fingerprints(config: Config) -> dict[str, str]:
    """Flag and value → a text that changes with the content. What is not there is left out.

    Example:
        >>> fingerprints(config)                                                              # doctest: +SKIP
        {'--prompt-data sums.jsonl': '9b1f…', '--hf-checkpoint Qwen3-4B': '03ac…', '--custom-rm-path mine.reward': …}
    """
    return {f"{option_of(flag)} {value}": found for flag, value, found in _found(config) if found}


def changes(config: Config, before: Mapping[str, Any], checkpoint: Path | None) -> list[str]:
    """A line for each input that an earlier launch read with other content.

    Args:
        before: `fingerprints` of that launch; a flag that names something else now was changed on purpose.
        checkpoint: that the run goes on from; None where it has none yet.
    """
    weights = f"the weights are those of {checkpoint}" if checkpoint else "the run begins anew with the weights of it"
    lines = []
    for flag, value, found in _found(config):
        name = f"{option_of(flag)} {value}"
        if not found or before.get(name) in (None, found):
            continue
        lines.append(f"{name} has changed since the last launch of this run: {_what_follows(flag, config, weights)}")
    return lines


def _what_follows(flag: str, config: Config, weights: str) -> str:
    if flag == "prompt_data":
        return (
            "groups in the journal whose prompt and label are the same are trained on as they are, others are generated"
            " again; the position in the data is kept if the number of rows and the first, middle and last of them are"
            f" the same, else prompts are drawn from the beginning; {_STAYS}"
        )
    if flag == "eval_prompt_data":
        return "scores before and after do not compare; training, the journal and the position in the data stay"
    if flag == "hf_checkpoint":
        return (
            f"{weights}, its config, tokenizer and chat template are taken from now on; {_AGAIN}; the position in the"
            " data stays"
        )
    if flag == "ref_load":
        return f"the KL term compares with it from now on; {_of_training()}"
    if flag in MAKERS:
        return f"{_AGAIN} with it; the position in the data and the weights stay"
    if flag == "data_source_path":
        return f"groups in the journal whose prompt and label are the same stay; where it draws is its own; {_STAYS}"
    if trains_with(flag):
        return _of_training()
    return f"it counts from the next rollout on; the journal and the position in the data stay; {_STAYS}"


def _of_training() -> str:
    return (
        "groups in the journal by weights that were pushed after the checkpoint are generated again, others stay, and so"
        f" does the position in the data; {_STAYS}"
    )


def _found(config: Config) -> Iterator[tuple[str, str, str]]:
    """Flag, its value, fingerprint ("" for none)."""
    flags = vars(config.flat())
    if flags["prompt_data"]:
        yield "prompt_data", flags["prompt_data"], _of_data(flags["prompt_data"])
    for path in list(flags["eval_prompt_data"] or ())[1::2]:
        yield "eval_prompt_data", path, _of_data(path)
    models = {"hf_checkpoint": flags["hf_checkpoint"]}
    if config.algorithm.needs_reference and flags["ref_load"] != flags["hf_checkpoint"]:
        models["ref_load"] = flags["ref_load"]
    for flag, path in models.items():
        if path:
            yield flag, path, content_fingerprint(Path(path))
    for flag in (*HOOKS, "data_source_path"):
        value = flags.get(flag)
        for path in value if isinstance(value, (list, tuple)) else [value]:
            if path:
                yield flag, path, fingerprint(None, [path])


def _of_data(path: str) -> str:
    try:
        return content_fingerprint(Path(split_name(split_slice(path)[0])[0]), whole=True)
    except UserError:
        return ""
