"""SwanLab (the ``swanlab`` extra). Imported only with ``--use-swanlab``."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from slime.errors import UserError
from slime.observe.run_folder import RunFolder
from slime.observe.trackers import kept, shown_name, shown_settings, tracker_package

if TYPE_CHECKING:
    from slime.config.config import Config


class SwanlabSink:
    """One SwanLab run per run folder and stage; the folder keeps its id. Offline, a resumed
    run is a second part with the same id, for `swanlab sync`."""

    def __init__(self, config: Config, run: RunFolder) -> None:
        swanlab = tracker_package("swanlab")
        observe = config.observe
        # by default, SwanLab copies the terminal and stores the command line with its secrets
        quiet = swanlab.Settings(
            interactive=False,
            terminal={"proxy_type": "none"},
            probe={"runtime": False, "monitor": False},
        )
        try:
            self._run: Any = swanlab.init(
                project=observe.swanlab_project,
                name=shown_name(run),
                id=kept(run, "swanlab-id", secrets.token_hex(10)),
                resume="allow",
                mode=observe.swanlab_mode,
                log_dir=str(run.path / "swanlab"),
                config=shown_settings(config),
                settings=quiet,
            )
        except RuntimeError as error:
            raise UserError(
                "--use-swanlab: SwanLab lets no run begin",
                why=str(error),
                fix="set SWANLAB_API_KEY, or pass --swanlab-mode offline (`swanlab sync` uploads "
                "the run later)",
            ) from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, next_step: int) -> None:
        """Do nothing: SwanLab cannot delete history, and keeps the first value of a step."""

    def close(self) -> None:
        self._run.finish()
