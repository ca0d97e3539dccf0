"""Which trouble an error or a warning of the launch is: by where it is raised or logged, as its
text has this run's values in it."""

from __future__ import annotations

from traceback import walk_tb

from slime.diagnosis import troubles as known
from slime.diagnosis import troubles_flags as flags
from slime.diagnosis.record import Trouble

#: "module:function", a module or a package below slime → trouble; the closest to the error counts,
#: and of one frame the most exact.
PLACES: dict[str, Trouble] = {
    "config": flags.FLAGS_CONTRADICT,
    "config.parse": flags.FLAG_VALUE,
    "config.parse:_read_flag": flags.FLAG_UNKNOWN,
    "config.parse:read_custom_config": flags.FLAG_UNKNOWN,
    "config.parse:_set_key": flags.FLAG_UNKNOWN,
    "config.values": flags.FLAG_VALUE,
    "config.addresses": flags.FLAG_VALUE,
    "config.resolve": flags.FLAG_VALUE,
    "config.checks:_nccl_timeout": flags.NCCL_TIMEOUT,
    "config.resolve:derive_batch_sizes": flags.BATCH_EQUATION,
    "config.resolve:_samples": flags.BATCH_EQUATION,
    "config.resolve:_prompts": flags.BATCH_EQUATION,
    "config.checks:unsupported": flags.FLAG_UNSUPPORTED,
    "config.checks:_needs": flags.FLAG_WITHOUT_EFFECT,
    "config.checks:_staleness": flags.STALE_WEIGHTS,
    "config.checks:_entry": flags.COLOCATE_ASYNC,
    "config.checks:_placement": known.GPUS_MISSING,
    "config.checks:_lengths": flags.CONTEXT_LENGTH,
    "config.checks:_evaluation": known.EVALUATION_SETS,
    "config.checks:_length": flags.FLAG_MISSING,
    "config.checks:_model": flags.FLAG_MISSING,
    "config.checks:_evaluation_alone": flags.FLAG_MISSING,
    "config.checks:_prompts": flags.FLAG_MISSING,
    "config.checks:_start": flags.FLAG_MISSING,
    "config.checks:_saved_samples": flags.FLAG_MISSING,
    "config.checks:_some_engine": flags.FLAG_MISSING,
    "config.checks:_check_signal": flags.NO_CONTRAST,
    "config.checks_train:parallel": flags.PARALLEL_LAYOUT,
    "config.checks_train:_context_exchange": flags.PARALLEL_LAYOUT,
    "config.checks_train:_virtual_stages": flags.PARALLEL_LAYOUT,
    "config.checks_train:_batches": flags.BATCH_EQUATION,
    "engines.sglang.quantised_routes": known.QUANTISED_WEIGHTS,
    "hook_loading": known.HOOK,
    "hub": known.HUB,
    "models": known.MODEL_UNKNOWN,
    "models.ignore_list": known.IGNORE_LIST,
    "models.quantised": known.QUANTISED_WEIGHTS,
    "engines.wire.quantised": known.QUANTISED_WEIGHTS,
    "trainer.quantised_rules:check_ignore_list": known.IGNORE_LIST,
    "trainer.quantised_rules": flags.FLAG_WITHOUT_EFFECT,
    "models.spec:read_hf_config": known.MODEL_DIRECTORY,
    "models.spec:check_same_model": known.CHECKPOINT,
    "models.model_flags": known.MODEL_FLAGS,
    "models.layout_rules": flags.PARALLEL_LAYOUT,
    "trainer.expert_rules": known.MODEL_FLAGS,
    "checkpoints": known.CHECKPOINT,
    "checkpoints.load_plan:_refuse_foreign_save": known.CHECKPOINT_FOREIGN,
    "checkpoints.hf_files": known.MISSING_SHARDS,
    "checkpoints.hf_files:check_export": known.FOLDER,
    "prompts": known.DATA_ROWS,
    "prompts.tokenizer": known.TOKENIZER,
    "prompts.chat_template": known.CHAT_TEMPLATE,
    "data_path": known.DATA_FILE,
    "prompts.arrow_rows": known.DATA_FILE,
    "prompts.dataset_folders": known.DATA_FILE,
    "prompts.readers": known.DATA_FILE,
    "prompts.source:warn_of_endless_generation": known.STOP_TOKENS,
    "rollout.eval_datasets": known.EVALUATION_SETS,
    "rollout.rewards": known.REWARD_FAILS,
    "rollout.rewards.instructions": known.REWARD_MISSING,
    "rollout.rewards.pool:check_rm_type": known.REWARD_MISSING,
    "engines.sglang": known.ENGINE_FLAGS,
    "engines.model_groups": known.ENGINE_FLAGS,
    "engines.sglang.versions": known.ENGINE_MISSING,
    "cluster.engine_fit": known.EXTERNAL_ENGINE,
    "memory.check:_warn_of_host": known.MEMORY_HOST,
    "observe.wandb_sink": known.WANDB_KEY,
    "preflight:check_context": flags.CONTEXT_LENGTH,
    "preflight:check_rewards": known.REWARD_MISSING,
    "preflight:_check_batch": known.DATA_TOO_FEW,
    "preflight:_check_writable": known.FOLDER,
    "preflight:_check_answers": known.RAY_UNREACHABLE,
    "preflight:check_slots": known.GPUS_MISSING,
    "preflight:check_engine_flags": known.ENGINE_FLAGS,
    "preflight:check_transformer_engine": known.TRANSFORMER_ENGINE,
    "preflight:warn_of_old_plugins": known.OLD_PLUGIN,
    "preflight:warn_if_nothing_is_kept": known.NOTHING_KEPT,
}


def trouble_of(error: BaseException) -> Trouble | None:
    """What an error is, by the frame closest to it that tells; None: no frame does."""
    frames = [
        (at.f_globals.get("__name__", ""), at.f_code.co_name)
        for at, _ in walk_tb(error.__traceback__)
    ]
    return next(
        (found for frame in reversed(frames) if (found := trouble_at(*frame)) is not None), None
    )


def trouble_at(module: str, function: str) -> Trouble | None:
    """What is raised or logged in a function of slime's."""
    name = module.removeprefix("slime.")
    if name == module:
        return None
    keys = [f"{name}:{function}", name]
    while "." in name:
        name = name.rpartition(".")[0]
        keys.append(name)
    return next((PLACES[key] for key in keys if key in PLACES), None)
