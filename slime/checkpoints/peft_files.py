"""PEFT adapter directories: `adapter_config.json` and `adapter_model.safetensors`.

    adapter = read_adapter("outputs/sums/adapter")
    adapter.rank, adapter.alpha                         one rank and one alpha for all modules
    adapter[peft_name("model.layers.0.mlp.up_proj", "A")][0:4]             reads these rows only
    fitted(adapter, adapters, family, spec)             the tensors of the trainer's table
    write_adapter("outputs/sums/adapter", tensors, adapters, spec, base="Qwen/Qwen3-4B")

Readers always get names of single experts, `…mlp.experts.7.gate_proj.lora_A.weight`, from both of
PEFT's layouts:

    per-expert   the names above, matrices [rank, in] and [out, rank]. SGLang and vLLM load these,
                 and PEFT converts them while loading
    peft-3d      one tensor for all experts of a layer, as PEFT saves them: A [experts·rank, in] is
                 expert-major, B [out, rank·experts] is rank-major. Gate and up are one parameter of
                 twice the rank, whose B is block-diagonal; its rows have the order of the model's
                 own stack (gpt-oss: gate and up alternate)

PEFT converts single experts only for families whose checkpoints have them. Adapters of families
with stacks are written as peft-3d.

Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from slime.checkpoints.directory import partial_dir, publish
from slime.checkpoints.hf_files import LazyTensor, open_safetensors
from slime.engines.adapters import FUSED_SETS
from slime.errors import UserError, contents_of, first_few
from slime.files import entries_of
from slime.hub import hub_name
from slime.models import table_of
from slime.models.adapters import (
    PEFT_PREFIX,
    AdapterConfig,
    Side,
    adapted_layers,
    adapter_family,
    by_expert,
    leaves,
    peft_name,
    split_peft_name,
    with_module,
    with_single_experts,
)
from slime.models.layouts import TensorSource
from slime.models.nested import SAME_NAMES, ModuleNames
from slime.models.peft_config import (
    CONFIG,
    is_adapter_dir,
    is_frozen_copy,
    moves_base,
    plain_config,
    scale_of,
)
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily

if TYPE_CHECKING:
    import torch

WEIGHTS = "adapter_model.safetensors"

ExpertLayout = Literal["per-expert", "peft-3d"]

#: PEFT release whose format is written. PEFT compares it with its own version.
_PEFT_VERSION = "0.21.2"

_KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)\.(?P<side>lora_[AB](?=\.)|lora_embedding_[AB])"
    r"(?:\.default)?(?:\.weight)?"
)
_STACKED = re.compile(r"(?P<experts>.+\.experts)(?P<inner>\.base_layer)?")
_EXPERT = re.compile(r"(?P<experts>.+\.experts)\.(?P<expert>\d+)\.(?P<leaf>\w+)")
_GATE_UP = "gate_up_proj"
_DOWN = "down_proj"
_MLP_LEAVES = ("gate_proj", "up_proj", "down_proj")
#: Fields of PEFT's config with which engines do not load the tensors as they are.
_NOT_LOADED = ("rank_pattern", "alpha_pattern", "use_rslora", "layers_to_transform")


@dataclass(frozen=True)
class PeftAdapter:
    """A PEFT adapter whose tensors are read on demand, with one rank and one scaling.

    Attributes:
        base: the base model in the file: a path or a name on the hub; "" if there is none.
        rank: rank of all modules; modules of lower rank are padded with zeros.
        alpha: every module is scaled by ``alpha / rank``. rsLoRA and scalings of single modules are
            folded into alpha, and into B where they differ.
        targets: leaf names of the adapted modules, sorted.
        tensors: name → lazy tensor. ``lora_A`` is [rank, in], ``lora_B`` [out, rank];
            ``lora_embedding_A`` is [rank, vocabulary], ``lora_embedding_B`` [hidden, rank].
        is_joined: in the files gate and up of each expert have the A's of both, and ranks are twice
            as large (`slime.models.adapters.joins_gate_and_up`).
    """

    directory: Path
    base: str
    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    tensors: Mapping[str, TensorSource] = field(repr=False)
    is_joined: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / self.rank

    def names(self) -> set[str]:
        return set(self.tensors)

    def __getitem__(self, name: str) -> TensorSource:
        return self.tensors[name]

    def items(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, whole tensor)."""
        return ((name, source[:]) for name, source in self.tensors.items())


def module_of(name: str) -> str:
    """Return the module that an adapter's tensor belongs to.

    Example:
        >>> module_of("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
        'model.layers.0.self_attn.q_proj'
    """
    found = _KEY.fullmatch(name)
    if found is None:
        raise ValueError(f"{name} is no name of an adapter's tensor")
    return found["module"]


def _side(name: str) -> Side:
    split = split_peft_name(name)
    assert split is not None, name
    return split[1]


# -- reading ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Computed:
    """A tensor that is computed from others when it is read."""

    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.make()[index]


@dataclass(frozen=True)
class _Factors:
    """A [rank, in] and B [out, rank] of one module, whose product is scaled by ``scaling``."""

    a: TensorSource
    b: TensorSource
    scaling: float
    names: tuple[str, str] = ("lora_A.weight", "lora_B.weight")

    @property
    def rank(self) -> int:
        return int(self.a.shape[0])


def read_adapter(directory: str | Path, family: ModelFamily | None = None) -> PeftAdapter:
    """Open a PEFT adapter of either layout; tensors are read when they are indexed.

    Args:
        family: of the base. Its files may name modules otherwise than transformers does; the
            adapter's tensors get the names of files. None leaves them as they are, and takes gate
            rows of stacked experts to be before up rows.
    Raises:
        UserError: files are missing or damaged; the adapter is not plain LoRA (DoRA, biases, saved
            modules, an initialisation that changes the base); or a tensor (named) has no partner,
            is no part of an adapter, or has a wrong shape.
    """
    path = Path(directory)
    config = read_config(path)
    _refuse_other_kinds(config, path)
    _check_weights_file(path / WEIGHTS)
    content = open_safetensors(path / WEIGHTS)
    found: dict[str, dict[str, str]] = {}
    for key in content.keys():  # noqa: SIM118  ``content`` is no dict
        if is_frozen_copy(key):
            continue
        parts = _KEY.fullmatch(key)
        if parts is None:
            raise UserError(
                f"{path} has a tensor {key} that is no part of a LoRA adapter",
                why="only lora_A and lora_B (lora_embedding_A and _B) of modules are",
                fix="save the adapter again with PEFT, without modules_to_save",
            )
        found.setdefault(parts["module"], {})[parts["side"]] = key
    modules: dict[str, _Factors] = {}
    alternates = family is not None and family.interleaves_experts
    for module, keys in found.items():
        modules |= _read_module(module, keys, set(found), content, config, path, alternates)
    is_joined = alternates and _are_joined(modules)
    if is_joined:
        modules = _parted(modules)
    in_files = family.modules.in_files if family is not None else str
    modules = {
        in_files(module): factors for module, factors in modules.items() if not _is_void(factors)
    }
    if not modules:
        raise UserError(f"{path} adapts no module", why=f"{WEIGHTS} has no lora_A and lora_B")
    rank = max(factors.rank for factors in modules.values())
    scaling = Counter(factors.scaling for factors in modules.values()).most_common(1)[0][0]
    tensors: dict[str, TensorSource] = {}
    for module in sorted(modules, key=_natural):
        factors = modules[module]
        for name, source in zip(factors.names, _folded(factors, rank, scaling)):
            tensors[f"{PEFT_PREFIX}{module}.{name}"] = source
    return PeftAdapter(
        path,
        str(config.get("base_model_name_or_path") or ""),
        rank,
        rank * scaling,
        float(config.get("lora_dropout") or 0.0),
        tuple(sorted({module.rpartition(".")[2] for module in modules})),
        tensors,
        is_joined,
    )


def check_adapter(directory: str | Path) -> None:
    """Check an adapter without reading its tensors.

    Raises:
        UserError: files are missing, or the adapter is not plain LoRA.
    """
    path = Path(directory)
    _refuse_other_kinds(read_config(path), path)
    _check_weights_file(path / WEIGHTS)


def read_config(directory: str | Path) -> dict[str, Any]:
    """Read the adapter_config.json of a directory.

    Raises:
        UserError: the file is missing or damaged.
    """
    path = Path(directory) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("it is not an object")
    except FileNotFoundError as error:
        raise UserError(
            f"{directory} is no PEFT adapter",
            why=f"it has no {CONFIG}; it holds: {contents_of(Path(directory))}",
            fix=f"pass the directory that has {CONFIG} and {WEIGHTS}",
        ) from error
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is damaged", why=str(error), fix="save the adapter again, or download it again"
        ) from error
    return config


def _check_weights_file(path: Path) -> None:
    if not path.is_file():
        pickled = path.with_suffix(".bin").is_file()
        raise UserError(
            f"there is no {path}",
            why=f"the directory has {path.stem}.bin, which runs code when it is read"
            if pickled
            else "",
            fix="save the adapter again with safe_serialization=True"
            if pickled
            else "download the adapter again",
        )


def _refuse_other_kinds(config: Mapping[str, Any], path: Path) -> None:
    """Refuse adapters that are more than W + s·B·A."""
    variants = sorted(
        name
        for name, value in config.items()
        if (name.startswith("use_") and name != "use_rslora" and value)
        or (name in ("alora_invocation_tokens", "arrow_config", "layer_replication") and value)
        or (name in ("trainable_token_indices", "lora_bias", "fan_in_fan_out") and value)
    )
    bias = config.get("bias", "none")
    for wrong, what in (
        (config.get("peft_type") != "LORA", f"its peft_type is {config.get('peft_type')!r}"),
        (bool(config.get("use_dora")), "it is DoRA (use_dora), which also scales whole columns"),
        (bool(variants), f"it sets {', '.join(variants)}"),
        (bias not in ("none", None), f"it trains biases (bias {bias!r})"),
        (
            bool(config.get("modules_to_save")),
            f"it has whole modules (modules_to_save {config.get('modules_to_save')})",
        ),
        (
            moves_base(config),
            f"it was initialised by {config.get('init_lora_weights')!r}, which changes the base's "
            "own weights",
        ),
    ):
        if wrong:
            raise UserError(
                f"the adapter {path} is not plain LoRA",
                why=what,
                fix="merge it into its base with PEFT (merge_and_unload), and use the merged model",
            )


def _read_module(
    module: str,
    keys: Mapping[str, str],
    all_modules: set[str],
    content: Any,
    config: Mapping[str, Any],
    path: Path,
    alternates: bool,
) -> dict[str, _Factors]:
    """Return the factors of a module of the file, by slime's module names; ``alternates``: see
    `_gate_and_up`."""
    is_embedding = any(side.startswith("lora_embedding") for side in keys)
    sides = ("lora_embedding_A", "lora_embedding_B") if is_embedding else ("lora_A", "lora_B")
    missing = [side for side in sides if side not in keys]
    if missing:
        raise UserError(
            f"{path}: {module} has no {missing[0]}",
            why=f"there is {', '.join(keys.values())} alone",
            fix="save the adapter again: it is incomplete",
        )
    a, b = (LazyTensor(content.get_slice(keys[side])) for side in sides)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise UserError(
            f"{path}: {module} has factors of shape {list(a.shape)} and {list(b.shape)}",
            why="factors are matrices",
            fix="save the adapter with PEFT, which writes no others",
        )
    stacked = _STACKED.fullmatch(module)
    if stacked is not None:
        leaf = _stacked_leaf(stacked, all_modules, config, path)
        rank, scaling = _scaling(config, f"{stacked['experts']}.{leaf}")
        factors = _Factors(a, b, scaling)
        return _read_stacked(stacked["experts"], leaf, factors, rank, config, path, alternates)
    _check_is_target(module, config, path)
    rank, scaling = _scaling(config, module)
    if a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            f"{path}: {module} has factors of shape {list(a.shape)} and {list(b.shape)}",
            why=f"{CONFIG} gives the module rank {rank}",
            fix="use the config that belongs to the weights",
        )
    names = sides if is_embedding else tuple(f"{side}.weight" for side in sides)
    return {module: _Factors(a, b, scaling, (names[0], names[1]))}


def _scaling(config: Mapping[str, Any], module: str) -> tuple[int, float]:
    """Return (rank, scaling) of a module; patterns match the end of its path."""

    def of(patterns: Mapping[str, Any] | None, default: Any) -> Any:
        for pattern, value in (patterns or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", module):
                return value
        return default

    rank = int(of(config.get("rank_pattern"), config.get("r", 8)))
    alpha = float(of(config.get("alpha_pattern"), config.get("lora_alpha", 8)))
    return rank, scale_of(config, alpha, rank)


def _check_is_target(module: str, config: Mapping[str, Any], path: Path) -> None:
    """Refuse a tensor that is not a target, which PEFT would silently ignore."""
    targets = config.get("target_modules")
    if targets is None or targets == "all-linear":
        return
    # experts of some layers are targets by the path of their layer's stack, as `_targets` writes it
    paths = {module, _EXPERT.sub(r"\g<experts>.\g<leaf>", module)}
    if isinstance(targets, str):
        is_target = any(re.fullmatch(targets, path) for path in paths)
    else:
        is_target = any(f".{path}".endswith(f".{one}") for path in paths for one in targets)
    parameters = [str(one) for one in config.get("target_parameters") or ()]
    # a Linear layer's weight or the router's, as a parameter
    by_parameter = any(f".{module}.weight".endswith(f".{one}") for one in parameters)
    if not (is_target or by_parameter or (_EXPERT.fullmatch(module) and parameters)):
        shown = targets if isinstance(targets, str) else ", ".join(sorted(targets))
        raise UserError(
            f"{path} has an adapter of {module}, which is no target",
            why=f"the target_modules of its {CONFIG}: {shown}",
            fix="use the config that belongs to the weights",
        )


# -- stacked experts -------------------------------------------------------------------------------


def _stacked_leaf(
    stacked: re.Match[str], all_modules: set[str], config: Mapping[str, Any], path: Path
) -> str:
    """Return the parameter of stacked factors. PEFT wraps the experts once per parameter: gate and
    up inside, down outside. If only one is adapted, the config names it."""
    if stacked["inner"]:
        return _GATE_UP
    if f"{stacked['experts']}.base_layer" in all_modules:
        return _DOWN
    named = {str(one).rpartition(".")[2] for one in config.get("target_parameters") or ()}
    named &= {_GATE_UP, _DOWN}
    if len(named) != 1:
        raise UserError(
            f"{path} does not say which parameter of {stacked['experts']} it adapts",
            why=f"target_parameters of its {CONFIG} names "
            f"{', '.join(sorted(named)) or 'none of them'}, and its tensors have one name",
            fix=f"set target_parameters to the one of {_GATE_UP} and {_DOWN} that was trained",
        )
    return named.pop()


def _read_stacked(
    experts: str,
    leaf: str,
    factors: _Factors,
    rank: int,
    config: Mapping[str, Any],
    path: Path,
    alternates: bool,
) -> dict[str, _Factors]:
    """Split the stacked factors of a layer into those of its experts."""
    rows, width = factors.a.shape
    features, columns = factors.b.shape
    count, rest = divmod(rows, rank)
    if rest or columns != rows:
        raise UserError(
            f"{path}: {experts}.{leaf} has factors of shape {[rows, width]} and "
            f"{[features, columns]}",
            why=f"{CONFIG} gives it rank {rank}: both must be a multiple of it, the same",
            fix="use the config that belongs to the weights",
        )

    @lru_cache(maxsize=1)
    def whole_b() -> torch.Tensor:
        return factors.b[:].reshape(features, rank, count)

    def part(expert: int, ranks: slice, outputs: slice) -> _Factors:
        first, last, _ = ranks.indices(rank)
        height = len(range(*outputs.indices(features)))
        a = _Computed(
            (last - first, width), lambda: factors.a[expert * rank + first : expert * rank + last]
        )
        b = _Computed((height, last - first), lambda: whole_b()[outputs, first:last, expert])
        return _Factors(a, b, factors.scaling)

    every = slice(None)
    if leaf == _DOWN:
        return {
            f"{experts}.{expert}.{_DOWN}": part(expert, every, every) for expert in range(count)
        }
    gate, up = _gate_and_up(features, alternates)
    gate_ranks = every
    up_ranks = every
    others = (int(config.get("r", 8)), _scaling(config, f"{experts}.{_DOWN}")[0])
    may_be_two = rank in (2 * other for other in others)
    if may_be_two and not _off_diagonal(whole_b(), rank // 2, gate, up):
        gate_ranks = slice(0, rank // 2)
        up_ranks = slice(rank // 2, rank)
    found = {}
    for expert in range(count):
        found[f"{experts}.{expert}.gate_proj"] = part(expert, gate_ranks, gate)
        found[f"{experts}.{expert}.up_proj"] = part(expert, up_ranks, up)
    return found


def _gate_and_up(features: int, alternates: bool) -> tuple[slice, slice]:
    """Return the rows of gate and of up among the rows of a stack: first all of gate, or
    alternating."""
    if alternates:
        return slice(0, features, 2), slice(1, features, 2)
    return slice(0, features // 2), slice(features // 2, features)


def _off_diagonal(b: torch.Tensor, rank: int, gate: slice, up: slice) -> bool:
    """Tell whether gate and up share directions. PEFT makes B [2·out, 2·rank, experts]
    block-diagonal when it loads separate adapters, but trains all entries."""
    return bool(b[gate, rank:].any()) or bool(b[up, :rank].any())


# -- one A for gate and up -------------------------------------------------------------------------


def _are_joined(modules: Mapping[str, _Factors]) -> bool:
    """Tell whether modules are as `_joined` writes them: gate and up of each expert have the same
    A, their B's are zero in the other's half, and the other modules are zero in the second."""
    pairs = _gates_and_ups(modules)
    ranks = {factors.rank for factors in modules.values()}
    if not pairs or len(ranks) > 1 or min(ranks) % 2:
        return False
    half = min(ranks) // 2
    others = modules.keys() - {module for pair in pairs for module in pair}
    return all(
        bool((modules[gate].a[:] == modules[up].a[:]).all())
        and not bool(modules[gate].b[:][:, half:].any())
        and not bool(modules[up].b[:][:, :half].any())
        for gate, up in pairs
    ) and not any(
        bool(modules[name].a[:][half:].any()) or bool(modules[name].b[:][:, half:].any())
        for name in others
    )


def _parted(modules: Mapping[str, _Factors]) -> dict[str, _Factors]:
    """Give gate and up their own A's again, and all modules half of the rank."""
    ups = {up for _, up in _gates_and_ups(modules)}
    return {name: _half(factors, second=name in ups) for name, factors in modules.items()}


def _half(factors: _Factors, *, second: bool) -> _Factors:
    """Return the first or the second half of the rank."""
    half = factors.rank // 2
    part = slice(half, None) if second else slice(half)
    a = _Computed((half, *factors.a.shape[1:]), lambda: factors.a[part])
    b = _Computed((factors.b.shape[0], half), lambda: factors.b[:][:, part])
    return dataclasses.replace(factors, a=a, b=b)


# -- one rank, one scaling -------------------------------------------------------------------------


def _is_void(factors: _Factors) -> bool:
    """Tell whether both factors are zero, as `write_adapter` adds such modules."""
    return not bool(factors.a[:1].any()) and not bool(factors.a[:].any() or factors.b[:].any())


def _folded(factors: _Factors, rank: int, scaling: float) -> tuple[TensorSource, TensorSource]:
    """Return the factors with the rank and the scaling of the whole adapter."""
    import torch

    missing = rank - factors.rank
    a = factors.a
    b = factors.b
    if missing:
        a = _Computed(
            (rank, *factors.a.shape[1:]),
            lambda: torch.nn.functional.pad(factors.a[:], (0, 0, 0, missing)),
        )
    if missing or factors.scaling != scaling:
        ratio = factors.scaling / scaling

        b = _Computed(
            (factors.b.shape[0], rank),
            lambda: torch.nn.functional.pad(_scaled(factors.b[:], ratio), (0, missing)),
        )
    return a, b


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that orders numbers by value: layer 10 after layer 9."""
    return [
        (part.isdigit(), int(part) if part.isdigit() else 0, part)
        for part in re.split(r"(\d+)", name)
    ]


# -- for the trainer -------------------------------------------------------------------------------


def fitted(
    adapter: PeftAdapter,
    adapters: AdapterConfig,
    family: ModelFamily,
    spec: ModelSpec,
    *,
    flag: str = "--lora-adapter-path",
) -> dict[str, TensorSource]:
    """Return the tensors of the table of ``adapters``, by its names.

    The padding of experts with a lower rank is removed, sides that experts share are taken from the
    first expert, and another alpha is folded into B.

    Args:
        flag: the flag that names the adapter, for messages.
    Raises:
        UserError: the adapter has another rank or adapts other layers, or experts differ in a side
            that they must share.
    """
    ranks = {adapters.rank, max(one.rank for one in adapted_layers(family, spec, adapters))}
    wanted = dict(adapter_family(family, spec, adapters).hf_tensors(spec))
    by_name = {name: list(by_expert(name, spec.num_experts)) for name in wanted}
    _check_names(adapter, {one for several in by_name.values() for one in several})
    if adapter.rank not in ranks:
        raise UserError(
            f"the adapter {adapter.directory} has rank {adapter.rank}, --lora-rank is "
            f"{adapters.rank}",
            why="its matrices have other shapes than those that are trained",
            fix=f"pass --lora-rank {adapter.rank}, or leave {flag} out",
        )
    tensors: dict[str, TensorSource] = {}
    for name, shape in wanted.items():
        is_expert = _EXPERT.fullmatch(module_of(by_name[name][0])) is not None
        scaling = adapters.expert_scaling if is_expert else adapters.scaling
        tensors[name] = _fit(adapter, by_name[name], shape, adapter.scaling / scaling)
    return tensors


def _check_names(adapter: PeftAdapter, expected: set[str]) -> None:
    for names, what, fix in (
        (
            adapter.names() - expected,
            "adapts modules that are no target",
            "pass --lora-target-modules with the modules of the adapter",
        ),
        (
            expected - adapter.names(),
            "does not adapt all targets",
            "pass --lora-target-modules with the modules of the adapter, or use an adapter of this "
            "model",
        ),
    ):
        modules = sorted({module_of(name) for name in names}, key=_natural)
        if modules:
            raise UserError(
                f"the adapter {adapter.directory} {what}",
                why=f"{first_few(modules)}; it adapts {', '.join(adapter.targets)}",
                fix=fix,
            )


def _fit(
    adapter: PeftAdapter, names: list[str], shape: tuple[int, ...], ratio: float
) -> TensorSource:
    """Make one tensor of the table from those of the file, which must be equal if there are
    several."""
    source = adapter[names[0]]
    is_b = _side(names[0]) == "B"
    axis = 1 if is_b else 0
    rank = shape[axis]
    rest = (source.shape[1 - axis], shape[1 - axis])
    if rest[0] != rest[1]:
        raise UserError(
            f"{adapter.directory}: {names[0]} is {list(source.shape)} and would be {list(shape)}",
            why="it is an adapter of another model",
            fix=f"use the base that it was trained on ({adapter.base or 'which it does not name'})",
        )
    if len(names) == 1 and source.shape[axis] == rank and (ratio == 1 or not is_b):
        return source

    def make() -> torch.Tensor:
        whole = source[:]
        for other in names[1:]:
            if not bool((adapter[other][:] == whole).all()):
                raise UserError(
                    f"{adapter.directory}: {other} differs from {names[0]}",
                    why="with --lora-experts shared-outer they are one tensor",
                    fix="pass --lora-experts per-expert",
                )
        beyond = whole.narrow(axis, rank, whole.shape[axis] - rank)
        if bool(beyond.any()):
            raise UserError(
                f"{adapter.directory}: {names[0]} has rank {whole.shape[axis]}",
                why=f"with --lora-rank-by-topk experts have rank {rank}",
                fix="leave --lora-rank-by-topk out",
            )
        kept = whole.narrow(axis, 0, rank)
        return _scaled(kept, ratio) if is_b else kept

    return _Computed(shape, make)


def _scaled(tensor: torch.Tensor, ratio: float) -> torch.Tensor:
    """Multiply a tensor by a number, rounding once to its dtype."""
    return tensor if ratio == 1 else (tensor.double() * ratio).to(tensor.dtype)


# -- writing ---------------------------------------------------------------------------------------


def write_adapter(
    directory: str | Path,
    tensors: Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]],
    adapters: AdapterConfig,
    spec: ModelSpec,
    *,
    base: str,
    layout: ExpertLayout | None = None,
) -> Path:
    """Write an adapter in PEFT's format, into a directory that appears only when complete.

    If only some projections of a fused set (q, k and v; gate and up) are adapted, the others get
    adapters of zeros: SGLang refuses q without v, and its server crashes on v alone.

    Args:
        directory: must be empty, missing or an earlier adapter.
        tensors: tensors by the names of the adapters' table. They are copied to host memory.
        base: the base model's directory, or its name on the hub. For a downloaded directory the
            name on the hub is written.
        layout: layout of routed experts; None: `peft_layout` of the model. "per-expert" pads a
            lower rank of experts with zeros, as PEFT and SGLang read one rank for all modules.
    Raises:
        UserError: ``directory`` has other contents, or cannot be written; no partial files remain.
    """
    target = Path(directory)
    _check_target(target)
    given = dict(tensors.items() if isinstance(tensors, Mapping) else tensors)
    given = {name: tensor.detach().to("cpu") for name, tensor in given.items()}
    whole = {one: given[name] for name in given for one in by_expert(name, spec.num_experts)}
    whole |= _zeros(whole, spec)
    family = table_of(spec)
    modules = family.modules
    layout = layout or peft_layout(family)
    rank = max(tensor.shape[0] for name, tensor in whole.items() if _side(name) == "A")
    if layout == "per-expert" and _lacks_join(whole, family):
        whole = _joined({name: one.make() for name, one in _padded(whole, rank).items()})
        rank *= 2
    config = _config(whole, rank, adapters.alpha, adapters.dropout, base, modules)
    if layout == "peft-3d":
        whole = _with_expert_modules(whole, modules)
        config |= _stacked_config(map(module_of, whole), adapters.expert_rank, adapters.alpha, rank)
        makers = _stacked(whole, family.interleaves_experts)
    else:
        makers = _padded(whole, rank)
    return _write(target, config, makers, modules)


def peft_layout(family: ModelFamily) -> ExpertLayout:
    """Return the layout of routed experts that PEFT loads into models of a family."""
    return "peft-3d" if family.stacks_experts else "per-expert"


def write_plain(directory: str | Path, adapter: PeftAdapter, spec: ModelSpec | None = None) -> Path:
    """Write an adapter in the layout that engines load: per expert, with one rank and scaling.

    Args:
        spec: of the base; None if unknown. Then fused sets are not completed with zeros, and every
            layer with a target's name must have an adapter.

    Raises:
        UserError: as `write_adapter`.
    """
    tensors = {**adapter.tensors, **(_zeros(adapter.tensors, spec) if spec is not None else {})}
    modules = table_of(spec).modules if spec is not None else SAME_NAMES
    rank = adapter.rank
    makers = {name: _output_of(source, source[:1].dtype) for name, source in tensors.items()}
    if spec is not None and _lacks_join(tensors, table_of(spec)):
        rank *= 2
        makers = _padded(_joined({name: source[:] for name, source in tensors.items()}), rank)
    config = _config(tensors, rank, adapter.alpha, adapter.dropout, adapter.base, modules)
    if spec is not None:
        config["target_modules"] = _targets(tensors, spec)
    return _write(Path(directory), config, makers, modules)


def rewrite_adapter(
    directory: str | Path,
    source: str | Path,
    layout: ExpertLayout | None,
    spec: ModelSpec,
    *,
    base: str,
) -> Path:
    """Write an adapter, read from either layout, in one of the two layouts.

    Args:
        layout, spec, base: as of `write_adapter`.

    Raises:
        UserError: as `read_adapter` and `write_adapter`.
    """
    family = table_of(spec)
    adapter = dataclasses.replace(read_adapter(source, family), base=base)
    if (layout or peft_layout(family)) == "per-expert":
        return write_plain(directory, adapter, spec)
    whole = dict(adapter.items())
    whole |= _zeros(whole, spec)
    names = family.modules
    config = _config(whole, adapter.rank, adapter.alpha, adapter.dropout, base, names)
    whole = _with_expert_modules(whole, names)
    config |= _stacked_config(map(module_of, whole), adapter.rank, adapter.alpha, adapter.rank)
    return _write(Path(directory), config, _stacked(whole, family.interleaves_experts), names)


def is_loadable(adapter: PeftAdapter, spec: ModelSpec | None = None) -> bool:
    """Tell whether engines can load an adapter's files directly: one rank and scaling, a matrix per
    expert and projection, and complete fused sets. ``spec`` as for `write_plain`."""
    config = read_config(adapter.directory)
    has_leaves = isinstance(config.get("target_modules"), list) and not any(
        "." in str(one) or one == "all-linear" for one in config["target_modules"]
    )
    odd = any(config.get(name) for name in _NOT_LOADED)
    parameters = {str(one).rpartition(".")[2] for one in config.get("target_parameters") or ()}
    lacks = spec is not None and (
        bool(_zeros(adapter.tensors, spec))
        or any("." in target for target in _targets(adapter.tensors, spec))
        or (not adapter.is_joined and _lacks_join(adapter.tensors, table_of(spec)))
    )
    return has_leaves and not odd and not lacks and not parameters & {_GATE_UP, _DOWN}


def _targets(names: Iterable[str], spec: ModelSpec) -> list[str]:
    """Name the adapted modules: by the last parts of their names, or by the whole where a layer
    without an adapter has the same last part, since PEFT can adapt some layers alone."""
    modules = {module_of(name) for name in names}
    family = with_single_experts(table_of(spec))
    every = {name.removesuffix(".weight") for name, _ in family.hf_tensors(spec)}
    bare = {module.rpartition(".")[2] for module in every - modules}
    targets = {module.rpartition(".")[2] for module in modules} - bare
    whole = family.modules.module
    targets |= {
        whole(_EXPERT.sub(r"\g<experts>.\g<leaf>", module))
        for module in modules
        if module.rpartition(".")[2] in bare
    }
    return sorted(targets, key=_natural)


def _write(
    target: Path, config: Mapping[str, Any], makers: Mapping[str, _Output], modules: ModuleNames
) -> Path:
    from slime.checkpoints.safetensors_stream import write_stream
    from slime.engines.wire.buckets import dtype_name

    _check_target(target)
    makers = {with_module(name, modules.module): one for name, one in makers.items()}
    unfinished = partial_dir(target)
    try:
        (unfinished / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        table = {name: (dtype_name(one.dtype), one.shape) for name, one in makers.items()}
        stream = ((name, one.make()) for name, one in makers.items())
        write_stream(unfinished / WEIGHTS, table, stream)
        publish(unfinished, target)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"could not write {target}", why=error.strerror or str(error), fix="free space"
        ) from error
    return target


def _check_target(target: Path) -> None:
    if target.is_file() or (entries_of(target) and not is_adapter_dir(target)):
        there = "a file" if target.is_file() else contents_of(target)
        raise UserError(
            f"{target} holds something else than an adapter",
            why=f"writing replaces it as a whole; there is: {there}",
            fix="name a directory of its own",
        )


def _config(
    tensors: Iterable[str], rank: int, alpha: float, dropout: float, base: str, names: ModuleNames
) -> dict[str, Any]:
    modules = [module_of(name) for name in tensors]
    leaves = [module.rpartition(".")[2] for module in modules]
    where = hub_name(base) or (str(Path(base).resolve()) if Path(base).is_dir() else base)
    plain = plain_config(rank, alpha, leaves, where, dropout=dropout, left_out=names.beside_decoder)
    return plain | {
        "target_parameters": _dense_beside_experts(modules) or None,
        "peft_version": _PEFT_VERSION,
    }


def _zeros(tensors: Mapping[str, TensorSource], spec: ModelSpec) -> dict[str, torch.Tensor]:
    """Return factors of zeros for the missing modules of fused sets, and of experts: PEFT and
    SGLang ignore single experts without both sides."""
    import torch

    family = with_single_experts(table_of(spec))
    shapes = dict(family.hf_tensors(spec))
    of_experts = tuple(leaf for rule in family.rules if rule.is_expert for leaf in leaves(rule))
    zeros: dict[str, torch.Tensor] = {}
    for module in {module_of(name) for name in tensors}:
        parent, _, leaf = module.rpartition(".")
        fused = next((one for one in FUSED_SETS if leaf in one), ())
        for partner in of_experts if _EXPERT.fullmatch(module) else fused:
            missing = f"{parent}.{partner}"
            if f"{missing}.weight" in shapes and peft_name(missing, "A") not in tensors:
                a = tensors[peft_name(module, "A")]
                rows, columns = shapes[f"{missing}.weight"]
                dtype = a[:1].dtype
                zeros[peft_name(missing, "A")] = torch.zeros(a.shape[0], columns, dtype=dtype)
                zeros[peft_name(missing, "B")] = torch.zeros(rows, a.shape[0], dtype=dtype)
    return zeros


@dataclass(frozen=True)
class _Output:
    """A tensor of the file; ``make`` returns its values when they are written."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]


def _output_of(source: TensorSource, dtype: torch.dtype) -> _Output:
    return _Output(tuple(source.shape), dtype, lambda: source[:])


def _padded(tensors: Mapping[str, torch.Tensor], rank: int) -> dict[str, _Output]:
    """Pad every factor to the same rank, so that alpha / rank scales all of them."""
    import torch

    outputs = {}
    for name, tensor in tensors.items():
        is_b = _side(name) == "B"
        missing = rank - tensor.shape[1 if is_b else 0]
        padding = (0, missing) if is_b else (0, 0, 0, missing)
        shape = (tensor.shape[0], rank) if is_b else (rank, tensor.shape[1])
        # the lower rank was scaled by alpha / (rank - missing)
        ratio = rank / (rank - missing) if is_b else 1.0

        def make(
            tensor: torch.Tensor = tensor, padding: tuple[int, ...] = padding, ratio: float = ratio
        ) -> torch.Tensor:
            return torch.nn.functional.pad(_scaled(tensor, ratio), padding)

        outputs[name] = _Output(shape, tensor.dtype, make)
    return outputs


def _joined(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Give gate and up of each expert the A of both, as engines need it where their rows alternate
    (`slime.models.adapters.joins_gate_and_up`). All matrices have one rank; twice that rank, with
    the same alpha, gives the same products."""
    import torch

    outputs = dict(tensors)
    for gate, up in _gates_and_ups({module_of(name) for name in tensors}):
        both = torch.cat([tensors[peft_name(module, "A")] for module in (gate, up)])
        for module, place in ((gate, 0), (up, 1)):
            b = _scaled(tensors[peft_name(module, "B")], 2.0)
            columns = b.shape[1]
            padding = (place * columns, columns - place * columns)
            outputs[peft_name(module, "B")] = torch.nn.functional.pad(b, padding)
            outputs[peft_name(module, "A")] = both
    return outputs


def _lacks_join(tensors: Mapping[str, TensorSource], family: ModelFamily) -> bool:
    """Tell whether gate and up of an expert have different A's, in a family whose engines need
    one."""
    return family.interleaves_experts and any(
        bool((tensors[peft_name(gate, "A")][:] != tensors[peft_name(up, "A")][:]).any())
        for gate, up in _gates_and_ups({module_of(name) for name in tensors})
    )


def _gates_and_ups(modules: Collection[str]) -> list[tuple[str, str]]:
    """Return (gate, up) of all experts with both among the modules."""
    pairs = []
    for gate in sorted(modules, key=_natural):
        found = _EXPERT.fullmatch(gate)
        if found is not None and found["leaf"] == "gate_proj":
            up = gate.removesuffix("gate_proj") + "up_proj"
            pairs += [(gate, up)] if up in modules else []
    return pairs


def _dense_beside_experts(modules: Iterable[str]) -> list[str]:
    """Name the target parameters for the dense MLPs and shared experts of a model with experts.

    For such a model, PEFT applies targets named gate_proj, up_proj or down_proj only to routed
    experts, unless they are target parameters.
    """
    dense = set()
    has_experts = False
    for module in modules:
        if _EXPERT.fullmatch(module):
            has_experts = True
        elif module.endswith(_MLP_LEAVES):
            dense.add(".".join(module.split(".")[-2:]) + ".weight")
    return sorted(dense) if has_experts else []


def _stacked_config(
    modules: Iterable[str], expert_rank: int, alpha: float, rank: int
) -> dict[str, Any]:
    """Return the config's entries about experts' parameters in the layout peft-3d."""
    modules = list(modules)
    found = [_EXPERT.fullmatch(module) for module in modules]
    leaves = {one["leaf"] for one in found if one is not None}
    if not leaves:
        return {}
    others = {module.rpartition(".")[2] for module, one in zip(modules, found) if one is None}
    ranks = {
        leaf: times * expert_rank
        for leaf, times, part in ((_GATE_UP, 2, "gate_proj"), (_DOWN, 1, _DOWN))
        if part in leaves
    }
    alphas = {leaf: alpha * one / expert_rank for leaf, one in ranks.items()}
    patterns = {leaf: rf".*\.experts\.{leaf}" for leaf in ranks}
    return {
        "target_modules": sorted(others - set(_MLP_LEAVES)),
        "target_parameters": [f"experts.{leaf}" for leaf in ranks] + _dense_beside_experts(modules),
        "rank_pattern": {patterns[leaf]: one for leaf, one in ranks.items() if one != rank},
        # whole numbers as int
        "alpha_pattern": {
            patterns[leaf]: int(one) if float(one).is_integer() else one
            for leaf, one in alphas.items()
            if one != alpha
        },
    }


def _with_expert_modules(
    tensors: Mapping[str, torch.Tensor], names: ModuleNames
) -> dict[str, torch.Tensor]:
    """Name the experts as transformers' modules, which have the stacks."""
    return {with_module(name, names.expert_module): tensor for name, tensor in tensors.items()}


def _stacked(tensors: Mapping[str, torch.Tensor], alternates: bool) -> dict[str, _Output]:
    """Stack the experts of each layer in PEFT's layout; other tensors do not change.
    ``alternates``: see `_gate_and_up`."""
    outputs: dict[str, _Output] = {}
    experts: dict[str, dict[tuple[int, str], str]] = {}
    for name, tensor in tensors.items():
        module = module_of(name)
        found = _EXPERT.fullmatch(module)
        if found is None:
            outputs[name] = _output_of(tensor, tensor.dtype)
        else:
            experts.setdefault(found["experts"], {})[int(found["expert"]), found["leaf"]] = module
    for module, parts in experts.items():
        leaves = {leaf for _, leaf in parts}
        assert leaves <= set(_MLP_LEAVES), f"stacks of {leaves} are unknown"
        count = 1 + max(expert for expert, _ in parts)
        for outer, inner in ((".base_layer", ("gate_proj", "up_proj")), ("", (_DOWN,))):
            if not leaves & set(inner):
                continue
            # if only one of both is adapted there is only one wrapper
            place = outer if _DOWN in leaves else ""
            chosen = [[parts[expert, leaf] for leaf in inner] for expert in range(count)]
            first = [tensors[peft_name(one, side)] for one in chosen[0] for side in ("A", "B")]
            rank = sum(one.shape[0] for one in first[::2])
            rows = sum(one.shape[0] for one in first[1::2])
            sides: tuple[tuple[Side, tuple[int, int], Any], ...] = (
                ("A", (count * rank, first[0].shape[1]), _stacked_a),
                ("B", (rows, rank * count), partial(_stacked_b, alternates=alternates)),
            )
            for side, shape, make in sides:
                outputs[peft_name(module + place, side)] = _Output(
                    shape, first[0].dtype, partial(make, tensors, chosen)
                )
    return outputs


def _stacked_a(tensors: Mapping[str, torch.Tensor], chosen: list[list[str]]) -> torch.Tensor:
    """Return A of all experts, expert-major; for each expert, gate before up."""
    import torch

    return torch.cat([tensors[peft_name(one, "A")] for modules in chosen for one in modules])


def _stacked_b(
    tensors: Mapping[str, torch.Tensor], chosen: list[list[str]], *, alternates: bool
) -> torch.Tensor:
    """Return B of all experts, rank-major with experts innermost; block-diagonal for each
    expert."""
    import torch

    whole = [
        torch.block_diag(*(tensors[peft_name(one, "B")] for one in modules)) for modules in chosen
    ]
    stacked = torch.stack(whole, dim=2).flatten(1)
    if alternates and len(chosen[0]) == 2:
        gate, up = stacked.chunk(2)
        stacked = torch.stack([gate, up], dim=1).flatten(0, 1)
    return stacked
