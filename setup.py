"""Puts recipes/ and examples/ into the wheel, where `slime init` finds them. All else is in pyproject.toml."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

STARTER = ("recipes", "examples")


class BuildWithStarter(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # `slime init` takes them from the clone
            return
        for name in STARTER:
            target = Path(self.build_lib, "slime", "starter", name)
            shutil.rmtree(target, ignore_errors=True)
            left_out = shutil.ignore_patterns("__pycache__", "outputs", ".*")
            shutil.copytree(name, target, ignore=left_out)


setup(cmdclass={"build_py": BuildWithStarter})
