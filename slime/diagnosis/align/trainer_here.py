"""The trainer's model in this process on one rank, without an optimizer: its log-probs and the
outputs of its parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from slime.checkpoints.hf_io import load_hf
from slime.config.config import Config
from slime.diagnosis.align.evidence import Scored
from slime.models import family_of
from slime.models.images import ImageReader
from slime.models.layout_rules import virtual_stages
from slime.models.spec import read_hf_config
from slime.models.vision import seeing
from slime.processes.host import reserve_port
from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.megatron import device

device.install()  # before anything imports megatron

from slime.trainer.megatron import forward, parallel, te_layers  # noqa: E402
from slime.trainer.megatron.model import build_model_chunks  # noqa: E402
from slime.trainer.megatron.packed import PackedMicroBatch, PackingOptions  # noqa: E402
from slime.trainer.megatron.parallel import RankInfo  # noqa: E402
from slime.trainer.megatron.replay import guide_for  # noqa: E402


class TrainerHere:
    """Megatron's model of a Hugging Face directory, built from the run's flags but on one rank.

    Use it as a context manager: a process has only one set of process groups.

    Args:
        images: prepares the samples' images; None: the run reads only text.
    Raises:
        UserError: the trainer does not support the model or a flag.
    """

    def __init__(self, config: Config, directory: str, images: ImageReader | None = None) -> None:
        self._images = images
        self.config = in_one_piece(config)
        self.directory = directory

    def __enter__(self) -> TrainerHere:
        config = self.config
        te_layers.check(config)
        self.hf_config = read_hf_config(self.directory)
        if self._images is not None:
            self.hf_config = seeing(self.hf_config)
        self.spec = (
            family_of(self.hf_config, config.checkpoint.model_name)
            .model_spec(self.hf_config)
            .padded(1)
        )
        reserved = reserve_port("127.0.0.1")
        info = RankInfo(0, 1, 0, "127.0.0.1", reserved.port)
        try:
            self.ranks = parallel.initialise(info, config, virtual_stages(self.spec, config))
        finally:
            reserved.release()
        try:
            self.chunks: list[Any] = list(build_model_chunks(self.spec, config))
            name = config.checkpoint.model_name
            load_hf(self.chunks, self.directory, self.hf_config, model_name=name)
            self.routing = guide_for(self.chunks, self.spec, config)
        except BaseException:
            parallel.shut_down()
            raise
        for chunk in self.chunks:
            chunk.eval()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        parallel.shut_down()

    def log_probs(self, samples: Sequence[Scored], temperature: float) -> list[Tensor]:
        """Score the samples one by one; return log-probs, float64 [R] per sample."""
        return [self._run(sample, temperature)[1].double().cpu() for sample in samples]

    def parts(self, sample: Scored) -> dict[str, Tensor]:
        """Return part → output [L - 1, hidden] for all tokens except the last, with the part names
        of `slime.embedded.model.Observer`."""
        seen: dict[str, Tensor] = {}
        (model,) = self.chunks
        hooks = [
            _watch_input(model.decoder, seen),
            _watch(model.decoder.final_layernorm, "norm", seen),
        ]
        for number, layer in enumerate(model.decoder.layers):
            parts = {
                "attention norm": layer.input_layernorm,
                "attention": getattr(layer, "post_self_attn_layernorm", layer.self_attention),
                "mlp norm": layer.pre_mlp_layernorm,
                "mlp": getattr(layer, "post_mlp_layernorm", layer.mlp),
            }
            hooks += [
                _watch(module, f"{number}.{name}", seen)
                for name, module in parts.items()
                if _computes(module)
            ]
            hooks.append(_watch(layer, str(number), seen))
        try:
            packed, _ = self._run(sample, 1.0)
        finally:
            for hook in hooks:
                hook.remove()
        count = int(sample.tokens.numel()) - 1
        order = packed.origins[packed.origins >= 0]
        # a single sample is not reordered
        assert torch.equal(order, torch.arange(count))
        return {name: value[:count] for name, value in seen.items()}

    def _run(self, sample: Scored, temperature: float) -> tuple[PackedMicroBatch, Tensor]:
        batch = batch_of(sample)
        dense = self.ranks.device.type == "cpu" or self.config.megatron.fp32
        read = None if self._images is None else self._images.read
        vision = None if self.spec.vision is None else self.spec.vision.kind
        options = PackingOptions(self.ranks.device, dense=dense, read_image=read, vision=vision)
        packed = forward.packed_micro_batches(batch, [[0]], options)
        if self.routing is not None:
            self.routing.prepare(batch, packed, "reference")  # the trainer routes by itself
        (scores,) = forward.score(self.chunks, packed, temperature=temperature)
        return packed[0], scores.log_probs


def in_one_piece(config: Config) -> Config:
    """Return the configuration of the same trainer on one rank."""
    megatron = dataclasses.replace(
        config.megatron,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        num_layers_per_virtual_pipeline_stage=None,
        num_virtual_stages_per_pipeline_rank=None,
        context_parallel_size=1,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
        sequence_parallel=False,
        recompute_granularity=None,
        recompute_method=None,
        recompute_num_layers=None,
        recompute_modules=(),
    )
    return dataclasses.replace(config, megatron=megatron)


def batch_of(sample: Scored) -> TrainBatch:
    """Build a batch of one sample for a forward pass."""
    batch = forward.canary_batch(sample.tokens.tolist(), 1)
    count = sample.response_length
    mask = torch.ones(count)
    return dataclasses.replace(
        batch,
        response_lengths=[count],
        loss_masks=[mask],
        steps=[StepPlan([[0]], 1, count)],
        rollout_mask_sums=[count],
        media=[sample.media] if sample.media else [],
        images={one.reference: Path(one.reference).read_bytes() for one in sample.media},
    )


def _computes(module: Any) -> bool:
    """Tell whether a module is not a placeholder. With Transformer Engine, norms are placeholders:
    its linear layers contain them."""
    return type(module).__name__ != "IdentityOp"


def _watch_input(decoder: Any, seen: dict[str, Tensor]) -> Any:
    """Record the input of the first layer as "embedding": token embeddings with image features
    inserted."""

    def keep(_: Any, __: Any, given: dict[str, Any]) -> None:
        seen["embedding"] = _copied(given["hidden_states"])

    return decoder.register_forward_pre_hook(keep, with_kwargs=True)


def _watch(module: Any, name: str, seen: dict[str, Tensor]) -> Any:
    def keep(_: Any, __: Any, output: Any) -> None:
        value, bias = output if isinstance(output, tuple) else (output, None)
        if bias is not None and bias.shape[-1:] == value.shape[-1:]:
            value = value + bias
        seen[name] = _copied(value)

    return module.register_forward_hook(keep)


def _copied(value: Tensor) -> Tensor:
    """Copy an output to the CPU as float32 [tokens, hidden]."""
    return value.detach().float().reshape(-1, value.shape[-1]).cpu().clone()
