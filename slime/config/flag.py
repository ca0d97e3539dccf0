"""What a flag is: the declaration that `--help`, docs/flags.md, the checks and the refusals are
made from.

    temperature: float = flag(1.0, range=more_than(0))  →  --temperature 0.7
    colocate: bool = flag(False)                        →  --colocate, and --no-colocate to undo it
    stop: tuple[str, ...] = flag(())                    →  --stop A B
    env: dict[str, Any] = flag({})                      →  --env '{"A": "1"}'
    num_engines: int = derived("formula")               →  its default is computed in `resolve`
    tis_clip: float = flag(2.0, needs=on("use_tis") | on("get_mismatch_metrics"))
    eps_clip_c: float | None = flag(
        None, needs=unless("advantage_estimator", "cispo", why="CISPO clips the weight"))

The annotation gives the type, the docstring under the field the help text. Megatron's, SGLang's and
the router's flags have the same record, from the tables in `megatron_flags` and `engine_flags`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from slime.documentation import with_doc_urls

_KEY = "slime_flag"

Kind = Literal["bool", "int", "float", "str", "json", "int_or_list"]

#: The parts of a run that may read a flag; a run may lack some of them (`slime.config.parts`). The
#: memory plan and the launch checks read flags on behalf of these, and are no parts.
Part = Literal[
    "config",  # worked into other flags when a configuration is resolved
    "driver",
    "collection",  # the rollout process, as it draws prompts and collects what is trained on
    "generation",  # the same, as it asks engines and rewards, for evaluations too
    "samples",  # the same, as it makes batches of samples
    "trainer",  # its ranks, whatever they do
    "training",  # the same, as they take steps and save
    "push",  # weights, from trainer to engines
    "engine",
    "router",
]


def option_of(dest: str) -> str:
    """``--lr-decay-style`` of ``lr_decay_style``."""
    return "--" + dest.replace("_", "-")


# -- range -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """Numbers from ``low`` to ``high``; NaN is in none.

    Attributes:
        above, below: an end itself is not in it. Below infinity means finite.
        or_minus_one: -1 has a meaning of its own.
        what: what the number is, for errors.

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

# -- what a flag acts with -------------------------------------------------------------------------


@dataclass(frozen=True)
class Condition:
    """A flag has one of ``values``, or any true value where none is named; ``negated``: it has
    not."""

    dest: str
    values: tuple[Any, ...] = ()
    negated: bool = False

    def holds(self, values: Mapping[str, Any]) -> bool:
        value = values.get(self.dest)
        return (value in self.values if self.values else bool(value)) is not self.negated

    @property
    def asked(self) -> str:
        """``--loss-type policy_loss``, as one would write it; several values with "or" between
        them."""
        return " ".join([option_of(self.dest), " or ".join(map(str, self.values))]).rstrip()

    def found(self, values: Mapping[str, Any]) -> str:
        """Name the flag with the value that it has, for messages."""
        return (
            f"{option_of(self.dest)} {values[self.dest]}" if self.values else option_of(self.dest)
        )


@dataclass(frozen=True)
class Requirement:
    """A flag acts when one of ``conditions`` holds. Else it is refused: it would be ignored.

    Attributes:
        why: why it does nothing without them.
        warns: a warning instead of a refusal: speed alone is at stake, or a function of the user's
            own may read it.
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
        absent = [condition.asked for condition in self.conditions if not condition.negated]
        parts = ["with " + " and ".join(present)] if present else []
        parts += ["without " + " or ".join(absent)] if absent else []
        return " and ".join(parts)

    def fix(self, option: str) -> str:
        absent = " or ".join(
            condition.asked for condition in self.conditions if not condition.negated
        )
        return f"pass {absent} too, or leave {option} out" if absent else f"leave {option} out"


def on(dest: str, *values: Any, why: str = "", warns: bool = False) -> Requirement:
    """Require that ``dest`` has one of ``values``; without values, that it is set."""
    return Requirement((Condition(dest, values),), why, warns)


def unless(dest: str, *values: Any, why: str = "", warns: bool = False) -> Requirement:
    """Require that ``dest`` has none of ``values``; without values, that it is not set."""
    return Requirement((Condition(dest, values, negated=True),), why, warns)


NO_MTP = "training of multi-token-prediction layers is not in this version"
#: There is something to evaluate.
EVALUATES = on("eval_prompt_data") | on("eval_config", why="nothing is evaluated")
#: `EVALUATES` for flags that say how to evaluate. Scripts that evaluate only at times keep them, so
#: that it is a warning.
EVALUATION_SETTING = dataclasses.replace(EVALUATES, warns=True)
#: Losses that train on the data's own answers.
DATA_LOSSES = ("sft_loss", "preference_loss")
#: Samples are drawn and trained on.
SAMPLES = unless("loss_type", *DATA_LOSSES, why="the data's own answers are trained on")
#: Engines generate something, if only for an evaluation.
GENERATES = SAMPLES | EVALUATES
#: `GENERATES` for flags that say where engines are. Scripts that also train on data keep them, so
#: that it is a warning.
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
    """Facts about a flag beside its annotation.

    Attributes:
        name: the flag without dashes, where it differs from the field's name.
        aliases: further spellings that set the same field.
        off: spelling that sets a boolean to False, where it is not ``--no-<name>``; "-" when there
            is none. Of text with a default: spelling that sets it to "".
        append: the flag may be repeated; each occurrence adds to the list.
        derived: formula of the default that `resolve` computes; empty when the default is a
            constant.
        range: allowed values of a number, or of each number of a list.
        needs: the conditions under which it acts, all of them.
        read_by: the parts of a run that read it; () is the group's ``READ_BY``.
        refused: why setting this flag is not supported in this version; empty when it works.
        refused_values: the same for single values of a flag that otherwise works.
        instead: single values that ask for speed alone → what is taken in their place, with a
            warning, and why.
        is_reserved: refused at its default, too: this system sets it itself.
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
    """A dataclass field that is a flag with a constant default; see `FlagMeta` for the keywords."""
    needed = (needs,) if isinstance(needs, Requirement) else needs
    readers = (read_by,) if isinstance(read_by, str) else read_by
    metadata = {_KEY: FlagMeta(needs=needed, read_by=readers, **meta)}
    if isinstance(default, dict):
        return dataclasses.field(default_factory=lambda: dict(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def derived(formula: str, **meta: Any) -> Any:
    """A flag whose default `slime.config.resolve` computes by ``formula``; never unset in a
    resolved `Config` unless the annotation admits None."""
    return flag(None, derived=formula, **meta)


@dataclass(frozen=True)
class FlagSpec:
    """One flag, whoever defined it.

    Attributes:
        dest: name in YAML files, `make_config` and `args`: the flag with underscores.
        group, attribute: where `Config` keeps the value: ``config.<group>.<attribute>``. A
            flag that is always refused has no place there, and no attribute.
        sections: for flags of Megatron and SGLang, the dicts of the group that get the value, if
            the user set it, under the key ``attribute``:
            ``config.megatron.transformer["moe_router_topk"]``.
        kind: type of one value; ``many`` says that the flag takes a list of them (a tuple in
            `Config`).
        scalar_or_list: a list of one is kept as that one value.
        value_optional: may be given without a value.
        optional: None is a value (unset).
        meta: what was declared beside the type.
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
        """Spelling that sets a boolean to False, or text to nothing; empty when there is none."""
        if self.kind != "bool":
            return f"--{self.meta.off}" if self.meta.off.strip("-") else ""
        if self.meta.off:
            return "--" + self.meta.off if self.meta.off != "-" else ""
        return (
            ""
            if self.dest.startswith(("no_", "disable_"))
            else "--no-" + self.dest.replace("_", "-")
        )


def specs_of(group: str, cls: Any) -> list[FlagSpec]:
    """The flags that a configuration group declares; its fields that are no flags are left out."""
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
    """The flag of a row. `Config` has no place for it, as it cannot be set."""
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
    """(kind, many, optional, choices) of a resolved annotation."""
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
    """The docstring under each field of a class, by field name, as one line."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    return docs_of_class(tree.body[0])


def docs_of_class(node: ast.AST) -> dict[str, str]:
    """Return the docstrings of a class's fields, by name, from its definition that was only
    parsed."""
    assert isinstance(node, ast.ClassDef)
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs
