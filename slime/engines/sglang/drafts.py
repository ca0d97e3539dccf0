"""Speculative decoding in SGLang's engines: a small draft model proposes tokens, which the policy
verifies.

Verification keeps the policy's distribution whatever the draft proposes (Leviathan et al. 2022,
https://arxiv.org/abs/2211.17192), so tokens and log-probs are the policy's. Pushes update the
policy alone (`slime.engines.api.ONLY_THE_POLICY`): the draft keeps its initial weights, so
it may match the policy less and less.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slime.engines.wire.abilities import ACCEPT_THRESHOLDS
from slime.errors import UserError
from slime.models.draft_model import DraftModel
from slime.placement import PlacementPlan, requests_in_flight

if TYPE_CHECKING:
    from slime.config.config import Config

#: Algorithms that draft with the checkpoint's own prediction layers, unless a path is given.
_FROM_CHECKPOINT = ("EAGLE", "NEXTN")
#: Algorithms whose draft has weights.
_WITH_WEIGHTS = (*_FROM_CHECKPOINT, "EAGLE3", "STANDALONE")
#: Algorithms that draft from the tokens so far.
_WITHOUT_WEIGHTS = ("NGRAM",)
#: Makes SGLang invent accepted tokens, for benchmarks.
_SIMULATION = "SGLANG_SIMULATE_ACC_LEN"


def algorithm_of(options: Mapping[str, Any]) -> str:
    """Return the speculative algorithm in capitals; "" without one."""
    return str(options.get("speculative_algorithm") or "").upper()


def draft_model(config: Config) -> DraftModel | None:
    """Return where the weights of the policy's draft are; None without such a draft."""
    options = config.engine.sglang
    algorithm = algorithm_of(options)
    if algorithm not in _WITH_WEIGHTS:
        return None
    policy = str(config.checkpoint.hf_checkpoint)
    path = str(options.get("speculative_draft_model_path") or policy)
    return DraftModel(Path(path), algorithm in _FROM_CHECKPOINT and path == policy)


def check_drafts(config: Config, options: Mapping[str, Any], named: Callable[[str], str]) -> None:
    """Refuse drafts with which tokens or log-probs would not be the policy's, or that SGLang
    cannot combine with the run.

    Args:
        options: SGLang's options by name.
        named: names an option and its value at the beginning of a sentence.
    Raises:
        UserError: names the option or variable.
    """
    algorithm = algorithm_of(options)
    if not algorithm:
        return
    this = named("speculative_algorithm")
    if algorithm not in (*_WITH_WEIGHTS, *_WITHOUT_WEIGHTS):
        raise UserError(
            f"{this} was not tried in a training run",
            why="pushes must leave its draft as it is, and a sleep must give it back",
            fix=f"pass one of {', '.join((*_WITH_WEIGHTS, *_WITHOUT_WEIGHTS))}",
        )
    if algorithm in ("EAGLE3", "STANDALONE") and not options.get("speculative_draft_model_path"):
        raise UserError(
            f"{this} needs a draft model",
            fix="name its directory with --sglang-speculative-draft-model-path",
        )
    for threshold in ACCEPT_THRESHOLDS:
        if float(options.get(threshold) or 1.0) < 1.0:
            raise UserError(
                f"{named(threshold)} changes the distribution of responses",
                why="drafts are accepted that the policy would not have sampled, so log-probs "
                "belong to another distribution than the tokens",
                fix="leave it out",
            )
    if os.environ.get(_SIMULATION, "") not in ("", "0", "-1"):
        raise UserError(
            f"{_SIMULATION}={os.environ[_SIMULATION]} invents tokens",
            why="SGLang then accepts drafts without verifying them",
            fix="unset it",
        )
    if config.sync.update_weight_transport == "disk":
        raise UserError(
            f"{this} does not go with --update-weight-transport disk",
            why="SGLang loads the policy's files into the draft as well",
            fix="leave one of the two out; pushes by handles (--colocate) and broadcasts work",
        )
    if config.rollout.deterministic:
        raise UserError(
            f"{this} does not go with --deterministic-rollout",
            why="SGLang verifies drafts with random numbers that do not depend on a request's seed",
            fix="leave one of the two out",
        )
    if config.algorithm.use_sampling_mask:
        raise UserError(
            f"{this} does not go with --use-sampling-mask",
            why="--rollout-top-k, --rollout-top-p and --rollout-min-p need it, and SGLang does not "
            "report which tokens could be sampled when it verifies drafts",
            fix="leave these flags out, or the drafts; with --no-use-sampling-mask log-probs are "
            "over the whole vocabulary",
        )
    if config.lora.lora_rank and algorithm in _WITH_WEIGHTS:
        raise UserError(
            f"{this} does not go with --lora-rank",
            why="SGLang serves adapters only with drafts that have no weights",
            fix="pass NGRAM, or leave one of the two out",
        )


def draft_options(config: Config, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return defaults of options for engines that draft.

    Args:
        given: the user's options.
    """
    algorithm = algorithm_of(given)
    if not algorithm:
        return {}
    # SGLang's own default is 48 requests, and the others would wait
    engines = max(1, PlacementPlan.of(config).num_engines)
    defaults: dict[str, Any] = {
        "max_running_requests": max(1, -(-requests_in_flight(config) // engines))
    }
    if algorithm in _FROM_CHECKPOINT:
        defaults["speculative_draft_model_path"] = config.checkpoint.hf_checkpoint
    if algorithm in _WITH_WEIGHTS and config.cluster.offload_rollout_weights:
        defaults["enable_draft_weights_cpu_backup"] = True  # no push brings them back after a sleep
    return defaults
