"""The Dockerfiles: what can be known without building them."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "ENV", "RUN", "WORKDIR", "COPY", "ENTRYPOINT", "CMD"}


def instructions(path: Path) -> list[tuple[str, str]]:
    """(Instruction, what follows), continued lines joined."""
    text = re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    found = []
    for line in filter(None, map(str.strip, text.splitlines())):
        word, _, rest = line.partition(" ")
        found.append((word, rest.strip()))
    return found


def pins(path: Path) -> dict[str, str]:
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_is_well_formed(path: Path) -> None:
    found = instructions(path)
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= INSTRUCTIONS
    for word, rest in found:
        if word == "RUN":
            assert subprocess.run(["sh", "-n", "-c", rest]).returncode == 0
        if word == "COPY":
            *sources, _ = rest.split()
            assert all((ROOT / source).exists() for source in sources)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_packages_come_from_pypi_with_constraints(path: Path) -> None:
    installs = [rest for word, rest in instructions(path) if "pip install" in rest]
    assert len(installs) == 1
    words = shlex.split(installs[0].split("pip install")[1])
    assert "--constraint" in words
    assert not {"--index-url", "--extra-index-url", "--find-links"} & set(words)
    assert not any("://" in word for word in words)
    extras = set(re.findall(r"\.\[(.*)\]", words[-1])[0].split(","))
    assert extras <= set(project()["optional-dependencies"])


def project() -> dict[str, dict[str, list[str]]]:
    found: dict[str, dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return found["project"]  # type: ignore[return-value]


def test_the_pins_for_cuda_are_within_what_slime_allows() -> None:
    own = project()
    wanted = [*own["dependencies"], *own["optional-dependencies"]["sglang"]]
    ranges = {one.name: one.specifier for one in map(Requirement, wanted)}
    general = pins(ROOT / "constraints.txt")
    for name, version in pins(ROOT / "docker" / "cuda-constraints.txt").items():
        assert name in general or name == "sglang", f"{name} replaces no line of constraints.txt"
        assert name not in ranges or version in ranges[name], f"{name}=={version}"


def test_the_pins_for_cuda_replace_those_of_the_constraints_file(tmp_path: Path) -> None:
    """The shell words of the Dockerfile, run here."""
    (build,) = [
        rest
        for word, rest in instructions(ROOT / "docker" / "cuda.Dockerfile")
        if word == "RUN" and "pip install" in rest
    ]
    made = tmp_path / "constraints.txt"
    script = build.split("&& pip install")[0].replace("/tmp/constraints.txt", str(made))
    subprocess.run(["sh", "-c", script], cwd=ROOT, check=True)
    cuda = pins(ROOT / "docker" / "cuda-constraints.txt")
    assert pins(made) == pins(ROOT / "constraints.txt") | cuda
    assert len(re.findall(r"^torch==", made.read_text(), re.MULTILINE)) == 1
