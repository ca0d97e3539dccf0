"""`MegatronBackend`, one trainer rank: sets everything up and delegates each operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.config.config import Config
from slime.config.flag import option_of
from slime.config.teachers import SELF
from slime.errors import UserError
from slime.log import get_logger
from slime.samples.batch import StepPlan, TrainBatch, TrainedTokens, TrainLayout
from slime.trainer.loss import micro_batch_loss
from slime.trainer.megatron import device

device.install()  # before anything imports megatron

from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from slime.checkpoints.critic_part import take_critic
from slime.checkpoints.directory import ADAPTER
from slime.checkpoints.hf_io import fill_adapters
from slime.checkpoints.load_plan import LoadPlan, is_hf_dir, reference_adapter, resolve_reference
from slime.checkpoints.loading import holds_adapters, saved_reference
from slime.checkpoints.loading import load as load_checkpoint
from slime.checkpoints.megatron_names import ModelPart
from slime.checkpoints.peft_files import fitted, read_adapter
from slime.checkpoints.quantised_reader import QuantisedReader
from slime.checkpoints.resuming import agreed_plan
from slime.checkpoints.trainer_state import TrainerState
from slime.engines.image_canary import ImageCanary
from slime.models import table_of
from slime.models.adapters import AdapterConfig, adapter_family
from slime.models.layout_rules import check_critic_layout, virtual_stages
from slime.models.quantised import Quantisation
from slime.models.spec import ModelSpec
from slime.paths import fill
from slime.placement import critic_placed
from slime.trainer.ci_checks import check_grad_norms, check_rollout
from slime.trainer.distillation import note_teacher_scores, with_teacher_prompts
from slime.trainer.megatron import adapters, forward, optimizer, parallel
from slime.trainer.megatron.critic import Critic, shares_base
from slime.trainer.megatron.engine_weights import EngineWeights, frozen_reader, load_same_model
from slime.trainer.megatron.model import PolicyModel, build_model_chunks
from slime.trainer.megatron.offload import Offloader, WeightsCopy
from slime.trainer.megatron.packed import PackedMicroBatch
from slime.trainer.megatron.parallel import RankInfo, SecondLayout
from slime.trainer.megatron.process import TrainerProcess
from slime.trainer.megatron.replay import RoutingGuide, guide_for
from slime.trainer.megatron.value_model import RewardModel
from slime.trainer.memory import PhaseMemory
from slime.trainer.non_finite import NonFiniteTraining
from slime.trainer.records import (
    LossInputs,
    MicroBatchResult,
    StepOutcome,
    TeacherColumns,
    TokenScores,
)
from slime.trainer.role import CRITIC, POLICY, REFERENCE, Role, policy_loss, roles_of, teacher_role
from slime.trainer.update import ByPosition, Update, evaluate, update
from slime.user_code.loading import named
from slime.weights.canary import canary_tokens
from slime.weights.source import collect_adapters, save_hf, save_reward_model

logger = get_logger(__name__)

_TEACHER_CANARY = 16
#: Equal weights and kernels give equal log-probs, except for GPU atomics: they differ by less.
_TEACHER_TOLERANCE = 1e-3


class MegatronBackend(TrainerProcess):
    """One rank of the trainer.

    Example:
        backend = MegatronBackend(config, RankInfo(rank=0, world_size=1, local_rank=0, …))
        next_rollout_id = backend.setup()
        metrics = backend.train(batch)

    Attributes (after `setup`):
        roles: the models of this run, by name.
        model_chunks: the policy as Megatron's DDP-wrapped pipeline stage(s).
        copies: weights of the frozen models, by role.
        critic: the value model, with its own optimizer; None without a critic or if it has its own
            ranks.
        optimizer, scheduler: the policy's Megatron optimizer and learning-rate schedule.
        spec, hf_config: the model's architecture, and its Hugging Face config.
        step_metrics: the last rollout's metrics, one dict per optimizer step.
        extra_state: the ``extra_state`` of the loaded checkpoint (see `save`); {} on a fresh start.
        plan: what `setup` has loaded; None if it drew random weights.
        skipped: one line for each damaged checkpoint that `setup` skipped.
        failed_step: the last step, if it ended in `NonFiniteTraining`.
        engine_weights: the weights with which engines compute, if these are quantised and the
            trainer's are not. A frozen base is loaded with the engines' values.
        adapters: the adapters that are trained instead of the model's weights; None without.
        trained_tokens: recorded tokens of the last rollout, if this rank reports them.
    """

    def __init__(self, config: Config, rank_info: RankInfo) -> None:
        super().__init__(config, rank_info)
        self.roles = roles_of(config)
        self.copies: dict[str, WeightsCopy] = {}
        self._teachers = {teacher.name: teacher for teacher in config.distillation.teachers}
        self._teacher_canaries: dict[str, Tensor] = {}
        self.reference_is_policy = False
        self.step_metrics: list[dict[str, float]] = []
        self.trained_tokens: list[TrainedTokens] = []
        self.offloader: Offloader | None = None
        self.routing: RoutingGuide | None = None
        self.engine_weights: EngineWeights | None = None
        self.adapters: AdapterConfig | None = None
        self.critic: Critic | None = None
        self._update: Update | None = None  # from `score` to `learn`, with a critic on other ranks
        self.extra_state: dict[str, Any] = {}
        self.skipped: list[str] = []
        self.next_rollout_id = 0
        self.plan: LoadPlan | None = None
        self.optimizer: MegatronOptimizer
        self.scheduler: OptimizerParamScheduler

    # -- setting up --------------------------------------------------------------------------------

    def setup(self, *, spec: ModelSpec | None = None, initialise: bool = False) -> int:
        """Join the process groups, build model and optimizer, and load the weights.

        Args:
            spec: architecture to build; default: that of ``--hf-checkpoint``.
            initialise: draw random weights and load none (tests, benchmarks).
        Returns:
            The next rollout id: 0, or the one after the loaded checkpoint.
        Raises:
            UserError: the layout does not fit the ranks or the model, or weights are missing or do
                not fit the model.
        """
        self.join(spec)
        with PhaseMemory(self.config, self.ranks.device).phase("setup"):
            self._set_up_model(initialise)
        return self.next_rollout_id

    def _set_up_model(self, initialise: bool) -> None:
        config = self.config
        plan = None
        if not initialise:
            plan, self.skipped = agreed_plan(config)
        self.plan = plan
        shares = CRITIC in self.roles and plan is not None and shares_base(config, plan)
        if CRITIC in self.roles and not shares:
            # before the policy, so that it sleeps while the policy is built
            self.critic = self._build_critic(initialise=plan is None)
            self._load_critic(self.critic, plan)
        model = RewardModel if config.algorithm.trains_reward_model else PolicyModel
        chunks = build_model_chunks(self.spec, config, initialise=initialise, model=model)
        if config.lora.lora_rank:
            self.adapters = AdapterConfig.for_model(config.lora, table_of(self.spec), self.spec)
            adapters.attach(chunks, self.spec, self.adapters)
            adapters.draw_first_values(chunks, self.spec, self.adapters, config.train.seed)
            finalize = adapters.finish_gradients
        else:
            optimizer.freeze(chunks, config)
            finalize = finalize_model_grads
        self.model_chunks = optimizer.wrap_data_parallel(chunks, config, finalize)
        for chunk, wrapper in zip(chunks, self.model_chunks, strict=True):
            chunk.attach(wrapper)
        if shares:
            self.critic = self._build_critic(base=self.model_chunks)
        self.routing = guide_for(chunks, self.spec, config)
        if self.hf_config is not None and self.adapters is None:
            self.engine_weights = EngineWeights.of(config, self.model_chunks, self.hf_config)
        if initialise:
            self.optimizer, self.scheduler = optimizer.build_optimizer(self.model_chunks, config)
            for role in self._copied_roles():
                self.copies[role.name] = WeightsCopy(self.model_chunks)
        self.next_rollout_id = 0 if plan is None else self._load(plan)
        if REFERENCE in self.copies:
            differs = not self.copies[REFERENCE].equals(self.model_chunks)
            self.reference_is_policy = not self.ranks.any_of_all(differs)
        elif self.adapters is not None:
            differs = not adapters.changes_nothing(self.model_chunks)
            self.reference_is_policy = not self.ranks.any_of_all(differs)

    def _build_critic(
        self, *, initialise: bool = False, base: list[optimizer.DataParallel] | None = None
    ) -> Critic:
        takes_turns = bool(self.config.cluster.offload_train) and device.has_gpu()
        if not self.config.critic_has_own_layout:
            return Critic(
                self.spec,
                self.config,
                self.ranks,
                self.functions,
                self._pack,
                initialise=initialise,
                takes_turns=takes_turns,
                base=base,
            )
        check_critic_layout(self.spec, self.config)
        config = critic_placed(self.config)
        spec = self.spec.padded(config.megatron.tensor_model_parallel_size)
        second = SecondLayout(config, virtual_stages(spec, config), self.ranks.device)
        return Critic(
            spec,
            config,
            second.ranks,
            self.functions,
            partial(self._pack, config=config),
            initialise=initialise,
            takes_turns=takes_turns,
            layout=second.active,
        )

    def _load_critic(self, critic: Critic, plan: LoadPlan | None) -> None:
        """Load the critic's weights; without a plan they are random."""
        if plan is not None:
            critic.load(plan)
        critic.sleep()

    def _load(self, plan: LoadPlan) -> int:
        """Load the weights of all models except the critic, the policy's last. Then build the
        policy's optimizer and load its state, if there is one. Return the next rollout id."""
        if self.adapters is not None:
            return self._load_adapters(plan, self.adapters)
        self._copy_frozen(plan)
        logger.info("%s", plan.note)
        if plan.kind == "hf":
            self._load_weights(plan)
        self.optimizer, self.scheduler = optimizer.build_optimizer(self.model_chunks, self.config)
        if plan.kind == "megatron":
            self._load_state(plan)
        return plan.start_rollout_id

    def _copy_frozen(self, plan: LoadPlan) -> None:
        """Load and copy the weights of the frozen models.

        Args:
            plan: the policy's load plan.
        """
        for role in self._copied_roles():
            iteration = saved_reference(plan) if role.is_saved else None
            if iteration is None:
                assert role.source is not None
                source = role.source(self.config)
                self._load_weights(source)
                logger.info("%s", source.note)
            self.copies[role.name] = WeightsCopy(self.model_chunks, iteration)

    def _load_adapters(self, plan: LoadPlan, own: AdapterConfig) -> int:
        """Load the base, a critic that shares it, and the adapters if some are saved; build the
        optimizer. Return the next rollout id.

        Raises:
            UserError: ``plan`` has another base model than the reference model.
        """
        self._copy_frozen(plan)
        base = resolve_reference(self.config)
        resumes_adapters = holds_adapters(plan)
        if not resumes_adapters and plan.path.resolve() != base.path.resolve():
            raise UserError(
                f"--load {plan.path} is another base model than {base.path}",
                why="it holds whole weights; adapters are trained beside those of --ref-load or "
                "--hf-checkpoint, which the reference model and the engines have, too",
                fix="pass it as --hf-checkpoint, or --load with a checkpoint of adapters",
            )
        self._load_weights(base, frozen_reader(self.config, base.path, self.ranks.device))
        logger.info("%s", plan.note if resumes_adapters else base.note)
        if self.critic is not None and self.critic.shared:
            self._load_critic(self.critic, plan)
        reference = reference_adapter(self.config)
        if reference is not None:
            copy = WeightsCopy(self.model_chunks, tensors_of=adapters.adapter_tensors)
            with copy.swapped_in(self.model_chunks):
                self._fill_adapters(reference, own, "--ref-load")
                copy.take(self.model_chunks)
            self.copies[REFERENCE] = copy
            logger.info("the reference model is the base with the adapter %s", reference)
        start_from = self.config.lora.lora_adapter_path
        if start_from is not None and not resumes_adapters:
            self._fill_adapters(start_from, own, "--lora-adapter-path")
            logger.info("adapters start from %s", start_from)
        self.optimizer, self.scheduler = optimizer.build_optimizer(self.model_chunks, self.config)
        if resumes_adapters:
            self._load_state(plan)
        return plan.start_rollout_id

    def _fill_adapters(self, directory: str | Path, own: AdapterConfig, flag: str) -> None:
        """Load the PEFT adapter that ``flag`` names, which must have the policy's adapter rank and
        layers, into the model."""
        family = table_of(self.spec)
        tensors = fitted(read_adapter(directory, family), own, family, self.spec, flag=flag)
        fill_adapters(self.model_chunks, adapter_family(family, self.spec, own), self.spec, tensors)

    def _load_state(self, plan: LoadPlan) -> None:
        """Load the training state of a checkpoint."""
        state = self._checkpoint_state()
        seed = self.config.train.seed
        self.extra_state = load_checkpoint(plan, state, seed=seed, is_compared=True).extra_state

    def _load_weights(self, plan: LoadPlan, reader: QuantisedReader | None = None) -> None:
        """Load full weights.

        Args:
            reader: reads ``plan``'s Hugging Face directory with the engines' quantised values.
        """
        if plan.kind == "hf":
            part: ModelPart = "trunk" if self.config.algorithm.trains_reward_model else "base"
            load_same_model(self.model_chunks, self.spec, self.config, plan.path, reader, part)
        else:
            load_checkpoint(plan, TrainerState(self.model_chunks, part="base"))

    # -- what a run does ---------------------------------------------------------------------------

    def set_run_length(self, num_rollout: int) -> None:
        """Set the number of rollouts in the learning-rate schedule, for runs whose length is known
        only after counting the prompts."""
        optimizer.set_run_length(self.scheduler, self.config, num_rollout)
        if self.critic is not None:
            self.critic.set_run_length(num_rollout)

    @property
    def layout(self) -> TrainLayout:
        found = super().layout
        if self.critic is None or not self.config.critic_has_own_layout:
            return found
        with self.critic.layout():
            return replace(found, critic=parallel.train_layout(self.critic.config))

    def train(self, batch: TrainBatch, critic_batch: TrainBatch | None = None) -> dict[str, float]:
        """Take all optimizer steps of one rollout; see `slime.trainer.update.update`.
        Collective."""
        self._begin_rollout()
        try:
            found = update(self, batch, critic_batch)
        except NonFiniteTraining:
            if self.critic is not None and self.critic.failed_step is not None:
                self.failed_step = self.critic.failed_step
            raise
        return self._end_rollout(batch, *found)

    def score(self, batch: TrainBatch) -> None:
        """Begin the update if the critic has its own ranks (else see `train`). Collective."""
        self._begin_rollout()
        self._update = Update(self, batch)
        self._update.score()

    def returns(self, values: ByPosition) -> tuple[ByPosition, ByPosition]:
        """Compute advantages from the critic's values; return the returns and loss masks of the
        shards that this rank reports. Collective."""
        assert self._update is not None, "scoring comes first"
        self._update.set_values(values)
        self._update.compute_advantages()
        return self._update.returns()

    def learn(self) -> dict[str, float]:
        """Take the policy's optimizer steps; return the same metrics as `train`. Collective."""
        assert self._update is not None, "scoring comes first"
        found = self._update.learn()
        batch = self._update.batch
        self._update = None
        return self._end_rollout(batch, *found)

    def _begin_rollout(self) -> None:
        self.writer.raise_failure()
        for chunk in self.model_chunks:
            chunk.train()
        if self.config.checkpoint.reset_optimizer_states:
            optimizer.reset_moments(self.optimizer)

    def _end_rollout(
        self, batch: TrainBatch, metrics: dict[str, float], steps: list[dict[str, float]]
    ) -> dict[str, float]:
        self.step_metrics = steps
        if self.images is not None:
            seconds = torch.tensor([self.images.take_seconds()], device=self.ranks.device)
            metrics["perf/images/trainer_time"] = float(self.ranks.max_over_all(seconds))
        if self.ranks.has_output:
            check_rollout(self.config, batch.rollout_id, metrics, self.step_metrics)
            check_grad_norms(
                self.config, batch.rollout_id, self.step_metrics, writes=self.ranks.is_reporting
            )
        optimizer.gather_parameters(self.model_chunks)
        if self.routing is not None:
            self.routing.forget()
        interval = self.config.checkpoint.ref_update_interval
        if REFERENCE in self.copies and interval and (batch.rollout_id + 1) % interval == 0:
            self.copies[REFERENCE].take(self.model_chunks, batch.rollout_id)
        return metrics

    def evaluate(self, batch: TrainBatch) -> dict[str, float]:
        """Score held-out preferences; see `slime.trainer.update.evaluate`. Collective."""
        for chunk in self.model_chunks:
            chunk.eval()
        return evaluate(self, batch)

    def save(self, rollout_id: int, extra_state: dict[str, Any] | None = None) -> Path | None:
        """Write a checkpoint (``--save``) and a Hugging Face directory (``--save-hf``) after
        training on rollout ``rollout_id``.

        Collective.

        Args:
            extra_state: small state of the run (data position, …); `setup` restores it to the
                attribute ``extra_state``.
        Returns:
            The checkpoint's directory; None without ``--save``. With ``--async-save`` it is
            complete after `finish_saving`.
        """
        flags = self.config.checkpoint
        path = None
        if flags.save is not None:
            with nullcontext() if self.critic is None else self.critic.readable():
                path = self.writer.save(
                    flags.save,
                    rollout_id,
                    self._checkpoint_state(),
                    extra_state=extra_state,
                    save_optimizer=not flags.no_save_optim,
                    save_rng=not flags.no_save_rng,
                    keep=flags.save_retain,
                    beside=self._further_files(Path(flags.save), rollout_id),
                )
        if flags.save_hf:
            self.export(str(fill(flags.save_hf, rollout_id)))
        return path

    def export(self, directory: str) -> None:
        """Write the model as a Hugging Face directory, or the adapters as a PEFT directory.
        Collective."""
        flags = self.config.checkpoint
        if not (flags.hf_checkpoint and self.hf_config):
            return
        if self.adapters is not None:
            self._collect_adapters(self.adapters)(Path(directory))
        elif self.config.algorithm.trains_reward_model:
            save_reward_model(
                self.model_chunks,
                self.hf_config,
                directory,
                assets_from=flags.hf_checkpoint,
                model_name=flags.model_name,
            )
        else:
            save_hf(
                self.pushed_chunks,
                self.hf_config,
                directory,
                assets_from=flags.hf_checkpoint,
                model_name=flags.model_name,
            )

    def _further_files(self, root: Path, rollout_id: int) -> Callable[[Path], None] | None:
        """Return a function that writes a checkpoint's additional files: adapters, and the part of
        a critic on other ranks. Collective."""
        adapters = self._adapter_files()
        if not self.config.critic.has_own_gpus:
            return adapters

        def write(checkpoint: Path) -> None:
            if adapters is not None:
                adapters(checkpoint)
            take_critic(root, rollout_id, checkpoint)

        return write

    def _adapter_files(self) -> Callable[[Path], None] | None:
        """Return a function that writes the adapters in PEFT's format. Collective."""
        if self.adapters is None or not self.hf_config:
            return None
        write = self._collect_adapters(self.adapters)
        return lambda checkpoint: write(checkpoint / ADAPTER)

    def _collect_adapters(self, adapters: AdapterConfig) -> Callable[[Path], None]:
        flags = self.config.checkpoint
        assert flags.hf_checkpoint is not None and self.hf_config is not None
        reference = flags.ref_load
        # adapters of a quantised model fit its own values, not those of the original weights
        is_quantised = Quantisation.read(self.hf_config) is not None
        has_own = reference is not None and is_hf_dir(Path(reference)) and not is_quantised
        return collect_adapters(
            self.pushed_chunks,
            self.hf_config,
            adapters,
            base=str(reference) if has_own else flags.hf_checkpoint,
            model_name=flags.model_name,
        )

    def _checkpoint_state(self) -> TrainerState:
        reference = self.copies.get(REFERENCE)
        if reference and (reference.iteration is None or not self.roles[REFERENCE].is_saved):
            reference = None  # --ref-load has these weights
        return TrainerState(
            self.model_chunks,
            self.optimizer,
            self.scheduler,
            reference=reference.tensors if reference else None,
            reference_iteration=reference.iteration if reference else None,
            part="everything" if self.adapters is None else "adapters",
            adapters=self.adapters,
            critic=None if self.critic is None else self.critic.state(),
        )

    def sleep(self, *, keep_weights: bool = False) -> dict[str, float]:
        """Free the GPU's memory until `wake`; without a GPU do nothing. It can be called twice,
        first with ``keep_weights``. Return ``perf/trainer_asleep_gb``: the memory that torch still
        holds on the GPU when all is freed."""
        if not device.has_gpu():
            return {}
        with PhaseMemory(self.config, self.ranks.device).phase("sleep"):
            freed = self._offloader().sleep(keep_weights=keep_weights)
        held = torch.cuda.memory_reserved() / 1e9
        logger.info("trainer asleep: %.1f GB freed, %.1f GB held", freed / 1e9, held)
        return {} if keep_weights else {"perf/trainer_asleep_gb": held}

    def wake(self) -> dict[str, float]:
        """Restore weights and optimizer exactly on the GPU. Return ``perf/free_before_wake_gb``:
        the memory that the engines had left free before."""
        if not device.has_gpu():
            return {}
        free, _ = torch.cuda.mem_get_info()
        self._offloader().wake()
        return {"perf/free_before_wake_gb": free / 1e9}

    @contextmanager
    def critic_turn(self) -> Iterator[None]:
        """Keep the critic awake inside the block. If critic and policy take turns on the GPU, the
        policy sleeps meanwhile. Collective."""
        assert self.critic is not None
        if not self.critic.takes_turns:
            yield
            return
        self._offloader().sleep(keep=self.critic.shared)
        self.critic.wake()
        yield
        self.critic.sleep()
        self._offloader().wake()

    def _offloader(self) -> Offloader:
        if self.offloader is None:
            self.offloader = Offloader(self.model_chunks, self.optimizer)
        return self.offloader

    # -- roles and their weights ------------------------------------------------------------------

    @property
    def pushed_chunks(self) -> list[optimizer.DataParallel]:
        """The model with which engines generate."""
        pushed = [role.name for role in self.roles.values() if role.is_pushed]
        assert pushed == [POLICY], "the other models are copies of weights, without chunks"
        return self.model_chunks

    def _copied_roles(self) -> list[Role]:
        """Return the frozen models that are copies of full weights. With adapters the reference
        model is not one: it is the policy without adapters, or with those of --ref-load."""
        frozen = [role for role in self.roles.values() if not role.learns]
        return [role for role in frozen if self.adapters is None or role.name != REFERENCE]

    # -- the verbs of an update (`slime.trainer.update.Trainer`) -----------------------------------

    def log_probs(
        self,
        batch: TrainBatch,
        role: str = POLICY,
        *,
        as_engines: bool = False,
        store_prefix: str = "",
        micro_batches: list[list[int]] | None = None,
    ) -> list[Tensor] | None:
        """Return the log-probs of the response tokens, [R_i] per sample; None on ranks without
        output layer. Collective.

        The micro-batches are those of training, so that equal weights give equal bits.

        Args:
            role: name of the model that scores.
            as_engines: score with the weights with which quantised engines compute.
            store_prefix: argument of ``--custom-megatron-before-log-prob-hook-path``.
            micro_batches: the samples to score; others get zeros. Default: all samples.
        """
        self._call_hook(
            "custom_megatron_before_log_prob_hook_path",
            self.config.train.custom_megatron_before_log_prob_hook_path,
            self.model_chunks[:],
            store_prefix,
        )
        packed = self._pack(
            batch, batch.all_micro_batches if micro_batches is None else micro_batches
        )
        if self.routing is not None:
            # training replays the experts of the policy's own pass, so other passes record none
            is_second_pass = as_engines and self.routing.source == "policy"
            routes_itself = role != POLICY or is_second_pass or micro_batches is not None
            self.routing.prepare(batch, packed, "reference" if routes_itself else "score")
        copy = self.copies.get(role)
        other: AbstractContextManager[None] = nullcontext()
        if copy is not None:
            other = copy.swapped_in(self.model_chunks)
        if self.adapters is not None and role == REFERENCE and copy is None:
            other = self._without_adapters()
        with other, self._computing(as_engines=as_engines):
            scores = forward.score(self.model_chunks, packed, **self._score_options(False))
        if not self.ranks.has_output:
            return None
        by_sample: list[Tensor] = [
            torch.zeros(r, device=self.ranks.device) for r in batch.response_lengths
        ]
        for micro_batch, score in zip(packed, scores):
            for i, values in zip(micro_batch.samples, micro_batch.split(score.log_probs)):
                by_sample[i] = values
        return by_sample

    def score_by_teacher(self, batch: TrainBatch, name: str, found: TeacherColumns) -> None:
        """Let a teacher score its samples; see `slime.trainer.update.Trainer`. Collective."""
        flags = self.config.distillation
        # the teacher may have another prompt than the policy
        seen = with_teacher_prompts(batch, self.spec.vision)
        micro_batches = [
            [i for i in samples if batch.teachers[i] == name]
            for step in batch.steps
            for samples in step.micro_batches
        ]
        packed = self._pack(seen, micro_batches)
        if self.routing is not None:
            self.routing.prepare(seen, packed, "reference")
        top_k = min(flags.opd_top_k, self.spec.vocab_size) if flags.in_loss else 0
        options = {"top_k": top_k, "with_rows": flags.in_loss and not top_k}
        with self._computing_as(name):
            self._check_teacher(name)
            scores = forward.score(
                self.model_chunks, packed, **self._score_options(False), **options
            )
            if self.ranks.has_output:
                note_teacher_scores(found, batch, name, packed, scores)

    def _check_teacher(self, name: str) -> None:
        """Compare the canary's log-probs with the teacher's first ones. Call it while the model has
        the teacher's weights. Collective.

        Raises:
            UserError: the log-probs differ.
        """
        source = self._teachers[name].source
        if source == SELF:  # its weights change
            return
        tokens = canary_tokens(self.spec.vocab_size, _TEACHER_CANARY)
        found = torch.tensor(self._score_canaries(tokens, self._score_options(False)) or [])
        first = self._teacher_canaries.setdefault(name, found)
        if first is found and self.ranks.is_reporting:
            logger.info(
                "teacher %s is %s: mean log-prob of the canary %.4f", name, source, found.mean()
            )
        differs = not torch.allclose(first, found, rtol=0.0, atol=_TEACHER_TOLERANCE)
        if self.ranks.any_of_all(differs):
            raise UserError(
                f"teacher {name} ({source}) has other weights than when it was loaded",
                why="its log-probs of the canary differ",
                fix="report this with the command line and the log: nothing may change a teacher",
            )

    @contextmanager
    def _computing_as(self, teacher: str) -> Iterator[None]:
        """Let the model compute with this teacher's weights inside the block."""
        if self._teachers[teacher].source == SELF:
            yield
            return
        copy = self.copies.get(teacher_role(teacher))
        other = copy.swapped_in(self.model_chunks) if copy else nullcontext()
        with self._without_adapters(), other:
            yield

    def _without_adapters(self) -> AbstractContextManager[None]:
        """Switch the policy's adapters off inside the block, if it has any."""
        if self.adapters is None:
            return nullcontext()
        return adapters.without_adapters(self.model_chunks)

    def canary_log_probs(
        self, tokens: list[int], *, plain: bool = False, base: bool = False
    ) -> list[float] | None:
        """Return log-probs of ``tokens[1:]`` at temperature 1, with the kernels of training and the
        weights with which engines compute after a push; None on ranks without output layer. For a
        model that sees images, log-probs of tokens around test images follow. Collective: every
        data-parallel rank computes the same.

        Args:
            plain: use the trained weights before quantisation.
            base: switch the adapters off.
        """
        quantised = None if plain else self.engine_weights
        off = adapters.without_adapters(self.pushed_chunks) if base else nullcontext()
        options = self._score_options(False) | {"temperature": 1.0}
        with off, quantised.swapped_in() if quantised else nullcontext():
            return self._score_canaries(tokens, options)

    def _score_canaries(self, tokens: list[int], options: dict[str, Any]) -> list[float] | None:
        """Return log-probs of ``tokens[1:]`` with the current weights, and of a model that sees
        images those of tokens around test images; None on ranks without output layer.
        Collective."""
        found = self._score_canary(tokens, options)
        images = ImageCanary.of(self.config, tokens) if self.images is not None else None
        if images is None:
            return found
        for picture in images.pictures:
            media = {"media": [images.media], "images": {"canary": picture}}
            own = self._score_canary(images.tokens, options, **media)
            if found is not None and own is not None:
                found += images.chosen(own)
        return found

    def _score_canary(
        self, tokens: list[int], options: dict[str, Any], **media: Any
    ) -> list[float] | None:
        """Return log-probs of ``tokens[1:]`` with the current weights; None on ranks without output
        layer. Collective.

        Args:
            media: fields of `TrainBatch` with the images.
        """
        batch = forward.canary_batch(tokens, self.layout.micro_batch_multiple, **media)
        packed = self._pack(batch, batch.steps[0].micro_batches)
        if self.routing is not None:
            # experts are neither recorded nor replayed
            self.routing.prepare(batch, packed, "reference")
        scores = forward.score(self.model_chunks, packed, **options)
        return scores[0].log_probs.tolist() if self.ranks.has_output else None

    def forward_backward(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Accumulate the gradients of ``batch.steps[step_id]``. Collective."""
        packed = self._pack(batch, batch.steps[step_id].micro_batches)
        gradient_scale = float(len(packed) * parallel_state.get_data_parallel_world_size())
        if self.routing is not None:
            if self.routing.counts_ahead:
                self._count_experts(batch, packed)
            self.routing.prepare(batch, packed, "train", gradient_scale)
        # with float32 parameters .grad is the gradient buffer itself; it would be added to itself
        self.optimizer.zero_grad()
        if path := self.config.train.custom_megatron_before_train_step_hook_path:
            flag = "custom_megatron_before_train_step_hook_path"
            origin = named(path, option_of(flag))
            with optimizer.telling_of_steps(self.optimizer, self.scheduler, origin):
                self._call_hook(
                    flag,
                    path,
                    batch.rollout_id,
                    step_id,
                    self.model_chunks[:],
                    self.optimizer,
                    self.scheduler,
                )
        loss_type = policy_loss(self.config)

        def loss_of(
            scores: TokenScores, micro_batch: PackedMicroBatch
        ) -> tuple[Tensor, dict[str, Tensor]]:
            return micro_batch_loss(
                loss_type, scores, inputs_of(micro_batch.samples), self.config, self.functions
            )

        options = self._score_options(True)
        dropout = self.adapters.dropout if self.adapters is not None else 0.0
        with self._computing(), adapters.dropping_inputs(self.model_chunks, dropout):
            return forward.forward_backward(
                self.model_chunks, packed, loss_of, gradient_scale=gradient_scale, **options
            )

    @torch.no_grad()
    def losses(
        self, batch: TrainBatch, step_id: int, inputs_of: Callable[[list[int]], LossInputs]
    ) -> list[MicroBatchResult]:
        """Return loss and metrics of ``batch.steps[step_id]``, like `forward_backward` but without
        gradients. Collective."""
        packed = self._pack(batch, batch.steps[step_id].micro_batches)
        if self.routing is not None:
            self.routing.prepare(batch, packed, "reference")
        with self._computing():
            scores = forward.score(self.model_chunks, packed, **self._score_options(False))
        loss_type = policy_loss(self.config)
        found = []
        for micro_batch, score in zip(packed, scores):
            inputs = inputs_of(micro_batch.samples)
            _, metrics = micro_batch_loss(loss_type, score, inputs, self.config, self.functions)
            found.append(MicroBatchResult(micro_batch.samples, metrics, score.per_token))
        return found

    def _count_experts(self, batch: TrainBatch, packed: list[PackedMicroBatch]) -> None:
        """Count the tokens per expert of the whole step in an extra forward pass. Collective."""
        assert self.routing is not None
        self.routing.prepare(batch, packed, "count")
        with self._computing():
            forward.score(self.model_chunks, packed, **self._score_options(False))
        self.routing.sum_counts()

    def optim_step(self, step: StepPlan, *, skip: bool) -> StepOutcome:
        """Apply the accumulated gradients; see `optimizer.take_step`. Collective."""
        clip = self.config.megatron.clip_grad
        outcome = optimizer.take_step(
            self.optimizer, self.scheduler, self.routing, clip, step, skip=skip
        )
        if outcome.applied:
            self.reference_is_policy = False
        return outcome

    def nonfinite_gradients(self) -> list[tuple[str, int, int]]:
        return optimizer.nonfinite_gradients(self.model_chunks)

    def learning_rates(self) -> list[float]:
        return optimizer.learning_rates(self.optimizer)

    @contextmanager
    def _computing(self, *, as_engines: bool = False) -> Iterator[None]:
        """Compute with the engines' quantised weights inside the block, under --fake-quantisation
        or if ``as_engines``."""
        chosen = self.config.quantised.fake_quantisation
        if self.engine_weights is None or not (chosen or as_engines):
            yield
            return
        optimizer.gather_parameters(self.model_chunks)  # after an earlier step of the rollout
        with self.engine_weights.swapped_in(experts_only=chosen == "experts" and not as_engines):
            yield

    # -- inside ------------------------------------------------------------------------------------

    def _score_options(self, training: bool) -> dict[str, Any]:
        if self.config.algorithm.trains_reward_model:
            return {}
        loss = policy_loss(self.config)
        sampled_at = self.config.rollout.rollout_temperature
        return {
            "temperature": sampled_at if loss.at_sampling_temperature else 1.0,
            "with_entropy": training and loss.takes_entropy,
            "with_logits": training and loss.takes_logits,
            "chunk_size": self.config.train.log_probs_chunk_size,
            "with_vocabulary": training and self.config.distillation.in_loss,
        }
