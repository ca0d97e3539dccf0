"""What the declarations of flags are held against: the files that read each flag (by their syntax
trees), the parts of a run for which they do, and values to try a flag with."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from slime.config.flag import FlagSpec, Part
from slime.config.flags import GROUPS, all_flags, own_flags

ROOT = Path(__file__).parents[2] / "slime"

#: For whom the code in each place reads flags, below slime/; the longest that fits says it. Where
#: several are named, it reads a flag for one of them at least.
PLACES: dict[str, tuple[Part, ...]] = {
    "agents": ("generation",),
    "checkpoints": ("trainer",),
    "checkpoints/load_plan.py": ("driver", "trainer", "training"),  # names the run's folder
    "cluster": ("driver",),
    "cluster/engine_actor.py": ("engine",),
    "cluster/engines.py": ("engine",),
    "cluster/external_engines.py": ("engine",),
    # "training": it is told of the trainer's saves
    "cluster/rank_group.py": ("trainer",),
    "cluster/rollout_actor.py": ("collection", "generation", "samples", "training"),
    "cluster/routers.py": ("engine", "router"),
    "cluster/trainer_group.py": ("trainer", "training"),
    "cluster/weight_push.py": ("push",),
    "embedded": ("engine",),
    "engines": ("engine",),
    "environments": ("generation",),
    "engines/client.py": ("generation",),
    "engines/router.py": ("router",),
    # drafts are refused beside what requests ask for
    "engines/sglang/drafts.py": ("engine", "generation"),
    "models": ("trainer",),
    "models/context.py": ("collection", "generation", "engine", "trainer"),
    "models/layout_rules.py": ("trainer", "training"),  # modules to recompute that a model lacks
    "observe": ("driver",),
    "observe/recorder.py": ("driver", "samples"),
    "observe/run_folder.py": ("driver", "training"),  # holds the folder of the trainer's saves
    "prompts": ("collection", "generation"),
    # saved and loaded with the trainer; measured against the context of the engines' model
    "prompts/source.py": ("collection", "generation", "training", "trainer", "engine"),
    "rollout": ("generation",),
    "rollout/debug_data.py": ("samples", "trainer"),
    "rollout/evaluate.py": ("collection", "generation"),
    "rollout/finish.py": ("collection", "generation"),
    "rollout/journal.py": ("collection", "generation"),
    "rollout/loop.py": ("collection", "generation"),
    "rollout/metrics.py": ("collection", "samples"),
    "rollout/preferences.py": ("collection", "generation"),
    # it tells reference models of the trainer apart
    "rollout/reference_cache.py": ("collection", "trainer"),
    "rollout/rewards/pool.py": ("collection", "generation"),
    "rollout/sft.py": ("collection", "generation"),
    "rollout/user_rollouts.py": ("collection", "generation"),
    "rollout/teachers.py": ("collection", "generation", "samples"),
    "samples": ("samples",),
    "sandbox": ("generation",),
    "trainer": ("training",),
    "trainer/megatron": ("trainer", "training"),
    "trainer/user_functions.py": ("trainer", "training"),
    "trainer/megatron/parallel.py": ("trainer",),
    "trainer/megatron/te_layers.py": ("trainer",),
    "weights": ("push",),
    "weights/canary.py": ("push", "engine"),  # names what the engines' flags exclude
}
#: The driver drives all parts by these; a flag that these alone read serves any.
DRIVES = (
    "cluster/run_cluster.py", "loop.py", "placement.py", "run/profiling.py", "run/saving.py",
    "run/schedule.py", "run/session.py",
)  # fmt: skip
#: Plan and launch checks look ahead for all parts: what they read they refuse or warn of, and no
#: part acts by it.
LOOKS_AHEAD = (
    "cli", "cluster/engine_fit.py", "diagnosis", "forecast", "compat", "memory",
    "rollout/rewards/row_checks.py", "rollout/validate_rows.py", "run/ancestry.py",
    "run/changed_inputs.py", "run/preflight.py", "trainer/quantised_rules.py", "user_code/hooks.py",
    "weights/quantised_launch.py",
)  # fmt: skip

#: A flag of which one value works asks for nothing.
WORKING = {
    dest: spec
    for dest, spec in own_flags().items()
    if not (spec.meta.refused or spec.meta.no_effect)
    and len(set(spec.choices) - {*spec.meta.refused_values, *spec.meta.instead}) != 1
}
ALL_WORKING = {
    dest: spec
    for dest, spec in all_flags().items()
    if not spec.meta.refused and not spec.meta.no_effect
}

# -- who reads a flag ------------------------------------------------------------------------------


def words_of(node: ast.AST) -> str:
    """`ast.unparse`, which takes long, of names with dots at once."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, (ast.Name, ast.Attribute)):
        return f"{words_of(node.value)}.{node.attr}"
    return ast.unparse(node)


def reads_of(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(group, field) of every ``config.group.field`` that a module reads, also through a name for
    ``config.group`` or for that name, and ("args", name) of what it reads of a hook's ``args`` or
    of flags by name."""
    groups_of: dict[str, set[str]] = {}
    names: list[tuple[str, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                for name, value in pairs:
                    if isinstance(value, ast.Attribute) and value.attr in GROUPS:
                        groups_of.setdefault(words_of(name), set()).add(value.attr)
                    elif isinstance(value, (ast.Attribute, ast.Name)):
                        names.append((words_of(name), words_of(value)))
        elif isinstance(node, ast.arg) and node.annotation is not None:
            annotation = words_of(node.annotation)
            for group, cls in GROUPS.items():
                if annotation == cls.__name__:
                    groups_of.setdefault(node.arg, set()).add(group)
    for name, other in names:
        groups_of.setdefault(name, set()).update(groups_of.get(other, ()))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            owner = node.value
            if isinstance(owner, ast.Attribute) and owner.attr in GROUPS:
                yield owner.attr, node.attr
            for group in groups_of.get(words_of(owner), ()):
                yield group, node.attr
            if words_of(owner).split(".")[-1].lstrip("_") == "args":
                yield "args", node.attr
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if words_of(node.value) in ("draft", "draft.values"):
                yield "args", str(node.slice.value)
        elif isinstance(node, ast.Call) and words_of(node.func).endswith(
            ("draft.copy", ".values.get", "getattr")
        ):
            yield from (("args", arg.value) for arg in node.args if isinstance(arg, ast.Constant))


def parts_of(file: str) -> tuple[Part, ...] | None:
    """For whom the code of a file below slime/ reads flags; None: for all."""
    if any(is_within(file, place) for place in (*DRIVES, *LOOKS_AHEAD)):
        return None
    return PLACES[max((place for place in PLACES if is_within(file, place)), key=len)]


def is_within(file: str, place: str) -> bool:
    return file == place or file.startswith(f"{place}/")


def acts_for(file: str, part: Part) -> bool:
    """Whether a part may do something by what a file reads. Looking ahead is the driver's."""
    parts = parts_of(file)
    if parts is None:
        return part == "driver" or file in DRIVES
    return part in parts


@cache
def readers() -> dict[tuple[str, str], set[str]]:
    """(group, field), or ("args", name), → the files outside the configuration that read it."""
    found: dict[tuple[str, str], set[str]] = {}
    for path in sorted(ROOT.rglob("*.py")):
        file = str(path.relative_to(ROOT))
        if not file.startswith("config/"):
            for read in reads_of(ast.parse(path.read_text(encoding="utf-8"))):
                for one in fields_of(*read):
                    found.setdefault(one, set()).add(file)
    return found


def fields_of(owner: str, name: str) -> set[tuple[str, str]]:
    """Of a group's property the fields that it reads, for who reads the property; else the
    attribute itself."""
    function = getattr(vars(GROUPS.get(owner, object)).get(name), "fget", None)
    if function is None:
        return {(owner, name)}
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    names = [
        n.attr
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"
    ]
    return set().union(*(fields_of(owner, name) for name in names))


def files_that_read(spec: FlagSpec) -> set[str]:
    """Those outside the configuration."""
    return set().union(*(readers().get(read, set()) for read in names_of(spec)))


def names_of(spec: FlagSpec) -> set[tuple[str, str]]:
    """Under which a flag is read: of `Config`, and of ``args``."""
    return {(spec.group, spec.attribute), ("args", spec.dest)}


@cache
def worked_into_others() -> frozenset[tuple[str, str]]:
    """What the configuration itself reads."""
    files = [
        ROOT / "config" / name for name in ("resolve.py", "checks.py", "checks_train.py", "make.py")
    ]
    return frozenset(
        read for file in files for read in reads_of(ast.parse(file.read_text(encoding="utf-8")))
    )


# -- values ----------------------------------------------------------------------------------------


def not_taken(spec: FlagSpec) -> set[Any]:
    """Values that are refused, or another one is taken instead."""
    return {*spec.meta.refused_values, *spec.meta.instead}


def other_than_default(spec: FlagSpec) -> Any:
    chosen = {
        "spec": ("my.layers", "layers"),
        "prefill_num_servers": 1,
        "rewards_normalization": False,
        "profile_steps": "0:1",
        "kl_loss_type": "k2",
        "preference_label_smoothing": 0.1,
    }
    if spec.dest in chosen:
        return chosen[spec.dest]
    if spec.kind == "bool":
        return not spec.default
    if spec.choices:
        value = next(c for c in spec.choices if c not in ("auto", spec.default, *not_taken(spec)))
        return (value,) if spec.many else value
    if spec.dest == "rollout_external_engine_addrs":
        return ("host:7",)
    if spec.kind in ("str", "json"):
        return ("x",) if spec.many else {"a": 1} if spec.kind == "json" else "x_{rollout_id}"
    numbers = [n for n in (1.5, 7, 0.5, 0.25) if n == 7 or spec.kind == "float"]
    number = next(
        n
        for n in numbers
        if n != spec.default and (spec.meta.range is None or n in spec.meta.range)
    )
    return (number,) if spec.many else number


def values_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """What a configuration of these settings holds, as far as needs look at it: flags of other
    programs are there where they are set."""
    plain = {dest: spec.default for dest, spec in all_flags().items() if not spec.sections} | {
        "rollout_engine": "embedded"
    }
    return plain | dict(settings)
