"""Build a case from a run's flags and samples, and examine it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slime.config.config import Config
from slime.diagnosis.align import dumps
from slime.diagnosis.align.case import ALIKE, AskableEngine, Discrepancy
from slime.diagnosis.align.engines import EngineHere
from slime.diagnosis.align.evidence import Scored, size
from slime.diagnosis.align.examine import Result, examine
from slime.diagnosis.align.layers import compare
from slime.diagnosis.align.reference import Reference, Sampling, Watcher
from slime.diagnosis.align.trainer_here import TrainerHere
from slime.diagnosis.check import LeftOut
from slime.diagnosis.one_round import goes_round, how_it_failed, launch
from slime.embedded.kind import dtype_of
from slime.engines.kinds import engine_of
from slime.errors import UserError
from slime.models import read_hf_config
from slime.models.images import ImageReader
from slime.models.quantised import Quantisation
from slime.paths import fill
from slime.prompts.tokenizer import generation_config_of, load_tokenizer
from slime.trainer.megatron.model import parameter_dtype

#: Tokens that are examined by default; each takes about seventy forward passes.
_ON_GPU = 4096
_ON_CPU = 1024
#: Maximum tokens of the sample that is used to compare hidden states.
_TOKENS_OF_PARTS = 512
_NO_HIDDEN_STATES = (
    "SGLang gives no hidden states of single layers; the embedded engine, which computes the same "
    "model in this process, stands in for it"
)


class RoundFailed(Exception):
    """Raised with the last lines of the log if the fresh round ends with an error."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of an examination.

    Attributes:
        model: Hugging Face directory with the weights that scored the samples; None if unavailable.
        also: directory with other weights that the engine may have had.
        most_tokens: maximum number of tokens to examine; None: a number that takes minutes.
        is_fresh: the samples are from `fresh_round`, which has compared the weights after its push.
        always: measure the causes even if the sides are alike.
        with_parts: compare hidden states, too.
    """

    model: Path | None
    also: Path | None = None
    most_tokens: int | None = None
    is_fresh: bool = False
    always: bool = False
    with_parts: bool = True


def fresh_round(config: Config, folder: Path) -> list[Scored]:
    """Generate, train and push once with the run's own flags; return samples with log-probs.

    Raises:
        LeftOut: the run does not generate and train.
        RoundFailed: the round ended with an error.
    """
    if not goes_round(config):
        raise LeftOut("the run does not generate, train and push")
    patterns = {kind: str(folder / kind / "{rollout_id}.pt") for kind in ("rollout", "train")}
    more: dict[str, Any] = {
        "save_debug_rollout_data": patterns["rollout"],
        "save_debug_train_data": patterns["train"],
    }
    more["check_canary"] = False  # a failed canary would end the round
    if config.algorithm.use_rollout_logprobs:
        more["get_mismatch_metrics"] = True  # else the trainer computes no log-probs
    status, output = launch(config, folder, more)
    if status != 0:
        raise RoundFailed(how_it_failed(status, output, folder))
    return dumps.read([fill(pattern, 0) for pattern in patterns.values()])


def examined(
    config: Config, samples: Sequence[Scored], options: Options, engine: AskableEngine | None = None
) -> Result:
    """Examine samples of a run with these flags.

    Args:
        engine: the engine that generated them; None if it does not answer any more.
    """
    most = options.most_tokens or (_ON_GPU if torch.cuda.is_available() else _ON_CPU)
    chosen = dumps.most_telling(samples, most)
    case = case_of(config, chosen, options, engine)
    result = examine(case, always=options.always)
    if len(chosen) < len(samples):
        result.notes.append(
            f"{len(chosen)} of {len(samples)} samples were looked at, those that differ most"
        )
    if case.reference is not None and result.sides_differ:
        _ask_transformers(case, result)
    if case.reference is None or not options.with_parts:
        result.without_parts = (
            "not asked for" if case.reference is not None else case.without_reference
        )
        return result
    try:
        _compare_parts(config, case, result)
    except torch.OutOfMemoryError:
        result.without_parts = "trainer, engine and reference do not fit on this GPU together"
    return result


def case_of(
    config: Config, samples: list[Scored], options: Options, engine: AskableEngine | None
) -> Discrepancy:
    rollout = config.rollout
    sampling = Sampling(
        rollout.rollout_temperature,
        rollout.rollout_top_p,
        rollout.rollout_top_k,
        rollout.rollout_min_p,
    )
    stored = _stored(config)
    images = _images(config, samples, options.model)
    case = Discrepancy(
        samples, sampling, engine=engine, facts=_facts(config, options.model), stored=stored
    )
    if stored is not None:
        case.facts["quantization"] = str(stored)
    case.facts["weights_compared"] = options.is_fresh
    if options.also is not None:
        case.facts["other_weights"] = {str(options.also): options.also}
    if options.model is None:
        case.without_reference = (
            "no model is at hand: --model DIR or --hf-checkpoint DIR with the weights of this "
            "rollout"
        )
        return case
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain = Sampling(rollout.rollout_temperature)
    try:
        replays = config.train.use_rollout_routing_replay
        case.reference = Reference(
            options.model, parameter_dtype(config), plain, device, replays=replays, images=images
        )
    except torch.OutOfMemoryError:
        case.without_reference = f"{options.model} in float32 does not fit on this GPU"
        return case
    except UserError as error:
        # the embedded engine lacks this model; measure the causes that need no reference
        case.without_reference = str(error)
        return case
    try:
        case.tokenizer = load_tokenizer(
            str(options.model), trust_remote_code=config.checkpoint.trust_remote_code
        )
    except UserError:
        case.tokenizer = None
    if engine is None and engine_of(config).computed_here:
        case.engine = _engine_here(config, options.model, samples, images)
    return case


def _stored(config: Config) -> Quantisation | None:
    """Read from --hf-checkpoint how engines store weights; None if its config.json is missing."""
    given = config.checkpoint.hf_checkpoint
    path = Path(given) / "config.json" if given else None
    return Quantisation.read(read_hf_config(path)) if path is not None and path.is_file() else None


def _images(config: Config, samples: Sequence[Scored], model: Path | None) -> ImageReader | None:
    """Create the reader that prepares images; None for a run that reads only text.

    Raises:
        UserError: the file of an image does not exist any more.
    """
    directory = config.checkpoint.hf_checkpoint or model
    if not config.images.multimodal_keys or directory is None:
        return None
    paths = [Path(one.reference) for sample in samples for one in sample.media]
    gone = [path for path in paths if not path.is_file()]
    if gone:
        raise UserError(
            f"{gone[0]} is gone, an image of a sample",
            why="dumps refer to images and do not hold them",
            fix="put it back, or call slime align with the run's flags for a fresh round",
        )
    return ImageReader(directory, config.images.image_max_pixels)


def _engine_here(
    config: Config, model: Path, samples: Sequence[Scored], images: ImageReader | None
) -> EngineHere:
    longest = max(int(sample.tokens.numel()) for sample in samples) + 1
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = dtype_of(config)
    fixed = config.rollout.deterministic
    return EngineHere(
        model,
        dtype,
        longest=longest,
        device=device,
        deterministic=fixed,
        stands_in=True,
        images=images,
    )


def _facts(config: Config, model: Path | None) -> dict[str, Any]:
    kind = engine_of(config)
    named = config.values().get("sglang_dtype")
    reads = kind.reads_generation_config
    facts: dict[str, Any] = {
        "apply_chat_template": config.data.apply_chat_template,
        "generation_config": generation_config_of(str(model))
        if reads and model is not None
        else {},
        "quantization": config.values().get("sglang_quantization"),
    }
    engine = kind.weights_dtype(config) if kind.computed_here else named
    facts["dtypes"] = (
        f"the trainer computes in {str(parameter_dtype(config)).removeprefix('torch.')}"
        + (f", the engine in {engine}" if engine else "")
    )
    return facts


@torch.inference_mode()
def _by_transformers(case: Discrepancy) -> float:
    """Return the mean absolute difference between reference and transformers over the response of
    one sample, in nats per token. Reference and embedded engine share code, so a mistake in it
    would look like a mistake of the trainer.

    Raises:
        OSError, ValueError, KeyError, ImportError: transformers cannot read the model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    model = case.model()
    number = _shown(case)
    sample = case.samples[number]
    device = model.store.device
    kind = AutoModelForCausalLM if model.images is None else AutoModelForImageTextToText
    theirs = kind.from_pretrained(
        model.directory, dtype=torch.float32, local_files_only=True, trust_remote_code=False
    )
    theirs = theirs.eval().to(device)
    for parameter in theirs.parameters():
        parameter.copy_(parameter.to(model.dtype))
    inputs = {"input_ids": sample.tokens[None, :-1], **_pictures(sample, model.images)}
    logits = theirs(**{name: value.to(device) for name, value in inputs.items()}).logits
    rows = logits[0, sample.prompt_length - 1 :].float()
    log_probs = torch.log_softmax(rows / model.setting.sampling.temperature, dim=-1)
    targets = sample.tokens[sample.prompt_length :, None].to(device)
    return size(log_probs.gather(1, targets)[:, 0].double().cpu() - case.base[number])


def _shown(case: Discrepancy) -> int:
    """Choose the sample for comparing parts and transformers: one with images, if any."""
    return next((i for i, sample in enumerate(case.samples) if sample.media), 0)


def _pictures(sample: Scored, reader: ImageReader | None) -> dict[str, Tensor]:
    """Return the arguments that transformers takes for the images of a sample."""
    if reader is None or not sample.media:
        return {}
    images = [reader.read(Path(one.reference).read_bytes()) for one in sample.media]
    kinds = torch.zeros(1, len(sample.tokens) - 1, dtype=torch.int)
    for one in sample.media:
        kinds[0, one.span.start : one.span.end] = 1
    pixels = torch.cat([image.pixels for image in images])
    if not hasattr(reader.processor, "merge_size"):  # Gemma 3
        return {"pixel_values": pixels, "token_type_ids": kinds}
    return {
        "pixel_values": pixels,
        "image_grid_thw": torch.tensor([image.grid for image in images]),
        "mm_token_type_ids": kinds,
    }


def _ask_transformers(case: Discrepancy, result: Result) -> None:
    """Add a note on whether transformers agrees with the reference."""
    try:
        apart = _by_transformers(case)
    except (OSError, ValueError, KeyError, ImportError, torch.OutOfMemoryError) as error:
        result.notes.append(
            f"transformers was not asked about the reference: {type(error).__name__}: {error}"
        )
        return
    note = f"transformers and the reference differ by {apart:.2g}"
    if apart > ALIKE:
        note += (
            ": the reference is wrong about this model, and so may be the embedded engine, whose "
            "code it shares"
        )
    result.notes.append(note)


def _compare_parts(config: Config, case: Discrepancy, result: Result) -> None:
    """Compare the hidden states of the trainer's model, the embedded engine and the reference for
    one sample."""
    model = case.model()
    sample = dumps.cut(case.samples[_shown(case)], _TOKENS_OF_PARTS)
    with ExitStack() as stack:
        try:
            here = TrainerHere(config, str(model.directory), model.images)
            trainer = stack.enter_context(here)
        except UserError as error:
            result.without_parts = f"the trainer's model cannot be built in this process: {error}"
            return
        if isinstance(case.engine, EngineHere):
            engine = case.engine
        else:
            engine = _engine_here(config, model.directory, [sample], model.images)
        shown = {}
        for name, setting in {"exact": model.setting, "rounded": model.as_the_run()}.items():
            watcher = Watcher(keeps=True)
            model.hidden(
                sample.tokens, sample.prompt_length, setting, watcher=watcher, media=sample.media
            )
            shown[name] = watcher.seen
        sides = [trainer.parts(sample), engine.parts(sample), shown["exact"]]
        if model.as_the_run().rounded:
            sides.append(shown["rounded"])
        result.parts = compare(*(_images_apart(side, sample) for side in sides))
        if not engine_of(config).computed_here:
            result.notes.append(_NO_HIDDEN_STATES)
        if case.is_recorded:
            again = trainer.log_probs([sample], case.sampling.temperature)[0]
            assert sample.trainer is not None
            apart = size((again - sample.trainer)[sample.counted])
            if apart > case.tolerance:
                result.notes.append(
                    "the trainer in this process, on one rank, says other log-probs than it did in "
                    f"the run, by {apart:.3g}: {model.directory} does not hold the weights of this "
                    "rollout, or its layout counts"
                )


def _images_apart(parts: dict[str, Tensor], sample: Scored) -> dict[str, Tensor]:
    """Split image features from the token embeddings around them."""
    if not sample.media:
        return parts
    embedded = parts["embedding"]
    is_image = torch.zeros(len(embedded), dtype=torch.bool)
    for one in sample.media:
        is_image[one.span.start : one.span.end] = True
    images = {"images": embedded[is_image], "embedding": embedded[~is_image]}
    return {**images, **{name: value for name, value in parts.items() if name != "embedding"}}
