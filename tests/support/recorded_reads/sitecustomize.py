"""With this folder on PYTHONPATH, every Python process of a run writes down which flags it reads,
and where.

SLIME_TEST_READS=<folder>: each process appends a read to <folder>/<pid> when a place in the code
reads a flag for the first time; it may be killed at any moment. Whatever copies all flags reads
none: pickling and `vars` ask for no attribute, and a read by `getattr` is marked, so that loops
over names can be left out.
"""

from __future__ import annotations

import dis
import importlib.abc
import importlib.util
import json
import os
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

CONFIG = "slime.config.config"


class AfterImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Records from when the groups are there; importing them here would cost every process, Ray's
    own too."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != CONFIG:
            return None
        sys.meta_path.remove(self)
        found = importlib.util.find_spec(name)
        assert found is not None and found.loader is not None
        self._loader, found.loader = found.loader, self
        return found

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        record(module.GROUPS, module.FlatArgs)


def record(groups: dict[str, type], flat_args: type) -> None:
    folder, seen = Path(os.environ["SLIME_TEST_READS"]), set[tuple[CodeType, int, str, str]]()

    def note(owner: str, name: str, frame: FrameType) -> None:
        # A property of a group reads its fields for who asks for the property.
        while is_property(frame) or frame.f_globals is globals():
            assert frame.f_back is not None
            frame = frame.f_back
        code, at = frame.f_code, frame.f_lasti
        if (code, at, owner, name) in seen:
            return
        seen.add((code, at, owner, name))
        module = frame.f_globals.get("__name__", "")
        if module.startswith("slime.") and not module.startswith("slime.config."):
            by_name = dis.opname[code.co_code[at]] not in ("LOAD_ATTR", "LOAD_METHOD")
            row = {
                "process": process(),
                "module": module,
                "owner": owner,
                "name": name,
                "by_name": by_name,
            }
            with (folder / str(os.getpid())).open("a") as file:
                file.write(json.dumps(row) + "\n")

    def watch(cls: type, owner: str, names: frozenset[str] | None) -> None:
        plain: Any = cls.__getattribute__

        def read(self: Any, name: str) -> Any:
            if name in names if names is not None else name[:1] != "_":
                note(owner, name, sys._getframe(1))
            return plain(self, name)

        cls.__getattribute__ = read  # type: ignore[method-assign,assignment]

    for group, cls in groups.items():
        watch(cls, group, frozenset(cls.__dataclass_fields__))  # type: ignore[attr-defined]
    watch(flat_args, "args", None)


def is_property(frame: FrameType) -> bool:
    """Of a group; what dataclasses generate in its name has no file."""
    return (
        frame.f_globals["__name__"].startswith("slime.config.groups_")
        and frame.f_code.co_filename[0] != "<"
    )


def process() -> str:
    """``ray::TrainerActor`` of a Ray actor, which has it for its title; of others the script or
    module."""
    title = Path("/proc/self/cmdline").read_bytes().decode(errors="replace").split("\0")
    if title[0].startswith("ray::"):
        return title[0].split(".")[0].split("(")[0].strip()
    return sys.argv[0] if sys.argv[:1] not in ([], ["-m"], ["-c"]) else " ".join(sys.orig_argv[1:3])


if "SLIME_TEST_READS" in os.environ:
    if config := sys.modules.get(CONFIG):  # in a fork of a process that has imported it
        record(config.GROUPS, config.FlatArgs)
    else:
        sys.meta_path.insert(0, AfterImport())
