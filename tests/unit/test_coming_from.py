"""docs/coming-from.md names flags that there are, and unknown flags are answered from its
tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from slime.cli import flags as flags_command
from slime.config.flags import spellings
from slime.config.other_systems import OtherName, other_names
from slime.config.parse import read_argv, read_config_file
from slime.errors import UserError

ROWS = [row for rows in other_names().values() for row in rows]
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"


def test_every_flag_of_the_page_exists() -> None:
    text = re.sub(r"`ray [^`]*`", "", PAGE.read_text(encoding="utf-8"))  # Ray's own
    named = set(re.findall(r"(?<![\w/])--([a-z][\w-]+)", text))
    assert len(named) > 40 and not sorted(named - set(spellings()))


NAMES = [
    pytest.param(name, row, id=name)
    for row in ROWS
    for name in row.names
    if name.replace("_", "-") not in spellings()
]


@pytest.mark.parametrize(("name", "row"), NAMES)
def test_a_name_of_another_system_is_answered_from_the_table(
    name: str, row: OtherName, tmp_path: Path
) -> None:
    dashed = name.replace("_", "-")
    spellings_of_it = [[f"{name}=1"], [f"--{dashed}", "1"], [f"--{name}", "1"]]
    for words in spellings_of_it if name == row.names[0] else spellings_of_it[:2]:
        if "." in name and words[0].startswith("--"):
            continue  # Hydra's settings have no dashes
        with pytest.raises(UserError) as caught:
            read_argv(words)
        assert caught.value.fix in {
            one.text for one in ROWS if name in one.names
        } and "did you mean" not in str(caught.value)
    file = tmp_path / "run.yaml"
    file.write_text(f"{name}: 1\n")
    if "." not in name:
        with pytest.raises(UserError, match="another system's name"):
            read_config_file(str(file))


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "write --lr 1e-6"),
        ("critic.optim.lr=1e-5", "write --critic-lr 1e-5"),
        ("critic.model.path=value", "--critic-load"),
        ("data.trust_remote_code=True", "write --trust-remote-code"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size=2", "--rollout-num-gpus-per-engine"),
        (
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
            "--tensor-model-parallel-size",
        ),
        (
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2",
            "write --tensor-model-parallel-size 2",
        ),
        ("+trainer.n_gpus_per_node=8", "--actor-num-gpus-per-node"),
        ("grpo.num_prompts_per_step=32", "--rollout-batch-size"),
        ("loss_fn.unheard_of=1", "slime flags unheard_of"),
        ("policy.unheard_of.enabled=true", "slime flags enabled"),
        ("actor_rollout_ref.rollout.name=vllm", "--rollout-engine"),
        ("env.math.num_workers=8", "--rm-num-workers"),
        ("data.num_workers=8", "use --num-data-workers"),
    ],
)
def test_settings_of_hydra_behind_a_flag_are_no_values_of_it(word: str, told: str) -> None:
    errors: list[UserError] = []
    given = read_argv(["--rm-type", "math", word, "--lr", "1"], errors)
    assert [error.what for error in errors] == [f"{word!r} is not a flag"]
    assert told in errors[0].fix and given.values["rm_type"] == "math" and "lr" in given.values


def test_sections_of_another_systems_file_are_answered_setting_by_setting(tmp_path: Path) -> None:
    file = tmp_path / "verl.yaml"
    file.write_text("data:\n  train_files: a.jsonl\nactor_rollout_ref:\n  model: {path: M}\n")
    errors: list[UserError] = []
    read_config_file(str(file), errors)
    assert [error.fix for error in errors] == ["--prompt-data", "--hf-checkpoint"]


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("--temperature", "--rollout-temperature"),
        ("--beta", "--kl-loss-coef"),
        ("--batch-size", "--rollout-batch-size"),
        ("--learning-rate", "--lr"),
        ("--max-steps", "--num-rollout"),
        ("--gradient-checkpointing", "--recompute-activations"),
        ("--lora-r", "--lora-rank"),
        ("--ppo", "--critic-load"),
        ("actor_rollout_ref.rollout.n=8", "--n-samples-per-prompt"),
        ("rollout_batch_size=8", "--rollout-batch-size 8"),
    ],
)
def test_common_names_lead_to_their_flag(asked: str, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        read_argv([asked, "0.5"])


@pytest.mark.parametrize(
    ("word", "told"),
    [("lora", "--lora-rank"), ("ppo", "--critic-load"), ("temperature", "--rollout-temperature")],
)
def test_slime_flags_answers_from_the_table(
    word: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        flags_command.main([word])
        said = capsys.readouterr().out
    except UserError as error:
        said = str(error)
    assert told in said.partition("\n\n")[0]
