"""A cluster of three nodes on this host: ranks and engines spread over it, other jobs on it, jobs
submitted to it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

from slime.cluster.ray_session import _with_few_daemons
from slime.errors import UserError
from tests.support.processes import PATIENCE, ROOT, World, start, wait_until
from tests.support.runs import GRPO, Run

pytestmark = pytest.mark.slow

#: Of one slot each: two trainer ranks and an engine must then go over all of them.
NODES = 3


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.create(tmp_path_factory.mktemp("cluster"))


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest) -> Iterator[Any]:
    """`ray.cluster_utils.Cluster`, to which nobody here connects; with a dashboard, of which job
    submission is a part, if a job is to be submitted."""
    from ray._private import services
    from ray.cluster_utils import Cluster

    rays_get_node = services.get_node

    def get_node(*arguments: Any) -> Any:
        """Ray itself gives a raylet 30 s, which a crowded host needs for the imports of its
        agents."""
        end = time.monotonic() + PATIENCE
        while True:
            try:
                return rays_get_node(*arguments)
            except RuntimeError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    options = {
        # its own answer is 127.0.0.1 where a test before left a local Ray in this process, and
        # nobody joins there: drivers take 127.0.0.1 for this address
        "node_ip_address": services.node_ip_address_from_perspective(),
        "include_dashboard": any(
            test.name == test_a_submitted_job.__name__ for test in request.session.items
        ),
        "dashboard_host": "127.0.0.1",
        "dashboard_port": 0,
        "dashboard_agent_listen_port": 0,
    }
    few_daemons = nullcontext() if options["include_dashboard"] else _with_few_daemons()
    with pytest.MonkeyPatch.context() as patch, few_daemons:
        patch.setattr(services, "get_node", get_node)
        # a worker that waits for a task has imported Ray, and a run has actors alone
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "gcs_server_port": 0, **options}
        )
        try:
            for _ in range(NODES - 1):
                cluster.add_node(num_cpus=1, node_ip_address=options["node_ip_address"])
            # its agents and its dashboard are imported still, which can take a crowded host minutes
            join = "import ray, sys; ray.init(sys.argv[1], logging_level='error')"
            command = [sys.executable, "-c", join, cluster.address]
            subprocess.run(command, check=True, timeout=PATIENCE)
            yield cluster
        finally:
            cluster.shutdown()


def noted(hold: Path, who: str) -> list[dict[str, str]]:
    return [json.loads(file.read_text()) for file in hold.glob(f"{who}-*.json")]


def servers(world: World) -> list[psutil.Process]:
    """Engines and routers that this test's nodes run; other tests keep engines of other models
    meanwhile."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.NoSuchProcess:
            continue
        engine = "slime.embedded" in words and str(world.inputs) in words
        if engine or "sglang::router" in words:
            found.append(process)
    return found


SPIES = (
    *("--custom-rm-path", "tests.support.hold.reward_and_note"),
    *("--custom-megatron-init-path", "tests.support.hold.trainer_init"),
)


def test_two_ranks_and_an_engine_on_three_nodes(cluster: Any, world: World, hold: Path) -> None:
    """Data parallel of 2 across the nodes, weights by gloo; nothing stays behind."""
    flags = world.flags(
        "spread", *SPIES, "--ray-address", cluster.address, "--actor-num-gpus-per-node", 2
    )
    flags = [*flags, "--no-colocate"]
    env = {
        "SLIME_TEST_HOLD": str(hold),
        "NCCL_DEBUG": "WARN",
        "HF_TOKEN": "secret",
        "UNRELATED": "1",
    }
    (hold / "hold-0").touch()
    driver = start(flags, world.outputs / "spread", **env)
    try:
        wait_until(
            lambda: (hold / "held-0").exists() or driver.process.poll() is not None,
            "the first rollout",
        )
        assert driver.process.poll() is None, driver.stderr

        for who, count in (("rollout", 1), ("trainer", 2)):
            assert len(noted(hold, who)) == count
            for seen in noted(hold, who):
                assert (
                    seen["NCCL_DEBUG"] == "WARN"
                    and "HF_TOKEN" not in seen
                    and "UNRELATED" not in seen
                )
        nodes = {seen["node"] for seen in noted(hold, "trainer")}
        assert len(nodes) == 2
        [engine] = [
            process for process in servers(world) if "embedded" in " ".join(process.cmdline())
        ]
        assert engine.environ()["NCCL_DEBUG"] == "WARN"

        (hold / "hold-0").unlink()
        assert driver.end() == 0, driver.stderr
    finally:
        driver.clean_up()
    assert driver.steps() == [1, 2]
    log = (driver.path / "logs" / "trainer-0.log").read_text()
    assert "weights go to 1 engine(s) by gloo" in log
    wait_until(lambda: not servers(world), "engine and router end with the run", 10)


def test_a_job_that_finds_no_room(run: Run) -> None:
    """On the Ray that whole runs of these tests share: a group of slots stands for another job."""
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    num_slots = int(ray.cluster_resources()["CPU"])
    flags = ["--colocate", "--num-rollout", 1, "--placement-timeout", 0.5]
    held = placement_group([{"CPU": 1}] * num_slots)
    try:
        assert held.wait(PATIENCE)
        with pytest.raises(UserError) as waited:
            run("waits", *GRPO, *flags)
    finally:
        remove_placement_group(held)
    assert "1 process slots (CPUs) did not become free within" in str(waited.value)
    assert "another job holds the rest" in str(waited.value)
    with pytest.raises(UserError) as big:
        run("big", *GRPO, *flags, "--actor-num-gpus-per-node", num_slots + 1)
    needs = f"needs {num_slots + 1} process slots (CPUs), the Ray cluster has {num_slots}"
    assert needs in str(big.value)


@pytest.mark.full
def test_a_submitted_job(cluster: Any, world: World, hold: Path) -> None:
    """``ray job submit``: the variables of its runtime environment reach every process, the
    engine's too."""
    submitted = {
        "env_vars": {
            "SLIME_TEST_HOLD": str(hold),
            "TEST_MARK": "everywhere",
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
    }
    (hold / "hold-1").touch()
    command = [sys.executable, "-m", "ray.scripts.scripts", "job", "submit"]
    command += [
        "--address",
        f"http://{cluster.webui_url}",
        "--runtime-env-json",
        json.dumps(submitted),
        "--",
    ]
    command += [sys.executable, str(ROOT / "train.py"), *world.flags("submitted", *SPIES)]
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RAY_ADDRESS", "PYTHONPATH")
    }
    with open(hold / "submit.log", "w") as log:
        job = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_until(
            lambda: (hold / "held-1").exists() or job.poll() is not None, "the second rollout"
        )
        assert job.poll() is None, (hold / "submit.log").read_text()
        for who in ("rollout", "trainer"):
            assert [seen["TEST_MARK"] for seen in noted(hold, who)] == ["everywhere"]
        assert {
            process.environ().get("TEST_MARK")
            for process in servers(world)
            if "embedded" in process.cmdline()[2]
        } == {"everywhere"}
        (hold / "hold-1").unlink()
        assert job.wait(120) == 0, (hold / "submit.log").read_text()
    finally:
        job.kill()
    rows = [
        json.loads(line)
        for line in (world.outputs / "submitted" / "metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows if "rollout/raw_reward" in row] == [1, 2]
    wait_until(lambda: not servers(world), "engine and router end with the job", 10)
