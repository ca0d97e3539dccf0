"""MLflow, Trackio and SwanLab: with the real package where it is installed, and with stand-ins that
take the calls that the real ones were seen to take."""

from __future__ import annotations

import inspect
import io
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from slime.config import Config, make_config
from slime.errors import UserError
from slime.observe.run_folder import RunFolder
from slime.observe.sinks import Sinks
from slime.observe.trackers import TRACKERS, kept

SECRET = "hf_0123456789abcdefABCDEF"


def config_of(folder: Path, **flags: Any) -> Config:
    return make_config(
        output_dir=str(folder), run_name="demo", use_tensorboard=False, rm_url=None, **flags
    )


def quiet() -> Console:
    return Console(file=io.StringIO())


def run_twice(config: Config, folder: Path) -> RunFolder:
    """Two launches of one run, with a step each; the second has a NaN and a name with a sign."""
    run = RunFolder(folder / "demo")
    run.path.mkdir(exist_ok=True)
    for launch, more in enumerate([{}, {"train/Δ": math.nan}]):
        with Sinks(config, run, quiet()) as sinks:
            sinks.log(launch + 1, {"train/loss": 1.5 + launch, **more})
    return run


# -- stand-ins -------------------------------------------------------------------------------------


class Calls:
    """What a stand-in was called with."""

    def __init__(self) -> None:
        self.made: list[tuple[str, dict[str, Any]]] = []

    def of(self, name: str) -> list[dict[str, Any]]:
        return [given for called, given in self.made if called == name]

    def taker(self, name: str, signature: str, answer: Any = None) -> Any:
        """A function that takes what a real one of this signature takes."""
        scope: dict[str, Any] = {}
        exec(f"def call({signature}): pass", scope)
        expected = inspect.signature(scope["call"])

        def take(*args: Any, **given: Any) -> Any:
            bound = expected.bind(*args, **given)
            self.made.append((name, dict(bound.arguments)))
            return answer() if callable(answer) else answer

        return take


#: Signatures of the functions that are called: trackio 0.43, swanlab 0.10.3, mlflow 3.17.
SIGNATURES = {
    "trackio.init": (
        "project, name=None, group=None, space_id=None, server_url=None, dataset_id=None, "
        "bucket_id=None, config=None, resume='never', settings=None, private=None, embed=True, "
        "auto_log_gpu=None, gpu_log_interval=10.0, auto_log_cpu=None, cpu_log_interval=10.0, "
        "webhook_url=None, webhook_min_level=None"
    ),
    "swanlab.init": (
        "*, reinit=None, log_dir=None, mode=None, workspace=None, project=None, public=None, "
        "name=None, color=None, description=None, job_type=None, group=None, tags=None, id=None, "
        "resume=None, parallel=None, config=None, settings=None, callbacks=None, **kwargs"
    ),
    "mlflow.MlflowClient": "tracking_uri=None, registry_uri=None, workspace_store_uri=None",
    "mlflow.MlflowClient.get_experiment_by_name": "name",
    "mlflow.MlflowClient.create_experiment": "name, artifact_location=None, tags=None",
    "mlflow.MlflowClient.create_run": "experiment_id, start_time=None, tags=None, run_name=None",
    "mlflow.MlflowClient.update_run": "run_id, status=None, name=None",
    "mlflow.MlflowClient.log_batch": "run_id, metrics=(), params=(), tags=(), synchronous=None",
    "mlflow.MlflowClient.set_terminated": "run_id, status=None, end_time=None",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_stand_ins_take_what_the_real_functions_take(name: str) -> None:
    package, *path = name.split(".")
    found: Any = pytest.importorskip(package, reason=f"the {package} extra is not installed")
    for part in path:
        found = getattr(found, part)
    scope: dict[str, Any] = {}
    exec(f"def call({SIGNATURES[name]}): pass", scope)
    real = [one for one in inspect.signature(found).parameters if one != "self"]
    assert set(inspect.signature(scope["call"]).parameters) <= {*real, "kwargs"}


def put(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


def tracker_of(calls: Calls, package: str) -> Any:
    run = SimpleNamespace(
        log=calls.taker("log", "data, step=None"), finish=calls.taker("finish", "")
    )
    return calls.taker("init", SIGNATURES[f"{package}.init"], run)


def test_trackio_keeps_everything_beside_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRACKIO_DIR", raising=False)
    calls = Calls()
    put(monkeypatch, "trackio", init=tracker_of(calls, "trackio"))
    run_twice(config_of(tmp_path, use_trackio=True), tmp_path)
    assert [given["name"] for given in calls.of("init")] == ["demo", "demo"]
    assert all(given["resume"] == "allow" for given in calls.of("init"))
    assert all(given["space_id"] is None for given in calls.of("init"))
    assert [given["step"] for given in calls.of("log")] == [1, 2]
    assert calls.of("log")[0]["data"]["train/loss"] == 1.5
    assert len(calls.of("finish")) == 2
    assert Path(__import__("os").environ["TRACKIO_DIR"]) == tmp_path / "trackio"


def test_swanlab_goes_on_under_one_id_and_gets_no_secrets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls()
    put(monkeypatch, "swanlab", init=tracker_of(calls, "swanlab"), Settings=lambda **given: given)
    config = config_of(
        tmp_path, use_swanlab=True, swanlab_mode="offline", train_env_vars={"HF_TOKEN": SECRET}
    )
    run = run_twice(config, tmp_path)
    first, second = calls.of("init")
    assert first["id"] == second["id"] == (run.path / ".swanlab-id").read_text()
    assert first["mode"] == "offline"
    assert first["settings"]["terminal"] == {"proxy_type": "none"}
    assert SECRET not in str(calls.made)


class FakeMlflow:
    """A server in memory, behind the calls of `MlflowClient`."""

    def __init__(self, calls: Calls) -> None:
        self.is_there = True
        self.error = type("MlflowException", (Exception,), {})

        def answer(name: str, value: Any = None) -> Any:
            taken = calls.taker(name, SIGNATURES[f"mlflow.MlflowClient.{name}"], value)

            def call(*args: Any, **given: Any) -> Any:
                if not self.is_there:
                    raise self.error("no connection")
                return taken(*args, **given)

            return call

        client = SimpleNamespace(
            get_experiment_by_name=answer("get_experiment_by_name"),
            create_experiment=answer("create_experiment", "7"),
            create_run=answer("create_run", SimpleNamespace(info=SimpleNamespace(run_id="abc"))),
            update_run=answer("update_run"),
            log_batch=answer("log_batch"),
            set_terminated=answer("set_terminated"),
        )
        self.make = calls.taker("client", SIGNATURES["mlflow.MlflowClient"], client)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        put(monkeypatch, "mlflow", MlflowClient=self.make)
        put(
            monkeypatch,
            "mlflow.entities",
            Metric=lambda key, value, timestamp, step: (key, value, step),
            Param=lambda key, value: (key, value),
        )
        put(monkeypatch, "mlflow.exceptions", MlflowException=self.error)


def test_mlflow_has_one_run_over_launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    calls = Calls()
    FakeMlflow(calls).install(monkeypatch)
    config = config_of(tmp_path, use_mlflow=True, train_env_vars={"HF_TOKEN": SECRET})
    run = run_twice(config, tmp_path)
    assert (run.path / ".mlflow-id").read_text() == "abc"
    assert len(calls.of("create_run")) == 1
    assert calls.of("client")[0]["tracking_uri"] == f"sqlite:///{tmp_path / 'mlflow.db'}"
    params = [one for given in calls.of("log_batch") for one in given.get("params", ())]
    assert ("run_name", "demo") in params
    assert SECRET not in str(params)
    assert max(len(given.get("params", ())) for given in calls.of("log_batch")) <= 100
    rows = [one for given in calls.of("log_batch") for one in given.get("metrics", ())]
    assert ("train/loss", 1.5, 1) in rows and ("train/loss", 2.5, 2) in rows
    assert any(name == "train/_" for name, _, _ in rows), "a sign that MLflow refuses"
    assert [given["status"] for given in calls.of("set_terminated")] == ["FINISHED"] * 2
    with pytest.raises(RuntimeError), Sinks(config, run, quiet()):
        raise RuntimeError
    Sinks(config, run, quiet()).close("stopped")
    ends = [given["status"] for given in calls.of("set_terminated")]
    assert ends[2] == "FAILED"


def test_a_server_that_goes_away_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server = FakeMlflow(Calls())
    server.install(monkeypatch)
    run = RunFolder(tmp_path / "demo")
    run.path.mkdir()
    config = config_of(tmp_path, use_mlflow=True)
    with Sinks(config, run, quiet()) as sinks:
        server.is_there = False
        sinks.log(1, {"train/loss": 1.0})
    assert "step 1 is not in MLflow: no connection" in caplog.text
    with pytest.raises(UserError, match="lets no run begin"):
        Sinks(config, run, quiet())


@pytest.mark.parametrize("package", TRACKERS)
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    run = RunFolder(tmp_path / "demo")
    run.path.mkdir()
    with pytest.raises(UserError, match=f"needs the package {package}") as error:
        Sinks(config_of(tmp_path, **{f"use_{package}": True}), run, Console())
    assert f"slime-rl[{package}]" in error.value.fix


def test_a_kept_name_stays(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert kept(run, "some-id", "first") == "first"
    assert kept(run, "some-id", "second") == "first"
    assert kept(run, "some-id", "third", asked="other") == "other"
    assert kept(run, "some-id", "fourth") == "other"


# -- the packages themselves -----------------------------------------------------------------------


def test_mlflow_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run = run_twice(config_of(tmp_path, use_mlflow=True), tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    name = (run.path / ".mlflow-id").read_text()
    losses = client.get_metric_history(name, "train/loss")
    assert [(one.step, one.value) for one in losses] == [(1, 1.5), (2, 2.5)]
    assert client.get_run(name).info.status == "FINISHED"


def test_trackio_itself(tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="the trackio extra is not installed")
    import sqlite3

    from trackio.utils import TRACKIO_DIR  # fixed when trackio is imported

    run_twice(config_of(tmp_path, use_trackio=True, trackio_project="slime-test"), tmp_path)
    rows = sqlite3.connect(Path(TRACKIO_DIR) / "slime-test.db").execute(
        "select run_name, step from metrics"
    )
    assert rows.fetchall()[-2:] == [("demo", 1), ("demo", 2)]


def test_swanlab_itself(tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason="the swanlab extra is not installed")
    config = config_of(
        tmp_path, use_swanlab=True, swanlab_mode="offline", train_env_vars={"HF_TOKEN": SECRET}
    )
    run = run_twice(config, tmp_path)
    kept_id = (run.path / ".swanlab-id").read_text()
    parts = list((run.path / "swanlab").glob(f"run-*-{kept_id}"))
    assert parts and all(list(part.glob("*.swanlab")) for part in parts)
    written = b"".join(file.read_bytes() for file in run.path.rglob("*") if file.is_file())
    assert SECRET.encode() not in written
