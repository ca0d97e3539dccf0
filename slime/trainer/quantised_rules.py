"""What a run with quantised engines asks for and cannot have. Needs the model's config.json only."""

from __future__ import annotations

from slime.config.config import Config
from slime.errors import UserError
from slime.log import get_logger
from slime.models import family_of, ignore_list
from slime.models.ignore_list import Findings
from slime.models.quantised import Quantisation
from slime.models.spec import read_hf_config

logger = get_logger(__name__)


def check_quantised(config: Config) -> None:
    """The ignore list of a model whose weights engines hold quantised fits its modules, and the flags that are about
    quantised weights do something.

    Raises:
        UserError: names the modules, or the flag.
    """
    flags = config.checkpoint
    assert flags.hf_checkpoint is not None
    quantisation = Quantisation.read(read_hf_config(flags.hf_checkpoint))
    if quantisation is None:
        _refuse_without_format(config)
        return
    family = family_of(flags.hf_checkpoint, flags.model_name)
    found = ignore_list.check(family, family.describe(flags.hf_checkpoint), quantisation)
    for rule in found.idle:
        logger.warning("the rule %r of quantization_config in %s names nothing", rule, flags.hf_checkpoint)
    check_fake_quantisation(config, quantisation, found)


def check_fake_quantisation(config: Config, quantisation: Quantisation, found: Findings) -> None:
    """
    Raises:
        UserError: nothing of the model would be quantised, or Transformer Engine would round it a second time.
    """
    chosen, path = config.quantised.fake_quantisation, config.checkpoint.hf_checkpoint
    if chosen is None:
        return
    experts = [matrix for matrix in found.quantised if matrix.kernel.endswith(".experts")]
    if not (experts if chosen == "experts" else found.quantised):
        whole = "no routed experts that are quantised" if chosen == "experts" else "no quantised layers"
        raise UserError(
            f"--fake-quantisation {chosen} has no effect",
            why=f"{path} has {whole}",
            fix="--fake-quantisation linears" if found.quantised else "correct the ignore list, or leave the flag out",
        )
    for flag in ("fp8", "fp4"):
        if config.megatron.transformer.get(flag):
            raise UserError(
                f"--fake-quantisation {chosen} and --{flag}-format exclude each other",
                why=f"Transformer Engine would round the weights to {flag.upper()} once more, and engines do not",
                fix="choose one",
            )
    if config.quantised.measure_quantisation and (chosen == "linears" or len(experts) == len(found.quantised)):
        raise UserError(
            f"--measure-quantisation has no effect with --fake-quantisation {chosen}",
            why="training computes with the engines' weights already, so that train/train_rollout_logprob_abs_diff is"
            " what is left without the format",
            fix="leave --measure-quantisation out",
        )
    logger.info("training computes with weights as %s would have them", quantisation)


def _refuse_without_format(config: Config) -> None:
    flags = config.quantised
    asked = {
        f"--fake-quantisation {flags.fake_quantisation}": flags.fake_quantisation,
        "--measure-quantisation": flags.measure_quantisation,
    }
    for option, is_asked in asked.items():
        if is_asked:
            raise UserError(
                f"{option} has no effect",
                why=f"{config.checkpoint.hf_checkpoint} has no quantization_config: engines hold plain weights, and no"
                " format says what to round to",
                fix="slime convert hf-to-int4 or hf-to-fp8 makes a directory for --hf-checkpoint, with the plain one as"
                " --ref-load; or leave the flag out",
            )
