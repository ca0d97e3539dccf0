"""The trainer's kernels on a GPU compute what transformers computes: every token mixer, in bfloat16
as it trains there, and in float32."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slime.models.layouts import DeltaNetSizes
from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.megatron import delta_net
from slime.trainer.megatron.flash import PackedKernel
from slime.trainer.megatron.image_attention import attend_within_images
from slime.trainer.megatron.packed import DeltaRuns, LaterTokens, PackedSequences
from slime.trainer.megatron.sinks import attend_with_sinks, explicit_with_sinks
from tests.support.tiny_models import OTHER_FAMILIES, stack_experts
from tests.support.trainers import LOSS, gradients, trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

#: Longer than a window, than a block of the delta rule, and one that is shorter than both.
LENGTHS = [300, 40, 7, 129, 64, 200]
VOCAB = 512
#: Widths that kernels take.
WIDE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "eos_token_id": 1,
    "bos_token_id": None,
}
WIDE_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 128},
    # all experts, as rounding would send tokens to others
    "gpt_oss": {"sliding_window": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
    "gpt_oss, whole": {"num_key_value_heads": 1, "num_experts_per_tok": 4},
    "gemma3_text": {"sliding_window": 32, "query_pre_attn_scalar": 64},
    "gemma3_text, wide heads": {
        "sliding_window": 32, "query_pre_attn_scalar": 256, "head_dim": 256,
    },
    "olmo3": {"sliding_window": 32},
    "phi3": {"sliding_window": 32},
    "smollm3": {},
    "qwen3_next": {**WIDE_DELTA, "moe_intermediate_size": 128,
                   "shared_expert_intermediate_size": 128},
    "qwen3_5_text": WIDE_DELTA,
    "qwen3_5_text, wide heads": {**WIDE_DELTA, "head_dim": 256},
    "qwen3_5_moe_text": {**WIDE_DELTA, "moe_intermediate_size": 128,
                         "shared_expert_intermediate_size": 128},
    "deepseek_v3": {
        "head_dim": 32, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
        "moe_intermediate_size": 128,
    },
    "deepseek_v3, wide heads": {
        "head_dim": 64, "num_key_value_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 64,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_intermediate_size": 128,
    },
}  # fmt: skip


def save_wide(kind: str, directory: Path) -> torch.nn.Module:
    """Save a random model of ``kind`` in float32 to ``directory``, and return it."""
    config_class, extra = OTHER_FAMILIES[kind.removesuffix(", wide heads")]
    config = config_class(**{**WIDE, "rms_norm_eps": 1e-5, **extra, "head_dim": 64, **KINDS[kind]})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "conv" not in name:
                parameter.mul_(3)  # a softmax that is not flat
            elif name.endswith("sinks"):
                parameter.normal_()
    model.save_pretrained(directory)
    if kind.startswith("qwen3_5_moe"):
        stack_experts(directory)
    return model.eval()


def batch_of(lengths: list[int]) -> TrainBatch:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, VOCAB, (length,), generator=generator) for length in lengths]
    responses = [length - 3 for length in lengths]
    count = len(lengths)
    halves = [list(range(count // 2)), list(range(count // 2, count))]
    return TrainBatch(
        rollout_id=0,
        tokens=tokens,
        response_lengths=responses,
        loss_masks=[torch.ones(response) for response in responses],
        rewards=[(-1.0) ** i * (1 + i / 4) for i in range(count)],
        raw_rewards=[0.0] * count,
        sample_indices=list(range(count)),
        group_indices=[0] * count,
        trajectory_ids=list(range(count)),
        rollout_mask_sums=[float(response) for response in responses],
        truncated=[False] * count,
        steps=[StepPlan(halves, count, sum(responses))],
    )


def reference_log_probs(model: torch.nn.Module, batch: TrainBatch) -> Tensor:
    device = next(model.parameters()).device
    parts = []
    for tokens, response in zip(batch.tokens, batch.response_lengths):
        with torch.no_grad():
            logits = model(tokens[None].to(device)).logits[0].float()
        log_probs = (logits / 0.8).log_softmax(-1)[:-1]
        parts.append(log_probs.gather(1, tokens[1:, None].to(device))[-response:, 0].cpu())
    return torch.cat(parts)


def scored(directory: Path, **flags: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of `batch_of`, and the gradients of a step."""
    backend = trainer(hf_checkpoint=str(directory), **LOSS, **flags)
    batch = batch_of(LENGTHS)
    generator = torch.Generator().manual_seed(2)
    for chunk in backend.model_chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapter" in name:  # B begins with zeros
                drawn = torch.randn(parameter.shape, generator=generator) / 20
                parameter.data.copy_(drawn)
    try:
        scores = backend.log_probs(batch)
        assert scores is not None
        grads = {name: grad.float().cpu() for name, grad in gradients(backend, batch).items()}
    finally:
        backend.close()
    return torch.cat([score.float().cpu() for score in scores]), grads


def _has_rotary_kinds() -> bool:
    """Whether transformers gives OLMo-3's windowed layers rotary frequencies of their own; 5.12
    gives all layers the scaled ones."""
    from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

    return "layer_type" in inspect.signature(Olmo3RotaryEmbedding.forward).parameters


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_a_gpu_equal_transformers(kind: str, tmp_path: Path) -> None:
    if kind == "olmo3" and not _has_rotary_kinds():
        pytest.skip(f"transformers {transformers.__version__} computes another OLMo-3")
    model = save_wide(kind, tmp_path).cuda()
    batch = batch_of(LENGTHS)
    exact = reference_log_probs(model, batch)
    rounded = reference_log_probs(model.to(torch.bfloat16), batch)
    del model
    in_float32, precise = scored(tmp_path)
    in_bfloat16, coarse = scored(tmp_path, bf16=True)

    difference = (in_float32 - exact).abs().max().item()
    ours = (in_bfloat16 - exact).abs().mean().item()
    theirs = (rounded - exact).abs().mean().item()
    # what a router is told depends on the differences of experts, which are mostly rounding here
    compared = [name for name in precise if "router" not in name]
    cosine = cosine_similarity([coarse[n] for n in compared], [precise[n] for n in compared])
    print(
        f"{kind}: float32 differs by {difference:.1e}; bfloat16 by {ours:.4f} on average, "
        f"transformers' by {theirs:.4f}; cosine of gradients {cosine:.5f}"
    )
    assert difference < 1e-4
    assert ours < 1.5 * theirs + 1e-3
    assert cosine > 0.99


@pytest.mark.parametrize("experts", ["per-expert", "shared-outer"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss", "qwen3_5_moe_text"])
def test_adapters_by_kernels_equal_those_in_float32(
    kind: str, experts: str, tmp_path: Path
) -> None:
    save_wide(kind, tmp_path)
    flags = {"lora_rank": 16, "lora_experts": experts}
    plain, _ = scored(tmp_path)
    exact, precise = scored(tmp_path, **flags)
    rounded, coarse = scored(tmp_path, bf16=True, **flags)
    of_experts = [name for name in precise if "expert" in name]
    cosine = cosine_similarity([coarse[n] for n in precise], [precise[n] for n in precise])
    moved = (exact - plain).abs().mean().item()
    error = (rounded - exact).abs().mean().item()
    print(f"{kind}, {experts}: moved {moved:.3f}, bfloat16 differs by {error:.4f}, {cosine:.5f}")
    assert len(of_experts) > 0 and all(precise[name].abs().sum() > 0 for name in of_experts)
    assert moved > 3 * error
    assert cosine > 0.9  # rounding sends some tokens to other experts


def test_sinks_by_a_kernel_equal_their_definition() -> None:
    heads, width, window = 4, 64, 33
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query, key, value = (torch.randn(total, heads, width, device="cuda") for _ in range(3))
    sinks = torch.randn(heads, device="cuda")
    grad = torch.randn(total, heads, width, device="cuda")
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()
    sequences = PackedSequences(
        cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    place = torch.arange(total, device="cuda")
    sample = torch.repeat_interleave(torch.tensor(LENGTHS)).cuda()
    distance = place[:, None] - place[None]
    seen = (sample[:, None] == sample[None]) & (distance >= 0)

    for size in (None, window):
        allowed = seen if size is None else seen & (distance < size)
        bias = torch.zeros(1, 1, total, total, device="cuda").masked_fill(~allowed, -torch.inf)
        inputs = [x.clone().requires_grad_() for x in (query, key, value, sinks)]
        q, k, v = (x.transpose(0, 1)[None] for x in inputs[:3])
        expected = explicit_with_sinks(q, k, v, inputs[3], bias, width**-0.5)[0].transpose(0, 1)
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        coarse = [x.to(torch.bfloat16).requires_grad_() for x in (query, key, value, sinks)]
        kernel = PackedKernel.of(sequences, width**-0.5, size)
        found = attend_with_sinks(coarse[0], coarse[1], coarse[2], coarse[3], kernel)
        grads = torch.autograd.grad(found, coarse, grad.to(torch.bfloat16))
        assert (found.float() - expected).abs().max() < 0.05
        for ours, theirs in zip(grads, expected_grads, strict=True):
            assert cosine_similarity([ours.float()], [theirs]) > 0.9999


def test_images_by_two_calls_equal_attention_with_a_mask() -> None:
    """With the widths of Gemma 3: heads of 256 entries, two query heads per key."""
    heads, groups, width = 4, 2, 256
    torch.manual_seed(0)
    total = sum(LENGTHS)
    query, key, value, grad = (
        torch.randn(total, count, width, device="cuda") for count in (heads, groups, groups, heads)
    )
    ends = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    images = torch.full((total,), -1)
    images[20:150] = 0  # in the first sequence
    images[150:200] = 1
    images[300:340] = 0  # the whole second sequence
    images[-100:-1] = 0
    later = LaterTokens.of(images, ends[:-1].long())
    assert later is not None
    sequences = PackedSequences(
        cu_seqlens_q=ends.cuda(), max_seqlen_q=max(LENGTHS), later=later.to(torch.device("cuda"))
    )
    place = torch.arange(total)
    sample = torch.repeat_interleave(torch.tensor(LENGTHS))
    distance = place[:, None] - place[None]
    same_image = (images[:, None] == images[None]) & (images >= 0)
    seen = (sample[:, None] == sample[None]) & ((distance >= 0) | same_image)

    for size in (None, 33):
        allowed = (seen if size is None else seen & (distance < size)).cuda()
        inputs = [x.clone().requires_grad_() for x in (query, key, value)]
        q, k, v = (x.repeat_interleave(heads // x.size(1), 1).transpose(0, 1) for x in inputs)
        scores = (q @ k.transpose(1, 2) * width**-0.5).masked_fill(~allowed, -torch.inf)
        expected = (torch.softmax(scores, dim=-1) @ v).transpose(0, 1)
        expected_grads = torch.autograd.grad(expected, inputs, grad)
        coarse = [x.to(torch.bfloat16).requires_grad_() for x in (query, key, value)]
        found = attend_within_images(coarse[0], coarse[1], coarse[2], sequences, width**-0.5, size)
        grads = torch.autograd.grad(found, coarse, grad.to(torch.bfloat16))
        assert (found.float() - expected).abs().max() < 0.05
        for ours, theirs in zip(grads, expected_grads, strict=True):
            assert cosine_similarity([ours.float()], [theirs]) > 0.9999


def test_delta_rule_by_kernels_equals_torch() -> None:
    sizes = DeltaNetSizes(key_heads=2, per_key=2, key=64, value=64, conv=4)
    torch.manual_seed(0)
    total = sum(LENGTHS)
    runs = DeltaRuns(LENGTHS, [-1] * len(LENGTHS), torch.device("cuda"))
    # the rows of a key head that the convolution sees, and its scalars
    mixed = torch.randn(total, 2, sum(sizes.of_key_head[:3]), device="cuda")
    scalars = torch.randn(total, 2, 2 * sizes.per_key, device="cuda")
    conv = torch.randn(mixed[0].numel(), sizes.conv, device="cuda") / 2
    a_log = torch.rand(sizes.value_heads, device="cuda").add(0.5).log()
    dt_bias = torch.randn(sizes.value_heads, device="cuda")
    grad = torch.randn(total, sizes.value_heads, sizes.value, device="cuda")

    def computed(function: Any, dtype: torch.dtype) -> list[Tensor]:
        inputs = [x.to(dtype).requires_grad_() for x in (mixed, scalars, conv)]
        inputs += [x.clone().requires_grad_() for x in (a_log, dt_bias)]
        output = function(*inputs, runs, sizes)
        return [output, *torch.autograd.grad(output, inputs, grad.to(output.dtype))]

    expected = computed(delta_net._with_torch, torch.float32)
    rounded = computed(delta_net._with_torch, torch.bfloat16)
    found = computed(delta_net._with_kernels, torch.bfloat16)
    for ours, peer, exact in zip(found, rounded, expected, strict=True):
        error = 1 - cosine_similarity([ours.float()], [exact])
        limit = 1 - cosine_similarity([peer.float()], [exact])
        assert error < 3 * limit + 1e-4


def cosine_similarity(left: list[Tensor], right: list[Tensor]) -> float:
    a, b = (torch.cat([x.double().flatten() for x in side]) for side in (left, right))
    return float(a @ b / (a.norm() * b.norm()))
