"""Trackio (the ``trackio`` extra). Imported only with ``--use-trackio``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from slime.observe.run_folder import RunFolder
from slime.observe.trackers import shown_name, shown_settings, tracker_package

if TYPE_CHECKING:
    from slime.config.config import Config


class TrackioSink:
    """One Trackio run per run folder and stage, in a database beside the run folders. A resumed run
    continues under the same name."""

    def __init__(self, config: Config, run: RunFolder) -> None:
        # trackio reads this at import
        os.environ.setdefault("TRACKIO_DIR", str(run.path.parent.resolve() / "trackio"))
        trackio = tracker_package("trackio")
        observe = config.observe
        self._run: Any = trackio.init(
            project=observe.trackio_project,
            name=shown_name(run),
            space_id=observe.trackio_space,
            config=shown_settings(config),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def rewind(self, next_step: int) -> None:
        """Do nothing: Trackio cannot delete history, so repeated steps become later points of the
        same step."""

    def close(self) -> None:
        self._run.finish()
