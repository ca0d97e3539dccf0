"""Signatures of files, data and functions of the user's own."""

from __future__ import annotations

from slime.diagnosis import troubles
from slime.diagnosis.record import Trouble
from slime.diagnosis.signatures import Form, Signature
from slime.documentation import doc_url

COMPILE_CACHE = Signature(
    Trouble(
        "compile-cache",
        "JSONDecodeError in torch's compiler",
        "A file of the compiler's cache was cut short or written by two processes at once.",
        (
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES=1 in the environment of the run (every process "
            "gets it)",
            "or remove the cache: rm -r ${TORCHINDUCTOR_CACHE_DIR:-/tmp/torchinductor_$USER} "
            "~/.triton/cache",
        ),
        "a cache file cut in half",
    ),
    r"(?:\w+(?:Error|Failed|Exception): "
    r")?(?:.{0,80}\braised:$|(?:json\.decoder\.)?JSONDecodeError: )",
    context=r"torch/_inductor/|torch/_dynamo/|triton/runtime/|triton/compiler/|torchinductor|torch_compile_cache",
)
SHARD_ERROR = Signature(
    troubles.MISSING_SHARDS,
    r"(?:\w+: )?(?:\d+ of \d+ shards are missing in |\S+ lacks \d+ tensors that the index "
    r"promises|\S+ is not a"
    r" readable"
    r" safetensors file|\S+ is not a complete [\w.-]+ model|no weights in )",
    Form.ERROR,
)
SHARD_RAISED = Signature(
    troubles.MISSING_SHARDS,
    r"(?:FileNotFoundError: .{0,300}\.safetensors|SafetensorError: |RuntimeError: Cannot find any "
    r"model weights"
    r" with)",
)
NO_CHECKPOINT = Signature(
    Trouble(
        "no-checkpoint",
        "no latest_checkpointed_iteration.txt where a checkpoint is looked for",
        "--load or --ref-load names a folder that holds neither a Megatron checkpoint nor a "
        "Hugging Face model.",
        (
            "--load with the --save folder of the run that is meant; equal to --save it starts "
            "fresh",
            "--ref-load with a Megatron checkpoint or a Hugging Face folder",
            "--ckpt-step picks an iteration",
        ),
        "--load with an empty folder",
    ),
    r"(?:\w+: )?(?:--[\w-]+ \S+ (?:holds no checkpoint|does not exist|is not a directory)|there "
    r"is no checkpoint \S+"
    r"|\S*latest_checkpointed_iteration\.txt (?:does not hold|says))",
    Form.ERROR,
)
DAMAGED_CHECKPOINT = Signature(
    Trouble(
        "damaged-checkpoint",
        "a checkpoint is not whole",
        "A file of it is missing, shorter than its manifest says, or has another content.",
        (
            "go back to the checkpoint before it: --ckpt-step",
            "slime resume takes the newest whole one by itself",
        ),
        "a checkpoint with a file cut short",
    ),
    r"(?:\w+: )?\S+ (?:is (?:not a complete checkpoint|damaged|corrupt)|cannot be trusted)",
    Form.ERROR,
)
CONTEXT = Signature(
    Trouble(
        "context-too-long",
        "an engine refuses prompts that are longer than its context",
        "Prompts, or conversations of several turns, are longer than the engine's context.",
        (
            "a larger --sglang-context-length, up to what the model has learnt",
            "--rollout-max-prompt-len leaves such prompts out",
            "in a generate function of your own: keep the last turns only",
        ),
        "--rollout-max-context-len 16 with prompts of 20 tokens",
    ),
    r"(?:\w+(?:Error|Exception|Refused): ).{0,200}(?:is longer than the model's context "
    r"length|exceeds the maximum"
    r" allowed"
    r" length|the prompt has \d+ tokens, the context holds \d+)",
    is_survived=True,
)
DISK_FULL = Trouble(
    "disk-full",
    "the disk is full",
    "A checkpoint, a log or a cache was to be written, and there is no space or no quota left.",
    (
        "df -h names the full one; free space there",
        "--save-retain 2, or --save on another disk",
        "slime resume then goes on",
    ),
    "--save on a disk of 1 MB",
)
DISK_RAISED = Signature(
    DISK_FULL,
    r"\w*Error: (?:\[Errno (?:28|122)\]|.{0,80}(?:No space left on device|Disk quota exceeded))",
)
DISK_ERROR = Signature(
    DISK_FULL,
    r"(?:\w+: )?(?:\[Errno (?:28|122)\]|the disk is full|.{0,200}No space left on device)",
    Form.ERROR,
)
READ_ONLY = Signature(
    Trouble(
        "read-only",
        "a folder cannot be written: its file system is read-only",
        "The file system is mounted read-only, perhaps since it failed.",
        (
            "--output-dir and --save with folders on another disk",
            "dmesg tells whether a disk failed",
            "mount | grep ro,",
        ),
        "--output-dir on a CD",
    ),
    r"(?:\w+: )*.{0,200}(?:\[Errno 30\]|Read-only file system)",
    Form.ERROR,
)
READ_ONLY_RAISED = Signature(READ_ONLY.trouble, r"OSError: \[Errno 30\] Read-only file system")
PERMISSION = Signature(
    Trouble(
        "permission",
        "a file or folder may not be read or written",
        "It belongs to somebody else, or its mode forbids it.",
        (
            "ls -ld of the folder that is named, and id: whose is it?",
            "--output-dir, --save and HF_HOME with folders of yours",
        ),
        "--output-dir /root as somebody else",
    ),
    r"PermissionError: (?:\[Errno (?:1|13)\])?",
)
PERMISSION_ERROR = Signature(
    PERMISSION.trouble,
    r"(?:\w+: )?(?:\[Errno 13\] Permission denied|PermissionError: )",
    Form.ERROR,
)
OPEN_FILES = Signature(
    troubles.OPEN_FILES,
    r"\w*Error: (?:\[Errno 24\]|.{0,160}Too many open files)",
)
LOCKED = Signature(
    Trouble(
        "folder-in-use",
        "another process writes to the run folder",
        "A run of this name goes on, or a process of it is left.",
        ("wait for it, or stop it: kill <the pid that is named>", "another --run-name"),
        "the same command twice",
    ),
    r"(?:\w+: )?another process is writing to ",
    Form.ERROR,
)
MISSING_MODULE = Signature(
    Trouble(
        "missing-module",
        "a Python module is not found",
        "A package is not installed for this Python, or a module of your own lies where the "
        "processes of the run"
        " do not look.",
        (
            "pip install <the package> into the environment of the run",
            "your own modules: start the run in their folder, or PYTHONPATH=<it>",
        ),
        "--custom-rm-path of a module that imports what is not there",
    ),
    r"ModuleNotFoundError: No module named |ImportError: cannot import name ",
)
MISSING_MODULE_ERROR = Signature(
    MISSING_MODULE.trouble,
    r"(?:\w+: )*(?:No module named |the module \S+ is not installed for|'\S+' cannot be "
    r"found|cannot import \S+)",
    Form.ERROR,
)
NON_FINITE = Signature(
    Trouble(
        "not-finite",
        "the loss or a gradient is NaN or infinite",
        "A step overflowed: a learning rate that is too high, extreme rewards or ratios, 16-bit "
        "floats, or"
        " weights that are"
        " not finite already.",
        (
            "a lower --lr, --clip-grad 1.0",
            "--bf16 instead of --fp16",
            "the step's samples and losses are in the crash folder: samples.jsonl, step.json",
            "--no-check-for-nan-in-loss-and-grad skips such steps and counts them",
        ),
        "--lr 1e30",
    ),
    r"(?:\w+: )?(?:training stopped at rollout \d+, step \d+: NaN or Inf|the trainer's own "
    r"log-probs of the canary"
    r" are not finite)",
    Form.ERROR,
)
USER_CODE = Signature(
    Trouble(
        "own-function",
        "a function of your own fails, or returns what it must not",
        "A reward, generate, filter or other function of the flags raised, or returned something "
        "else than its"
        " hook wants.",
        (
            "the error names function, sample and line",
            "slime reward runs a reward on its own",
            f"what each hook takes and returns: {doc_url('hooks.md')}",
        ),
        "a reward function that divides by 0",
    ),
    r"(?:\w+: )?(?:the (?:reward )?function (?:of --\S+|'\S+'(?: \(--\S+\))?) (?:failed|returned)|"
    r"(?:the reducer of |what )?'\S+' \(--\S+\) (?:failed|returned|assigned|called|set no)|"
    r"\S+ returned (?:a |an )?\S.{0,120}(?: as the reward of sample \d+|$)|"
    r"\d+ groups have failed in this rollout|the reward function returned)",
    Form.ERROR,
)
WANDB = Signature(
    Trouble(
        "wandb-refused",
        "--use-wandb has no key, or the server refuses it",
        "Neither --wandb-key nor WANDB_API_KEY nor `wandb login` gave a key that the server takes.",
        (
            "WANDB_API_KEY=<your key>",
            "--wandb-mode offline keeps the run for wandb sync",
            "metrics.jsonl and TensorBoard have the same numbers anyway",
        ),
        "--use-wandb without a key",
    ),
    r"(?:\w+: )?(?:--use-wandb: there is no API key|(?:UsageError|AuthenticationError|CommError): "
    r".{0,120}(?:API"
    r" key|api_key|permission))",
    Form.ERROR,
)

ALL = (
    *(
        COMPILE_CACHE,
        SHARD_ERROR,
        SHARD_RAISED,
        NO_CHECKPOINT,
        DAMAGED_CHECKPOINT,
        CONTEXT,
        DISK_RAISED,
        DISK_ERROR,
    ),
    *(READ_ONLY, READ_ONLY_RAISED, PERMISSION, PERMISSION_ERROR, OPEN_FILES, LOCKED),
    *(MISSING_MODULE, MISSING_MODULE_ERROR, NON_FINITE, USER_CODE, WANDB),
)
