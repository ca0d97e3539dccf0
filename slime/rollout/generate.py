"""Generation of one sample: the built-in single-turn function, and the state that users' own
functions work with.

A generate function is ``async fn(args, sample, sampling_params[, evaluation]) -> Sample |
list[Sample]``. It finds tokenizer and client through `current_state` (``GenerateState(args)`` in
existing plugins):

    async def two_turns(args, sample, sampling_params):
        sample = await generate(args, sample, sampling_params)
        if sample.status is not SampleStatus.COMPLETED:  # aborted, or out of room
            return sample
        append_message(sample, {"role": "tool", "content": tool(sample.response)})
        return await generate(args, sample, sampling_params)

Engines take and return tokens. Sampled tokens are trained on as they are; text is never tokenised
again.
"""

from __future__ import annotations

import asyncio
import base64
import contextvars
import copy
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime.config.config import Config
from slime.engines.api import EngineError, GenerateResult
from slime.engines.client import RequestRefused, RolloutClient
from slime.engines.request_fields import BadRequest, parse_params
from slime.errors import UserError
from slime.log import get_logger, tell
from slime.models.vision import one_placeholder_each, placeholder_runs
from slime.observe.trace import record_engine_timings, span
from slime.prompts.chat_template import between_turns, render_messages, without_repeated_end
from slime.prompts.conversation import ImageParts, read_messages, tools_of
from slime.prompts.images import ImagePrompts, add_images, bytes_of, kept, read_inline
from slime.prompts.tokenizer import with_opening
from slime.rollout.resumed_requests import (
    MAX_IDLE_CUTS,
    completed_stop,
    first_tokens,
    has_ended,
    keeps_text,
    piece,
    text_of,
)
from slime.samples.media import IMAGES, SPANS, references_of
from slime.samples.types import ANY_VERSION, Sample, SampleStatus, VersionWindow
from slime.user_code.overrides import follows_old_plugin, override_of

logger = get_logger(__name__)

_MASK64 = (1 << 64) - 1
#: Tokenizers decode an incomplete character to this.
_INCOMPLETE = "\ufffd"
#: Phrases in the errors of SGLang and the embedded engine for a prompt that fills the context.
_NO_ROOM = ("context length", "the context holds")


@dataclass
class GenerateState:
    """State that the generate functions of one rollout or evaluation share.

    Attributes:
        args: the flat view of the configuration; the same object in every hook of a run.
        sampling_params: defaults of this rollout; each request gets a copy of its own.
        max_context_len: most tokens of prompt plus response, None for no limit but the engine's.
        deterministic: requests carry a seed made from ``rollout_seed`` and the sample's index.
        versions: the current versions of the weights; a sample begun with another is stale
            (--stale-samples).
        end_tokens: tokens that end an answer unless ``ignore_eos`` is set.
        request_tokens: most new tokens to ask for in one request; a longer answer takes several.
        routed_experts: ask the engine which experts it used; the trainer uses the same ones.
        sampling_mask: ask the engine from which tokens each token was sampled.
        vocab_size: the model's; None if unknown.
        loop: the event loop that everything runs on.
        rollout_loop: the `slime.rollout.loop.RolloutLoop` that generates; None outside of a run.
        processor: always None. Plugins look for a transformers processor here, whose tokens would
            differ from the run's.
        images: expands image placeholders among tokens; None in a text-only run.
        media_folder: where images of messages are kept.
        counts: events worth a metric, e.g. "prompt_too_long".
        templated: the chat template has already rendered text prompts.
        template_kwargs: keyword arguments of the chat template; None: those of ``args``.
        logged: metrics that users' functions have added to those of this rollout.
        from_journal: number of response tokens restored from the journal, by sample index.
        progress, waits: see `slime.rollout.loop.RolloutLoop`; a user's rollout function reports
            nothing.
    """

    args: Any
    tokenizer: Any
    client: RolloutClient
    sampling_params: dict[str, Any]
    max_context_len: int | None = None
    deterministic: bool = False
    rollout_seed: int = 0
    versions: VersionWindow = ANY_VERSION
    end_tokens: frozenset[int] = frozenset()
    request_tokens: int | None = None
    routed_experts: bool = False
    sampling_mask: bool = False
    vocab_size: int | None = None
    loop: asyncio.AbstractEventLoop | None = None
    rollout_loop: Any = None
    processor: Any = None
    images: ImagePrompts | None = None
    media_folder: str = ""
    templated: bool = False
    template_kwargs: dict[str, Any] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    logged: dict[str, float] = field(default_factory=dict)
    from_journal: Counter[int | None] = field(default_factory=Counter)
    progress: Callable[[], dict[str, float]] = dict
    waits: Callable[[], str] = str

    @property
    def semaphore(self) -> asyncio.Semaphore:
        return self.client.slots

    @property
    def aborted(self) -> bool:
        return self.client.aborting

    def template_kwargs_for(self, sample: Sample) -> dict[str, Any]:
        """Return the keyword arguments of the chat template: the sample's own, or those of this
        rollout."""
        of_rollout = self.template_kwargs
        if of_rollout is None:
            of_rollout = getattr(self.args, "apply_chat_template_kwargs", None) or {}
        return sample.apply_chat_template_kwargs or of_rollout

    def params_for(self, sample: Sample) -> dict[str, Any]:
        """Copy the sampling parameters for a sample, with its seed in deterministic mode."""
        params = copy.deepcopy(self.sampling_params)
        if self.deterministic:
            assert sample.index is not None, "samples get their index when they are drawn"
            params["sampling_seed"] = sample_seed(self.rollout_seed, sample.index)
        return params


_STATE: contextvars.ContextVar[GenerateState] = contextvars.ContextVar("slime_generate_state")
_newest: list[GenerateState] = []
"""The state of this process's newest rollout, if any, for threads that user code starts itself:
they inherit no context."""


def bind_state(state: GenerateState) -> None:
    """Make ``state`` the one that `current_state` finds in this task and the tasks and threads that
    it starts."""
    _STATE.set(state)


def begin_state(state: GenerateState) -> None:
    """Make ``state`` the one that `current_state` finds. Threads that user code starts itself find
    it until the next rollout begins."""
    bind_state(state)
    _newest[:] = [state]


def forget_states(args: Any) -> None:
    """Forget the state of ``args``, whose run has ended: threads no longer find it."""
    if _newest and _newest[0].args is args:
        _newest.clear()


def current_state(args: Any = None) -> GenerateState:
    """Return the state of the current rollout; in a thread that user code started itself, of the
    newest rollout. ``args`` is accepted for existing plugins and not needed.

    Raises:
        UserError: called outside of a rollout or evaluation.
    """
    state = _STATE.get(_newest[0] if _newest else None)
    if state is None:
        raise UserError(
            "there is no rollout here to generate for",
            why="generate functions find tokenizer and engines only while a rollout or evaluation "
            "runs",
            fix="call this from a function given by --custom-generate-function-path or "
            "--rollout-function-path",
        )
    return state


def is_in_run() -> bool:
    """Tell whether `current_state` finds a state."""
    return bool(_newest) or _STATE.get(None) is not None


def rollout_sampling_params(config: Config) -> dict[str, Any]:
    """Return the sampling parameters of training rollouts, as SGLang spells them; log-probs are
    those of the temperature-scaled distribution."""
    rollout = config.rollout
    return sampling_params(
        temperature=rollout.rollout_temperature,
        top_p=rollout.rollout_top_p,
        top_k=rollout.rollout_top_k,
        min_p=rollout.rollout_min_p,
        max_new_tokens=rollout.rollout_max_response_len,
        stop=rollout.rollout_stop,
        stop_token_ids=rollout.rollout_stop_token_ids,
        skip_special_tokens=skips_special_tokens(config),
    )


def skips_special_tokens(config: Config) -> bool:
    """Tell whether special tokens are left out of the text of responses; tokens and log-probs keep
    them."""
    flag = "rollout_skip_special_tokens"
    return config.rollout.rollout_skip_special_tokens and not follows_old_plugin(config, flag)


def sampling_params(*, stop: Any = (), stop_token_ids: Any = (), **params: Any) -> dict[str, Any]:
    """Make a request's ``sampling_params``. The text keeps the stop string, because it is the text
    of the trained tokens.

    Raises:
        UserError: a parameter is not in `slime.engines.request_fields.SamplingParams`, or out of
            range.
    """
    params = {"no_stop_trim": True, "spaces_between_special_tokens": False} | params
    if stop:
        params["stop"] = [stop] if isinstance(stop, str) else list(stop)
    if stop_token_ids:
        params["stop_token_ids"] = list(stop_token_ids)
    try:
        parse_params(params)
    except BadRequest as error:
        raise UserError(f"engines would refuse these sampling parameters: {error}") from error
    return params


def sample_seed(rollout_seed: int, index: int) -> int:
    """Return a 31-bit seed for sample ``index``: neighbouring indices and seeds give unrelated
    values (splitmix64).

    Example:
        >>> sample_seed(42, 0) != sample_seed(42, 1) != sample_seed(43, 0)
        True
    """
    z = (rollout_seed * 0xD1342543DE82EF95 + (index + 1) * 0x9E3779B97F4A7C15) & _MASK64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK64
    return (z ^ (z >> 31)) >> 33


def context_limit(*limits: int | None) -> int | None:
    """Return the smallest of the limits that are set."""
    return min((limit for limit in limits if limit), default=None)


# -- the built-in function -------------------------------------------------------------------------


async def generate(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate or continue the response of ``sample``; returns the same sample.

    ``max_new_tokens`` limits the whole response, including tokens that the sample already has: an
    aborted sample continues where it stopped. A request aborted by a weight push or by the engine
    is resumed here, and a long answer may take several requests (`GenerateState.request_tokens`). A
    sample without room for more tokens becomes TRUNCATED; this is counted and never an error.

    Raises:
        RequestRefused: the engine refused the request for another reason than its length.
        EngineError: no answer after retries, or too many aborts in a row without a new token.
    """
    state = current_state(args)
    if not sample.tokens:
        sample.tokens = prompt_token_ids(state.tokenizer, sample)
    elif sample.multimodal_inputs and not sample.multimodal_train_inputs:
        sample.tokens = _with_images(sample, sample.tokens)
    sample.session_id = sample.session_id or uuid.uuid4().hex
    idle = 0
    while idle < MAX_IDLE_CUTS:
        params = _remaining_params(state, sample, sampling_params)
        if params is None or _wrote_an_image(state, sample):
            sample.status = SampleStatus.TRUNCATED
            return sample
        if sample.status is SampleStatus.ABORTED and params.get("stop"):
            tail = _sampled_tail(sample)
            if completed_stop(state.tokenizer, tail, [], params["stop"]) is not None:
                sample.status = SampleStatus.COMPLETED  # the abort came with its end
                return sample
        await _pause(min(idle, 10) * 0.05)  # the cause of the abort may persist for a moment
        length = sample.response_length
        asked = piece(params, state.request_tokens)
        await _call_engine(state, sample, {**params, "max_new_tokens": asked})
        new = sample.response_length - length
        whole_piece = asked < params["max_new_tokens"] and new == asked
        if whole_piece and sample.status is SampleStatus.TRUNCATED:
            sample.status = SampleStatus.ABORTED  # the request is over, the answer is not
        added = sample.tokens[len(sample.tokens) - new :]
        if sample.status is SampleStatus.ABORTED and has_ended(added, params, state.end_tokens):
            sample.status = SampleStatus.COMPLETED
        if sample.status is not SampleStatus.ABORTED or state.aborted:
            return sample
        state.counts["continued"] += not whole_piece
        idle = idle + 1 if sample.response_length == length else 0
    raise EngineError(
        state.client.base_url,
        f"sample {sample.index} was aborted {MAX_IDLE_CUTS} times without a token between",
    )


async def _pause(seconds: float) -> None:
    if seconds:
        await asyncio.sleep(seconds)


def _remaining_params(
    state: GenerateState, sample: Sample, sampling_params: dict[str, Any]
) -> dict[str, Any] | None:
    """Return a request's parameters for what is left of the response; None if there is no room."""
    room = sampling_params["max_new_tokens"] - sample.response_length
    if state.max_context_len is not None and state.max_context_len - len(sample.tokens) < room:
        room = state.max_context_len - len(sample.tokens)
        if room <= 0:
            note_too_long(state, sample, f"the limit is {state.max_context_len}")
    if room <= 0:
        return None
    params = {**sampling_params, "max_new_tokens": room}
    if least := params.get("min_new_tokens"):
        params["min_new_tokens"] = min(room, max(0, least - sample.response_length))
    return params


def _wrote_an_image(state: GenerateState, sample: Sample) -> bool:
    """Tell whether the policy itself has sampled image placeholders. The trainer has no image for
    them, and an engine would look for one."""
    if state.images is None:
        return False
    runs = placeholder_runs(sample.tokens, state.images.vision)
    if len(runs) == len(references_of(sample)):
        return False
    tell(
        logger,
        "the policy sampled an image placeholder in sample %s, which therefore cannot continue "
        "after an abort or a turn; it counts as truncated",
        sample.index,
        once="wrote an image",
    )
    return True


async def _call_engine(state: GenerateState, sample: Sample, params: dict[str, Any]) -> None:
    """Send one ``/generate`` request, and append the answer to the sample."""
    assert sample.session_id is not None
    before = _sampled_tail(sample)
    was_cut = sample.status is SampleStatus.ABORTED
    text = sample.response
    with span(sample, "generate", input_tokens=len(sample.tokens)) as generate_span:
        try:
            result = await _ask(state, sample, params)
        except RequestRefused as refused:
            if not is_too_long(refused):
                raise
            note_too_long(state, sample, refused.what)
            sample.status = SampleStatus.TRUNCATED
            return
        record_engine_timings(sample, result.meta_info)
        generate_span.set(tokens=len(result.token_ids), finish_reason=result.finish_reason)
    if result.finish_reason not in ("stop", "length", "abort"):
        raise EngineError(
            state.client.base_url, f"answer with the unknown finish_reason {result.finish_reason!r}"
        )
    if state.sampling_mask and result.token_ids:
        _check_sampling_mask(state, result)
    if references_of(sample):
        _check_prompt_length(state, sample, result)
    if was_cut and before and params.get("stop"):
        result = _up_to_stop(state, result, params, before)
    sample.append_response_tokens(
        tokens=result.token_ids,
        log_probs=result.log_probs,
        meta_info=result.meta_info,
        text=result.text,
    )
    if before and result.token_ids and keeps_text(params):
        _decode_again(state, sample, params, before, text)


def _up_to_stop(
    state: GenerateState, result: GenerateResult, params: dict[str, Any], before: list[int]
) -> GenerateResult:
    """Cut an answer that goes on past a stop string, which began in an earlier request.

    Args:
        before: the answer's tokens of earlier requests.
    """
    count = completed_stop(state.tokenizer, before, result.token_ids, params["stop"])
    if not count or count == len(result.token_ids) or result.meta_info.get("routed_experts"):
        return result
    tokens = result.token_ids[:count]
    text = text_of(state.tokenizer, tokens, params)
    meta = first_tokens(result.meta_info, count)
    return GenerateResult(tokens, result.log_probs[:count], text, "stop", meta)


def _check_prompt_length(state: GenerateState, sample: Sample, result: GenerateResult) -> None:
    """Check that the engine has read the prompt token by token.

    Raises:
        UserError: the engine counts another number of prompt tokens.
    """
    told = result.meta_info.get("prompt_tokens")
    if result.finish_reason != "abort" and told is not None and told != len(sample.tokens):
        raise UserError(
            f"the engine at {state.client.base_url} counts {told} prompt tokens of sample "
            f"{sample.index}, which has {len(sample.tokens)}",
            why="it preprocesses images differently from the trainer: other sizes, or another "
            "number of placeholders",
            fix="serve the directory of --hf-checkpoint, with its preprocessor_config.json, and "
            "the same pixel limits",
        )


def _check_sampling_mask(state: GenerateState, result: GenerateResult) -> None:
    """Check that the engine has returned sampling masks.

    Raises:
        UserError: the engine was asked for sampling masks and returned none.
    """
    wanted = ("output_token_sampling_mask", "output_token_sampling_logprobs")
    missing = [name for name in wanted if result.meta_info.get(name) is None]
    if missing:
        raise UserError(
            f"the engine at {state.client.base_url} returned no sampling mask",
            why="it was asked for return_sampling_mask, and its answer has no "
            f"{' and no '.join(missing)}",
            fix="use an SGLang version that is supported, or pass --no-use-sampling-mask for "
            "log-probs of the whole vocabulary",
        )


async def _ask(state: GenerateState, sample: Sample, params: dict[str, Any]) -> GenerateResult:
    """Request an answer from an engine, through a plugin's ``post`` if the plugin replaces ours."""
    wanted: dict[str, Any] = {"return_routed_experts": True} if state.routed_experts else {}
    if state.sampling_mask:
        wanted["return_sampling_mask"] = True
    tokens = sample.tokens
    if references := references_of(sample):
        assert state.images is not None
        tokens = one_placeholder_each(tokens, state.images.vision)
        wanted["image_data"] = await asyncio.to_thread(encoded_images, references)
    post = override_of("post")
    if post is not None:
        asked = {"input_ids": tokens, "sampling_params": params, "return_logprob": True}
        url = f"{state.client.base_url}/generate"
        return GenerateResult.from_json(await post(url, asked | wanted))
    rid = f"{sample.session_id}-{uuid.uuid4().hex[:8]}"
    return await state.client.generate(
        tokens, params, rid=rid, routing_key=sample.session_id or "", **wanted
    )


def _sampled_tail(sample: Sample) -> list[int]:
    """Return the tokens at the end of the response that were sampled one after the other; [] after
    a tool's answer."""
    start = sample.response_length
    for token_span in reversed(sample.token_spans):
        if token_span.weight_version is None or token_span.end != start:
            break
        start = token_span.start
    return sample.tokens[sample.prompt_length + start :]


def _decode_again(
    state: GenerateState, sample: Sample, params: dict[str, Any], before: list[int], text: str
) -> None:
    """Decode an answer of several requests again, from all its tokens: one request may have ended
    within a character.

    Args:
        before: the answer's tokens before the last request.
        text: the response before the last request.
    """
    known = text_of(state.tokenizer, before, params).rstrip(_INCOMPLETE)
    text = text.rstrip(_INCOMPLETE)
    # otherwise user code has changed the text: keep that
    if text.endswith(known):
        whole = text_of(state.tokenizer, _sampled_tail(sample), params)
        sample.response = text[: len(text) - len(known)] + whole


def is_too_long(refused: RequestRefused) -> bool:
    """Tell whether an engine refused a prompt because it fills the context."""
    return any(phrase in refused.what for phrase in _NO_ROOM)


def note_too_long(state: GenerateState, sample: Sample, limit: str) -> None:
    """Count a sample that has no room to generate (``rollout/prompt_too_long``), and log the first
    of the run."""
    state.counts["prompt_too_long"] += 1
    unmeasured = ""
    if isinstance(sample.prompt, list):
        unmeasured = "; prompts that are messages are measured only with --apply-chat-template"
    tell(
        logger,
        "sample %s has %d tokens and no room to generate: %s; it counts as truncated, and leaves "
        "training where it has no answer. --rollout-max-prompt-len leaves such prompts out "
        "beforehand%s; the limit is --rollout-max-context-len, or without it the engine's own "
        "context (--sglang-context-length, by default what the model's config.json says)",
        sample.index,
        len(sample.tokens),
        limit,
        unmeasured,
        once="no room",
    )


def prompt_token_ids(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the token ids of the prompt: chat messages through the chat template, plain text with
    the tokens that the tokenizer puts before it (`with_opening`).

    The positions of images are recorded in the sample.

    Raises:
        UserError: the prompt is empty, its images do not match its placeholders, or the run reads
            no images.
    """
    state = current_state() if is_in_run() else None
    if isinstance(sample.prompt, str):
        ids = list(tokenizer.encode(sample.prompt, add_special_tokens=False))
        if ids:
            templated = state is not None and state.templated
            ids = with_opening(tokenizer, sample.prompt, ids, templated=templated)
    else:
        kwargs = sample.apply_chat_template_kwargs
        if state is not None:
            kwargs = state.template_kwargs_for(sample)
        tools = tools_of(sample.metadata)
        text = render_messages(tokenizer, sample.prompt, tools=tools, **kwargs)
        ids = list(tokenizer.encode(text, add_special_tokens=False))
    if not ids:
        raise UserError(
            f"sample {sample.index} has an empty prompt", fix="remove such rows from the data"
        )
    return _with_images(sample, list(ids))


def _with_images(sample: Sample, ids: list[int]) -> list[int]:
    """Return the prompt's tokens with all placeholders of its images; record their positions."""
    images = current_state().images if is_in_run() else None
    if sample.multimodal_inputs and (images is None or sample.multimodal_inputs.keys() != {IMAGES}):
        raise UserError(
            f"sample {sample.index} has images or other media",
            why="this run reads no images (--multimodal-keys)"
            if images is None
            else f"its multimodal_inputs has {', '.join(map(str, sample.multimodal_inputs))}; "
            "only images are read, as a list of paths",
            fix="pass --multimodal-keys, or a --custom-generate-function-path that handles them",
        )
    if images is None:
        return ids
    references = references_of(sample)
    whole, spans = images.expand(ids, references, f"sample {sample.index}")
    if spans:
        sample.multimodal_train_inputs = {SPANS: [list(span) for span in spans]}
    return whole


def encoded_images(references: Sequence[str]) -> list[str]:
    """Return the bytes of images in base64, as ``image_data`` of a request.

    Raises:
        UserError: a file no longer exists.
    """
    from slime.models.decode_image import for_engine

    try:
        return [base64.b64encode(for_engine(bytes_of(one))).decode("ascii") for one in references]
    except OSError as error:
        raise UserError(
            "an image cannot be read any more", why=str(error), fix="put the file back"
        ) from error


def append_message(sample: Sample, message: dict[str, Any]) -> None:
    """Append a message that the model did not write to its response, between two turns: for example
    a tool's answer. The chat template renders it, with the end of the previous turn and the header
    of the next one. It is never trained on. ``sample.response`` gets its text on separate lines.

    Images are parts of its content: ``{"type": "image", "image": data}`` with bytes, a data URI or
    base64.

    The tokens count towards ``--rollout-max-response-len``: without room for more, the next turn
    leaves a sample TRUNCATED.

    Example:
        >>> message = {"role": "tool", "content": "It is 2962 m high."}  # doctest: +SKIP
        >>> append_message(sample, message)                              # doctest: +SKIP

    Raises:
        UserError: the tokenizer has no chat template, or it refuses the message (many know only
            user and assistant).
    """
    state = current_state()
    given = [message]
    references: list[str] = []
    if state.images is not None:
        parts = ImageParts(state.images.placeholder(state.tokenizer))
        given = read_messages([message], images=parts)
        references = kept(read_inline(parts, "message"), state.media_folder)
    text = between_turns(
        state.tokenizer,
        given,
        tools=tools_of(sample.metadata),
        **state.template_kwargs_for(sample),
    )
    tokens = state.tokenizer.encode(text, add_special_tokens=False)
    tokens = without_repeated_end(sample.tokens, tokens)
    said = "".join(f"\n{one['content']}\n" for one in read_messages(given))
    if state.images is not None:
        what = f"a message for sample {sample.index}"
        tokens, spans = state.images.expand(tokens, references, what, start=len(sample.tokens))
        add_images(sample, references, spans)
    sample.append_response_tokens(tokens=tokens, text=said, trainable=False)
