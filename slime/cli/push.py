"""`slime push`: upload a model to the hub, with a card that says how it was trained.

HF_TOKEN=… slime push outputs/sums me/sums
slime push outputs/sums me/sums --card-only > README.md     see the card first; nothing is uploaded
"""

from __future__ import annotations

import re
from pathlib import Path

from slime.checkpoints.run_models import first_base, is_run_folder
from slime.cli.arguments import Arguments
from slime.cli.model_source import ChosenModel, add_model_arguments, chosen_model, model_name
from slime.errors import UserError
from slime.hub import hub_token, upload
from slime.models.quantised import format_of
from slime.models.spec import read_hf_config
from slime.observe.model_card import UNKNOWN, model_card
from slime.observe.run_data import RunData, read_run

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


def main(argv: list[str]) -> int:
    """Upload, or print the card. Returns the exit status."""
    flags = _parser().parse_args(argv)
    if not _REPO.fullmatch(flags.repo):
        raise UserError(
            f"'{flags.repo}' is not the name of a repository",
            fix="pass org/name, e.g. your account's name first",
        )
    if not flags.card_only:
        hub_token(flags.repo)  # fail before the slow conversion if there is no token
    chosen = chosen_model(flags.path, flags.hf_checkpoint)
    directory = chosen.adapter or chosen.directory
    run = _run_of(Path(flags.path), directory)
    card = card_of(flags.path, chosen)
    if flags.card_only:
        print(card, end="")
        return 0
    message = f"run {run.name}, by slime push" if run is not None else "by slime push"
    url = upload(
        flags.repo, directory, {"README.md": card.encode()}, private=flags.private, message=message
    )
    print(f"{directory} is at {url}")
    return 0


def _parser() -> Arguments:
    parser = Arguments("slime push", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("repo", help="org/name on the hub; made where it is not there")
    add(
        "--private",
        action="store_true",
        help="only you and your organisation may see it, if it is new",
    )
    add("--card-only", action="store_true", help="print the model card and upload nothing")
    return parser


def _run_of(path: Path, directory: Path) -> RunData | None:
    """Return the run that trained the model: the given folder, or a parent folder of the model."""
    if path.is_dir() and is_run_folder(path):
        return read_run(path.resolve())
    # run.json, because a parent may hold a config.json that is not a run's
    for folder in directory.resolve().parents[:4]:
        if (folder / "run.json").is_file() and is_run_folder(folder):
            return read_run(folder)
    return None


def card_of(path: str, chosen: ChosenModel) -> str:
    """Return the model card of the model that ``path`` means. A model without a run keeps the card
    in its directory. The licence is that of the base model's card."""
    directory = chosen.adapter or chosen.directory
    run = _run_of(Path(path), directory)
    own = directory / "README.md"
    if run is None and own.is_file():
        return own.read_text(encoding="utf-8")
    base = first_base(run.path) if run is not None else None
    if chosen.adapter is not None:
        base = chosen.directory
    licence = _licence(base / "README.md") if base else UNKNOWN
    is_adapter = chosen.adapter is not None
    base_format = format_of(read_hf_config(base)) if base and is_adapter else ""
    return model_card(
        model_name(path), run, base, licence, is_adapter=is_adapter, base_format=base_format
    )


def _licence(card: Path) -> str:
    """Return ``license`` of the YAML header of a model card; "unknown" if it has none."""
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    head = text.split("---")[1] if text.startswith("---") else ""
    found = re.search(r"^license:\s*([\w.-]+)\s*$", head, re.MULTILINE)
    return found.group(1) if found else UNKNOWN
