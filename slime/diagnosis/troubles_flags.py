"""Troubles of the command line alone, a part of `slime.diagnosis.troubles`."""

from __future__ import annotations

from slime.diagnosis.record import Trouble
from slime.documentation import doc_url

FLAG_UNKNOWN = Trouble(
    "flag-unknown",
    "an error at launch about a flag that there is not",
    "A name on the command line or in a configuration file is misspelt, abbreviated, or of "
    "another system.",
    (
        "`slime flags WORD` looks a flag up, also by its name in TRL or verl; the error names "
        "what has its place",
    ),
    "--rollout-batchsize 8",
)
FLAG_VALUE = Trouble(
    "flag-value",
    "an error at launch about the value of a flag",
    "The value is of another type, outside of the flag's range, missing, or one too many.",
    ("`slime flags NAME` shows type and range",),
    "--lr fast",
)
FLAG_MISSING = Trouble(
    "flag-missing",
    "an error at launch about a flag that is required",
    "A run needs a model, data and a length, and one of them was not given.",
    ("pass --hf-checkpoint, --prompt-data and --num-rollout (or --num-epoch)",),
    "the flags of a run without --num-rollout",
)
FLAG_UNSUPPORTED = Trouble(
    "flag-unsupported",
    "an error at launch that something is not supported in this version",
    "The flag is known, what it asks for is not there.",
    (f"leave the flag out; what replaces it: {doc_url('coming-from.md')}",),
    "--use-opd",
)
FLAG_WITHOUT_EFFECT = Trouble(
    "flag-without-effect",
    "a flag is given, and nothing follows from it",
    "It acts only together with another flag, which is not given.",
    ("pass the flag that it needs, which the error names, or leave it out",),
    "--group-rm with --rm-type math",
)
FLAGS_CONTRADICT = Trouble(
    "flags-contradict",
    "an error at launch that two flags exclude each other",
    "Two flags ask for things that cannot both be, or say the same thing twice.",
    ("keep one of the two",),
    "--bf16 --fp32",
)
BATCH_EQUATION = Trouble(
    "batch-equation",
    "an error at launch with the batch equation and this run's numbers",
    "rollout_batch_size × n_samples_per_prompt = global_batch_size × num_steps_per_rollout does "
    "not hold, or its parts"
    " cannot be divided among the trainer's ranks.",
    (
        "give --rollout-batch-size, --n-samples-per-prompt and one of --global-batch-size and "
        "--num-steps-per-rollout",
        "leave --micro-batch-size out: samples are then packed by tokens, whatever their number",
    ),
    "--rollout-batch-size 4 --n-samples-per-prompt 2 --num-steps-per-rollout 3",
)
PARALLEL_LAYOUT = Trouble(
    "parallel-layout",
    "an error at launch that GPUs, heads or layers cannot be divided",
    "The product of the parallel sizes does not divide the trainer's GPUs, or one of them does "
    "not divide the model.",
    (
        "let --tensor-model-parallel-size × --pipeline-model-parallel-size × "
        "--context-parallel-size divide"
        " --actor-num-nodes × --actor-num-gpus-per-node",
        f"what each size divides: {doc_url('parallelism.md')}",
    ),
    "--tensor-model-parallel-size 2 on one GPU",
)
COLOCATE_ASYNC = Trouble(
    "colocate-async",
    "--colocate is refused in train_async.py",
    "Generation runs while the trainer trains, so that they cannot take turns on the same GPUs.",
    ("remove --colocate and pass --rollout-num-gpus", "python train.py instead of train_async.py"),
    "slime train-async --colocate",
)
NO_CONTRAST = Trouble(
    "no-contrast",
    "the reward stays flat and the gradient is 0",
    "The flags leave nothing to compare rewards with, or give a loss the weight 0.",
    (
        "--n-samples-per-prompt 8",
        "--advantage-estimator reinforce_plus_plus --normalize-advantages",
    ),
    "--advantage-estimator grpo --n-samples-per-prompt 1",
)
STALE_WEIGHTS = Trouble(
    "stale-weights",
    "the policy diverges in asynchronous training",
    "Samples may be trained on many rollouts after the weights that made them: at most "
    "--async-buffer-size +"
    " --update-weights-interval − 1, more where groups are put back (over-sampling, "
    "--partial-rollout).",
    (
        "--async-buffer-size 2",
        "--update-weights-interval 1",
        "--max-staleness N",
        "--use-tis corrects for it",
    ),
    "--update-weights-interval 5",
)
CONTEXT_LENGTH = Trouble(
    "context-length",
    "an error at launch about prompt, response and context lengths",
    "The lengths leave no token to generate, one limit is above the other that caps it, or they "
    "exceed the context that"
    " the model was made for (max_position_embeddings).",
    (
        "lower --rollout-max-prompt-len, or raise --rollout-max-context-len or --seq-length",
        "lower --rollout-max-response-len below the model's context",
    ),
    "--rollout-max-context-len 64 --rollout-max-prompt-len 64",
)
NCCL_TIMEOUT = Trouble(
    "nccl-timeout",
    "an error at launch about NCCL_TIMEOUT",
    "It is the number of seconds that a rank waits for another one, and nothing else.",
    ("export NCCL_TIMEOUT=1800", "--distributed-timeout-minutes 30"),
    "NCCL_TIMEOUT=30min",
)
