"""Check the model: its directory, weights and tokenizer, and the run's checkpoints."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from slime.checkpoints.load_plan import resolve_load, resolve_reference
from slime.config.config import Config
from slime.diagnosis.check import CheckedRun, CheckFindings, LeftOut
from slime.errors import UserError
from slime.models import family_of, read_hf_config
from slime.prompts.chat_template import warn_of_no_generation_prompt
from slime.prompts.source import is_chat, warn_of_endless_generation
from slime.prompts.tokenizer import end_token_conflicts, generation_config_of, stop_token_report
from slime.rollout.eval_datasets import eval_datasets
from slime.run import preflight
from slime.trainer.quantised_rules import (
    check_ignore_list,
    check_quantised_flags,
    check_quantised_library,
)
from slime.weights.quantised_launch import check_route


def hub(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that models and data sets of the hub are downloaded or can be downloaded."""
    from slime.hub import dataset_name, is_hub_name, is_there

    model = case.run.checkpoint.hf_checkpoint
    data = case.run.data.prompt_data
    sets = case.run.eval.eval_prompt_data
    named = {model: "model"} if model and is_hub_name(model) else {}
    if case.run.eval.eval_config:
        sets = tuple(
            text
            for one in findings.attempt(eval_datasets, case.run) or ()
            for text in (one.name, one.path)
        )
    for path in (data, *sets[1::2]):
        if path and (name := dataset_name(path)):
            named[name] = "dataset"
    if not named:
        raise LeftOut("no flag names anything of the hub")
    for name, kind in named.items():
        is_here = findings.attempt(is_there, name, kind, trouble="hub")
        if is_here:
            findings.note(f"{name} is here")
        elif is_here is False:
            findings.note(f"{name} will be downloaded")
        if not is_here:
            case.names = (*case.names, name)
    if not case.names:
        case.config = preflight.from_the_hub(case.run)


def directory(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that the directory has a config.json of a known model family."""
    path = str(case.model)
    if case.model.is_file():
        raise UserError(
            f"--hf-checkpoint {path} is a file",
            fix=f"pass its folder: --hf-checkpoint {case.model.parent}",
        )
    name = case.run.checkpoint.model_name
    family = family_of(path, name)
    family.model_spec(path)
    findings.note(f"{path}: {family.name}")


def architecture(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that no flag contradicts the model, and that the parallel layout can divide it."""
    findings.attempt(preflight.check_architecture, case.run)
    findings.attempt(preflight.check_context, case.run)


def quantisation(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that engines can load quantised weights as config.json describes them, that the ignore
    list fits the model, and that the required library is installed."""
    findings.attempt(check_route, case.run)
    findings.attempt(check_ignore_list, case.run)
    findings.attempt(check_quantised_flags, case.run)
    findings.attempt(check_quantised_library, case.run)


def checkpoint(case: CheckedRun, findings: CheckFindings) -> None:
    """Check --load, --save and --ref-load, and warn if the run saves nothing."""
    config = case.run
    plan = findings.attempt(resolve_load, config)
    if plan is not None:
        findings.note(plan.note)
    if config.algorithm.needs_reference:
        findings.attempt(resolve_reference, config)
    findings.attempt(preflight.warn_if_nothing_is_kept, config)


def weights(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that every Hugging Face directory that the run reads has all weights of all layers."""
    config = case.run
    try:
        plan = resolve_load(config)
    except UserError:
        # the check of the checkpoint reports it; check the weights that engines serve anyway
        config = replace(
            config, checkpoint=replace(config.checkpoint, load=None, save=None, ckpt_step=None)
        )
        plan = resolve_load(config)
    findings.attempt(preflight.check_weights, config, plan)


def outputs(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that every output can be written."""
    findings.attempt(preflight.check_outputs, case.run)


# -- tokenizer -------------------------------------------------------------------------------------


def tokenizer(case: CheckedRun, findings: CheckFindings) -> None:
    """Check that the tokenizer can be read, that the embedding has rows for its ids, and that a
    stop token ends a turn, with and without the chat template."""
    found = case.tokenizer
    findings.attempt(preflight.check_teachers, case.run)
    rows = read_hf_config(str(case.model)).get("vocab_size")
    ids = max(found.get_vocab().values(), default=-1) + 1
    findings.note(f"{ids} tokens, vocab_size {rows}")
    if isinstance(rows, int) and ids > rows:
        detail = f"the tokenizer has ids up to {ids - 1}, and config.json a vocab_size of {rows}"
        findings.add("vocabulary", detail, source=str(case.model), is_fatal=False)
    for line in end_token_conflicts(found, str(case.model)):
        findings.add("end-tokens-differ", line, is_fatal=False)
    try:
        in_turns = is_chat(case.run, found)
    except UserError:
        return  # the check of the data reports it
    findings.attempt(warn_of_endless_generation, case.run, found)
    if in_turns and not case.run.algorithm.trains_on_data:
        kwargs = case.run.data.apply_chat_template_kwargs
        findings.attempt(partial(warn_of_no_generation_prompt, **kwargs), found)
    if not in_turns:
        other = findings.attempt(_report, case.run, found)
        findings.note(
            f"with --apply-chat-template: {other[0]}" if other else "without --apply-chat-template"
        )


def _report(config: Config, tokenizer: Any) -> list[str]:
    rollout = config.rollout
    model = str(config.checkpoint.hf_checkpoint)
    return stop_token_report(
        tokenizer, generation_config_of(model), rollout.rollout_stop_token_ids, rollout.rollout_stop
    )
