"""Make layers of quantised weights loadable again, inside SGLang's processes, for the weight probe.

SGLang changes quantised weights once they are loaded: Marlin's kernels want INT4 in an order of
their own, FP8 by tensor is transposed and its scales are spread over rows. What is left are
parameters without loaders, in other shapes: `load_weights` raises, which ends the engine, or fills
the wrong places.

    open_layers    every such layer gets the parameters that its method creates before loading, in
                   the memory of the old
        ... any number of loads, of any kind: handles, broadcasts, files ...
    close_layers   the method processes them as after a start; the result goes where the old
                   parameters are

The old parameters stay the engine's: CUDA graphs have their addresses, and the memory saver gives
them back after a sleep. Between the two calls an engine must not compute; it is paused. SGLang
processes what it has read from files at once; while layers are open their methods let that pass, so
that what arrived can be compared first, however it came. Opening takes memory only for what is
larger before loading than behind it, and processing for one layer at a time.
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

#: Quant methods, by class, whose ``create_weights`` and ``process_weights_after_loading`` were read
#: and tried.
LINEAR = ("Fp8LinearMethod", "CompressedTensorsLinearMethod")
EXPERTS = ("Fp8MoEMethod", "CompressedTensorsFusedMoEMethod")
#: Marks of layers that were processed, which keep them from being processed again.
_DONE_MARKS = ("is_marlin_converted", "is_triton_converted")


class _Layer:
    """One layer while it is loadable.

    Attributes:
        kept: what the engine computes with, by owner: the layer itself, its method, its scheme.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.method = _method(module)
        owners: list[Any] = [module, self.method, vars(module).get("scheme")]
        self.kept = [(owner, _tensors(owner)) for owner in owners if owner is not None]
        self._marks = {mark: vars(module)[mark] for mark in _DONE_MARKS if mark in vars(module)}

    def open(self) -> None:
        """New parameters, as they are before loading. May be called again."""
        module = self.module
        _hold_back(self.method)
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
        """Have what was loaded processed, and move the result to where the old parameters are.

        Raises:
            ValueError: what came out does not fit where the old parameters are.
        """
        _let_go(self.method)
        self.method.process_weights_after_loading(self.module)
        for owner, tensors in self.kept:
            for name, old in tensors.items():
                _settle(owner, name, old)
        self._drop_surplus()

    def shut(self) -> None:
        """Undo the opening of a layer into which nothing was loaded."""
        _let_go(self.method)
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
    """Make every layer of quantised weights loadable; one that is so already begins anew.

    Returns:
        Their names.
    Raises:
        ValueError: a layer has a method that is not known here; nothing was changed.
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
        _hold_back(_method(module))
    return list(found)


@torch.no_grad()
def close_layers(model: nn.Module) -> list[str]:
    """Process the weights of the open layers, and give the engine back the parameters that it
    computes with.

    Returns:
        Their names; none where nothing was open.
    Raises:
        ValueError: names a layer that did not come out as it was, whose weights cannot be used.
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
        _let_go(_method(module))
        # no push brings them, and after a sleep their memory holds anything
        for scale in ("k_scale", "v_scale"):
            module._parameters[scale].fill_(vars(module)[f"{scale}_float"])
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return names


@contextmanager
def opened_to_look(model: nn.Module) -> Iterator[None]:
    """Make layers loadable within the block, to find where a push would put each tensor. Memory is
    not touched, and may be released.

    Raises:
        ValueError: as `open_layers`.
    """
    was_open = bool(_open.get(model))
    try:
        open_layers(model)
        yield
    finally:
        # also what was opened before another layer could not be: nobody has paused the engine
        if not was_open:
            for layer in _open.pop(model, {}).values():
                layer.shut()
            for module in _with_cache_scales(model):
                _let_go(_method(module))


def _method(module: nn.Module) -> Any:
    return vars(module).get("quant_method") or vars(module).get("_modules", {}).get("quant_method")


def _is_quantised(module: nn.Module) -> bool:
    """Tell whether a quantising method made the module's weights. Attention has such methods for
    the scales of its cache alone."""
    method = _method(module)
    if method is None or not any("weight" in name for name in module._parameters):
        return False
    return not type(method).__name__.startswith("Unquantized")


def _with_cache_scales(model: nn.Module) -> list[Any]:
    """Return the attention modules whose quantising method has made scales for the cache.
    Processing takes these for scales from files."""
    names = ("k_scale", "v_scale")
    return [
        module
        for module in model.modules()
        if _method(module) is not None
        and all(module._parameters.get(name) is not None for name in names)
        and all(isinstance(vars(module).get(f"{name}_float"), float) for name in names)
    ]


def _hold_back(method: Any) -> None:
    vars(method)["process_weights_after_loading"] = lambda layer: None


def _let_go(method: Any) -> None:
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
        skip_block_quant_check=True,  # it was checked at the start
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
    """Make a real parameter of one on the meta device, with its class and attributes; it lies where
    the old one is if sizes allow."""
    shape = parameter.shape
    dtype = parameter.dtype
    nbytes = parameter.numel() * dtype.itemsize
    if old is not None and nbytes and old.untyped_storage().nbytes() == nbytes:
        data = torch.empty(0, dtype=dtype, device=device)
        data.set_(old.untyped_storage(), 0, shape, parameter.stride())
    elif old is not None and not old.numel() and nbytes:
        # what the kernels do without (orders of columns): of hundreds of experts it would be
        # gigabytes, and only its shape is asked for
        data = torch.empty((), dtype=dtype, device=device).expand(shape)
    else:
        data = torch.empty(shape, dtype=dtype, device=device)
    real: nn.Parameter = torch.Tensor._make_subclass(type(parameter), data, False)
    real.__dict__.update(parameter.__dict__)
    return real


def _settle(owner: Any, name: str, old: torch.Tensor) -> None:
    """Move what is under ``name`` into the memory of ``old``, which takes its place again."""
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
