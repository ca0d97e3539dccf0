"""The tokenizer of a model directory, and whether its stop tokens end a turn. Never touches the
network."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from slime.errors import UserError, contents_of
from slime.files import read_object
from slime.models.gemma3 import GEMMA3
from slime.models.siglip import GEMMA3_VISION, image_tokens
from slime.processes.garbage import paused
from slime.prompts.chat_template import (
    carries_template,
    end_of_turn_tokens,
    template_markers,
    template_source,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from slime.config.config import Config

#: A directory with any of these has a tokenizer. Without them, transformers would build an empty
#: one from config.json.
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
    "tiktoken.model"
)  # fmt: skip


def load_tokenizer(
    path: str, *, without_torch: bool = False, trust_remote_code: bool = False, **kwargs: Any
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a local Hugging Face directory.

    Args:
        without_torch: read only tokenizer.json if it exists, in a third of the time. Good enough to
            check data, but the model's own class may add special tokens differently.
        trust_remote_code: run the directory's own tokenizer class, if it has one.
        kwargs: further arguments for transformers.
    Raises:
        UserError: the directory does not exist or has no tokenizer, the tokenizer is untrusted
            code, or transformers cannot read it.
    """
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(
            f"there is no model directory '{path}'",
            fix="pass --hf-checkpoint with a directory that holds config.json, weights and "
            "tokenizer",
        )
    if not has_tokenizer(folder):
        raise UserError(
            f"the model directory '{path}' has no tokenizer",
            why=f"it has: {contents_of(folder)}; looked for {', '.join(_TOKENIZER_FILES)}",
            fix="copy tokenizer.json and tokenizer_config.json of the model into it",
        )
    try:
        # a directory that names a class of its own may need that class; transformers may have it
        has_own_class = bool(read_object(folder / "tokenizer_config.json").get("auto_map"))
        if without_torch and (folder / "tokenizer.json").is_file() and not has_own_class:
            with paused():
                from transformers import PreTrainedTokenizerFast

            tokenizer = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
        else:
            with paused():
                from transformers import AutoTokenizer

            options = {"local_files_only": True, "trust_remote_code": trust_remote_code, **kwargs}
            tokenizer = AutoTokenizer.from_pretrained(path, **options)
        _surround_images(tokenizer, folder)
        return tokenizer
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise UserError(
                f"the tokenizer in '{path}' is Python code that the model brings, which is not "
                "run unless you trust it",
                fix="read it, and pass --trust-remote-code; or use a model whose tokenizer "
                "transformers knows",
            ) from error
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        raise UserError(
            f"the tokenizer in '{path}' cannot be read",
            why=f"{type(error).__name__}: {first_line}",
            fix="check that its files are complete and fit the installed transformers version",
        ) from error


def tokenizer_for_checks(config: Config) -> PreTrainedTokenizerBase:
    """Return the tokenizer of --hf-checkpoint to check data with, read ``without_torch``.

    Raises:
        UserError: as `load_tokenizer`.
    """
    flags = config.checkpoint
    return load_tokenizer(
        str(flags.hf_checkpoint), without_torch=True, trust_remote_code=flags.trust_remote_code
    )


def _surround_images(tokenizer: Any, folder: Path) -> None:
    """Let the chat template of a Gemma 3 write empty lines before and after each image, as the
    model's own processor does with rendered prompts. Templates drop them at the ends of messages.

    A template that marks answers with ``generation`` stays as it is, since a filter around it would
    move the marks; rows with images are then refused.
    """
    config = read_object(folder / "config.json")
    template = tokenizer.chat_template
    if config.get("model_type") not in GEMMA3.model_types or not isinstance(template, str):
        return
    pieces = tokenizer.convert_ids_to_tokens(list(image_tokens(config)))
    if None in pieces or re.search(r"{%-?\s*generation", template):
        return
    image = "".join(pieces)
    around = GEMMA3_VISION.around
    words = ", ".join(json.dumps(text) for text in (image, f"{around}{image}{around}"))
    tokenizer.chat_template = f"{{% filter replace({words}) %}}{template}{{% endfilter %}}"


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


@functools.lru_cache(maxsize=8)
def opening_tokens(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that the tokenizer adds before a text, as engines do for text prompts:
    ``<|begin_of_text|>`` for Llama 3, none for Qwen. Tokens that it adds after a text are
    ignored."""
    whole = tokenizer.encode("a")
    bare = tokenizer.encode("a", add_special_tokens=False)
    starts = range(len(whole) - len(bare) + 1)
    return tuple(whole[: next((at for at in starts if whole[at : at + len(bare)] == bare), 0)])


@functools.lru_cache(maxsize=8)
def _markers(tokenizer: Any, source: str) -> list[str]:
    try:
        return template_markers(tokenizer) if source else []
    except UserError:  # reported where the template is used
        return []


def with_opening(tokenizer: Any, text: str, ids: list[int], *, templated: bool) -> list[int]:
    """Return the tokens of a prompt from the tokens of its text: adds `opening_tokens` to plain
    text, as a server does.

    A chat template writes all special tokens itself, and servers add none to templated text. So
    text that was rendered here, carries the template's markers, or already begins with the token
    stays unchanged.

    Args:
        ids: tokens of ``text``, without added special tokens.
        templated: the text was rendered by the chat template.

    Example (Llama 3):
        >>> with_opening(tokenizer, "2+2=", [17, 10, 17, 28], templated=False)  # doctest: +SKIP
        [128000, 17, 10, 17, 28]
    """
    opening = [] if templated else list(opening_tokens(tokenizer))
    if not opening or ids[:1] == opening[:1]:
        return ids
    markers = _markers(tokenizer, template_source(tokenizer))
    return ids if carries_template(text, markers) else [*opening, *ids]


def generation_config_of(path: str) -> dict[str, Any]:
    """Read generation_config.json of a model directory; {} if there is none.

    Raises:
        UserError: the file is not a JSON object.
    """
    file = Path(path) / "generation_config.json"
    try:
        found = orjson.loads(file.read_bytes()) if file.is_file() else {}
    except orjson.JSONDecodeError as error:
        raise UserError(
            f"{file} is not JSON", why=str(error), fix="copy it again, or remove it"
        ) from error
    if not isinstance(found, dict):
        raise UserError(f"{file} holds no JSON object", fix="copy it again, or remove it")
    return found


def end_token_ids(tokenizer: Any, path: str) -> frozenset[int]:
    """Return the default tokens that end an answer: the tokenizer's, and those of
    generation_config.json and config.json, as engines read them."""
    return frozenset[int]().union(*_named_ends(tokenizer, path).values())


def _named_ends(tokenizer: Any, path: str) -> dict[str, set[int]]:
    """Return the end tokens by the file of the model that names them."""
    named = {
        "tokenizer": tokenizer.eos_token_id,
        "generation_config.json": generation_config_of(path).get("eos_token_id"),
        "config.json": read_object(Path(path) / "config.json").get("eos_token_id"),
    }
    return {
        where: {one for one in (ids if isinstance(ids, list) else [ids]) if isinstance(one, int)}
        for where, ids in named.items()
        if ids is not None
    }


def end_token_conflicts(tokenizer: Any, path: str) -> list[str]:
    """Explain how the model's files disagree on the tokens that end an answer, and the
    consequences.

    Engines stop at any of them. Training adds none: supervised texts end with the tokenizer's
    token.

    Example (config.json names 2, the tokenizer <|im_end|>):
        >>> end_token_conflicts(tokenizer, path)  # doctest: +SKIP
        ["the model's files name different end tokens: tokenizer '<|im_end|>' (151645), ..."]
    """
    ids = _named_ends(tokenizer, path)
    turn = set(end_of_turn_tokens(tokenizer))
    main = ids.get("tokenizer", set())
    # a file may name more tokens; it differs if it lacks the tokenizer's end token and names no
    # end-of-turn token
    strange = [
        where
        for where, found in ids.items()
        if where != "tokenizer" and main and not main <= found and not found & turn
    ]
    if not strange:
        return []
    named = ", ".join(f"{where} {_shown_tokens(tokenizer, found)}" for where, found in ids.items())
    ends = f"; the chat template ends a turn with {_shown_tokens(tokenizer, turn)}" if turn else ""
    used = _shown_tokens(tokenizer, set().union(*ids.values()))
    return [
        f"the model's files name different end tokens: {named}{ends}. Generation stops at each of "
        f"{used}: a token that only {' and '.join(strange)} names cuts answers where it occurs. "
        f"Supervised texts end with {_shown_tokens(tokenizer, main)}; correct eos_token_id in "
        f"{' and '.join(strange)}"
    ]


def _shown_tokens(tokenizer: Any, ids: set[int]) -> str:
    shown = [f"{tokenizer.convert_ids_to_tokens(one)!r} ({one})" for one in sorted(ids)]
    return ", ".join(shown) or "none"


def stop_token_report(
    tokenizer: Any,
    generation_config: dict[str, Any] | None = None,
    stop_token_ids: Iterable[int] = (),
    stop: Iterable[str] = (),
) -> list[str]:
    """Return the warnings about how generation will end; [] if there are none.

    Compares what ends an assistant turn in the chat template with what stops generation: the
    tokenizer's end token, ``eos_token_id`` of the generation config, and the flags
    ``--rollout-stop-token-ids`` and ``--rollout-stop``.

    Example (template ends turns with <|im_end|>, but only <|endoftext|> stops):
        >>> stop_token_report(tokenizer)  # doctest: +SKIP
        ["no stop token ends a turn: the chat template ends turns with '<|im_end|>' (151645), ..."]
    """
    stops = {tokenizer.eos_token_id} if tokenizer.eos_token_id is not None else set()
    configured = (generation_config or {}).get("eos_token_id")
    stops.update([configured] if isinstance(configured, int) else configured or [])
    stops.update(stop_token_ids)
    strings = list(stop)
    if not stops and not strings:
        return [
            "nothing stops generation before the length limit: the tokenizer has no end token, "
            "the generation config names none, and neither --rollout-stop nor "
            "--rollout-stop-token-ids is set"
        ]
    end = end_of_turn_tokens(tokenizer)
    if not end or stops & end.keys() or any(text in strings for text in end.values()):
        return []
    names = ", ".join(f"{text!r} ({number})" for number, text in end.items())
    known = _shown_tokens(tokenizer, stops) if stops else strings
    return [
        f"no stop token ends a turn: the chat template ends turns with {names}, generation stops "
        f"at {known}; pass --rollout-stop-token-ids {next(iter(end))}, or responses may never end"
    ]
