"""Twenty kinds of secret in a run that crashes and goes on: none of them is in what it leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support import planted_secrets as planted
from tests.support.processes import ROOT, World, start

#: The reward says all that it knows; what is made of the rewards fails once.
HOOKS = """
import logging, os, sys

def reward(args, sample, **kwargs):
    told = f"{args.rm_url} {args.judge} {vars(args)} {dict(os.environ)}"
    print(told)
    print(told, file=sys.stderr)
    logging.getLogger("slime.reward").warning("asked with %s", told)
    return float(len(sample.response) % 3)

def rewards(args, samples, **kwargs):
    if not os.path.exists(args.marker):
        open(args.marker, "w").close()
        raise ValueError(f"the judge at {args.rm_url} refused {vars(args)} {dict(os.environ)}")
    found = [float(sample.get_reward_value(args)) for sample in samples]
    return found, found
"""


@pytest.mark.full
def test_no_secret_is_in_what_a_run_leaves(tmp_path: Path) -> None:
    world = World.create(tmp_path / "world")
    (world.inputs / "telling.py").write_text(HOOKS)
    (world.inputs / "hooks.yaml").write_text(
        yaml.safe_dump({**planted.hooks(), "marker": str(tmp_path / "failed")})
    )
    folder, save = world.outputs / "told", world.outputs / "told" / "checkpoints"
    given = [
        "--custom-config-path",
        world.inputs / "hooks.yaml",
        "--rm-url",
        planted.url(),
        "--save",
        save,
    ]
    given += [
        "--train-env-vars",
        json.dumps(planted.variables()),
        "--custom-rm-path",
        "telling.reward",
    ]
    given += [
        "--custom-reward-post-process-path",
        "telling.rewards",
        "--dump-details",
        folder / "dumps",
    ]
    given += ["--use-wandb", "--wandb-mode", "offline", "--wandb-key", planted.SECRETS["flag"]]
    path = f"{world.inputs}{os.pathsep}{ROOT}"
    driver = start(
        ["train", *world.flags("told", *given)],
        folder,
        "slime",
        PYTHONPATH=path,
        **planted.environment(),
    )
    assert driver.process.wait(300) == 2
    said = tmp_path / "said"
    said.mkdir()
    shutil.copy(driver._output, said / "first")
    assert list((folder / "crash").iterdir()) and "refused" in (said / "first").read_text()

    def slime(name: str, *words: object, **environ: str) -> int:
        env = {**os.environ, "PYTHONPATH": path, **environ}
        command = [sys.executable, "-m", "slime", *map(str, words)]
        done = subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
        )
        (said / name).write_text(done.stdout + done.stderr)
        return done.returncode

    assert slime("explain", "explain", folder) == 1
    assert slime("json", "explain", folder, "--json") == 1
    assert slime("bundle", "bundle", folder, "--samples", "--output", said / "bundle.tar.gz") == 0
    assert slime("report", "report", folder) == 0
    assert slime("flags", "flags", "rm_url", folder) == 0
    assert slime("unnamed", "resume", folder) == 2
    asked = (said / "unnamed").read_text()
    names = [word.removesuffix("=…") for word in asked.split() if word.endswith("=…")]
    assert {
        "MY_TOKEN",
        "JUDGE_API_KEY",
        "SLIME_RM_URL",
        "WANDB_API_KEY",
        "MIRRORS_0_PASSWORD",
    } <= set(names)
    again = ["--rm-url", planted.url(), "--custom-config-path", world.inputs / "hooks.yaml"]
    environ = {
        **planted.variables(),
        **planted.environment(),
        "WANDB_API_KEY": planted.SECRETS["flag"],
    }
    assert slime("resumed", "resume", folder, *again, **environ) == 0, (
        said / "resumed"
    ).read_text()[-3000:]
    assert slime("rebundle", "bundle", folder, "--samples", "--output", said / "again.tar.gz") == 0
    assert planted.search(folder, said) == {}
    rollout = (folder / "logs" / "rollout.log").read_text()
    assert "asked with" in rollout and "•••" in rollout, "it was said, without its secrets"
