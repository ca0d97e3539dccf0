"""What one round of a run may bring to light (`slime doctor --round`): a part of
`slime.diagnosis.troubles`."""

from __future__ import annotations

from slime.diagnosis.record import Trouble

ROUND_FAILED = Trouble(
    "round-failed",
    "the run ends before its first step is done",
    "One round of generating, training and pushing, cut small, ended with an error.",
    (
        "the last lines of the round and its crash/ folder say where",
        "--debug-rollout-only and --debug-train-only",
    ),
    "a round that ends with an error",
)
LOG_PROBS_DIFFER = Trouble(
    "log-probs-differ",
    "garbled text, or a KL that is not 0 in step one",
    "Trainer and engine say different log-probs of the same tokens with the same weights: "
    "template, temperature,"
    " precision, or a kernel.",
    ("slime align with the same flags ranks the causes", "--use-tis corrects for what is left"),
    "a round whose log-probs differ by 0.3",
)
LARGE_GRADIENT = Trouble(
    "large-gradient",
    "the gradient norm is large from the first step on, though the KL is 0",
    "The model finds likely what it wrote, and yet its gradient is ten times what is usual and "
    "more: rewards that"
    " nothing scales, a loss that sums over tokens, prompts that carry the chat template twice, "
    "or a kernel whose"
    " backward pass is wrong. In layers of experts --moe-permute-fusion cured that; here rows are "
    "always gathered.",
    (
        "--attention-backend flash",
        "--deterministic-mode",
        "slime align with the same flags, with experts above all",
    ),
    "a round whose gradient norm is 900",
)
