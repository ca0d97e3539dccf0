"""Write a Hugging Face directory as a GGUF file for llama.cpp, Ollama and LM Studio.

    >>> hf_to_gguf("outputs/sums/model", "sums.gguf")          # 135M parameters in bfloat16: 270 MB

Tensors are copied one at a time and bit for bit (norms in float32, which llama.cpp needs), so
`gguf_to_hf` restores the model. Names come from the ``gguf`` package, shapes and settings from the
model family's table.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.checkpoints.hf_files import HfReader
from slime.errors import UserError
from slime.files import replacing
from slime.models import ModelSpec, family_of, read_hf_config
from slime.models.parameters import ModelParameters
from slime.prompts.tokenizer import load_tokenizer

if TYPE_CHECKING:
    import torch
    from gguf import GGUFWriter

#: Model family → llama.cpp's name of the architecture.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
#: Architectures in which llama.cpp rotates neighbouring dimensions, so rows of queries and keys are
#: reordered.
_INTERLEAVED = ("llama",)
#: slime's own entry: the rotary scaling of config.json. llama.cpp reads factors computed from it.
ROPE_PARAMETERS = "slime.rope_parameters"
#: dtype of most weights → file type in `gguf.LlamaFileType`.
_FILE_TYPES = {"float32": "ALL_F32", "float16": "MOSTLY_F16", "bfloat16": "MOSTLY_BF16"}
QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| "
    r"?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?"
    r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| "
    r"?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|"
    r"\s+(?!\S)|\s+"
)
#: Patterns by which a tokenizer splits text into words → llama.cpp's name of the pre-tokenizer. ()
#: is ByteLevel's own pattern.
_PRE_TOKENIZERS = {
    (): "gpt-2",
    (QWEN_WORDS % "",): "qwen2",
    (QWEN_WORDS % "{1,3}",): "llama-bpe",
    (TEKKEN_WORDS,): "tekken",
    ("digits",): "smollm",
}


def hf_to_gguf(
    directory: str | os.PathLike[str],
    path: str | os.PathLike[str],
    dtype: str | None = None,
    pre_tokenizer: str | None = None,
    name: str | None = None,
) -> Path:
    """Write the model and tokenizer of ``directory`` to the file ``path``, which appears only when
    complete.

    Args:
        dtype: "bfloat16", "float16" or "float32" for matrices; None keeps the dtype of each.
        pre_tokenizer: llama.cpp's name of the pre-tokenizer, for tokenizers unknown to slime.
        name: display name of the model; default: the directory's name.
    Raises:
        UserError: the family, rotary scaling or tokenizer is not supported; the weights are
            incomplete; the package gguf is missing.
    """
    source = Path(directory)
    target = Path(path)
    require_gguf("writing")
    config = read_hf_config(source)
    family = family_of(source)
    spec = family.model_spec(config)
    check_writable(source, spec)
    vocabulary = _Vocabulary.read(source, spec.vocab_size, pre_tokenizer)
    reader = HfReader(source)
    ignored = set(reader.verify(family, spec))
    names = [name for name in ModelParameters(family, spec).stored if name not in ignored]
    tensors = list(_tensors(reader, names, spec, dtype))
    with gguf_writer(target, spec) as writer:
        _add_facts(writer, spec, name or source.resolve().name, tensors)
        vocabulary.add_to(writer, source)
        write_tensors(writer, tensors)
    return target


def require_gguf(doing: str) -> None:
    """Check that the package gguf is installed; ``doing`` is "reading" or "writing".

    Raises:
        UserError: the package is missing.
    """
    if importlib.util.find_spec("gguf") is None:
        raise UserError(
            f"{doing} a GGUF file needs the package gguf", fix="pip install 'slime-rl[gguf]'"
        )


@contextmanager
def gguf_writer(target: Path, spec: ModelSpec) -> Iterator[GGUFWriter]:
    """Yield the writer of a file, which appears at the end of the block.

    Raises:
        UserError: the file cannot be written, or is there and no GGUF file.
    """
    from gguf import GGUFWriter

    head = b""
    if target.is_file():
        with target.open("rb") as file:
            head = file.read(4)
    if head not in (b"", b"GGUF"):
        raise UserError(
            f"{target} is there, and is no GGUF file",
            why="only an earlier GGUF file is replaced",
            fix="pass another name",
        )
    try:
        with replacing(target) as unfinished:
            yield GGUFWriter(unfinished, ARCHITECTURES[spec.family])
    except OSError as error:
        raise UserError(f"cannot write {target}", why=error.strerror or str(error)) from error


def check_writable(source: str | os.PathLike[str], spec: ModelSpec) -> None:
    """Check by its config.json that llama.cpp can compute a model, before any weight is read.

    Raises:
        UserError: llama.cpp does not support the family, or something that config.json sets.
    """
    if spec.family not in ARCHITECTURES:
        raise UserError(
            f"{source} is of the family {spec.family}, which is not written as GGUF",
            why=f"these are: {', '.join(ARCHITECTURES)}",
            fix="serve it with `slime serve`, or convert it with llama.cpp's own "
            "convert_hf_to_gguf.py",
        )
    layers = range(spec.num_layers) if spec.num_experts else ()
    dense = [layer for layer in layers if not spec.is_moe_layer(layer)]
    kind = (spec.rotary_scaling or {}).get("rope_type")
    for holds, what in (
        (bool(dense), f"dense layers ({', '.join(map(str, dense[:5]))}) among those with experts"),
        (
            bool(spec.num_experts) and not spec.normalised_scores,
            "a router that does not normalise (norm_topk_prob)",
        ),
        (spec.output_bias or spec.mlp_bias, "biases beside those of query, key and value"),
        (kind == "yarn" and "mscale" in (spec.rotary_scaling or {}), "yarn scaling with mscale"),
        (kind == "longrope", "longrope scaling"),
        (spec.activation != "silu", f"the activation {spec.activation}"),
        (spec.transformer.get("window_size") is not None, "layers that see a window"),
    ):
        if holds:
            raise UserError(
                f"{source} has {what}",
                why=f"llama.cpp's {ARCHITECTURES[spec.family]} does not support this",
            )


# -- facts -----------------------------------------------------------------------------------------


def _add_facts(writer: GGUFWriter, spec: ModelSpec, name: str, tensors: list[GgufTensor]) -> None:
    from gguf import LlamaFileType, RopeScalingType

    facts = spec.transformer
    writer.add_type("model")
    # transformers expects another layout if the model's name is exactly "mistral"
    writer.add_name("Mistral" if name == "mistral" else name)
    largest = max(tensors, key=lambda tensor: tensor.num_elements)
    writer.add_file_type(LlamaFileType[_FILE_TYPES[largest.dtype]])
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(int(facts["ffn_hidden_size"]))
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_query_groups)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(float(facts["layernorm_epsilon"]))
    writer.add_vocab_size(spec.vocab_size)
    writer.add_rope_freq_base(spec.rotary_base)
    writer.add_rope_dimension_count(spec.rotary_dim)
    if spec.num_experts:
        writer.add_expert_count(spec.num_experts)
        writer.add_expert_used_count(int(facts["moe_router_topk"]))
        writer.add_expert_feed_forward_length(int(facts["moe_ffn_hidden_size"]))
    scaling = spec.rotary_scaling
    if scaling is None:
        return
    writer.add_string(ROPE_PARAMETERS, json.dumps({"rope_theta": spec.rotary_base, **scaling}))
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
    elif scaling["rope_type"] == "yarn":
        trained = scaling.get("original_max_position_embeddings") or spec.max_position_embeddings
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(float(scaling["factor"]))
        writer.add_rope_scaling_orig_ctx_len(int(trained))


# -- tensors ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a GGUF file; ``read`` returns its values when they are written."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    read: Callable[[], torch.Tensor]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)


def gguf_names(names: list[str], spec: ModelSpec) -> dict[str, list[str]]:
    """Group names of tensors by llama.cpp's name for them; experts of a layer share one."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(
        arch for arch, name in MODEL_ARCH_NAMES.items() if name == ARCHITECTURES[spec.family]
    )
    name_map = get_tensor_name_map(architecture, spec.num_layers)
    sources: dict[str, list[str]] = {}
    for name in names:
        ours = name_map.get_name(
            re.sub(r"\.experts\.\d+\.", ".experts.", name), (".weight", ".bias")
        )
        assert ours is not None, f"{name} has no name in GGUF"
        sources.setdefault(ours, []).append(name)
    return sources


def _tensors(
    reader: HfReader, names: list[str], spec: ModelSpec, dtype: str | None
) -> Iterator[GgufTensor]:
    """Yield the tensors under llama.cpp's names: the experts of a layer are one tensor, and llama3
    rotary scaling is a tensor of factors."""
    sources = gguf_names(names, spec)
    if (spec.rotary_scaling or {}).get("rope_type") == "llama3":
        factors = _rope_factors(spec)
        yield GgufTensor("rope_freqs.weight", tuple(factors.shape), "float32", lambda: factors)
    for ours, theirs in sources.items():
        piece = reader[theirs[0]]
        own = str(piece[:1].dtype).removeprefix("torch.")
        stacked = (len(theirs),) if ".experts." in theirs[0] else ()
        # llama.cpp adds and scales with these in float32
        is_wide = len(piece.shape) == 1 or ours.endswith("ffn_gate_inp.weight")
        chosen = "float32" if is_wide else dtype or own
        read = functools.partial(_read, reader, theirs, spec, bool(stacked))
        yield GgufTensor(ours, (*stacked, *piece.shape), chosen, read)


def _read(reader: HfReader, names: list[str], spec: ModelSpec, stacked: bool) -> torch.Tensor:
    import torch

    pieces = [in_gguf_order(reader[name][:], name, spec) for name in names]
    return torch.stack(pieces) if stacked else pieces[0]


def in_gguf_order(tensor: torch.Tensor, name: str, spec: ModelSpec) -> torch.Tensor:
    """Reorder rows of queries and keys so that rotated pairs are neighbours, if llama.cpp's
    architecture needs that: rows 0, 1, 2, 3 of a head of size 4 become 0, 2, 1, 3."""
    heads = {"q_proj": spec.num_heads, "k_proj": spec.num_query_groups}.get(name.split(".")[-2])
    if heads is None or ARCHITECTURES[spec.family] not in _INTERLEAVED:
        return tensor
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _rope_factors(spec: ModelSpec) -> torch.Tensor:
    """Return the factors by which llama.cpp divides the plain frequencies."""
    from slime.models.rotary import inverse_frequencies

    plain, _ = inverse_frequencies(
        spec.rotary_dim, spec.rotary_base, None, spec.max_position_embeddings
    )
    scaled, _ = inverse_frequencies(
        spec.rotary_dim, spec.rotary_base, spec.rotary_scaling, spec.max_position_embeddings
    )
    return plain / scaled


def write_tensors(writer: GGUFWriter, tensors: list[GgufTensor]) -> None:
    """Write all names and sizes, then the values of one tensor at a time."""
    import numpy as np
    import torch
    from gguf import GGMLQuantizationType as Kind

    kinds = {"float32": (Kind.F32, 4), "float16": (Kind.F16, 2), "bfloat16": (Kind.BF16, 2)}
    for tensor in tensors:
        kind, size = kinds[tensor.dtype]
        nbytes = tensor.num_elements * size
        writer.add_tensor_info(
            tensor.name, tensor.shape, np.dtype(np.float32), nbytes, raw_dtype=kind
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        values = tensor.read().to(getattr(torch, tensor.dtype)).contiguous()
        bits = values.view(torch.uint16) if tensor.dtype == "bfloat16" else values
        writer.write_tensor_data(bits.numpy())
    writer.close()


# -- tokenizer -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Vocabulary:
    """The tokenizer as llama.cpp describes it.

    Attributes:
        model: "gpt2" (bytes, merged by rank) or "llama" (SentencePiece, merged by score).
        pre: name of the pre-tokenizer.
        texts, kinds: text and type of each token, by id.
        scores: score of each token in SentencePiece; None with "gpt2".
    """

    model: str
    pre: str
    texts: list[str]
    kinds: list[int]
    scores: list[float] | None

    @staticmethod
    def read(directory: Path, size: int, pre: str | None) -> _Vocabulary:
        """Read the tokenizer as transformers loads it, which may change what is in tokenizer.json.

        Raises:
            UserError: there is no tokenizer, or its type is not supported.
        """
        from gguf import TokenType
        from transformers import PreTrainedTokenizerFast

        tokenizer = load_tokenizer(str(directory))
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise UserError(
                f"the tokenizer of {directory} is not a fast tokenizer",
                fix="save it as tokenizer.json once, with the package tokenizers",
            )
        data = json.loads(tokenizer.backend_tokenizer.to_str())
        model = data.get("model") or {}
        added = {token["id"]: token for token in data.get("added_tokens") or ()}
        if model.get("type") != "BPE":
            raise UserError(
                f"the tokenizer of {directory} is of the type {model.get('type')}",
                why="only BPE can be written",
                fix="take a model with a BPE tokenizer, as published ones have; the demo's has "
                "words",
            )
        beyond = max([*model["vocab"].values(), *added], default=0)
        if beyond >= size:
            raise UserError(
                f"the tokenizer of {directory} has the token {beyond}",
                why=f"the model has {size} rows (vocab_size)",
            )
        by_id = {number: text for text, number in model["vocab"].items()}
        is_pieces = bool(model.get("byte_fallback"))
        texts = []
        kinds: list[int] = []
        for number in range(size):
            if number in added:
                text = added[number]["content"]
                kind = TokenType.CONTROL if added[number]["special"] else TokenType.USER_DEFINED
            elif number in by_id:
                text = by_id[number]
                kind = TokenType.NORMAL
            else:
                text = f"[PAD{number}]"
                kind = TokenType.UNUSED
            if is_pieces and re.fullmatch(r"<0x[0-9A-F]{2}>", text):
                kind = TokenType.BYTE
            elif is_pieces and text == model.get("unk_token"):
                kind = TokenType.UNKNOWN
            texts.append(text)
            kinds.append(int(kind))
        if is_pieces:
            return _Vocabulary("llama", "default", texts, kinds, _scores(model, texts))
        return _Vocabulary("gpt2", pre or _pre_tokenizer(directory, data), texts, kinds, None)

    def add_to(self, writer: GGUFWriter, directory: Path) -> None:
        from gguf import SpecialVocab

        writer.add_tokenizer_model(self.model)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.texts)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        writer.add_token_types(self.kinds)
        special = SpecialVocab(directory, load_merges=self.scores is None, n_vocab=len(self.texts))
        # without a value llama.cpp uses another default
        special.add_special_token.setdefault("bos", False)
        special.add_to_gguf(writer, quiet=True)


def _scores(model: dict[str, Any], texts: list[str]) -> list[float]:
    """Return scores for SentencePiece, of which only the order matters: tokens that are merged
    earlier have higher scores. If several merges make a token, the first one counts.
    """
    ranks: dict[str, int] = {}
    for rank, merge in enumerate(model["merges"]):
        first, second = merge if isinstance(merge, list) else merge.split(" ")
        ranks.setdefault(first + second, rank)
    return [-float(ranks.get(text, len(ranks) + number)) for number, text in enumerate(texts)]


def _pre_tokenizer(directory: Path, data: dict[str, Any]) -> str:
    """Return llama.cpp's name of the tokenizer's pre-tokenizer.

    Raises:
        UserError: the pre-tokenizer is unknown.
    """
    outer = data.get("pre_tokenizer") or {}
    parts = outer.get("pretokenizers", [outer])
    patterns: list[str] = []
    for part in parts:
        if part.get("type") == "Split":
            patterns.append(str((part.get("pattern") or {}).get("Regex")))
        elif part.get("type") == "Digits" and part.get("individual_digits"):
            patterns.append("digits")
        elif part.get("type") != "ByteLevel":
            patterns.append(str(part.get("type")))
    found = _PRE_TOKENIZERS.get(tuple(patterns))
    if found is None:
        raise UserError(
            f"the pre-tokenizer of {directory} is unknown",
            why=f"its pre_tokenizer: {json.dumps(outer, ensure_ascii=False)[:300]}",
            fix="pass --pre-tokenizer with llama.cpp's name for it (for example "
            f"{', '.join(_PRE_TOKENIZERS.values())})",
        )
    return found
