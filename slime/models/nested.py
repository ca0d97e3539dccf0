"""Vision models: their config.json describes the decoder in ``text_config``, and the names of its
tensors have a prefix."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slime.errors import UserError
from slime.models.rules import Rule
from slime.models.spec import require
from slime.models.vision import VisionKind, VisionSpec

_INSIDE = "model.language_model."
_UNDER = "language_model."
#: Tower and projector of models whose decoder is in ``language_model``. They are not trained.
TOWER_AND_PROJECTOR = (r"vision_tower\..*", r"multi_modal_projector\..*")


@dataclass(frozen=True)
class ModuleNames:
    """The names that transformers gives a model's modules, which PEFT's files use.

    Attributes:
        prefixes: (of a tensor in files, of its module), where they differ.
        beside_decoder: regular expression of the modules outside the decoder; "" for none. Their
            layers may have the decoder's last names.
        experts: (part of a path in files, of the path in modules) of the routed experts, where they
            differ. Files of single experts have the former, stacks of experts the latter.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    beside_decoder: str = ""
    experts: tuple[tuple[str, str], ...] = ()

    def module(self, name: str) -> str:
        """Return the module's name for a name in files."""
        return _with_prefix(name, self.prefixes)

    def in_files(self, module: str) -> str:
        """Return the name in files of a module. A name in files stays as it is."""
        module = _with_parts(module, ((module, file) for file, module in self.experts))
        return _with_prefix(module, ((module, file) for file, module in self.prefixes))

    def expert_module(self, name: str) -> str:
        """Return the path of an expert's layer in the modules, for its path in files."""
        return _with_parts(name, self.experts)


def _with_prefix(name: str, prefixes: Iterable[tuple[str, str]]) -> str:
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _with_parts(path: str, parts: Iterable[tuple[str, str]]) -> str:
    whole = path + "."
    for old, new in parts:
        whole = whole.replace(old, new)
    return whole.removesuffix(".")


SAME_NAMES = ModuleNames()
#: Of a whole text model below ``language_model`` in files.
MODULES_UNDER = ModuleNames(
    (("language_model.model.", _INSIDE), ("language_model.lm_head", "lm_head")),
    r"model\.(vision_tower|multi_modal_projector)\..*",
)
_ROTARY_SETTINGS = ("rope_parameters", "rope_scaling")


def decoder_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part of config.json that describes the decoder: for a text model, all of it."""
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json that describes the decoder, with ``tie_word_embeddings`` from
    the top level.

    Raises:
        UserError: config.json has no ``text_config``.
    """
    inner = dict(require(config, "text_config"))
    tied = config.get("tie_word_embeddings")
    return inner if tied is None else {**inner, "tie_word_embeddings": tied}


def text_rotary(config: dict[str, Any], kinds: tuple[str, ...] = ("default",)) -> dict[str, Any]:
    """Replace M-RoPE in a decoder's config by the plain rotary embedding. Both are equal for text,
    as the three positions of a text token are equal.

    Args:
        kinds: values of ``rope_type`` that mean unscaled M-RoPE.
    Raises:
        UserError: the rotary embedding has another type, with scaled frequencies.
    Source: Wang et al., Qwen2-VL (arXiv:2409.12191), section 2.1.

    Example:
        >>> text_rotary({"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}, ("mrope",))
        {'rope_scaling': {'mrope_section': [1, 1], 'rope_type': 'default'}}
    """
    given = {key: config[key] for key in _ROTARY_SETTINGS if config.get(key)}
    for key, settings in given.items():
        for name in ("rope_type", "type"):
            if settings.get(name, kinds[0]) not in kinds:
                raise UserError(
                    f"rotary scaling of type {settings[name]!r} is not trained together with "
                    "M-RoPE",
                    why=f"{key} of config.json has it as {name}; "
                    f"{' and '.join(kinds)} can be trained",
                    fix="use the config.json that was published with the weights",
                )
        rest = {name: value for name, value in settings.items() if name != "type"}
        given[key] = {**rest, "rope_type": "default"}
    return {**config, **given}


def inside(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules for a decoder in ``model.language_model`` with the output layer outside it
    (Qwen3.5, Qwen3-VL)."""

    def inner(name: str) -> str:
        return _INSIDE + name.removeprefix("model.") if name.startswith("model.") else name

    return _with_names(rules, inner)


def under(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    """Return the rules for a text model in ``language_model``, including its output layer
    (Mistral 3, Gemma 3)."""
    return _with_names(rules, lambda name: _UNDER + name)


def _with_names(rules: Sequence[Rule], rename: Callable[[str], str]) -> tuple[Rule, ...]:
    return tuple(
        replace(
            rule,
            hf=tuple(rename(name) for name in rule.hf_names),
            tied_to=rule.tied_to and rename(rule.tied_to),
        )
        for rule in rules
    )


def read_vision(config: Mapping[str, Any], kind: VisionKind, hidden_size: int) -> VisionSpec:
    """Read the vision tower of a parsed config.json, and the tokens around images.

    Args:
        hidden_size: of the decoder; the projector's output must have this width.
    Raises:
        UserError: a field is missing, or contradicts the decoder.
    """
    tower = dict(config.get("vision_config") or {})
    text = decoder_config(config)
    rotary = text.get("rope_parameters") or text.get("rope_scaling") or {}
    fields = ("image_token_id", "vision_start_token_id", "vision_end_token_id")
    needed = ("depth", "hidden_size", "intermediate_size", "num_heads", "patch_size")
    missing = [name for name in fields if config.get(name) is None]
    missing += [f"vision_config.{name}" for name in needed if tower.get(name) is None]
    if missing:
        raise UserError(
            f"the model's config.json has no {', '.join(missing)}",
            why="images need the tower's sizes and the tokens around an image",
            fix="use the config.json that belongs to the weights",
        )
    if tower.get("out_hidden_size", hidden_size) != hidden_size:
        raise UserError(
            f"the vision projector has {tower['out_hidden_size']} outputs per token, but the "
            f"decoder has hidden size {hidden_size}",
            fix="use the config.json that belongs to the weights",
        )
    time, row, column = rotary.get("mrope_section") or kind.sections
    image, start, end = (int(config[name]) for name in fields)
    sections = (int(time), int(row), int(column))
    return VisionSpec(kind, {**tower, "out_hidden_size": hidden_size}, image, start, end, sections)
