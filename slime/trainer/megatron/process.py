"""The common part of all trainer processes: ranks, architecture, packing of micro-batches, and the
checkpoint writer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from slime.config.config import Config
from slime.config.flag import option_of
from slime.errors import UserError
from slime.samples.batch import TrainBatch, TrainLayout
from slime.trainer.megatron import device
from slime.user_code.loading import check_returns_nothing, named, user_function

device.install()  # before anything imports megatron

from megatron.core import parallel_state

from slime.checkpoints.reward_models import classifier_of
from slime.checkpoints.saving import CheckpointWriter
from slime.models import family_of
from slime.models.images import ImageReader
from slime.models.layout_rules import check_layout, virtual_stages
from slime.models.spec import ModelSpec, read_hf_config
from slime.models.vision import seeing
from slime.trainer.megatron import forward, optimizer, parallel, te_layers
from slime.trainer.megatron.moe_layer import uses_balance_losses
from slime.trainer.megatron.packed import PackedMicroBatch, PackingOptions
from slime.trainer.megatron.parallel import RankInfo
from slime.trainer.non_finite import FailedStep
from slime.trainer.user_functions import UserFunctions

#: Bytes of prepared images that a rank keeps between the passes over a rollout.
_KEPT_IMAGES = 1 << 31


class TrainerProcess:
    """One rank of a group of processes that train a model together.

    Attributes:
        writer: writes checkpoints.
        failed_step: the last step, if it ended in `NonFiniteTraining`.
        model_chunks: the trained model as Megatron's DDP-wrapped pipeline stage(s).
        spec, hf_config: the model's architecture and its Hugging Face config; `join` sets them.
    """

    model_chunks: list[optimizer.DataParallel]

    def __init__(self, config: Config, rank_info: RankInfo) -> None:
        self.config = config
        self.rank_info = rank_info
        self.writer = CheckpointWriter(in_background=config.checkpoint.async_save)
        self.failed_step: FailedStep | None = None
        self.images: ImageReader | None = None
        self.hf_config: dict[str, Any] | None = None

    def join(self, spec: ModelSpec | None = None) -> None:
        """Join the process groups. Collective.

        Args:
            spec: the architecture; default: that of ``--hf-checkpoint``.
        Raises:
            UserError: the layout does not fit the ranks or the model.
        """
        config = self.config
        te_layers.check(config)
        if config.megatron.transformer.get("deterministic_mode"):
            device.set_deterministic()  # before any communicator or matrix product exists
        self.functions = UserFunctions.load(config)
        if spec is None:
            spec, self.hf_config = self._read_model()
        self.spec = spec
        check_layout(self.spec, config)
        if self.spec.vision is not None:
            self.images = ImageReader(
                config.checkpoint.model_dir, config.images.image_max_pixels, _KEPT_IMAGES
            )
        self.ranks = parallel.initialise(self.rank_info, config, virtual_stages(self.spec, config))
        self._call_hook("custom_megatron_init_path", config.train.custom_megatron_init_path)

    def _read_model(self) -> tuple[ModelSpec, dict[str, Any]]:
        """Return architecture and Hugging Face config of ``--hf-checkpoint``."""
        flags = self.config.checkpoint
        if flags.hf_checkpoint is None:
            raise UserError(
                "no --hf-checkpoint",
                why="the trainer takes the architecture from it",
                fix="pass it",
            )
        hf_config = read_hf_config(flags.hf_checkpoint)
        if self.config.images.multimodal_keys:
            hf_config = seeing(hf_config)
        if self.config.algorithm.trains_reward_model:
            classifier_of(hf_config)
        spec = family_of(hf_config, flags.model_name).model_spec(hf_config)
        return spec.padded(self.config.megatron.tensor_model_parallel_size), hf_config

    def _call_hook(self, name: str, path: str | None, *args: Any) -> None:
        """Call the user's function at ``path``, the value of flag ``name``, if it is set."""
        if path:
            flag = option_of(name)
            returned = user_function(path, flag)(self.functions.args, *args)
            instead = "change the model in place, and return nothing"
            given = (self.functions.args, *args)
            check_returns_nothing(returned, given, named(path, flag), instead)

    # -- what others ask ---------------------------------------------------------------------------

    @property
    def layout(self) -> TrainLayout:
        return parallel.train_layout(self.config)

    @property
    def device(self) -> torch.device:
        return self.ranks.device

    @property
    def data_parallel_rank(self) -> int:
        return self.ranks.replica

    @property
    def is_reporting_rank(self) -> bool:
        return self.ranks.is_reporting

    def finish_saving(self) -> None:
        """Wait until ``--async-save`` has written its checkpoint; re-raise its error, if any."""
        self.writer.wait()

    def close(self) -> None:
        """Wait for the checkpoint that is being written, then leave the process groups."""
        try:
            self.writer.close()
        finally:
            parallel.shut_down()

    def _pack(
        self, batch: TrainBatch, micro_batches: list[list[int]], config: Config | None = None
    ) -> list[PackedMicroBatch]:
        """Pack micro-batches for the current layout, that of ``config``; default: the policy's."""
        config = config or self.config
        megatron = config.megatron
        divided = megatron.sequence_parallel or self.spec.num_experts > 0
        multiple = megatron.tensor_model_parallel_size if divided else 1
        if device.has_gpu():
            padding = config.train.data_pad_size_multiplier
            multiple = megatron.tensor_model_parallel_size * padding
        context = parallel.context_group()
        multiple *= context.size
        dense = self.ranks.device.type == "cpu" or megatron.fp32  # flash attention lacks float32
        options = PackingOptions(
            self.ranks.device,
            multiple,
            dense=dense,
            pair_cost=self._pair_cost(),
            context=context,
            read_image=None if self.images is None else self.images.read,
            vision=None if self.spec.vision is None else self.spec.vision.kind,
            has_tower=parallel_state.is_pipeline_first_stage(),
        )
        if self.images is not None and options.has_tower and batch.media:
            members = [sample for samples in micro_batches for sample in samples]
            own = dict.fromkeys(one.reference for sample in members for one in batch.media[sample])
            self.images.read_ahead(batch.images[reference] for reference in own)
        same_length = virtual_stages(self.spec, config) is not None
        if same_length and len(batch.steps) > 1:  # one length in all passes of the rollout
            everything = [samples for step in batch.steps for samples in step.micro_batches]
            packed = forward.packed_micro_batches(batch, everything, options)
            options = dataclasses.replace(options, at_least=max(one.num_tokens for one in packed))
        return forward.packed_micro_batches(batch, micro_batches, options, same_length=same_length)

    def _pair_cost(self) -> float | None:
        """Return the cost of dense attention per pair relative to matrix products per token, as
        measured on a CPU with AVX512; None: do not share prompts."""
        if device.has_gpu():  # the packed attention kernel does not support branches
            return None
        # balance losses must count a shared prompt once for each sample
        if uses_balance_losses(self.model_chunks[0].config):
            return None
        return 0.65 / self.spec.transformer["hidden_size"]
