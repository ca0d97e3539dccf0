"""The embedded engine computes with adapters what PEFT and merged weights give, several at once,
and refuses what it could not compute."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from slime.embedded.adapters import Adapter, AdapterTable
from slime.embedded.scheduler import Scheduler
from slime.embedded.sequence import Sequence
from slime.embedded.weights import WeightError
from slime.engines.request_fields import BadRequest
from slime.engines.wire.buckets import fingerprint
from slime.models.adapters import peft_name
from tests.support.adapters import (
    Tensors,
    is_outer_side,
    merge_adapter,
    peft_config,
    random_adapter,
    save_adapter,
    stacked_experts,
    with_shared_sides,
)
from tests.support.embedded_models import (
    SHAPES,
    experts_of,
    make_scheduler,
    make_sequence,
    run,
    save_tiny_model,
)

PROMPT = [5, 9, 200, 31, 7, 7, 64, 12, 300, 2, 18, 90, 41, 8, 15, 3, 77, 120, 6, 11]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {shape: save_tiny_model(root / shape, shape) for shape in SHAPES}


@pytest.fixture(scope="module")
def base(directories: dict[str, Path]) -> Path:
    return directories["qwen3"]


def table_of(scheduler: Scheduler, **limits: int) -> AdapterTable:
    return AdapterTable(scheduler.store, **limits)


def sequence_with(adapter: Adapter | None, **params: Any) -> Sequence:
    sequence = make_sequence(PROMPT, logprob_start=0, **{"max_new_tokens": 6, **params})
    sequence.adapter = adapter
    return sequence


def given(sequence: Sequence) -> torch.Tensor:
    return torch.tensor(sequence.input_logprobs + sequence.output_logprobs)


def wanted(model: Any, sequence: Sequence) -> torch.Tensor:
    """Log-prob of each token after the first."""
    tokens = sequence.tokens().tolist()
    with torch.no_grad():
        found = torch.log_softmax(model(torch.tensor([tokens])).logits[0, :-1], -1)
    return found.gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


def transformer(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def assert_same(one: torch.Tensor, other: torch.Tensor, atol: float = 5e-6) -> None:
    torch.testing.assert_close(one, other, atol=atol, rtol=0)


# -- numbers ---------------------------------------------------------------------------------------

TARGETS = {
    "llama_scaled": "all",
    "qwen3": ["q_proj", "v_proj", "down_proj"],
    "mistral": ["embed_tokens", "lm_head", "q_proj", "k_proj", "v_proj"],
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"],
    "glm4": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj"],
}


@pytest.mark.parametrize(
    ("shape", "rslora"), [*((shape, False) for shape in TARGETS), ("qwen3", True)]
)
def test_log_probs_equal_those_of_peft(
    directories: dict[str, Path], tmp_path: Path, shape: str, rslora: bool
) -> None:
    targets: Any = "all-linear" if TARGETS[shape] == "all" else TARGETS[shape]
    torch.manual_seed(3)
    settings = LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, use_rslora=rslora, init_lora_weights=False
    )
    model = get_peft_model(transformer(directories[shape]), settings).eval()
    model.save_pretrained(str(tmp_path))
    scheduler = make_scheduler(directories[shape])
    adapter = table_of(scheduler).load_directory("a", str(tmp_path))
    own = sequence_with(adapter)
    plain = sequence_with(None)
    run(scheduler, [own, plain])
    assert_same(given(own), wanted(model, own))
    with model.disable_adapter():
        assert_same(given(plain), wanted(model, plain))
        assert (given(own) - wanted(model, own)).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("shape", "deterministic"),
    [*((shape, False) for shape in SHAPES), ("qwen3", True), ("qwen3_moe", True)],
)
def test_log_probs_equal_those_of_merged_weights(
    directories: dict[str, Path], tmp_path: Path, shape: str, deterministic: bool
) -> None:
    config, tensors = random_adapter(directories[shape])
    merged = transformer(merge_adapter(directories[shape], config, tensors, tmp_path / "merged"))
    scheduler = make_scheduler(directories[shape], deterministic=deterministic)
    sequence = sequence_with(table_of(scheduler).load("a", config, tensors))
    run(scheduler, [sequence])
    assert_same(given(sequence), wanted(merged, sequence), atol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
def test_embedding_and_output_layer_have_adapters(
    directories: dict[str, Path], deterministic: bool
) -> None:
    base = directories["mistral"]
    config, tensors = random_adapter(base, targets=["embed_tokens", "lm_head"])
    scheduler = make_scheduler(base, deterministic=deterministic)
    table = table_of(scheduler)
    own = sequence_with(table.load("a", config, tensors))
    run(scheduler, [own, sequence_with(None)])
    scheduler = make_scheduler(base)
    weights = scheduler.store.named
    for module, transposed in (("model.embed_tokens", True), ("lm_head", False)):
        up, down = (tensors[peft_name(module, side)] for side in ("B", "A"))
        delta = 2.0 * up @ down
        weights[f"{module}.weight"].add_(delta.t() if transposed else delta)
    merged = sequence_with(None)
    run(scheduler, [merged])
    assert own.output_ids == merged.output_ids
    assert_same(given(own), given(merged), atol=2e-5)


def test_vocabularies_that_are_one_weight_have_none(base: Path) -> None:
    scheduler = make_scheduler(base)
    config = peft_config(4, 8.0, ["lm_head"])
    with pytest.raises(WeightError, match="names lm_head, the model has no such layer"):
        table_of(scheduler).load("a", config, {})


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "stacked": stacked_experts,
    "shared-outer": lambda tensors: stacked_experts(tensors, shares=True),
    "gate and up in one": lambda tensors: stacked_experts(tensors, shares=True, fuses=True),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", ["qwen3_moe", "deepseek_v3", "glm4_moe", "gpt_oss"])
def test_experts_in_one_tensor_are_those_of_each(
    directories: dict[str, Path], shape: str, form: str
) -> None:
    config, tensors = random_adapter(directories[shape])
    if form != "stacked":
        tensors = with_shared_sides(tensors)
    stacked = FORMS[form](tensors)
    scheduler = make_scheduler(directories[shape], record_experts=True)
    table = table_of(scheduler)
    single = sequence_with(table.load("single", config, tensors))
    together = sequence_with(table.load("stacked", config, stacked), temperature=1.0)
    run(scheduler, [single, together])
    assert single.output_ids == together.output_ids
    assert_same(given(single), given(together))
    assert (experts_of(single) == experts_of(together)).all()
    assert table.find("stacked").fingerprints() == {
        name: fingerprint(tensor) for name, tensor in stacked.items()
    }


def test_a_side_that_experts_share_is_held_once(directories: dict[str, Path]) -> None:
    config, tensors = random_adapter(directories["qwen3_moe"])
    table = table_of(make_scheduler(directories["qwen3_moe"]))
    single = table.load("single", config, tensors)
    shared = table.load("shared", config, stacked_experts(with_shared_sides(tensors), shares=True))
    copies = sum(tensor.nbytes for name, tensor in tensors.items() if is_outer_side(name))
    assert single.nbytes - shared.nbytes == copies * 4 // 5


def test_an_adapter_of_zeros_is_the_base_bit_for_bit(base: Path) -> None:
    config, tensors = random_adapter(base)
    zero = {name: t * 0 if ".lora_B." in name else t for name, t in tensors.items()}
    scheduler = make_scheduler(base)
    own = sequence_with(table_of(scheduler).load("a", config, zero))
    plain = sequence_with(None)
    run(scheduler, [own])
    run(make_scheduler(base), [plain])
    assert torch.equal(given(own), given(plain)) and own.output_ids == plain.output_ids


@pytest.mark.parametrize(
    ("shape", "deterministic", "prefill_tokens"),
    [("qwen3", False, 7), ("qwen3", True, 2048), ("deepseek_v3", False, 7)],
)
def test_a_mixed_batch_equals_single_requests(
    directories: dict[str, Path], shape: str, prefill_tokens: int, deterministic: bool
) -> None:
    adapters = [random_adapter(directories[shape], rank=2 + seed, seed=seed) for seed in range(3)]

    def sequences(table: AdapterTable) -> list[Sequence]:
        for number, (config, tensors) in enumerate(adapters):
            table.load(str(number), config, tensors)
        order = ["0", "1", None, "0", "2", None, "1", "0"]
        found = [None if name is None else table.find(name) for name in order]
        return [
            sequence_with(adapter, sampling_seed=seed, max_new_tokens=4 + 2 * (seed % 3))
            for seed, adapter in enumerate(found)
        ]

    def scheduler() -> Scheduler:
        return make_scheduler(
            directories[shape], prefill_tokens=prefill_tokens, deterministic=deterministic
        )

    together = scheduler()
    mixed = sequences(table_of(together))
    run(together, mixed)
    alone = scheduler()
    for sequence, single in zip(mixed, sequences(table_of(alone)), strict=True):
        run(alone, [single])
        assert sequence.output_ids == single.output_ids
        if deterministic:
            assert torch.equal(given(sequence), given(single))
        else:
            assert_same(given(sequence), given(single), atol=2e-5)


# -- the adapter stays with its sequence -----------------------------------------------------------


def test_a_prefix_is_only_found_under_the_same_adapter(base: Path) -> None:
    scheduler = make_scheduler(base)
    table = table_of(scheduler)
    first, second = (
        table.load(name, *random_adapter(base, seed=seed)) for seed, name in enumerate("ab")
    )

    def cached(adapter: Adapter | None) -> int:
        sequence = make_sequence([*PROMPT, 99], max_new_tokens=3)
        sequence.adapter = adapter
        run(scheduler, [sequence])
        return sequence.num_cached

    assert [cached(first), cached(second), cached(None)] == [0, 0, 0]
    assert [cached(first), cached(second), cached(None)] == [len(PROMPT)] * 3
    table.unload("a")
    again = table.load("a", *random_adapter(base, seed=0))
    assert cached(again) == 0  # another load may bring other tensors


def test_a_group_of_one_adapter_is_prefilled_once(base: Path) -> None:
    scheduler = make_scheduler(base)
    adapter = table_of(scheduler).load("a", *random_adapter(base))
    group = [make_sequence(PROMPT, rid=str(i), sampling_seed=i) for i in range(6)]
    for sequence in group[:3]:
        sequence.adapter = adapter
    run(scheduler, group)
    assert scheduler.counters.prefilled_tokens == 2 * len(PROMPT)
    assert [s.num_cached for s in group] == [0, *[len(PROMPT) - 1] * 2] * 2


def test_a_retracted_sequence_keeps_its_adapter_even_when_unloaded(base: Path) -> None:
    expected, sequence = (
        make_scheduler(base, prefill_tokens=8),
        make_scheduler(base, prefill_tokens=8),
    )
    outputs = []
    for scheduler, disturbs in ((expected, False), (sequence, True)):
        table = table_of(scheduler)
        own = sequence_with(table.load("a", *random_adapter(base)), max_new_tokens=20)
        other = sequence_with(None, max_new_tokens=20)
        scheduler.submit([own, other])
        for _ in range(8):
            scheduler.step()
        if disturbs:
            table.unload("a")
            table.load("a", *random_adapter(base, seed=5))
            scheduler.retract_all()
        run(scheduler, [])
        outputs.append([own, other])
    for one, two in zip(*outputs, strict=True):
        assert one.output_ids == two.output_ids
        assert_same(given(one), given(two), atol=2e-5)


def test_an_unloaded_adapter_goes_with_its_last_sequence(base: Path) -> None:
    scheduler = make_scheduler(base)
    table = table_of(scheduler)
    sequence = sequence_with(table.load("a", *random_adapter(base)))
    scheduler.submit([sequence])
    scheduler.step()
    table.unload("a")
    with pytest.raises(BadRequest, match=r"no adapter 'a' is loaded \(loaded: none\)"):
        table.find("a")
    assert [adapter.name for adapter in table.resident] == ["a"] and table.loaded == {}
    run(scheduler, [])
    del sequence
    scheduler.flush()
    assert table.resident == []


def test_tokens_report_the_version_of_their_adapter(base: Path) -> None:
    scheduler = make_scheduler(base)
    table = table_of(scheduler)
    stated = sequence_with(table.load("a", *random_adapter(base), version="7"))
    plain = sequence_with(table.load("b", *random_adapter(base)))
    scheduler.submit([stated, plain])
    scheduler.step()
    scheduler.store.version = "8"
    run(scheduler, [])
    assert stated.versions == [(0, "7")] and stated.final_version == "7"
    assert [version for _, version in plain.versions] == ["0", "8"]


def test_tensors_are_cast_before_their_fingerprints(base: Path) -> None:
    config, tensors = random_adapter(base)
    adapter = table_of(make_scheduler(base, dtype="bfloat16")).load("a", config, tensors)
    expected = {name: fingerprint(tensor.bfloat16()) for name, tensor in tensors.items()}
    assert adapter.fingerprints() == expected
    name = next(iter(tensors))
    assert adapter.fingerprints([name]) == {name: expected[name]}
    with pytest.raises(WeightError, match="adapter 'a' has no tensor other"):
        adapter.fingerprints(["other"])


def test_memory_goes_to_the_host_and_comes_back(base: Path) -> None:
    config, tensors = random_adapter(base)
    scheduler = make_scheduler(base)
    adapter = table_of(scheduler).load("a", config, tensors)
    before = adapter.fingerprints()
    first = sequence_with(adapter)
    run(scheduler, [first])
    adapter.release()
    assert adapter.nbytes == 0 and adapter.fingerprints() == before
    adapter.resume(torch.float32, torch.device("cpu"))
    again = sequence_with(adapter)
    run(scheduler, [again])
    assert adapter.fingerprints() == before
    assert again.output_ids == first.output_ids


# -- what is refused -------------------------------------------------------------------------------

Q0 = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B1 = "base_model.model.model.layers.1.mlp.down_proj.lora_B.weight"


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type must be LORA, got 'IA3'"),
        ({"use_dora": True}, "sets use_dora to True, .* DoRA scales"),
        ({"bias": "all"}, "sets bias to 'all'"),
        ({"lora_bias": True}, "sets lora_bias"),
        ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern .* one rank"),
        ({"alpha_pattern": {"q_proj": 8}}, "sets alpha_pattern .* one factor"),
        ({"modules_to_save": ["lm_head"]}, "sets modules_to_save"),
        ({"fan_in_fan_out": True}, "sets fan_in_fan_out"),
        ({"layer_replication": [[0, 2]]}, "sets layer_replication"),
        ({"layers_to_transform": [1]}, "sets layers_to_transform"),
        ({"exclude_modules": ["o_proj"]}, "target_modules does not name its layer, or exclude_mod"),
        ({"a_new_field": 5}, "sets a_new_field to 5"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights is 'pissa_niter_4'"),
        ({"init_lora_weights": "olora"}, "init_lora_weights is 'olora'"),
        ({"r": 0}, "r must be an integer of at least 1, got 0"),
        ({"r": None}, "r must be"),
        ({"r": 8}, rf"{Q0} has shape \[4, 48\], rank and model make it \[8, 48\]"),
        ({"lora_alpha": 0}, "lora_alpha must be a number above 0"),
        ({"lora_alpha": float("nan")}, "lora_alpha must be"),
        ({"target_modules": None}, "target_modules must be"),
        ({"target_modules": "("}, "is not a regular expression"),
        ({"target_modules": "no.*such"}, "matches no layer"),
        ({"target_modules": ["q_proj", "gate"]}, "names gate, the model has no such layer"),
        ({"target_modules": ["q_proj", "lm_head"]}, "names lm_head"),
        (
            {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]},
            "down_proj.lora_A.weight is there, and target_modules does not name its layer",
        ),
    ],
)
def test_a_config_that_cannot_be_honoured_is_refused_by_name(
    base: Path, fields: dict[str, Any], said: str
) -> None:
    config, tensors = random_adapter(base)
    table = table_of(make_scheduler(base))
    with pytest.raises(WeightError, match=said):
        table.load("a", config | fields, tensors)
    assert table.resident == []


def without(tensors: Tensors, *names: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name not in names}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: without(t, Q0), f"{Q0} is missing"),
        (lambda t: without(t, B1), f"{B1} is missing"),
        (lambda t: {}, "is missing"),
        (lambda t: t | {Q0: t[Q0][:, 1:]}, r"q_proj.lora_A.weight has shape \[4, 47\]"),
        (lambda t: t | {B1: t[B1].T.contiguous()}, r"down_proj.lora_B.weight has shape \[4, 48\]"),
        (lambda t: t | {Q0: t[Q0] / 0}, f"{Q0} has numbers that are not finite"),
        (lambda t: t | {Q0: t[Q0].int()}, f"{Q0} is torch.int32"),
        (lambda t: t | {"stray": t[Q0]}, "stray is no name of an adapter's tensor"),
        (
            lambda t: t | {Q0.replace("lora_A", "lora_magnitude_vector"): t[Q0]},
            "lora_magnitude_vector.weight is no name",
        ),
        (
            lambda t: t | {Q0.replace("layers.0", "layers.7"): t[Q0]},
            "layers.7.self_attn.q_proj.lora_A.weight belongs to no layer",
        ),
        (
            lambda t: t | {"base_model.model.model.layers.0.mlp.gate.lora_A.weight": t[Q0]},
            "mlp.gate.lora_A.weight belongs to no layer",
        ),
        (
            lambda t: t | {"base_model.model.lm_head.lora_A.weight": t[Q0]},
            "lm_head.lora_A.weight belongs to no layer",
        ),
        (lambda t: t | {Q0.removeprefix("base_model."): t[Q0]}, "is no name"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    base: Path, change: Callable[[Tensors], Tensors], said: str
) -> None:
    config, tensors = random_adapter(base)
    table = table_of(make_scheduler(base))
    with pytest.raises(WeightError, match=said):
        table.load("a", config, change(tensors))
    assert table.resident == []


def test_experts_that_do_not_fit_are_refused_by_name(directories: dict[str, Path]) -> None:
    directory = directories["qwen3_moe"]
    config, tensors = random_adapter(directory)
    table = table_of(make_scheduler(directory))
    layer = "base_model.model.model.layers.1.mlp.experts."
    one = f"{layer}3.up_proj.lora_B.weight"
    with pytest.raises(WeightError, match=f"{one} is missing"):
        table.load("a", config, without(tensors, one))
    with pytest.raises(WeightError, match=r"experts\.9\..* belongs to no layer"):
        table.load("a", config, tensors | {one.replace(".3.", ".9."): tensors[one]})
    stacked = stacked_experts(tensors)
    name = f"{layer}down_proj.lora_A.weight"
    with pytest.raises(WeightError, match=rf"{name} has shape \[4, 4, 32\], .* \[5, 4, 32\]"):
        table.load("a", config, stacked | {name: stacked[name][1:]})
    with pytest.raises(WeightError, match=f"{name} is there, .* or it comes twice"):
        table.load("a", config, tensors | {name: stacked[name]})
    # PEFT's own form, which SGLang takes and does not apply
    nested = f"{layer}base_layer.lora_A.weight"
    with pytest.raises(WeightError, match=f"{nested} belongs to no layer"):
        table.load("a", config, tensors | {nested: stacked[name]})


def test_an_adapter_of_another_base_is_refused(directories: dict[str, Path]) -> None:
    table = table_of(make_scheduler(directories["qwen3"]))
    with pytest.raises(WeightError, match=r"q_proj\.lora_B\.weight has shape"):
        table.load("a", *random_adapter(directories["mistral"]))
    with pytest.raises(WeightError, match="the model has no such layer"):
        table.load("a", *random_adapter(directories["deepseek_v3"]))


@pytest.mark.parametrize(
    "targets",
    [
        "all-linear",
        ["all-linear"],
        r".*\.(q|k|v|o|gate|up|down)_proj",
        [
            f"model.layers.{layer}.{leaf}"
            for layer in range(2)
            for leaf in (
                *(f"self_attn.{x}_proj" for x in "qkvo"),
                *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
            )
        ],
    ],
)
def test_targets_may_be_names_paths_or_a_pattern(base: Path, targets: Any) -> None:
    config, tensors = random_adapter(base)
    table_of(make_scheduler(base)).load("a", config | {"target_modules": targets}, tensors)


def test_names_and_limits(base: Path, tmp_path: Path) -> None:
    config, tensors = random_adapter(base)
    table = table_of(make_scheduler(base), max_rank=4, max_loaded=2)
    table.load("a", config, tensors)
    with pytest.raises(WeightError, match="adapter 'a' is already loaded"):
        table.load("a", config, tensors)
    with pytest.raises(WeightError, match="r is 5, --max-lora-rank of this engine is 4"):
        table.load("b", *random_adapter(base, rank=5))
    table.load("b", config, tensors)
    with pytest.raises(WeightError, match=r"2 adapters are loaded \(a, b\), --max-loaded-loras is"):
        table.load("c", config, tensors)
    with pytest.raises(WeightError, match=r"no adapter 'c' is loaded \(loaded: a, b\)"):
        table.unload("c")
    table.unload("a")
    table.load_directory("c", str(save_adapter(tmp_path / "saved", config, tensors)))
    assert table.find("c").path == str(tmp_path / "saved")
    off = AdapterTable(make_scheduler(base).store, enabled=False)
    for refused in (lambda: off.find("a"), lambda: off.load("a", config, tensors)):
        with pytest.raises(BadRequest, match="without --enable-lora"):
            refused()


def test_directories_that_cannot_be_read(base: Path, tmp_path: Path) -> None:
    config, tensors = random_adapter(base)
    table = table_of(make_scheduler(base))

    def refusal() -> str:
        with pytest.raises(WeightError) as caught:
            table.load_directory("a", str(tmp_path))
        return str(caught.value)

    assert "adapter_config.json cannot be read" in refusal()
    save_adapter(tmp_path, config, tensors)
    (tmp_path / "added_tokens.json").write_text('{"<new>": 384}')
    assert "adds the token '<new>'" in refusal()
    (tmp_path / "added_tokens.json").write_text('{"<old>": 5}')
    table.load_directory("fits", str(tmp_path))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"cut")
    assert "is not a readable safetensors file" in refusal()
    (tmp_path / "adapter_model.safetensors").unlink()
    assert "adapter_model.safetensors does not exist" in refusal()
    (tmp_path / "adapter_config.json").write_text("{")
    assert "is not valid JSON" in refusal()


def test_peft_loads_what_the_tests_write(base: Path, tmp_path: Path) -> None:
    """So that the engine is compared with PEFT's meaning of these files."""
    config, tensors = random_adapter(base)
    save_adapter(tmp_path, config, tensors)
    model = PeftModel.from_pretrained(transformer(base), tmp_path).eval()
    scheduler = make_scheduler(base)
    sequence = sequence_with(table_of(scheduler).load("a", config, tensors))
    run(scheduler, [sequence])
    assert_same(given(sequence), wanted(model, sequence), atol=2e-5)


def test_memory_that_comes_back_while_an_adapter_is_loaded_has_it_too(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = make_scheduler(base)
    table = table_of(scheduler)
    table._released = True  # `release` does nothing for a model on a CPU
    fill = Adapter.fill
    threads: list[threading.Thread] = []

    def fill_meanwhile(adapter: Adapter, *given: Any) -> None:
        if not threads:
            threads.append(threading.Thread(target=table.resume))
            threads[0].start()
            threads[0].join(0.2)  # the load may hold it up
        fill(adapter, *given)

    monkeypatch.setattr(Adapter, "fill", fill_meanwhile)
    config, tensors = random_adapter(base, targets=["q_proj"])
    adapter = table.load("a", config, tensors)
    threads[0].join(30)
    assert adapter.products
