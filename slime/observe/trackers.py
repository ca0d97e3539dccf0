"""The services that metrics can be sent to, and what their sinks share: import of packages, and the
ids of a run, which its folder keeps so that a resumed run continues the same curves."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from slime.errors import UserError
from slime.files import json_safe, write_atomically
from slime.observe.run_folder import RunFolder
from slime.redact import redacted

if TYPE_CHECKING:
    from slime.config.config import Config


@dataclass(frozen=True)
class Tracker:
    """A service for metrics.

    Attributes:
        sink: "module:class" of its `slime.observe.sinks.Sink`, made of (config, run folder).
        is_chosen: tells whether its flag is given.
    """

    sink: str
    is_chosen: Callable[[Config], bool]


#: The name is that of a tracker's package and extra. All its flags begin with it, except
#: ``--use-NAME``.
TRACKERS = {
    "wandb": Tracker("slime.observe.wandb_sink:WandbSink", lambda config: config.observe.use_wandb),
    "mlflow": Tracker(
        "slime.observe.mlflow_sink:MlflowSink", lambda config: config.observe.use_mlflow
    ),
    "trackio": Tracker(
        "slime.observe.trackio_sink:TrackioSink", lambda config: config.observe.use_trackio
    ),
    "swanlab": Tracker(
        "slime.observe.swanlab_sink:SwanlabSink", lambda config: config.observe.use_swanlab
    ),
}


def tracker_package(name: str) -> Any:
    """Import the package of a tracker; ``name`` is also the name of its flag and of its extra.

    Raises:
        UserError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise missing_tracker(name) from error


def missing_tracker(name: str) -> UserError:
    return UserError(
        f"--use-{name} needs the package {name}", fix=f"pip install 'slime-rl[{name}]'"
    )


def kept(run: RunFolder, name: str, fresh: str, asked: str | None = None) -> str:
    """Return a value that stays the same when this stage is resumed: ``asked`` if given, else the
    stored value, else ``fresh``."""
    path = run.path / f".{name}{'-' + run.stage if run.stage else ''}"
    found = path.read_bytes().decode("ascii", "replace").strip() if path.is_file() else ""
    if asked or not re.fullmatch(r"[\w.-]+", found):
        found = asked or fresh
        write_atomically(path, found.encode())
    return found


def shown_settings(config: Config) -> dict[str, Any]:
    """Return all flags with their values for a tracker, without secrets."""
    found: dict[str, Any] = redacted(json_safe(vars(config.flat())))
    return found


def shown_name(run: RunFolder) -> str:
    """Return the display name of the run in trackers."""
    return f"{run.path.name}-{run.stage}" if run.stage else run.path.name
