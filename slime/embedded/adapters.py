"""Adapters (LoRA) that the engine serves in addition to its base; requests choose them by name.

    load ─► check: config, names, shapes, numbers ─► cast ─► products by `Linear` ─► name
    request with lora_path ─► the `Adapter` itself, which its sequences keep until they end
    unload ─► the name is removed at once, the memory after the last sequence

A rejected load changes nothing. The engine rejects what SGLang would load but not apply, or what
would crash it at the next request: names without a layer, incomplete sets, patterns of ranks, DoRA.

Names and shapes are those of `slime.models.adapters`. Experts may also be stacked as in SGLang, in
one tensor of three axes: ``….experts.gate_proj.lora_A.weight`` [experts or 1, rank, in], or
``….experts.gate_up_proj.…`` with one A for both.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from safetensors import SafetensorError, safe_open

from slime.embedded.layers import Linear, TokenEmbedding
from slime.embedded.low_rank import LowRank
from slime.embedded.weights import WeightError, WeightStore, nearest
from slime.engines.request_fields import BadRequest, asks_for_nothing
from slime.engines.wire.buckets import fingerprint
from slime.models.adapters import (
    AdapterConfig,
    Side,
    adaptable,
    adaptable_by_name,
    adapter_family,
    peft_name,
    split_peft_name,
    with_module,
)
from slime.models.nested import ModuleNames
from slime.models.peft_config import CONFIG, is_frozen_copy, moves_base, scale_of

Tensors = Mapping[str, torch.Tensor]

#: Path that SGLang reports for an adapter loaded from tensors.
FROM_TENSORS = "__tensor__"
_TENSORS_FILE = "adapter_model.safetensors"
_keys = itertools.count(1)


# -- adapter_config.json ---------------------------------------------------------------------------

#: Fields of PEFT's config that determine how the adapter is computed.
_READ = (
    "peft_type", "r", "lora_alpha", "target_modules", "exclude_modules", "use_rslora",
    "init_lora_weights",
)  # fmt: skip
#: Fields without effect in inference; the names of tensors tell whether each expert has its own
#: adapter.
_WITHOUT_EFFECT = (
    "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision",
    "inference_mode", "lora_dropout", "layers_pattern", "megatron_config", "megatron_core",
    "qalora_group_size", "ensure_weight_tying", "target_parameters",
)  # fmt: skip
_WHY = {
    "use_dora": "DoRA scales the base's weights, too",
    "rank_pattern": "all layers of an adapter have one rank here, as in SGLang",
    "alpha_pattern": "all layers of an adapter have one factor here, as in SGLang",
    "modules_to_save": "an adapter cannot replace whole weights",
    "bias": "an adapter cannot replace biases",
}


@dataclass(frozen=True)
class AdapterForm:
    """The fields of ``adapter_config.json`` that an engine needs.

    Attributes:
        targets: names of modules or their last parts, or one regular expression.
        excluded: the same, for modules that get no adapter.
        scale: factor on B·A.
    """

    rank: int
    scale: float
    targets: tuple[str, ...] | str
    excluded: tuple[str, ...] | str = ()

    @staticmethod
    def read(config: Mapping[str, Any]) -> AdapterForm:
        """Check a parsed ``adapter_config.json``.

        Raises:
            WeightError: a field is invalid or unsupported; names it.
        """
        if str(config.get("peft_type")).upper() != "LORA":
            raise WeightError(f"peft_type must be LORA, got {config.get('peft_type')!r}")
        for name, value in config.items():
            if name in _READ or name in _WITHOUT_EFFECT or asks_for_nothing(value):
                continue
            if name != "bias" or value != "none":
                raise WeightError(
                    f"adapter_config.json sets {name} to {value!r}, which the embedded engine does "
                    f"not support" + (f": {_WHY[name]}" if name in _WHY else "")
                )
        rank: Any = config.get("r")
        alpha: Any = config.get("lora_alpha")
        if type(rank) is not int or rank < 1:
            raise WeightError(f"r must be an integer of at least 1, got {rank!r}")
        if type(alpha) not in (int, float) or not math.isfinite(alpha) or alpha <= 0:
            raise WeightError(f"lora_alpha must be a number above 0, got {alpha!r}")
        if moves_base(config):
            raise WeightError(
                f"init_lora_weights is {config['init_lora_weights']!r}: such adapters belong to a "
                "base whose weights they changed; save it with "
                "path_initial_model_for_weight_conversion"
            )
        excluded = config.get("exclude_modules")
        return AdapterForm(
            rank,
            scale_of(config, alpha, rank),
            _read_names("target_modules", config.get("target_modules")),
            _read_names("exclude_modules", excluded) if excluded else (),
        )

    def is_target(self, module: str) -> bool:
        """Tell whether a module, by its Hugging Face path, has an adapter."""
        if self.targets != "all-linear" and not _is_named(self.targets, module):
            return False
        return not _is_named(self.excluded, module)


def _read_names(field_name: str, value: Any) -> tuple[str, ...] | str:
    if isinstance(value, str) and value:
        try:
            re.compile(value)
        except re.error as error:
            raise WeightError(f"{field_name} {value!r} is not a regular expression") from error
        return value
    if isinstance(value, list) and value and all(isinstance(item, str) for item in value):
        return "all-linear" if "all-linear" in value else tuple(value)
    raise WeightError(f"{field_name} must be a list of names or a text, got {value!r}")


def _is_named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return bool(re.fullmatch(names, module))
    return any(_is_end(name, path) for name in names for path in _paths(module))


def _is_end(target: str, path: str) -> bool:
    return path == target or path.endswith(f".{target}")


_EXPERT = re.compile(r"(?P<layer>.+\.experts)\.(?P<number>\d+)\.(?P<leaf>\w+)")
_FUSED = {"gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}


def _paths(module: str) -> list[str]:
    """Return a module's path, and the paths of stacked or fused tensors that contain it."""
    found = _EXPERT.fullmatch(module)
    if found is None:
        return [module]
    leaves = [found["leaf"], *(_FUSED[leaf] for leaf in (found["leaf"],) if leaf in _FUSED)]
    return [module, *(f"{found['layer']}.{leaf}" for leaf in leaves)]


# -- one adapter -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Piece:
    """The place of one side of a module's adapter: a tensor, or one expert's part of it."""

    name: str
    expert: int | None = None

    def index(self, tensors: Tensors) -> int | None:
        """Return the expert's index in a tensor with one part per expert, or one for all."""
        return None if self.expert is None else min(self.expert, len(tensors[self.name]) - 1)

    def of(self, tensors: Tensors) -> torch.Tensor:
        index = self.index(tensors)
        return tensors[self.name] if index is None else tensors[self.name][index]


@dataclass
class _Part:
    """The adapter of some outputs of a layer."""

    rows: slice | torch.Tensor
    down: _Piece
    up: _Piece


@dataclass(eq=False)
class Adapter:
    """A resident adapter.

    Attributes:
        key: unique for each load; 0 is the base.
        path: of its directory, or `FROM_TENSORS`.
        version: weight version that its requests report; None: the base's.
        products: by layer.
        names: of its tensors, as loaded.
    """

    name: str
    path: str
    form: AdapterForm
    pinned: bool
    version: str | None
    parts: dict[Linear | TokenEmbedding, list[_Part]]
    names: tuple[str, ...]
    key: int = field(default_factory=lambda: next(_keys))
    products: dict[object, LowRank] = field(default_factory=dict)
    _views: dict[str, dict[int | None, torch.Tensor]] = field(default_factory=dict)
    _kept: dict[str, torch.Tensor] | None = None

    def fill(self, tensors: Tensors, dtype: torch.dtype, device: torch.device) -> None:
        """Copy tensors, by `names`, into the engine's products."""
        rank = self.form.rank
        made: dict[tuple[Any, ...], torch.Tensor] = {}  # a side that all experts share is made once
        for linear, parts in self.parts.items():
            source = _places([part.down for part in parts], tensors)
            if source not in made:
                pieces = [part.down.of(tensors) for part in parts]
                made[source] = torch.cat(pieces).to(device, dtype)
            down = made[source]
            columns = [slice(start * rank, (start + 1) * rank) for start in range(len(parts))]
            source = _places([part.up for part in parts], tensors)
            if source not in made:
                shape = (linear.out_features, len(parts) * rank)
                wide = made[source] = torch.zeros(shape, dtype=dtype, device=device)
                for part, own in zip(parts, columns):
                    wide[part.rows, own] = part.up.of(tensors).to(device, dtype)
            up = made[source]
            for part, own in zip(parts, columns):
                self._note(part.down, tensors, down[own])
                self._note(part.up, tensors, up[part.rows, own])
            self.products[linear] = LowRank(down, up, self.form.scale)

    def _note(self, piece: _Piece, tensors: Tensors, view: torch.Tensor) -> None:
        self._views.setdefault(piece.name, {}).setdefault(piece.index(tensors), view)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor as the engine uses it, in the form in which it was loaded."""
        if self._kept is not None:
            return self._kept[name]
        views = self._views[name]
        if None in views:
            return views[None]
        return torch.stack([views[number] for number in sorted(views, key=lambda n: n or 0)])

    def fingerprints(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """Return the xxh3-128 of each tensor's bytes in the engine's dtype.

        Raises:
            WeightError: the adapter has no tensor of a name.
        """
        chosen = list(self.names if names is None else names)
        unknown = [name for name in chosen if name not in self._views]
        if unknown:
            near = nearest(unknown[0], self.names)
            raise WeightError(f"adapter '{self.name}' has no tensor {unknown[0]}{near}")
        return {name: fingerprint(self.tensor(name)) for name in chosen}

    @property
    def nbytes(self) -> int:
        tensors = {
            id(tensor): tensor for one in self.products.values() for tensor in (one.down, one.up)
        }
        return sum(tensor.nbytes for tensor in tensors.values())

    def release(self) -> None:
        """Move the tensors to the host."""
        if self._kept is None:
            self._kept = {name: self.tensor(name).cpu() for name in self.names}
            self.products.clear()
            self._views = {name: {} for name in self.names}

    def resume(self, dtype: torch.dtype, device: torch.device) -> None:
        if self._kept is not None:
            self._views = {}
            kept = self._kept
            self._kept = None
            self.fill(kept, dtype, device)


def _places(pieces: list[_Piece], tensors: Tensors) -> tuple[tuple[str, int | None], ...]:
    return tuple((piece.name, piece.index(tensors)) for piece in pieces)


# -- checks of names and shapes --------------------------------------------------------------------


def place(
    store: WeightStore, form: AdapterForm, tensors: Tensors
) -> dict[Linear | TokenEmbedding, list[_Part]]:
    """Find the layer of every tensor of an adapter.

    Raises:
        WeightError: a tensor has no layer or is not a target, is missing, or has a wrong shape or
            numbers that are not finite; names it.
    """
    arch = store.arch
    linear = adaptable(arch.family, arch.spec)
    every = AdapterConfig(form.rank, 1.0, frozenset(adaptable_by_name(arch.family, arch.spec)))
    table = dict(adapter_family(arch.family, arch.spec, every).hf_tensors(arch.spec))
    modules = {split[0]: None for name in table if (split := split_peft_name(name)) is not None}
    targets = [
        module
        for module in modules
        if form.is_target(arch.family.modules.module(module))
        and (form.targets != "all-linear" or module.rpartition(".")[2] in linear)
    ]
    _check_targets(form, list(modules), arch.family.modules)
    experts = arch.spec.num_experts
    parts: dict[Linear | TokenEmbedding, list[_Part]] = {}
    used: set[str] = set()
    for module in targets:
        layer, rows = store.parts[f"{module}.weight"]
        down, merged = _find(module, "A", tensors, table, experts)
        up, merged_up = _find(module, "B", tensors, table, experts)
        if merged != merged_up:
            raise WeightError(f"{down.name} and {up.name} are not of the same layers")
        used |= {down.name, up.name}
        own = parts.setdefault(layer, [])
        if not merged:
            own.append(_Part(rows, down, up))
        elif not own:  # one A for all rows, and those of gate before those of up
            numbers = torch.arange(layer.out_features)
            halves = torch.cat([numbers[0::2], numbers[1::2]])
            own.append(_Part(halves if rows.step == 2 else slice(0, len(numbers)), down, up))
    for name, tensor in tensors.items():
        if name not in used:
            raise WeightError(_not_used(name, modules))
        if not tensor.is_floating_point():
            raise WeightError(f"{name} is {tensor.dtype}, adapters are floating-point numbers")
        if not bool(tensor.isfinite().all()):
            raise WeightError(f"{name} has numbers that are not finite")
    return parts


def _check_targets(form: AdapterForm, modules: list[str], names: ModuleNames) -> None:
    paths = [path for module in modules for path in _paths(names.module(module))]
    if isinstance(form.targets, str):
        if not any(form.is_target(names.module(module)) for module in modules):
            raise WeightError(f"target_modules {form.targets!r} matches no layer of the model")
        return
    for target in form.targets:
        if not any(_is_end(target, path) for path in paths):
            leaves = list(dict.fromkeys(module.rpartition(".")[2] for module in modules))
            raise WeightError(
                f"target_modules names {target}, the model has no such layer (layers that can have "
                f"an adapter: {', '.join(leaves)})"
            )


def _find(
    module: str, side: Side, tensors: Tensors, table: Mapping[str, tuple[int, ...]], experts: int
) -> tuple[_Piece, bool]:
    """Find the tensor of one side of a module, and whether it contains both gate and up."""
    name = peft_name(module, side)
    shape = table[name]
    found = _EXPERT.fullmatch(module)
    if name in tensors or found is None:
        _check_shape(name, tensors, shape)
        return _Piece(name), False
    leaf = found["leaf"]
    for other in (leaf, _FUSED.get(leaf, leaf)):
        stacked = peft_name(f"{found['layer']}.{other}", side)
        if stacked in tensors:
            merged = other != leaf
            height = shape[0] * 2 if merged and side == "B" else shape[0]
            count = tensors[stacked].shape[0] if tensors[stacked].dim() == 3 else experts
            _check_shape(stacked, tensors, (1 if count == 1 else experts, height, shape[1]))
            return _Piece(stacked, int(found["number"])), merged
    raise WeightError(f"{name} is missing, and target_modules names its layer")


def _check_shape(name: str, tensors: Tensors, shape: tuple[int, ...]) -> None:
    if name not in tensors:
        raise WeightError(f"{name} is missing, and target_modules names its layer")
    own = tuple(tensors[name].shape)
    if own != shape:
        raise WeightError(f"{name} has shape {list(own)}, rank and model make it {list(shape)}")


def _not_used(name: str, modules: Iterable[str]) -> str:
    split = split_peft_name(name)
    if split is None:
        return (
            f"{name} is no name of an adapter's tensor; they are "
            f"{peft_name('model.layers.0.….q_proj', 'A')} and the like"
        )
    known = {path for module in modules for path in _paths(module)}
    if split[0] not in known:
        return f"{name} belongs to no layer that can have an adapter{nearest(split[0], known)}"
    return (
        f"{name} is there, and target_modules does not name its layer, or exclude_modules does, or "
        "it comes twice"
    )


# -- all adapters ----------------------------------------------------------------------------------


class AdapterTable:
    """Adapters by name. Any thread may call its methods.

    Args:
        enabled: False for an engine that was started without adapters; it rejects all.
        max_rank: of an adapter; None: any.
        max_loaded: number of names at once; None: any number.
    """

    def __init__(
        self,
        store: WeightStore,
        *,
        enabled: bool = True,
        max_rank: int | None = None,
        max_loaded: int | None = None,
    ) -> None:
        self.enabled = enabled
        self._store = store
        self._max_rank = max_rank
        self._max_loaded = max_loaded
        self._named: dict[str, Adapter] = {}
        self._resident: WeakSet[Adapter] = WeakSet()
        self._lock = threading.Lock()
        self._moving = threading.Lock()  # no adapter is loaded while the others move
        self._released = False

    @property
    def vocab_size(self) -> int:
        return self._store.arch.spec.vocab_size

    @property
    def loaded(self) -> dict[str, Adapter]:
        """Return name → adapter, for the adapters that requests may use."""
        with self._lock:
            return dict(self._named)

    @property
    def resident(self) -> list[Adapter]:
        """Return the adapters in memory: loaded ones, and unloaded ones that requests still use."""
        with self._lock:
            return sorted(self._resident, key=lambda adapter: adapter.key)

    def find(self, name: str, field_name: str = "lora_path") -> Adapter:
        """Find the adapter that a request names.

        Raises:
            BadRequest: there is no adapter of this name.
        """
        self._check_enabled(name, field_name)
        found = self.loaded.get(name)
        if found is None:
            raise BadRequest(f"no adapter '{name}' is loaded (loaded: {self._words()})", field_name)
        return found

    def _check_enabled(self, name: str, field_name: str) -> None:
        if not self.enabled:
            raise BadRequest(
                f"adapter '{name}' was named, and this engine was started without --enable-lora",
                field_name,
            )

    def load(
        self,
        name: str,
        config: Mapping[str, Any],
        tensors: Tensors,
        path: str = FROM_TENSORS,
        *,
        pinned: bool = False,
        version: str | None = None,
    ) -> Adapter:
        """Load an adapter under a name.

        Args:
            config: ``adapter_config.json``.
            tensors: PEFT's name → tensor; cast to the engine's dtype.
        Raises:
            WeightError: the name is taken, a limit is reached, or the adapter does not fit the
                base.
            BadRequest: the engine was started without adapters.
        """
        self._check_enabled(name, "lora_name")
        with self._lock:
            self._refuse_taken(name)
        form = AdapterForm.read(config)
        most = self._max_rank
        if most is not None and form.rank > most:
            raise WeightError(f"r is {form.rank}, --max-lora-rank of this engine is {most}")
        parts = place(self._store, form, tensors)
        adapter = Adapter(name, path, form, pinned, version, parts, tuple(tensors))
        with self._moving:
            home = torch.device("cpu") if self._released else self._store.device
            adapter.fill(tensors, self._store.dtype, home)
            if self._released:
                adapter.release()
            with self._lock:
                self._refuse_taken(name)
                self._named[name] = adapter
                self._resident.add(adapter)
        return adapter

    def _refuse_taken(self, name: str) -> None:
        if name in self._named:
            raise WeightError(
                f"adapter '{name}' is already loaded; unload it first, or load it under a new name"
            )
        if self._max_loaded is not None and len(self._named) >= self._max_loaded:
            raise WeightError(
                f"{len(self._named)} adapters are loaded ({', '.join(self._named)}), "
                f"--max-loaded-loras is {self._max_loaded}; unload one first"
            )

    def load_directory(
        self, name: str, path: str, *, pinned: bool = False, version: str | None = None
    ) -> Adapter:
        """Load a directory that PEFT wrote.

        Raises:
            WeightError: as `load`, or a file is missing or unreadable.
            BadRequest: as `load`.
        """
        arch = self._store.arch
        config, tensors = read_directory(Path(path), arch.spec.vocab_size)
        in_files = arch.family.modules.in_files
        tensors = {with_module(name, in_files): tensor for name, tensor in tensors.items()}
        return self.load(name, config, tensors, path, pinned=pinned, version=version)

    def unload(self, name: str) -> None:
        """Remove a name. Running requests continue to use the adapter.

        Raises:
            WeightError: there is no adapter of this name.
            BadRequest: the engine was started without adapters.
        """
        self._check_enabled(name, "lora_name")
        with self._lock:
            if name in self._named:
                del self._named[name]
                return
        raise WeightError(f"no adapter '{name}' is loaded (loaded: {self._words()})")

    def _words(self) -> str:
        return ", ".join(self.loaded) or "none"

    def release(self) -> None:
        """Move all adapters to the host, like the base's weights."""
        if self._store.device.type != "cpu":
            with self._moving:
                self._released = True
                for adapter in self.resident:
                    adapter.release()

    def resume(self) -> None:
        with self._moving:
            self._released = False
            for adapter in self.resident:
                adapter.resume(self._store.dtype, self._store.device)


# -- files -----------------------------------------------------------------------------------------


def check_added_tokens(added: Mapping[str, Any], vocab_size: int) -> None:
    """Reject adapters with tokens that the base lacks.

    Raises:
        WeightError: names the first.
    """
    for token, number in added.items():
        if type(number) is not int or number >= vocab_size:
            raise WeightError(
                f"the adapter adds the token {token!r}; the base's vocabulary has {vocab_size}"
            )


def read_directory(path: Path, vocab_size: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Read the config and the tensors of a directory that PEFT wrote.

    Raises:
        WeightError: a file is missing or unreadable, or adds tokens.
    """
    config = _read_json(path / CONFIG)
    added = path / "added_tokens.json"
    if added.is_file():
        check_added_tokens(_read_json(added), vocab_size)
    file = path / _TENSORS_FILE
    if not file.is_file():
        raise WeightError(f"{file} does not exist; save the adapter with safe_serialization=True")
    try:
        with safe_open(file, framework="pt") as content:
            names = [name for name in content.keys() if not is_frozen_copy(name)]  # noqa: SIM118
            return config, {name: content.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise WeightError(f"{file} is not a readable safetensors file: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except OSError as error:
        raise WeightError(f"{file} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise WeightError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise WeightError(f"{file} must be a JSON object")
    return found
