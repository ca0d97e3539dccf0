"""The group about the critic, the model that PPO trains beside the policy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from slime.config.estimators import estimators_where
from slime.config.flag import (
    FRACTION,
    NONE_OR_SOME,
    SOME,
    Interval,
    Part,
    derived,
    finite,
    flag,
    on,
)

_CRITIC = on(
    "advantage_estimator",
    *estimators_where("needs_critic"),
    why="the other estimators have no critic",
)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of --advantage-estimator ppo: the policy's architecture with one output per token
    in place of the vocabulary. Policy and critic take turns in the trainer's processes, unless the
    critic has GPUs and processes of its own. In both cases its parallel sizes may differ from the
    policy's. Both are saved in the same checkpoints."""

    READ_BY: ClassVar[tuple[Part, ...]] = ("training",)

    critic_load: str | None = flag(None, needs=_CRITIC, read_by="trainer")
    """Initial weights of the critic; default: the policy's. A Hugging Face directory, of a language
    model or a reward model, or a checkpoint directory, whose critic is used if it has one. A
    resumed run loads the critic of its own checkpoint."""
    critic_lr: float = derived("lr", range=finite(0), needs=_CRITIC)
    """Learning rate of the critic; about ten times that of the policy is usual. The value loss has
    no factor of ½."""
    critic_lr_warmup_iters: int = derived("lr_warmup_iters", range=NONE_OR_SOME, needs=_CRITIC)
    """Optimizer steps of linear warm-up of the critic's learning rate."""
    critic_lora_rank: int = derived(
        "lora_rank",
        range=NONE_OR_SOME,
        needs=(_CRITIC, on("lora_rank", why="without adapters the critic is trained as a whole")),
        read_by="trainer",
    )
    """Rank of the critic's adapters, which are trained beside its frozen layers, together with its
    whole value head; 0 trains the whole critic. Scale, layers and dropout are those of the policy's
    adapters; the output layer, which a critic does not have, gets none."""
    critic_num_nodes: int = derived(
        "actor_num_nodes with critic_num_gpus_per_node, else 0",
        range=NONE_OR_SOME,
        needs=_CRITIC,
        read_by=("trainer", "training"),
    )
    """Nodes of a critic on GPUs of its own."""
    critic_num_gpus_per_node: int = derived(
        "actor_num_gpus_per_node with critic_num_nodes, else 0",
        range=NONE_OR_SOME,
        needs=_CRITIC,
        read_by=("trainer", "training"),
    )
    """GPUs of the critic on each of its nodes, in addition to those of trainer and engines; policy
    and critic then train at the same time. 0: the critic uses the policy's GPUs, by turns."""
    critic_tensor_model_parallel_size: int = derived(
        "tensor_model_parallel_size", range=SOME, needs=_CRITIC, read_by="trainer"
    )
    """GPUs over which each matrix of the critic is split. Like the critic's other sizes, it may
    differ from the policy's on the same GPUs, too."""
    critic_pipeline_model_parallel_size: int = derived(
        "pipeline_model_parallel_size", range=SOME, needs=_CRITIC, read_by="trainer"
    )
    """Pipeline stages of the critic. With as many stages as the policy, virtual and uneven stages
    are the policy's too; else there are none."""
    critic_context_parallel_size: int = derived(
        "context_parallel_size", range=SOME, needs=_CRITIC, read_by="trainer"
    )
    """GPUs over which each sequence is split in the critic. Like the policy's micro-batches, the
    critic's hold max_tokens_per_gpu × this many tokens."""
    critic_expert_model_parallel_size: int = derived(
        "expert_model_parallel_size", range=SOME, needs=_CRITIC, read_by="trainer"
    )
    """GPUs over which the critic's experts are spread."""
    critic_expert_tensor_parallel_size: int | None = derived(
        "expert_tensor_parallel_size", range=SOME, needs=_CRITIC, read_by="trainer"
    )
    """GPUs over which each matrix of the critic's experts is split."""
    critic_sequence_parallel: bool = derived(
        "sequence_parallel where the critic's matrices are split", needs=_CRITIC, read_by="trainer"
    )
    """Split the critic's activations of norms and dropout along the sequence."""
    num_critic_only_steps: int = flag(0, range=NONE_OR_SOME, needs=_CRITIC)
    """Train only the critic on the run's first N rollouts; the policy does not change."""
    lambd: float = flag(1.0, range=FRACTION, needs=_CRITIC)
    """Lambda of generalised advantage estimation, per trained token. At 0.95 a reward hardly
    affects tokens 100 or more before it."""
    critic_lambd: float = derived("lambd", range=FRACTION, needs=_CRITIC)
    """Lambda of the returns that the critic learns; 1 has no bias (VC-PPO, arXiv:2503.01491)."""
    value_clip: float = flag(
        0.2,
        range=Interval(0, above=True, what="a distance from the value before the update"),
        needs=_CRITIC,
    )
    """Clip range of the value loss, in units of the reward, or of the returns' standard deviation
    with --normalize-values."""
    normalize_values: bool = flag(False, needs=_CRITIC)
    """Normalise the critic's targets to mean 0 and standard deviation 1 by running statistics,
    which checkpoints hold. Use it for rewards that are far from size 1."""

    @property
    def has_own_gpus(self) -> bool:
        """The critic has GPUs of its own instead of turns on the policy's."""
        return self.num_gpus > 0

    @property
    def parallel_sizes(self) -> dict[str, Any]:
        """The settings that divide the critic over its GPUs, by the names of the policy's."""
        return {
            "tensor_model_parallel_size": self.critic_tensor_model_parallel_size,
            "pipeline_model_parallel_size": self.critic_pipeline_model_parallel_size,
            "context_parallel_size": self.critic_context_parallel_size,
            "expert_model_parallel_size": self.critic_expert_model_parallel_size,
            "expert_tensor_parallel_size": self.critic_expert_tensor_parallel_size,
            "sequence_parallel": self.critic_sequence_parallel,
        }

    @property
    def num_gpus(self) -> int:
        """GPUs of the critic's own."""
        return self.critic_num_nodes * self.critic_num_gpus_per_node
