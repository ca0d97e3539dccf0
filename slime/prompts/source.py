"""The prompt source: draws groups of samples, takes them back, and records which ones training has
consumed.

    rows ─► checked and measured ─► order of the epoch ─► groups ─► rollout ─┐
                                           ▲                                 │ aborted or
                                           └───────────── buffer ◄───────────┘ surplus groups

A resumed run continues after the *consumed* groups, not after the drawn ones: groups that were in
progress when the run stopped are drawn again, with the same indices and in the same order.
"""

from __future__ import annotations

import contextlib
import contextvars
import copy
import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from slime.config.config import Config
from slime.config.flag import option_of
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.models import vocab_size_of
from slime.models.context import model_context
from slime.prompts.chat_template import carries_template, template_markers
from slime.prompts.order import MappedOrder, PromptOrder, StreamedOrder
from slime.prompts.prepare import ALL_ROWS, Checker, RowJudge, prepare
from slime.prompts.problems import RowProblem
from slime.prompts.readers import iter_rows, open_rows
from slime.prompts.row_format import Prompt, RowFormat, check_label_key, inputs_of, read_prompt
from slime.prompts.tokenizer import generation_config_of, opening_tokens, stop_token_report
from slime.samples.buffer import SampleBuffer, pop_first
from slime.samples.types import Sample
from slime.user_code.calls import running
from slime.user_code.hooks import DataSource
from slime.user_code.loading import (
    check_class,
    failures_of,
    load_function,
    named,
    user_function,
    with_user_frames,
)
from slime.user_code.overrides import override_of
from slime.user_code.process_state import kept

logger = get_logger(__name__)

#: The flag that names a user's class, for messages.
_SOURCE = "--data-source-path"
_BLANK = Prompt(text="", tokens=[], label=None, metadata={}, bare="")
#: Number of rows that are searched for chat messages.
_ROWS_LOOKED_AT = 32


def make_source(config: Config, tokenizer: Any, judge: RowJudge | None = None) -> DataSource:
    """Return the source that the flags name: ``--data-source-path``, or `PromptSource`. Warns if no
    stop token ends a turn.

    Args:
        judge: see `PromptSource`.
    Raises:
        UserError: the class cannot be loaded or is no data source; see also `PromptSource`.
    """
    warn_of_endless_generation(config, tokenizer)
    opening = [] if config.data.apply_chat_template else list(opening_tokens(tokenizer))
    if opening:
        begins = "plain-text prompts begin with %r, which the tokenizer adds, as in an engine"
        logger.info(begins, tokenizer.decode(opening))
    return _built(config, tokenizer, judge)


def _built(config: Config, tokenizer: Any, judge: RowJudge | None = None) -> DataSource:
    path = config.data.data_source_path
    if not path:
        return PromptSource(config, tokenizer, judge)
    cls = load_function(path)
    check_class(cls, DataSource, path)
    BUILT_FROM.set((config, tokenizer))
    with failures_of(named(path, _SOURCE)):
        source: DataSource = cls(config.shared_args)
    for method in ("get_samples", "add_samples", "mark_consumed", "mark_discarded"):
        setattr(
            source,
            method,
            _telling_failures(getattr(source, method), named(f"{path}.{method}", _SOURCE)),
        )
    return source


def _telling_failures(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with failures_of(name), kept(name), running(name):
            return method(*args, **kwargs)

    return call


#: The configuration and tokenizer from which `make_source` builds a user's source.
BUILT_FROM: contextvars.ContextVar[tuple[Config, Any]] = contextvars.ContextVar(
    "slime_source_built_from"
)


def save_source(source: DataSource, config: Config, rollout_id: int) -> dict[str, Any]:
    """Return the state of ``source`` for the checkpoint of ``rollout_id``. Call its `save` only if
    training checkpoints are written (--save); no run resumes from a mere export (--save-hf).

    Raises:
        UserError: the source's code fails.
    """
    if config.checkpoint.save is not None:
        _call_source(source, "save", rollout_id)
    state: dict[str, Any] = _call_source(source, "state_dict")
    return state


def load_source(
    source: DataSource, config: Config, rollout_id: int | None, state: dict[str, Any]
) -> None:
    """Restore ``source`` to the ``state`` that `save_source` returned for ``rollout_id``.

    Args:
        rollout_id: None for a state outside a checkpoint, for which the source has written no file.
    Raises:
        UserError: the source's code fails.
    """
    if config.checkpoint.load is not None and rollout_id is not None:
        _call_source(source, "load", rollout_id)
    _call_source(source, "load_state_dict", state)


def source_again(source: DataSource, config: Config, tokenizer: Any) -> DataSource:
    """Return a source that `load_source` can set to any position after ``source`` was drawn from. A
    user's source is built again: nothing else resets it, and its ``load`` may depend on its
    constructor arguments.

    Args:
        config: names the checkpoint to load.
    """
    return _built(config, tokenizer) if config.data.data_source_path else source


def _call_source(source: DataSource, method: str, *args: Any) -> Any:
    try:
        return getattr(source, method)(*args)
    except UserError:
        raise
    except Exception as error:  # raised by the user's code; name the method
        failure = UserError(
            f"{type(source).__name__}.{method}({', '.join(f'{arg!r:.40}' for arg in args)}) failed",
            why=f"{type(error).__name__}: {error}",
            fix="correct the class of --data-source-path",
        )
        raise with_user_frames(failure, error) from error


def warn_of_endless_generation(config: Config, tokenizer: Any) -> None:
    """Warn if the model is used for chat and no token that stops generation ends a turn."""
    model = config.checkpoint.hf_checkpoint
    rollout = config.rollout
    if model is None or config.algorithm.trains_on_data or not is_chat(config, tokenizer):
        return
    generation_config = generation_config_of(model)
    for warning in stop_token_report(
        tokenizer, generation_config, rollout.rollout_stop_token_ids, rollout.rollout_stop
    ):
        tell(logger, "%s", warning)


def is_chat(config: Config, tokenizer: Any) -> bool:
    """Tell whether prompts are chats: with --apply-chat-template, or if one of the first rows holds
    messages (which generation renders with the template) or text with the template's markers."""
    data = config.data
    if data.apply_chat_template:
        return True
    if not data.prompt_data or not data.rollout_global_dataset:
        return False
    form = RowFormat.of(config)
    markers = template_markers(tokenizer)
    for _, row in itertools.islice(iter_rows(data.prompt_data), _ROWS_LOOKED_AT):
        with contextlib.suppress(RowProblem):  # reported with all others when the data is read
            prompt = read_prompt(row, form, tokenizer)
            if isinstance(prompt.text, list) or carries_template(prompt.text, markers):
                return True
    return False


def _pop_first(*args: Any) -> list[list[Sample]]:
    """Call `pop_first`, or a plugin's replacement of it."""
    groups: list[list[Sample]] = (override_of("pop_first") or pop_first)(*args)
    return groups


BUFFER_FILTER = "--buffer-filter-path"
_AS_IT_IS = "as it is"


class PromptSource(DataSource):
    """Groups of ``n_samples_per_prompt`` samples, in the order of the data, epoch after epoch.

    The k-th draw of a run gets ``group_index`` k and sample indices k·n … k·n + n − 1,
    independently of resumes.

    Args:
        config: groups ``data``, ``rollout``, ``reward`` and ``algorithm`` are read.
        tokenizer: renders and measures prompts.
        judge: further checks of each row. Data sets of more than `ALL_ROWS` rows are not read
            before the first draw: each row is checked when it is drawn, and left out with a warning
            if it cannot be used.
    Raises:
        UserError: as in `slime.prompts.readers` and `slime.prompts.prepare`.

    Example:
        >>> source = PromptSource(config, tokenizer)                  # doctest: +SKIP
        >>> groups = source.get_samples(2)                            # doctest: +SKIP
        >>> [[sample.index for sample in group] for group in groups]  # doctest: +SKIP
        [[0, 1, 2, 3], [4, 5, 6, 7]]
    """

    def __init__(self, config: Config, tokenizer: Any, judge: RowJudge | None = None) -> None:
        self._group_size = config.rollout.n_samples_per_prompt
        path = config.rollout.buffer_filter_path
        if path:
            chosen = user_function(path, BUFFER_FILTER)
            self._buffer = SampleBuffer(config.shared_args, chosen, named(path, BUFFER_FILTER))
        else:
            self._buffer = SampleBuffer(config.shared_args, _pop_first)
        self._order = _open_order(config, tokenizer, judge)
        self._form = None if self._order is None else RowFormat.of(config)
        seed = config.rollout.rollout_seed
        self._shuffling = f"shuffled with seed {seed}" if config.data.rollout_shuffle else _AS_IT_IS
        self._shuffles_unasked = config.data.rollout_shuffle and config.origins[
            "rollout_shuffle"
        ].startswith("derived")
        self._next = 0
        self._done: set[int] = set()
        """Finished draws from ``_low`` on; all draws below it are finished."""
        self._low = 0
        self._held: set[int] = set()
        """Draws in a restored buffer, which must not be drawn from the data again."""
        self._positions: dict[int, tuple[int, int]] = {}
        """Position of each unfinished draw in the data."""
        self._where: dict[int, str] = {}
        """The row of each unfinished draw, for messages."""

    # -- drawing -----------------------------------------------------------------------------------

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        """Return ``num_samples`` groups: first those that were put back, then new ones."""
        groups = self._buffer.take(num_samples)
        while len(groups) < num_samples:
            groups.append(self._draw())
        return groups

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self._buffer.add(samples)

    def _draw(self) -> list[Sample]:
        # --disable-rollout-global-dataset: prompts come from the rollout function
        if self._order is None:
            self._next += 1
            return self._make_group(_BLANK, self._next - 1)
        while True:
            group_index = self._next
            if group_index in self._done:
                self._order.take()  # finished before the resume
                self._next += 1
                self.mark_consumed(())
                continue
            position = self._order.tell()
            prompt = self._order.take()
            self._next += 1
            self._positions[group_index] = position
            self._where[group_index] = prompt.where
            if group_index not in self._held:
                break
        return self._make_group(prompt, group_index)

    @property
    def rows_per_epoch(self) -> int | None:
        """The number of rows in an epoch; None with --streaming-data, or without data."""
        return len(self._order) if isinstance(self._order, MappedOrder) else None

    @property
    def passes_over(self) -> bool:
        """Whether invalid rows are skipped when they are drawn, because not all rows were checked
        before."""
        return isinstance(self._order, MappedOrder) and self._order.unchecked

    def where(self, group_index: int) -> str:
        """Return the row of a draw that is not consumed yet ("train.jsonl:17"); "" if unknown."""
        return self._where.get(group_index, "")

    def _make_group(self, prompt: Prompt, group_index: int) -> list[Sample]:
        """Make samples that share no mutable state, which user functions might change."""
        first = group_index * self._group_size
        inputs = None if self._form is None else inputs_of(prompt, self._form)
        return [
            Sample(
                group_index=group_index,
                index=index,
                prompt=copy.deepcopy(prompt.text),
                tokens=list(prompt.tokens),
                label=copy.deepcopy(prompt.label),
                metadata=copy.deepcopy(prompt.metadata),
                multimodal_inputs=copy.deepcopy(inputs),
            )
            for index in range(first, first + self._group_size)
        ]

    def __len__(self) -> int:
        """Return the number of prompts per epoch."""
        if self._order is None:
            raise UserError("there is no data set to count", fix="pass --num-rollout")
        return len(self._order)

    # -- resuming ----------------------------------------------------------------------------------

    def mark_consumed(self, group_indices: Iterable[int]) -> None:
        self._done.update(index for index in group_indices if index >= self._low)
        while self._low in self._done and self._low < self._next:
            self._done.discard(self._low)
            self._positions.pop(self._low, None)
            self._where.pop(self._low, None)
            self._held.discard(self._low)
            self._low += 1

    def mark_discarded(self, group_indices: Iterable[int]) -> None:
        self.mark_consumed(group_indices)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values (and tensors if buffered samples hold some)."""
        epoch, offset = (
            (0, 0) if self._order is None else self._positions.get(self._low, self._order.tell())
        )
        return {
            "version": 1,
            "low": self._low,
            "done": sorted(self._done),
            "epoch": epoch,
            "offset": offset,
            "data": "" if self._order is None else self._order.fingerprint(),
            "shuffling": self._shuffling,
            "buffer": self._buffer.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state_dict` was called. If the data have changed, draw from their
        beginning."""
        self._buffer.load_state_dict(state["buffer"])
        self._next = self._low = state["low"]
        self._done = set(state["done"])
        self._positions = {}
        self._where = {}
        self._held = self._buffer.group_indices
        if self._order is None:
            return
        if state["data"] == self._order.fingerprint():
            saved = state.get("shuffling", self._shuffling)
            if saved == _AS_IT_IS and self._shuffles_unasked:
                logger.info(
                    "prompts come in the order of the data, as in the run that is resumed "
                    "(--rollout-shuffle)"
                )
                self._shuffling = saved
                self._order.shuffle = False
            elif saved != self._shuffling:
                tell(
                    logger,
                    "the checkpoint's order of the data was %s, this run's is %s: in this epoch "
                    "some prompts are drawn twice, and some not at all (--rollout-shuffle, "
                    "--rollout-seed)",
                    saved,
                    self._shuffling,
                )
            self._order.seek(state["epoch"], state["offset"])
            return
        self._next = self._low = max([state["low"] - 1, *self._done, *self._held]) + 1
        tell(
            logger,
            "the prompt data is not the checkpoint's: drawing from its beginning, as groups %d "
            "and on; %d groups that the checkpoint has in the buffer keep their old prompts",
            self._next,
            len(self._held),
        )
        self._done = set()
        self._held = set()
        self._order.seek(0, 0)


def _open_order(config: Config, tokenizer: Any, judge: RowJudge | None) -> PromptOrder | None:
    data = config.data
    nothing_is_drawn = (
        config.rollout.num_rollout == 0 or config.debug.load_debug_rollout_data is not None
    )
    if not data.rollout_global_dataset or (nothing_is_drawn and not data.prompt_data):
        return None
    if not data.prompt_data:
        raise UserError(
            "there is no prompt data",
            fix="pass --prompt-data, or --disable-rollout-global-dataset when the rollout "
            "function brings its own",
        )
    check_label_key(config)
    checker = replace(prompt_checker(config, tokenizer), judge=judge)
    options: dict[str, Any] = {"shuffle": data.rollout_shuffle, "seed": config.rollout.rollout_seed}
    if data.streaming_data:
        return StreamedOrder(data.prompt_data, checker, **options)
    rows = open_rows(data.prompt_data)
    if len(rows) > ALL_ROWS:
        return MappedOrder(rows, np.arange(len(rows)), checker, **options, unchecked=True)
    kept = prepare(rows, data.prompt_data, checker, data.num_data_workers)
    return MappedOrder(rows, kept, checker, **options)


def prompt_checker(config: Config, tokenizer: Any, path: str | None = None) -> Checker:
    """Return the checker of --prompt-data, which checks and measures each row as it is read.

    Args:
        path: another data set with rows of the same form.
    """
    form = RowFormat.of(config, path)
    checker = Checker(form, tokenizer, vocab_size=vocab_size_of_run(config))
    limit = max_prompt_tokens(config)
    context = model_context(config) if limit is None else None
    if context is not None:
        said = (
            f"the model's context of {context} tokens; --rollout-max-prompt-len sets another limit"
        )
        return replace(checker, max_tokens=context - 1, limit_flags=said)
    flags = [
        f"{option_of(flag)} {value}"
        for flag, value, longest in _prompt_limits(config)
        if longest == limit and not config.origins[flag].startswith("derived")
    ]
    if not flags:
        return replace(checker, max_tokens=limit)
    return replace(checker, max_tokens=limit, limit_flags=" and ".join(flags))


def vocab_size_of_run(config: Config) -> int | None:
    """Return the vocabulary size of the model that is trained; None if it is unknown."""
    return vocab_size_of(config.checkpoint.hf_checkpoint, config.checkpoint.model_name)


def max_prompt_tokens(config: Config) -> int | None:
    """Return the longest prompt that leaves room for a token of response:
    ``--rollout-max-prompt-len`` and the contexts."""
    return min((longest for _, _, longest in _prompt_limits(config)), default=None)


def _prompt_limits(config: Config) -> list[tuple[str, int, int]]:
    """Return the flags that are set, their values, and the longest prompt that each allows."""
    given = {
        "rollout_max_prompt_len": (config.data.rollout_max_prompt_len, 0),
        "rollout_max_context_len": (config.rollout.rollout_max_context_len, 1),
        "seq_length": (config.train.seq_length, 1),
    }
    return [
        (flag, value, value - less) for flag, (value, less) in given.items() if value is not None
    ]
