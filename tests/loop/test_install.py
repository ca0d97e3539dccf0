"""An installed wheel does what a checkout does; `make` installs once; what is imported is
required."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import ROOT, World

#: Folders of the clone that `slime init` copies.
STARTER = ("recipes", "examples")

# -- the wheel -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that nothing is written into the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for name in ("slime", *STARTER):
        shutil.copytree(
            ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "outputs")
        )
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, source)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    [path] = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``bin/`` of a new environment with the wheel; a .pth file lends it this environment's other
    packages."""
    folder = tmp_path_factory.mktemp("env")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120
    )
    python = folder / "bin" / "python"
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        "--no-deps",
        str(wheel),
    ]
    # pip takes what lies on PYTHONPATH for installed
    done = in_folder(folder, *command, timeout=300)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def in_folder(
    folder: Path, *words: object, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run a command in ``folder``, with nothing of this checkout on the path."""
    hidden = ("PYTHONPATH", "RAY_ADDRESS", "SLIME_DEBUG")
    env = {name: value for name, value in os.environ.items() if name not in hidden}
    return subprocess.run(
        [str(word) for word in words],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=folder,
        env=env,
    )


def test_the_wheel_carries_its_data_files(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    data = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "slime").rglob("*")
        if path.is_file() and path.suffix not in (".py", ".pyc")
    }
    assert data and data <= inside
    starter = {
        f"slime/starter/{path.relative_to(ROOT)}"
        for name in STARTER
        for path in (ROOT / name).rglob("*")
        if path.is_file() and not {"__pycache__", "outputs"} & set(path.parts)
    }
    assert len(starter) > 50
    assert starter == {name for name in inside if name.startswith("slime/starter/")}
    assert any(name.endswith(".json") for name in data) and any(
        name.endswith(".css") for name in data
    )
    assert not [name for name in inside if name.startswith(("tests/", "recipes/", "benchmarks/"))]
    assert any(name.endswith("LICENSE") for name in inside)


def test_the_description_has_absolute_links(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("METADATA")]
        metadata = archive.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", metadata)
    assert len(links) > 30
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


def test_commands_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    slime = installed / "slime"
    where = in_folder(tmp_path, installed / "python", "-c", "import slime; print(slime.__file__)")
    assert where.stdout.startswith(str(installed.parent))
    assert "train-async" in in_folder(tmp_path, slime, "--help").stdout
    assert "--rollout-batch-size" in in_folder(tmp_path, slime, "train", "--help").stdout
    assert "learning rate" in in_folder(tmp_path, slime, "flags", "lr").stdout.lower()
    done = in_folder(tmp_path, slime, "train", "--rolout-batch-size", 4)
    assert done.returncode == 2 and "did you mean --rollout-batch-size?" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_init_and_the_command_that_it_prints(installed: Path, tmp_path: Path) -> None:
    """As in README.md for an installed package: two commands, and a model has learnt."""
    done = in_folder(tmp_path, installed / "slime", "init", "start")
    assert done.returncode == 0, done.stderr
    command = done.stdout.splitlines()[-1].removeprefix("next: ")
    assert command.startswith("cd start && ") and command.endswith(" -m recipes.demo")
    done = in_folder(tmp_path, "sh", "-c", f"{command} --run-name demo", timeout=600)
    assert done.returncode == 0, done.stderr
    assert re.search(r"held-out accuracy: 0\.\d+ after SFT → 0\.[6-9]\d+ after GRPO", done.stdout)
    assert list((tmp_path / "start" / "outputs" / "demo").rglob("config.json"))


@pytest.mark.full
def test_training_with_the_wheel(installed: Path, tmp_path: Path) -> None:
    """Every process finds the package, and the user's functions in the folder where the command was
    given."""
    world = World.create(tmp_path / "world")
    here = tmp_path / "here"
    here.mkdir()
    (here / "mine.py").write_text(
        "def reward(args, sample, **kwargs):\n    return float(len(sample.response))\n"
    )
    flags = world.flags(
        "wheel", "--custom-rm-path", "mine.reward", "--num-rollout", 1, "--output-dir", "outputs"
    )
    done = in_folder(here, installed / "slime", "train", *flags, timeout=300)
    assert done.returncode == 0, done.stderr
    [row] = [
        json.loads(line)
        for line in (here / "outputs" / "wheel" / "metrics.jsonl").read_text().splitlines()
    ]
    assert row["rollout/raw_reward"] > 0


# -- requirements ----------------------------------------------------------------------------------


def required() -> set[str]:
    """Distributions in pyproject.toml, extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    return {
        re.split(r"[\[<>=~! ;]", line)[0].lower().replace("_", "-")
        for lines in lists
        for line in lines
    }


def imported() -> set[str]:
    """Top-level modules that `slime` imports, wherever in a file; not those beside a file that is
    run as a script."""
    names, beside = set(), set()
    for path in (ROOT / "slime").rglob("*.py"):
        beside |= (
            {
                file.stem
                for folder in (path.parent, ROOT / "slime/processes")
                for file in folder.glob("*.py")
            }
            if '"__main__"' in path.read_text()
            else set()
        )
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"slime"} - beside


#: Modules that come with a requirement, in those of its builds where they are used.
BROUGHT_BY = {"triton": "torch", "flash_attn": "sglang", "fla": "fla-core"}


def test_what_is_imported_is_required() -> None:
    distributions = importlib.metadata.packages_distributions()

    def providers(module: str) -> list[str]:
        return [BROUGHT_BY[module]] if module in BROUGHT_BY else distributions.get(module, [module])

    missing = {
        module
        for module in imported()
        if not {name.lower().replace("_", "-") for name in providers(module)} & required()
    }
    assert missing == set()


# -- make ------------------------------------------------------------------------------------------


def test_make_installs_once(tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)

    def commands(target: str) -> str:
        done = in_folder(tmp_path, "make", "--dry-run", target)
        assert done.returncode == 0, done.stderr
        return done.stdout

    for target, does in (("demo", "recipes.demo"), ("test", "pytest")):
        assert (
            "-m venv" in commands(target)
            and "pip install" in commands(target)
            and does in commands(target)
        )
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / ".installed-to-run").touch()
    # what tests need besides
    assert "pip" not in commands("demo") and "pip install" in commands("test")
    (tmp_path / ".venv" / ".installed").touch()
    for target in ("demo", "test", "check", "lint", "types", "docs-check"):
        assert "pip" not in commands(target) and "venv .venv" not in commands(target)


def test_ci_runs_everything() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    called = re.findall(r"^make ([\w-]+)$", script.read_text(), flags=re.MULTILINE)
    assert set(called) == {"lint", "types", "docs-check", "test"}
