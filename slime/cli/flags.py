"""`slime flags [NAME [RUN_DIR]]`: what a flag is, and what it was in a run."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

from slime.cli.arguments import Arguments
from slime.config.config import Config
from slime.config.flag import FlagSpec, Part
from slime.config.flags import all_flags, nearest, own_flags, spellings
from slime.config.help import default_text, flags_page, metavar, range_text, status_text
from slime.config.other_systems import other_name
from slime.documentation import with_doc_urls
from slime.errors import UserError
from slime.observe.run_folder import newest_stage
from slime.redact import redacted

_READERS: dict[Part, str] = {
    "config": "the configuration itself: other flags follow from it",
    "driver": "the driver",
    "collection": "the rollout process, as it draws prompts and collects what is trained on",
    "generation": "the rollout process, as it generates and evaluates",
    "samples": "the rollout process, as it makes batches of samples",
    "trainer": "the trainer's processes",
    "training": "the trainer's processes, as they take steps and save",
    "push": "the push of weights from trainer to engines",
    "engine": "the engines",
    "router": "the router",
}


def main(argv: list[str]) -> None:
    """Print the flag of a name, else all flags that contain the word. Without a name, print
    docs/flags.md.

    Raises:
        UserError: no flag has the word in its name, or the folder is not a run folder.
    """
    parser = Arguments("slime flags", "Look flags up.")
    parser.add_argument(
        "name", nargs="?", help="a flag, or a word in the names of several; default: all flags"
    )
    parser.add_argument(
        "run_dir", nargs="?", help="a run folder: also show the flag's value there and its origin"
    )
    asked = parser.parse_args(
        [word if word == "--help" else word.removeprefix("--") for word in argv]
    )
    if asked.name is None:
        sys.stdout.write(flags_page())
        return
    config = newest_stage(Path(asked.run_dir)).config() if asked.run_dir else None
    found = _found(asked.name)
    is_ours = asked.name.replace("_", "-") in spellings()
    meant = None if is_ours else other_name(asked.name)
    if meant is not None:
        print(f"{asked.name} of other systems: {meant.text}\n")
    print("\n".join(line for spec in found for line in _lines(spec, config)))


def _found(name: str) -> list[FlagSpec]:
    """Return the flag of this name, else all flags whose names contain it."""
    word = name.replace("_", "-")
    exact = spellings().get(word)
    if exact is not None and exact.spec is not None:
        return [exact.spec]
    if exact is not None:
        return [all_flags()[dest] for dest, _ in exact.sets]
    found = [
        spec for spec in all_flags().values() if any(word in option for option in spec.options)
    ]
    if not found and (meant := other_name(name)) is not None:
        raise UserError(
            f"no flag has {name!r} in its name", why="it is another system's name", fix=meant.text
        )
    if not found:
        near = _nearest(word)
        shown = " or ".join(filter(None, (", ".join(near[:-1]), *near[-1:])))
        raise UserError(
            f"no flag has {name!r} in its name", fix=f"did you mean {shown}?" if near else ""
        )
    return found


def _nearest(word: str) -> list[str]:
    """Return the flags that are spelt like ``word``, else slime's own flags with a similar word in
    their name, shortest first."""
    if near := nearest(word, spellings()):
        return [f"--{name}" for name in near]
    names = [
        option[2:]
        for spec in own_flags().values()
        if not spec.meta.refused
        for option in spec.options
    ]
    words = {part for name in names for part in name.split("-")}
    like = set(difflib.get_close_matches(word, words, n=1, cutoff=0.75))
    similar = [f"--{name}" for name in names if like & set(name.split("-"))]
    return sorted(similar, key=len)[:4]


def _lines(spec: FlagSpec, config: Config | None) -> list[str]:
    facts = {
        "default": default_text(spec),
        "range": range_text(spec),
        "status": status_text(spec).replace("`", ""),
        "read by": "; ".join(_READERS[part] for part in spec.meta.read_by),
        "of": spec.origin,
    }
    if config is not None:
        values = config.values()
        shown = redacted(values[spec.dest], spec.dest) if spec.dest in values else "not set"
        facts["value"] = str(shown)
        facts["origin"] = config.origins.get(spec.dest, "default")
    head = f"{', '.join(spec.options)} {metavar(spec)}".rstrip()
    lines = [f"    {with_doc_urls(spec.help)}"] if spec.help else []
    return [head, *lines, *(f"    {fact}: {text}" for fact, text in facts.items() if text)]
