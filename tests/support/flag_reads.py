"""Launches in which every process writes down which flags it reads, and what must be read there by
the declarations."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime.config import Config, parse_args
from slime.config.engine_flags import to_argv
from slime.config.flag import FlagSpec, Part
from slime.config.flags import all_flags
from slime.config.parts import absent
from slime.errors import UserError
from slime.samples.types import Sample
from tests.support.declarations import (
    DRIVES,
    WORKING,
    acts_for,
    files_that_read,
    is_within,
    names_of,
    other_than_default,
    values_of,
)
from tests.support.declarations import ROOT as SOURCES
from tests.support.processes import ROOT, World, start
from tests.support.sglang_servers import FAKE

RECORDER = Path(__file__).parent / "recorded_reads"

#: The parts that each process has. The driver places and orders engines, and a push.
PARTS: dict[str, tuple[Part, ...]] = {
    "driver": ("driver", "engine", "router", "push"),
    "ray::RolloutActor": ("collection", "generation", "samples"),
    "ray::TrainerActor": ("trainer", "training", "push"),
    "ray::CriticTrainerActor": ("trainer", "training"),
    "ray::EngineActor": ("engine", "router"),
}


# -- launches --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launch:
    """A toy run: its flags beside those of `World`, less some; after ``after``, whose files it goes
    on with.

    In ``flags``, {inputs} is the folder of model and data, {outputs} that of run folders.
    """

    flags: str
    entry: str = "train"
    without: str = ""
    after: str = ""

    def words(self, world: World, name: str) -> list[str]:
        folders = {"{inputs}": world.inputs, "{outputs}": world.outputs}
        words = self.flags.split()
        for mark, folder in folders.items():
            words = [word.replace(mark, str(folder)) for word in words]
        return world.flags(name, *words, without=self.without)

    def config(self, world: World, name: str, *more: str) -> Config:
        return parse_args([*self.words(world, name), *more], self.entry)


#: What asks for samples, which a run on preferences does not draw.
_OF_SAMPLES = "--label-key --rollout-max-response-len --n-samples-per-prompt --custom-rm-path"

LAUNCHES = {
    "sync": Launch(
        "--eval-prompt-data held {inputs}/test.jsonl@[0:2] --eval-interval 1 --save "
        "{outputs}/sync/checkpoints"
        " --save-debug-rollout-data {outputs}/sync/dumps/{rollout_id}.pt --balance-by-flops "
        "--rollout-max-prompt-len 40"
        " --custom-generate-function-path tests.support.flag_reads.before_agents"
        " --custom-rm-path tests.support.flag_reads.reward --reward-key share --log-passrate "
        "--log-multi-turn"
        " --rollout-data-postprocess-path tests.support.flag_reads.poison "
        "--no-check-for-nan-in-loss-and-grad"
        " --use-kl-loss --kl-loss-coef 0.01 --kl-loss-type k2 --ref-load {inputs}/model --use-tis "
        "--tis-clip 3"
        " --use-opsm --entropy-coef 0.01 --eps-clip 0.3 --rollout-temperature 0.9 --rollout-top-k "
        "8 --use-sampling-mask --eval-top-p 0.9 --advantage-estimator dr_grpo"
        " --overlong-buffer-len 3 --overlong-penalty-factor 0.5 --save-interval 1"
        " --tis-level geometric --use-rs --rs-level sequence "
        "--rs-lower-bound 1e-3 --rs-upper-bound 900 --rs-veto-threshold 1e-6"
        " --lr 1e-4 --lr-decay-style cosine --min-lr 1e-5 --lr-warmup-iters 1 --weight-decay 0.1 "
        "--seed 7",
        without="--rollout-max-context-len",
    ),
    "async": Launch(
        "--no-colocate --load {outputs}/sync/checkpoints --finetune --save "
        "{outputs}/async/checkpoints --async-save"
        " --max-restarts 1 --update-weight-transport disk --update-weight-disk-dir "
        "{outputs}/async/push"
        " --update-weights-in-flight --max-staleness 1 --stale-samples drop --use-fault-tolerance "
        "--partial-rollout"
        " --use-tis --custom-tis-function-path tests.support.every_hook.tis --tis-clip-low 0.1"
        " --dynamic-sampling-filter-path tests.support.every_hook.dynamic_filter "
        "--over-sampling-batch-size 4"
        " --use-wandb --wandb-mode offline --wandb-group reads --profile-steps 0:1"
        " --record-memory-history --memory-snapshot-num-steps 1 "
        "--memory-snapshot-dir {outputs}/async",
        entry="train_async",
        after="sync",
    ),
    "turns": Launch(
        "--rollout-engine sglang --no-fp32 --load {outputs}/sync/checkpoints --ckpt-step 0 "
        "--no-load-optim"
        " --no-use-dynamic-batch-size --rm-type random --n-samples-per-prompt 4 "
        "--global-batch-size 8 --advantage-estimator sapo --sapo-tau-pos 1.1 --sapo-tau-neg 1.2",
        without="--max-tokens-per-gpu",
        after="sync",
    ),
    "samples": Launch(
        "--no-colocate --load-debug-rollout-data {outputs}/sync/dumps/{rollout_id}.pt --optimizer "
        "sgd"
        " --reward-key share --rollout-temperature 0.9 --log-passrate"
        " --load-debug-rollout-data-subsample 0.5 --advantage-estimator reinforce_plus_plus "
        "--normalize-advantages",
        after="sync",
    ),
    "adapters": Launch(
        "--lora-rank 4 --lora-alpha 8 --lora-target-modules q_proj k_proj v_proj "
        "--lora-exclude-modules k_proj --lora-dropout 0.1"
    ),
    "critic": Launch(
        "--advantage-estimator ppo --critic-load {inputs}/model --critic-lr 1e-3 "
        "--critic-lr-warmup-iters 1 --num-critic-only-steps 1 --lambd 0.95 --critic-lambd 0.9 "
        "--value-clip 0.3 --normalize-values"
    ),
    "critic-apart": Launch(
        "--advantage-estimator ppo --critic-num-nodes 1 --critic-num-gpus-per-node 2 "
        "--critic-tensor-model-parallel-size 2 --critic-sequence-parallel "
        "--critic-pipeline-model-parallel-size 1 --critic-context-parallel-size 1 "
        "--critic-expert-model-parallel-size 1 --critic-expert-tensor-parallel-size 1"
    ),
    "distillation": Launch(
        "--use-opd --opd-teacher-load near={outputs}/sync/checkpoints far=self "
        "--opd-teacher-ckpt-step 1 --opd-loss jsd --opd-jsd-beta 0.3 --opd-top-k 4 "
        "--opd-kl-coef 0.5 --opd-teacher-key kind --opd-teacher-prompt-key hint "
        "--custom-generate-function-path tests.support.flag_reads.taught",
        after="sync",
    ),
    "pairs": Launch(
        "--loss-type preference_loss --preference-loss simpo --chosen-key better "
        "--rejected-key worse --preference-beta 1.5 --preference-label-smoothing 0.1 "
        "--preference-sft-coef 0.2 --simpo-gamma 0.4 --prompt-data {inputs}/preferences.jsonl "
        "--eval-preference-data {inputs}/preferences.jsonl --eval-interval 1",
        without=_OF_SAMPLES,
    ),
    "labels": Launch(
        "--loss-type preference_loss --preference-loss kto --completion-key answer "
        "--label-key right --kto-desirable-weight 1.5 --kto-undesirable-weight 0.5 "
        "--prompt-data {inputs}/preferences.jsonl",
        without=_OF_SAMPLES,
    ),
    "reward model": Launch(
        "--loss-type preference_loss --preference-loss reward_model --chosen-key better "
        "--rejected-key worse --reward-center-coef 0.1 --prompt-data {inputs}/preferences.jsonl",
        without=_OF_SAMPLES,
    ),
    "teachers": Launch(
        "--use-opd --opd-teacher-urls near=teacher --opd-teacher-key kind "
        "--sglang-config tests/support/teacher_groups.yaml --rollout-num-gpus 2 --no-colocate",
    ),
}


async def before_agents(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The built-in generation, while an endpoint for agents is open."""
    from slime.agents.endpoint import agent_endpoint
    from slime.rollout.generate import generate

    async with agent_endpoint(args, sample, sampling_params):
        return await generate(args, sample, sampling_params)


async def taught(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The built-in generation, of rows that name a teacher."""
    from slime.rollout.generate import generate

    sample.metadata |= {"kind": "near", "hint": "3 + 4"}
    return await generate(args, sample, sampling_params)


def reward(args: Any, sample: Sample, **_: Any) -> dict[str, float]:
    return {"share": sum(token % 7 == 0 for token in sample.tokens) / len(sample.tokens)}


def poison(args: Any, rollout_id: int, rollout_data: Any) -> None:
    """The second step's loss overflows."""
    for values in rollout_data["advantages"] if rollout_id else ():
        values.fill_(3e38)


# -- what was read ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Read:
    """Of one flag, or of a dict of Megatron's flags.

    Attributes:
        file: below slime/.
        owner, name: the group, or "args", and the attribute.
        by_name: through `getattr`, which loops over names use too.
    """

    process: str
    file: str
    owner: str
    name: str
    by_name: bool

    @property
    def spec(self) -> FlagSpec | None:
        return next(
            (spec for spec in WORKING.values() if (self.owner, self.name) in names_of(spec)), None
        )


def recorded(world: World, name: str) -> list[Read]:
    """The reads of a launch, which must end well."""
    launch, reads = LAUNCHES[name], world.outputs / f"{name}.reads"
    reads.mkdir(parents=True)
    path = os.pathsep.join(map(str, (RECORDER, FAKE, ROOT)))
    environment = {"PYTHONPATH": path, "FAKE_SGLANG_CALLS": str(reads.with_suffix(".calls"))}
    words, script = launch.words(world, name), f"{launch.entry}.py"
    with start(
        words, world.outputs / name, script, SLIME_TEST_READS=str(reads), **environment
    ) as driver:
        assert driver.end() == 0, driver.stderr
    return [
        Read(
            "driver" if Path(row["process"]).name == script else row["process"],
            file_of(row["module"]), row["owner"], row["name"], row["by_name"],
        )
        for row in rows_of(reads)
    ]  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What the processes of a launch wrote down."""
    return [json.loads(line) for file in folder.iterdir() for line in file.read_text().splitlines()]


def file_of(module: str) -> str:
    path = module.removeprefix("slime.").replace(".", "/")
    return f"{path}.py" if (SOURCES / f"{path}.py").exists() else f"{path}/__init__.py"


def served(reads: list[Read]) -> set[tuple[str, Part]]:
    """(flag, part) where a process that has the part read the flag for it."""
    found = set()
    for read in reads:
        spec = read.spec
        if spec is None or (read.by_name and read.file not in files_that_read(spec)):
            continue
        found |= {(spec.dest, part) for part in spec.meta.read_by if is_of(read, part)}
    return found


def is_of(read: Read, part: Part) -> bool:
    if part == "driver":
        return read.process == "driver"
    orders = read.process == "driver" and (read.file in DRIVES or is_within(read.file, "cluster"))
    return acts_for(read.file, part) and (orders or part in PARTS[read.process])


def unclaimed(reads: list[Read]) -> set[str]:
    """ "flag: file" of what was read where the syntax tree shows no read."""
    return {
        f"{read.spec.dest}: {read.file}"
        for read in reads
        if read.spec is not None
        and not read.by_name
        and read.file not in files_that_read(read.spec)
    }


# -- what must be read -----------------------------------------------------------------------------


def must_serve(config: Config) -> Iterator[tuple[str, Part]]:
    """(flag, part) of what a run of this configuration must read: what the flag needs holds, the
    part is there, and a file that reads the flag for the part is not of the other engine."""
    values = values_of(config.values())
    others = [
        f"engines/{engine}"
        for engine in ("embedded", "sglang")
        if engine != config.engine.rollout_engine
    ]
    for dest, spec in WORKING.items():
        if "config" in spec.meta.read_by or not all(need.holds(values) for need in spec.meta.needs):
            continue
        files = [
            file
            for file in files_that_read(spec)
            if not any(is_within(file, other) for other in others)
        ]
        for part in set(spec.meta.read_by) - set(absent(values)):
            if any(acts_for(file, part) for file in files):
                yield dest, part


def left_out(config: Config) -> set[str]:
    """The flags that were given and, as the configuration says, do nothing in this run."""
    said = [
        warning.split("; left out: ")[1] for warning in config.warnings if "; left out: " in warning
    ]
    return {dest for dest, spec in WORKING.items() if spec.option in ", ".join(said).split(", ")}


def is_warned_of(world: World, name: str, dest: str) -> bool:
    """Whether a launch says that a flag would do nothing in it."""
    spec = all_flags()[dest]
    try:
        config = LAUNCHES[name].config(world, name, *to_argv({dest: other_than_default(spec)}))
    except UserError:  # it does not go with the others
        return False
    return any(warning.startswith(f"{spec.option} has no effect") for warning in config.warnings)
