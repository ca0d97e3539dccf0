"""The canary: a few fixed tokens that trainer and engines score with the same weights, after every
push and wake.

Fingerprints prove that weights arrived, not that an engine computes correctly: a released rotary
table or scale may be lost, rope or norm may differ, the cache may hold keys and values of old
weights, a kernel may be wrong. All of this changes the log-probs of a prompt, which cost each side
one forward pass of 32 tokens.

    trainer   backend.canary_log_probs(tokens)       before the push, while its weights are there
    engines   POST /generate, logprob_start_len 0    after it, to each engine, before any rollout

An engine that returns log-probs from position 0 does not use its prefix cache.

Tokens: 16 from the whole vocabulary, so every shard of an embedding has some, and the same 16
again. A trained model predicts the second half well if attention and positions are right; for a
random model each token has other context there.

Tolerance: in float32 the largest difference must be below 1e-3, a hundred times the measured one.
In 16 bits, both rounding and faults grow with the logits: the mean difference must be below 10 % of
the standard deviation of the trainer's own log-probs. In bf16, correct engines differed by 0.5 to 3
%, engines without rotary embedding by 20 % or more, for toys and trained models, dense and with
experts. The mean is used because rounding may route a token to another expert: one such token
differed by 15 % and moved the mean by 0.5 %.

If adapters are trained, engines score with and without the adapter. Without it they must agree with
the trainer's base and with their own scores at launch: nothing may change the base. With it they
must agree with the trainer; and if the adapter changes the trainer's log-probs, it must change the
engine's, else it was loaded but not applied.

A model with images also scores some tokens after two pictures (`slime.engines.image_canary`); these
log-probs follow those of the other tokens.

If engines hold quantised weights, the trainer scores with the dequantised weights. Both sides then
include the effect of the format (in toys 5 to 47 % of the deviation), and the tolerance is the
same. But most FP8 kernels also round activations: the first check measures this effect, up to one
deviation, and later checks allow twice as much. For engines that quantise by themselves, or have a
coarser cache, differences are only measured.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime import deadlines
from slime.config.config import Config
from slime.engines.adapters import ADAPTER_FIELD
from slime.engines.api import EngineError
from slime.engines.fleet import EngineFleet
from slime.engines.image_canary import ImageCanary, scoring_request
from slime.engines.wire.abilities import Abilities
from slime.errors import UserError
from slime.log import get_logger
from slime.models import family_of
from slime.models.quantised import Fp8, Quantisation
from slime.models.spec import read_hf_config
from slime.prompts.images import images_of
from slime.user_code.loading import named_functions

logger = get_logger(__name__)

#: Flags for functions that may change the trainer's computation.
_CHANGE_THE_MODEL = (
    "custom_model_provider_path",
    "custom_megatron_init_path",
    "custom_megatron_before_log_prob_hook_path",
    "custom_megatron_before_train_step_hook_path",
    "custom_loss_function_path",
)
_NUM_TOKENS = 32
_MAX_CUTS = 64  # of answers to one question, by rollouts that end
_NUM_DISTINCT = 16
_LARGEST_IN_FLOAT32 = 1e-3
_MEAN_IN_16_BITS = 0.1  # of the standard deviation
_FIRST_ROUNDED = 1.0  # of the standard deviation
_TIMES_ROUNDED = 2.0
_MIN_IN_16_BITS = 0.01  # nats; for models with nearly uniform predictions
_MIN_EFFECT_IN_FLOAT32 = 1e-5  # nats; smaller effects of an adapter are not judged
_SHARE_OF_EFFECT = 0.1  # least effect of an adapter in an engine, as a share of that in the trainer


class Canary:
    """The canary's tokens, the trainer's log-probs of them, and the comparison with the engines'.

    Attributes:
        tokens: input ids.
        expected: the trainer's log-probs of ``tokens[1:]`` with the weights of the last push, as
            engines compute with them; set at each push.
        expected_of_base: the same without adapters, if adapters are trained.
        adapter: name of the adapter of the last push; "" where whole weights are pushed.
        fleet: the engines to query; may be replaced.
        pushed: `slime.weights.receipt.Receipt.metrics` of the push just before, whose findings
            exclude causes; None after other events.
    """

    def __init__(self, config: Config, fleet: EngineFleet) -> None:
        hf_config = read_hf_config(config.checkpoint.model_dir)
        family = family_of(hf_config, config.checkpoint.model_name)
        spec = family.model_spec(hf_config)
        self._fuses = bool(family.fused)
        context = config.rollout.rollout_max_context_len or math.inf
        self.tokens = canary_tokens(spec.vocab_size, int(min(_NUM_TOKENS, context - 1)))
        self.tokens = without_images(self.tokens, config)
        self._images = ImageCanary.of(config, self.tokens)
        self.expected: Sequence[float] = ()
        self.expected_of_base: Sequence[float] = ()
        self.adapter = ""
        self._base_at_launch: dict[str, list[float]] = {}  # by engine
        self.fleet = fleet
        self.pushed: Mapping[str, float] | None = None
        self._releases = config.cluster.offload_rollout
        infos = fleet.get("/server_info", deadlines.CANARY_SCORE)
        quantisation = Quantisation.read(hf_config)
        self._quantised = quantisation is not None
        is_fp8 = quantisation is not None and isinstance(quantisation.scheme, Fp8)
        abilities = [Abilities.read(info) for info in infos]
        self._rounds_activations = is_fp8 and any(one.rounds_activations for one in abilities)
        self._rounding_error: float | None = None  # mean difference in nats
        whole = not self._rounds_activations and all(
            info.get("dtype") in ("float32", "float") for info in infos
        )
        self._in_float32 = config.megatron.fp32 and whole
        coarse = any(
            one.quantises or one.coarse_cache for one in abilities
        ) or config.megatron.transformer.get("fp8")
        self._judges = not coarse
        changing = named_functions(vars(config.flat()), _CHANGE_THE_MODEL)
        self._functions = (
            f"functions of yours change the model: {', '.join(changing)}; " if changing else ""
        )
        if coarse:
            logger.info(
                "quantised: the engines' differences from the trainer's log-probs are logged, not "
                "judged"
            )

    def check(self, event: str) -> dict[str, float]:
        """Compare every engine's log-probs with the trainer's.

        Args:
            event: what just happened, for messages: "a weight push", …
        Returns:
            ``train/canary_logprob_abs_diff``, a mean over tokens, and ``…_max``, for the engine
            that differs most. With adapters also ``train/canary_adapter_abs_diff``, their effect,
            for the engine where it is smallest.
        Raises:
            UserError: an engine differs too much or does not answer, or the trainer's log-probs are
                not finite.
        """
        if not all(map(math.isfinite, [*self.expected, *self.expected_of_base])):
            raise UserError(
                "the trainer's own log-probs of the canary are not finite",
                why=f"{self._functions}its weights contain NaN or infinity, and the engines have "
                "them by now",
                fix="load the last checkpoint before it; lower --lr or --clip-grad",
            )
        of_adapters: dict[str, float] = {}
        if self.adapter:
            of_base = self._ask(event, "")
            self._compare(event, self.expected_of_base, of_base, " without an adapter")
            self._check_base(event, of_base)
        said = self._ask(event, self.adapter)
        if self.adapter:
            of_adapters = self._check_effect(event, said, of_base)
        found = self._compare(event, self.expected, said, "")
        of_images: dict[str, float] = {}
        if self._images is not None:
            start = len(self.tokens) - 1
            engines = {url: own[start:] for url, own in zip(self.fleet.urls, said, strict=True)}
            effect = self._images.check_effect(event, self.expected[start:], engines)
            of_images = {"train/canary_image_abs_diff": effect}
        if self._rounds_activations and self._rounding_error is None:
            self._rounding_error = max(difference.mean for difference in found)
            logger.info(
                "the engines' FP8 kernels move the canary's log-probs by %.3f", self._rounding_error
            )
        return {
            "train/canary_logprob_abs_diff": max(difference.mean for difference in found),
            "train/canary_logprob_abs_diff_max": max(difference.largest for difference in found),
            **of_adapters,
            **of_images,
        }

    def _compare(
        self, event: str, expected: Sequence[float], said: Sequence[Sequence[float]], how: str
    ) -> list[Difference]:
        """Return each engine's difference from the trainer.

        Args:
            how: how the engines were queried, for the message.
        Raises:
            UserError: an engine differs too much.
        """
        found = [Difference.of(expected, log_probs) for log_probs in said]
        wrong = [number for number, difference in enumerate(found) if not self._allows(difference)]
        if wrong and self._judges:
            worst = max(wrong, key=lambda number: found[number].mean)
            at = found[worst].at
            numbers = f"trainer {expected[at]:.4f}, engine {said[worst][at]:.4f}"
            raise self._error(event + how, worst, found[worst], numbers, len(wrong))
        return found

    def _check_base(self, event: str, said: Sequence[list[float]]) -> None:
        """Compare the engines' log-probs without an adapter with their first ones."""
        for url, now in zip(self.fleet.urls, said, strict=True):
            at_first = self._base_at_launch.setdefault(url, now)
            moved = Difference.of(at_first, now)
            if self._judges and not self._allows(moved):
                raise UserError(
                    f"after {event}, engine {url} without an adapter gives other log-probs than at "
                    f"the launch: they differ by {moved.mean:.2g} on average",
                    why="only adapters are pushed, and the engines' base should not change: "
                    "something overwrote it, or it was lost when memory was released",
                    fix="--no-offload-rollout tells whether a release loses something; leave out "
                    "whatever else updates this engine's weights",
                )

    def _check_effect(
        self, event: str, said: Sequence[Sequence[float]], of_base: Sequence[Sequence[float]]
    ) -> dict[str, float]:
        """Return the effect of the adapter in the engine where it is smallest.

        Raises:
            UserError: it changes the trainer's log-probs but not this engine's.
        """
        due = Difference.of(self.expected_of_base, self.expected).mean
        effects = [Difference.of(*pair).mean for pair in zip(of_base, said, strict=True)]
        least = min(effects)
        floor = _MIN_EFFECT_IN_FLOAT32 if self._in_float32 else _MIN_IN_16_BITS
        if self._judges and due > floor and least < _SHARE_OF_EFFECT * due:
            raise UserError(
                f"after {event}, adapter {self.adapter} changes nothing in engine "
                f"{self.fleet.urls[effects.index(least)]}: the canary's log-probs with and without "
                f"it differ by {least:.2g} on average, in the trainer by {due:.2g}",
                why="the engine loaded it but does not apply it, or only in some of the "
                "layers: SGLang does so with experts under some backends",
                fix="1. --sglang-lora-backend triton, and for experts --sglang-moe-runner-backend "
                "triton  2. leave layers out with --lora-exclude-modules, to find the one  "
                "3. --no-check-canary goes on regardless",
            )
        return {"train/canary_adapter_abs_diff": least}

    def _ask(self, event: str, adapter: str) -> list[list[float]]:
        named = {ADAPTER_FIELD: adapter} if adapter else {}
        try:
            answers = self._complete_answers(scoring_request(self.tokens) | named)
            found = [
                _log_probs(*pair, self.tokens)
                for pair in zip(self.fleet.urls, answers, strict=True)
            ]
            images = self._images
            if images is None:
                return found
            for body in map(images.body, images.pictures):
                answers = self._complete_answers(body | named)
                for own, url, answer in zip(found, self.fleet.urls, answers, strict=True):
                    own += _log_probs_behind(url, answer, images)
            return found
        except EngineError as error:
            raise UserError(
                f"an engine did not score the canary after {event}: {error}",
                why="before the first rollout request the engines' log-probs are compared with "
                "the trainer's",
                fix="read the engine's log; --no-check-canary skips the comparison",
            ) from error

    def _complete_answers(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Ask every engine; ask again where the answer was cut short. A rollout that ends beside a
        push in flight aborts all requests of its engines, these too."""
        answers = self.fleet.post("/generate", body, deadlines.CANARY_SCORE)
        for cuts in range(1, _MAX_CUTS):
            if not any(map(_is_cut, answers)):
                break
            time.sleep(min(cuts, 10) * 0.05)
            answers = self.fleet.post("/generate", body, deadlines.CANARY_SCORE)
        return answers

    def _allows(self, difference: Difference) -> bool:
        measured = difference.largest if self._in_float32 else difference.mean
        return measured <= self._tolerance

    @property
    def _tolerance(self) -> float:
        if self._in_float32:
            return _LARGEST_IN_FLOAT32
        spread = statistics.pstdev(self.expected)
        rounding = max(_MIN_IN_16_BITS, _MEAN_IN_16_BITS * spread)
        if not self._rounds_activations:
            return rounding
        if self._rounding_error is None:
            return max(_MIN_IN_16_BITS, _FIRST_ROUNDED * spread)
        return max(rounding, _TIMES_ROUNDED * self._rounding_error)

    def _error(
        self, event: str, engine: int, difference: Difference, numbers: str, num_wrong: int
    ) -> UserError:
        at_first = difference.first > self._tolerance
        kind = "largest" if self._in_float32 else "mean"
        where = (
            "the tokens are those around a picture: the tower, the projector, positions of rows "
            "and columns, or images that are prepared in another way"
            if difference.at >= len(self.tokens) - 1
            else "the first token differs already, which sees no other: an embedding, norm, scale, "
            "projection or expert"
            if at_first
            else "the first token, which sees no other, agrees: attention, positions (rope) or "
            "cache"
        )
        causes = list(self._causes(at_first))
        fixes = ["slime align with the run's flags ranks the causes", *(fix for _, fix in causes)]
        fixes += ["--no-check-canary goes on regardless"]
        return UserError(
            f"after {event}, engine {self.fleet.urls[engine]} gives other log-probs than the "
            f"trainer with the same weights: they differ by {difference.mean:.2g} on average, most "
            f"at position {difference.at + 1} of the canary, by {difference.largest:.2g} "
            f"({numbers}); allowed is a {kind} of {self._tolerance:.2g}. {num_wrong} of "
            f"{len(self.fleet.urls)} engines differ",
            why=f"{self._functions}{where}. Possible causes, likeliest first: "
            + "; ".join(cause for cause, _ in causes),
            fix="  ".join(f"{number}. {fix}" for number, fix in enumerate(fixes, start=1)),
        )

    def _causes(self, at_first: bool) -> Iterator[tuple[str, str]]:
        """Yield (cause, fix) for causes that are not excluded; the likeliest first."""
        pushed = self.pushed
        if pushed is not None:
            sent = int(pushed.get("perf/update_weights/sent_tensors", 0))
            loaded = int(pushed.get("perf/update_weights/loaded_tensors", 0))
            compared = int(pushed.get("perf/update_weights/checked_tensors", 0))
            if loaded < sent or not sent:
                seen = "nothing was counted"
                if sent:
                    seen = f"{loaded} of {sent} tensors are known to be loaded"
                what = "a tensor, or half of a pair that it fuses," if self._fuses else "a tensor"
                yield (
                    f"the engine dropped {what} ({seen})",
                    "the trainer's log names the tensors that are not compared after pushes",
                )
            if compared < sent or not sent:
                yield (
                    f"weights that arrived changed ({compared} of {sent} fingerprints compared)",
                    "--check-weight-update-equal compares all weights",
                )
        if self._releases:
            yield (
                "buffers (rotary tables, scales) lost when the engine released memory",
                "--no-offload-rollout tells whether a release loses something",
            )
        if at_first:
            yield (
                "a config.json other than the trainer's (norm, activation, router)",
                "compare the settings of --hf-checkpoint with the engine's log",
            )
        else:
            yield (
                "a config.json or rope other than the trainer's",
                "compare rope and norm settings of --hf-checkpoint with the engine's log",
            )
            yield (
                "the attention backend",
                "another --sglang-attention-backend or --attention-backend",
            )
        if self._quantised or self._rounds_activations:
            yield "quantisation", "the same run with a --hf-checkpoint of plain weights"


@dataclass(frozen=True)
class Difference:
    """The differences between two lists of log-probs, in nats; infinite for NaN.

    Attributes:
        at: index of the largest.
        first: the difference at the first position, whose token attends only to itself.
    """

    mean: float
    largest: float
    at: int
    first: float

    @staticmethod
    def of(expected: Sequence[float], said: Sequence[float]) -> Difference:
        """Compare two lists of log-probs.

        Example:
            >>> Difference.of([-1.0, -2.0], [-1.0, -2.5])
            Difference(mean=0.25, largest=0.5, at=1, first=0.0)
        """
        each = [abs(a - b) for a, b in zip(expected, said, strict=True)]
        each = [math.inf if math.isnan(value) else value for value in each]
        at = max(range(len(each)), key=each.__getitem__)
        return Difference(statistics.fmean(each), each[at], at, each[0])


def canary_tokens(vocab_size: int, length: int = _NUM_TOKENS) -> list[int]:
    """Return token ids for the canary: evenly spread, shuffled, and away from the ends, where
    special and unused tokens are.

    Example:
        >>> canary_tokens(320, 6)
        [10, 150, 290, 110, 250, 70]
    """
    places = [7 * number % _NUM_DISTINCT for number in range(_NUM_DISTINCT)]
    ids = [(2 * place + 1) * vocab_size // (2 * _NUM_DISTINCT) for place in places]
    return (ids + ids)[:length]


def without_images(tokens: list[int], config: Config) -> list[int]:
    """Replace the tokens that begin an image by their successors."""
    prompts = images_of(config)
    start = None if prompts is None else prompts.vision.start_token
    return [token + 1 if token == start else token for token in tokens]


def _is_cut(answer: Mapping[str, Any]) -> bool:
    reason = answer["meta_info"].get("finish_reason") or {}
    return bool(reason.get("type") == "abort")


def _log_probs_behind(url: str, answer: Mapping[str, Any], images: ImageCanary) -> list[float]:
    """Read an engine's log-probs of the tokens around a picture.

    Raises:
        EngineError: the answer has other tokens.
    """
    entries = answer["meta_info"].get("input_token_logprobs") or []
    if not images.has_tokens([entry[1] for entry in entries]):
        raise EngineError(
            url,
            f"asked for log-probs of {len(images.tokens)} tokens with the placeholders of a "
            f"picture, answered those of {len(entries)}: it prepares the picture in another way",
        )
    chosen = images.chosen([entry[0] for entry in entries[1:]])
    return [math.nan if value is None else float(value) for value in chosen]


def _log_probs(url: str, answer: Mapping[str, Any], tokens: Sequence[int]) -> list[float]:
    """Read the engine's log-probs of ``tokens[1:]``; null (not a number, in JSON) becomes NaN.

    Raises:
        EngineError: the answer has other tokens.
    """
    entries = answer["meta_info"].get("input_token_logprobs") or []
    told = [entry[1] for entry in entries]
    if told != list(tokens):
        place = next(
            (n for n, (mine, own) in enumerate(zip(told, tokens)) if mine != own),
            min(len(told), len(tokens)),
        )
        raise EngineError(
            url,
            f"asked for log-probs of {len(tokens)} given tokens, answered those of {len(told)}; "
            f"the first difference is at place {place}: {told[place : place + 4]} for "
            f"{list(tokens[place : place + 4])}",
        )
    return [math.nan if entry[0] is None else float(entry[0]) for entry in entries[1:]]
