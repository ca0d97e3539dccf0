"""PEFT finds a place for every tensor of our adapters, in every family."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file

from slime.checkpoints.peft_files import rewrite_adapter
from slime.models import family_of
from tests.support.peft_directories import random_adapter
from tests.support.tiny_models import OTHER_FAMILIES, WITH_IMAGES, save_tiny

#: Variants that differ in no name of a module are left out.
KINDS = ["llama", *(kind for kind in OTHER_FAMILIES if "," not in kind), *WITH_IMAGES]


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_files_are_those_of_modules(kind: str, tmp_path: Path) -> None:
    """Experts aside, whose adapters PEFT puts together as it loads them."""
    model = save_tiny(kind, tmp_path / "hf")
    random_adapter(tmp_path / "hf", tmp_path / "adapter", lora_rank=2)
    if kind == "qwen2_moe":  # the one type with such experts that PEFT 0.21 does not convert
        spec = family_of(tmp_path / "hf").model_spec(tmp_path / "hf")
        source = tmp_path / "adapter"
        rewrite_adapter(source, source, "peft-3d", spec, base=str(tmp_path / "hf"))
    file = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    wrapped = peft.PeftModel.from_pretrained(model, tmp_path / "adapter")
    loaded = {
        name.replace(".default", ""): parameter
        for name, parameter in wrapped.named_parameters()
        if ".lora_" in name
    }
    ours, theirs = ({name for name in names if ".experts." not in name} for names in (file, loaded))
    assert ours == theirs
    assert all(torch.equal(file[name], loaded[name]) for name in ours)
