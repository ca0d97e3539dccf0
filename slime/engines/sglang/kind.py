"""The record of SGLang."""

from __future__ import annotations

from slime import deadlines
from slime.engines.kinds import EngineKind
from slime.engines.model_groups import served_models
from slime.engines.sglang import command as sglang
from slime.engines.sglang.drafts import draft_model
from slime.engines.sglang.model_faults import check_model, check_transposed_experts
from slime.engines.sglang.versions import check_installed

KIND = EngineKind(
    sglang.sglang_command,
    sglang.sglang_footprint,
    deadlines.SGLANG_STARTUP,
    sglang.dtype_of,
    health_path=sglang.HEALTH_PATH,
    served_models=lambda config: served_models(config, sglang.GROUP_RULES),
    check_flags=sglang.check_sglang,
    check_model=check_model,
    check_transposed_experts=check_transposed_experts,
    draft_model=draft_model,
    check_installed=check_installed,
    reads_generation_config=True,
    tool_call_words=lambda parser: ("--tool-call-parser", parser),
    adapter_words=sglang.adapter_words,
    releases_without_gpu=True,
    # the same as in SGLang's processes: NCCL cannot join processes that map memory differently
    trainer_environment={"NCCL_CUMEM_ENABLE": "0"},
    if_out_of_memory=(
        "a lower --sglang-mem-fraction-static",
        "a smaller --sglang-server-concurrency",
        "a smaller --sglang-cuda-graph-max-bs-decode",
        "a smaller --rollout-batch-size",
    ),
    if_killed=("a higher --sglang-mem-fraction-static", "a smaller --rollout-batch-size"),
    memory_fraction="sglang_mem_fraction_static",
    largest_graph=sglang.largest_graph,
    to_find_the_cause=("--sglang-disable-cuda-graph, to find the cause",),
)
