"""What of the GPU benchmarks can be wrong on any machine: how the trainer's peer hands packed
sequences to the kernel, and how an engine is awaited."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import AttentionInterface

from benchmarks.gpu.setting import await_engine
from benchmarks.gpu.trainer import PEER_ATTENTION, SHAPES, packed_flash_attention
from slime.processes.host import free_port
from slime.trainer.megatron import (
    attention,
    backend,  # noqa: F401  (prepares a host without a GPU for megatron)
)
from slime.trainer.megatron.packed import PackedSequences


def sequence_by_sequence(
    query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences, scale: float
) -> Tensor:
    """The kernel's result, [T, heads, dim], on a CPU."""
    ends = sequences.cu_seqlens_q.tolist()
    outputs = []
    for start, end in itertools.pairwise(ends):
        q, k, v = (x[start:end].transpose(0, 1)[None] for x in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        outputs.append(out[0].transpose(0, 1))
    assert sequences.max_seqlen_q == max(end - start for start, end in itertools.pairwise(ends))
    return torch.cat(outputs)


def test_the_peer_computes_what_separate_sequences_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "torch_varlen", sequence_by_sequence)
    AttentionInterface.register(PEER_ATTENTION, packed_flash_attention)
    config = dict(SHAPES["tiny"])
    made = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        made, dtype=torch.float32, attn_implementation=PEER_ATTENTION
    )
    tokens = torch.randint(0, 1000, (1, 12))
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    ends = torch.tensor([0, 5, 12], dtype=torch.int32)
    packed = model(
        input_ids=tokens,
        position_ids=positions,
        use_cache=False,
        cu_seq_lens_q=ends,
        max_length_q=7,
    ).logits
    model.set_attn_implementation("sdpa")
    alone = [
        model(input_ids=part, use_cache=False).logits for part in (tokens[:, :5], tokens[:, 5:])
    ]
    assert torch.allclose(packed, torch.cat(alone, dim=1), atol=1e-5)


@pytest.fixture
def slow_engine() -> Iterator[str]:
    """Not ready when it is asked for the first time."""
    answers = iter([503, 200])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(next(answers) if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(10)
    server.server_close()
    assert next(answers, None) is None  # it was asked until it was ready


def test_an_engine_is_awaited(slow_engine: str) -> None:
    await_engine(slow_engine, 30)


def test_an_engine_that_does_not_come_is_an_error() -> None:
    with pytest.raises(TimeoutError, match="was not ready within 0 s"):
        await_engine(f"http://127.0.0.1:{free_port()}", 0.1)
