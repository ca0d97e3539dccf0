"""`slime plan FLAGS`: the memory of a run and the time of its steps, before anything starts.

slime plan --config my.yaml                    the flags of `slime train`
slime plan train-async --config my.yaml        those of `slime train-async`
slime plan … --gpus 8 64 512                   the fastest ways to use so many GPUs
slime plan … --device A100                     of another kind than this host's
slime plan … --lengths outputs/my-run          responses as long as those of a run
slime plan --calibrate rates.json              measure this host's GPU for two minutes
slime plan … --rates rates.json                and predict with what was measured

A model directory with nothing but config.json will do, and no GPU is needed except to calibrate.
docs/scaling.md says how the time is computed, and how far it is from measurements.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from slime.cli.arguments import Arguments, at_least_one, run_flags
from slime.config.config import Config
from slime.config.make import flags_given, parse_args
from slime.errors import UserError
from slime.forecast.layouts import Plan, best_plans, plan_of
from slime.forecast.lengths import MEAN_SHARE, SIGMA, log_normal, read_lengths
from slime.forecast.rates import DEFAULTS, Rates, default_rates, load_rates, save_rates
from slime.forecast.steps import Workload
from slime.memory.check import refuse
from slime.memory.hardware import device_memory, gpu_name, seen_gpu_memory
from slime.memory.micro_batches import with_token_limit
from slime.memory.plan import MemoryPlan, facts_of, table
from slime.models import family_of
from slime.models.flops import sequence_cost
from slime.models.spec import read_hf_config
from slime.run.preflight import check_layouts, from_the_hub

_ASSUMED = "H200"
_SHOWN = 4
#: Maximum seconds of each of the five measurements of a calibration.
_MEASURED = 15.0
_PROMPT_TOKENS = 256


def main(argv: list[str]) -> int:
    """Print the plan; returns the exit status.

    Raises:
        UserError: the flags are wrong, or the model's family is unknown.
    """
    entry, words = run_flags(argv)
    own, words = _parser().parse_known_args(words)
    if own.calibrate is not None:
        given = (own.device, own.rates, own.lengths, own.gpus, own.prompt_tokens)
        if words or any(given):
            raise UserError(
                "slime plan --calibrate measures, writes its file and ends; other flags would be "
                "ignored",
                fix=f"slime plan --calibrate {own.calibrate}, then slime plan … --rates "
                f"{own.calibrate}",
            )
        from slime.forecast.calibrate import calibrate

        save_rates(calibrate(_MEASURED), own.calibrate)
        print(f"wrote {own.calibrate}; pass it with --rates")
        return 0
    if not words:
        raise UserError("slime plan needs the flags of a run", fix="slime plan --config my.yaml")
    rates = _rates(own)
    if flags_given(words).isdisjoint({"rollout_engine"}):
        words += ["--rollout-engine", "sglang"]  # do not choose the engine by what this host has
    config = parse_args(words, entry)
    if not (Path(str(config.checkpoint.hf_checkpoint)) / "config.json").is_file():
        config = from_the_hub(config)
    for line in report(config, rates, own):
        print(line)
    return 0


def _rates(own: argparse.Namespace) -> Rates:
    """Return the rates of the GPU that the command names, else of this host's GPU.

    Raises:
        UserError: the GPU's rates are unknown, or both --rates and --device are given.
    """
    if own.rates and own.device:
        raise UserError(
            f"--rates {own.rates} and --device {own.device} both say which GPU is planned with",
            fix="pass one of them",
        )
    if own.rates:
        return load_rates(own.rates)
    rates = default_rates(own.device or gpu_name() or _ASSUMED)
    seen = None if own.device else seen_gpu_memory()
    return rates if seen is None else replace(rates, gpu_gb=seen / 1e9)


def _parser() -> Arguments:
    parser = Arguments("slime plan", __doc__)
    add = parser.add_argument
    add("--gpus", type=at_least_one, nargs="+", default=[], help="plan for so many GPUs, too")
    add("--device", help=f"{', '.join(DEFAULTS)}; default: this host's, or {_ASSUMED}")
    add("--rates", type=Path, help="a file that --calibrate wrote")
    add("--calibrate", type=Path, metavar="FILE", help="measure, write, and end")
    add("--lengths", type=Path, help="of responses: a run folder, or a JSON list of tokens")
    add(
        "--prompt-tokens",
        type=at_least_one,
        help=f"of a prompt ({_PROMPT_TOKENS}, or half of a shorter context)",
    )
    return parser


def report(config: Config, rates: Rates, own: argparse.Namespace) -> list[str]:
    """Return the lines of the plan: memory, time per step, and other layouts that are worth
    trying.

    Raises:
        UserError: the layout does not divide the model.
    """
    path = str(config.checkpoint.hf_checkpoint)
    family = family_of(path, config.checkpoint.model_name)
    check_layouts(config, family.model_spec(path))
    device = device_memory(config, seen=rates.gpu_gb * 1e9, on_gpu=True)
    device = replace(device, source=rates.gpu, flash4=rates.flash4)
    gpu_bytes = device.nbytes
    config = with_token_limit(config, device)
    memory = MemoryPlan.of(config, device)
    lines = [table(memory), ""]
    if not memory.fits:
        lines += [str(refuse(memory)), ""]
    facts = facts_of(config, on_gpu=True, flash4=rates.flash4)
    if facts.trainer is None or facts.engine is None or not facts.placement.num_engines:
        return [*lines, "time is predicted for runs that generate and train"]
    cost = sequence_cost(family, read_hf_config(path))
    prompt_tokens = own.prompt_tokens or min(_PROMPT_TOKENS, facts.engine.longest // 2)
    longest = min(config.rollout.rollout_max_response_len, facts.engine.longest - prompt_tokens)
    if longest < 1:
        raise UserError(
            f"--prompt-tokens {prompt_tokens} leaves no room for a response",
            why=f"a sequence has at most {facts.engine.longest} tokens",
        )
    if own.lengths is not None:
        found = read_lengths(own.lengths)
        lengths = [min(longest, length) for length in found]
        told = f"lengths of {own.lengths}"
        if max(found) > longest:
            told += f", cut at the {longest:,} that the flags allow"
    else:
        lengths = log_normal(MEAN_SHARE * longest, longest)
        told = (
            f"lengths are assumed to be log-normal with σ = {SIGMA:g}, their mean at "
            f"{MEAN_SHARE:.0%} of the {longest:,} tokens that the flags allow (--lengths)"
        )
    work = Workload.of(config, lengths, prompt_tokens)
    mean = sum(lengths) / len(lengths)
    now = plan_of(facts, work, cost, rates, gpu_bytes)
    lines += [
        f"rates of one {rates.gpu}: {rates.source}",
        f"responses: {mean:,.0f} tokens on average, {max(lengths):,} at most; {told}",
        "",
        "these flags:",
        *_lines(now),
    ]
    for gpus in own.gpus or [facts.placement.total]:
        plans = best_plans(facts, work, cost, rates, gpus, gpu_bytes)
        many = f"{gpus} GPU{'s' if gpus > 1 else ''}"
        none = f"no layout divides {many} and fits into the memory"
        lines += ["", f"worth trying on {many}:" if plans else none]
        for plan in plans[:_SHOWN]:
            lines += [*_lines(plan), f"    {plan.flags(now, rates.gpus_per_host)}"]
    return lines


def _lines(plan: Plan) -> list[str]:
    phases = ", ".join(f"{name} {took:.1f}" for name, took in plan.phases.items() if took)
    return [
        f"  {plan.seconds:.1f} s a step, {plan.tokens_per_gpu:,.0f} response tokens/s per GPU; "
        f"limited by {plan.limit}",
        f"    {phases}; a rollout takes {plan.generation:.1f} s",
    ]
