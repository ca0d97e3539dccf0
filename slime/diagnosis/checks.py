"""The table of what `slime doctor` looks at, in its order."""

from __future__ import annotations

from slime.diagnosis import (
    checks_data,
    checks_host,
    checks_model,
    checks_plan,
    troubles,
    troubles_flags,
)
from slime.diagnosis.look import Check

CHECKS: tuple[Check, ...] = (
    Check("flags", checks_plan.flags, troubles_flags.FLAGS_CONTRADICT, without_flags=True),
    Check("host", checks_host.host, troubles.OPEN_FILES, without_flags=True),
    Check("device", checks_host.device, troubles.TORCH_WITHOUT_GPU, without_flags=True),
    Check("network", checks_host.network, troubles.NCCL_INTERFACE, without_flags=True),
    Check("ports", checks_host.ports, troubles.PORTS, without_flags=True),
    Check("hub", checks_model.hub, troubles.HUB),
    Check("model", checks_model.directory, troubles.MODEL_DIRECTORY),
    Check("quantisation", checks_model.quantisation, troubles.QUANTISED_WEIGHTS, after=("model",)),
    Check("architecture", checks_model.architecture, troubles.MODEL_FLAGS, after=("model",)),
    Check("checkpoint", checks_model.checkpoint, troubles.CHECKPOINT, after=("model",)),
    Check("weights", checks_model.weights, troubles.MISSING_SHARDS, after=("quantisation",)),
    Check("tokenizer", checks_model.tokenizer, troubles.TOKENIZER, after=("model",)),
    Check("data", checks_data.data, troubles.DATA_ROWS, after=("tokenizer",)),
    Check("hooks", checks_data.hooks, troubles.HOOK),
    Check("reward", checks_data.reward, troubles.REWARD_MISSING, after=("tokenizer",)),
    Check("outputs", checks_model.outputs, troubles.FOLDER),
    Check("disk", checks_host.disk, troubles.DISK_ROOM, after=("model",)),
    Check("shared memory", checks_host.shared_memory, troubles.SHARED_MEMORY, after=("model",)),
    Check("GPUs", checks_plan.slots, troubles.GPUS_MISSING),
    Check("engines", checks_plan.engines, troubles.ENGINE_FLAGS),
    Check("trainer", checks_plan.trainer, troubles.TRANSFORMER_ENGINE),
    Check("memory", checks_plan.memory, troubles.MEMORY_TRAINING, after=("architecture",)),
    Check("age of samples", checks_plan.age, troubles_flags.STALE_WEIGHTS),
    Check("credentials", checks_plan.credentials, troubles.WANDB_KEY),
)

#: Those that every launch makes besides what it refuses (`slime.run.preflight`): they take
#: milliseconds.
AT_START = tuple(
    check for check in CHECKS if check.name in ("host", "network", "disk", "shared memory")
)

#: Those that a launch refuses a run by, before anything starts.
AT_LAUNCH = tuple(
    check
    for check in CHECKS
    if check.name
    in (
        "hub", "model", "quantisation", "architecture", "checkpoint", "weights", "tokenizer",
        "data", "hooks", "reward", "outputs", "GPUs", "engines", "trainer", "credentials",
    )
)  # fmt: skip
