"""`slime export --gguf`: the same model and tokenizer, read back and, where llama.cpp is there,
computed by it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.bpe_tokenizers import TEXT
from slime.checkpoints.gguf import gguf_to_hf
from slime.checkpoints.gguf_export import QWEN_WORDS, TEKKEN_WORDS, hf_to_gguf
from slime.cli import export
from slime.errors import UserError
from tests.support.bpe_tokenizers import save_model_with_words
from tests.support.embedded_models import save_tiny_model

pytest.importorskip("gguf", reason="the package gguf is not installed")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
#: (shape, how text is cut into words, changes of config.json)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, tied": ("llama", "smollm", {}),
    "llama, GPT-2's words": ("llama", "gpt-2", {"tie_word_embeddings": False}),
    "llama, llama3 rope": ("llama", "llama-bpe", {"rope_parameters": LLAMA3}),
    "mistral": ("mistral", "tekken", {}),
    "qwen2, linear rope": ("qwen2", "qwen2", {"rope_parameters": LINEAR}),
    "qwen3": ("qwen3", "qwen2", {}),
    "qwen3, yarn rope": ("qwen3", "qwen2", {"rope_parameters": YARN}),
    "qwen3_moe": ("qwen3_moe", "qwen2", {"mlp_only_layers": []}),
}
#: What the file does not say of a model: how it was made.
UNSAID = {
    "initializer_range", "_model_name_or_path", "pretraining_tp", "attention_bias", "mlp_bias",
    "head_dim"
}  # fmt: skip


@pytest.fixture(scope="module", params=MODELS)
def exported(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """(Hugging Face directory, the GGUF file made of it)"""
    shape, pre, changes = MODELS[request.param]
    root = tmp_path_factory.mktemp("gguf")
    directory = save_model_with_words(root / "model", shape, pre, **changes)
    return directory, hf_to_gguf(directory, root / "model.gguf")


def test_there_and_back_gives_the_same_bits(exported: tuple[Path, Path], tmp_path: Path) -> None:
    directory, file = exported
    back = gguf_to_hf(file, tmp_path / "back", "float32")
    ours, theirs = load_file(directory / "model.safetensors"), load_file(back / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (directory, back)
    )
    if before["model_type"] == "mistral":  # which llama.cpp computes as Llama
        before |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    differing = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    assert differing <= UNSAID
    one, other = AutoTokenizer.from_pretrained(directory), AutoTokenizer.from_pretrained(back)
    assert one.encode(TEXT) == other.encode(TEXT) and one.chat_template == other.chat_template
    marks = "<|im_start|>user\n<think>hm<|im_end|>"
    assert one.encode(marks) == other.encode(marks) and len(one.encode(marks)) < len(marks) / 2


def test_ggufs_own_reader_finds_what_llama_cpp_needs(exported: tuple[Path, Path]) -> None:
    from gguf import GGUFReader, TokenType

    directory, file = exported
    config, reader = json.loads((directory / "config.json").read_text()), GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields["general.architecture"]
    assert fields[f"{architecture}.block_count"] == config["num_hidden_layers"]
    assert fields[f"{architecture}.attention.head_count_kv"] == config["num_key_value_heads"]
    assert fields[f"{architecture}.rope.freq_base"] == config["rope_parameters"]["rope_theta"]
    texts, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    assert len(texts) == len(kinds) == config["vocab_size"]
    kind_of = dict(zip(texts, kinds))
    assert (
        kind_of["<|im_end|>"] == TokenType.CONTROL and kind_of["<think>"] == TokenType.USER_DEFINED
    )
    assert (
        texts[fields["tokenizer.ggml.eos_token_id"]] == "<|im_end|>"
        and kinds[-1] == TokenType.UNUSED
    )
    assert "<|im_start|>" in fields["tokenizer.chat_template"]
    assert {tensor.name for tensor in reader.tensors} >= {
        "token_embd.weight",
        "blk.1.attn_q.weight",
    }


def _llama_python() -> str:
    """An interpreter that has xllamacpp: this one, or that of SLIME_LLAMA_PYTHON."""
    return os.environ.get("SLIME_LLAMA_PYTHON") or (
        sys.executable if importlib.util.find_spec("xllamacpp") else ""
    )


@pytest.mark.skipif(
    not _llama_python(),
    reason="llama.cpp is not here: pip install xllamacpp, or SLIME_LLAMA_PYTHON=…/python of an "
    "environment with it",
)
def test_llama_cpp_samples_the_tokens_that_transformers_would(exported: tuple[Path, Path]) -> None:
    check_with_llama_cpp(
        *exported, "<|im_start|>user\nThe reward, isn't it?  12345<|im_end|>\n", "naïve 日本 \n\n x"
    )


@pytest.mark.skipif(not _llama_python(), reason="llama.cpp is not here, as above")
def test_llama_cpp_with_pieces(tmp_path: Path) -> None:
    directory = save_model_with_words(tmp_path / "model", "mistral", "pieces")
    file = hf_to_gguf(directory, tmp_path / "model.gguf")
    check_with_llama_cpp(directory, file, "The reward, isn't it?  123\n", "naïve ß")


def check_with_llama_cpp(directory: Path, file: Path, *texts: str) -> None:
    """Text in, greedy tokens out: tokenizer, weights, order of rows and positions are all in it.
    Every token is the likeliest by transformers, too; its log-prob may be less by what rounding
    does."""
    prompts = [*texts, TEXT[100:170]]
    script = Path(__file__).parents[1] / "support" / "llama_cpp_generate.py"
    command = [_llama_python(), str(script), str(file), json.dumps(prompts), "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    for prompt, (num_prompt, tokens) in zip(
        prompts, json.loads(done.stdout.splitlines()[-1]), strict=True
    ):
        ids = tokenizer(prompt).input_ids
        assert num_prompt == len(ids) and len(tokens) == 24
        with torch.no_grad():
            log_probs = torch.log_softmax(
                model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1], -1
            )
        log_probs[:, tokenizer.eos_token_id] = -torch.inf  # it was told not to end
        chosen = log_probs.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        assert (log_probs.max(1).values - chosen).max() < 0.02


def test_dtype_of_the_matrices_is_a_choice_and_norms_stay_float32(tmp_path: Path) -> None:
    from gguf import GGUFReader

    directory = save_model_with_words(tmp_path / "model", "qwen2")
    reader = GGUFReader(hf_to_gguf(directory, tmp_path / "half.gguf", dtype="float16"))
    kinds = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert (
        kinds["blk.0.ffn_up.weight"] == "F16"
        and kinds["output_norm.weight"] == kinds["blk.0.attn_q.bias"] == "F32"
    )
    assert reader.fields["general.file_type"].contents() == 1


def test_word_patterns_are_those_of_transformers() -> None:
    theirs = pytest.importorskip(
        "transformers.integrations.gguf.gguf_tokenizer_mapping"
    ).GGUF_PRE_TOKENIZER_SPLITS
    assert theirs["llama-bpe"] == QWEN_WORDS % "{1,3}" and theirs["tekken"] == TEKKEN_WORDS


def test_sentencepiece_by_scores(tmp_path: Path) -> None:
    """Tokens that are merged earlier have the higher score; bytes, the unknown and unused ones are
    marked."""
    from gguf import GGUFReader, TokenType
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    directory = save_tiny_model(tmp_path / "model", "llama", eos_token_id=1, pad_token_id=1)
    pieces = [
        "<unk>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "▁ab",
        "ab",
    ]
    vocabulary = {text: number for number, text in enumerate(pieces)}
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("▁", "ab")]
    backend = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    backend.add_special_tokens(["<unk>", "</s>"])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(directory)
    fields = GGUFReader(hf_to_gguf(directory, tmp_path / "model.gguf")).fields
    texts, kinds, scores = (
        fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type", "scores")
    )
    assert fields["tokenizer.ggml.model"].contents() == "llama" and texts[: len(pieces)] == pieces
    by_text = dict(zip(texts, scores))
    assert by_text["▁a"] > by_text["ab"] > by_text["▁ab"] > by_text["b"]
    assert [kinds[0], kinds[5], kinds[-1]] == [TokenType.UNKNOWN, TokenType.BYTE, TokenType.UNUSED]


@pytest.mark.parametrize(
    ("shape", "changes", "said"),
    [
        ("glm4", {}, "is of the family glm4, which is not written as GGUF"),
        ("deepseek_v3", {}, "is of the family deepseek_v3"),
        ("qwen3_moe", {}, r"has dense layers \(0\) among those with experts"),
        (
            "qwen3_moe",
            {"mlp_only_layers": [], "norm_topk_prob": False},
            "has a router that does not normalise",
        ),
        ("llama_scaled", {}, "has biases beside those of query, key and value"),
    ],
)
def test_what_llama_cpp_does_not_compute_is_refused_by_name(
    shape: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directory = save_model_with_words(tmp_path / "model", shape, **changes)
    with pytest.raises(UserError, match=said):
        hf_to_gguf(directory, tmp_path / "model.gguf")
    assert not (tmp_path / "model.gguf").exists()


def test_an_unknown_way_of_cutting_words_is_refused_and_can_be_named(tmp_path: Path) -> None:
    directory = save_model_with_words(tmp_path / "model", "llama", "qwen2")
    file = directory / "tokenizer.json"
    file.write_text(file.read_text().replace("?i:'s|", "?i:'x|"))
    with pytest.raises(UserError, match=r"--pre-tokenizer with llama.cpp's name"):
        hf_to_gguf(directory, tmp_path / "model.gguf")
    assert hf_to_gguf(directory, tmp_path / "model.gguf", pre_tokenizer="qwen2").is_file()


def twice() -> bytes:
    """A file whose two fields have one key."""
    field = b"\x01\0\0\0\0\0\0\0k" + b"\x04\0\0\0" + b"\x07\0\0\0"
    return b"GGUF" + b"\x03\0\0\0" + b"\0" * 8 + b"\x02" + b"\0" * 7 + 2 * field


@pytest.mark.parametrize("content", [b"", b"GGUF\x03\0\0\0", b"no model", twice()])
def test_what_is_no_gguf_file_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not a GGUF file, or it is damaged"):
        gguf_to_hf(file, tmp_path / "out")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "out", "--dtype", "float16"], "--dtype has an effect only on --gguf"),
        (["--to", "out", "--pre-tokenizer", "gpt-2"], "--pre-tokenizer has an effect only on"),
        (["--gguf", "out.gguf", "--experts", "peft-3d"], "--experts has an effect only on --to"),
    ],
)
def test_flags_without_effect_are_refused(
    exported: tuple[Path, Path], words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        export.main([str(exported[0]), *words])
