"""Memory of one trainer rank: weights, gradients, optimizer states, and the temporaries of a
micro-batch.

Persistent bytes per trained parameter in half precision: 2 for the weight, 4 for the gradient, and
4 for the master weight + 8 for Adam's moments, divided by the replicas (distributed optimizer).
In float32 there is no master weight. With adapters (--lora-rank) a frozen parameter takes 2 bytes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from typing import Any

from slime.config.config import Config
from slime.config.teachers import BASE, SELF
from slime.memory.activations import (
    Recompute,
    StageActivations,
    saved_by_stage,
    spread_entries,
)
from slime.memory.hardware import FLASH4_NARROWEST, FLASH4_WIDEST_ANYWHERE
from slime.models import table_of
from slime.models.adapters import AdapterConfig, adapter_family
from slime.models.context import model_context
from slime.models.layout_rules import layout_of
from slime.models.layouts import Layout, SomeParts
from slime.models.mixers import FLOAT32_BYTES, Kernels, mixers_of
from slime.models.spec import ModelSpec
from slime.models.table import Parameter
from slime.models.vision import frozen_parts, is_projector
from slime.placement import critic_placed

#: Elements per bucket of optimizer states that are streamed from host memory to the device and
#: back, and buckets on the device at a time. Copies of 64 MiB reach the full speed of the link.
STREAM_BUCKET = 1 << 24
STREAM_SLOTS = 3

#: CUDA context, kernels and NCCL's buffers of a running trainer; what a sleeping one keeps (2.2 GB
#: on an H200, including the driver's own memory); and the part of the latter that torch may hold.
AWAKE_BYTES = 2.5e9
ASLEEP_BYTES = 2.2e9
ASLEEP_TENSORS = 0.7e9
#: What the communicators of a critic's own layout add to both. An estimate.
SECOND_LAYOUT_BYTES = 0.5e9

#: Name of AWAKE_BYTES in the plan.
CONTEXT = "CUDA context, NCCL"

#: Name in the plan of the weights of a model with adapters.
FROZEN = "weights (frozen)"

#: Rows of the busiest expert rank as a multiple of the average.
IMBALANCE = 1.3

#: A block of logits (`slime.algorithms.logprobs`), in entries.
_BLOCK_ENTRIES = 1 << 26
_CPU_BLOCK_ENTRIES = 1 << 22
_BLOCK_ROWS = 8192
_MIN_COLUMNS = 512

#: Blocks that exist at once on a GPU, in the dtype of the model: logits, their gradient, and the
#: gradient of the previous block. On a CPU, bytes per entry: the product, float32 logits, their
#: exponentials and a gradient.
_GPU_BLOCKS = 3
_CPU_BLOCK_BYTES = 16

#: Workspaces that cuBLAS and cuBLASLt take from torch's allocator.
_WORKSPACE_BYTES = 64 * 1024 * 1024

#: Bytes of a mask per pair of tokens.
_MASK_BYTES = 4

#: First torch version whose attention kernel supports grouped-query attention.
_TORCH_TAKES_GROUPS = (2, 13)

_DTYPE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
_ASSUMED_PROMPT = 1024


@dataclass(frozen=True)
class TrainerSettings:
    """Facts that the trainer's memory depends on; `dataclasses.replace` answers "what if".

    Attributes:
        spec: the model, with its vocabulary padded for the layout.
        element: bytes per entry of weights and activations.
        gradient, master, moments: bytes per trained parameter (both moments together).
        sharded: master weights and moments are sharded over the replicas.
        moments_on_host: fraction of the moments in host memory, streamed through the device in
            each step.
        master_on_host: the same fraction of the master weights.
        saves_async: checkpoints are copied to host memory before they are written.
        reference: a reference model's weights are copied to the device for its log-probs.
        teachers: teachers in the trainer; their weights are copied to the device one at a time.
        teacher_heads: output layers of teachers that stay on the device for the loss (--opd-loss
            over the whole vocabulary); may include the policy's own.
        teacher_tokens: tokens of this rank's rollout whose hidden states by teachers are on host.
        tokens: tokens of the largest micro-batch, on this rank.
        longest: tokens of the longest sequence.
        assumed_length: ``longest`` is a guess, as no flag bounds it.
        dynamic: micro-batches are packed by tokens.
        chunk_rows: --log-probs-chunk-size.
        with_logits: a custom loss gets whole logits.
        only, frozen: regular expressions of trained and of frozen parameters.
        frozen_vision: regular expressions of frozen parts of a vision tower.
        rounded: "experts" or "linears", which have a quantised copy (--fake-quantisation).
        measured: all "linears" have a quantised copy for log-probs (--measure-quantisation).
        adapters: the trained adapters of a frozen model; None: the model is trained.
        on_gpu: the ranks run on GPUs, where kernels and block sizes differ.
        grouped, one_width: properties of the attention kernels (`slime.models.mixers.Kernels`).
        has_vocabulary: the model predicts tokens; a critic has one output instead.
        has_critic: a critic is trained on the same GPUs (`as_critic`).
        critic_adapters: the trained adapters of a critic with frozen layers.
        critic_layout: the layout of a critic on the same GPUs that has another one. Its number of
            ranks does not count.
        critic_tokens: tokens of its largest micro-batch on a rank, with padding.
        shares_base: policy and critic hold one frozen base. A --critic-load, whose weights are not
            looked at, counts as another one.
    """

    spec: ModelSpec
    layout: Layout
    recompute: Recompute
    element: int
    gradient: float
    master: float
    moments: float
    sharded: bool
    moments_on_host: float
    master_on_host: float
    saves_async: bool
    reference: bool
    teachers: int
    teacher_heads: int
    teacher_tokens: float
    tokens: int
    longest: int
    assumed_length: bool
    dynamic: bool
    chunk_rows: int
    with_logits: bool
    only: tuple[str, ...]
    frozen: tuple[str, ...]
    on_gpu: bool
    frozen_vision: tuple[str, ...] = ()
    grouped: bool = True
    one_width: bool = True
    rounded: str | None = None
    measured: bool = False
    adapters: AdapterConfig | None = None
    has_vocabulary: bool = True
    has_critic: bool = False
    critic_adapters: AdapterConfig | None = None
    critic_layout: Layout | None = None
    critic_tokens: int = 0
    shares_base: bool = False

    @staticmethod
    def of(
        config: Config, spec: ModelSpec, *, on_gpu: bool, flash4: int = FLASH4_WIDEST_ANYWHERE
    ) -> TrainerSettings:
        """Read the flags.

        Args:
            spec: of the checkpoint, with unpadded vocabulary.
            flash4: as of `slime.memory.hardware.DeviceMemory`.
        """
        megatron = config.megatron
        algorithm = config.algorithm
        layout = layout_of(config, spec)
        element = 4 if megatron.fp32 else 2
        longest, assumed = longest_sequence(config)
        on_host = (
            float(megatron.optimizer.get("optimizer_offload_fraction", 1.0)) if on_gpu else 0.0
        )
        masters = megatron.optimizer_cpu_offload and on_gpu
        moments = megatron.offload_optimizer_states and on_gpu
        adapters = AdapterConfig.of(config)
        critic_layout = None
        critic_tokens = 0
        if config.critic_has_own_layout:
            critic_layout = layout_of(critic_placed(config), spec)
            critic_tokens = largest_micro_batch(config, critic_layout, longest, on_gpu=on_gpu)
        return TrainerSettings(
            spec=spec.padded(layout.tensor),
            layout=layout,
            recompute=Recompute.of(config),
            element=element,
            gradient=4.0 if megatron.fp32 or megatron.accumulate_allreduce_grads_in_fp32 else 2.0,
            master=_master_bytes(config, element),
            moments=_moment_bytes(config),
            sharded=megatron.use_distributed_optimizer and megatron.optimizer_name == "adam",
            moments_on_host=on_host if masters else float(moments),
            master_on_host=on_host if masters else 0.0,
            saves_async=bool(config.checkpoint.async_save and config.checkpoint.save),
            # with adapters, the reference is the policy without adapters
            reference=algorithm.needs_reference and adapters is None,
            **_teachers_of(config, layout),
            tokens=largest_micro_batch(config, layout, longest, on_gpu=on_gpu),
            longest=longest,
            assumed_length=assumed,
            dynamic=config.train.use_dynamic_batch_size,
            chunk_rows=config.train.log_probs_chunk_size,
            with_logits=algorithm.loss_type == "custom_loss",
            only=config.train.only_train_params_name_list,
            frozen=config.train.freeze_params_name_list,
            frozen_vision=frozen_parts(
                tower=config.images.freeze_vision_tower,
                projector=config.images.freeze_vision_projector,
            ),
            on_gpu=on_gpu,
            grouped=not on_gpu or _takes_groups(config, spec, flash4),
            one_width=not on_gpu or megatron.fp32 or not _by_flash4(config, spec, flash4),
            rounded=config.quantised.fake_quantisation,
            measured=config.quantised.measure_quantisation,
            adapters=adapters,
            has_critic=algorithm.needs_critic and not config.critic.has_own_gpus,
            critic_adapters=AdapterConfig.of_critic(config, table_of(spec), spec)
            if algorithm.needs_critic
            else None,
            critic_layout=critic_layout,
            critic_tokens=critic_tokens,
            shares_base=config.can_share_base and not config.critic.critic_load,
        )

    def as_critic(self) -> TrainerSettings:
        """Return the settings of a critic of this policy, which is not quantised."""
        layout = self.layout
        tokens = self.tokens
        if self.critic_layout is not None:
            layout = replace(self.critic_layout, world=self.layout.world)
            longest = -(-self.longest // layout.context)
            tokens = min(self.critic_tokens, max(self.tokens, longest))
        return replace(
            self,
            spec=replace(self.spec.padded(layout.tensor), tie_embeddings=False),
            layout=layout,
            tokens=tokens,
            reference=False,
            teachers=0,
            teacher_heads=0,
            teacher_tokens=0.0,
            with_logits=False,
            only=(),
            frozen=(),
            rounded=None,
            measured=False,
            adapters=self.critic_adapters,
            has_vocabulary=False,
            has_critic=False,
            critic_adapters=None,
            critic_layout=None,
        )

    def is_trained(self, parameter: Parameter) -> bool:
        """Tell whether a parameter of the model is trained, according to the flags' expressions. As
        in the trainer, the experts of a layer are matched by their single names."""
        if self.adapters is not None:
            return False
        names = [parameter.name + "0" if parameter.is_expert else parameter.name]
        if parameter.is_output and self.spec.tie_embeddings:
            names = ["embedding.word_embeddings.weight"]
        found = any(
            re.search(pattern, name) for pattern in (*self.only, *self.frozen) for name in names
        )
        if any(re.search(pattern, name) for pattern in self.frozen_vision for name in names):
            return False
        return found if self.only else not found

    @property
    def has_packed_kernels(self) -> bool:
        """Tell whether attention needs no dense blocks (`slime.trainer.megatron.attention`)."""
        return self.on_gpu and self.element < FLOAT32_BYTES

    @property
    def keeps_scores(self) -> bool:
        """Tell whether attention keeps the scores of all pairs of tokens. On GPUs torch computes
        float32 with grouped queries by definition; `scaled_dot_product_attention` documents it."""
        spec = self.spec
        is_grouped = spec.num_query_groups < spec.num_heads or spec.has_sinks
        return self.on_gpu and not self.has_packed_kernels and is_grouped

    @cached_property
    def stages(self) -> list[StageMemory]:
        return [StageMemory(self, number) for number in range(self.layout.pipeline)]


@dataclass(frozen=True)
class RankParameter:
    """A rank's part of a parameter, ``numel`` entries."""

    parameter: Parameter
    numel: int

    @property
    def is_expert(self) -> bool:
        return self.parameter.is_expert


def rank_parameters(spec: ModelSpec, layout: Layout, stage: int) -> list[RankParameter]:
    """List the parameters of each rank of pipeline stage ``stage``, exactly. ``spec`` has the
    vocabulary padded for the layout."""
    cuts = {
        "none": 1,
        "tensor": layout.tensor,
        "expert": layout.expert * layout.expert_tensor,
        "experts alone": layout.expert,
    }
    layers = layout.layers_of(stage, spec.num_layers)
    whole = table_of(spec).parameters(
        spec, layers, first=stage == 0, last=stage == layout.pipeline - 1
    )
    return [RankParameter(parameter, parameter.numel // cuts[parameter.cut]) for parameter in whole]


def rank_adapters(
    spec: ModelSpec, adapters: AdapterConfig, layout: Layout, stage: int
) -> list[RankParameter]:
    """List the parameters of the adapters of each rank of pipeline stage ``stage``, exactly."""
    table = adapter_family(table_of(spec), spec, adapters)
    layers = layout.layers_of(stage, spec.num_layers)
    found = []
    last = stage == layout.pipeline - 1
    for parameter in table.parameters(spec, layers, first=stage == 0, last=last):
        rule = parameter.rule
        numel = parameter.numel
        if isinstance(rule.layout, SomeParts):  # also stores zero rows for parts without an adapter
            columns = parameter.shapes[0][1]
            numel = parameter.count * sum(rule.layout.rows) * columns
        is_cut = rule.layout.tp_axis is not None
        if parameter.is_expert:
            cut = layout.expert * (layout.expert_tensor if is_cut else 1)
        else:
            cut = layout.tensor if is_cut else 1
        found.append(RankParameter(parameter, numel // cut))
    return found


@dataclass(frozen=True)
class StageMemory:
    """Bytes on each rank of one pipeline stage; its ranks hold the same amount."""

    settings: TrainerSettings
    number: int

    @cached_property
    def parameters(self) -> list[RankParameter]:
        settings = self.settings
        found = rank_parameters(settings.spec, settings.layout, self.number)
        return [p for p in found if settings.has_vocabulary or not p.parameter.is_output]

    @cached_property
    def critic(self) -> StageMemory | None:
        """Return this stage's part of the critic; None if the run has none. If the critic has
        other stages, this is the largest on any rank of this stage."""
        settings = self.settings
        if not settings.has_critic:
            return None
        stages = settings.as_critic().stages
        pipeline = settings.layout.pipeline
        first = self.number * len(stages) // pipeline
        end = -(-(self.number + 1) * len(stages) // pipeline)
        return max(
            stages[first:end],
            key=lambda stage: sum(stage.states().values()) + sum(stage.training().values()),
        )

    @cached_property
    def adapters(self) -> list[RankParameter]:
        """The adapters' parameters, all trained."""
        settings = self.settings
        if settings.adapters is None:
            return []
        return rank_adapters(settings.spec, settings.adapters, settings.layout, self.number)

    @cached_property
    def _learning(self) -> list[RankParameter]:
        trained = [p for p in self.parameters if self.settings.is_trained(p.parameter)]
        return [*trained, *self.adapters]

    @cached_property
    def value_head(self) -> int:
        """Entries of a critic's value head, which is trained and whole on each rank."""
        has_head = self._has_output and not self.settings.has_vocabulary
        return self.settings.spec.hidden_size + 1 if has_head else 0

    @cached_property
    def trained(self) -> int:
        """Entries with a gradient."""
        return self.value_head + sum(p.numel for p in self._learning)

    @cached_property
    def owned(self) -> float:
        """Entries whose optimizer states this rank holds."""
        settings = self.settings
        if not settings.sharded:
            return float(self.trained)
        layout = settings.layout
        return self.value_head / layout.shards + sum(
            p.numel / (layout.expert_shards if p.is_expert else layout.shards)
            for p in self._learning
        )

    @cached_property
    def weights(self) -> float:
        """The model's weights in bytes, without adapters and a critic's value head."""
        return float(sum(p.numel for p in self.parameters) * self.settings.element)

    @cached_property
    def adapter_weights(self) -> float:
        return float(sum(p.numel for p in self.adapters) * self.settings.element)

    @property
    def gradients(self) -> float:
        return self.trained * self.settings.gradient

    @property
    def master(self) -> float:
        return self.owned * self.settings.master

    @property
    def moments(self) -> float:
        return self.owned * self.settings.moments

    @property
    def borrowed(self) -> float:
        """Bytes of a critic's weights that are the policy's."""
        settings = self.settings
        return 0.0 if settings.has_vocabulary or not settings.shares_base else self.weights

    def states(self) -> dict[str, float]:
        """Return the bytes that stay on the device from step to step, of a critic with what it
        shares."""
        settings = self.settings
        found = {
            "weights" if settings.adapters is None else FROZEN: self.weights,
            "adapters": self.adapter_weights,
            "value head": float(self.value_head * settings.element),
            "gradients": self.gradients,
            "master weights": self.master * (1 - settings.master_on_host),
            "optimizer moments": self.moments * (1 - settings.moments_on_host),
        }
        return {name: size for name, size in found.items() if size}

    @property
    def _buckets(self) -> float:
        """Bytes of streaming buckets on the device during a step, if states are in host memory."""
        settings = self.settings
        at_once = min(self.owned, STREAM_SLOTS * STREAM_BUCKET)
        moments = settings.moments if settings.moments_on_host else 0.0
        return at_once * (moments + (settings.master if settings.master_on_host else 0.0))

    def on_host(self, *, sleeps: bool) -> dict[str, float]:
        """Return the bytes in host memory: offloaded states, weights of frozen models, copies of a
        sleeping trainer's states, and the copy of an asynchronously saved checkpoint. Page-locked
        allocations are not rounded up."""
        settings = self.settings
        master = self.master * settings.master_on_host
        moments = self.moments * settings.moments_on_host
        found = {
            "master weights": master,
            "optimizer moments": moments,
            "weights of frozen models": self.weights * (settings.reference + settings.teachers),
        }
        if self._has_output:
            row = settings.spec.hidden_size * settings.element
            found["hidden states of teachers"] = settings.teacher_tokens * row
        if sleeps:
            head = self.value_head * settings.element
            own = self.weights - self.borrowed
            found["weights asleep"] = own + self.adapter_weights + head
            found["optimizer states asleep"] = self.master - master + self.moments - moments
        if settings.saves_async:
            trained = self.owned * settings.element
            found["copy of a checkpoint"] = trained + self.master + self.moments
        if self.critic is not None:
            for what, size in self.critic.on_host(sleeps=sleeps).items():
                found[what] = found.get(what, 0.0) + size
        return {name: size for name, size in found.items() if size}

    def scoring(self) -> dict[str, float]:
        """Return the bytes that log-probs without gradients need in addition to `states`, with the
        weights of one frozen model."""
        found = {
            "temporaries of a layer": self.saved.working * self.settings.tokens,
            **self._output(),
        }
        if masks := self._masks():
            found["attention masks"] = masks
        if self.settings.reference:
            found["weights of the reference"] = self.weights
        elif self.settings.teachers:
            found["weights of a teacher"] = self.weights
        found |= self._teacher_heads()
        return found | self._rounded("linears" if self.settings.measured else self.settings.rounded)

    def _teacher_heads(self) -> dict[str, float]:
        """Return the output layers of teachers, and their hidden states of a micro-batch."""
        settings = self.settings
        if not settings.teacher_heads or not self._has_output:
            return {}
        spec = settings.spec
        columns = spec.padded_vocab_size / settings.layout.tensor
        row = spec.hidden_size * settings.element
        return {
            "output layers of teachers": settings.teacher_heads * columns * row,
            "hidden states of teachers": settings.tokens * row,
        }

    @property
    def _has_output(self) -> bool:
        return self.number == self.settings.layout.pipeline - 1

    def _vision(self) -> dict[str, float]:
        """Return the bytes that a vision tower keeps for its backward pass, if half of the tokens
        are images: of one block at a time, if blocks are recomputed or not trained."""
        settings = self.settings
        vision = settings.spec.vision
        if vision is None or self.number:
            return {}
        is_trained = any(
            p.parameter.rule.is_vision and not is_projector(p.parameter.name)
            for p in self._learning
        )
        wide, within = vision.kind.kept
        kept = wide * vision.hidden_size + within * vision.inner_size
        if is_trained and settings.recompute.granularity == "full":
            kept += vision.depth * vision.hidden_size
        elif is_trained:
            kept *= vision.depth
        patches = settings.tokens / 2 * vision.merge_size**2
        return {"activations of the vision tower": patches * kept * settings.element}

    def _masks(self) -> float:
        """Return the bytes of the attention masks of a micro-batch of longest sequences, on CPUs
        and in float32 (`slime.trainer.megatron.packed.AttentionBlock`): one for each window of the
        stage's layers. Sequences with images whose tokens attend to each other have masks of their
        own; others share one, and have none without a window."""
        settings = self.settings
        spec = settings.spec
        if settings.has_packed_kernels:
            return 0.0
        longest = settings.longest
        layers = settings.layout.layers_of(self.number, spec.num_layers)
        limits = {spec.window(layer) for layer in layers}
        short = {limit for limit in limits if limit is not None and limit < longest}
        if spec.has_bidirectional_images:
            whole = settings.tokens * settings.layout.context
            masks = len(short) + (len(limits) > len(short))
            return float(_MASK_BYTES * masks * whole * longest)
        return float(_MASK_BYTES * len(short) * longest**2)

    def _rounded(self, kind: str | None) -> dict[str, float]:
        """Return the bytes of copies with the engines' quantised values. The ignore list, unknown
        here, may exclude further weights; every recommended one excludes the output layer."""
        element = self.settings.element
        chosen = [
            p
            for p in self.parameters
            if p.is_expert or (kind == "linears" and p.parameter.rule.is_linear)
        ]
        size = 0.0
        if kind:
            size = float(sum(p.numel for p in chosen if not p.parameter.is_output) * element)
        return {"quantised weights": size} if size else {}

    def training(self) -> dict[str, float]:
        """Return the bytes that the forward and backward passes need in addition to `states`."""
        settings = self.settings
        saved = self.saved
        in_flight = self.micro_batches_in_flight
        experts = saved.uneven * (IMBALANCE - 1) if settings.layout.expert > 1 else 0.0
        found = {
            "activations": saved.kept * in_flight * settings.tokens,
            "recomputed activations": saved.rebuilt * settings.tokens,
            "activations of uneven experts": experts * max(1.0, in_flight) * settings.tokens,
            "adapters of fused layers, combined": max(self._spread)
            if settings.recompute.granularity == "full"
            else sum(self._spread) * max(1.0, in_flight),
            "temporaries of a layer": self._temporaries(),
            "attention masks": self._masks() * max(1.0, in_flight),
            **self._vision(),
            **self._output(),
            **self._teacher_heads(),
            **self._rounded(settings.rounded),
        }
        if settings.on_gpu:
            found["workspaces of products"] = _WORKSPACE_BYTES
        # the optimizer step runs after these temporaries are freed
        rest = sum(found.values())
        found["streamed optimizer states"] = max(0.0, self._buckets - rest)
        return {name: size for name, size in found.items() if size}

    @cached_property
    def _spread(self) -> list[float]:
        """Bytes of each layer's block-diagonal B matrices (`spread_entries`)."""
        settings = self.settings
        if settings.adapters is None:
            return [0.0]
        layers = settings.layout.layers_of(self.number, settings.spec.num_layers)
        return [
            settings.element
            * spread_entries(settings.spec, settings.layout, layer, settings.adapters)
            for layer in layers
        ]

    def _temporaries(self) -> float:
        """Return the bytes of temporaries of the backward pass through the widest layer.

        On a GPU the measured peak is in the output layer's backward pass, with all activations and
        blocks of logits. Temporaries of a layer come later, but the plan counts both, as a margin
        for fragmentation, which it does not model.
        """
        settings = self.settings
        saved = self.saved
        working = saved.working * settings.tokens
        if not settings.on_gpu:
            return working + self._largest_gradient()
        # products accumulate gradients into the buffer; only the embedding's is a tensor of its
        # own, at the end of a backward pass, when its micro-batch holds no more activations
        return max(working, self._embedding_gradient() - saved.kept * settings.tokens)

    @property
    def micro_batches_in_flight(self) -> float:
        """Maximum forward passes without their backward pass, in multiples of the activations of a
        whole stage."""
        layout = self.settings.layout
        remaining = layout.pipeline - self.number
        if layout.virtual == 1:
            return float(remaining)
        chunks = 2 * (remaining - 1) + (layout.virtual - 1) * layout.pipeline + 1
        return chunks / layout.virtual

    @cached_property
    def saved(self) -> StageActivations:
        """Bytes per token that autograd keeps."""
        settings = self.settings
        kernels = Kernels(
            settings.element,
            fused=settings.on_gpu,
            grouped=settings.grouped,
            one_width=settings.one_width,
            score_length=settings.longest if settings.keeps_scores else 0,
        )
        return saved_by_stage(
            settings.spec,
            settings.layout,
            self.number,
            kernels,
            settings.recompute,
            settings.adapters,
        )

    def _output(self) -> dict[str, float]:
        """Return the bytes of the last stage's log-probs: hidden states and blocks of logits."""
        settings = self.settings
        if not self._has_output:
            return {}
        spec = settings.spec
        rows = settings.tokens
        columns = spec.padded_vocab_size / settings.layout.tensor
        per_entry = _GPU_BLOCKS * settings.element if settings.on_gpu else _CPU_BLOCK_BYTES
        # the last layer's output, normalised, its rows that predict tokens, and their gradient
        found: dict[str, float] = {
            "hidden states of predicted tokens": rows
            * spec.hidden_size
            * (3 * settings.element + 4),
        }
        if settings.has_vocabulary:
            found["blocks of logits"] = self._block(rows, columns) * per_entry
        if settings.with_logits:
            found["whole logits for the custom loss"] = rows * columns * (2 * 4 + settings.element)
        return found

    def _block(self, rows: int, columns: float) -> float:
        """Return the entries of a block of logits."""
        settings = self.settings
        at_once = settings.chunk_rows if settings.chunk_rows > 0 else min(_BLOCK_ROWS, max(rows, 1))
        entries = _BLOCK_ENTRIES if settings.on_gpu else _CPU_BLOCK_ENTRIES
        return min(at_once, rows) * min(columns, max(_MIN_COLUMNS, entries // at_once))

    def _embedding_gradient(self) -> float:
        """Return the bytes of the embedding's dense gradient before it is added to the buffer."""
        sizes = (
            p.numel
            for p in self.parameters
            if p.parameter.is_embedding and self.settings.is_trained(p.parameter)
        )
        return sum(sizes) * self.settings.element

    def _largest_gradient(self) -> float:
        """Return the bytes of the largest gradient of a weight before it is added to the buffer."""
        trained = [
            p.numel
            for p in self.parameters
            if not p.parameter.is_output and self.settings.is_trained(p.parameter)
        ]
        return max(trained, default=0) * self.settings.element


def _takes_groups(config: Config, spec: ModelSpec, flash4: int) -> bool:
    """Tell whether attention on GPUs needs no repeated keys and values
    (`slime.trainer.megatron.attention`)."""
    has_groups = any(mixer.has_query_groups for mixer in mixers_of(spec.transformer))
    is_new = _torch_version() >= _TORCH_TAKES_GROUPS
    return is_new or not has_groups or _by_flash4(config, spec, flash4)


def _by_flash4(config: Config, spec: ModelSpec, flash4: int) -> bool:
    """Tell whether flash-attn-4 computes attention in 16 bits on GPUs."""
    torch_only = (
        config.megatron.transformer.get("deterministic_mode")
        or config.train.attention_backend == "flash"
    )
    widths = (spec.head_dim, spec.value_dim)
    return min(widths) >= FLASH4_NARROWEST and max(widths) <= flash4 and not torch_only


def _torch_version() -> tuple[int, ...]:
    """Return the version of torch in this environment, without importing it."""
    return tuple(map(int, version("torch").split("+")[0].split(".")[:2]))


def longest_sequence(config: Config) -> tuple[int, bool]:
    """Return (maximum tokens of prompt and response, whether that is a guess because neither a flag
    nor the engines' context bounds the prompt)."""
    rollout = config.rollout
    cap = config.train.seq_length
    if rollout.rollout_max_context_len is not None:
        return rollout.rollout_max_context_len, False
    if cap is not None:
        return cap, False
    prompt = config.data.rollout_max_prompt_len
    longest = rollout.rollout_max_response_len + (prompt or _ASSUMED_PROMPT)
    context = model_context(config)
    if context is not None and context <= longest:
        return context, False
    return longest, prompt is None


def _teachers_of(config: Config, layout: Layout) -> dict[str, Any]:
    """Return the fields of `TrainerSettings` about teachers."""
    flags = config.distillation
    own = [one for one in flags.teachers if one.source not in (SELF, BASE)]
    is_whole = flags.in_trainer and flags.in_loss and not flags.opd_top_k
    rollout = config.rollout
    samples = rollout.rollout_batch_size * rollout.n_samples_per_prompt
    tokens = samples * rollout.rollout_max_response_len / layout.data
    return {
        "teachers": len(own),
        "teacher_heads": len(flags.teachers) if is_whole else 0,
        "teacher_tokens": tokens if is_whole else 0.0,
    }


def largest_micro_batch(config: Config, layout: Layout, longest: int, *, on_gpu: bool) -> int:
    """Return the tokens of a rank's largest micro-batch, with padding. A sequence above the limit
    is a micro-batch of its own."""
    train = config.train
    if train.packed_tokens:
        whole = max(train.packed_tokens * layout.context, longest)
    else:
        whole = train.micro_batch_size * longest
    unit = layout.context * layout.tensor * (train.data_pad_size_multiplier if on_gpu else 1)
    return -(-whole // unit) * unit // layout.context


def _master_bytes(config: Config, element: int) -> float:
    if element == 4:
        return 0.0
    megatron = config.megatron
    if megatron.optimizer_cpu_offload or not megatron.use_precision_aware_optimizer:
        return 4.0
    return _DTYPE_BYTES.get(str(megatron.optimizer.get("main_params_dtype")), 4.0)


def _moment_bytes(config: Config) -> float:
    megatron = config.megatron
    if megatron.optimizer_name == "sgd":
        return 4.0 if megatron.sgd_momentum else 0.0
    if not (megatron.use_precision_aware_optimizer or megatron.optimizer_cpu_offload):
        return 8.0
    names = ("exp_avg_dtype", "exp_avg_sq_dtype")
    return sum(_DTYPE_BYTES.get(str(megatron.optimizer.get(name)), 4.0) for name in names)
