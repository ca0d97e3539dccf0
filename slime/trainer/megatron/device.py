"""Where the trainer computes: a GPU if there is one, else the CPU, on which megatron-core then runs
unmodified.

megatron-core asks ``torch.cuda`` for everything: the current device, streams, RNG states,
``device="cuda"`` in its tensor factories, ``torch.cuda.FloatTensor`` as the name of a dtype. Where
no GPU is present, `install` answers those questions with the CPU, once per process and before the
first ``import megatron``:

==============================================
==================================================================== megatron-core asks for
and gets on a host without a GPU ==============================================
==================================================================== ``torch.cuda.current_device()``
``torch.device("cpu")`` ``torch.zeros(..., device="cuda")`` and kin     a CPU tensor (``pin_memory``
is dropped: there is nothing to pin for) ``tensor.cuda()``                               the tensor
itself ``tensor.type()``                               the ``torch.cuda.…`` spelling that its
optimizers compare with ``torch.cuda.FloatTensor`` and siblings         the CPU types, for its
``isinstance`` checks streams, events, ``synchronize``                stand-ins that do nothing: CPU
work is already in order ``torch.cuda`` RNG states                       the CPU generator's
``torch.compile`` as its "jit fuser"            no compilation: a C++ compiler and minutes of
warm-up are not needed ==============================================
====================================================================

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
    "tensor",
    "zeros",
    "ones",
    "empty",
    "full",
    "arange",
    "rand",
    "randn",
    "randint",
    "randperm",
    "linspace",
)
_TYPE_NAMES = (
    "Float",
    "Double",
    "Half",
    "BFloat16",
    "Byte",
    "Char",
    "Short",
    "Int",
    "Long",
    "Bool",
)
_installed = False


def has_gpu() -> bool:
    return torch.cuda.is_available()


def install() -> torch.device:
    """Make ``import megatron.core`` usable in this process; idempotent. Call it before megatron is
    imported.

    Returns:
        The device that parameters and batches live on: the process's current GPU, or the CPU.
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
    """Backend of ``torch.distributed`` for tensors on the trainer's device."""
    return "nccl" if has_gpu() else "gloo"


def synchronize() -> None:
    """Wait for the device, so that a clock read afterwards is honest."""
    if has_gpu():
        torch.cuda.synchronize()


def set_deterministic() -> None:
    """``--deterministic-mode``: same inputs, same bits (the CPU's kernels give them for a fixed
    number of threads).

    An operation that has no deterministic kernel is an error, and torch's attention then takes its
    deterministic backward pass. To be called before the first communicator and the first matrix
    product: NCCL and cuBLAS read their variables once.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    os.environ.setdefault("NCCL_ALGO", "Ring")  # others add up in the order of arrival
    os.environ.setdefault("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")  # Transformer Engine's attention
    os.environ.setdefault(
        "TORCHINDUCTOR_DETERMINISTIC", "1"
    )  # kernels chosen by rule, not by timing them
    torch.use_deterministic_algorithms(True)
    # it would find reads of garbage, for a pass over every new tensor
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def _quiet_megatron() -> None:
    """Drop what megatron-core says at every import about packages that slime does not need."""
    for said in (".*Apex", "full scope is deprecated", ".*tensor` is deprecated. Please use"):
        warnings.filterwarnings("ignore", message=said)


@functools.cache
def _offer_accumulating_products() -> None:
    """What Megatron takes from Apex to add weight gradients to its float32 buffers within the
    product, instead of writing them out and adding them in another pass. torch's own products can
    do that too."""
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
    """Megatron's own stand-in for Apex's norm of many tensors waits for the GPU once per tensor."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm

    if clip_grads.l2_norm_impl is local_multi_tensor_l2_norm:
        clip_grads.l2_norm_impl = _norm_at_once


def _norm_at_once(
    chunk_size: int, flag: torch.Tensor, lists: list[list[torch.Tensor]], *_: Any
) -> tuple[torch.Tensor, None]:
    """float32 [1] on ``flag``'s device, the norm of all tensors in all lists together; in Apex's
    form."""
    tensors = [tensor for tensors in lists for tensor in tensors]
    if not tensors:
        return torch.zeros(1, device=flag.device), None
    norms = torch._foreach_norm(
        tensors, 2, dtype=torch.float32
    )  # 16-bit gradients need not have a 16-bit norm
    return torch.linalg.vector_norm(torch.stack(norms)).reshape(1), None


def has_kernels() -> bool:
    """May Triton kernels be used: is there a GPU, and a C compiler for what launches them?"""
    return has_gpu() and _has_compiler()


@functools.cache
def _has_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CC", "cc"), "gcc", "clang"))


@functools.cache
def _run_eagerly_without_compiler() -> None:
    """Triton builds what launches its kernels with a C compiler; without one, ``torch.compile``
    must not be tried."""
    if _has_compiler():
        return
    torch.compiler.set_stance("force_eager")
    logger.warning(
        "no C compiler (gcc, clang or $CC) on this host: softmax, rotary embedding and "
        "activations run unfused, "
        "which costs speed and memory; install gcc"
    )


# -- the stand-ins
# ---------------------------------------------------------------------------------------------


class _Event:
    """A CUDA event where every operation has finished by the time it is recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, stream: Any = None) -> None:
        pass

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


class _InOrderStream:
    """A CUDA stream on a device that runs everything in program order."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = CPU
        self.cuda_stream = 0

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> _Event:
        return _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_THE_STREAM = _InOrderStream()


def _on_cpu(device: Any) -> Any:
    """``device`` with every way of saying "the GPU" replaced by the CPU."""
    if isinstance(device, str) and device.startswith("cuda"):
        return CPU
    if isinstance(device, torch.device) and device.type == "cuda":
        return CPU
    return device


def _redirected_factory(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        kwargs.pop("pin_memory", None)
        return factory(*args, **kwargs)

    return make


def _redirect_tensors() -> None:
    # `with torch.device("meta")` knows factories by identity, from a set made at its first use:
    # make it now, of the originals. Else transformers builds models whose rotary buffers are never
    # filled.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        original = getattr(torch, name)
        redirected = _redirected_factory(original)
        # TorchScript finds builtins by identity, so the wrapper has to be known to it under the
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

    def same_tensor(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    def nothing(self: torch.Tensor, *args: Any) -> None:
        return None

    for method, stand_in in (
        ("type", tensor_type),
        ("to", tensor_to),
        ("cuda", same_tensor),
        ("record_stream", nothing),
    ):
        setattr(torch.Tensor, method, stand_in)


def _do_nothing() -> Callable[..., None]:
    """A function of its own for each use: torch.compile keeps rules per function object and refuses
    shared ones."""

    def nothing(*args: Any, **kwargs: Any) -> None:
        return None

    return nothing


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
    """Import ``module`` as if wandb and TensorBoard were not installed: megatron-core takes them in
    for what is not used here, which costs a fifth of a rank's start.

    Args:
        instead: further modules, by name, and what stands for them meanwhile.
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


def _cpu_rng_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor:
    return torch.get_rng_state()


def _set_cpu_rng_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(new_state)


def _import_megatron() -> None:
    """Import megatron-core with its fuser off and its RNG tracker on the CPU generator.

    Both are bound when its modules are first imported; `torch.compile` is put back afterwards for
    everyone else.
    """
    original_compile = torch.compile
    torch.compile = lambda function=None, **kwargs: (
        function if function is not None else (lambda f: f)
    )  # type: ignore[assignment]
    try:
        # brings setuptools along, for allocators of memory on a GPU
        compiler = types.ModuleType("torch.utils.cpp_extension")
        compiler.CUDA_HOME = compiler.load_inline = None  # type: ignore[attr-defined]
        _import_without_servers("megatron.core", **{compiler.__name__: compiler})
        rng = importlib.import_module("megatron.core.tensor_parallel.random")
    finally:
        torch.compile = original_compile
    vars(rng)["_get_cuda_rng_state"] = _cpu_rng_state
    vars(rng)["_set_cuda_rng_state"] = _set_cpu_rng_state
    # its tracker expects two generators; here they are one, and saying so at every parameter helps
    # nobody
    logging.getLogger(rng.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )
