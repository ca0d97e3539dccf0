"""What a launch would trip over with a model of quantised weights; imports torch for such models alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from slime.config.config import Config
from slime.engines.sglang.quantised_routes import quantised_route
from slime.engines.sglang.versions import installed_version
from slime.log import get_logger
from slime.models.quantised import Quantisation

logger = get_logger(__name__)


def check_quantised(config: Config) -> None:
    """Of a model whose weights engines hold quantised: pushes can bring them to the run's engines, and the rules fit
    its modules. Needs its config.json only.

    Raises:
        UserError: pushes cannot, as far as flags say; or a rule tears the model apart.
    """
    from slime.models import family_of, ignore_list, read_hf_config

    flags = config.checkpoint
    assert flags.hf_checkpoint is not None
    hf_config = read_hf_config(flags.hf_checkpoint)
    quantisation = Quantisation.read(hf_config)
    if quantisation is None:
        return
    if config.engine.rollout_engine == "sglang" and not config.debug.debug_rollout_only:  # which pushes nothing
        _check_route(config, hf_config)
    family = family_of(flags.hf_checkpoint, flags.model_name)
    for rule in ignore_list.check(family, family.describe(flags.hf_checkpoint), quantisation).idle:
        logger.warning("the rule %r of quantization_config in %s names nothing", rule, flags.hf_checkpoint)


def _check_route(config: Config, hf_config: Mapping[str, Any]) -> None:
    """Engines are asked again when they are there: server groups have arguments of their own."""
    from slime.weights.route import choose_route

    version = installed_version()
    if version is None:  # another check says so; external engines say theirs
        return
    engine = {**config.engine.sglang, "version": version, "tp_size": config.cluster.rollout_num_gpus_per_engine}
    quantised_route(hf_config, engine, choose_route(config, embedded=False, local=True))
