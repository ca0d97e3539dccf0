"""Each cause of a difference between trainer and engine, injected, is ranked first; sides that are
alike are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slime.__main__ import main
from slime.config import Config, make_config
from slime.config.flags import all_flags
from slime.diagnosis.align import dumps
from slime.diagnosis.align.case import Discrepancy
from slime.diagnosis.align.engines import EngineHere
from slime.diagnosis.align.evidence import Differences, Scored
from slime.diagnosis.align.examine import CAUSES, Ranked, Result, as_json, examine, text
from slime.diagnosis.align.inside import integers
from slime.diagnosis.align.layers import compare
from slime.diagnosis.align.prepare import Options, RoundFailed, _ask_transformers, examined
from slime.diagnosis.align.reference import Reference, ReferenceSettings, Sampling, Watcher
from slime.diagnosis.align.trainer_here import TrainerHere
from slime.diagnosis.check import LeftOut
from slime.errors import UserError
from slime.rollout.debug_data import save_rollout
from slime.samples.types import Sample
from slime.trainer.dumps import RankDump, save_train_data
from tests.support.embedded_models import (
    byte_tokenizer,
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
)

PROMPTS = ("<|im_start|>user\nhow many?<|im_end|>\n", "<|im_start|>user\nA tale<|im_end|>\n")
HEAD = "<|im_start|>assistant\n"
TEMPERATURE, COUNT = 0.7, 24


def sampled(directory: Path, temperature: float = TEMPERATURE, **options: Any) -> list[Scored]:
    """Four responses of the embedded engine, to two prompts."""
    prompts = [
        byte_tokenizer().encode(f"{words}{HEAD}", add_special_tokens=False) for words in PROMPTS * 2
    ]
    sequences = [
        make_sequence(
            prompt, rid=str(i), max_new_tokens=COUNT, temperature=temperature, sampling_seed=i
        )
        for i, prompt in enumerate(prompts)
    ]
    run(make_scheduler(directory, **options), sequences)
    return [
        Scored(
            f"sample {i}",
            torch.tensor([*prompt, *sequence.output_ids]),
            torch.tensor(sequence.output_logprobs, dtype=torch.float64),
            None,
            torch.ones(COUNT, dtype=torch.bool),
        )
        for i, (prompt, sequence) in enumerate(zip(prompts, sequences))
    ]


def case_of(directory: Path, temperature: float = TEMPERATURE) -> Discrepancy:
    """The engine's own log-probs, and a trainer that is the reference."""
    samples, reference = (
        sampled(directory, temperature),
        Reference(directory, torch.float32, Sampling(temperature)),
    )
    trained = [
        replace(sample, trainer=scores)
        for sample, scores in zip(samples, reference.of_all(samples))
    ]
    return Discrepancy(trained, Sampling(temperature), reference, tokenizer=byte_tokenizer())


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rotary = {"rope_type": "default", "rope_theta": 2000.0}
    return save_tiny_model(tmp_path_factory.mktemp("dense"), "llama", rope_parameters=rotary)


@pytest.fixture(scope="module")
def case(directory: Path) -> Discrepancy:
    return case_of(directory)


def with_engine(case: Discrepancy, said: Callable[[Scored], Tensor], **more: Any) -> Discrepancy:
    return replace(
        case, samples=[replace(sample, engine=said(sample)) for sample in case.samples], **more
    )


def under(case: Discrepancy, **changes: Any) -> Discrepancy:
    """The engine computes with another `ReferenceSettings`."""
    model = case.model()
    return with_engine(
        case, lambda sample: model.log_probs(sample, replace(model.setting, **changes))
    )


def first(result: Result) -> Ranked:
    """What is named first; it explains nearly all, on the engine's side, and a text can be made of
    it."""
    assert result.sides_differ and result.reported
    best = result.reported[0]
    assert best.best.share > 0.95 and best.best.side == "engine", text(result)
    assert f"1. {best.cause.trouble.name}" in text(result)
    return best


def test_sides_that_are_alike(case: Discrepancy) -> None:
    result = examine(case)
    assert not result.sides_differ and result.case.differences.mean < 1e-5
    assert "nothing parts them" in text(result) and as_json(result)["ok"] is True
    everything = examine(case, always=True)
    assert everything.ranked and not everything.findings


def test_a_shift_by_one(case: Discrepancy) -> None:
    moved = with_engine(case, lambda sample: torch.cat([sample.engine[1:], sample.engine[-1:]]))
    found = first(examine(moved))
    assert found.cause.trouble.name == "align-shift" and "of the token 1 later" in found.best.what
    without_model = examine(replace(moved, reference=None))
    assert (
        without_model.reported[0].cause.trouble.name == "align-shift"
        and "align-temperature" in without_model.untested
    )


def test_another_temperature(case: Discrepancy) -> None:
    for temperature, said in (
        (1.0, "temperature 1 instead of --rollout-temperature 0.7 (none)"),
        (1.3, "1.3 "),
    ):
        found = first(examine(under(case, sampling=Sampling(temperature))))
        assert found.cause.trouble.name == "align-temperature" and said in found.best.what


def test_filters_of_the_run_and_of_the_model(case: Discrepancy) -> None:
    filtered = replace(case, sampling=Sampling(TEMPERATURE, top_p=0.8))
    found = first(
        examine(under(filtered, sampling=Sampling(TEMPERATURE, top_p=0.8, renormalised=True)))
    )
    assert found.cause.trouble.name == "align-filters" and "--rollout-top-p 0.8" in found.best.what
    facts = {"generation_config": {"top_k": 5, "repetition_penalty": 1.2}}
    unasked = replace(case, facts=facts)
    found = first(
        examine(under(unasked, sampling=Sampling(TEMPERATURE, top_k=5, renormalised=True)))
    )
    assert (
        found.cause.trouble.name == "align-filters"
        and "top_k 5 of generation_config" in found.best.what
    )
    found = first(examine(under(unasked, sampling=Sampling(TEMPERATURE, repetition_penalty=1.2))))
    assert (
        found.cause.trouble.name == "align-filters" and "repetition_penalty 1.2" in found.best.what
    )


def test_another_prompt(case: Discrepancy) -> None:
    head = byte_tokenizer().encode(HEAD, add_special_tokens=False)
    model = case.model()

    def without_head(sample: Scored) -> Tensor:
        return model.log_probs(sample, context=sample.tokens[: sample.prompt_length - len(head)])

    found = first(examine(with_engine(case, without_head)))
    assert (
        found.cause.trouble.name == "align-template"
        and "lacks the generation prompt" in found.best.what
    )

    def bare(sample: Scored) -> Tensor:
        words = "how many?" if sample.name in ("sample 0", "sample 2") else "A tale"
        return model.log_probs(sample, context=torch.tensor(byte_tokenizer().encode(words)))

    found = first(examine(with_engine(case, bare)))
    assert (
        found.cause.trouble.name == "align-template"
        and "without the chat template" in found.best.what
    )


def test_other_token_ids(case: Discrepancy) -> None:
    model, samples = case.model(), []
    for sample in case.samples:
        sent = sample.tokens.clone()
        sent[sample.prompt_length - 3] += 1
        sent[sample.prompt_length + 2] += 1
        samples.append(
            replace(sample, sent=sent, engine=model.log_probs(replace(sample, tokens=sent)))
        )
    found = first(examine(replace(case, samples=samples)))
    assert found.cause.trouble.name == "align-tokens" and "8 other token ids" in found.best.what


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rotary": {"rotary_base": 10_000.0}}, "the rotary base is 10000"),
        (
            {
                "positions": lambda prompt, length: (
                    torch.arange(length) + (torch.arange(length) >= prompt)
                )
            },
            "1 too high",
        ),
        (
            {"positions": lambda prompt, length: torch.zeros(length, dtype=torch.long)},
            "no position is known",
        ),
    ],
)
def test_positions(case: Discrepancy, changes: dict[str, Any], said: str) -> None:
    found = first(examine(under(case, **changes)))
    assert found.cause.trouble.name == "align-position" and said in found.best.what
    assert "rope_theta (2000)" in found.finding.advice[0]


def test_quantised_weights_and_caches(case: Discrepancy) -> None:
    model = case.model()
    with model.holding(
        {name: integers(weight, 4, 128) for name, weight in model.matrices().items()}
    ):
        scores = {sample.name: model.log_probs(sample) for sample in case.samples}
    found = first(examine(with_engine(case, lambda sample: scores[sample.name])))
    assert found.cause.trouble.name == "align-quantisation" and "4-bit integers" in found.best.what
    found = first(examine(under(case, cache_dtype=torch.float8_e4m3fn)))
    assert found.cause.trouble.name == "align-quantisation" and "float8_e4m3fn" in found.best.what


@pytest.mark.parametrize(
    ("part", "said"), [("output layer", "the logits of"), ("rotary embedding", "the rotary")]
)
def test_one_operator_of_fewer_bits(case: Discrepancy, part: Any, said: str) -> None:
    found = first(examine(under(case, rounded=frozenset({part}))))
    assert found.cause.trouble.name == "align-precision" and found.best.what.startswith(said)


def test_an_engine_in_bfloat16_beside_a_trainer_in_float32(
    case: Discrepancy, directory: Path
) -> None:
    rough = {sample.name: sample for sample in sampled(directory, dtype="bfloat16")}
    model = case.model()
    samples = [replace(sample, trainer=model.log_probs(sample)) for sample in rough.values()]
    result = examine(replace(case, samples=samples))
    assert result.reported[
        0
    ].cause.trouble.name == "align-precision" and "by its size alone" in text(result)


def test_both_sides_in_bfloat16(directory: Path) -> None:
    """What rounding makes is nothing; what a cause predicts is something, however small it is."""
    config = make_config(
        hf_checkpoint=str(directory),
        bf16=True,
        rollout_batch_size=1,
        rollout_temperature=TEMPERATURE,
    )
    samples = sampled(directory, dtype="bfloat16")
    with TrainerHere(config, str(directory)) as trainer:
        scores = trainer.log_probs(samples, TEMPERATURE)
    samples = [replace(sample, trainer=score) for sample, score in zip(samples, scores)]
    result = examined(config, samples, Options(directory))
    assert (
        not result.sides_differ
        and result.case.rounding > 1e-3
        and result.case.differences.mean > 1e-3
    )
    assert (
        result.parts is not None
        and result.parts.first is None
        and "nothing parts them" in text(result)
    )
    model = result.case.model()
    warmer = replace(model.setting, sampling=Sampling(0.718))
    changed = [
        replace(s, engine=s.engine + model.log_probs(s, warmer) - base)
        for s, base in zip(samples, result.case.base)
    ]
    small = examined(config, changed, Options(directory, with_parts=False))
    assert small.case.differences.mean < small.case.tolerance and small.sides_differ
    assert small.reported[
        0
    ].cause.trouble.name == "align-temperature" and "no larger than rounding" in text(small)


def test_two_causes_at_once(case: Discrepancy) -> None:
    model = case.model()
    warmer = replace(model.setting, sampling=Sampling(0.9))
    with model.holding(
        {name: integers(weight, 4, 128) for name, weight in model.matrices().items()}
    ):
        scores = {sample.name: model.log_probs(sample, warmer) for sample in case.samples}
    result = examine(with_engine(case, lambda sample: scores[sample.name]))
    assert (
        result.together is not None and result.together.share > result.reported[0].best.share + 0.1
    )
    names = {cause.trouble.name: side for cause, _, side in result.together.parts}
    assert names == {"align-quantisation": "engine", "align-temperature": "engine"}
    assert "together they explain" in text(result) and as_json(result)["together"]["share"] > 0.6


def test_transformers_is_asked_about_the_reference(directory: Path) -> None:
    """Reference and embedded engine share code: what is wrong in it would look like the trainer's
    fault."""
    config = make_config(
        hf_checkpoint=str(directory),
        fp32=True,
        rollout_batch_size=1,
        rollout_temperature=TEMPERATURE,
    )
    samples = [replace(sample, trainer=sample.engine + 0.1) for sample in sampled(directory)]
    result = examined(config, samples, Options(directory, with_parts=False))
    assert (
        result.notes[-1].startswith("transformers and the reference differ by ")
        and "wrong" not in result.notes[-1]
    )
    case = result.case
    case.base[0] = case.base[0] + 0.01
    _ask_transformers(case, result)
    assert "the reference is wrong about this model" in result.notes[-1]


def test_other_experts(tmp_path: Path) -> None:
    case = case_of(save_tiny_model(tmp_path, "qwen3_moe"))
    model = case.model()
    assert "--use-rollout-routing-replay" in examine(case, always=True).untested["align-routing"]
    samples = []
    for sample in case.samples:
        watcher = Watcher()
        model.hidden(sample.tokens, sample.prompt_length, model.setting, watcher=watcher)
        experts = torch.zeros(len(sample.tokens) - 1, 2, 2, dtype=torch.long)
        experts[:, 1] = (watcher.chosen[0] + 1) % 5
        elsewhere = replace(sample, experts=experts)
        engine = model.log_probs(
            elsewhere, ReferenceSettings(sampling=Sampling(TEMPERATURE), experts=True)
        )
        samples.append(replace(elsewhere, engine=engine))
    found = first(examine(replace(case, samples=samples)))
    assert (
        found.cause.trouble.name == "align-routing"
        and "choices of experts are others" in found.best.what
    )


def test_weights_that_did_not_arrive(directory: Path) -> None:
    case = case_of(directory, temperature=1.0)
    engine, name = (
        EngineHere(directory, "float32", longest=128),
        "model.layers.1.mlp.up_proj.weight",
    )
    engine.scheduler.store.update([(name, torch.zeros_like(engine.tensor(name)))])
    answers = engine.score(case.samples, together=True)
    scores = dict(zip([sample.name for sample in case.samples], answers))
    held = with_engine(
        case, lambda sample: torch.tensor(scores[sample.name][-COUNT:]).double(), engine=engine
    )
    found = first(examine(held))
    assert (
        found.cause.trouble.name == "align-weights"
        and f"1 of 20 tensors differ: {name}" in found.best.what
    )
    assert f"{name}: all zeros" in found.finding.detail


def test_older_weights(case: Discrepancy, tmp_path: Path) -> None:
    older = save_tiny_model(
        tmp_path, "llama", seed=7, rope_parameters={"rope_type": "default", "rope_theta": 2000.0}
    )
    model = Reference(older, torch.float32, Sampling(TEMPERATURE))
    stale = with_engine(case, model.log_probs, facts={"other_weights": {"model/3": older}})
    found = first(examine(stale))
    assert (
        found.cause.trouble.name == "align-weights" and "the weights in model/3" in found.best.what
    )


class Sociable:
    """An engine whose answers depend on its company."""

    def __init__(self, scores: Sequence[Tensor]) -> None:
        self.scores = scores

    def score(self, samples: Sequence[Scored], *, together: bool) -> list[list[float]]:
        noise = torch.Generator().manual_seed(0)
        added = [torch.randn(COUNT, generator=noise) * 0.1 * together for _ in self.scores]
        return [(score + more).tolist() for score, more in zip(self.scores, added)]

    def fingerprints(self) -> dict[str, str]:
        return {}

    def tensor(self, name: str) -> Tensor:
        raise AssertionError(name)


def test_an_engine_that_answers_otherwise_in_company(directory: Path) -> None:
    case = case_of(directory, temperature=1.0)
    engine = Sociable([sample.engine for sample in case.samples])
    answers = engine.score([], together=True)
    scores = {
        sample.name: torch.tensor(answer).double() for sample, answer in zip(case.samples, answers)
    }
    found = first(examine(with_engine(case, lambda sample: scores[sample.name], engine=engine)))
    assert (
        found.cause.trouble.name == "align-batch" and "what it says in company" in found.best.what
    )


def test_the_first_part_that_differs(directory: Path) -> None:
    (sample, *_) = sampled(directory)
    model, engine = (
        Reference(directory, torch.float32),
        EngineHere(directory, "float32", longest=128),
    )
    watcher = Watcher(keeps=True)
    model.hidden(sample.tokens, sample.prompt_length, model.setting, watcher=watcher)
    config = make_config(hf_checkpoint=str(directory), fp32=True, rollout_batch_size=1)
    with TrainerHere(config, str(directory)) as trainer:
        sound = compare(trainer.parts(sample), engine.parts(sample), watcher.seen)
        assert sound.first is None and max(sound.apart.values()) < 1e-5 and len(sound.apart) == 12
        assert (trainer.log_probs([sample], TEMPERATURE)[0] - sample.engine).abs().max() < 1e-4
        norm = trainer.chunks[0].decoder.layers[1].pre_mlp_layernorm
        with torch.no_grad():
            norm.weight.mul_(1.5)
        found = compare(trainer.parts(sample), engine.parts(sample), watcher.seen)
        assert (found.first, found.side) == ("1.mlp norm", "trainer")
        with torch.no_grad():
            norm.weight.div_(1.5)
        layer = engine.scheduler.store.model.layers[0]
        whole = layer.mlp

        def louder(x: Tensor, residual: Tensor, adapted: Any) -> Tensor:
            return whole(x, residual, adapted) + 0.1 * x  # type: ignore[return-value]

        layer.mlp = louder  # type: ignore[assignment]
        found = compare(trainer.parts(sample), engine.parts(sample), watcher.seen)
        assert (found.first, found.side) == ("0.mlp", "engine")
        assert "the mlp of layer 0 is the first that differs" in found.lines()[0]


def test_sides_without_a_part_in_common_are_not_compared() -> None:
    found = compare({"0": torch.ones(1, 1)}, {"1": torch.ones(1, 1)}, {"0": torch.ones(1, 1)})
    assert found.first is None and found.side == ""
    assert "no part in common" in found.lines()[0]


def test_turns_and_growth() -> None:
    counted = torch.tensor([1, 1, 0, 0, 1, 1, 1, 1]).bool()
    sample = Scored("sample 0", torch.arange(10), torch.zeros(8).double(), None, counted)
    assert sample.turns.tolist() == [0, 0, -1, -1, 1, 1, 1, 1]
    found = Differences.of([sample], [torch.tensor([4.0, 1, 9, 9, 2, 1, 1, 1]).double()])
    assert found.since.tolist() == [0, 1, 0, 1, 2, 3] and found.position.tolist() == [
        2,
        3,
        6,
        7,
        8,
        9,
    ]
    assert found.where() == {"first of a turn": 3.0, "other": 1.0, "turn 1": 2.5, "turn 2": 1.25}
    assert found.worst(1) == [{"sample": "sample 0", "position": 2, "token": 2, "difference": 4.0}]
    assert found.growth() is None


# -- the command -----------------------------------------------------------------------------------


def write_dumps(case: Discrepancy, folder: Path, engine: Callable[[Scored], Tensor]) -> list[str]:
    generated, trained = [], []
    for index, sample in enumerate(case.samples):
        tokens, scores = sample.tokens.tolist(), engine(sample).tolist()
        made = Sample(
            group_index=index, index=index, prompt="?", tokens=tokens[: sample.prompt_length]
        )
        made.append_response_tokens(tokens=tokens[sample.prompt_length :], log_probs=scores)
        generated.append(made)
        row = {
            "sample_index": index,
            "tokens": sample.tokens,
            "response_length": COUNT,
            "raw_reward": 0.0,
        }
        trained.append(
            row | {"log_probs": sample.trainer, "rollout_log_probs": torch.tensor(scores)}
        )
    paths = [save_rollout(str(folder / "rollout_{rollout_id}.pt"), 0, generated)]
    paths.append(
        save_train_data(str(folder / "train_{rollout_id}.pt"), 0, [RankDump(0, trained, [])])
    )
    return [str(path) for path in paths]


def test_the_command_reads_dumps(
    case: Discrepancy, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--hf-checkpoint", str(directory), "--rollout-temperature", str(TEMPERATURE), "--fp32"]
    sound = write_dumps(case, tmp_path, lambda sample: sample.engine)
    assert main(["align", *sound, *flags]) == 0
    said = capsys.readouterr().out
    assert (
        said.startswith("96 tokens of 4 samples: trainer and engine differ by ")
        and "nothing parts them" in said
    )
    assert "part by part: 12 parts are alike" in said
    model = case.model()
    plain = write_dumps(case, tmp_path, lambda sample: model.log_probs(sample, ReferenceSettings()))
    assert main(["align", plain[0], "--json", *flags]) == 1  # the reference in the trainer's place
    told = json.loads(capsys.readouterr().out)
    assert told["causes"][0]["name"] == "align-temperature" and "not kept" in told["notes"][0]
    assert main(["align", *plain, "--json", "--max-tokens=100", *flags]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (
        told["causes"][0]["name"] == "align-temperature"
        and told["causes"][0]["tries"][0]["share"] > 0.99
    )
    assert told["samples"] == 1 and any("1 of 4 samples" in note for note in told["notes"])
    assert main(["align", *plain, "--json"]) == 1  # without a model
    told = json.loads(capsys.readouterr().out)
    assert "align-temperature" in told["untested"] and told["parts"]["untested"].startswith(
        "no model is at hand"
    )


def test_the_command_reads_a_run_folder(
    case: Discrepancy, directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dumped, run_folder = tmp_path / "dumped", tmp_path / "run"
    flags: dict[str, Any] = {
        "hf_checkpoint": str(directory),
        "rollout_temperature": TEMPERATURE,
        "fp32": True,
    }
    patterns = {
        f"save_debug_{kind}_data": f"{dumped}/{kind}_{{rollout_id}}.pt"
        for kind in ("train", "rollout")
    }
    run_folder.mkdir()
    make_config(**flags, **patterns, rollout_batch_size=2).save(run_folder / "config.json")
    assert main(["align", str(run_folder)]) == 2
    assert "has dumped nothing of rollout 0" in capsys.readouterr().err
    dumped.mkdir()
    write_dumps(case, dumped, lambda sample: torch.cat([sample.engine[1:], sample.engine[-1:]]))
    assert main(["align", str(run_folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["causes"][0]["name"] == "align-shift"
    assert main(["align", str(run_folder), "--of-rollout", "1"]) == 2
    assert "has dumped nothing of rollout 1" in capsys.readouterr().err
    for kind in ("train", "rollout"):
        (dumped / f"{kind}_0.pt").rename(dumped / f"{kind}_1.pt")
    assert main(["align", str(run_folder), "--of-rollout", "1"]) == 2
    assert "the weights of rollout 1 were not saved" in capsys.readouterr().err
    assert (
        main(["align", str(run_folder), "--of-rollout", "1", "--model", str(directory), "--json"])
        == 1
    )
    assert json.loads(capsys.readouterr().out)["causes"][0]["name"] == "align-shift"
    assert main(["align", str(run_folder), "--lr", "1"]) == 2
    assert "takes no --lr 1" in capsys.readouterr().err


def test_what_cannot_be_compared_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        ([], "needs the flags of a run"),
        ([str(tmp_path)], "is not a run folder"),
        ([str(tmp_path / "none.pt")], "there is no rollout dump"),
        (["a.pt", "--max-tokens", "many"], "--max-tokens many is no number"),
        (["--debug-rollout-only", "--rollout-batch-size", "many"], "many"),
    ):
        assert main(["align", *words]) == 2
        captured = capsys.readouterr()
        assert said in captured.err and not captured.out
    path = save_rollout(
        str(tmp_path / "{rollout_id}.pt"), 0, [Sample(index=0, tokens=[1, 2], response_length=1)]
    )
    assert main(["align", str(path)]) == 2
    assert "no sample with log-probs of the engine" in capsys.readouterr().err


@pytest.mark.parametrize(
    "failure, status, is_kept",
    [
        (UserError("the engine does not answer"), 2, False),
        (LeftOut("nothing is generated"), 2, False),
        (RoundFailed("its logs say more"), 1, True),
    ],
)
def test_the_folder_of_a_round_stays_only_where_its_logs_are_needed(
    failure: Exception, status: int, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(config: Config, folder: Path) -> list[Scored]:
        (folder / "rollout").mkdir()
        raise failure

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("slime.diagnosis.align.prepare.fresh_round", fails)
    words = (
        "--num-rollout 1 --rollout-batch-size 1 --prompt-data a --hf-checkpoint b --rm-type math"
    )
    assert main(["align", *words.split(), "--label-key", "label"]) == status
    assert len(list(tmp_path.glob("slime-align-*"))) == is_kept


def test_its_options_are_no_flags_of_a_run_and_each_cause_is_named_once() -> None:
    from slime.cli.align import OPTIONS

    assert not {name.removeprefix("--").replace("-", "_") for name in OPTIONS} & all_flags().keys()
    names = [cause.trouble.name for cause in CAUSES]
    assert len(set(names)) == len(names) and all(name.startswith("align-") for name in names)


def test_the_samples_that_differ_most_are_kept() -> None:
    def sample(number: int, apart: float) -> Scored:
        scores = torch.zeros(4).double()
        return Scored(f"{number}", torch.arange(6), scores, scores + apart, torch.ones(4).bool())

    samples = [sample(number, apart) for number, apart in enumerate((0.1, 0.5, 0.0, 0.3))]
    assert [one.name for one in dumps.most_telling(samples, 12)] == ["1", "3"]
    assert [one.name for one in dumps.most_telling(samples, 1)] == ["1"]
