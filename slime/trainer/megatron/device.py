"""The trainer's device: a GPU if there is one, else the CPU.

megatron-core asks ``torch.cuda`` for everything: the current device, streams, RNG states,
``device="cuda"`` in its tensor factories, ``torch.cuda.FloatTensor`` as the name of a dtype.
Without a GPU, `install` answers with the CPU, once per process and before the first
``import megatron``:

megatron-core asks for                    and gets on a host without a GPU
``torch.cuda.current_device()``           ``torch.device("cpu")``
``torch.zeros(..., device="cuda")``, …    a CPU tensor; ``pin_memory`` is dropped
``tensor.cuda()``                         the tensor itself
``tensor.type()``                         the ``torch.cuda.…`` name that its optimizers compare with
``torch.cuda.FloatTensor``, …             the CPU types, for its ``isinstance`` checks
streams, events, ``synchronize``          stand-ins that do nothing: CPU work is in order already
``torch.cuda`` RNG states                 the CPU generator's
``torch.compile`` as its "jit fuser"      no compilation, which needs a C++ compiler and minutes

Nothing else in slime branches on this. The factories are wrapped, instead of entering a
``TorchFunctionMode``, because a mode belongs to one thread (a Ray actor may call from several) and
costs 0.9 µs on every torch call.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils._device

from slime.algorithms.products import add_product
from slime.log import get_logger

logger = get_logger(__name__)

CPU = torch.device("cpu")
_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm",
    "linspace",
)  # fmt: skip
_TYPE_NAMES = (
    "Float", "Double", "Half", "BFloat16", "Byte", "Char", "Short", "Int", "Long", "Bool",
)  # fmt: skip
_installed = False


def has_gpu() -> bool:
    return torch.cuda.is_available()


def install() -> torch.device:
    """Make ``import megatron.core`` usable in this process; idempotent. Call it before megatron is
    imported.

    Returns:
        The device of parameters and batches: the process's current GPU, or the CPU.
    """
    global _installed
    _quiet_megatron()
    if has_gpu():
        _import_without_servers("megatron.core")
        _run_eagerly_without_compiler()
        _offer_accumulating_products()
        _measure_norms_at_once()
        return torch.device("cuda", torch.cuda.current_device())
    if not _installed:
        _installed = True
        _redirect_tensors()
        _redirect_cuda_module()
        _import_megatron()
        _offer_accumulating_products()
    return CPU


def select_gpu(local_rank: int) -> torch.device:
    """Bind this process to its GPU (nothing to bind without one), then `install`."""
    if has_gpu():
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    return install()


def communication_backend() -> str:
    """Return the backend of ``torch.distributed`` for tensors on the trainer's device."""
    return "nccl" if has_gpu() else "gloo"


def synchronize() -> None:
    """Wait until the GPU has finished all queued work; without a GPU do nothing."""
    if has_gpu():
        torch.cuda.synchronize()


def set_deterministic() -> None:
    """Make equal inputs give equal bits (``--deterministic-mode``); CPU kernels do so for a fixed
    number of threads.

    An operation without a deterministic kernel becomes an error, and torch's attention takes its
    deterministic backward pass. Call this before the first communicator and the first matrix
    product: NCCL and cuBLAS read their variables once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # other algorithms sum in the order of arrival
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")  # chooses kernels without timing
    torch.use_deterministic_algorithms(True)
    # a debugging aid that costs an extra pass over every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _quiet_megatron() -> None:
    """Drop megatron-core's warnings about packages that slime does not need."""
    for message in (".*Apex", "full scope is deprecated", ".*tensor` is deprecated. Please use"):
        warnings.filterwarnings("ignore", message=message)


@functools.cache
def _offer_accumulating_products() -> None:
    """Replace Apex's kernels, which add weight gradients to Megatron's float32 buffers within the
    matrix product, by torch's products, which can do so too."""
    from megatron.core.tensor_parallel import layers

    if layers._grad_accum_fusion_available:
        return

    def accumulate(
        inputs: torch.Tensor, grad_output: torch.Tensor, main_grad: torch.Tensor
    ) -> None:
        add_product(main_grad, grad_output.t(), inputs)

    layers.fused_weight_gradient_mlp_cuda = types.SimpleNamespace(
        wgrad_gemm_accum_fp32=accumulate, wgrad_gemm_accum_fp16=accumulate
    )
    layers._grad_accum_fusion_available = True


def _measure_norms_at_once() -> None:
    """Replace Megatron's norm of a list of tensors, which waits for the GPU once per tensor."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_at_once


def _norm_at_once(
    chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """Return the norm of all tensors together, float32 [1] on ``flag``'s device, in Apex's form."""
    tensors = [tensor for tensors in lists for tensor in tensors]
    if not tensors:
        return torch.zeros(1, device=flag.device), None
    # the norm of 16-bit gradients may not fit 16 bits
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float32)
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def has_kernels() -> bool:
    """Tell whether Triton kernels can be used: there is a GPU, and a C compiler for their
    launchers."""
    return has_gpu() and _has_compiler()


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))


@functools.cache
def _run_eagerly_without_compiler() -> None:
    """Switch ``torch.compile`` off if there is no C compiler, which Triton's launchers need."""
    if _has_compiler():
        return
    torch.compiler.set_stance("force_eager")
    logger.warning(
        "no C compiler (gcc, clang or $CC) on this host: softmax, rotary embedding and activations "
        "run unfused, which costs speed and memory; install gcc"
    )


# -- the stand-ins ---------------------------------------------------------------------------------


def _ignored(*args: Any, **kwargs: Any) -> None:
    return None


def _finished(self: Any) -> bool:
    return True


class _Event:
    """A CUDA event where every operation has finished by the time it is recorded."""

    __init__ = record = wait = synchronize = _ignored
    query = _finished

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _InOrderStream:
    """A CUDA stream on a device that runs everything in program order."""

    device = CPU
    cuda_stream = 0
    __init__ = wait_stream = wait_event = synchronize = _ignored
    query = _finished

    def record_event(self, event: Any = None) -> _Event:
        return _Event()


_THE_STREAM = _InOrderStream()


def _on_cpu(device: Any) -> Any:
    names_gpu = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return CPU if names_gpu else device


def _redirected_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _redirect_tensors() -> None:
    # `with torch.device("meta")` recognises factories by identity, from a set that is cached at its
    # first use. Cache it now, with the original factories; otherwise transformers builds models
    # whose rotary buffers are never filled.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        original = getattr(torch, name)
        redirected = _redirected_factory(original)
        # TorchScript finds builtins by identity, so the wrapper must be registered under the
        # builtin's name
        torch.jit._builtins._register_builtin(redirected, f"aten::{name}")
        setattr(torch, name, redirected)

    original_type = torch.Tensor.type
    original_to = torch.Tensor.to

    def tensor_type(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is not None:
            return original_type(self, dtype, *args, **kwargs)
        name = original_type(self)
        return name.replace("torch.", "torch.cuda.", 1) if self.device.type == "cpu" else name

    def tensor_to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args:
            args = (_on_cpu(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        return original_to(self, *args, **kwargs)

    stand_ins: dict[str, Callable[..., Any]] = {
        "type": tensor_type,
        "to": tensor_to,
        "cuda": lambda self, *args, **kwargs: self,
        "record_stream": _do_nothing(),
    }
    for method, stand_in in stand_ins.items():
        setattr(torch.Tensor, method, stand_in)


def _do_nothing() -> Callable[..., None]:
    """Make a new function, as torch.compile keeps rules per function and refuses shared ones."""
    return lambda *args, **kwargs: None


def _redirect_cuda_module() -> None:
    @contextlib.contextmanager
    def stream_context(stream: Any) -> Iterator[None]:
        yield

    stand_ins: dict[str, Any] = {
        "current_device": lambda: CPU,
        "set_device": _do_nothing(),
        "synchronize": _do_nothing(),
        "empty_cache": _do_nothing(),
        "Stream": _InOrderStream,
        "Event": _Event,
        "current_stream": lambda device=None: _THE_STREAM,
        "default_stream": lambda device=None: _THE_STREAM,
        "stream": stream_context,
        "manual_seed": torch.default_generator.manual_seed,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "set_rng_state": lambda state, device="cuda": torch.set_rng_state(state),
    }
    for name, stand_in in stand_ins.items():
        setattr(torch.cuda, name, stand_in)
    for name in _TYPE_NAMES:
        setattr(torch.cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))


def _import_without_servers(module: str, **instead: Any) -> None:
    """Import ``module`` as if wandb and TensorBoard were not installed: they are not used here, and
    importing them takes a fifth of a rank's start-up time.

    Args:
        instead: replacements of further modules, by name.
    """
    hidden = {"wandb": None, "tensorboard": None, **instead}
    hidden = {name: stand_in for name, stand_in in hidden.items() if name not in sys.modules}
    if module in sys.modules:
        return
    sys.modules.update(hidden)
    try:
        importlib.import_module(module)
    finally:
        for library in hidden:
            del sys.modules[library]


def _import_megatron() -> None:
    """Import megatron-core with its fuser off and its RNG tracker on the CPU generator.

    Megatron's modules bind both at their first import. `torch.compile` is restored afterwards.
    """
    original_compile = torch.compile
    vars(torch)["compile"] = lambda function=None, **kwargs: function or (lambda f: f)
    try:
        # this module imports setuptools, which only GPU memory allocators need
        compiler = types.ModuleType("torch.utils.cpp_extension")
        compiler.CUDA_HOME = compiler.load_inline = None  # type: ignore[attr-defined]
        _import_without_servers("megatron.core", **{compiler.__name__: compiler})
        rng = importlib.import_module("megatron.core.tensor_parallel.random")
    finally:
        torch.compile = original_compile
    vars(rng)["_get_cuda_rng_state"] = lambda *args, **kwargs: torch.get_rng_state()
    vars(rng)["_set_cuda_rng_state"] = lambda state, *args, **kwargs: torch.set_rng_state(state)
    # the tracker expects separate generators for CPU and GPU, and would warn at every parameter
    logging.getLogger(rng.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
