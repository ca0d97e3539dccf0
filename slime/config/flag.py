"""Declarations of flags, from which `--help`, docs/flags.md and the checks are made.

    temperature: float = flag(1.0, range=more_than(0))  →  --temperature 0.7
    colocate: bool = flag(False)                        →  --colocate, and --no-colocate to undo it
    stop: tuple[str, ...] = flag(())                    →  --stop A B
    env: dict[str, Any] = flag({})                      →  --env '{"A": "1"}'
    num_engines: int = derived("formula")               →  its default is computed in `resolve`
    tis_clip: float = flag(2.0, needs=on("use_tis") | on("get_mismatch_metrics"))
    eps_clip_c: float | None = flag(
        None, needs=unless("advantage_estimator", "cispo", why="CISPO clips the weight"))

The annotation is the type, and the docstring under the field is the help text. `megatron_flags` and
`engine_flags` make the same records (`FlagSpec`) of the flags of Megatron, SGLang and the router.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from slime.documentation import with_doc_urls

_KEY = "slime_flag"

Kind = Literal["bool", "int", "float", "str", "json", "int_or_list"]

#: Parts of a run that may read a flag; a run may lack some of them (`slime.config.parts`). The
#: memory plan and the launch checks are no parts: they read flags on behalf of parts.
Part = Literal[
    "config",  # resolution: other flags are derived from it
    "driver",
    "collection",  # rollout process: draws prompts and collects training samples
    "generation",  # rollout process: requests to engines and rewards, also for evaluation
    "samples",  # rollout process: batches of samples
    "trainer",  # trainer ranks, in whatever they do
    "training",  # trainer ranks: optimizer steps and checkpoints
    "push",  # weights from trainer to engines
    "engine",
    "router",
]


def option_of(dest: str) -> str:
    """Return ``--lr-decay-style`` for ``lr_decay_style``."""
    return "--" + dest.replace("_", "-")


# -- range -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``; NaN is in none.

    Attributes:
        above, below: exclude the end ``low`` or ``high``. Below infinity means finite.
        or_minus_one: -1 is allowed too, with a special meaning.
        what: what the number is, for error messages.

    Example:
        >>> Interval(0, 1, above=True).words
        'more than 0 and at most 1'
    """

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False
    or_minus_one: bool = False
    what: str = ""

    def __contains__(self, value: float) -> bool:
        if self.or_minus_one and value == -1:
            return True
        enough = value > self.low if self.above else value >= self.low
        return enough and (value < self.high if self.below else value <= self.high)

    @property
    def words(self) -> str:
        parts = []
        if self.low > -math.inf:
            parts.append(f"{'more than' if self.above else 'at least'} {self.low:g}")
        if self.high < math.inf:
            parts.append(f"{'less than' if self.below else 'at most'} {self.high:.10g}")
        elif self.below:
            parts.append("finite")
        return " and ".join(parts) + (", or -1" if self.or_minus_one else "")


def at_least(low: float, what: str = "") -> Interval:
    return Interval(low, what=what)


def finite(low: float, what: str = "", *, above: bool = False) -> Interval:
    """Return the interval of all finite numbers from ``low`` on."""
    return Interval(low, below=True, above=above, what=what)


SOME = at_least(1)
NONE_OR_SOME = at_least(0)
POSITIVE = finite(0, above=True)
PROBABILITY = Interval(0, 1, above=True, what="a probability")
TOP_K = Interval(1, or_minus_one=True, what="-1 is the whole vocabulary")
SEED = Interval(0, 2**32 - 1, what="a seed of every generator, NumPy's included")
FRACTION = Interval(0, 1, what="a fraction")
WEIGHT = finite(0, "the weight of a loss")

# -- conditions under which a flag has an effect ---------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """The flag ``dest`` has one of ``values``, or any true value if ``values`` is empty;
    ``negated`` inverts this."""

    dest: str
    values: tuple[Any, ...] = ()
    negated: bool = False

    def holds(self, values: Mapping[str, Any]) -> bool:
        value = values.get(self.dest)
        return (value in self.values if self.values else bool(value)) is not self.negated

    @property
    def asked(self) -> str:
        """The condition as a command line: ``--loss-type policy_loss``; several values are joined
        by "or"."""
        return " ".join([option_of(self.dest), " or ".join(map(str, self.values))]).rstrip()

    def found(self, values: Mapping[str, Any]) -> str:
        """Return the flag with its current value, for messages."""
        return (
            f"{option_of(self.dest)} {values[self.dest]}" if self.values else option_of(self.dest)
        )


@dataclass(frozen=True)
class Requirement:
    """A flag has an effect only if one of ``conditions`` holds. Otherwise it is refused.

    Attributes:
        why: why the flag has no effect without them.
        warns: give a warning instead, because only speed depends on the flag, or because a user
            function may read it.
    """

    conditions: tuple[Condition, ...]
    why: str = ""
    warns: bool = False

    def __or__(self, other: Requirement) -> Requirement:
        return Requirement(
            (*self.conditions, *other.conditions), self.why or other.why, self.warns or other.warns
        )

    def __and__(self, other: Requirement) -> tuple[Requirement, ...]:
        return (self, other)

    def holds(self, values: Mapping[str, Any]) -> bool:
        return any(condition.holds(values) for condition in self.conditions)

    def words(self, values: Mapping[str, Any] | None = None) -> str:
        """Describe what is missing.

        Example:
            >>> (on("use_tis") | on("get_mismatch_metrics")).words()
            'without --use-tis or --get-mismatch-metrics'
            >>> (on("eval_config") | unless("loss_type", "sft_loss")).words()
            'with --loss-type sft_loss and without --eval-config'
        """
        present = [s.found(values) if values else s.asked for s in self.conditions if s.negated]
        parts = ["with " + " and ".join(present)] if present else []
        parts += [f"without {self._wanted}"] if self._wanted else []
        return " and ".join(parts)

    def fix(self, option: str) -> str:
        """Return what to do about an unmet requirement of the flag ``option``."""
        passed = f"pass {self._wanted} too, or " if self._wanted else ""
        return f"{passed}leave {option} out"

    @property
    def _wanted(self) -> str:
        """The conditions that are not negated, as in "--use-tis or --get-mismatch-metrics"."""
        return " or ".join(one.asked for one in self.conditions if not one.negated)


def on(dest: str, *values: Any, why: str = "", warns: bool = False) -> Requirement:
    """Require that ``dest`` has one of ``values``; without values, that it is set."""
    return Requirement((Condition(dest, values),), why, warns)


def unless(dest: str, *values: Any, why: str = "", warns: bool = False) -> Requirement:
    """Require that ``dest`` has none of ``values``; without values, that it is not set."""
    return Requirement((Condition(dest, values, negated=True),), why, warns)


#: There is something to evaluate.
EVALUATES = on("eval_prompt_data") | on("eval_config", why="nothing is evaluated")
#: `EVALUATES` for flags that say how to evaluate. It only warns, because scripts keep these flags
#: when they skip evaluation.
EVALUATION_SETTING = dataclasses.replace(EVALUATES, warns=True)
#: Losses that train on the data's own answers.
DATA_LOSSES = ("sft_loss", "preference_loss")
#: Samples are drawn and trained on.
SAMPLES = unless("loss_type", *DATA_LOSSES, why="the data's own answers are trained on")
#: Engines generate, for training or only for evaluation.
GENERATES = SAMPLES | EVALUATES
#: `GENERATES` for flags that say where engines are. It only warns, because scripts keep these flags
#: when they train on data.
ENGINES = (
    unless(
        "loss_type", *DATA_LOSSES, why="training on the data's answers starts no engine", warns=True
    )
    | EVALUATES
)
#: The built-in policy loss runs.
POLICY_LOSS = unless("loss_type", *DATA_LOSSES, "custom_loss", why="it belongs to the policy loss")

# -- the declaration -------------------------------------------------------------------------------


@dataclass(frozen=True)
class FlagMeta:
    """Facts about a flag that its annotation does not state.

    Attributes:
        name: the flag without dashes, where it differs from the field's name.
        aliases: further spellings that set the same field.
        off: spelling that sets a boolean to False, if it is not ``--no-<name>``; "-" if there is
            none. For text with a default: spelling that sets it to "".
        append: the flag may be repeated; each occurrence adds to the list.
        derived: formula of the default that `resolve` computes; empty when the default is a
            constant.
        range: allowed values of a number, or of each number of a list.
        needs: requirements, all of which must hold for the flag to have an effect.
        read_by: the parts of a run that read it; () means the group's ``READ_BY``.
        refused: why setting this flag is not supported in this version; empty when it works.
        refused_values: unsupported values of a supported flag → why.
        instead: values that affect only speed → (replacement, why); a warning tells the user.
        is_reserved: also refused at its default, because slime sets it itself.
        no_effect: why setting this flag changes nothing, for a warning; empty when it does
            something.
    """

    name: str = ""
    aliases: tuple[str, ...] = ()
    off: str = ""
    append: bool = False
    derived: str = ""
    range: Interval | None = None
    needs: tuple[Requirement, ...] = ()
    read_by: tuple[Part, ...] = ()
    refused: str = ""
    refused_values: Mapping[Any, str] = dataclasses.field(default_factory=dict)
    instead: Mapping[Any, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    is_reserved: bool = False
    no_effect: str = ""


NO_META = FlagMeta()


def flag(
    default: Any,
    *,
    needs: Requirement | tuple[Requirement, ...] = (),
    read_by: Part | tuple[Part, ...] = (),
    **meta: Any,
) -> Any:
    """Declare a dataclass field as a flag with a constant default; ``meta`` is as in `FlagMeta`."""
    needed = (needs,) if isinstance(needs, Requirement) else needs
    readers = (read_by,) if isinstance(read_by, str) else read_by
    metadata = {_KEY: FlagMeta(needs=needed, read_by=readers, **meta)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(formula: str, **meta: Any) -> Any:
    """Declare a flag whose default `slime.config.resolve` computes by ``formula``. A resolved
    `Config` has None only if the annotation admits it."""
    return flag(None, derived=formula, **meta)


@dataclass(frozen=True)
class FlagSpec:
    """One flag, whoever defined it.

    Attributes:
        dest: name in YAML files, `make_config` and `args`: the flag with underscores.
        group, attribute: where `Config` keeps the value: ``config.<group>.<attribute>``. A
            flag that is always refused has an empty attribute, as `Config` does not keep it.
        sections: for flags of Megatron and SGLang, the dicts of the group that get the value, if
            the user set it, under the key ``attribute``:
            ``config.megatron.transformer["moe_router_topk"]``.
        kind: type of one value.
        many: takes a list of values (a tuple in `Config`).
        scalar_or_list: a list of one value is kept as that value.
        value_optional: may be given without a value.
        optional: None is allowed, and means unset.
        meta: the declared facts.
        origin: "slime", "megatron-core <version>", "sglang <version>", ….
    """

    dest: str
    group: str
    attribute: str
    kind: Kind
    default: Any
    sections: tuple[str, ...] = ()
    many: bool = False
    scalar_or_list: bool = False
    value_optional: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()
    help: str = ""
    meta: FlagMeta = NO_META
    origin: str = "slime"

    @property
    def option(self) -> str:
        return option_of(self.dest)

    @property
    def options(self) -> tuple[str, ...]:
        return (self.option, *("--" + alias for alias in self.meta.aliases))

    @property
    def off(self) -> str:
        """Spelling that sets a boolean to False, or text to ""; "" if there is none."""
        if self.meta.off:
            return f"--{self.meta.off}" if self.meta.off != "-" else ""
        if self.kind != "bool" or self.dest.startswith(("no_", "disable_")):
            return ""
        return option_of(f"no_{self.dest}")


def specs_of(group: str, cls: Any) -> list[FlagSpec]:
    """Return the flags that a configuration group declares, without its other fields."""
    hints = typing.get_type_hints(cls)
    docs = docs_of(cls)
    specs = []
    for field in dataclasses.fields(cls):
        meta = field.metadata.get(_KEY)
        if meta is None:
            continue
        kind, many, optional, choices = _kind_of(hints[field.name])
        factory = field.default_factory
        specs.append(
            FlagSpec(
                dest=(meta.name or field.name).replace("-", "_"),
                group=group,
                attribute=field.name,
                kind=kind,
                default=field.default if factory is dataclasses.MISSING else factory(),
                many=many,
                optional=optional,
                choices=choices,
                help=docs.get(field.name, ""),
                meta=meta if meta.read_by else dataclasses.replace(meta, read_by=cls.READ_BY),
            )
        )
    return specs


@dataclass(frozen=True, kw_only=True)
class RefusedFlag:
    """A row of `data/refused_flags.toml`; the fields are those of `FlagSpec` and `FlagMeta`."""

    name: str
    kind: Kind
    refused: str
    help: str
    default: Any = None
    many: bool = False
    optional: bool = False
    choices: tuple[Any, ...] = ()
    append: bool = False


def refused_spec(group: str, cls: Any, row: RefusedFlag) -> FlagSpec:
    """Return the flag of a row, which `Config` does not keep, as it cannot be set."""
    return FlagSpec(
        dest=row.name,
        group=group,
        attribute="",
        kind=row.kind,
        default=() if row.many and row.default is None else row.default,
        many=row.many,
        optional=row.optional,
        choices=row.choices,
        help=row.help,
        meta=FlagMeta(refused=with_doc_urls(row.refused), append=row.append, read_by=cls.READ_BY),
    )


def _kind_of(annotation: Any) -> tuple[Kind, bool, bool, tuple[Any, ...]]:
    """Return (kind, many, optional, choices) of a resolved annotation."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin in (types.UnionType, typing.Union):
        inner = [arg for arg in args if arg is not type(None)]
        assert len(inner) == 1, annotation
        kind, many, _, choices = _kind_of(inner[0])
        return kind, many, True, choices
    if origin is tuple:
        kind, _, _, choices = _kind_of(args[0])
        return kind, True, False, choices
    if origin is Literal:
        return "str", False, False, args
    if origin is dict:
        return "json", False, False, ()
    return annotation.__name__, False, False, ()


@functools.cache
def docs_of(cls: type) -> dict[str, str]:
    """Return the docstring under each field of a module's class, by field name, as one line."""
    file = inspect.getsourcefile(cls)
    assert file is not None, cls
    return docs_of_class(_classes_of(file)[cls.__name__])


@functools.cache
def _classes_of(file: str) -> dict[str, ast.ClassDef]:
    """Parse a module once: `inspect.getsource` would for each class, and every command waits."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def docs_of_class(node: ast.AST) -> dict[str, str]:
    """Return the docstrings of a class's fields, by name, from its parsed definition."""
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
