"""INT4 and FP8 weights, bit for bit as compressed-tensors computes and packs them, and back within
half a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slime.engines.wire import quantised
from slime.engines.wire.expert_runs import ExpertRun
from slime.engines.wire.quantised import config_of, dequantise, quantise, quantise_run
from slime.errors import UserError
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.quantised_models import same_bits

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

WHOLE = Fp8((0, 0), "weight_scale")


@st.composite
def weights(draw: st.DrawFn, columns_of: int = 1) -> torch.Tensor:
    """Random matrices with what quantisers trip over: zeros, constants, tiny and huge rows, one
    sign only."""
    rows, columns = draw(st.integers(1, 21)), columns_of * draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    weight = torch.randn(rows, columns, generator=generator)
    for row in range(rows):
        kind = draw(
            st.sampled_from(
                ["plain", "plain", "zero", "constant", "tiny", "huge", "positive", "negative"]
            )
        )
        changed: dict[str, Any] = {
            "zero": weight[row] * 0,
            "constant": weight[row] * 0 + weight[row, 0],
            "tiny": weight[row] * 1e-12,
            "huge": weight[row] * 1e12,
            "positive": weight[row].abs(),
            "negative": -weight[row].abs(),
        }
        weight[row] = changed.get(kind, weight[row])
    return weight.to(draw(st.sampled_from([torch.bfloat16, torch.float32])))


def reference_int4(
    weight: torch.Tensor, scheme: Int4, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed numbers and zero points by compressed-tensors' own functions and hand-made packing, at
    the scale given."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=4,
        type="int",
        strategy="group",
        group_size=scheme.group_size,
        symmetric=scheme.symmetric,
    )
    low, high = weight.float().unflatten(-1, (-1, scheme.group_size)).aminmax(dim=-1)
    zero = calculate_qparams(low, high, args)[1]
    zero[(low == 0) & (high == 0)] = 0
    numbers = quantize(weight.float(), scale.float(), zero, args, dtype=torch.int8)
    return packed(numbers), packed(zero.T).T


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Eight numbers from -8 to 7 in an int32, the first in the lowest bits."""
    rows = [[int(value) + 8 for value in row] for row in numbers]
    words = [
        [
            sum(value << 4 * place for place, value in enumerate(row[at : at + 8]))
            for at in range(0, len(row), 8)
        ]
        for row in rows
    ]
    signed = [[word - (1 << 32) if word >> 31 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int64).to(torch.int32)


@settings(max_examples=60)
@given(weights(columns_of=8), st.booleans())
def test_int4_is_what_compressed_tensors_makes(weight: torch.Tensor, symmetric: bool) -> None:
    scheme = Int4(8, symmetric)
    stored = quantise("m", weight, scheme)
    assert {
        name: (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in stored.items()
    } == {
        f"m.{part}": facts
        for part, facts in scheme.parts(
            tuple(weight.shape), str(weight.dtype).removeprefix("torch.")
        ).items()
    }
    numbers, zero = reference_int4(weight, scheme, stored["m.weight_scale"])
    assert torch.equal(stored["m.weight_packed"], numbers)
    assert symmetric or torch.equal(stored["m.weight_zero_point"], zero)
    assert stored["m.weight_shape"].tolist() == list(weight.shape)


@settings(max_examples=60)
@given(weights(columns_of=8), st.booleans())
def test_int4_comes_back_within_half_a_step(weight: torch.Tensor, symmetric: bool) -> None:
    stored = quantise("m", weight, Int4(8, symmetric))
    back = dequantise("m", stored, Int4(8, symmetric), weight.dtype)
    # the largest number is 7 of 7.5 steps, or a zero point was rounded; scale and product are
    # rounded to the dtype
    step = stored["m.weight_scale"].float().repeat_interleave(8, dim=1)
    slack = 16 * torch.finfo(weight.dtype).eps
    assert (
        (weight.float() - back.float()).abs() <= step * (0.5 + 0.5 * (not symmetric) + slack)
    ).all()
    assert (back[(weight == 0).all(dim=1)] == 0).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_no_scale_is_zero_in_float16(symmetric: bool) -> None:
    """Its smallest numbers are steps of 6e-8, and a scale is a fifteenth of what a group spans."""
    weight = torch.tensor([[6e-8] * 7 + [0.0], [1.0] * 8], dtype=torch.float16)
    stored = quantise("m", weight, Int4(8, symmetric))
    assert (stored["m.weight_scale"] > 0).all()
    back = dequantise("m", stored, Int4(8, symmetric), torch.float32)
    assert (
        back.isfinite().all() and (back[0].abs() <= 6e-8).all() and back[1].sub(1).abs().max() < 0.1
    )


@settings(max_examples=60)
@given(weights(), st.sampled_from([Fp8((4, 3)), WHOLE, Fp8((1, 0), "weight_scale")]))
def test_fp8_is_what_compressed_tensors_makes(weight: torch.Tensor, scheme: Fp8) -> None:
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize, quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    kinds: dict[tuple[int, int], dict[str, Any]] = {
        (4, 3): {"strategy": "block", "block_structure": [4, 3]},
        (0, 0): {"strategy": "tensor"},
        (1, 0): {"strategy": "channel"},
    }
    args = QuantizationArgs(num_bits=8, type="float", symmetric=True, **kinds[scheme.block])
    height, width = scheme.block[0] or len(weight), scheme.block[1] or weight.shape[1]
    rows, columns = weight.shape
    tiles = [
        [weight[r : r + height, c : c + width].float() for c in range(0, columns, width)]
        for r in range(0, rows, height)
    ]
    low, high = (
        torch.tensor([[float(value(tile)) for tile in row] for row in tiles])
        for value in (torch.amin, torch.amax)
    )
    scale, _ = calculate_qparams(low, high, args)
    scale = scale if any(scheme.block) else scale.reshape(1)
    theirs = quantize(weight.float(), scale, None, args, dtype=torch.float8_e4m3fn)
    stored = quantise("m", weight, scheme)
    assert same_bits(stored[f"m.{scheme.scale}"], scale)
    assert same_bits(stored["m.weight"], theirs)
    back = dequantise("m", stored, scheme, torch.float32)
    assert torch.equal(back, dequantize(theirs, scale, args=args))
    # three bits of fraction, or a step of the smallest numbers; a scale so small that it is
    # subnormal loses bits itself
    smallest = scale.max() * 2**-9
    assert ((weight.float() - back).abs() <= weight.float().abs() * (2**-4 + 1e-5) + smallest).all()


@settings(max_examples=40)
@given(
    weights(columns_of=8),
    st.sampled_from([Int4(8), Int4(8, False), Fp8((4, 3)), Fp8((8, 8)), WHOLE, Fp8((1, 0))]),
)
def test_weights_in_pieces_are_whole_ones(weight: torch.Tensor, scheme: Int4 | Fp8) -> None:
    whole = quantise("m", weight, scheme)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantised, "_PIECE", 40)
        pieces = quantise("m", weight, scheme)
    assert all(same_bits(whole[name], pieces[name]) for name in whole)


@settings(max_examples=60)
@given(
    st.lists(weights(columns_of=8), min_size=1, max_size=3),
    st.sampled_from(
        [Int4(8), Int4(8, False), Fp8((4, 3)), Fp8((8, 8)), WHOLE, Fp8((1, 0), "weight_scale")]
    ),
)
def test_a_run_of_experts_holds_what_each_of_them_has(
    drawn: list[torch.Tensor], scheme: Int4 | Fp8
) -> None:
    rows, columns = (min(weight.shape[axis] for weight in drawn) for axis in (0, 1))
    stack = torch.stack([weight[:rows, :columns].float() for weight in drawn])
    run = ExpertRun("mlp.experts", 4, 3 + len(drawn), "up")
    parts = quantise_run(run, stack, scheme)
    apart = dict(pair for name, part in parts.items() for pair in told(name).split(part))
    single = {
        name: part
        for number, weight in enumerate(stack, start=4)
        for name, part in quantise(f"mlp.experts.{number}.up_proj", weight, scheme).items()
    }
    assert apart.keys() == single.keys() and all(
        same_bits(apart[name], part) for name, part in single.items()
    )


def told(name: str) -> ExpertRun:
    run = ExpertRun.parse(name)
    assert run is not None
    return run


def test_columns_that_no_group_divides_are_named() -> None:
    with pytest.raises(
        UserError, match=r"model.a cannot be stored as INT4(.|\n)*12 columns(.|\n)*--ignore model.a"
    ):
        quantise("model.a", torch.ones(2, 12), Int4(8))


@pytest.mark.parametrize(
    "quantisation",
    [
        Quantisation("compressed-tensors", Int4(32), ("lm_head", r"re:.*mlp\.gate\..*")),
        Quantisation("compressed-tensors", Int4(128, False)),
        Quantisation("fp8", Fp8((128, 64)), ("lm_head",)),
        Quantisation("fp8", WHOLE, ("model.layers.0.mlp.down_proj",)),
    ],
    ids=str,
)
def test_what_is_written_of_it_is_read_again(quantisation: Quantisation) -> None:
    assert Quantisation.read({"quantization_config": config_of(quantisation)}) == quantisation


INT4_WEIGHTS: dict[str, Any] = {"num_bits": 4, "type": "int", "group_size": 32, "strategy": "group"}
W4A8 = {"weights": INT4_WEIGHTS, "input_activations": {"num_bits": 8, "dynamic": True}}
PLAIN_INT4 = {
    "quant_method": "compressed-tensors",
    "config_groups": {"a": {"weights": INT4_WEIGHTS}},
}
FP8_WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "float", "strategy": "tensor"}


def of_group(weights: dict[str, Any], **more: object) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"a": {"weights": weights, **more}},
    }


def test_fp8_as_llm_compressor_publishes_it_is_read() -> None:
    """One scale per row, and one for each token's activations, made as they come."""
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 8,
            "type": "float",
            "strategy": "channel",
            "symmetric": True,
            "dynamic": False,
        },
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
    }
    told = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
    told |= {
        "format": "float-quantized",
        "sparsity_config": {},
        "transform_config": {},
        "kv_cache_scheme": None,
    }
    found = Quantisation.read({"quantization_config": told})
    assert found == Quantisation("compressed-tensors", Fp8((1, 0), "weight_scale"), ("lm_head",))


@pytest.mark.parametrize(
    ("told", "named"),
    [
        ({"quant_method": "awq", "bits": 4}, "quant_method 'awq'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static'"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": {}, "b": {}}},
            "2 config_groups",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}},
            },
            "type int, 8 bits",
        ),
        ("int4", "'int4', not an object"),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"a": W4A8}},
            "has input_activations",
        ),
        ({**PLAIN_INT4, "kv_cache_scheme": {"num_bits": 8}}, "has kv_cache_scheme"),
        ({**PLAIN_INT4, "transform_config": {"config_groups": {"R1": {}}}}, "has transform_config"),
        ({**PLAIN_INT4, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24-bitmask"),
        ({**PLAIN_INT4, "format": "marlin-24"}, "format 'marlin-24'"),
        ({**PLAIN_INT4, "format": "float-quantized"}, "format 'float-quantized'"),
        (of_group(INT4_WEIGHTS, format="int-quantized"), "format 'int-quantized'"),
        (of_group({**INT4_WEIGHTS, "actorder": "group"}), "actorder 'group'"),
        (of_group({**INT4_WEIGHTS, "dynamic": True}), "dynamic True"),
        (of_group({**FP8_WEIGHTS, "symmetric": False}), "symmetric False"),
        (of_group({**FP8_WEIGHTS, "strategy": "block"}), "blocks of None"),
        (of_group(INT4_WEIGHTS, targets=["re:.*mlp.*"]), "the targets"),
        (of_group(FP8_WEIGHTS, output_activations={"num_bits": 8}), "has output_activations"),
        (of_group(FP8_WEIGHTS, input_activations="token"), "has input_activations"),
        ({"quant_method": "compressed-tensors", "config_groups": [{}]}, "the config_groups"),
        ({**PLAIN_INT4, "ignore": "lm_head"}, "the rules 'lm_head'"),
        ({"quant_method": ["fp8"]}, "quant_method"),
        ({"quant_method": "fp8", "scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
        ({"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "the rules 'lm_head'"),
        *(
            ({"quant_method": "fp8", "weight_block_size": block}, "blocks of")
            for block in ([128], ["a", "b"], 128, [0, 0], [128, -1], [True, 1], [])
        ),
    ],
)
def test_what_is_unknown_is_refused_by_name(told: object, named: str) -> None:
    with pytest.raises(UserError, match=named):
        Quantisation.read({"quantization_config": told})


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slime.engines.wire.quantised.importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'slime-rl\[quantised\]'"):
        quantise("m", torch.ones(2, 8), Int4(8))
    assert quantise("m", torch.ones(2, 8), Fp8())  # needs none
