"""Layers as SGLang has them under its quantising methods: what is loaded is not what is computed
with.

Names of classes and attributes, and the steps before and after loading, are those of SGLang 0.5.16
as far as `slime.engines.sglang.loadable` sees them; the packing itself is any that can be undone by
nobody but its maker.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


class LoadedParameter(nn.Parameter):
    """A parameter that knows how a checkpoint's tensor gets into it."""

    def __new__(cls, data: torch.Tensor, **_: Any) -> LoadedParameter:
        return super().__new__(cls, data, requires_grad=False)

    def __init__(self, data: torch.Tensor, weight_loader: Any) -> None:
        self._weight_loader = weight_loader

    @property
    def weight_loader(self) -> Any:
        return self._weight_loader


def plain(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Fp8LinearMethod:
    """FP8 by tensor: the weight is turned over, a scale for each part becomes one for each row."""

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        layer.logical_widths = output_partition_sizes
        rows = sum(output_partition_sizes)
        weight = torch.empty(rows, input_size_per_partition, dtype=torch.float8_e4m3fn)
        layer.register_parameter("weight", LoadedParameter(weight, weight_loader=weight_loader))
        scale = LoadedParameter(
            torch.empty(len(output_partition_sizes)), weight_loader=weight_loader
        )
        scale[:] = torch.finfo(torch.float32).min
        layer.register_parameter("weight_scale", scale)
        layer.register_parameter("input_scale", None)

    def process_weights_after_loading(self, layer: Any) -> None:
        widths = torch.tensor(layer.logical_widths)
        layer.weight_scale = plain(
            layer.weight_scale.data.repeat_interleave(widths)[:, None].contiguous()
        )
        layer.weight = plain(layer.weight.data.t())


class Scheme:
    """INT4 by groups: packed weights in another shape, scales turned over, a workspace that must be
    zeros."""

    group_size = 16

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        params_dtype: torch.dtype,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        rows, columns = sum(output_partition_sizes), input_size_per_partition
        parts = {
            "weight_packed": torch.empty(rows, columns // 8, dtype=torch.int32),
            "weight_scale": torch.empty(rows, columns // self.group_size, dtype=params_dtype),
            "weight_shape": torch.empty(2, dtype=torch.int64),
        }
        for name, data in parts.items():
            layer.register_parameter(name, LoadedParameter(data, weight_loader=weight_loader))

    def process_weights_after_loading(self, layer: Any) -> None:
        assert isinstance(layer.weight_packed, LoadedParameter), "it was packed already"
        self.workspace = torch.zeros(4, dtype=torch.int32)
        layer.weight_g_idx = plain(torch.empty(0, dtype=torch.int32))
        rows, words = layer.weight_packed.shape
        packed = layer.weight_packed.data.t().flip(0).reshape(words // 2, rows * 2).contiguous()
        layer.register_parameter("weight_packed", plain(packed))
        layer.register_parameter("weight_scale", plain(layer.weight_scale.data.t().contiguous()))


class CompressedTensorsLinearMethod:
    def create_weights(self, layer: Any, **given: Any) -> None:
        layer.scheme.create_weights(layer, **given)

    def process_weights_after_loading(self, layer: Any) -> None:
        layer.scheme.process_weights_after_loading(layer)


class CompressedTensorsFusedMoEMethod:
    """Experts: repacked in place, once; a mark says that it was done."""

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        weight_loader: Any,
        **_: Any,
    ) -> None:
        packed = plain(
            torch.empty(
                num_experts,
                hidden_size // 8,
                2 * intermediate_size_per_partition,
                dtype=torch.int32,
            )
        )
        packed.weight_loader = weight_loader
        layer.register_parameter("w13_weight_packed", packed)
        shape = plain(torch.empty(num_experts, 2))  # of the default dtype
        shape.weight_loader = weight_loader
        layer.register_parameter("w13_weight_shape", shape)
        layer.register_parameter(
            "w13_weight_g_idx", plain(torch.empty(num_experts, hidden_size, dtype=torch.int32))
        )

    def process_weights_after_loading(self, layer: Any) -> None:
        if getattr(layer, "is_marlin_converted", False):
            return
        count = layer.w13_weight_g_idx.shape[0]
        layer.w13_weight_g_idx = plain(torch.empty(count, 0, dtype=torch.int32))
        packed = layer.w13_weight_packed
        new = packed.flip(2).reshape(count, packed.shape[1] // 2, 2 * packed.shape[2]).contiguous()
        packed.resize_(new.shape)
        packed.copy_(new)
        layer.workspace = torch.zeros(4, dtype=torch.int32)
        layer.is_marlin_converted = True


class BaseKVCacheMethod:
    """Scales of attention's cache, which only files may bring."""

    def create_weights(self, layer: Any) -> None:
        layer.k_scale, layer.v_scale = plain(torch.tensor(-1.0)), plain(torch.tensor(-1.0))

    def process_weights_after_loading(self, layer: Any) -> None:
        scales = [layer.k_scale.item(), layer.v_scale.item()]
        if all(scale < 0.0 for scale in scales):
            scales = [1.0, 1.0]
        assert all(scale > 0.0 for scale in scales)
        layer.k_scale.data.fill_(scales[0])
        layer.v_scale.data.fill_(scales[1])
        layer.k_scale_float, layer.v_scale_float = scales


class UnquantizedLinearMethod:
    pass


class Linear(nn.Module):
    """q, k and v, or gate and up, in one layer."""

    def __init__(self, method: Any, columns: int, parts: list[int], scheme: Any = None) -> None:
        super().__init__()
        self.input_size, self.output_size, self.output_partition_sizes = columns, sum(parts), parts
        self.params_dtype, self.quant_method = torch.bfloat16, method
        if scheme is not None:
            self.scheme = scheme
        method.create_weights(
            layer=self,
            input_size_per_partition=columns,
            output_partition_sizes=parts,
            input_size=columns,
            output_size=sum(parts),
            params_dtype=self.params_dtype,
            weight_loader=self.weight_loader,
        )

    def weight_loader(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        assert parameter.shape == whole.shape, f"{tuple(parameter.shape)} for {tuple(whole.shape)}"
        parameter.data.copy_(whole)


class Experts(Linear):
    def __init__(self, method: Any) -> None:
        nn.Module.__init__(self)
        self.num_local_experts, self.hidden_size, self.intermediate_size_per_partition = 2, 32, 16
        self.params_dtype, self.quant_method = torch.bfloat16, method
        method.create_weights(
            layer=self, num_experts=2, hidden_size=32, intermediate_size_per_partition=16,
            params_dtype=self.params_dtype, weight_loader=self.weight_loader,
        )  # fmt: skip


class Model(nn.Module):
    """A layer of each kind, loaded and processed as at a start."""

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)  # as while SGLang loads a model
        self.fp8 = Linear(Fp8LinearMethod(), 32, [32, 16])
        self.int4 = Linear(CompressedTensorsLinearMethod(), 32, [32, 16], Scheme())
        self.experts = Experts(CompressedTensorsFusedMoEMethod())
        torch.set_default_dtype(before)
        self.norm = nn.LayerNorm(32)
        self.attention: Any = nn.Module()
        self.attention.quant_method = BaseKVCacheMethod()
        self.attention.quant_method.create_weights(self.attention)
        self.load_weights(weights.items())
        self.process()

    def quantised(self) -> list[Any]:
        return [self.fp8, self.int4, self.experts, self.attention]

    def process(self) -> None:
        """As SGLang does behind reading files."""
        for module in self.quantised():
            module.quant_method.process_weights_after_loading(module)

    def process_attention(self) -> None:
        self.attention.quant_method.process_weights_after_loading(self.attention)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, whole in weights:
            parameter: Any = parameters[name]
            parameter.weight_loader(parameter, whole)


def weights(seed: int) -> dict[str, torch.Tensor]:
    """As a checkpoint stores them."""
    generator = torch.Generator().manual_seed(seed)

    def words(*shape: int) -> torch.Tensor:
        return torch.randint(-(1 << 31), 1 << 31, shape, generator=generator, dtype=torch.int32)

    return {
        "fp8.weight": torch.randn(48, 32, generator=generator).to(torch.float8_e4m3fn),
        "fp8.weight_scale": torch.rand(2, generator=generator),
        "int4.weight_packed": words(48, 4),
        "int4.weight_scale": torch.rand(48, 2, generator=generator).bfloat16(),
        "int4.weight_shape": torch.tensor([48, 32]),
        "experts.w13_weight_packed": words(2, 4, 32),
        "experts.w13_weight_shape": torch.tensor([[16.0, 32.0], [16.0, 32.0]]).bfloat16(),
    }
