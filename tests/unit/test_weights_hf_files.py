"""Hugging Face directories: everything that can be wrong with one is said by name; writing is all
or nothing."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime.checkpoints.hf_files import INDEX, HfReader, HfWriter
from slime.errors import UserError
from slime.models import family_of
from tests.support.hf_configs import config_of
from tests.support.megatron_stub import random_hf

CONFIG = config_of("llama", num_hidden_layers=4)
FAMILY = family_of(CONFIG)
SPEC = FAMILY.model_spec(CONFIG)
TENSORS = random_hf(FAMILY, SPEC)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model in four shards with an index, config and tokenizer."""
    root = tmp_path / "model"
    root.mkdir()
    (root / "config.json").write_text(json.dumps(CONFIG))
    (root / "tokenizer.json").write_text("{}")
    (root / "additional_chat_templates").mkdir()
    (root / "additional_chat_templates" / "tool_use.jinja").write_text("<tool_call></tool_call>")
    weight_map = {}
    names = list(TENSORS)
    for number in range(4):
        file = f"model-{number + 1:05d}-of-00004.safetensors"
        part = names[number * 10 : number * 10 + 10] if number < 3 else names[30:]
        save_file({name: TENSORS[name] for name in part}, root / file)
        weight_map.update(dict.fromkeys(part, file))
    (root / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return root


def test_a_complete_model(sharded: Path) -> None:
    reader = HfReader(sharded)
    assert reader.verify(FAMILY, SPEC) == [] and len(reader.file_names) == 4
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(reader[name][:, 3:5], TENSORS[name][:, 3:5])
    assert reader[name].shape == tuple(TENSORS[name].shape)


def test_missing_shards_are_named_with_their_layers(sharded: Path) -> None:
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(
        UserError, match=r"1 of 4 shards(.|\n)*model-00002-of-00004(.|\n)*layers 0-1"
    ):
        HfReader(sharded)


def test_a_truncated_shard(sharded: Path) -> None:
    shard = sharded / "model-00003-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(UserError, match=r"model-00003-of-00004\.safetensors is not a readable"):
        HfReader(sharded)
    shard.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match="LFS pointer"):
        HfReader(sharded)


def test_an_index_that_promises_too_much(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.layers.9.mlp.up_proj.weight"] = "model-00001-of-00004.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"lacks 1 tensors(.|\n)*layers\.9"):
        HfReader(sharded)
    (sharded / INDEX).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        HfReader(sharded)


def test_missing_layers_and_unknown_tensors(tmp_path: Path) -> None:
    there = {name: tensor for name, tensor in TENSORS.items() if ".layers.2." not in name}
    save_file(
        {**there, "model.layers.0.extra.weight": torch.zeros(1)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(UserError) as caught:
        HfReader(tmp_path).verify(FAMILY, SPEC)
    assert "9 tensors missing in layers 2 of 4" in str(caught.value)
    assert "1 tensor unknown" in str(caught.value) and "extra.weight" in str(caught.value)


@pytest.mark.parametrize("names_only", [True, False])
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"hidden_size": 2 * CONFIG["hidden_size"]}, "model.embed_tokens.weight is "),
        ({"intermediate_size": CONFIG["intermediate_size"] + 8}, "mlp.gate_proj.weight is "),
        ({"num_key_value_heads": CONFIG["num_attention_heads"]}, "self_attn.k_proj.weight is "),
    ],
)  # fmt: skip
def test_a_config_that_was_edited(
    sharded: Path, changed: dict[str, int], said: str, *, names_only: bool
) -> None:
    spec = FAMILY.model_spec({**CONFIG, **changed})
    with pytest.raises(UserError, match="not of the shape that config") as caught:
        HfReader(sharded, names_only=names_only).verify(FAMILY, spec)
    assert said in caught.value.why


def test_embeddings_may_have_other_rows_than_the_vocabulary(sharded: Path) -> None:
    spec = FAMILY.model_spec({**CONFIG, "vocab_size": CONFIG["vocab_size"] - 1})
    assert HfReader(sharded).verify(FAMILY, spec) == []


def test_what_a_family_does_not_use_is_counted(tmp_path: Path) -> None:
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)}
    save_file({**TENSORS, **extra}, tmp_path / "model.safetensors")
    assert HfReader(tmp_path).verify(FAMILY, SPEC) == list(extra)


@pytest.mark.parametrize(
    ("file", "text"),
    [("pytorch_model.bin", ".bin weights"), ("m.gguf", "gguf-to-hf"), ("readme.md", "readme.md")],
)
def test_other_kinds_of_weights(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text("x")
    with pytest.raises(UserError, match=text):
        HfReader(tmp_path)
    with pytest.raises(UserError, match="no directory"):
        HfReader(tmp_path / "nowhere")


@pytest.mark.parametrize("shard_bytes", [1 << 30, 6000])
def test_what_is_written_can_be_read(sharded: Path, tmp_path: Path, shard_bytes: int) -> None:
    target = tmp_path / "out"
    with HfWriter(target, sharded, shard_bytes) as writer:
        for name, tensor in TENSORS.items():
            writer.add(name, tensor.to(torch.bfloat16))
    reader = HfReader(target)
    reader.verify(FAMILY, SPEC)
    assert all(
        torch.equal(reader[name][:], tensor.to(torch.bfloat16)) for name, tensor in TENSORS.items()
    )
    assert (len(reader.file_names) > 1) == (shard_bytes == 6000)
    assert all(path.stat().st_size < 2 * 6000 for path in target.glob("model-*.safetensors"))
    assert json.loads((target / "config.json").read_text())["dtype"] == "bfloat16"
    assert (target / "additional_chat_templates" / "tool_use.jinja").exists()
    assert (target / "tokenizer.json").exists() and not list(tmp_path.glob(".*"))


def test_the_original_is_never_written_to(sharded: Path) -> None:
    with pytest.raises(UserError, match="--hf-checkpoint itself"):
        HfWriter(sharded / "." / "", sharded)


def test_what_is_no_export_is_never_replaced(sharded: Path, tmp_path: Path) -> None:
    """A directory of checkpoints, of models, of a user's own things, or a file; nothing in them may
    be lost."""
    for name, inside in (
        ("ckpt", "iter_0000003/common.pt"),
        ("notes", "todo.txt"),
        ("models", "a/model.safetensors"),
    ):
        kept = tmp_path / name / inside
        kept.parent.mkdir(parents=True)
        kept.write_text("precious")
        with pytest.raises(UserError, match=f"{name} holds something else than an earlier export"):
            HfWriter(tmp_path / name, sharded)
        assert kept.read_text() == "precious"
    with pytest.raises(UserError, match=r"todo\.txt holds something else(.|\n)*there is: a file"):
        HfWriter(tmp_path / "notes" / "todo.txt", sharded)
    with pytest.raises(UserError, match="holds --hf-checkpoint"):
        HfWriter(sharded.parent, sharded)


def test_an_existing_export_is_replaced_as_a_whole(sharded: Path, tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        with HfWriter(tmp_path / "out", sharded) as writer:
            writer.add("w", torch.full((2,), value))
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [2.0, 2.0]


# the last shard meets it, or the first of several
@pytest.mark.parametrize("shard_bytes", [1 << 30, 8])
def test_a_full_disk_leaves_the_old_export(
    sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int
) -> None:
    with HfWriter(tmp_path / "out", sharded) as writer:
        writer.add("w", torch.ones(2))

    def full(*args: object, **kwargs: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("slime.checkpoints.safetensors_stream.write_stream", full)
    with (
        pytest.raises(UserError, match="No space left"),
        HfWriter(tmp_path / "out", sharded, shard_bytes) as writer,
    ):
        writer.add("w", torch.zeros(2))
        writer.add("x", torch.zeros(2))
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].tolist() == [1.0, 1.0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out"]


def test_an_error_of_the_caller_leaves_nothing(sharded: Path, tmp_path: Path) -> None:
    with pytest.raises(KeyError), HfWriter(tmp_path / "out", sharded) as writer:
        writer.add("w", torch.ones(2))
        raise KeyError("w2")
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".*"))


# -- what would load and be another model ----------------------------------------------------------


def save_whole(root: Path, tensors: dict[str, torch.Tensor]) -> Path:
    root.mkdir(exist_ok=True)
    save_file(tensors, root / "model.safetensors")
    return root


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
def test_weights_of_another_type_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    name = "model.layers.1.mlp.down_proj.weight"
    root = save_whole(tmp_path / "m", {**TENSORS, name: TENSORS[name].to(dtype)})
    with pytest.raises(UserError, match=f"{name} is of the type "):
        HfReader(root).verify(FAMILY, SPEC)


def test_an_output_layer_beside_tied_weights_must_be_the_embedding(tmp_path: Path) -> None:
    tied = CONFIG | {"tie_word_embeddings": True}
    spec = FAMILY.model_spec(tied)
    same = {**TENSORS, "lm_head.weight": TENSORS["model.embed_tokens.weight"].clone()}
    assert HfReader(save_whole(tmp_path / "same", same)).verify(FAMILY, spec) == ["lm_head.weight"]
    with pytest.raises(UserError, match="differs from the embedding"):
        HfReader(save_whole(tmp_path / "m", TENSORS)).verify(FAMILY, spec)


def test_of_two_tensors_of_one_name_the_index_decides(sharded: Path) -> None:
    weight_map = json.loads((sharded / INDEX).read_text())["weight_map"]
    name = next(name for name, file in weight_map.items() if "00001" in file)
    last = sharded / "model-00004-of-00004.safetensors"
    save_file({**load_file(last), name: TENSORS[name] + 1}, last)
    assert torch.equal(HfReader(sharded)[name][:], TENSORS[name])


def test_weights_beside_an_index_of_others_are_refused(sharded: Path) -> None:
    save_whole(sharded, TENSORS)
    with pytest.raises(UserError, match="has weights twice"):
        HfReader(sharded)


@pytest.mark.parametrize("prefix", ["model.", "module.", "base_model.model.", "_orig_mod."])
def test_names_behind_a_wrapper_say_so(tmp_path: Path, prefix: str) -> None:
    root = save_whole(tmp_path / "m", {prefix + name: t for name, t in TENSORS.items()})
    with pytest.raises(UserError, match=f"all names begin with '{prefix}'"):
        HfReader(root).verify(FAMILY, SPEC)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("null", "not an object"),
        ("[]", "not an object"),
        ('{"tie_word_embeddings": "false"}', "is the text 'false'"),
        (json.dumps(CONFIG | {"rms_norm_eps": None}), "a value of the wrong type"),
        (json.dumps(CONFIG | {"max_position_embeddings": "x"}), "a value of the wrong type"),
        (json.dumps(CONFIG | {"rope_scaling": "x"}), "a value of the wrong type"),
    ],
)
def test_a_config_of_odd_values_is_no_traceback(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=said):
        FAMILY.model_spec(tmp_path)
