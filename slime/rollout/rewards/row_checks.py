"""Check rows before a launch: does their reward exist, can it grade the label, can it read the
instructions?"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.config.config import Config
from slime.errors import UserError
from slime.prompts.labels import compares_labels
from slime.prompts.problems import NEVER, RowProblem, remark
from slime.prompts.row_format import Prompt
from slime.rollout.eval_datasets import EvalDataset
from slime.rollout.rewards.instructions import (
    NAME,
    check_data,
    check_package,
    check_task,
    read_task,
)
from slime.rollout.rewards.labels import UNMARKED, check_label, doubt_label
from slime.rollout.rewards.pool import check_rm_type
from slime.user_code.overrides import override_of

#: What stands before an answer.
_ANSWER = r"(?:####|\\boxed\{|[Aa]nswer(?: is)?[:\s])\s*\$?"
#: If at least this share of rows have such labels, the column is wrong.
_WRONG_COLUMN = 0.5


@dataclass
class RewardJudge:
    """Checks that the built-in rewards can judge rows (a `slime.prompts.prepare.RowJudge`).

    Args:
        rm_type: the reward of rows whose metadata names none.
        rm_url: address of ``remote_rm``.
        label_flag: names the column of labels, for messages.
        inject: adds the data set's metadata to a row's.
    """

    rm_type: str | None
    rm_url: str | None = None
    label_flag: str = "--label-key"
    inject: Callable[[dict[str, Any]], dict[str, Any]] = dict
    _known: dict[str, RowProblem | None] = field(default_factory=dict)
    """Rewards that rows name, or instructions that need NLTK data → the problem, if any."""

    @staticmethod
    def of_training(config: Config) -> RewardJudge | None:
        """Return the check of --prompt-data; None if user functions, or nothing, judge its rows."""
        rollout = config.rollout
        data = config.data
        own = (
            rollout.rollout_function_path or data.data_source_path or config.debug.debug_train_only
        )
        unread = config.algorithm.trains_on_data or rollout.num_rollout == 0
        if own or unread or _makes_samples(config):
            return None
        rm_type = config.reward.rm_type
        if compares_labels(rm_type) and data.label_key is None:
            rm_type = None  # rewards may be missing, or `check_label_key` refuses the launch
        return RewardJudge(rm_type, config.reward.rm_url)

    @staticmethod
    def of_evaluation(dataset: EvalDataset, config: Config) -> RewardJudge | None:
        """Return the check of an evaluation set; None as in `of_training`."""
        own = dataset.custom_rm_path or dataset.custom_generate_function_path
        if own or _makes_samples(config):
            return None
        return RewardJudge(
            config.reward.rm_type, config.reward.rm_url, "--eval-label-key", dataset.inject_metadata
        )

    def __call__(self, prompts: Sequence[Prompt]) -> list[list[RowProblem]]:
        problems = (self._problem(prompt) for prompt in prompts)
        return [[] if problem is None else [problem] for problem in problems]

    def _problem(self, prompt: Prompt) -> RowProblem | None:
        metadata = self.inject(prompt.metadata)
        own = str(metadata.get("rm_type") or "")
        if own and (problem := self._once(own, lambda: self._check_named(own))):
            return problem
        rm_type = own or self.rm_type or ""
        if rm_type.removeprefix("boxed_") != NAME:
            reason = check_label(rm_type, prompt.label, metadata)
            if reason is None:
                return self._doubt(rm_type, prompt.label) or self._told_in(rm_type, prompt)
            return RowProblem(
                f"have a label that --rm-type {rm_type} cannot grade",
                f"the label {reason}",
                f"correct or remove these rows, or name another column ({self.label_flag})",
            )
        if override_of("grade_ifbench") is not None:
            return None
        try:
            check_package()
            task = read_task(metadata, "the first")
            check_task(task)
        except UserError as error:
            return RowProblem("have instructions that cannot be judged", error.in_brief, error.fix)
        names = sorted({name for name, _ in task})
        return self._once("\n".join(names), lambda: check_data(names))

    def _doubt(self, rm_type: str, label: Any) -> RowProblem | None:
        doubt = doubt_label(rm_type, label)
        if doubt is None:
            return None
        kind, why = doubt
        fix = (
            f"if that is not meant, correct these rows, or name another column ({self.label_flag})"
        )
        return RowProblem(
            kind, f"the label {why}", fix, refuse_at=_WRONG_COLUMN if kind == UNMARKED else NEVER
        )

    def _told_in(self, rm_type: str, prompt: Prompt) -> RowProblem | None:
        """Return the problem of a prompt that has its own label as text, or ends with it."""
        last = prompt.bare[-1] if isinstance(prompt.bare, list) else {"content": prompt.bare}
        asked = "" if last.get("role") == "assistant" else str(last["content"]).strip()
        label = str(prompt.label).strip()
        if not compares_labels(rm_type) or not asked or not label:
            return None
        if asked == label:
            return remark(
                "have their prompt as the label",
                f"the first: {label!r:.80}",
                f"name the column of the right answers ({self.label_flag})",
            )
        is_last = asked.rstrip(" \n.$}").endswith(label)
        if is_last and re.search(
            rf"{_ANSWER}{re.escape(label)}[\s.$}}]*$", asked[-len(label) - 80 :]
        ):
            return remark(
                "have a prompt that ends with its own answer",
                f"the first ends with {asked[-80:]!r}",
                "take the answer out of the prompt",
            )
        return None

    def _check_named(self, rm_type: str) -> None:
        check_rm_type(rm_type)
        if rm_type.removeprefix("boxed_") == "remote_rm" and not self.rm_url:
            raise UserError(
                "the rm_type remote_rm needs an address", fix="pass --rm-url http://host:port/path"
            )

    def _once(self, key: str, check: Callable[[], None]) -> RowProblem | None:
        if key not in self._known:
            self._known[key] = None
            try:
                check()
            except UserError as error:
                self._known[key] = RowProblem(
                    "name a reward that cannot judge them", error.in_brief, error.fix
                )
        return self._known[key]


def _makes_samples(config: Config) -> bool:
    """Tell whether user functions turn rows into samples or judge them, so rows cannot be checked
    alone."""
    rollout = config.rollout
    return bool(
        config.reward.custom_rm_path
        or rollout.custom_generate_function_path
        or rollout.rollout_sample_hook_path
    )
