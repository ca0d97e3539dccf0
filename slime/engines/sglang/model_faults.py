"""Models that SGLang is known to compute differently from transformers and the trainer, or whose
weights pushes cannot update."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime.engines.sglang.versions import installed_version
from slime.engines.wire.abilities import sglang_sees_in_hybrids
from slime.errors import UserError
from slime.models.quantised import is_mxfp4
from slime.models.spec import ModelSpec
from slime.processes.host import version_of

#: The first version with ``SGLANG_MM_AVOID_RETOKENIZE``, which is on by default.
KEEPS_TOKENS_OF_IMAGES = (0, 5, 13)


def check_model(spec: ModelSpec, config: Mapping[str, Any]) -> None:
    """Refuse a model whose log-probs from SGLang would differ from the trainer's.

    Args:
        config: the model's config.json.
    Raises:
        UserError: a scaled rotary embedding in Gemma 3, with a vision tower or not, which SGLang
            leaves out (0.5.16, ``models/gemma3_causal.py``: all layers get the type "default").
            Experts in MXFP4, which SGLang lays out anew as it starts (0.5.16,
            ``layers/quantization/mxfp4.py``), so that no weights can be loaded into them
            afterwards. Queries that grow from another position on than SGLang lets them
            (``models/ministral3.py``). Text models of Qwen3.5 on their own, and hybrids whose kinds
            of layers it would not find (0.5.16, ``models/qwen3_5.py``, ``configs/qwen3_next.py``).
            Images in hybrids, up to 0.5.18 (`sglang_sees_in_hybrids`), and in versions that
            tokenise their prompts anew. Images of Gemma 3 (``models/gemma3_mm.py``).
            A gpt-oss without a field that it reads.
    """
    if is_mxfp4(config):
        raise UserError(
            "SGLang takes no pushes of weights into experts in MXFP4",
            why="it changes their layout at the start, and pushed weights do not fit it",
            fix="slime convert quantised-to-hf makes plain weights, which --hf-checkpoint then "
            "names; or pass --rollout-engine embedded, which holds plain weights",
        )
    version = installed_version() or ""
    is_hybrid = "linear_attention_freq" in spec.transformer
    if spec.vision is not None and version and version_of(version)[:3] < KEEPS_TOKENS_OF_IMAGES:
        raise UserError(
            f"SGLang {version} tokenises prompts with images again",
            why="it decodes the tokens of a request to text, and may answer other tokens than "
            "those that are trained",
            fix=f"install SGLang {'.'.join(map(str, KEEPS_TOKENS_OF_IMAGES))} or newer, or pass "
            "--rollout-engine embedded",
        )
    if spec.vision is not None and is_hybrid and not sglang_sees_in_hybrids(version):
        raise UserError(
            "SGLang up to 0.5.18 computes images of this model with wrong positions",
            why="a fused kernel of its hybrid models (Qwen3.5) reads one of the three rows of "
            "positions, so that rows and columns of images are lost",
            fix="pass --rollout-engine embedded, or leave --multimodal-keys out",
        )
    if spec.has_bidirectional_images:
        raise UserError(
            f"SGLang does not compute images of {spec.family} in all cases as the trainer does",
            why="tokens of an image attend to each other in both directions, which SGLang's "
            "models/gemma3_mm.py provides only with its Triton backend, and not for an image of "
            "which a part is in its prefix cache or in another chunk of the prefill",
            fix="pass --rollout-engine embedded, or leave --multimodal-keys out",
        )
    if spec.family == "gpt_oss" and "swiglu_limit" not in config:
        raise UserError(
            "SGLang needs swiglu_limit in the config.json of gpt-oss",
            why="its models/gpt_oss.py reads the field (0.5.16), and a server ends with an "
            "AttributeError where transformers has no default for it",
            fix='add "swiglu_limit": 7.0 to config.json, the published value; or pass '
            "--rollout-engine embedded",
        )
    _check_hybrid(spec, config)
    _check_query_scaling(spec)
    if spec.family in ("gemma3_text", "gemma3") and spec.rotary_scaling is not None:
        kind = spec.rotary_scaling["rope_type"]
        raise UserError(
            f"SGLang computes this Gemma 3 without the rotary scaling ({kind}) of its config.json",
            why="SGLang 0.5.16 gives full-attention layers an unscaled embedding, so its "
            "log-probs drift from the trainer's as positions grow",
            fix="pass --rollout-engine embedded, or choose Gemma 3 270M or 1B, which scale nothing",
        )


def check_transposed_experts(folder: Path) -> None:
    """Refuse a directory with stacks of experts that are transposed relative to published ones.

    Raises:
        UserError: always; SGLang turns every stack of Qwen3-VL round (0.5.16,
            ``models/qwen3_vl_moe.py``).
    """
    raise UserError(
        f"SGLang cannot load the experts of {folder}",
        why="they are stacks [experts, out, in], as transformers writes them; SGLang 0.5.16 only "
        "accepts [experts, in, out], as in published files",
        fix="pass the published directory as --hf-checkpoint and this one as --ref-load; or pass "
        "--rollout-engine embedded",
    )


#: Position from which SGLang scales queries, whatever config.json says.
_QUERY_SCALING_LENGTH = 16384


def _check_query_scaling(spec: ModelSpec) -> None:
    scaling = spec.query_scaling
    if scaling is not None and scaling.length != _QUERY_SCALING_LENGTH:
        raise UserError(
            f"SGLang lets queries of this model grow from position {_QUERY_SCALING_LENGTH} on",
            why="its models/ministral3.py does not read original_max_position_embeddings of "
            f"rope_parameters, which is {scaling.length}",
            fix="pass --rollout-engine embedded, or choose a model with that length, such as "
            "Ministral 3 8B",
        )


def _check_hybrid(spec: ModelSpec, config: Mapping[str, Any]) -> None:
    if spec.family in ("qwen3_5_text", "qwen3_5_moe_text"):
        raise UserError(
            "SGLang has no class for text models of Qwen3.5",
            why=f"the model_type is {config.get('model_type')!r}; SGLang 0.5.16 knows the models "
            "that see images, too (Qwen3_5ForConditionalGeneration)",
            fix="pass --rollout-engine embedded, or the checkpoint with the vision tower, whose "
            "text part is trained",
        )
    kinds = spec.transformer.get("linear_attention_freq")
    if not kinds:
        return
    interval = config.get("text_config", config).get("full_attention_interval")
    found = interval and [int((layer + 1) % interval != 0) for layer in range(spec.num_layers)]
    if found != kinds:
        raise UserError(
            "SGLang would not find the kinds of this model's layers",
            why="it reads full_attention_interval of config.json, which is "
            f"{interval}, and ignores layer_types",
            fix="add the interval to config.json if every n-th layer has attention; else pass "
            "--rollout-engine embedded",
        )
