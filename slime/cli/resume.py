"""`slime resume`: go on with a run that was stopped, that failed or whose host went down, from its
newest checkpoint.

slime resume outputs/sums
slime resume outputs/demo --stage sft             one stage of several, by default the newest

Everything is as in the launch before: flags, data, run folder. Secrets are not in the folder: they
are taken from the environment, or given again with their flag (slime resume outputs/sums --rm-url
URL). To change a flag, repeat the command of the run with the other flag and --load set to its
--save.
"""

from __future__ import annotations

import os
from pathlib import Path

from slime.checkpoints.load_plan import config_for_resume
from slime.checkpoints.run_models import started_from
from slime.cli.arguments import Arguments
from slime.config import Config
from slime.config.flags import spellings
from slime.config.hidden import with_secrets
from slime.errors import UserError, contents_of, in_place_of
from slime.observe.run_folder import RunFolder, config_files, newest_stage
from slime.processes.host import slime_command


def main(argv: list[str]) -> None:
    """Resume the run from its newest checkpoint.

    Raises:
        UserError: the folder is not a run folder or was moved, or the run is finished or saves no
            checkpoints.
    """
    parser = Arguments("slime resume", __doc__)
    parser.add_argument("run_dir", help="a run folder, outputs/<run>")
    parser.add_argument("--stage", help="of a run with several; default: the newest")
    own, again = _split_words(argv)
    asked = parser.parse_args(own)
    folder = Path(asked.run_dir)
    run = _stage_of(folder, asked.stage)
    if run.state() == "finished":
        raise UserError(
            f"{folder}{f' (stage {run.stage})' if run.stage else ''} is finished",
            fix="to train longer, repeat its command with a larger --num-rollout and --load "
            f"{run.config().checkpoint.save or 'set to its --save'}",
        )
    command = f"{slime_command()} resume {' '.join(own)}"
    config = with_secrets(run.config(), again, os.environ, command)
    _go_to_where_it_began(folder, run, config)
    from slime.loop import train  # imports Ray
    from slime.run.session import open_session

    with open_session(config_for_resume(config), resuming=True) as session:
        train(session)


def _split_words(argv: list[str]) -> tuple[list[str], list[str]]:
    """Split into this command's own words and the flags of the run that follow them."""
    known = spellings()
    words = [
        word.partition("=")[0].removeprefix("--") if word.startswith("--") else "" for word in argv
    ]
    at = next((i for i, word in enumerate(words) if word in known and word != "stage"), len(argv))
    return argv[:at], argv[at:]


def _stage_of(folder: Path, stage: str | None) -> RunFolder:
    stages = [*dict.fromkeys([*RunFolder(folder).read_summary()["stages"], *config_files(folder)])]
    if not stages:
        why = in_place_of(folder)
        if folder.is_dir():
            why = f"it has neither config.json nor run.json; it holds: {contents_of(folder)}"
        what = (
            "is not a run folder" if folder.is_dir() else "is not a folder, and so not a run folder"
        )
        copies = sorted((folder / "history").glob("config.*.json")) if folder.is_dir() else []
        fix = "pass outputs/<run>"
        if copies:
            fix = f"cp {copies[-1]} {folder / 'config.json'}, if it is one"
        raise UserError(f"{folder} {what}", why, fix)
    if stage is not None and stage not in stages:
        raise UserError(
            f"{folder} has no stage {stage}",
            fix=f"its stages: {', '.join(filter(None, stages)) or 'none'}",
        )
    return newest_stage(folder, stage)


def _go_to_where_it_began(folder: Path, run: RunFolder, config: Config) -> None:
    """Change to the directory in which the run was started: relative paths in its flags and the
    user's modules are found from there."""
    here = folder.resolve()
    output_dir = Path(config.observe.output_dir)
    began = run.read_summary()["stages"].get(run.stage or "", {}).get("cwd")
    try:
        if began is not None and Path(began).is_dir():
            os.chdir(began)
        elif not output_dir.is_absolute():
            os.chdir(started_from(here, output_dir))
    except (OSError, IndexError) as error:
        raise UserError(
            f"the directory in which {here} was started cannot be entered", why=str(error)
        ) from error
    if (output_dir / config.observe.run_name).resolve() != here:
        raise UserError(
            f"{here} was moved",
            why=f"its run was started as {output_dir / config.observe.run_name} in {Path.cwd()}",
            fix="move it back, or repeat its command with the new places",
        )
