"""Low-rank adapters (LoRA, arXiv:2106.09685) as one more conversion table.

    family's table ─┐
    ModelSpec ──────┼─► adapter_family ─► a table of the adapters' parameters alone
    AdapterConfig ──┘

A Linear layer W [out, in] with an adapter computes W·x + s·B·A·x, with A [rank, in], B [out, rank]
and s = alpha / rank. The trainer's layers fuse several Linear layers of the checkpoint (q, k and v;
gate and up), each of which has its own A and B, as in PEFT:

    Megatron                      of a column-parallel layer        of a row-parallel layer
    <layer>.adapter.down    A     [parts · rank, in], all A's       [rank, in / ranks]
                                  stacked, on every rank
    <layer>.adapter.up      B     [out / ranks, rank], sharded      [out, rank] on every rank
                                  like the layer's own weight

Each row of ``up`` belongs to one part. Parts without an adapter have rows of zeros in ``up`` and no
rows in ``down``.

The output layer is column-parallel over the vocabulary. The embedding looks up tokens in A, so A is
sharded like the embedding, and B is initialised randomly instead of A:

    embedding.word_embeddings.adapter.down    Aᵀ    [vocabulary / ranks, rank]
    embedding.word_embeddings.adapter.up      B     [hidden, rank] on every rank

Routed experts have these parameters per expert, ``<layer>.adapter.down{expert}``. With
``shared-outer`` the outer sides (``down`` of gate and up, ``up`` of the down projection) are one
parameter for all experts of a layer, and their names have no expert number, neither in Megatron nor
in PEFT files:

    base_model.model.model.layers.3.mlp.experts.gate_proj.lora_A.weight       [rank, hidden]
    base_model.model.model.layers.3.mlp.experts.7.gate_proj.lora_B.weight     [inner, rank]

`by_expert` gives the per-expert names of the first tensor. Experts that a checkpoint has in stacks
have adapters of the same form and names: each expert's gate, up and down projection is a Linear
layer of its own (`with_single_experts`). Imports no torch.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from slime.config.config import Config
from slime.config.groups_lora import LoraConfig
from slime.errors import UserError
from slime.models import family_of
from slime.models.layouts import REPLICATED, ROW, TRANSPOSED_VOCAB, SomeParts, StackedRows
from slime.models.rules import Rule
from slime.models.spec import ModelSpec
from slime.models.table import ModelFamily, single_experts, width

PEFT_PREFIX = "base_model.model."
"""PEFT's prefix of the names of a model's modules."""
EVERYTHING = "all-linear"
"""PEFT's name for the target of every Linear layer but the output layer."""
_MEGATRON_PART = ".adapter."
_PEFT_NAME = re.compile(
    re.escape(PEFT_PREFIX)
    + r"(?P<module>.+)\.lora_(?:(?P<side>[AB])\.weight|embedding_(?P<embedding_side>[AB]))"
)
_EMBEDDING = "embed_tokens"

Side = Literal["A", "B"]


@dataclass(frozen=True)
class AdapterConfig:
    """The adapters of one model.

    Attributes:
        rank, alpha: of all adapters but those of routed experts.
        targets: last parts of the Hugging Face names of the adapted layers ("q_proj"). All exist
            in the model.
        dropout: fraction of the inputs that is dropped in training.
        experts: "per-expert", or "shared-outer": the experts of a layer share the outer sides.
        expert_rank: the rank of routed experts' adapters.
    """

    rank: int
    alpha: float
    targets: frozenset[str]
    dropout: float = 0.0
    experts: Literal["per-expert", "shared-outer"] = "per-expert"
    expert_rank: int = 0

    def __post_init__(self) -> None:
        if not self.expert_rank:
            object.__setattr__(self, "expert_rank", self.rank)

    @staticmethod
    def of(config: Config) -> AdapterConfig | None:
        """Read the flags and the model of ``--hf-checkpoint``; None without ``--lora-rank``.

        Raises:
            UserError: as `for_model`.
        """
        if not config.lora.lora_rank:
            return None
        flags = config.checkpoint
        if flags.hf_checkpoint is None:
            raise UserError(
                "--lora-rank without --hf-checkpoint",
                why="adapters belong to the weights of a base model",
                fix="pass --hf-checkpoint",
            )
        family = family_of(flags.hf_checkpoint, flags.model_name)
        return AdapterConfig.for_model(config.lora, family, family.model_spec(flags.hf_checkpoint))

    @staticmethod
    def of_critic(config: Config, family: ModelFamily, spec: ModelSpec) -> AdapterConfig | None:
        """Read the flags for the critic of the model ``spec``, which has no output layer; None if
        it is trained as a whole.

        Raises:
            UserError: as `for_model`, or the critic has none of the targets.
        """
        rank = config.critic.critic_lora_rank
        if not rank:
            return None
        flags = dataclasses.replace(config.lora, lora_rank=rank)
        found = AdapterConfig.for_model(flags, family, spec, rank_flag="--critic-lora-rank")
        outputs = {leaf for rule in family.rules if rule.is_output for leaf in leaves(rule)}
        if found.targets <= outputs:
            raise UserError(
                f"no layer of the critic is left to adapt: it has no {' '.join(found.targets)}",
                why="a critic has a value head in place of the output layer, and the head is "
                "trained as a whole",
                fix="name further layers with --lora-target-modules, or pass --critic-lora-rank 0",
            )
        return dataclasses.replace(found, targets=found.targets - outputs)

    @staticmethod
    def for_model(
        flags: LoraConfig, family: ModelFamily, spec: ModelSpec, *, rank_flag: str = "--lora-rank"
    ) -> AdapterConfig:
        """Read the flags for one model.

        Args:
            rank_flag: the flag that gave ``flags.lora_rank``, for messages.
        Raises:
            UserError: a target is not in the model (names the closest) or cannot be adapted, there
                is no target, only one side of the experts is adapted, the rank is not divisible by
                the experts per token, or a flag has no effect.
        """
        targets = _targets(flags, family, spec)
        if flags.lora_dropout:
            _refuse_idle_dropout(targets, family, spec)
        expert_rank = flags.lora_rank
        routed = [rule for rule in _layers(family) if rule.is_expert]
        if not any(leaf in targets for rule in _in_model(routed, spec) for leaf in leaves(rule)):
            _refuse_expert_flags(flags)
        elif flags.lora_rank_by_topk:
            expert_rank = _divided_rank(flags.lora_rank, spec, rank_flag)
        return AdapterConfig(
            rank=flags.lora_rank,
            alpha=flags.lora_alpha,
            targets=targets,
            dropout=flags.lora_dropout,
            experts=flags.lora_experts,
            expert_rank=expert_rank,
        )

    @property
    def scaling(self) -> float:
        """The factor s of all adapters but those of routed experts."""
        return self.alpha / self.rank

    @property
    def expert_scaling(self) -> float:
        """The factor s of routed experts' adapters."""
        return self.alpha / self.expert_rank

    def rank_of(self, rule: Rule) -> int:
        """Return the rank of the adapter of a layer, by a rule of the base's table."""
        return self.expert_rank if rule.is_expert else self.rank

    def scaling_of(self, rule: Rule) -> float:
        """Return the factor s of the adapter of a layer, by a rule of the base's table."""
        return self.alpha / self.rank_of(rule)


# -- in engines ------------------------------------------------------------------------------------


def joins_gate_and_up(family: ModelFamily, adapters: AdapterConfig) -> bool:
    """Tell whether gate and up of an expert need the same A in engines.

    In gpt-oss their rows alternate. SGLang (0.5.16) orders the rows of B alike, and yet applies the
    A of gate to the first half of the rows and the A of up to the second. That is right only if
    both are equal. So engines get both A's in the place of each, and zeros in B beside them:

        A_gate = A_up = [A of gate; A of up]      B_gate = [B of gate, 0]      B_up = [0, B of up]
    """
    return family.interleaves_experts and not adapters.targets.isdisjoint(("gate_proj", "up_proj"))


def served_rank(family: ModelFamily, adapters: AdapterConfig) -> int:
    """Return the rank of all adapters in engines, which have one for all layers."""
    if not joins_gate_and_up(family, adapters):
        return adapters.rank
    return max(adapters.rank, 2 * adapters.expert_rank)


# -- targets ---------------------------------------------------------------------------------------


def leaves(rule: Rule) -> tuple[str, ...]:
    """Return the last part of each module that a rule's tensors belong to.

    Example:
        >>> [leaves(rule) for rule in QWEN3.rules if rule.is_linear][0]
        ('q_proj', 'k_proj', 'v_proj')
    """
    return tuple(name.removesuffix(".weight").rpartition(".")[2] for name in rule.hf_names)


def adaptable(family: ModelFamily, spec: ModelSpec) -> list[str]:
    """Return the last parts of the names of all Linear layers of a model, in the table's order,
    without the output layer."""
    rules = _in_model(_layers(family), spec)
    return list(dict.fromkeys(leaf for rule in rules for leaf in leaves(rule)))


def adaptable_by_name(family: ModelFamily, spec: ModelSpec) -> list[str]:
    """Return the layers of `adaptable`, and embedding and output layer, which get an adapter only
    if they are named. Tied embedding and output layers are left out."""
    return adaptable(family, spec) + [
        leaf for rule in family.rules if _is_vocabulary(rule, spec) for leaf in leaves(rule)
    ]


def _is_vocabulary(rule: Rule, spec: ModelSpec) -> bool:
    return (rule.is_embedding or rule.is_output) and not spec.tie_embeddings


def _layers(family: ModelFamily) -> list[Rule]:
    rules = with_single_experts(family).rules
    return [rule for rule in rules if rule.is_linear and rule.is_of_layer]


def _in_model(rules: Sequence[Rule], spec: ModelSpec) -> list[Rule]:
    return [rule for rule in rules if any(rule.applies(spec, n) for n in range(spec.num_layers))]


_TIED = (
    "this model's embedding and output layer are one weight: a merged model has no place for an "
    "adapter of one of them, nor for two different ones"
)
#: Modules with a weight matrix that cannot get an adapter → why.
_NOT_ADAPTED = {
    "embed_tokens": _TIED,
    "lm_head": _TIED,
    "gate": "it is a router, whose choices trainer and engines must agree on",
}


def _targets(flags: LoraConfig, family: ModelFamily, spec: ModelSpec) -> frozenset[str]:
    linear = adaptable(family, spec)
    known = adaptable_by_name(family, spec)
    chosen = [name for name in flags.lora_target_modules if name != EVERYTHING]
    excluded = flags.lora_exclude_modules
    for option, names in (
        ("--lora-target-modules", chosen),
        ("--lora-exclude-modules", excluded),
    ):
        for name in names:
            if name not in known:
                raise _unknown_target(option, name, known, family)
    everything = not flags.lora_target_modules or EVERYTHING in flags.lora_target_modules
    targets = frozenset([*(linear if everything else ()), *chosen])
    if unused := sorted(set(excluded) - targets):
        raise UserError(
            f"--lora-exclude-modules {' '.join(unused)} has no effect",
            why="--lora-target-modules gives them no adapter",
            fix="leave it out",
        )
    targets -= frozenset(excluded)
    if not targets:
        raise UserError(
            "no layer is left to adapt",
            why="--lora-exclude-modules names every layer of --lora-target-modules",
            fix=f"adapt at least one of {', '.join(known)}",
        )
    for rule in _layers(family):
        if rule.is_expert and rule.layout is ROW:
            _refuse_one_side(targets, leaves(rule)[0], family, spec)
    return targets


def _unknown_target(option: str, name: str, known: list[str], family: ModelFamily) -> UserError:
    if name in _NOT_ADAPTED:
        return UserError(
            f"{option} {name} cannot be adapted",
            why=_NOT_ADAPTED[name],
            fix=f"leave it out; the layers are {', '.join(known)}",
        )
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    return UserError(
        f"{option} {name}: this model ({family.name}) has no such layer",
        why=f"nearest: {', '.join(near)}; all: {', '.join(known)}"
        if near
        else f"its layers are {', '.join(known)}",
        fix=f"put blanks between names: {option} {' '.join(name.replace(',', ' ').split())}"
        if "," in name
        else "pass the last part of a layer's Hugging Face name",
    )


def _refuse_one_side(
    targets: frozenset[str], down: str, family: ModelFamily, spec: ModelSpec
) -> None:
    """Refuse adapters of only the gate and up projections of experts, or only of their down
    projection ``down``.

    SGLang 0.5.16 applies adapters of experts only if both are targets; otherwise it loads the
    adapters and ignores them.
    """
    rules = _in_model([rule for rule in _layers(family) if rule.is_expert], spec)
    inner = {leaf for rule in rules for leaf in leaves(rule)} - {down}
    if rules and (down in targets) != bool(inner & targets):
        missing = down if inner & targets else " ".join(sorted(inner))
        raise UserError(
            f"--lora-target-modules has one side of the experts only: {missing} is missing",
            why="SGLang loads adapters of one side of its experts and never applies them",
            fix=f"add {missing}, or leave out {' and '.join(sorted(inner | {down}))}",
        )


def _refuse_idle_dropout(targets: frozenset[str], family: ModelFamily, spec: ModelSpec) -> None:
    """Refuse dropout if only the embedding or routed experts have adapters."""
    dropping = [rule for rule in _in_model(_layers(family), spec) if not rule.is_expert]
    dropping += [rule for rule in family.rules if rule.is_output]
    if not any(leaf in targets for rule in dropping for leaf in leaves(rule)):
        raise UserError(
            f"--lora-dropout has no effect on adapters of {' '.join(sorted(targets))}",
            why="adapters of the embedding and of routed experts have no dropout",
            fix="leave it out, or name further layers with --lora-target-modules",
        )


def _refuse_expert_flags(flags: LoraConfig) -> None:
    given = []
    if flags.lora_experts != "per-expert":
        given.append(f"--lora-experts {flags.lora_experts}")
    if flags.lora_rank_by_topk:
        given.append("--lora-rank-by-topk")
    if given:
        raise UserError(
            f"{' and '.join(given)} without adapters of routed experts",
            why="the model has no routed experts, or they are not adapted",
            fix="leave the flag out, or adapt routed experts with --lora-target-modules",
        )


def _divided_rank(rank: int, spec: ModelSpec, flag: str) -> int:
    per_token = int(spec.transformer["moe_router_topk"])
    if rank % per_token:
        raise UserError(
            f"{flag} {rank} cannot be divided by the {per_token} experts per token",
            why="with --lora-rank-by-topk the adapters of experts have this rank ÷ experts per "
            "token",
            fix=f"pass {flag} {-(-rank // per_token) * per_token}",
        )
    return rank // per_token


# -- the table -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AdaptedLayer:
    """A rule of the base's table, and the rules of its adapter.

    Attributes:
        base: rule of the frozen weight.
        down, up: rules of the adapter's two parameters.
        present: which parts of the base weight have an adapter.
        rank, scaling: of the adapter.
    """

    base: Rule
    down: Rule
    up: Rule
    present: tuple[bool, ...]
    rank: int
    scaling: float

    @property
    def is_row_parallel(self) -> bool:
        return self.base.layout is ROW


def with_single_experts(family: ModelFamily) -> ModelFamily:
    """Return the table with a Linear layer per projection of each routed expert, also where
    checkpoints have experts in stacks. `adapted_layers` returns rules of this table."""
    return dataclasses.replace(family, rules=tuple(map(single_experts, family.rules)))


def adapted_layers(
    family: ModelFamily, spec: ModelSpec, adapters: AdapterConfig
) -> list[AdaptedLayer]:
    """Return the rules of the layers with adapters, in the order of the base's table."""
    adapted = [
        rule
        for rule in with_single_experts(family).rules
        if (rule.is_linear and rule.is_of_layer) or _is_vocabulary(rule, spec)
    ]
    rules = _in_model(adapted, spec)
    return [
        _adapted(rule, spec, adapters) for rule in rules if adapters.targets & set(leaves(rule))
    ]


def adapter_family(family: ModelFamily, spec: ModelSpec, adapters: AdapterConfig) -> ModelFamily:
    """Return the table of the adapters' parameters, which are trained, saved and pushed, with
    PEFT's names."""
    layers = adapted_layers(family, spec, adapters)
    rules = tuple(rule for layer in layers for rule in (layer.down, layer.up))
    return dataclasses.replace(family, rules=rules, ignored=(), fused=())


def count_parameters(family: ModelFamily, spec: ModelSpec, adapters: AdapterConfig) -> int:
    """Return the number of trained parameters, as PEFT counts them."""
    table = adapter_family(family, spec, adapters)
    return sum(prod(shape) for _, shape in table.hf_tensors(spec))


def _adapted(rule: Rule, spec: ModelSpec, adapters: AdapterConfig) -> AdaptedLayer:
    names = leaves(rule)
    present = tuple(leaf in adapters.targets for leaf in names)
    rank = adapters.rank_of(rule)
    rows = rule.rows if isinstance(rule.rows, tuple) else (rule.rows,) * len(names)
    chosen = [hf for hf, is_there in zip(rule.hf_names, present) if is_there]
    if rule.is_embedding:
        return _adapted_embedding(rule, rank, adapters)
    is_row = rule.layout is ROW
    shares = rule.is_expert and adapters.experts == "shared-outer"
    down_layout = ROW if is_row else StackedRows(len(chosen))
    up_layout = REPLICATED if is_row else rule.layout
    if not all(present):
        up_layout = SomeParts(rule.layout, tuple(width(spec, one) for one in rows), present)
    down = Rule(
        _megatron_name(rule, "down", shared=shares and not is_row),
        tuple(_peft_name_of(hf, "A", shared=shares and not is_row) for hf in chosen),
        down_layout,
        rank,
        rule.columns,
        rule.when,
    )
    up = Rule(
        _megatron_name(rule, "up", shared=shares and is_row),
        tuple(_peft_name_of(hf, "B", shared=shares and is_row) for hf in chosen),
        up_layout,
        tuple(one for one, is_there in zip(rows, present) if is_there),
        rank,
        rule.when,
    )
    return AdaptedLayer(rule, down, up, present, rank, adapters.scaling_of(rule))


def _adapted_embedding(rule: Rule, rank: int, adapters: AdapterConfig) -> AdaptedLayer:
    """Return the rules of the embedding's adapter: A is [rank, vocabulary], B is [hidden, rank]."""
    (hf,) = rule.hf_names
    assert not isinstance(rule.rows, tuple) and rule.columns is not None
    down = Rule(
        _megatron_name(rule, "down", shared=False),
        _peft_name_of(hf, "A", shared=False),
        TRANSPOSED_VOCAB,
        rank,
        rule.rows,
    )
    up = Rule(
        _megatron_name(rule, "up", shared=False),
        _peft_name_of(hf, "B", shared=False),
        REPLICATED,
        rule.columns,
        rank,
    )
    return AdaptedLayer(rule, down, up, (True,), rank, adapters.scaling_of(rule))


def _megatron_name(rule: Rule, side: Literal["down", "up"], *, shared: bool) -> str:
    layer, _, number = rule.megatron_names[0].rpartition("weight")
    return f"{layer}adapter.{side}{'' if shared else number}"


def _peft_name_of(hf: str, side: Side, *, shared: bool) -> str:
    module = hf.removesuffix(".weight")
    return peft_name(module.replace(".{expert}.", ".") if shared else module, side)


# -- names -----------------------------------------------------------------------------------------


def peft_name(module: str, side: Side) -> str:
    """Return the name of one side of a module's adapter in a PEFT file.

    Example:
        >>> peft_name("model.layers.0.self_attn.q_proj", "A")
        'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
        >>> peft_name("model.embed_tokens", "A")
        'base_model.model.model.embed_tokens.lora_embedding_A'
    """
    if is_embedding(module):
        return f"{PEFT_PREFIX}{module}.lora_embedding_{side}"
    return f"{PEFT_PREFIX}{module}.lora_{side}.weight"


def is_embedding(module: str) -> bool:
    """Tell whether a module is the embedding, by its Hugging Face path."""
    return module.rpartition(".")[2] == _EMBEDDING


def split_peft_name(name: str) -> tuple[str, Side] | None:
    """Return the module and the side of a name in a PEFT file; None for any other name."""
    found = _PEFT_NAME.fullmatch(name)
    if found is None:
        return None
    side = found["side"] or found["embedding_side"]
    return found["module"], "A" if side == "A" else "B"


def with_module(name: str, rename: Callable[[str], str]) -> str:
    """Return a name in a PEFT file with its module renamed; any other name as it is."""
    if not name.startswith(PEFT_PREFIX):
        return name
    return PEFT_PREFIX + rename(name.removeprefix(PEFT_PREFIX))


def begins_with_zeros(name: str) -> bool:
    """Tell whether a tensor, by its name in a PEFT file, is zero in a new adapter: B, or A for the
    embedding. The other side is random."""
    split = split_peft_name(name)
    return split is not None and split[1] == ("A" if is_embedding(split[0]) else "B")


def is_adapter_parameter(name: str) -> bool:
    """Tell whether a parameter of the trainer's model belongs to an adapter, by its name."""
    return _MEGATRON_PART in name


_SHARED_EXPERTS = re.compile(r"(.*\.experts)\.(\w+\.lora_[AB]\.weight)")


def by_expert(name: str, num_experts: int) -> Iterator[str]:
    """Yield a name per expert for a tensor that the experts of a layer share, else only its own
    name.

    Example:
        >>> list(by_expert("base_model.model.model.layers.0.mlp.experts.up_proj.lora_A.weight", 2))
        ['base_model.model.model.layers.0.mlp.experts.0.up_proj.lora_A.weight',
         'base_model.model.model.layers.0.mlp.experts.1.up_proj.lora_A.weight']
    """
    found = _SHARED_EXPERTS.fullmatch(name)
    if found is None:
        yield name
        return
    for expert in range(num_experts):
        yield f"{found[1]}.{expert}.{found[2]}"
