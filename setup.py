"""What pyproject.toml cannot say: recipes/ and examples/ go into the wheel, where `slime init`
finds them, and the links of README.md are absolute in the package's description."""

from __future__ import annotations

import re
import shutil
import tomllib
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTER = ("recipes", "examples")
HERE = Path(__file__).parent


class BuildWithStarter(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # `slime init` takes them from the clone
            return
        for name in STARTER:
            target = Path(self.build_lib, "slime", "starter", name)
            shutil.rmtree(target, ignore_errors=True)
            left_out = shutil.ignore_patterns("__pycache__", "outputs", ".*")
            shutil.copytree(HERE / name, target, ignore=left_out)


def description() -> str:
    """README.md for a reader who has only the package."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    home = project["urls"]["Repository"]
    text = (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!\w+:)", rf"\1{home}/raw/main/", text)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!\w+:|#)", rf"\1{home}/blob/main/", text)


setup(
    cmdclass={"build_py": BuildWithStarter},
    long_description=description(),
    long_description_content_type="text/markdown",
)
