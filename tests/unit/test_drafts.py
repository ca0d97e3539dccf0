"""Speculative decoding: which drafts SGLang's engines take, what the plan counts, and what the
samples tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from slime.engines.kinds import engine_of
from slime.engines.launch import ONE_GPU, EnginePlace
from slime.engines.sglang.command import check_sglang, sglang_options
from slime.errors import UserError
from slime.memory.plan import facts_of, node_memory
from slime.models import family_of
from slime.models.draft_model import DraftModel
from slime.observe.alarms import find_alarms
from slime.rollout.metrics import sample_metrics
from slime.samples.types import Sample
from tests.support.embedded_models import save_tiny_model
from tests.support.sglang_servers import run_config

pytestmark = pytest.mark.usefixtures("sglang_stand_in")

EAGLE3 = {
    "sglang_speculative_algorithm": "EAGLE3",
    "sglang_speculative_draft_model_path": "draft",
}
ON_DISK = {"update_weight_transport": "disk", "update_weight_disk_dir": "/x"}


def options_of(place: EnginePlace = ONE_GPU, **flags: Any) -> dict[str, Any]:
    config = run_config(**flags)
    check_sglang(config)
    return sglang_options(config, "m", "h", 1, place)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"sglang_speculative_draft_model_path": None}, "EAGLE3 needs a draft model"),
        ({"sglang_speculative_accept_threshold_acc": 0.9}, "acc 0.9 changes the distribution"),
        ({"sglang_speculative_accept_threshold_single": 0.5}, "single 0.5 changes the distr"),
        (ON_DISK, "EAGLE3 does not go with .* disk"),
        ({"sglang_speculative_algorithm": "NGRAM"} | ON_DISK, "NGRAM does not go with .* disk"),
        ({"deterministic_rollout": True}, "EAGLE3 does not go with --deterministic-rollout"),
        ({"lora_rank": 8}, "EAGLE3 does not go with --lora-rank"),
        (
            {"use_sampling_mask": True, "rollout_top_k": 20},
            "EAGLE3 does not go with --use-sampling-mask",
        ),
    ],
)
def test_drafts_that_would_change_the_numbers_are_refused(
    flags: dict[str, Any], expected: str
) -> None:
    with pytest.raises(UserError, match=expected):
        options_of(**EAGLE3 | flags)


def test_invented_acceptance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(UserError, match="SGLANG_SIMULATE_ACC_LEN=3 invents tokens"):
        options_of(**EAGLE3)


def test_an_engine_drafts_for_all_of_its_requests_and_keeps_its_draft() -> None:
    """SGLang would run 48 requests at once, and lose the draft in a sleep."""
    run = {"rollout_batch_size": 32, "n_samples_per_prompt": 8, "rollout_num_gpus": 2}
    options = options_of(**EAGLE3, **run)
    assert options["max_running_requests"] == 128
    assert "enable_draft_weights_cpu_backup" not in options
    asleep = options_of(**EAGLE3, **run, colocate=True, actor_num_gpus_per_node=2)
    assert asleep["enable_draft_weights_cpu_backup"] is True
    ngram = options_of(sglang_speculative_algorithm="ngram", colocate=True)
    assert "enable_draft_weights_cpu_backup" not in ngram
    own = options_of(sglang_speculative_algorithm="NEXTN")
    assert own["speculative_draft_model_path"] == "m"
    assert "max_running_requests" not in options_of()


def test_the_draft_is_the_policys_alone() -> None:
    teacher = EnginePlace(model_path="teacher")
    assert not [name for name in options_of(teacher, **EAGLE3) if "speculative" in name]
    own = {"speculative_algorithm": "NGRAM"}
    place = EnginePlace(model_path="teacher", overrides=own)
    options = options_of(place, **EAGLE3)
    assert {name: options[name] for name in options if "speculative" in name} == own


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


def test_a_draft_fits_the_policy(policy: Path, tmp_path: Path) -> None:
    family = family_of(str(policy))
    spec = family.model_spec(str(policy))
    own = DraftModel(policy, is_own_layers=True)
    with pytest.raises(UserError, match="has no prediction layers"):
        own.check(spec)
    DraftModel(policy, is_own_layers=False).check(spec)  # a whole model may draft for itself
    layer = {f"model.layers.{spec.num_layers}.eh_proj.weight": torch.zeros(4, 8)}
    save_file(layer, policy / "prediction.safetensors")
    try:
        own.check(spec)
        assert own.nbytes == 4 * 8 * 4
    finally:
        (policy / "prediction.safetensors").unlink()
    draft = tmp_path / "draft"
    draft.mkdir()
    (draft / "config.json").write_text('{"vocab_size": 7}')
    with pytest.raises(UserError, match=f"draft .* has 7 tokens, the policy {spec.vocab_size}"):
        DraftModel(draft, is_own_layers=False).check(spec)
    (draft / "model.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        _ = DraftModel(draft, is_own_layers=False).nbytes


def test_the_plan_counts_a_draft(policy: Path, tmp_path: Path) -> None:
    save_file({"fc": torch.zeros(1000, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    flags = {**EAGLE3, "sglang_speculative_draft_model_path": str(tmp_path)}
    config = run_config(hf_checkpoint=str(policy), colocate=True, **flags)
    assert engine_of(config).footprint(config).draft == 2000
    facts = facts_of(config, on_gpu=True)
    on_host = node_memory(facts, 141e9).uses
    asleep = {use.what: use.nbytes for use in on_host if use.owner == "engine"}
    assert asleep["weights of the draft asleep"] == 2000
    gpu = 100e9
    plain = facts_of(run_config(hf_checkpoint=str(policy), colocate=True), on_gpu=True)
    assert plain.engine is not None and facts.engine is not None
    assert plain.engine.kv_cache(gpu) - facts.engine.kv_cache(gpu) == 2000


@pytest.mark.parametrize(
    "names",
    [
        ("spec_num_correct_drafts", "spec_num_proposed_drafts"),
        ("spec_accept_token_num", "spec_draft_token_num"),
    ],
)
def test_acceptance_is_a_ratio_of_sums(names: tuple[str, str]) -> None:
    samples = [Sample(), Sample()]
    counts = [(30, 40, 10, 41), (0, 120, 40, 40)]
    for sample, (accepted, proposed, verified, tokens) in zip(samples, counts, strict=True):
        meta = {names[0]: accepted, names[1]: proposed}
        sample.spec_info.add(meta | {"spec_verify_ct": verified, "completion_tokens": tokens})
    metrics = sample_metrics(samples, "rollout")
    assert metrics["rollout/spec_accept_rate"] == 30 / 160
    assert metrics["rollout/spec_accept_length"] == 81 / 50


@pytest.mark.parametrize(
    ("lengths", "title"),
    [
        ([1.01, 1.0, 1.02] * 4, "Drafts are rejected"),
        ([2.5, 2.52, 2.48, 2.5, 2.51] * 3 + [1.8, 1.82, 1.78, 1.8, 1.81], "Fewer and fewer"),
        ([2.5, 2.52, 2.48, 2.5, 2.51] * 3 + [2.4, 2.42, 2.38, 2.4, 2.41], ""),
        ([2.5, 1.8, 2.1, 1.4, 2.6] * 4, ""),
        ([1.0] * 4, ""),
    ],
)
def test_rejected_drafts_raise_an_alarm(lengths: list[float], title: str) -> None:
    rows = [
        {"step": step, "rollout/spec_accept_length": length}
        for step, length in enumerate(lengths, 1)
    ]
    alarms = [one.title for one in find_alarms(rows) if one.name == "rejected_drafts"]
    assert bool(alarms) == bool(title) and all(title in one for one in alarms)
