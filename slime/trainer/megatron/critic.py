"""The critic of one trainer rank: a second model with its own optimizer. With --critic-lora-rank
its adapters and its value head are trained, otherwise all of it. In the policy's processes:

    policy scores ─► critic wakes: values, advantages, its steps ─► critic sleeps ─► policy's steps

If trainer and engines share GPUs, only one of policy and critic is on the device at a time. A
critic with its own GPUs (`slime.trainer.megatron.critic_process`) never sleeps.

A critic with other parallel sizes than the policy on the same ranks computes with process groups of
its own (`slime.trainer.megatron.parallel.SecondLayout`), and has shards of its own of each rollout.

If both train adapters beside the same weights (`shares_base`), the frozen parameters of the critic
are the policy's own. The policy loads them, keeps them on the device during the critic's turn, and
alone moves them when the trainer sleeps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from slime.algorithms.values import ReturnScale
from slime.checkpoints.directory import CRITIC
from slime.checkpoints.load_plan import LoadPlan, base_of_critic, resolve_critic, resolve_reference
from slime.checkpoints.loading import SavedCritic, critic_in, holds_adapters, saved_critic
from slime.checkpoints.loading import load as load_checkpoint
from slime.checkpoints.megatron_names import ModelPart, global_parameters, unwrapped
from slime.checkpoints.optimizer_state import ensure_state
from slime.checkpoints.trainer_state import TrainerState
from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.models import table_of
from slime.models.adapters import AdapterConfig
from slime.models.spec import ModelSpec
from slime.samples.batch import StepPlan, TrainBatch
from slime.trainer.loss import VALUE_LOSS, micro_batch_loss
from slime.trainer.megatron import adapters, forward, optimizer
from slime.trainer.megatron.engine_weights import frozen_reader, load_same_model
from slime.trainer.megatron.model import build_model_chunks
from slime.trainer.megatron.offload import Offloader, lent_memory
from slime.trainer.megatron.packed import PackedMicroBatch
from slime.trainer.megatron.replay import RoutingGuide, guide_for
from slime.trainer.megatron.value_model import ValueHead, ValueModel
from slime.trainer.non_finite import FailedStep
from slime.trainer.ranks import Ranks
from slime.trainer.records import LossInputs, MicroBatchResult, StepOutcome, TokenValues
from slime.trainer.user_functions import UserFunctions

logger = get_logger(__name__)

Pack = Callable[[TrainBatch, list[list[int]]], list[PackedMicroBatch]]


def critic_config(config: Config) -> Config:
    """Return the configuration with the critic's learning rate and warm-up as the optimizer's."""
    critic = config.critic
    megatron = dataclasses.replace(
        config.megatron,
        lr=critic.critic_lr,
        min_lr=min(config.megatron.min_lr, critic.critic_lr),
        lr_warmup_init=min(config.megatron.lr_warmup_init, critic.critic_lr),
    )
    if not config.origins["critic_lr_warmup_iters"].startswith("derived"):
        megatron = dataclasses.replace(
            megatron,
            lr_warmup_iters=critic.critic_lr_warmup_iters,
            lr_warmup_samples=0,
            lr_warmup_fraction=None,
        )
    # its schedule has the rollouts in which it learns alone, too
    critic = dataclasses.replace(critic, num_critic_only_steps=0)
    return dataclasses.replace(config, megatron=megatron, critic=critic)


def shares_base(config: Config, plan: LoadPlan) -> bool:
    """Tell whether a critic on the policy's GPUs has the policy's frozen layers: both train
    adapters, beside the same weights.

    Args:
        plan: the policy's load plan.
    Raises:
        UserError: the critic's weights are missing.
    """
    if not config.can_share_base:
        return False
    source, critic = _source_of(config, plan)
    saved = None if critic is None else saved_critic(critic)
    layers = base_of_critic(config, saved.base) if saved is not None and saved.rank else source
    base = resolve_reference(config)
    # of a checkpoint that holds a critic, policy and critic read different weights
    shared = layers.path.resolve() == base.path.resolve() and critic_in(layers) is None
    if not shared and config.critic.critic_load is None:
        logger.warning(
            "the critic's frozen layers, from %s, are not those of the policy's base %s: they are "
            "held twice, and the memory plan, which goes by the flags, counts them once",
            layers.path,
            base.path,
        )
    return shared


def _source_of(config: Config, plan: LoadPlan) -> tuple[LoadPlan, LoadPlan | None]:
    """Return the plan of the critic's weights, and that of the critic in them, if there is one.

    Args:
        plan: the policy's load plan.
    """
    own = critic_in(plan)
    is_own = own is not None and (plan.iteration is not None or not config.critic.critic_load)
    source = plan if is_own else resolve_critic(config, plan)
    return source, own if is_own else critic_in(source)


Method = TypeVar("Method", bound=Callable[..., Any])


def _in_own_layout(method: Method) -> Method:
    """Let Megatron use the groups of the critic's layout during the method."""

    @wraps(method)
    def inside(self: Critic, *args: Any, **kwargs: Any) -> Any:
        with self.layout():
            return method(self, *args, **kwargs)

    return cast(Method, inside)


class Critic:
    """One rank of the critic. Every method that computes is collective.

    Args:
        spec: the policy's architecture.
        pack: the policy's packing, so that both have the same micro-batches.
        initialise: draw random weights and load none (tests, benchmarks).
        takes_turns: the critic is on the device only between `wake` and `sleep`.
        base: the policy's chunks, not loaded yet, if the critic shares its frozen parameters
            (`shares_base`). They must be loaded before `load`.
        layout: enters a context in which Megatron's groups are those of the critic's layout, which
            ``config``, ``spec`` and ``ranks`` have; default: they always are.

    Attributes:
        chunks: Megatron's DDP-wrapped pipeline stage(s).
        adapters: the adapters that are trained beside frozen layers; None: all layers are trained.
        shared: the policy's parameters among the critic's.
        optimizer, scheduler: the critic's Megatron optimizer and learning-rate schedule.
        failed_step: the last step, if it ended in `NonFiniteTraining`.
    """

    def __init__(
        self,
        spec: ModelSpec,
        config: Config,
        ranks: Ranks,
        functions: UserFunctions,
        pack: Pack,
        *,
        initialise: bool = False,
        takes_turns: bool = False,
        base: Sequence[torch.nn.Module] | None = None,
        layout: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.layout = layout
        self.failed_step: FailedStep | None = None
        self.config = critic_config(config)
        self.spec = spec
        self.ranks = ranks
        self.functions = functions
        self.takes_turns = takes_turns
        self._pack = pack
        self._offloader: Offloader | None = None
        self._policy = base
        self.shared: list[torch.nn.Parameter] = []
        with layout():
            self._build(config, initialise=initialise)

    def _build(self, config: Config, *, initialise: bool) -> None:
        spec = self.spec
        base = self._policy
        if base is None:
            chunks = build_model_chunks(spec, self.config, initialise=initialise, model=ValueModel)
        else:
            with lent_memory(base):  # so that two copies are never on the device
                chunks = build_model_chunks(spec, self.config, model=ValueModel)
                self.shared = _share(chunks, base)
        heads = [chunk.output_layer for chunk in chunks if chunk.post_process]
        self.head: ValueHead | None = heads[0] if heads else None
        self.adapters = AdapterConfig.of_critic(config, table_of(spec), spec)
        self._base: str | None = None
        if self.adapters is not None:
            adapters.attach(chunks, spec, self.adapters)
            adapters.draw_first_values(chunks, spec, self.adapters, config.train.seed)
            for head in heads:
                head.requires_grad_(True)
            finalize = adapters.finish_gradients
        else:
            optimizer.freeze_vision(chunks, config)
            finalize = finalize_model_grads
        self.chunks = optimizer.wrap_data_parallel(chunks, self.config, finalize)
        for chunk, wrapper in zip(chunks, self.chunks, strict=True):
            chunk.attach(wrapper)
        self.routing: RoutingGuide | None = guide_for(chunks, spec, self.config)
        if self.routing is not None:  # the critic does not replay the policy's experts
            self.routing.source = "none"
        if initialise:
            self._build_optimizer()

    # -- setting up --------------------------------------------------------------------------------

    @_in_own_layout
    def load(self, plan: LoadPlan) -> None:
        """Load the weights, and the optimizer state if the run is resumed.

        Args:
            plan: the policy's load plan.
        Raises:
            UserError: weights are missing or do not fit the model, or the saved critic was trained
                as a whole and this one has adapters, or the other way round.
        """
        source, critic = _source_of(self.config, plan)
        saved = SavedCritic(0, None) if critic is None else saved_critic(critic)
        if critic is not None and source.iteration is not None:
            self._check_kind(saved, critic.path, resumes=True)
            if self.adapters is not None:
                self._load_layers(base_of_critic(self.config, saved.base))
            self._build_optimizer()
            load_checkpoint(critic, self.state(), is_compared=True)
            return
        self._check_kind(saved, source.path, resumes=False)
        if critic is not None and saved.rank:
            self._load_layers(base_of_critic(self.config, saved.base))
            load_checkpoint(critic, dataclasses.replace(self._weights(), adapters=self.adapters))
        else:
            self._load_layers(source)
        logger.info("critic: %s", source.note)
        self._build_optimizer()

    def _check_kind(self, saved: SavedCritic, directory: Path, *, resumes: bool) -> None:
        """Refuse a saved critic with adapters if this one has none, and on resume also the
        opposite. A new critic may train adapters beside a critic that was trained as a whole."""
        if saved.rank and self.adapters is None:
            raise UserError(
                f"the critic of {directory} has adapters of rank {saved.rank}, and this run trains "
                "the critic as a whole",
                why="the checkpoint holds its adapters and head, not its frozen layers",
                fix=f"pass --critic-lora-rank {saved.rank} and the --lora-* flags of the run that "
                "saved it",
            )
        if resumes and not saved.rank and self.adapters is not None:
            raise UserError(
                f"the critic of {directory} was trained as a whole, and this run trains adapters "
                f"of rank {self.adapters.rank}",
                why="its optimizer state is that of all layers",
                fix="pass --critic-lora-rank 0",
            )

    def _load_layers(self, source: LoadPlan) -> None:
        """Load all weights but those of adapters. A language model leaves the head as it is."""
        if self._policy is not None:
            self._copy_buffers(self._policy)
            return
        reads_base_of_policy = False
        if self.adapters is not None:
            base_of_policy = resolve_reference(self.config).path.resolve()
            reads_base_of_policy = source.path.resolve() == base_of_policy
            self._base = None if reads_base_of_policy else str(source.path.resolve())
        if source.kind == "hf":
            reader = None
            if reads_base_of_policy:
                reader = frozen_reader(self.config, source.path, self.ranks.device)
            load_same_model(self.chunks, self.spec, self.config, source.path, reader, "trunk")
            return
        critic = critic_in(source)
        if critic is not None:
            load_checkpoint(critic, self._weights("base"))
            return
        if holds_adapters(source):
            raise UserError(
                f"{source.path} holds only adapters of a policy, from which a critic cannot start",
                why="there are neither whole weights nor a critic in it",
                fix="leave --critic-load out, or merge them (slime export --merge) and name the "
                "merged model",
            )
        load_checkpoint(source, TrainerState(self.chunks, part="trunk"))

    @torch.no_grad()
    def _copy_buffers(self, policy: Sequence[torch.nn.Module]) -> None:
        """Copy the policy's persistent buffers, which are not shared."""
        theirs = dict(global_parameters(policy, part="trunk"))
        for name, tensor in global_parameters(self.chunks, part="trunk"):
            if not isinstance(tensor, torch.nn.Parameter):
                tensor.copy_(theirs[name])

    def _weights(self, part: ModelPart | None = None) -> TrainerState:
        """Return a part of the model, by default the trained one, without training state."""
        return TrainerState(
            self.chunks,
            part=part or ("everything" if self.adapters is None else "adapters and head"),
            prefix=f"{CRITIC}.",
        )

    def _build_optimizer(self) -> None:
        self.optimizer, self.scheduler = optimizer.build_optimizer(self.chunks, self.config)

    def set_run_length(self, num_rollout: int) -> None:
        optimizer.set_run_length(self.scheduler, self.config, num_rollout)

    def state(self) -> TrainerState:
        """Return the critic's part of a checkpoint."""
        return dataclasses.replace(
            self._weights(),
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            adapters=self.adapters,
            base=self._base,
            layout=self.layout,
        )

    # -- turns -------------------------------------------------------------------------------------

    @_in_own_layout
    def sleep(self) -> None:
        """Free the device's memory for the policy, if they take turns."""
        if self.takes_turns:
            if self._offloader is None:
                self._offloader = Offloader(self.chunks, self.optimizer, borrowed=self.shared)
            # a checkpoint of a sleeping critic needs the optimizer states to exist
            ensure_state(self.optimizer)
            self._offloader.sleep()

    def wake(self) -> None:
        if self._offloader is not None:
            self._offloader.wake()

    @contextmanager
    def readable(self) -> Iterator[None]:
        """Make a sleeping critic readable in host memory inside the block, for a checkpoint."""
        with nullcontext() if self._offloader is None else self._offloader.read_on_host():
            yield

    # -- what an update asks -----------------------------------------------------------------------

    def begin_rollout(self) -> None:
        for chunk in self.chunks:
            chunk.train()
        if self.config.checkpoint.reset_optimizer_states:
            optimizer.reset_moments(self.optimizer)

    @_in_own_layout
    def end_rollout(self) -> None:
        optimizer.gather_parameters(self.chunks)

    @_in_own_layout
    def outputs(self, batch: TrainBatch) -> list[Tensor] | None:
        """Return the head's output before each response token, [R_i] per sample, without gradient;
        None on ranks without output layer. Collective."""
        packed = self._pack(
            batch, [samples for step in batch.steps for samples in step.micro_batches]
        )
        if self.routing is not None:
            self.routing.prepare(batch, packed, "reference")
        found: list[TokenValues] = forward.score(self.chunks, packed)
        if not self.ranks.has_output:
            return None
        by_sample = [torch.zeros(r, device=self.ranks.device) for r in batch.response_lengths]
        for micro_batch, one in zip(packed, found):
            for i, values in zip(micro_batch.samples, micro_batch.split(one.values)):
                by_sample[i] = values
        return by_sample

    @property
    def return_scale(self) -> ReturnScale:
        """The scale of the head's outputs, on ranks that have the head."""
        assert self.head is not None, "ranks without output layer compute no values"
        return self.head.return_scale

    @return_scale.setter
    def return_scale(self, new: ReturnScale) -> None:
        assert self.head is not None, "ranks without output layer compute no values"
        self.head.return_scale = new

    @_in_own_layout
    def forward_backward(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Accumulate the gradients of ``batch.steps[step_id]``. Collective."""
        packed = self._pack(batch, batch.steps[step_id].micro_batches)
        scale = float(len(packed) * parallel_state.get_data_parallel_world_size())
        if self.routing is not None:
            if self.routing.counts_ahead:
                self.routing.prepare(batch, packed, "count")
                forward.score(self.chunks, packed)
                self.routing.sum_counts()
            self.routing.prepare(batch, packed, "train", scale)
        self.optimizer.zero_grad()

        def loss_of(
            values: TokenValues, micro_batch: PackedMicroBatch
        ) -> tuple[Tensor, dict[str, Tensor]]:
            inputs = inputs_of(micro_batch.samples)
            return micro_batch_loss(VALUE_LOSS, values, inputs, self.config, self.functions)

        dropout = self.adapters.dropout if self.adapters is not None else 0.0
        with adapters.dropping_inputs(self.chunks, dropout):
            return forward.forward_backward(self.chunks, packed, loss_of, gradient_scale=scale)

    @_in_own_layout
    def optim_step(self, step: StepPlan, *, skip: bool) -> StepOutcome:
        """Apply the accumulated gradients; see `optimizer.take_step`. Collective."""
        clip = self.config.megatron.clip_grad
        return optimizer.take_step(
            self.optimizer, self.scheduler, self.routing, clip, step, skip=skip
        )

    def nonfinite_gradients(self) -> list[tuple[str, int, int]]:
        return optimizer.nonfinite_gradients(self.chunks)

    def learning_rates(self) -> Sequence[float]:
        return optimizer.learning_rates(self.optimizer)


def _share(
    chunks: Sequence[torch.nn.Module], base: Sequence[torch.nn.Module]
) -> list[torch.nn.Parameter]:
    """Replace all parameters of a critic, except its head's, by those of the policy's chunks, and
    return them."""
    shared = []
    for chunk, policy in zip(chunks, unwrapped(base), strict=True):
        theirs = dict(policy.named_parameters(remove_duplicate=False))
        for name, own in list(chunk.named_parameters(remove_duplicate=False)):
            if name.startswith("output_layer."):
                continue
            parameter = theirs[name]
            assert (own.shape, own.dtype) == (parameter.shape, parameter.dtype), name
            module, _, leaf = name.rpartition(".")
            chunk.get_submodule(module)._parameters[leaf] = parameter
            shared.append(parameter)
    return shared
