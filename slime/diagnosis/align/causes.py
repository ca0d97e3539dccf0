"""What can part trainer and engine, each once: its evidence, the test that tells it, what to do. In
the order in which they are named where they explain equally much: the more special before the more
general."""

from __future__ import annotations

from slime.diagnosis.align import held, inside, outside
from slime.diagnosis.align.case import Cause
from slime.diagnosis.record import Trouble

TOKENS = Cause(
    Trouble(
        "align-tokens",
        "single samples differ from some token on, others not at all",
        "The trainer scores other token ids than the engine sampled: text was tokenised again on "
        "the way.",
        ("send and keep token ids: sample.tokens, sample.append_response_tokens",),
        "a prompt whose text was tokenised anew",
    ),
    "both dumps' ids are compared, and prompts tokenised again are scored",
    outside.other_tokens,
)
SHIFT = Cause(
    Trouble(
        "align-shift",
        "all tokens differ, by as much as neighbours differ from each other",
        "One side's log-probs stand at the token before or after.",
        (
            "look where responses are cut off prompts: custom generate, conversion and loss "
            "functions",
        ),
        "log-probs moved by one token",
    ),
    "each side is compared with the other moved by one or two tokens; needs no model",
    outside.shift,
)
TEMPERATURE = Cause(
    Trouble(
        "align-temperature",
        "likely tokens differ in one direction, unlikely ones in the other",
        "One side does not divide logits by --rollout-temperature, or divides by another number.",
        (
            "--rollout-temperature must be what the engine samples with; custom generate "
            "functions must pass it on",
        ),
        "log-probs at temperature 1 in a run at 0.7",
    ),
    "the reference's logits are divided by 1, by the temperature twice, by its inverse, and by a "
    "range of others",
    outside.temperature,
)
FILTERS = Cause(
    Trouble(
        "align-filters",
        "the engine's log-probs are higher, most where many tokens were likely",
        "One side's log-probs are those of what top-p, top-k or min-p left over, renormalised, or "
        "behind a penalty.",
        (
            "--rollout-top-p 1 --rollout-top-k -1",
            "--sglang-sampling-defaults openai leaves the model's generation_config.json out",
        ),
        "log-probs renormalised over top-p 0.8",
    ),
    "the reference's log-probs are renormalised by the run's filters and by those of "
    "generation_config.json",
    outside.filters,
)
TEMPLATE = Cause(
    Trouble(
        "align-template",
        "the first tokens of responses differ most, later ones less",
        "The sides scored the response behind different prompts: with and without chat template, "
        "its head, or the"
        " token that begins a text.",
        (
            "send sample.tokens as input_ids instead of text",
            "--apply-chat-template on both sides, or on neither",
        ),
        "a prompt without the token that begins a text",
    ),
    "the response is scored behind the prompt in the template, without it, without its head, "
    "without its first token",
    outside.template,
)
ROUTING = Cause(
    Trouble(
        "align-routing",
        "few tokens differ much, most hardly",
        "The sides send tokens to other experts.",
        ("--use-rollout-routing-replay", "--use-routing-replay, for the trainer's own passes"),
        "an engine whose router chooses others",
    ),
    "the experts that the engine recorded are replayed in the reference",
    inside.routing,
)
POSITION = Cause(
    Trouble(
        "align-position",
        "differences grow with the position",
        "The sides rotate queries and keys by other angles: positions, rope_theta, rope_scaling, "
        "or a rotary cache that"
        " was lost when memory was released.",
        ("compare rope_theta and rope_scaling of both sides' config.json",),
        "a rotary base of 10,000 instead of 1,000",
    ),
    "the reference computes with moved positions, other bases, and without scaling",
    inside.position,
)
QUANTISATION = Cause(
    Trouble(
        "align-quantisation",
        "all tokens differ a little, unlikely ones more",
        "The engine's weights, or its keys and values, have fewer bits than the trainer's.",
        ("engines in the trainer's dtype", "--use-tis corrects for it"),
        "weights in 4-bit integers",
    ),
    "the reference's matrices, or its keys and values, are rounded to each form in use",
    inside.quantisation,
)
PRECISION = Cause(
    Trouble(
        "align-precision",
        "differences are small, of either sign, everywhere",
        "One operator, or all, computes in fewer bits on one side.",
        (
            "the same dtype on both sides: --fp32 or --bf16, --sglang-dtype",
            "--attention-backend for attention",
        ),
        "an output layer in bfloat16",
    ),
    "each operator of the reference is rounded alone; what all of them make is compared by its "
    "size",
    inside.precision,
)
WEIGHTS = Cause(
    Trouble(
        "align-weights",
        "all tokens differ, on the engine's side",
        "The engine holds other weights than the trainer: of an earlier version, or some that "
        "never arrived.",
        ("--check-weight-update-equal", "--update-weights-interval 1", "--max-staleness"),
        "a tensor of zeros",
    ),
    "fingerprints of all tensors are compared, and the reference computes with those that differ",
    held.weights,
)
BATCH = Cause(
    Trouble(
        "align-batch",
        "the same tokens get other log-probs each time",
        "The engine's kernels depend on what else is in the batch, or it reads keys and values of "
        "its cache that are"
        " not those of this text.",
        ("--sglang-enable-deterministic-inference", "--use-tis corrects for what is left"),
        "an engine that answers otherwise in company",
    ),
    "the engine is asked again, alone and in company",
    held.batch,
)

CAUSES: tuple[Cause, ...] = (
    TOKENS, SHIFT, TEMPERATURE, FILTERS, TEMPLATE, ROUTING, POSITION, QUANTISATION, PRECISION,
    WEIGHTS, BATCH,
)  # fmt: skip
