"""Every hook, as simple as it can be: each notes in a file of the run that it was called, and does
its work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slime.rollout.generate import generate as built_in
from slime.rollout.loop import generate_rollout
from slime.samples.types import Sample
from slime.user_code.hooks import DynamicFilterOutput
from tests.support.toy import SumSource, digit_share

_FOLDER: list[Path] = []


def note(name: str, args: Any = None) -> None:
    """Hooks that get no ``args`` come after others of their process that do."""
    if args is not None:
        _FOLDER[:] = [Path(args.output_dir) / args.run_name]
    with (_FOLDER[0] / "called").open("a") as file:
        file.write(name + "\n")


def called(folder: Path) -> set[str]:
    return set((folder / "called").read_text().split())


# -- rollout ---------------------------------------------------------------------------------------


class Source(SumSource):
    def __init__(self, args: Any) -> None:
        super().__init__(args)
        note("data_source_path", args)

    def add_samples(self, samples: list[list[Sample]]) -> None:
        """What was not needed is not asked for again."""


def rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    note("rollout_function_path", args)
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)


def evaluation(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    note("eval_function_path", args)
    return generate_rollout(args, rollout_id, data_source, evaluation=evaluation)


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    note("custom_generate_function_path", args)
    return await built_in(args, sample, sampling_params)


def sample_hook(args: Any, sample: Sample) -> None:
    note("rollout_sample_hook_path", args)


def reward(args: Any, sample: Sample, **kwargs: Any) -> float:
    note("custom_rm_path", args)
    return digit_share(args, sample)


def dynamic_filter(args: Any, samples: list[Sample], **kwargs: Any) -> DynamicFilterOutput:
    note("dynamic_sampling_filter_path", args)
    return DynamicFilterOutput(keep=True)


def buffer_filter(
    args: Any, rollout_id: int | None, buffer: list[list[Sample]], num_samples: int
) -> Any:
    note("buffer_filter_path", args)
    return [buffer.pop(0) for _ in range(min(num_samples, len(buffer)))]


def sample_filter(args: Any, groups: list[list[Sample]]) -> None:
    note("rollout_sample_filter_path", args)


def all_samples(args: Any, all_groups: list[list[Sample]], data_source: Any) -> None:
    note("rollout_all_samples_process_path", args)


def rollout_log(
    rollout_id: int, args: Any, samples: list[Sample], extra_metrics: Any, rollout_time: float
) -> bool:
    note("custom_rollout_log_function_path", args)
    return False


def eval_log(rollout_id: int, args: Any, data: dict[str, Any], extra_metrics: Any) -> bool:
    note("custom_eval_rollout_log_function_path", args)
    return False


# -- samples ---------------------------------------------------------------------------------------


def post_process(args: Any, samples: list[Sample]) -> tuple[list[float], list[float]]:
    note("custom_reward_post_process_path", args)
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [reward - mean for reward in raw]


def convert(args: Any, samples: list[Sample]) -> dict[str, list[Any]]:
    note("custom_convert_samples_to_train_data_path", args)
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [sample.get_reward_value(args) for sample in samples],
    }


# -- training --------------------------------------------------------------------------------------


def megatron_init(args: Any) -> None:
    note("custom_megatron_init_path", args)


def model_provider(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    from slime.trainer.megatron.provider import default_model

    note("custom_model_provider_path")
    return default_model(pre_process, post_process, vp_stage)


def before_log_prob(args: Any, model: Any, store_prefix: str) -> None:
    note("custom_megatron_before_log_prob_hook_path", args)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any
) -> None:
    note("custom_megatron_before_train_step_hook_path", args)


def advantage(args: Any, rollout_data: Any) -> None:
    note("custom_advantage_function_path", args)
    pairs = zip(rollout_data["rewards"], rollout_data["loss_masks"])
    rollout_data["advantages"] = [reward * mask for reward, mask in pairs]


def postprocess(args: Any, rollout_id: int, rollout_data: Any) -> None:
    note("rollout_data_postprocess_path", args)


def tis(args: Any, *, pg_loss: Any, loss_masks: Any, **kwargs: Any) -> Any:
    note("custom_tis_function_path", args)
    return pg_loss, loss_masks, {}


def reducer(
    total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool
) -> Any:
    note("custom_pg_loss_reducer_function_path")

    def reduce(loss: Any) -> Any:
        parts = zip(loss.split(list(response_lengths)), loss_masks)
        return sum((part * mask).sum() / mask.sum().clamp(min=1) for part, mask in parts)

    return reduce


def loss(args: Any, batch: Any, logits: Any, sum_of_sample_mean: Any) -> Any:
    import torch

    note("custom_loss_function_path", args)
    log_probs, advantages = torch.cat(batch["current_log_probs"]), torch.cat(batch["advantages"])
    value = -sum_of_sample_mean(log_probs * advantages)
    return value, {"reinforce": value.detach()}
