"""Checks of --multimodal-keys together with other flags. Flags whose feature would ignore images
are refused."""

from __future__ import annotations

from slime.config.draft import Draft
from slime.config.flag import option_of
from slime.errors import UserError

#: Flag → why it cannot be combined with images.
_WITHOUT_IMAGES = {
    "fake_quantisation": "the tower that sees images is not quantised",
    "custom_convert_samples_to_train_data_path": (
        "a converter returns tokens without the places of their images"
    ),
    "custom_model_provider_path": "the model that it builds may have no tower",
}
#: Flags of virtual pipeline stages.
_VIRTUAL = ("num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage")


def images(draft: Draft) -> None:
    """Check --multimodal-keys."""
    if not draft["multimodal_keys"]:
        return
    for dest, why in _WITHOUT_IMAGES.items():
        if draft[dest]:
            raise _refused(option_of(dest), why)
    for dest in _VIRTUAL:
        if draft[dest] is not None:
            raise _refused(option_of(dest), "virtual stages with a tower are not implemented")
    adapters = bool(draft["lora_rank"])
    for dest in ("freeze_vision_tower", "freeze_vision_projector"):
        if adapters and draft[dest]:
            raise UserError(
                f"{option_of(dest)} has no effect with --lora-rank",
                why="beside adapters the whole model is frozen",
                fix="leave it out",
            )
    frozen = adapters or (draft["freeze_vision_tower"] and draft["freeze_vision_projector"])
    if draft["overlap_grad_reduce"] and not frozen:
        raise UserError(
            "--overlap-grad-reduce and a trained vision tower do not go together",
            why="a micro-batch without images gives the tower no gradient, and the reduction would "
            "wait for one",
            fix="leave --overlap-grad-reduce out, or freeze both parts: --freeze-vision-tower "
            "--freeze-vision-projector",
        )


def _refused(option: str, why: str) -> UserError:
    return UserError(
        f"{option} does not go with --multimodal-keys", why=why, fix="leave one of them out"
    )
