"""`slime convert hf-to-int4`, `hf-to-fp8`, `quantised-to-hf`: every tensor, damage by name,
memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from slime.__main__ import main
from slime.checkpoints import quantised_files
from slime.checkpoints.hf_files import INDEX, SINGLE, HfReader
from slime.checkpoints.quantised_files import (
    dequantise_directory,
    plain_weights,
    quantise_directory,
)
from slime.engines.wire.quantised import dequantise, quantise
from slime.errors import UserError
from slime.models import FAMILIES, ModelFamily, family_of, read_hf_config
from slime.models.ignore_list import examine, recommended, refuse_untried
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.quantised_models import (
    INT4,
    make_plain,
    same_bits,
    tensors_of,
    verify,
    write_shards,
)

pytest.importorskip("compressed_tensors", reason="the quantised extra is not installed")

KINDS = {
    "int4": ("hf-to-int4", ("--group_size", 8)),
    "int4 asymmetric": ("hf-to-int4", ("--group_size", 8, "--asymmetric")),
    "fp8": ("hf-to-fp8", ()),
    "fp8 small blocks": ("hf-to-fp8", ("--block-size", 16, 8)),
    "fp8 per tensor": ("hf-to-fp8", ("--per-tensor",)),
}


def _is_refused(family: ModelFamily) -> bool:
    try:
        refuse_untried(family, "fp8")
    except UserError:
        return True
    return family.stacks_experts


QUANTISED = [one.name for one in FAMILIES if not _is_refused(one)]


def convert(*words: object) -> int:
    return main(["convert", *map(str, words)])


def families_and_kinds() -> list[Any]:
    """Each family in two formats that share nothing; `make test-full` has every pair."""
    soon = {
        (family, kind)
        for number, family in enumerate(QUANTISED)
        for kind in (list(KINDS)[number % 2], list(KINDS)[2 + number % 3])
    }
    return [
        pytest.param(family, kind, marks=[] if (family, kind) in soon else pytest.mark.full)
        for family in QUANTISED
        for kind in KINDS
    ]


@pytest.mark.parametrize(("family", "kind"), families_and_kinds())
def test_every_weight_is_converted_and_comes_back(family: str, kind: str, tmp_path: Path) -> None:
    plain = make_plain(tmp_path / "plain", family, shards=3)
    command, flags = KINDS[kind]
    small, back = tmp_path / "small", tmp_path / "back"
    assert convert(command, "--hf_model_path", plain, "--save_path", small, *flags) == 0
    assert convert("quantised-to-hf", "--hf-model-path", small, "--save-path", back) == 0
    quantisation = Quantisation.read(read_hf_config(small))
    assert quantisation is not None
    originals, stored, restored = tensors_of(plain), tensors_of(small), tensors_of(back)
    chosen = {one.weight for one in examine(plain_weights(plain)[1], quantisation).quantised}
    assert chosen and originals.keys() == restored.keys()
    expected: dict[str, torch.Tensor] = {}
    for name, tensor in originals.items():
        if name in chosen:
            parts = quantise(name.removesuffix(".weight"), tensor, quantisation.scheme)
        else:
            parts = {name: tensor}
        expected |= parts
        module = name.removesuffix(".weight")
        if name in chosen:
            wanted = dequantise(module, parts, quantisation.scheme, torch.bfloat16)
        else:
            wanted = tensor
        assert same_bits(restored[name], wanted), name
    assert stored.keys() == expected.keys() and all(
        same_bits(stored[name], expected[name]) for name in expected
    )
    assert sorted(file.name for file in plain.glob("*.safetensors")) == sorted(
        file.name for file in small.glob("*.safetensors")
    )
    assert json.loads((back / "config.json").read_text()) == json.loads(
        (plain / "config.json").read_text()
    )
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


@pytest.mark.parametrize("flags", [(), ("--asymmetric",)], ids=["symmetric", "asymmetric"])
def test_transformers_computes_with_the_same_weights(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    """The library's own way from the directory to a weight, by way of transformers. Its other way,
    which decompresses at the first forward pass, expects zero points that are not packed
    (transformers 5.23)."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    plain, small, back = (
        make_plain(tmp_path / "plain", "qwen3"),
        tmp_path / "small",
        tmp_path / "back",
    )
    convert("hf-to-int4", "--hf_model_path", plain, "--save_path", small, "--group_size", 8, *flags)
    convert("quantised-to-hf", "--hf_model_path", small, "--save_path", back)
    dequantised = (
        {} if not flags else {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    )
    told = []
    for directory, settings in ((small, dequantised), (back, {})):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **settings)
        with torch.no_grad():
            told.append(model(torch.arange(12).reshape(1, -1)).logits)
    assert torch.equal(*told) and told[0].std() > 0


@pytest.mark.parametrize("has_head", [False, True], ids=["", "with a head in the file"])
def test_the_output_layer_of_a_tied_model_is_ignored(
    has_head: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weight is the embedding's. The library takes it for a Linear layer all the same, and
    would look for its packed weight if no rule named it."""
    from transformers import AutoModelForCausalLM

    plain, small, back = (
        make_plain(tmp_path / "plain", "qwen3", tie_word_embeddings=True),
        tmp_path / "small",
        "back",
    )
    if has_head:
        tensors = tensors_of(plain)
        write_shards(
            plain, tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, 1
        )
    words = ("hf-to-int4", "--hf_model_path", plain, "--save_path", small, "--group_size", 8)
    assert convert(*words, "--ignore", "model.embed_tokens.weight") == 2
    assert "lm_head: the embedding takes its place, and no rule names it" in capsys.readouterr().err
    assert convert(*words) == 0
    assert "ignored: lm_head model.embed_tokens.weight" in capsys.readouterr().out
    assert ("lm_head.weight" in tensors_of(small)) == has_head
    assert convert("quantised-to-hf", "--hf_model_path", small, "--save_path", tmp_path / back) == 0
    told = []
    for directory in (small, tmp_path / back):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
        with torch.no_grad():
            told.append(model(torch.arange(12).reshape(1, -1)).logits)
    assert torch.equal(*told) and told[0].std() > 0
    assert convert("hf-to-fp8", "--hf_model_path", plain, "--save_path", small, "--force") == 0
    assert "lm_head" in read_hf_config(small)["quantization_config"]["modules_to_not_convert"]


def test_the_report_says_what_was_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = make_plain(tmp_path / "plain", "glm4_moe", shards=2, first_k_dense_replace=1)
    assert (
        convert(
            "hf-to-int4",
            "--hf_model_path",
            plain,
            "--save_path",
            tmp_path / "small",
            "--group_size",
            8,
        )
        == 0
    )
    said = capsys.readouterr().out
    # four experts of three weights, three parts each; attention, norms, router and shared experts
    # as they were
    assert "12 weights converted" in said and "layer 1, the first with experts, has" in said
    of_layer = [name for name in tensors_of(tmp_path / "small") if ".layers.1." in name]
    assert f"the first with experts, has {len(of_layer)}" in said and len(of_layer) > 36
    assert r"re:.*mlp\.gate\..*" in said and "eh_proj" not in said


def test_layers_for_multi_token_prediction_come_along(tmp_path: Path) -> None:
    plain = make_plain(tmp_path / "plain", "glm4_moe", num_nextn_predict_layers=1)
    tensors = tensors_of(plain)
    last = [name for name in tensors if ".layers.1." in name]
    layer = {name.replace("layers.1.", "layers.2."): tensors[name].clone() for name in last}
    extra = {
        name: torch.ones(32, 64).bfloat16()
        for name in ("eh_proj", "shared_head.head", "embed_tokens")
    }
    layer |= {f"model.layers.2.{name}.weight": value for name, value in extra.items()}
    write_shards(plain, tensors | layer, 1)
    small, back = tmp_path / "small", tmp_path / "back"
    rules = (
        "lm_head",
        r"re:.*embed_tokens\.weight",
        r"re:.*mlp\.gate\..*",
        r"re:.*eh_proj.*",
        r"re:.*head\.head",
    )
    words = ("--hf_model_path", plain, "--save_path", small, "--group_size", 8)
    with pytest.raises(
        UserError, match=r"model\.layers\.2\.embed_tokens\.weight(.|\n)*no Linear layer"
    ):
        _quantise(
            plain,
            small,
            Quantisation("compressed-tensors", Int4(8), ("model.embed_tokens", *rules[2:])),
        )
    assert convert("hf-to-int4", *words, "--ignore", *rules) == 0
    stored = tensors_of(small)
    assert (
        "model.layers.2.eh_proj.weight" in stored
        and "model.layers.2.mlp.experts.0.up_proj.weight_packed" in stored
    )
    assert convert("quantised-to-hf", "--hf_model_path", small, "--save_path", back) == 0
    assert tensors_of(back).keys() == tensors.keys() | layer.keys()


def _quantise(plain: Path, target: Path, quantisation: Quantisation) -> None:
    quantise_directory(plain, target, quantisation)


# -- what is refused -------------------------------------------------------------------------------


def test_a_wrong_and_a_right_ignore_list_of_experts(tmp_path: Path) -> None:
    plain = make_plain(tmp_path / "plain", "qwen3_moe")
    wrong = Quantisation("compressed-tensors", Int4(8), ("lm_head", "model.embed_tokens.weight"))
    with pytest.raises(UserError, match=r"model\.layers\.0\.mlp\.gate\.weight(.|\n)*end as zeros"):
        quantise_directory(plain, tmp_path / "small", wrong)
    assert not (tmp_path / "small").exists()
    right = Quantisation("compressed-tensors", Int4(8), recommended(plain_weights(plain)[1]))
    quantise_directory(plain, tmp_path / "small", right)
    stored = tensors_of(tmp_path / "small")
    assert same_bits(
        stored["model.layers.0.mlp.gate.weight"],
        tensors_of(plain)["model.layers.0.mlp.gate.weight"],
    )
    assert "model.layers.0.mlp.experts.3.down_proj.weight_packed" in stored
    # the same model under the wrong list, as another tool may have written it
    config = read_hf_config(tmp_path / "small")
    config["quantization_config"]["ignore"] = list(wrong.ignore)
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        UserError, match=r"neither ignored nor quantised: model\.layers\.0\.self_attn"
    ) as error:
        verify(tmp_path / "small")
    # the files have it plain: what refuses the list is a launch
    assert "mlp.gate" not in str(error.value)


def test_groups_that_do_not_fit_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    plain = make_plain(tmp_path / "plain", "llama", intermediate_size=36)
    with pytest.raises(
        UserError, match=r"mlp\.down_proj \(36 columns(.|\n)*neither ignored nor possible"
    ):
        quantise_directory(
            plain, tmp_path / "small", Quantisation("compressed-tensors", Int4(8), INT4.ignore[:2])
        )
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["plain"]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--ignore", "re:.*"), "nothing of"),
        (("--ignore", "re:("), "no regular expression"),
        (("--ignore", "re:.*q_proj", "model.embed_tokens"), "qkv_proj(.|\n)*one kernel"),
        (
            ("--ignore", "model.layers.0.mlp.down_proj.weight", "model.embed_tokens"),
            "without .weight",
        ),
        (("--num-layers", "4"), "does not know --num-layers"),
    ],
)
def test_rules_that_would_go_wrong_are_named(
    words: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import re

    plain = make_plain(tmp_path / "plain", "llama")
    path = ("--hf_model_path", plain, "--save_path", tmp_path / "small", "--group_size", 8)
    assert convert("hf-to-int4", *path, *words) == 2
    assert re.search(named, capsys.readouterr().err)


def test_a_rule_that_names_nothing_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = make_plain(tmp_path / "plain", "llama")
    rules = ("model.embed_tokens", "model.layers.1", r"re:.*gate_up_proj")
    quantise_directory(
        plain, tmp_path / "small", Quantisation("compressed-tensors", Int4(8), rules)
    )
    # layer 1 is no module with a weight, and layer 10 would be none of it; engines know
    # gate_up_proj
    assert (
        "'model.layers.1' of --ignore names nothing" in caplog.text and "gate_up" not in caplog.text
    )


def test_sources_and_targets_that_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, small = make_plain(tmp_path / "plain", "llama"), tmp_path / "small"
    words = ("hf-to-fp8", "--hf_model_path")
    assert convert(*words, plain, "--save_path", small) == 0
    assert (
        convert(*words, plain, "--save_path", small) == 2
        and f"{small} exists" in capsys.readouterr().err
    )
    assert convert(*words, plain, "--save_path", small, "--force") == 0
    assert convert(*words, small, "--save_path", tmp_path / "x") == 2
    assert "is quantised already" in capsys.readouterr().err
    assert convert("quantised-to-hf", "--hf_model_path", plain, "--save_path", tmp_path / "x") == 2
    assert "has plain weights already" in capsys.readouterr().err
    assert convert(*words, tmp_path / "nowhere", "--save_path", tmp_path / "x") == 2
    assert convert(*words, plain, "--save_path", plain, "--force") == 2
    assert "would be lost" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ("shard", r"1 of 3 shards are missing(.|\n)*model-00002-of-00003"),
        ("cut", r"model-00002-of-00003.safetensors is not a readable"),
        ("scale", r"1 missing: model.layers.1.mlp.down_proj.weight_scale"),
        ("plain", r"neither ignored nor quantised: model.layers.1.mlp.down_proj"),
        ("both", r"quantised although a rule ignores them: lm_head"),
        (
            "dtype",
            r"of another dtype or shape: model.layers.1.mlp.down_proj.weight_packed is int64",
        ),
        ("unknown", r"1 unknown: model.layers.9.mlp.down_proj.weight"),
    ],
)
def test_damage_is_named(damage: str, named: str, tmp_path: Path) -> None:
    plain, small = make_plain(tmp_path / "plain", "llama", shards=3), tmp_path / "small"
    quantise_directory(plain, small, INT4)
    tensors, last = tensors_of(small), "model.layers.1.mlp.down_proj."
    second = small / "model-00002-of-00003.safetensors"
    if damage == "shard":
        second.unlink()
    elif damage == "cut":
        second.write_bytes(second.read_bytes()[:-1])
    else:
        changes = {
            "scale": lambda: tensors.pop(f"{last}weight_scale"),
            "plain": lambda: (
                [tensors.pop(name) for name in list(tensors) if name.startswith(last)]
                and tensors.update({f"{last}weight": torch.ones(32, 48)})
            ),
            "both": lambda: tensors.update(
                {"lm_head.weight_packed": torch.ones(49, 4, dtype=torch.int32)}
            ),
            "dtype": lambda: tensors.update(
                {f"{last}weight_packed": tensors[f"{last}weight_packed"].long()}
            ),
            "unknown": lambda: tensors.update(
                {"model.layers.9.mlp.down_proj.weight": torch.ones(32, 48)}
            ),
        }
        changes[damage]()
        write_shards(small, tensors, 3)
    with pytest.raises(UserError, match=named):
        verify(small)
    with pytest.raises(UserError, match=named):
        dequantise_directory(small, tmp_path / "back")


def test_an_index_that_leads_out_of_its_directory_writes_nowhere_else(tmp_path: Path) -> None:
    """A conversion writes files under the names of the source's."""
    plain, other = (
        make_plain(tmp_path / "here" / "plain", "llama", shards=3),
        tmp_path / "there" / "other",
    )
    other.mkdir(parents=True)
    index = json.loads((plain / INDEX).read_text())
    first = "model-00001-of-00003.safetensors"
    (plain.parent / "other").mkdir()
    (plain / first).rename(plain.parent / "other" / first)
    moved = {
        name: f"../other/{file}" if file == first else file
        for name, file in index["weight_map"].items()
    }
    (plain / INDEX).write_text(json.dumps({"weight_map": moved}))
    with pytest.raises(
        UserError, match=r"index.json is damaged(.|\n)*'../other/model-00001-of-00003.safetensors'"
    ):
        quantise_directory(plain, tmp_path / "there" / "small", INT4)
    assert not list(other.iterdir())


@pytest.mark.parametrize(
    "index", ["[]", '"x"', '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": {"a": 3}}']
)
def test_an_index_of_another_shape_is_damaged(index: str, tmp_path: Path) -> None:
    plain = make_plain(tmp_path / "plain", "llama", shards=3)
    (plain / INDEX).write_text(index)
    with pytest.raises(UserError, match=r"index\.json is damaged|not a complete llama"):
        plain_weights(plain)


@pytest.mark.parametrize("scale_fmt", [None, "ue8m0"])
def test_scales_in_bfloat16_are_read(scale_fmt: str | None, tmp_path: Path) -> None:
    """And those of which config.json says that engines round them (DeepSeek-V3.1)."""
    plain, small = make_plain(tmp_path / "plain", "llama"), tmp_path / "small"
    quantise_directory(plain, small, Quantisation("fp8", Fp8((16, 16)), ("lm_head",)))
    config = json.loads((small / "config.json").read_text())
    if scale_fmt is not None:
        config["quantization_config"]["scale_fmt"] = scale_fmt
    (small / "config.json").write_text(json.dumps(config))
    tensors = tensors_of(small)
    rounded = {
        name: value.bfloat16() if "scale" in name else value for name, value in tensors.items()
    }
    write_shards(small, rounded, 1)
    dequantise_directory(small, tmp_path / "back")
    name = "model.layers.0.mlp.up_proj"
    wanted = dequantise(name, rounded, Fp8((16, 16)), torch.bfloat16)
    assert same_bits(tensors_of(tmp_path / "back")[f"{name}.weight"], wanted)


PUBLISHED = {
    "tensor": (Fp8((0, 0), "weight_scale"), {"strategy": "tensor"}),
    "row": (Fp8((1, 0), "weight_scale"), {"strategy": "channel"}),
    "blocks": (Fp8((16, 16), "weight_scale"), {"strategy": "block", "block_structure": [16, 16]}),
}


@pytest.mark.parametrize("kind", PUBLISHED)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_fp8_of_compressed_tensors_is_read_with_the_list_that_it_is_published_with(
    family: str, kind: str, tmp_path: Path
) -> None:
    """It names no embedding and no router: whoever made the files saw that these are no Linear
    layers."""
    small, back = make_plain(tmp_path / "small", family), tmp_path / "back"
    scheme, told = PUBLISHED[kind]
    originals = tensors_of(small)
    linears = {
        one.weight
        for one in examine(
            plain_weights(small)[1], Quantisation("fp8", scheme, ("lm_head",))
        ).quantised
    }
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in originals.items():
        stored |= (
            quantise(name.removesuffix(".weight"), tensor, scheme)
            if name in linears
            else {name: tensor}
        )
    write_shards(small, stored, 1)
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "float", "symmetric": True, **told},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": group},
    }
    whole = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(
        json.dumps(whole | {"quantization_config": config | {"ignore": ["lm_head"]}})
    )
    dequantise_directory(small, back)
    restored = tensors_of(back)
    assert restored.keys() == originals.keys()
    for name, tensor in restored.items():
        module = name.removesuffix(".weight")
        if name in linears:
            wanted = dequantise(module, stored, scheme, torch.bfloat16)
        else:
            wanted = originals[name]
        assert same_bits(tensor, wanted), name
    assert not same_bits(
        restored["model.layers.1.self_attn.q_proj.weight"],
        originals["model.layers.1.self_attn.q_proj.weight"],
    )


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf")])
def test_numbers_that_are_none_are_not_converted(wrong: float, tmp_path: Path) -> None:
    plain = make_plain(tmp_path / "plain", "llama")
    tensors = tensors_of(plain)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = wrong
    write_shards(plain, tensors, 1)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.up_proj\.weight of .* has NaN"):
        quantise_directory(
            plain, tmp_path / "small", Quantisation("fp8", Fp8((16, 16)), ("lm_head",))
        )
    assert not (tmp_path / "small").exists()


def test_scales_may_lie_in_another_shard(tmp_path: Path) -> None:
    plain, small, back = (
        make_plain(tmp_path / "plain", "llama"),
        tmp_path / "small",
        tmp_path / "back",
    )
    quantise_directory(plain, small, Quantisation("fp8", Fp8((16, 16)), ("lm_head",)))
    (small / SINGLE).rename(small / "whole")
    tensors = load_file(small / "whole")
    (small / "whole").unlink()
    ordered = dict(sorted(tensors.items(), key=lambda item: "scale" in item[0]))
    write_shards(small, ordered, 3)
    assert {"scale" in name for name in load_file(small / "model-00003-of-00003.safetensors")} == {
        True
    }
    dequantise_directory(small, back)
    files = {path.name for path in back.glob("*.safetensors")}
    assert files == {f"model-0000{n}-of-00003.safetensors" for n in (1, 2)}
    index = json.loads((back / INDEX).read_text())["weight_map"]
    assert index.keys() == tensors_of(plain).keys() and set(index.values()) == files


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_memory_holds_a_weight_not_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of this process that no file stands behind, looked at after each weight of a shard
    that becomes 50 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 36, "head_dim": 128}
    plain = make_plain(tmp_path / "plain", "llama", **sizes)
    seen: list[int] = []

    def watched(*arguments: object) -> object:
        result = quantise(*arguments)  # type: ignore[arg-type]
        seen.append(anonymous_bytes())
        return result

    monkeypatch.setattr(quantised_files, "quantise", watched)
    fp8 = Quantisation("fp8", Fp8((128, 128)), ("lm_head",))
    # what is imported stays, and what the allocator keeps for weights of these sizes
    warm = make_plain(tmp_path / "warm", "llama", **{**sizes, "num_hidden_layers": 2})
    quantise_directory(warm, tmp_path / "warm-small", fp8)
    seen.clear()
    before = anonymous_bytes()
    quantise_directory(plain, tmp_path / "small", fp8)
    assert (tmp_path / "small" / SINGLE).stat().st_size > 50e6
    assert len(seen) == 36 * 7 and max(seen) - before < 20e6


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def test_the_trainer_points_to_the_command(tmp_path: Path) -> None:
    plain, small = make_plain(tmp_path / "plain", "llama"), tmp_path / "small"
    quantise_directory(plain, small, INT4)
    family = family_of(small)
    with pytest.raises(UserError, match=r"quantised to (.|\n)*slime convert quantised-to-hf"):
        HfReader(small).verify(family, family.describe(small))
