"""`CriticProcess`, one rank of a critic that has its own GPUs and layout."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from slime.trainer.megatron import device

device.install()  # before anything imports megatron

from slime.checkpoints.critic_part import KEPT_PARTS, critic_root, discard_part
from slime.checkpoints.load_plan import LoadPlan
from slime.config.config import Config
from slime.models.spec import ModelSpec
from slime.placement import critic_placed
from slime.samples.batch import TrainBatch
from slime.trainer.megatron.critic import Critic
from slime.trainer.megatron.parallel import RankInfo
from slime.trainer.megatron.process import TrainerProcess
from slime.trainer.memory import PhaseMemory
from slime.trainer.update import ByPosition, CriticUpdate


class CriticProcess(TrainerProcess):
    """One rank of the critic. All methods that compute are collective over the critic's ranks.

    Example:
        process = CriticProcess(config, RankInfo(rank=0, world_size=1, local_rank=0, …))
        process.setup()
        process.load(plan_of_the_policy)
        values = process.values(batch)
        metrics = process.learn(returns, loss_masks)
    """

    critic: Critic

    def __init__(self, config: Config, rank_info: RankInfo) -> None:
        super().__init__(critic_placed(config), rank_info)
        self._update: CriticUpdate | None = None

    def setup(self, *, spec: ModelSpec | None = None, initialise: bool = False) -> None:
        """Join the process groups and build the model; `load` loads its weights.

        Args:
            spec: architecture to build; default: that of ``--hf-checkpoint``.
            initialise: draw random weights; `load` is not called (tests, benchmarks).
        Raises:
            UserError: the layout does not fit the ranks or the model.
        """
        self.join(spec)
        with PhaseMemory(self.config, self.ranks.device, of_critic=True).phase("setup"):
            self.critic = Critic(
                self.spec,
                self.config,
                self.ranks,
                self.functions,
                self._pack,
                initialise=initialise,
            )
        self.model_chunks = self.critic.chunks

    def load(self, plan: LoadPlan) -> None:
        """Load the weights, and the optimizer state if the run is resumed.

        Args:
            plan: the policy's load plan.
        """
        with PhaseMemory(self.config, self.ranks.device, of_critic=True).phase("setup"):
            self.critic.load(plan)

    def set_run_length(self, num_rollout: int) -> None:
        """Set the number of rollouts in the learning-rate schedule."""
        self.critic.set_run_length(num_rollout)

    def values(self, batch: TrainBatch) -> ByPosition:
        """Return the value before each response token, for the shards that this rank reports."""
        self.writer.raise_failure()
        self._update = CriticUpdate(self, self.critic, batch)
        return self._update.values()

    def learn(self, returns: ByPosition, loss_masks: ByPosition) -> dict[str, float]:
        """Take the optimizer steps on the batch of the last `values`; return metrics.

        Raises:
            NonFiniteTraining: NaN or Inf, unless ``--no-check-for-nan-in-loss-and-grad``.
        """
        assert self._update is not None, "values come first"
        metrics = self._update.learn(returns, loss_masks)
        self._update = None
        return metrics

    def save(self, rollout_id: int) -> None:
        """Write the critic's part of the checkpoint after ``rollout_id``, which the policy's ranks
        move into their checkpoint. With --async-save it is complete after `finish_saving`."""
        flags = self.config.checkpoint
        if flags.save is None:
            return
        root = Path(flags.save)
        self.writer.wait()
        if dist.get_rank() == 0:
            discard_part(root, rollout_id)
        self.writer.save(
            critic_root(root),
            rollout_id,
            self.critic.state(),
            save_optimizer=not flags.no_save_optim,
            save_rng=False,
            keep=KEPT_PARTS,
        )
