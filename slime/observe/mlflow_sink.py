"""MLflow (the ``mlflow`` extra). Imported only with ``--use-mlflow``."""

from __future__ import annotations

import os
import re
import time
from itertools import islice
from typing import TYPE_CHECKING, Any

from slime.errors import UserError
from slime.log import get_logger
from slime.observe.run_folder import RunFolder
from slime.observe.trackers import kept, shown_name, shown_settings, tracker_package

if TYPE_CHECKING:
    from slime.config.config import Config

logger = get_logger(__name__)

#: MLflow's limits: metrics and parameters per call, and characters of a parameter's value.
_METRICS = 1000
_PARAMETERS = 100
_LONGEST = 6000
#: State of a run in ``run.json`` → status in MLflow.
_ENDS = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}
_REFUSED = re.compile(r"[^\w\-. :/]", re.ASCII)


class MlflowSink:
    """One MLflow run per run folder and stage; the folder keeps its id.

    If the server does not answer, the step takes half a minute longer and logs a warning, and its
    metrics are missing in MLflow. The run continues.
    """

    def __init__(self, config: Config, run: RunFolder) -> None:
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        tracker_package("mlflow")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param
        from mlflow.exceptions import MlflowException

        self._run = run
        self._metric = Metric
        self._error: Any = MlflowException
        observe = config.observe
        uri = observe.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
        local = run.path.parent.resolve()
        uri = uri or f"sqlite:///{local / 'mlflow.db'}"
        try:
            self._client = MlflowClient(tracking_uri=uri)
            found = self._client.get_experiment_by_name(observe.mlflow_experiment)
            if found is not None:
                experiment = found.experiment_id
            else:
                experiment = self._client.create_experiment(observe.mlflow_experiment)
            self._id = kept(run, "mlflow-id", "new")
            if self._id == "new":
                made = self._client.create_run(experiment, run_name=shown_name(run))
                self._id = kept(run, "mlflow-id", "", asked=made.info.run_id)
                flags = shown_settings(config)
                given = iter([Param(name, str(v)[:_LONGEST]) for name, v in flags.items()])
                while batch := list(islice(given, _PARAMETERS)):
                    self._client.log_batch(self._id, params=batch)
            else:
                self._client.update_run(self._id, status="RUNNING")
        except MlflowException as error:
            raise UserError(
                f"--use-mlflow: {uri} lets no run begin",
                why=str(error),
                fix="pass --mlflow-uri, or leave --use-mlflow out: metrics.jsonl has the same "
                "numbers",
            ) from error

    def log(self, step: int, metrics: dict[str, float]) -> None:
        now = int(1000 * time.time())
        rows = [
            self._metric(_REFUSED.sub("_", name), float(value), now, step)
            for name, value in metrics.items()
        ]
        given = iter(rows)
        try:
            while batch := list(islice(given, _METRICS)):
                self._client.log_batch(self._id, metrics=batch)
        except self._error as error:
            logger.warning("step %d is not in MLflow: %s", step, error)

    def rewind(self, next_step: int) -> None:
        """Do nothing: MLflow cannot delete history, so repeated steps become later points of the
        same step."""

    def close(self) -> None:
        try:
            self._client.set_terminated(self._id, _ENDS.get(self._run.state() or ""))
        except self._error as error:
            logger.warning("the run is not ended in MLflow: %s", error)
