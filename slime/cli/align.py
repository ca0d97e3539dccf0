r"""`slime align`: find where trainer and engine differ, if their log-probs of the same tokens do,
and rank the causes.

slime align --config my.yaml --lr 1e-6        a fresh round with the flags of `slime train`
slime align train-async --config my.yaml      those of `slime train-async`
slime align outputs/sums                      the dumps of this run (--dump-details,
                                              --save-debug-train-data)
slime align dumps/train_data/0.pt dumps/rollout_data/0.pt \
    --hf-checkpoint models/mine --rollout-temperature 0.7

  --json             for programs
  --model DIR        the weights that scored the tokens: a Hugging Face directory, a run folder, a
                     --save directory; default: those that the run begins with
  --also DIR         other weights that the engine may have had
  --engine URL       an engine that still runs: its weights are compared, and it scores again
  --of-rollout N     the rollout of a run folder; default 0
  --max-tokens N     examine samples with this many tokens in all, those that differ most; default
                     4096 on a GPU, 1024 without
  --all              measure all causes, even if the sides agree

The model is also computed in this process, in float32, on a GPU if there is one. The exit status is
0 if the sides agree, 1 if they differ.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.checkpoints.directory import is_saved, iteration_dir
from slime.checkpoints.load_plan import resolve_load, resolve_reference
from slime.checkpoints.run_models import has_weights, is_run_folder
from slime.cli.arguments import run_flags
from slime.cli.doctor import answer_alone
from slime.cli.model_source import model_directory
from slime.config import Config, parse_args
from slime.config.make import judge_args
from slime.errors import UserError
from slime.files import indented_json
from slime.observe.run_folder import newest_stage
from slime.paths import fill

if TYPE_CHECKING:
    from slime.diagnosis.align.evidence import Scored
    from slime.diagnosis.troubles import Finding

_VALUES = ("--model", "--also", "--engine", "--of-rollout", "--max-tokens")
_SWITCHES = ("--json", "--all")
#: These are options of `slime align` only: `slime train` has no flag of these names.
OPTIONS = (*_VALUES, *_SWITCHES)


@dataclass
class _Asked:
    """The parsed command line: own options, files or folders to read, flags of the run."""

    options: dict[str, str] = field(default_factory=dict)
    sources: list[Path] = field(default_factory=list)
    flags: list[str] = field(default_factory=list)
    entry: str = "train"


def main(argv: list[str]) -> int:
    """Print where trainer and engine differ; returns the exit status.

    Raises:
        UserError: there is nothing to compare.
    """
    if any(word in ("--help", "-h") for word in argv):
        print(__doc__)
        return 0
    asked = _parse(argv)
    if not asked.sources and not asked.flags:
        raise UserError(
            "slime align needs the flags of a run, its folder, or a dump",
            fix="slime align --config recipe.yaml …, or slime align outputs/<run>",
        )
    with answer_alone():
        answer, as_json, status = _compare(asked)
    print(indented_json(as_json).decode() if "--json" in asked.options else answer)
    return status


def _compare(asked: _Asked) -> tuple[str, dict[str, Any], int]:
    """Compare the sides. Returns the answer as text, the same as JSON, and the exit status."""
    from slime.diagnosis.align.engines import EngineThere
    from slime.diagnosis.align.examine import as_json, text
    from slime.diagnosis.align.prepare import Options, RoundFailed, examined, fresh_round
    from slime.diagnosis.check import LeftOut
    from slime.diagnosis.troubles import TROUBLES, Finding

    options = asked.options
    most = _number(options, "--max-tokens", 0) or None
    for name in ("--model", "--also"):
        if name in options and Path(options[name]).exists():
            # resolve it here, before the working directory changes to the run's
            options[name] = str(Path(options[name]).resolve())
    folder: Path | None = None
    keeps_folder = False
    try:
        if asked.sources:
            config, samples = _recorded(asked)
        else:
            config = parse_args(asked.flags, asked.entry)
            folder = Path(tempfile.mkdtemp(prefix="slime-align-"))
            samples = fresh_round(config, folder)
        also = model_directory(options["--also"]) if "--also" in options else None
        chosen = Options(
            _model(config, options),
            also,
            most,
            is_fresh=not asked.sources,
            always="--all" in options,
        )
        engine = EngineThere(options["--engine"]) if "--engine" in options else None
        result = examined(config, samples, chosen, engine)
    except LeftOut as reason:
        raise UserError(f"there is nothing to compare: {reason}") from reason
    except RoundFailed as failure:
        keeps_folder = True  # its logs say more
        finding = Finding(TROUBLES["round-failed"], str(failure))
        return _as_text(finding), {"ok": False, "causes": [finding.as_json()]}, 1
    finally:
        if folder is not None and not keeps_folder:
            shutil.rmtree(folder, ignore_errors=True)
    return text(result), as_json(result), int(result.sides_differ)


def _as_text(finding: Finding) -> str:
    lines = [
        f"{finding.trouble.name}: {finding.detail}",
        *(f"try: {remedy}" for remedy in finding.advice),
    ]
    return "\n".join(lines)


def _parse(argv: list[str]) -> _Asked:
    entry, words = run_flags(list(argv))
    asked = _Asked(entry=entry)
    while words and not words[0].startswith("-"):
        asked.sources.append(Path(words.pop(0)))
    while words:
        word, equals, value = words.pop(0).partition("=")
        if word in _SWITCHES and not equals:
            asked.options[word] = ""
        elif word in _VALUES:
            if not equals and not words:
                raise UserError(
                    f"slime align: {word} needs a value", fix="slime align --help tells more"
                )
            asked.options[word] = value if equals else words.pop(0)
        else:
            asked.flags.append(word + equals + value)
    return asked


def _number(options: dict[str, str], name: str, default: int) -> int:
    given = options.get(name, str(default))
    if not given.isdecimal():
        raise UserError(f"slime align: {name} {given} is no number", fix=f"{name} 1000, say")
    return int(given)


def _recorded(asked: _Asked) -> tuple[Config, list[Scored]]:
    """Read the flags and samples of a run folder, or of dump files.

    Raises:
        UserError: the folder is not a run folder, or the run has dumped nothing.
    """
    from slime.diagnosis.align import dumps

    first = asked.sources[0]
    if not first.is_dir():
        config, errors = judge_args(asked.flags, asked.entry)
        if config is None:
            raise errors[0]
        return config, dumps.read(asked.sources)
    if not is_run_folder(first):
        raise UserError(
            f"{first} is not a run folder",
            why="it has no config.json of a run",
            fix="pass outputs/<run>",
        )
    if asked.flags or len(asked.sources) > 1:
        surplus = " ".join([*asked.flags, *map(str, asked.sources[1:])])
        raise UserError(
            f"slime align {first} takes no {surplus}", why="the flags are those of the run"
        )
    run = newest_stage(first)
    config = run.config()
    began = run.read_summary()["stages"].get(run.stage or "", {}).get("cwd")
    if began is not None and Path(began).is_dir():
        os.chdir(began)  # relative paths in its flags start there
    rollout = _number(asked.options, "--of-rollout", 0)
    patterns = (config.debug.save_debug_train_data, config.debug.save_debug_rollout_data)
    files = [fill(pattern, rollout) for pattern in patterns if pattern]
    there = [file for file in files if file.is_file()]
    if not there:
        raise UserError(
            f"the run {first} has dumped nothing of rollout {rollout}",
            why=f"looked for {', '.join(map(str, files))}"
            if files
            else "its samples/ hold no token ids",
            fix="run it with --dump-details DIR, or call slime align with the flags of the run for "
            "a fresh round",
        )
    return config, dumps.read(there)


def _model(config: Config, options: dict[str, str]) -> Path | None:
    """Return the directory of the weights that scored the tokens; None if no flag names a model."""
    if "--model" in options:
        return model_directory(options["--model"], config.checkpoint.hf_checkpoint)
    base = config.checkpoint.hf_checkpoint
    if base is None:
        return None
    rollout = _number(options, "--of-rollout", 0)
    if rollout:
        return model_directory(str(_saved_before(config, rollout)), base)
    flags = config.checkpoint
    if flags.load and not (flags.save and Path(flags.load).resolve() == Path(flags.save).resolve()):
        # ignore --save: the run began before its own checkpoints existed
        plan = resolve_load(replace(config, checkpoint=replace(flags, save=None)))
    elif flags.ref_load in (None, base):
        return model_directory(base)
    else:
        plan = resolve_reference(config)  # where a new run starts, too
    return model_directory(str(plan.path), base)


def _saved_before(config: Config, rollout: int) -> Path:
    """Return the export or checkpoint that was saved after step ``rollout - 1``.

    Raises:
        UserError: that step saved neither.
    """
    flags = config.checkpoint
    before = rollout - 1
    exported = fill(flags.save_hf, before) if flags.save_hf else None
    if exported is not None and has_weights(exported):
        return exported
    if flags.save and is_saved(Path(flags.save), before):
        return iteration_dir(Path(flags.save), before)
    raise UserError(
        f"the weights of rollout {rollout} were not saved",
        why=f"it was scored by those after step {before}, of which there is no export and no "
        "checkpoint",
        fix="--of-rollout of one that was saved before, or --model DIR",
    )
