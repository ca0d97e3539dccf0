"""Reject an adapter before sending if engines would accept but not apply it, or crash.

SGLang 0.5.16 accepts tensors for layers that do not exist and crashes at the next request; it loads
but never applies adapters for one side of the experts. An adapter of zeros, or the last version
sent again, leaves the policy unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from slime.engines.adapters import FUSED_SETS
from slime.engines.wire.abilities import Abilities
from slime.errors import UserError
from slime.models.adapters import peft_name, split_peft_name
from slime.models.parameters import Shape
from slime.weights.adapter_layout import SIDES, AdapterLayout, LargestValues, split_runs

#: A step of this size changes some of 30,000 bfloat16 numbers around 0.01.
_MIN_RATE = 1e-7
_OURS = "this is a fault of slime: please report it with the run's flags"


def check_engine(
    url: str, abilities: Abilities, layout: AdapterLayout, *, has_quantised_base: bool = False
) -> None:
    """Reject an engine that cannot serve the run's adapters.

    Args:
        has_quantised_base: the engine was started from files of quantised weights.
    Raises:
        UserError: names what it lacks, and the flag.
    """
    adapters = layout.adapters
    missing = set(layout.targets) - set(abilities.adapter_targets or layout.targets)
    if not abilities.adapters:
        raise UserError(
            f"engine {url} serves no adapters",
            why="it was started without them (--enable-lora), or has several replicas, into which "
            "SGLang loads none",
            fix="let the run start its engines, or start this one with --enable-lora "
            f"--max-lora-rank {layout.rank} --lora-target-modules {' '.join(layout.targets)} "
            "--max-loras-per-batch 3",
        )
    if abilities.quantises and not has_quantised_base:
        raise UserError(
            f"engine {url} quantises its base by itself",
            why="adapters would be served beside other weights than they are trained on, and "
            "nothing tells which",
            fix="start it without --quantization and --torchao-config; for a quantised base pass a "
            "directory of slime convert hf-to-fp8 or hf-to-int4 as --hf-checkpoint, here and there",
        )
    if 0 < abilities.adapter_rank < layout.rank:
        raise UserError(
            f"adapters of rank {layout.rank} are above what engine {url} has room for, "
            f"{abilities.adapter_rank}",
            why="an engine reserves memory for adapters of --max-lora-rank when it starts"
            + (
                ", and adapters of this model have a higher rank there, since gate and up of an "
                "expert share an A"
                if layout.rank != adapters.rank
                else ""
            ),
            fix=f"start it with --max-lora-rank {layout.rank}, or lower --lora-rank",
        )
    if missing:
        raise UserError(
            f"engine {url} has no room for adapters of {', '.join(sorted(missing))}",
            why=f"its --lora-target-modules are {', '.join(abilities.adapter_targets)}",
            fix=f"start it with --lora-target-modules {' '.join(layout.targets)}",
        )
    if 0 < abilities.adapters_at_once < 2:
        raise UserError(
            f"engine {url} computes with one adapter or the base at a time, and nothing else",
            why="its --max-loras-per-batch counts the base as one",
            fix="start it with --max-loras-per-batch 3: the base, and two versions of the policy",
        )
    shares = abilities.shares_outer_experts
    if layout.has_experts and shares is not None and shares != layout.shares_outer_experts:
        flag = "" if layout.shares_outer_experts else "no-"
        raise UserError(
            f"engine {url} holds experts' adapters in another form than --lora-experts "
            f"{adapters.experts}",
            why="whether experts share a side of their adapters decides the shape of its memory",
            fix=f"start it with --{flag}experts-shared-outer-loras",
        )
    if layout.lone_queries and not abilities.adapts_lone_queries:
        raise UserError(
            f"engine {url} ({abilities.engine}) cannot load an adapter of this model's q_proj",
            why="it fuses q_proj with k_proj and v_proj, which this latent attention does not have",
            fix="pass --lora-exclude-modules q_proj",
        )


def check_names(given: Mapping[str, Shape], expected: Mapping[str, Shape], what: str) -> None:
    """Reject additional or missing tensors and wrong shapes.

    Args:
        given: name → shape; of a run of experts [experts, out, in].
        expected: name → shape, without runs.
        what: "the trainer's adapter", for messages.
    Raises:
        UserError: names the first ones.
    """
    given = dict(split_runs(given))
    if stray := [name for name in given if name not in expected]:
        raise UserError(
            f"{what} has {len(stray)} tensors that belong to no layer with an adapter: "
            f"{', '.join(stray[:3])}",
            why="SGLang answers that such an adapter is loaded, and dies at the next request",
            fix=_OURS,
        )
    if missing := [name for name in expected if name not in given]:
        raise UserError(
            f"{what} is not complete: {len(missing)} of {len(expected)} tensors are missing, "
            f"{', '.join(missing[:3])}",
            why="engines would compute these layers without an adapter, and say nothing",
            fix=_OURS,
        )
    for name, shape in given.items():
        if tuple(shape) != tuple(expected[name]):
            raise UserError(
                f"{what} has {name} of shape {list(shape)}, rank and model make it "
                f"{list(expected[name])}",
                why="engines would stop at the next request",
                fix=_OURS,
            )


def check_sets(names: Collection[str], *, lone_queries: bool = False) -> None:
    """Reject half an adapter, a part of a set that engines fuse, and only one side of the experts.

    Args:
        names: of all tensors that will be sent.
        lone_queries: the model has a ``q_proj`` without ``k_proj`` and ``v_proj``.
    Raises:
        UserError: names the layer and what it lacks.
    """
    modules = {split[0] for name in names if (split := split_peft_name(name)) is not None}
    for path in sorted(modules):
        owner, _, leaf = path.rpartition(".")
        for side in SIDES:
            if peft_name(path, side) not in names:
                raise UserError(
                    f"the adapter of {path} has no lora_{side}",
                    why="half of an adapter changes nothing",
                    fix=_OURS,
                )
        for members in FUSED_SETS:
            lacking = [one for one in members if f"{owner}.{one}" not in modules]
            if leaf in members and lacking and not (leaf == "q_proj" and lone_queries):
                raise UserError(
                    f"{owner} has an adapter of {leaf} and none of {' and '.join(lacking)}",
                    why="engines fuse these layers: they fail to load a part of them, or compute "
                    "with other numbers in its place",
                    fix="send zeros for the layers that are not trained, as AdapterLayout does",
                )
        if not owner.endswith(".experts"):
            continue
        for one, other in (("gate_proj", "down_proj"), ("down_proj", "gate_proj")):
            if leaf == one and f"{owner}.{other}" not in modules:
                raise UserError(
                    f"{owner} has adapters of one side only: {other} is missing",
                    why="SGLang loads adapters of one side of its experts and never applies them",
                    fix="add the other side to --lora-target-modules, or leave both out",
                )


def has_visibly_learned(
    optimizer: str, learning_rates: Sequence[float], steps: Sequence[Mapping[str, float]]
) -> bool:
    """Tell whether optimizer steps must have changed an adapter in 16 bits.

    Adam moves a number by about the learning rate. Far below the spacing of 16-bit numbers, as at
    the end of a decay, no number may change; nor with SGD.

    Args:
        optimizer: value of --optimizer.
        learning_rates: of the first of the steps.
        steps: metrics of each.
    """
    is_visible = optimizer == "adam" and max(learning_rates, default=0.0) >= _MIN_RATE
    return is_visible and any(
        step["train/grad_norm"] > 0 and not step["train/skipped"] for step in steps
    )


def check_values(
    largest: LargestValues,
    fingerprints: Mapping[str, str],
    previous: Mapping[str, str],
    *,
    has_learned: bool,
) -> None:
    """Reject values that a policy cannot have after a training step.

    Args:
        largest: of the trained tensors.
        fingerprints, previous: of this and the last push, by name; {} if there was none.
        has_learned: `has_visibly_learned` since then.
    Raises:
        UserError: a number is not finite, an A or every B is zero, or all tensors equal the last
            version.
    """
    values = largest.values
    broken = largest.where(~(values < float("inf")))
    if broken:
        raise UserError(
            f"the adapter has numbers that are not finite: {', '.join(broken[:3])}",
            why="training has diverged; engines would answer with one token for ever",
            fix="load the last checkpoint before it; lower --lr or --clip-grad",
        )
    lost = largest.where(~largest.may_be_zero & (values == 0))
    if lost:
        raise UserError(
            f"the adapter has an A of zeros alone: {', '.join(lost[:3])}",
            why="A (B of the embedding) begins with random numbers, and with zeros it can never "
            "learn: the tensor was lost, or gathered from a rank that does not hold it",
            fix=_OURS,
        )
    if not has_learned:
        return
    if not values[largest.may_be_zero].any():
        raise UserError(
            "the adapter is zero: every B is, although the trainer has made steps",
            why="engines would go on with the base, which no step has changed",
            fix="look at train/grad_norm; if it is above zero, " + _OURS,
        )
    if previous and dict(fingerprints) == dict(previous):
        raise UserError(
            "the adapter is stale: every tensor is that of the last version, although the trainer "
            "has made steps",
            why="the optimizer's result did not reach the model's parameters, or old tensors were "
            "gathered",
            fix="look at --lr and the schedule; if they are above zero, " + _OURS,
        )
