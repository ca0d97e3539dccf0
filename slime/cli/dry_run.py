"""``--dry-run``: resolve, plan placement and memory, check, print; start nothing.

Needs no GPU, no torch and no Ray. A model directory that holds only config.json is enough. Missing
files of the model, and what only this machine lacks, are reported but are not errors.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slime.checkpoints.load_plan import LoadPlan, resolve_load
from slime.config.config import Config
from slime.errors import UserError, several
from slime.memory.check import judge
from slime.memory.hardware import device_memory
from slime.memory.micro_batches import packing_line, with_token_limit
from slime.memory.plan import MemoryPlan, table
from slime.placement import PlacementPlan
from slime.prompts.tokenizer import has_tokenizer
from slime.rollout.validate_rows import data_errors
from slime.run import preflight

_WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin")


def dry_run(config: Config) -> None:
    """Print the flags with their origins, the weights, the placement and the memory plan; then run
    every check that is possible here.

    Raises:
        UserError: a check fails that a launch runs too, or the run does not fit into memory.
    """
    config = preflight.from_the_hub(config)
    try:
        load = resolve_load(config)
    except UserError as error:
        others = data_errors(config)
        if not others:
            raise
        raise several([error, *others]) from error
    preflight.check_architecture(config)
    config = with_token_limit(config)
    print(config.describe())
    print(f"weights: {load.note}")
    print(_placement(config))
    print(packing_line(config))
    plan = MemoryPlan.of(config, device_memory(config))
    print(table(plan), flush=True)
    for remark in _checks(config, load):
        print(remark)
    judge(config, plan)
    print("starts nothing: --dry-run")


def _placement(config: Config) -> str:
    plan = PlacementPlan.of(config)
    external = f", {plan.num_external} of others" if plan.num_external else ""
    return (
        f"placement: {plan.formula}; {plan.num_engines} engine(s) of "
        f"{plan.slots_per_engine}{external}"
    )


def _checks(config: Config, load: LoadPlan) -> list[str]:
    """Run the checks of a launch; returns remarks on what only this machine may lack."""
    remarks = []
    folder = Path(str(config.checkpoint.hf_checkpoint))
    if any(any(folder.glob(pattern)) for pattern in _WEIGHT_FILES):
        preflight.check_weights(config, load)
    else:
        remarks.append(
            f"weights are missing: {folder} has a config.json and no *.safetensors; a launch needs "
            "them"
        )
    preflight.check_engine_flags(config)
    preflight.check_flags(config)
    if has_tokenizer(folder):
        preflight.check_data(config)
        preflight.check_teachers(config)
    else:
        remarks.append(f"the tokenizer is missing in {folder}: prompts were not rendered")
        remarks += [f"prompts: {error.in_brief}" for error in data_errors(config)]
    for what, check in (
        ("engines", preflight.check_engine),
        ("external engines", preflight.check_external_engines),
        ("Transformer Engine", preflight.check_transformer_engine),
        ("attention", preflight.check_windows),
        ("GPUs", preflight.check_slots),
    ):
        remarks += _elsewhere(what, check, config)
    return remarks


def _elsewhere(what: str, check: Callable[[Config], None], config: Config) -> list[str]:
    """Run a check of the machine; returns its error as a remark, for the run may use another."""
    try:
        check(config)
    except UserError as error:
        return [f"{what}: not on this machine: {error.in_brief}"]
    return []
