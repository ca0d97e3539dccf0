"""Can rows be judged that name a reward of their own, or that `slime.rollout.rewards.instructions` is to judge? Asked
before a launch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.legacy_paths import replaced
from slime.prompts.dataset_folders import EVALUATION, TRAINING
from slime.prompts.readers import iter_rows
from slime.prompts.row_format import decoded
from slime.rollout.eval_datasets import eval_datasets
from slime.rollout.rewards.instructions import NAME, OLD_NAME, Task, check_data, check_package, check_task, read_task
from slime.rollout.rewards.pool import check_rm_type


def check_rows(config: Config, max_rows: int) -> None:
    """Look at the first rows of each data file. Where functions of the user's make samples of rows, what those have
    shows when they are judged; where a plugin's function judges them, it knows.

    Raises:
        UserError: as `check_rm_type` of what a row names, `read_task`, `check_task` and `check_data`; or the package is
            missing.
    """
    tasks = list(_tasks(config, max_rows))
    for where, task in tasks:
        try:
            check_task(task)
        except UserError as error:
            raise UserError(f"{where}: {error.what}", error.why, error.fix) from error
    check_data(name for _, task in tasks for name, _ in task)


def _tasks(config: Config, max_rows: int) -> Iterator[tuple[str, Task]]:
    reward, known, is_ours = config.reward, set[str](), replaced(OLD_NAME) is None
    for path, splits, key, injected in _files(config):
        for where, row in itertools.islice(iter_rows(path, splits), max_rows):
            metadata = decoded(row.get(key))
            metadata = injected(metadata if isinstance(metadata, dict) else {})  # others are told with all rows
            own = str(metadata.get("rm_type") or "")
            if own and own not in known:
                _check_own(own, where, config)
                known.add(own)
            if is_ours and (own or reward.rm_type or "").removeprefix("boxed_") == NAME:
                check_package()
                yield where, read_task(metadata, where)


def _check_own(rm_type: str, where: str, config: Config) -> None:
    try:
        check_rm_type(rm_type)
    except UserError as error:
        raise UserError(f"{where}: {error.what}", error.why, error.fix) from error
    if rm_type.removeprefix("boxed_") == "remote_rm" and not config.reward.rm_url:
        raise UserError(f"{where}: its rm_type remote_rm needs an address", fix="pass --rm-url http://host:port/path")


def _files(config: Config) -> Iterator[tuple[str, Sequence[str], str, Callable[[dict[str, Any]], dict[str, Any]]]]:
    """Yield path, preferred splits, column of metadata, and what becomes of it."""
    data, rollout = config.data, config.rollout
    if config.reward.custom_rm_path or rollout.custom_generate_function_path or rollout.rollout_sample_hook_path:
        return
    own = rollout.rollout_function_path or data.data_source_path or config.debug.debug_train_only
    unread = config.algorithm.loss_type == "sft_loss" or rollout.num_rollout == 0
    if data.prompt_data and not own and not unread:
        yield data.prompt_data, TRAINING, data.metadata_key, dict
    for dataset in [] if config.eval.eval_function_path else eval_datasets(config):
        if not (dataset.custom_rm_path or dataset.custom_generate_function_path):
            yield dataset.path, EVALUATION, dataset.metadata_key, dataset.inject_metadata
