"""Make layers with quantised weights loadable again, inside SGLang's processes, for the weight
probe.

SGLang transforms quantised weights after loading: Marlin's kernels need INT4 in another order;
per-tensor FP8 is transposed and its scales are expanded over rows. The resulting parameters have
other shapes and no loaders: `load_weights` raises, which ends the engine, or writes to wrong
places.

    open_layers    every such layer gets the parameters that its method creates before loading, in
                   the memory of the old ones
        ... any number of loads, of any kind: handles, broadcasts, files ...
    close_layers   the method processes them as after a start; the result is moved to the old
                   parameters

The engine keeps the old parameters: CUDA graphs hold their addresses, and the memory saver restores
them after a sleep. Between the two calls the engine is paused and must not compute. SGLang
processes weights from files immediately; open layers skip this, so that received weights can be
compared first, by whichever transport. Opening needs extra memory only for parameters that are
larger before processing, and processing for one layer at a time.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

#: Classes of quantisation methods for which this module was tested.
LINEAR = ("Fp8LinearMethod", "CompressedTensorsLinearMethod")
EXPERTS = ("Fp8MoEMethod", "CompressedTensorsFusedMoEMethod")
#: Attributes of processed layers that prevent processing them again.
_DONE_MARKS = ("is_marlin_converted", "is_triton_converted")


class _Layer:
    """One layer while it is loadable.

    Attributes:
        kept: the tensors with which the engine computes, by owner: the layer, its method, its
            scheme.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.method = _method(module)
        owners: list[Any] = [module, self.method, vars(module).get("scheme")]
        self.kept = [(owner, _tensors(owner)) for owner in owners if owner is not None]
        self._marks = {mark: vars(module)[mark] for mark in _DONE_MARKS if mark in vars(module)}

    def open(self) -> None:
        """Create new parameters, as before loading. May be called again."""
        module = self.module
        _skip_processing(self.method)
        own = self.kept[0][1]
        device = next(tensor.device for tensor in own.values())
        with torch.device("meta"), _default_dtype(module):
            _create(self.method, module)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and parameter.is_meta:
                module._parameters[name] = _realised(parameter, own.get(name), device)
        for mark in self._marks:
            setattr(module, mark, False)

    def close(self) -> None:
        """Process the loaded weights, and move the result into the old parameters.

        Raises:
            ValueError: the result does not fit the old parameters.
        """
        _restore_processing(self.method)
        self.method.process_weights_after_loading(self.module)
        for owner, tensors in self.kept:
            for name, old in tensors.items():
                _move_into_old(owner, name, old)
        self._drop_surplus()

    def revert(self) -> None:
        """Undo the opening of a layer into which nothing was loaded."""
        _restore_processing(self.method)
        for owner, tensors in self.kept:
            for name, old in tensors.items():
                _put(owner, name, old)
        for mark, value in self._marks.items():
            setattr(self.module, mark, value)
        self._drop_surplus()

    def _drop_surplus(self) -> None:
        own = self.kept[0][1]
        parameters = self.module._parameters.items()
        surplus = [name for name, value in parameters if value is not None and name not in own]
        for name in surplus:
            del self.module._parameters[name]


#: Model → its layers that are loadable now.
_open: weakref.WeakKeyDictionary[nn.Module, dict[str, _Layer]] = weakref.WeakKeyDictionary()


@torch.no_grad()
def open_layers(model: nn.Module) -> list[str]:
    """Make every layer with quantised weights loadable; open layers start over.

    Returns:
        Their names.
    Raises:
        ValueError: a layer has an unknown method; nothing was changed.
    """
    found = {name: module for name, module in model.named_modules() if _is_quantised(module)}
    unknown = sorted(
        {type(_method(module)).__name__ for module in found.values()} - {*LINEAR, *EXPERTS}
    )
    if unknown:
        raise ValueError(f"layers of {', '.join(unknown)} cannot be made loadable")
    layers = _open.setdefault(model, {})
    for name, module in found.items():
        if name not in layers:
            layers[name] = _Layer(module)
        layers[name].open()
    for module in _with_cache_scales(model):
        _skip_processing(_method(module))
    return list(found)


@torch.no_grad()
def close_layers(model: nn.Module) -> list[str]:
    """Process the weights of the open layers, and give the engine back the parameters that it
    computes with.

    Returns:
        Their names; [] if no layer was open.
    Raises:
        ValueError: names a layer whose processed weights do not fit and cannot be used.
    """
    layers = _open.get(model, {})
    names = list(layers)
    for name in names:
        try:
            layers[name].close()
        except Exception as error:
            raise ValueError(
                f"{name} could not be closed: {type(error).__name__}: {error}"
            ) from error
        del layers[name]
    for module in _with_cache_scales(model):
        _restore_processing(_method(module))
        # pushes do not update them, and after a sleep their memory is undefined
        for scale in ("k_scale", "v_scale"):
            module._parameters[scale].fill_(vars(module)[f"{scale}_float"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return names


@contextmanager
def opened_for_lookup(model: nn.Module) -> Iterator[None]:
    """Make layers loadable within the block, to find where a push would write each tensor. Memory
    is not accessed, and may be released.

    Raises:
        ValueError: as `open_layers`.
    """
    was_open = bool(_open.get(model))
    try:
        open_layers(model)
        yield
    finally:
        # also close layers that were opened before another one failed: the engine is not paused
        if not was_open:
            for layer in _open.pop(model, {}).values():
                layer.revert()
            for module in _with_cache_scales(model):
                _restore_processing(_method(module))


def _method(module: nn.Module) -> Any:
    return vars(module).get("quant_method") or vars(module).get("_modules", {}).get("quant_method")


def _is_quantised(module: nn.Module) -> bool:
    """Tell whether a quantisation method made the module's weights. In attention, such methods only
    make the scales of the cache."""
    method = _method(module)
    if method is None or not any("weight" in name for name in module._parameters):
        return False
    return not type(method).__name__.startswith("Unquantized")


def _with_cache_scales(model: nn.Module) -> list[Any]:
    """Return the attention modules with cache scales made by a quantisation method. Processing
    would take these for scales from files."""
    names = ("k_scale", "v_scale")
    return [
        module
        for module in model.modules()
        if _method(module) is not None
        and all(module._parameters.get(name) is not None for name in names)
        and all(isinstance(vars(module).get(f"{name}_float"), float) for name in names)
    ]


def _skip_processing(method: Any) -> None:
    vars(method)["process_weights_after_loading"] = lambda layer: None


def _restore_processing(method: Any) -> None:
    vars(method).pop("process_weights_after_loading", None)


def _create(method: Any, module: Any) -> None:
    """Create a layer's parameters as its own constructor does (SGLang 0.5.16, ``linear.py`` and
    ``moe/fused_moe_triton/layer.py``)."""
    if type(method).__name__ in EXPERTS:
        method.create_weights(
            layer=module,
            num_experts=module.num_local_experts,
            hidden_size=module.hidden_size,
            intermediate_size_per_partition=module.intermediate_size_per_partition,
            params_dtype=_dtype(module),
            weight_loader=module.weight_loader,
            with_bias=bool(vars(module).get("with_bias")),
        )
        return
    own = vars(module)
    method.create_weights(
        layer=module,
        input_size_per_partition=own.get("input_size_per_partition", module.input_size),
        output_partition_sizes=own.get("output_partition_sizes", [module.output_size]),
        input_size=module.input_size,
        output_size=module.output_size,
        params_dtype=_dtype(module),
        weight_loader=getattr(module, "weight_loader_v2", module.weight_loader),
        skip_block_quant_check=True,  # checked at the start
    )


def _dtype(module: Any) -> torch.dtype:
    found = vars(module).get("params_dtype") or vars(module).get("orig_dtype")
    return found if found is not None else torch.get_default_dtype()


@contextmanager
def _default_dtype(module: nn.Module) -> Iterator[None]:
    """Set torch's default dtype to the model's within the block, as while a model is loaded: some
    parameters are made in it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(_dtype(module))
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _tensors(owner: Any) -> dict[str, torch.Tensor]:
    held = {**vars(owner), **vars(owner).get("_parameters", {})}
    return {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}


def _realised(
    parameter: nn.Parameter, old: torch.Tensor | None, device: torch.device
) -> nn.Parameter:
    """Make a real parameter from one on the meta device, with its class and attributes; in the
    memory of the old one if sizes match."""
    shape = parameter.shape
    dtype = parameter.dtype
    nbytes = parameter.numel() * dtype.itemsize
    if old is not None and nbytes and old.untyped_storage().nbytes() == nbytes:
        data = torch.empty(0, dtype=dtype, device=device)
        data.set_(old.untyped_storage(), 0, shape, parameter.stride())
    elif old is not None and not old.numel() and nbytes:
        # column orders, which the kernels do not use: only the shape is needed, and for hundreds of
        # experts the data would be gigabytes
        data = torch.empty((), dtype=dtype, device=device).expand(shape)
    else:
        data = torch.empty(shape, dtype=dtype, device=device)
    real: nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, False)
    real.__dict__.update(parameter.__dict__)
    return real


def _move_into_old(owner: Any, name: str, old: torch.Tensor) -> None:
    """Move the tensor ``name`` into the memory of ``old``, which replaces it."""
    parameters = vars(owner).get("_parameters", {})
    new = parameters.get(name, vars(owner).get(name))
    if not isinstance(new, torch.Tensor):
        raise ValueError(f"{name} is gone")
    if (new.shape, new.dtype) != (old.shape, old.dtype):
        raise ValueError(
            f"{name} came out as {new.dtype} {tuple(new.shape)}, not {old.dtype} {tuple(old.shape)}"
        )
    if new is not old:
        if new.data_ptr() != old.data_ptr() or new.stride() != old.stride():
            old.data.copy_(new.data)
        _put(owner, name, old)


def _put(owner: Any, name: str, tensor: torch.Tensor) -> None:
    parameters = vars(owner).get("_parameters", {})
    if name in parameters:
        parameters[name] = tensor
    else:
        vars(owner)[name] = tensor
