"""Data sets, tokenizers, loss masks and evaluation sets under their earlier names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from slime.compat.without_run import token_ids
from slime.config.make import config_of
from slime.errors import UserError
from slime.prompts import tokenizer as tokenizers
from slime.prompts.conversation import Messages
from slime.prompts.order import permutation
from slime.prompts.prepare import Checker, read_samples
from slime.prompts.readers import iter_rows
from slime.prompts.row_format import RowFormat
from slime.prompts.sft_encoding import SftEncoding
from slime.rollout.eval_datasets import EvalDataset, check_keys, resolved
from slime.rollout.generate import is_in_run
from slime.rollout.loop import current_loop
from slime.samples.token_rewards import trained_runs
from slime.samples.types import Sample

# -- rows ------------------------------------------------------------------------------------------


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """Return the rows of a file; ``path`` may end with a slice ``@[start:stop]``.

    Raises:
        UserError: the file is missing, or a row cannot be read.
    """
    return (row for _, row in iter_rows(path))


def filter_long_prompt(
    origin_samples: list[Sample], tokenizer: Any, processor: Any, max_length: int | None
) -> list[Sample]:
    """Keep samples of at most ``max_length`` tokens, in their order; None: keep all. Messages that
    no template has rendered yet are kept, because their length is unknown."""
    if max_length is None:
        return origin_samples

    def fits(prompt: Any) -> bool:
        return not isinstance(prompt, str) or len(token_ids(tokenizer, prompt)) <= max_length

    return [sample for sample in origin_samples if fits(sample.prompt)]


class Dataset:
    """All prompts of a file, as samples without indices.

    Args:
        max_length: largest number of tokens of a prompt; longer prompts are skipped.
        processor, multimodal_keys: for images and other media, which are not supported here.

    Attributes:
        origin_samples: in the order of the file; samples: in the order of `shuffle`.
    Raises:
        UserError: rows that cannot be used, or ``multimodal_keys``.
    """

    def __init__(
        self,
        path: str,
        tokenizer: Any,
        processor: Any = None,
        max_length: int | None = None,
        *,
        prompt_key: str = "text",
        multimodal_keys: dict[str, str] | None = None,
        label_key: str | None = None,
        tool_key: str | None = None,
        metadata_key: str = "metadata",
        seed: int = 42,
        apply_chat_template: bool = False,
        apply_chat_template_kwargs: dict[str, Any] | None = None,
    ) -> None:
        if multimodal_keys:
            raise UserError(
                "a data set with images or other media cannot be read",
                fix="leave multimodal_keys out",
            )
        form = RowFormat(
            input_key=prompt_key,
            label_key=label_key,
            tool_key=tool_key or "",  # no column
            metadata_key=metadata_key,
            apply_chat_template=apply_chat_template,
            template_kwargs=dict(apply_chat_template_kwargs or {}),
            raw_label=True,
        )
        self.origin_samples = read_samples(path, Checker(form, tokenizer, max_length))
        self.samples = self.origin_samples
        self.seed = seed
        self.epoch_id = -1

    def shuffle(self, new_epoch_id: int) -> None:
        """Put the samples into the order of an epoch, which the seed and its number determine."""
        order = permutation(len(self.origin_samples), self.seed, new_epoch_id)
        self.samples = [self.origin_samples[position] for position in order]
        self.epoch_id = new_epoch_id

    def __getitem__(self, idx: int) -> Sample:
        return self.samples[idx]

    def __len__(self) -> int:
        return len(self.samples)


# -- tokens ----------------------------------------------------------------------------------------


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **kwargs: Any) -> Any:
    """Return the tokenizer of a local model directory.

    Args:
        chat_template_path: a file with a template that replaces the tokenizer's own.
        kwargs: for transformers; they override ``local_files_only=True``.
    Raises:
        UserError: as `slime.prompts.tokenizer.load_tokenizer`.
    """
    tokenizer = tokenizers.load_tokenizer(name_or_path, **kwargs)
    if chat_template_path:
        with open(chat_template_path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    return tokenizer


def load_processor(name_or_path: str, **kwargs: Any) -> None:
    """None: processors of images and other media are not supported here."""


def get_response_lengths(loss_masks: list[list[int]]) -> list[int]:
    """For each mask over a whole conversation, the number of tokens from the first trained one."""
    return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


class MultiTurnLossMaskGenerator:
    """Tokens of a conversation, and which of them are an assistant's.

    Args:
        tokenizer_type: ignored: the chat template determines where a turn begins and ends.
    """

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        self.tokenizer = tokenizer
        self.tokenizer_type = tokenizer_type

    def get_loss_mask(
        self, messages: Messages, tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        """Return (tokens, mask), up to the last trained token. Messages with a ``step_loss_mask``
        of 0 are not trained.

        Raises:
            UserError: there is no assistant message, or the template's turns cannot be located, or
                it rewrites earlier turns.
        """
        sequences = SftEncoding(self.tokenizer).encode(messages, tools=tools).sequences
        if len(sequences) > 1:
            raise UserError(
                f"this conversation becomes {len(sequences)} sequences, and one is asked for",
                why="the chat template rewrites earlier turns, so one sequence cannot train each "
                "of them as generated",
                fix="train with --loss-type sft_loss, which splits it, or set step_loss_mask 0 on "
                "the earlier turns",
            )
        return sequences[0].tokens, sequences[0].mask

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        return get_response_lengths(loss_masks)

    def get_text_from_loss_mask(self, token_ids: list[int], loss_masks: list[int]) -> list[str]:
        """Return the text of each run of trained tokens."""
        return [self.tokenizer.decode(run) for run in trained_runs(token_ids, loss_masks)]


# -- evaluation sets -------------------------------------------------------------------------------


#: Flags that give the default values of a set.
_EVALUATION = (
    "eval_input_key", "eval_label_key", "eval_tool_key", "n_samples_per_eval_prompt",
    "eval_min_new_tokens", "eval_temperature", "eval_top_p", "eval_top_k", "eval_max_response_len",
    "metadata_key", "apply_chat_template", "input_key", "label_key", "tool_key",
    "n_samples_per_prompt", "apply_chat_template_kwargs", "rollout_stop", "rollout_temperature",
    "rollout_top_p", "rollout_top_k", "rollout_max_response_len", "rollout_stop_token_ids",
)  # fmt: skip


class EvalDatasetConfig(EvalDataset):
    """`slime.rollout.eval_datasets.EvalDataset` from a name, a path and any other fields. Missing
    fields come from the run's flags, or without a run from the flags' defaults.

    Raises:
        UserError: a key is unknown, or a number is invalid.
    """

    def __init__(self, name: str, path: str, *, args: Any = None, **values: Any) -> None:
        flags = {"eval_prompt_data": [name, path]}
        if is_in_run() and args is None:
            config = current_loop().config
        else:
            config = config_of(args, _EVALUATION, **flags)
        given = {key: value for key, value in values.items() if value is not None}
        check_keys(given, f"evaluation set {name}")
        super().__init__(**resolved({"name": name, "path": path, **given}, config))


def ensure_dataset_list(config: Any) -> list[dict[str, Any]]:
    """Return the entries of ``datasets``, a list of maps or a map from names to maps, each with its
    name.

    Raises:
        ValueError: an entry has no name.
    """
    if isinstance(config, dict):
        return [{"name": name, **(entry or {})} for name, entry in config.items()]
    entries = [dict(entry or {}) for entry in config or ()]
    if any("name" not in entry for entry in entries):
        raise ValueError("each evaluation data set must have a name")
    return entries


def build_eval_dataset_configs(
    args: Any, raw_config: list[dict[str, Any]], defaults: dict[str, Any]
) -> list[EvalDatasetConfig]:
    """Return a set for each entry; missing fields come from ``defaults``, then from ``args``."""
    return [EvalDatasetConfig(**{**(defaults or {}), **entry}, args=args) for entry in raw_config]
