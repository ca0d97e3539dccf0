"""Data sources that plugins name in --data-source-path, or use as base classes."""

from __future__ import annotations

import functools
from typing import Any

from slime.compat.data import Dataset
from slime.config.config import Config
from slime.config.make import config_of
from slime.errors import UserError
from slime.prompts.source import BUILT_FROM, PromptSource, max_prompt_tokens
from slime.prompts.tokenizer import load_tokenizer
from slime.samples.types import Sample

#: Flags that a source reads without a run.
_FLAGS = (
    "prompt_data", "input_key", "label_key", "metadata_key", "tool_key", "hf_checkpoint",
    "rollout_global_dataset", "apply_chat_template", "apply_chat_template_kwargs",
    "rollout_shuffle", "rollout_seed", "rollout_max_prompt_len", "n_samples_per_prompt",
    "buffer_filter_path", "streaming_data", "num_data_workers",
)  # fmt: skip


class RolloutDataSource(PromptSource):
    """`PromptSource` built as ``cls(args)``.

    Attributes:
        args: the constructor's argument.
        metadata: the plugin's own; saved in checkpoints.
        epoch_id, sample_offset: position of the next prompt in the data; may be set.
        sample_group_index, sample_index: indices of the next draw; a class that makes its groups
            itself may set them.
    Raises:
        UserError: there is no run, and ``args`` name data but no model for its tokenizer.
    """

    def __init__(self, args: Any) -> None:
        self._config, self._tokenizer = self._built_from(args)
        self.args = args
        self.metadata: dict[str, Any] = {}
        super().__init__(self._config, self._tokenizer)

    def _built_from(self, args: Any) -> tuple[Config, Any]:
        if (known := BUILT_FROM.get(None)) is not None:
            return known
        config = config_of(args, _FLAGS)
        model = getattr(args, "hf_checkpoint", None)
        if getattr(args, "prompt_data", None) is None:
            return config, None
        if not model:
            raise UserError(
                f"{type(self).__name__} is built where there is no run",
                fix="name the class by --data-source-path",
            )
        return config, load_tokenizer(
            model, trust_remote_code=getattr(args, "trust_remote_code", False)
        )

    @functools.cached_property
    def dataset(self) -> Dataset | None:
        """All prompts, read at the first access; None without a data set."""
        data = self._config.data
        if self._order is None or data.prompt_data is None:
            return None
        dataset = Dataset(
            data.prompt_data,
            self._tokenizer,
            max_length=max_prompt_tokens(self._config),
            prompt_key=data.input_key,
            label_key=data.label_key,
            tool_key=data.tool_key,
            metadata_key=data.metadata_key,
            seed=self._config.rollout.rollout_seed,
            apply_chat_template=data.apply_chat_template,
            apply_chat_template_kwargs=dict(data.apply_chat_template_kwargs),
        )
        if data.rollout_shuffle:
            dataset.shuffle(self.epoch_id)
        return dataset

    @property
    def epoch_id(self) -> int:
        return 0 if self._order is None else self._order.tell()[0]

    @epoch_id.setter
    def epoch_id(self, value: int) -> None:
        if self._order is not None:
            self._order.seek(value, self._order.tell()[1])

    @property
    def sample_offset(self) -> int:
        return 0 if self._order is None else self._order.tell()[1]

    @sample_offset.setter
    def sample_offset(self, value: int) -> None:
        if self._order is not None:
            self._order.seek(self._order.tell()[0], value)

    @property
    def sample_group_index(self) -> int:
        return self._next

    @sample_group_index.setter
    def sample_group_index(self, value: int) -> None:
        self._next = value

    @property
    def sample_index(self) -> int:
        return self._own_index if self._own_index is not None else self._next * self._group_size

    @sample_index.setter
    def sample_index(self, value: int) -> None:
        self._own_index = value

    _own_index: int | None = None

    def state_dict(self) -> dict[str, Any]:
        own = {
            "metadata": self.metadata,
            "sample_index": self._own_index,
            "sample_group_index": self._next,
        }
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.metadata = state.get("metadata", {})
        self._own_index = state.get("sample_index")
        # the class makes its groups itself: it continues counting, and no group is drawn again
        if self._own_index is not None:
            self._next = self._low = state.get("sample_group_index", self._next)
            self._done.clear()
        if (
            "dataset" in vars(self)
            and self.dataset is not None
            and self._config.data.rollout_shuffle
        ):
            self.dataset.shuffle(self.epoch_id)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """A `RolloutDataSource` whose ``buffer``, the groups that were put back, may be set.

    Attributes:
        buffer_filter: the function that chooses groups from the buffer; may be set.
    """

    @property
    def buffer(self) -> list[list[Sample]]:
        return self._buffer.groups

    @buffer.setter
    def buffer(self, groups: list[list[Sample]]) -> None:
        self._buffer.groups = groups

    @property
    def buffer_filter(self) -> Any:
        return self._buffer.choose

    @buffer_filter.setter
    def buffer_filter(self, function: Any) -> None:
        self._buffer.choose = function

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        groups = self._get_samples_from_buffer(num_samples)
        return groups + [self._draw() for _ in range(num_samples - len(groups))]

    def _get_samples_from_buffer(self, num_samples: int) -> list[list[Sample]]:
        return self._buffer.take(num_samples)

    def update_metadata(self, metadata: dict[str, Any]) -> None:
        self.metadata.update(metadata)

    def get_metadata(self) -> dict[str, Any]:
        return self.metadata

    def get_buffer_length(self) -> int:
        return len(self._buffer)
