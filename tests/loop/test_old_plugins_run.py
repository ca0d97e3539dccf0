"""A plugin written for the reference system, on the embedded engine, from its prompts to the
trainer's advantages."""

from __future__ import annotations

from tests.support.runs import Run

PLUGIN = "tests.support.reference_plugin"


def test_an_existing_plugin_trains_unmodified(run: Run) -> None:
    hooks = {
        "--custom-generate-function-path": "generate",
        "--custom-rm-path": "reward",
        "--dynamic-sampling-filter-path": "keep",
        "--data-source-path": "Source",
        "--buffer-filter-path": "take",
        "--rollout-function-path": "rollout",
        "--custom-advantage-function-path": "advantages",
    }
    flags = [word for flag, name in hooks.items() for word in (flag, f"{PLUGIN}.{name}")]
    size = ["--rollout-batch-size", 2, "--n-samples-per-prompt", 4, "--rollout-max-response-len", 8]
    result = run(
        "old_plugin", *size, *flags, "--colocate", "--num-rollout", 2, "--num-steps-per-rollout", 1
    )
    assert result.series("rollout/plugin/source_calls")[0] >= 1
    generated = result.series("rollout/plugin/generated")
    assert len(generated) == 2 and generated[1] > generated[0] >= 8
    steps = list(result.steps().values())
    assert len(steps) == 2 and all(step["train/grad_norm"] > 0 for step in steps)
