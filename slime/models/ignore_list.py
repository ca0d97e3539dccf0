"""Check an ignore list: rules that name the layers of a model that are not quantised.

Rules have the format of compressed-tensors: the name of a module, or ``re:`` and an expression that
matches the beginning of a name. Engines match modules, not weights, so for a Linear layer a rule
must match the module. For other modules a rule may match the weight
(``model.embed_tokens.weight``), as only quantisers read it: an online quantiser quantises every
two-dimensional weight that no rule matches, even of a router. Engines do not expect a quantised
router, drop it, and compute with zeros.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from operator import eq

from slime.errors import UserError, first_few
from slime.models.quantised import FOR_FP8, Quantisation
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily, shapes_of

#: Rules for models with experts, of which only the routed experts are quantised.
FOR_EXPERTS = (
    "lm_head",
    "model.embed_tokens.weight",
    r"re:.*self_attn.*",
    r"re:.*mlp\.shared_expert.*",  # and its gate
    *(rf"re:.*mlp\.{name}_proj.*" for name in ("gate_up", "gate", "up", "down")),
    r"re:.*eh_proj.*",
    r"re:.*shared_head\.head.*",
    r"re:.*mlp\.gate\..*",
    r"re:.*block_sparse_moe\.gate\..*",  # Mixtral's router
)
#: Layers that engines fuse, so either all or none of a fused layer must be quantised: module →
#: (name of the fused layer, index in it).
FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
}
#: Linear layers that exist only in multi-token-prediction layers.
_MTP_LINEAR = ("eh_proj", "shared_head.head")


@dataclass(frozen=True)
class WeightMatrix:
    """A two-dimensional weight.

    Attributes:
        module: name of the weight without ``.weight``.
        is_linear: the module is a Linear layer.
        kernel: the engines' fused layer that contains it; the module itself if there is none.
        is_tied: it is an output layer that shares the embedding's weight.
    """

    module: str
    shape: tuple[int, int]
    is_linear: bool
    kernel: str
    is_tied: bool = False

    @property
    def weight(self) -> str:
        return f"{self.module}.weight"


def matrices(
    family: ModelFamily, spec: ModelSpec, surplus: Iterable[tuple[str, tuple[int, ...]]] = ()
) -> list[WeightMatrix]:
    """Return all two-dimensional weights of a model.

    Args:
        surplus: names and shapes of further tensors of a checkpoint: multi-token-prediction
            layers, which engines support.
    """
    tied: dict[str, tuple[int, ...]] = {}
    for rule in family.rules if spec.tie_embeddings else ():
        if rule.tied_to is not None:
            tied |= {
                name.removesuffix(".weight"): shape
                for name, shape in zip(rule.hf_names, shapes_of(rule, spec))
            }
    kinds: dict[str, bool] = {}  # one lookup for all experts of a kind
    groups = family.load_groups(spec)
    found = []
    for name, shape in [*family.hf_tensors(spec), *surplus]:
        if len(shape) != 2 or not name.endswith(".weight"):
            continue
        kind = re.sub(r"\.\d+\.", ".0.", name)
        if kind not in kinds:
            kinds[kind] = _is_linear(family, kind)
        module = name.removesuffix(".weight")
        if module not in tied:  # some checkpoints contain the tied weight nevertheless
            kernel = groups.fused_module(module) or _kernel(module)
            found.append(WeightMatrix(module, (shape[0], shape[1]), kinds[kind], kernel))
    layers = [
        WeightMatrix(module, (shape[0], shape[1]), True, module, is_tied=True)
        for module, shape in tied.items()
    ]
    return found + layers


def _is_linear(family: ModelFamily, name: str) -> bool:
    found = family.match_hf(name)
    return found[0].is_linear if found else name.removesuffix(".weight").endswith(_MTP_LINEAR)


def _kernel(module: str) -> str:
    experts, is_expert, _ = module.partition(".experts.")
    if is_expert:
        return f"{experts}.experts"
    parent, _, last = module.rpartition(".")
    return f"{parent}.{FUSED[last][0]}" if last in FUSED else module


@lru_cache(maxsize=256)
def _matcher(rule: str) -> Callable[[str], object]:
    if not rule.startswith("re:"):
        return partial(eq, rule)
    try:
        return re.compile(rule.removeprefix("re:")).match
    except re.error as error:
        raise UserError(
            f"the rule {rule!r} of an ignore list is no regular expression",
            why=str(error),
            fix="correct the rule in the ignore list",
        ) from error


def names(rule: str, name: str) -> bool:
    """Tell whether a rule matches a module, as in compressed-tensors and the engines: by the whole
    name, or by ``re:`` and an expression.

    Raises:
        UserError: the expression cannot be read.

    Example:
        >>> module = "model.layers.10.mlp.up_proj"
        >>> names("model.layers.1", module), names(r"re:.*mlp\\.up", module), names(module, module)
        (False, True, True)
    """
    return bool(_matcher(rule)(name))


@dataclass(frozen=True)
class Findings:
    """Effect of an ignore list on a model, and its problems.

    Attributes:
        quantised: Linear layers that no rule matches.
        ignored: Linear layers that a rule matches.
        unspared: 2-D weights outside Linear layers that no rule matches.
        idle: rules that match no matrix.
        by_weight: Linear layers of which a rule matches the weight, but none the module.
        torn: fused layers of engines that would be quantised only in part.
        misfits: Linear layers that no rule matches but the format cannot store, with the reason.
        tied: output layers that share the embedding's weight and that no rule matches.
    """

    quantised: tuple[WeightMatrix, ...]
    ignored: tuple[WeightMatrix, ...]
    unspared: tuple[str, ...]
    idle: tuple[str, ...]
    by_weight: tuple[str, ...]
    torn: tuple[str, ...]
    misfits: tuple[str, ...]
    tied: tuple[str, ...] = ()

    def problems(self) -> list[str]:
        """Explain why the model must not be quantised with this list; [] if it may. Idle rules are
        harmless."""
        kinds = (
            (
                self.unspared,
                "no Linear layer, and no rule names it: it would be quantised and end as zeros",
            ),
            (
                self.by_weight,
                "a rule names its weight: engines match modules, write the name without .weight",
            ),
            (self.torn, "engines compute it with one kernel, and only a part of it is ignored"),
            (self.misfits, "neither ignored nor possible to quantise"),
            (
                self.tied,
                "the embedding takes its place, and no rule names it: readers would look for its "
                "packed weight",
            ),
        )
        return [f"{first_few(found)}: {why}" for found, why in kinds if found]


def examine(weights: Sequence[WeightMatrix], quantisation: Quantisation) -> Findings:
    """Compare the rules of a model with its modules."""
    # compiled once: a large model has 40 thousand modules
    rules = [_matcher(rule) for rule in quantisation.ignore]
    idle = dict(zip(quantisation.ignore, rules))
    quantised = []
    ignored = []
    unspared = []
    by_weight = []
    misfits = []
    tied = []
    kernels = defaultdict[str, set[bool]](set)
    for matrix in weights:
        module = matrix.module
        weight = matrix.weight
        matches_module = any(matches(module) for matches in rules)
        matches_weight = not matches_module and any(matches(weight) for matches in rules)
        if matches_module or matches_weight:
            idle = {
                rule: matches
                for rule, matches in idle.items()
                if not (matches(module) or matches(weight))
            }
        if not matrix.is_linear:
            # the list of fp8 concerns only Linear layers: no quantiser reads it
            if not matches_module and not matches_weight and quantisation.method != "fp8":
                unspared.append(matrix.weight)
            continue
        if matrix.is_tied:
            # compressed-tensors quantises every Linear module that no rule matches; with fp8,
            # engines use the embedding
            if not matches_module and quantisation.method != "fp8":
                tied.append(matrix.module)
            continue
        kernels[matrix.kernel].add(matches_module)
        if matches_module:
            ignored.append(matrix)
            continue
        quantised.append(matrix)
        misfit = quantisation.scheme.misfit(matrix.shape)
        if matches_weight:
            by_weight.append(matrix.weight)
        elif misfit:
            misfits.append(f"{matrix.module} ({misfit})")
    return Findings(
        tuple(quantised),
        tuple(ignored),
        tuple(unspared),
        tuple(
            rule for rule, matches in idle.items() if not any(matches(kernel) for kernel in kernels)
        ),
        tuple(by_weight),
        tuple(kernel for kernel, states in kernels.items() if len(states) == 2),
        tuple(misfits),
        tuple(tied),
    )


def idle_among(found: Findings, tensors: Iterable[str]) -> tuple[str, ...]:
    """Return the idle rules that match no other module of a model either. Published lists also name
    norms, which have no matrix.

    Args:
        tensors: names of all tensors of the model.
    """
    if found.idle:
        known = {name for tensor in tensors for name in (tensor, tensor.rpartition(".")[0])}
    else:
        known = set()
    return tuple(rule for rule in found.idle if not any(map(_matcher(rule), known)))


def refuse_stacks(family: ModelFamily, method: str) -> None:
    """Refuse INT4 and FP8 for families that store all experts of a layer in one tensor.

    Raises:
        UserError: the family stacks its experts.
    """
    if family.stacks_experts:
        raise UserError(
            f"models of the family {family.name} are not quantised by {method}",
            why="their experts are stacked in one tensor, which engines do not support in INT4 or "
            "FP8",
            fix="use the model with unquantised weights; slime convert hf-to-mxfp4 stores stacked "
            "experts in 4-bit floats",
        )


def refuse_untried(family: ModelFamily, method: str) -> None:
    """Refuse INT4 and FP8 for families whose quantised layers were not tested with engines.

    Raises:
        UserError: the family has gated delta nets or a vision tower.
    """
    untried = ""
    if any("linear_attn." in name for rule in family.rules for name in rule.hf_names):
        untried = "which projections of gated delta nets"
    elif any("vision" in pattern or "visual" in pattern for pattern in family.carried):
        untried = "which layers of vision towers"
    if untried:
        raise UserError(
            f"models of the family {family.name} are not quantised by {method}",
            why=f"{untried} engines hold quantised was not tested",
            fix="use the model with unquantised weights",
        )


def check(family: ModelFamily, spec: ModelSpec, quantisation: Quantisation) -> Findings:
    """Check the ignore list in the config.json of a quantised model.

    Raises:
        UserError: engines would compute wrong numbers with the list; names the modules.
    """
    refuse_stacks(family, quantisation.method)
    refuse_untried(family, quantisation.method)
    found = examine(matrices(family, spec), quantisation)
    if found.problems():
        raise UserError(
            "the ignore list of the model's quantization_config does not fit its modules",
            why="\n  ".join(found.problems()),
            fix="correct the list in config.json, or quantise the model again with slime convert",
        )
    return replace(found, idle=idle_among(found, (name for name, _ in family.hf_tensors(spec))))


def recommended(weights: Sequence[WeightMatrix], *, fp8: bool = False) -> tuple[str, ...]:
    """Return the recommended rules for a model, without rules that match nothing in it."""
    has_experts = any(matrix.kernel.endswith(".experts") for matrix in weights)
    rules = (
        FOR_FP8 if fp8 else FOR_EXPERTS if has_experts else (*FOR_FP8, "model.embed_tokens.weight")
    )
    return tuple(
        rule for rule in rules if any(_names_any(_matcher(rule), matrix) for matrix in weights)
    )


def _names_any(matches: Callable[[str], object], matrix: WeightMatrix) -> bool:
    return any(matches(name) for name in (matrix.module, matrix.weight, matrix.kernel))
