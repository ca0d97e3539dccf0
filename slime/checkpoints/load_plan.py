"""Decide where a run's weights come from, before anything starts. Imports no torch.

--load / --save / --ref-load / --ckpt-step / --hf-checkpoint  ─► resolve_load ─► LoadPlan
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slime.checkpoints.directory import (
    RELEASE,
    TRACKER,
    Damage,
    check_complete,
    check_tracker,
    find_whole,
    has_checkpoints,
    is_leftover,
    iteration_dir,
    iteration_name,
    read_manifest,
    read_tracker,
    saved_iterations,
)
from slime.config.config import Config
from slime.config.teachers import Teacher
from slime.errors import UserError, a_type, contents_of
from slime.files import read_plain
from slime.models.peft_config import is_adapter_dir


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """The weights to load and the rollout to start from.

    Attributes:
        kind: "megatron" (a checkpoint of slime or of Megatron-LM) or "hf" (a Hugging Face
            directory).
        path: the iteration's directory, or the Hugging Face directory.
        iteration: the rollout after which the checkpoint was saved; None if only weights are
            loaded.
        start_rollout_id: the next rollout.
        load_optimizer, load_rng: whether the optimizer and the random states are loaded.
        is_resume: the run resumes in its own --save directory.
        note: one line for the log: what is loaded and why.
        damaged: for a resumed run, damaged iterations that take precedence over ``iteration``.
        is_foreign: another program wrote the checkpoint, so its files cannot be verified.
    """

    kind: Literal["megatron", "hf"]
    path: Path
    iteration: int | None = None
    start_rollout_id: int = 0
    load_optimizer: bool = False
    load_rng: bool = False
    is_resume: bool = False
    note: str
    damaged: tuple[Damage, ...] = ()

    @property
    def is_foreign(self) -> bool:
        return self.kind == "megatron" and read_manifest(self.path) is None


def resolve_load(config: Config, corrupt: Sequence[Damage] = ()) -> LoadPlan:
    """Decide on the actor's weights.

    * ``--load`` equal to ``--save`` with nothing saved yet: fresh start from ``--ref-load`` or
      ``--hf-checkpoint``.
    * ``--load`` equal to ``--save``: the newest intact checkpoint. Damaged ones are not renamed
      here (`agreed_plan` does that).
    * ``--load`` with another Megatron checkpoint, or ``--ckpt-step``: that iteration, or the
      latest.
    * ``--load`` with a Hugging Face directory, or no ``--load``: a fresh start from it.

    Args:
        corrupt: iterations that are known to be corrupt, for a resumed run.
    Raises:
        UserError: --load has nothing to load (names the directory's contents and the flags), or
            --save has another run's checkpoints.
    """
    flags = config.checkpoint
    step = flags.ckpt_step
    resumable = loads_from_save(config)
    root = None if flags.load is None else Path(flags.load)
    if root is not None and not resumable and not root.exists():
        raise _no_weights_error(root, "--load")
    if not resumable and flags.save is not None:
        _refuse_foreign_save(Path(flags.save), config)
    if root is None:
        return _plan_fresh_start(config, "no --load")
    if resumable and step is None and has_checkpoints(root):
        return _plan_resume(config, root, corrupt)
    if resumable and step is None and not _looks_like_checkpoint(root):
        return _plan_fresh_start(config, f"nothing saved yet in {root} (--load is --save)")
    tracked = read_tracker(root)
    if tracked is not None or (step is not None and saved_iterations(root)):
        path, iteration = _pick_iteration(root, tracked, step, "--ckpt-step")
        return _plan_megatron(config, path, iteration, resumable)
    if is_hf_dir(root):
        _refuse_step(root, step, "--ckpt-step")
        start = config.rollout.start_rollout_id
        return _plan_weights_only("hf", root, f"Hugging Face weights from {root}", start)
    raise _no_weights_error(root, "--load")


def loads_from_save(config: Config) -> bool:
    """Tell whether --load and --save are one directory: the same command is repeated until the run
    is done, whether or not something was saved yet."""
    flags = config.checkpoint
    if flags.load is None or flags.save is None:
        return False
    return Path(flags.load).resolve() == Path(flags.save).resolve()


def check_length(config: Config, plan: LoadPlan) -> None:
    """Refuse to load a checkpoint beyond the end of the run. A checkpoint exactly at the end is
    accepted, as the run may have been killed while it ended.

    Raises:
        UserError: the checkpoint is beyond the end, so nothing would be trained.
    """
    done = plan.start_rollout_id
    length = config.rollout.num_rollout
    if length and plan.iteration is not None and done > length:
        raise UserError(
            f"--num-rollout {length} is too short: {done} rollouts are trained on already",
            why=f"the flag is the length of the whole run; {plan.note}",
            fix=f"pass --num-rollout {done + length} for {length} more, or another --load or "
            "--ckpt-step",
        )


def config_for_resume(config: Config) -> Config:
    """Return the configuration with which a run resumes from its newest checkpoint, without the
    flags for the start of its first launch. Before the first checkpoint it is unchanged.

    Raises:
        UserError: the run saves no checkpoints.
    """
    flags = config.checkpoint
    if flags.save is None:
        raise UserError(
            "the run cannot be resumed: it saves no checkpoints",
            why="it was started without --save",
            fix="start the run again with --save {run}/checkpoints",
        )
    if not has_checkpoints(Path(flags.save)):
        return config
    own = replace(
        flags,
        load=flags.save,
        ckpt_step=None,
        finetune=False,
        no_load_optim=False,
        no_load_rng=False,
    )
    return replace(config, checkpoint=own, rollout=replace(config.rollout, start_rollout_id=None))


def resolve_reference(config: Config) -> LoadPlan:
    """Decide on the reference model's weights: --ref-load (either kind), else --hf-checkpoint.

    Raises:
        UserError: as `resolve_load`.
    """
    if _initial_weights(config) is None:
        raise UserError(
            "no weights for the reference model", fix="pass --ref-load or --hf-checkpoint"
        )
    return _plan_initial_weights(config, "reference model from")


def reference_adapter(config: Config) -> Path | None:
    """Return the PEFT adapter at --ref-load, with which --hf-checkpoint is the reference model.
    None for any other reference model.

    Raises:
        UserError: the run trains no adapters or needs no reference model, or --ref-ckpt-step is
            given.
    """
    given = _own_reference(config)
    if given is None or not is_adapter_dir(given):
        return None
    path = Path(given)
    if not config.lora.lora_rank:
        raise UserError(
            f"--ref-load {path} is an adapter, and this run trains a whole model",
            why="only a policy with adapters (--lora-rank) can use another adapter as reference",
            fix="merge the adapter (slime export --merge), and pass the merged model",
        )
    if not config.algorithm.needs_reference:
        raise UserError(
            f"--ref-load {path} has no effect",
            why="it is an adapter of the reference model, which no KL term uses",
            fix="leave it out, or add --use-kl-loss; --lora-adapter-path starts from an adapter",
        )
    _refuse_step(path, config.checkpoint.ref_ckpt_step, "--ref-ckpt-step", "a PEFT adapter")
    return path


def unused_reference(config: Config) -> str:
    """Return the warning that nothing reads --ref-load; else "". It names the reference model, the
    base of adapters, and where training starts without another --load."""
    flags = config.checkpoint
    given = _own_reference(config)
    if given is None or config.algorithm.needs_reference or config.lora.lora_rank:
        return ""
    if flags.load is None or loads_from_save(config):
        return ""
    return (
        f"--ref-load {given} has no effect: training starts from --load {flags.load}, and neither "
        "the loss nor the reward compares with a reference model"
    )


def unused_schedule(config: Config, plan: LoadPlan) -> str:
    """Return the warning that there are no settings of a schedule to take from the checkpoint;
    else "". A first start of a run that resumes from its own checkpoints has none yet."""
    is_asked = config.megatron.use_checkpoint_opt_param_scheduler
    is_first_start = loads_from_save(config) and plan.iteration is None
    if not is_asked or plan.load_optimizer or is_first_start:
        return ""
    return (
        "--use-checkpoint-opt-param-scheduler has no effect: the settings come with the state of "
        f"the optimizer, which is not loaded ({plan.note})"
    )


def resolve_critic(config: Config, plan: LoadPlan) -> LoadPlan:
    """Decide on the initial weights of a new critic: --critic-load, else the policy's.

    Args:
        plan: the policy's plan.
    Raises:
        UserError: as `resolve_load`.
    """
    given = config.critic.critic_load
    if given is None:
        if config.lora.lora_rank:  # the policy's checkpoint may hold only its adapters
            return _plan_initial_weights(config, "starts from")
        return _plan_weights_only(plan.kind, plan.path, f"starts from {plan.path}", None)
    return _plan_either_kind("--critic-load", Path(given), "--critic-load", None, "starts from")


def base_of_critic(config: Config, recorded: str | None) -> LoadPlan:
    """Return the plan of the frozen weights beside a saved critic's adapters.

    Args:
        recorded: the path in the checkpoint; None: the policy's base.
    Raises:
        UserError: they are no longer there.
    """
    if recorded is None:
        return _plan_initial_weights(config, "critic: frozen layers from")
    path = Path(recorded)
    if not path.is_dir():
        raise UserError(
            f"the frozen layers of the critic are missing: {path} is not a directory",
            why="checkpoints hold the critic's adapters and head, and name the --critic-load "
            "beside whose weights they were trained",
            fix="put it back, or start another run, with another --critic-load",
        )
    kind: Literal["megatron", "hf"] = "hf" if is_hf_dir(path) else "megatron"
    return _plan_weights_only(kind, path, f"critic: frozen layers from {path}", None)


def resolve_teacher(config: Config, teacher: Teacher) -> LoadPlan:
    """Decide on the weights of a teacher in the trainer, of either kind.

    Raises:
        UserError: as `resolve_load`.
    """
    return _plan_either_kind(
        "--opd-teacher-load",
        Path(teacher.source),
        "--opd-teacher-ckpt-step",
        config.distillation.opd_teacher_ckpt_step,
        f"teacher {teacher.name} from",
    )


def is_hf_dir(path: Path) -> bool:
    """Tell whether the directory has a config.json of a Hugging Face model: with a model_type or
    architectures."""
    try:
        data = json.loads(read_plain(path / "config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and ("model_type" in data or "architectures" in data)


def _plan_fresh_start(config: Config, reason: str) -> LoadPlan:
    if _initial_weights(config) is None:
        raise UserError(
            "no weights to start from",
            why=reason,
            fix="pass --hf-checkpoint, or --load with a checkpoint",
        )
    return _plan_initial_weights(
        config, f"{reason}: fresh start from", start=config.rollout.start_rollout_id
    )


def _initial_weights(config: Config) -> tuple[str, str] | None:
    """Return (flag, value) of the weights of the reference model, with which a fresh start begins
    too."""
    own = None if reference_adapter(config) else _own_reference(config)
    given = {"--ref-load": own, "--hf-checkpoint": config.checkpoint.hf_checkpoint}
    return next(((flag, path) for flag, path in given.items() if path), None)


def _own_reference(config: Config) -> str | None:
    """Return the value of --ref-load, if the user gave one."""
    derived = config.origins["ref_load"].startswith("derived")
    return None if derived else config.checkpoint.ref_load


def _plan_initial_weights(config: Config, note: str, start: int | None = None) -> LoadPlan:
    """Return the plan of initial weights, of either kind; the path is appended to ``note``."""
    named = _initial_weights(config)
    assert named is not None
    flag, root = named
    step = config.checkpoint.ref_ckpt_step
    return _plan_either_kind(flag, Path(root), "--ref-ckpt-step", step, note, start)


def _plan_either_kind(
    flag: str, root: Path, step_flag: str, step: int | None, note: str, start: int | None = None
) -> LoadPlan:
    """Return the plan of weights in the directory of ``flag``, at iteration ``step``."""
    tracked = read_tracker(root)
    if tracked is not None or (step is not None and saved_iterations(root)):
        path, _ = _pick_iteration(root, tracked, step, step_flag)
        return _plan_weights_only("megatron", path, f"{note} {path}", start)
    if is_hf_dir(root):
        _refuse_step(root, step, step_flag)
        return _plan_weights_only("hf", root, f"{note} {root}", start)
    raise _no_weights_error(root, flag)


def _refuse_step(
    root: Path, step: int | None, flag: str, kind: str = "a Hugging Face directory"
) -> None:
    """Refuse a flag for an iteration if the directory has only one state of the weights."""
    if step is not None:
        raise UserError(
            f"{flag} {step} cannot be found: {root} is {kind}",
            why="the directory has no iterations of a Megatron checkpoint (iter_…)",
            fix=f"leave {flag} out, or pass the --save directory of a run",
        )


def _plan_weights_only(
    kind: Literal["megatron", "hf"], path: Path, note: str, start: int | None
) -> LoadPlan:
    return LoadPlan(kind=kind, path=path, start_rollout_id=start or 0, note=note)


def _plan_resume(config: Config, root: Path, corrupt: Sequence[Damage]) -> LoadPlan:
    """Return the plan of a run that resumes from its own checkpoints."""
    check_tracker(root)
    found, damaged = find_whole(root, corrupt)
    if found is None:
        raise UserError(
            f"no checkpoint in {root} is whole",
            why="; ".join(f"{iteration_name(damage.iteration)}: {damage.why}" for damage in damaged)
            or f"{root / TRACKER} exists, but no iteration",
            fix=f"move {root} away to start over from the weights that config.json of the run "
            "names (load, ref_load, hf_checkpoint); samples in the journal are not generated again",
        )
    plan = _plan_megatron(
        config, iteration_dir(root, found), None if found == RELEASE else int(found), True
    )
    skipped = "".join(
        f"; {iteration_name(damage.iteration)} is skipped: {damage.why}" for damage in damaged
    )
    return replace(plan, note=plan.note + skipped, damaged=tuple(damaged))


def _plan_megatron(config: Config, path: Path, iteration: int | None, resumable: bool) -> LoadPlan:
    flags = config.checkpoint
    start = config.rollout.start_rollout_id
    if iteration is None or flags.finetune:
        why = "--finetune" if flags.finetune else "converted weights"
        note = f"weights from {path} ({why}): starts at rollout {start or 0}"
        return _plan_weights_only("megatron", path, note, start)
    start = iteration + 1 if start is None else start
    return LoadPlan(
        kind="megatron",
        path=path,
        iteration=iteration,
        start_rollout_id=start,
        load_optimizer=not flags.no_load_optim,
        load_rng=not flags.no_load_rng,
        is_resume=resumable,
        note=f"{'resuming' if resumable else 'continuing'} from {path}: next rollout is {start}",
    )


def _pick_iteration(
    root: Path, tracked: int | str | None, step: int | None, flag: str
) -> tuple[Path, int | None]:
    """Return the directory of the requested iteration, checked to be complete, and the iteration
    (None for converted weights)."""
    wanted = step if step is not None else tracked
    assert wanted is not None
    path = iteration_dir(root, wanted)
    if not path.is_dir():
        saved = saved_iterations(root)
        asked = f"asked for by {flag}" if step is not None else f"named in {root / TRACKER}"
        raise UserError(
            f"{root} has no checkpoint of iteration {wanted}",
            why=f"{asked}; the iterations there: {', '.join(map(str, saved)) or 'none'}",
            fix=f"pass {flag} with one of them" if saved else "pass --load with another directory",
        )
    check_complete(path)
    return path, None if wanted == RELEASE else int(wanted)


def _refuse_foreign_save(root: Path, config: Config) -> None:
    """Refuse a --save directory with another run's checkpoints, if the run does not resume."""
    saved = saved_iterations(root)
    if saved:
        run = shlex.quote(str(Path(config.observe.output_dir, config.observe.run_name)))
        is_default = config.origins["save"].startswith("derived")
        raise UserError(
            f"{'' if is_default else '--save '}{root} already holds checkpoints of another run",
            why=f"the iterations there: {', '.join(map(str, saved[-8:]))}; this run would "
            "overwrite or remove them",
            fix=f"pass another --run-name, or continue that run: slime resume {run}"
            if is_default
            else f"pass --load {root} too, to resume it, or another --save",
        )


def _looks_like_checkpoint(root: Path) -> bool:
    """Tell whether the directory has anything like a checkpoint, which a fresh start would
    ignore."""
    if not root.is_dir():
        return root.exists()
    suffixes = (".safetensors", ".distcp", ".bin", ".pt")
    return any(
        entry.name.startswith(("iter_", "release")) or entry.name.endswith(suffixes)
        for entry in root.iterdir()
        if not is_leftover(entry.name)
    ) or is_hf_dir(root)


def _no_weights_error(root: Path, flag: str) -> UserError:
    if not root.exists():
        what = f"{flag} {root} does not exist"
        why = ""
    elif not root.is_dir():
        what = f"{flag} {root} is not a directory"
        why = ""
    else:
        if damaged := _json_damage(root / "config.json"):
            what = f"{root / 'config.json'} is damaged"
            return UserError(
                what, why=damaged, fix="download or copy it again; the file may be truncated"
            )
        what = f"{flag} {root} holds no checkpoint"
        why = (
            "no latest_checkpointed_iteration.txt, and no config.json that names a Hugging Face "
            f"model_type or architectures; it holds: {contents_of(root)}"
        )
    return UserError(what, why=why, fix=_FIXES[flag])


def _json_damage(file: Path) -> str:
    """Describe why a file is not a JSON object; "" if it is one, or does not exist."""
    if not file.is_file():
        return ""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"it is not JSON: {error}"
    return "" if isinstance(found, dict) else f"it holds {a_type(found)}, not an object"


_FIXES = {
    "--hf-checkpoint": (
        "pass a Hugging Face model directory (config.json, *.safetensors, tokenizer), or org/name "
        "for a Hub model; no local path of that name may exist"
    ),
    "--ref-load": (
        "pass --ref-load with a Megatron checkpoint directory (--ref-ckpt-step picks an iteration) "
        "or a Hugging Face directory, or with --lora-rank a PEFT adapter; without it the reference "
        "model is that of --hf-checkpoint"
    ),
    "--critic-load": (
        "pass --critic-load with a Megatron checkpoint directory or a Hugging Face directory; "
        "without it the critic starts from the policy's first weights"
    ),
    "--opd-teacher-load": (
        "pass --opd-teacher-load with a Hugging Face directory or a Megatron checkpoint directory "
        "(--opd-teacher-ckpt-step picks an iteration), or `self`"
    ),
    "--load": (
        "pass --load with a Megatron checkpoint directory (--ckpt-step picks an iteration) or a "
        "Hugging Face directory; set it to the --save directory to resume, or to start fresh from "
        "--ref-load or --hf-checkpoint"
    ),
}
