"""What `slime doctor` may find before a run, each once. docs/troubles.md is made of these
records."""

from __future__ import annotations

from slime.diagnosis.record import Trouble
from slime.diagnosis.troubles_flags import (
    BATCH_EQUATION,
    COLOCATE_ASYNC,
    CONTEXT_LENGTH,
    FLAG_MISSING,
    FLAG_UNKNOWN,
    FLAG_UNSUPPORTED,
    FLAG_VALUE,
    FLAG_WITHOUT_EFFECT,
    FLAGS_CONTRADICT,
    NCCL_TIMEOUT,
    NO_CONTRAST,
    PARALLEL_LAYOUT,
    STALE_WEIGHTS,
)
from slime.diagnosis.troubles_round import LARGE_GRADIENT, LOG_PROBS_DIFFER, ROUND_FAILED
from slime.documentation import doc_url

# -- host, device, network
# -------------------------------------------------------------------------------------------

SHARED_MEMORY = Trouble(
    "shared-memory",
    "the first push of weights finds no room in /dev/shm, or Ray's object store is slow",
    "Weights go to engines of this host through /dev/shm, two buckets at a time; a container has "
    "64 MB of it unless"
    " told otherwise.",
    (
        "docker run --shm-size=8g",
        "a lower --update-weight-buffer-size",
        "--update-weight-transport disk",
    ),
    "a /dev/shm of 64 MB",
)
OPEN_FILES = Trouble(
    "open-files",
    "“too many open files” in the middle of a rollout",
    "Each request under way holds a connection in the rollout process, the router and the engine, "
    "and the limit of"
    " open files is lower than that.",
    ("ulimit -n 65536", "a lower --sglang-server-concurrency"),
    "a limit of 256 open files",
)
BYTECODE = Trouble(
    "bytecode",
    "a launch takes a minute longer than on other hosts, each time",
    "PYTHONDONTWRITEBYTECODE is set, and the packages were installed without bytecode, so that "
    "every process compiles"
    " torch, transformers, Ray and the engine again.",
    ("unset PYTHONDONTWRITEBYTECODE", "python -m compileall -q -j 0 FOLDER_OF_THE_PACKAGES, once"),
    "that variable, and a torch without its __pycache__",
)
TEMPORARY_FOLDER = Trouble(
    "temporary-folder",
    "Ray does not start: “AF_UNIX path length cannot exceed 107 bytes”",
    "Ray keeps sockets in RAY_TMPDIR, and the names of sockets may not be longer. Where TMPDIR "
    "does not serve, they"
    " go to a short folder by themselves.",
    ("export RAY_TMPDIR=/tmp",),
    "a RAY_TMPDIR of 100 characters",
)
DISK_ROOM = Trouble(
    "disk-room",
    "“the disk is full” when a checkpoint is written",
    "The folder of --save or --save-hf has less room than a checkpoint of this model takes.",
    (
        "free disk space, or --save on another disk",
        "--save-retain 1",
        "--no-save-optim, if nobody will resume",
    ),
    "--save on a disk with 1 MB left",
)
FOLDER = Trouble(
    "folder",
    "an output cannot be written",
    "The folder cannot be made by this user, is a file, or holds something that an export would "
    "replace.",
    ("pass --output-dir, --save and --save-hf with folders you can write to, each for itself",),
    "--output-dir below a file",
)
TORCH_WITHOUT_GPU = Trouble(
    "torch-without-gpu",
    "the host has GPUs, and the trainer says that there are none",
    "torch was built for CPUs alone, or for a CUDA that is newer than the driver.",
    ("install a torch build for the driver's CUDA: nvidia-smi names it", "a newer driver"),
    "a host with GPUs whose torch sees none",
)
NCCL_INTERFACE = Trouble(
    "nccl-interface",
    "the launch or a weight sync hangs, then a time-out of NCCL or gloo",
    "NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names a network interface that this host does not "
    "have.",
    (
        "export NCCL_SOCKET_IFNAME=<an interface of `ip addr`>, or unset it",
        "NCCL_DEBUG=INFO says which one is taken",
    ),
    "NCCL_SOCKET_IFNAME=eth9",
)
INFINIBAND = Trouble(
    "infiniband",
    "weight syncs between nodes are slow or time out",
    "Several nodes talk over TCP: InfiniBand is switched off, or there is none to be seen.",
    (
        "export NCCL_IB_DISABLE=0",
        "ibstat tells whether InfiniBand is up",
        "--colocate needs no network for weights",
    ),
    "--actor-num-nodes 2 with NCCL_IB_DISABLE=1",
)
HOSTNAME = Trouble(
    "hostname",
    "nodes wait for each other at launch",
    "The host's own name has no address, by which the others could reach it.",
    ("add the name to /etc/hosts or to the DNS of the cluster",),
    "a hostname that does not resolve, with two nodes",
)
PROXY = Trouble(
    "proxy",
    "every reward is 0, and remote rewards time out",
    "--rm-url would be asked through a proxy; what your own functions ask follows the environment.",
    ("put the host of --rm-url into no_proxy",),
    "http_proxy set, with --rm-type remote_rm",
)
PORTS = Trouble(
    "ports",
    "an engine or the router finds no port: “Max retries exceeded … /get_model_info”",
    "Hundreds of ports between 15000 and 32000 are taken, perhaps by servers of earlier runs.",
    ("end what holds them: ss -ltnp lists them",),
    "every port that is tried is taken",
)
GPUS_MISSING = Trouble(
    "gpus-missing",
    "the launch is stuck at placement",
    "The run asks for more GPUs than there are. Colocated: actor_num_nodes × "
    "actor_num_gpus_per_node; decoupled: that"
    " plus rollout_num_gpus.",
    (
        "--colocate shares GPUs",
        "lower --actor-num-gpus-per-node or --rollout-num-gpus",
        "--ray-address joins a cluster that has them",
    ),
    "--actor-num-gpus-per-node 512",
)
RAY_UNREACHABLE = Trouble(
    "ray-unreachable",
    "the launch waits for a Ray cluster",
    "Nobody answers at --ray-address or RAY_ADDRESS; its port is that of Ray's GCS, 6379, not of "
    "its dashboard.",
    (
        "ray start --head on the first node",
        "unset --ray-address and RAY_ADDRESS to run on this host alone",
    ),
    "--ray-address 127.0.0.1:9",
)

# -- model
# --------------------------------------------------------------------------------------------------

MODEL_DIRECTORY = Trouble(
    "model-directory",
    "transformers cannot find a model",
    "--hf-checkpoint names no directory with a readable config.json.",
    (
        "pass --hf-checkpoint with a directory that holds config.json, *.safetensors and a "
        "tokenizer",
    ),
    "--hf-checkpoint nowhere/model",
)
HUB = Trouble(
    "hub",
    "a model or data set of the hub is not found",
    "The name is no folder here, was not downloaded before, and the hub gives no answer or does "
    "not give it.",
    (
        "pass a local path",
        "`hf download NAME` where there is a network, and copy the folder",
        "HF_ENDPOINT names another hub, HF_TOKEN the account that may read it",
    ),
    "--hf-checkpoint org/name with HF_HUB_OFFLINE=1",
)
MODEL_UNKNOWN = Trouble(
    "model-unknown",
    "an error at launch that there is no table for the model, or that it cannot be trained "
    "faithfully",
    "config.json is of a family that has no conversion table, or has settings that the trainer "
    "does not compute.",
    (
        f"take a model of a known family: {doc_url('model-families.md')}",
        "--model-name names the family of a like layout",
    ),
    "a config.json with the model_type mamba",
)
MODEL_FLAGS = Trouble(
    "model-flags",
    "an error at launch that a flag contradicts config.json",
    "A flag of the architecture, as launch scripts pass them, is of another model than the "
    "directory.",
    ("leave the flag out: all of them follow from config.json",),
    "--num-layers 7 for a model of two layers",
)
MISSING_SHARDS = Trouble(
    "missing-shards",
    "weights are missing, or the first rollout is garbled",
    "The directory is not whole: shards are missing or cut short, the index promises more than "
    "there is, or a layer has"
    " no entry. Conversion tools and broken downloads leave such directories.",
    ("download or convert it again, and compare the number of files with the index",),
    "a model directory without its model.safetensors",
)
QUANTISED_WEIGHTS = Trouble(
    "quantised-weights",
    "an error at launch about quantisation",
    "The engines of this run cannot take pushes in the format of config.json's quantization_config:"
    " no quantisation method of that name is known, or SGLang was not tried with it "
    f"({doc_url('quantisation.md')}).",
    (
        "slime convert quantised-to-hf makes plain weights of FP8 and INT4",
        "--rollout-engine embedded takes FP8 and INT4 (compressed-tensors), with --ref-load for "
        "the plain weights",
    ),
    "a config.json with a quantization_config of an unknown form",
)
IGNORE_LIST = Trouble(
    "quantisation-ignore-list",
    "router weights (mlp.gate.weight) become all zeros on the engines",
    "The ignore list of the quantization_config does not fit the model: it does not name weights "
    "that are no Linear"
    " layers, which would be quantised under names that engines do not expect; or it tears apart "
    "what engines compute"
    " with one kernel; or a rule names nothing.",
    (
        'add "re:.*mlp\\\\.gate\\\\..*", "model.embed_tokens.weight" and "lm_head" to '
        "quantization_config.ignore",
        "slime convert hf-to-int4 quantises again, with a list that fits the model",
    ),
    "a quantization_config whose ignore list has no entry for the router",
)
TRANSFORMER_ENGINE = Trouble(
    "transformer-engine",
    "an error at launch that a flag needs Transformer Engine",
    "It is not installed for this Python, and a flag asks for what it computes.",
    ("pip install transformer-engine[pytorch]", "leave the flag out"),
    "--transformer-impl transformer_engine where it is not installed",
)
ENGINE_MISSING = Trouble(
    "engine-missing",
    "an error at launch that SGLang is not installed, or not supported",
    "--rollout-engine sglang starts servers with this Python, which has no SGLang or one that was "
    "never tried.",
    ("pip install 'slime-rl[sglang]'", "--rollout-engine embedded"),
    "--rollout-engine sglang without SGLang",
)
ENGINE_FLAGS = Trouble(
    "engine-flags",
    "an error at launch that an engine could not do what a flag asks for",
    "An option of the engine does not go with a training run: its weights would not follow the "
    "trainer's.",
    ("leave the option out", "--sglang-speculative-algorithm NGRAM drafts without weights"),
    "--rollout-engine sglang --sglang-speculative-algorithm EAGLE",
)
EXTERNAL_ENGINE = Trouble(
    "external-engine",
    "engines that others have started do not answer, or serve another model",
    "An address of --rollout-external-engine-addrs is wrong, or its server cannot take part in "
    "this run.",
    ("start the server, or correct the address", "`slime engines` lists what a running run has"),
    "--rollout-external-engine-addrs 127.0.0.1:9",
)

# -- tokenizer and template
# ------------------------------------------------------------------------------------------

TOKENIZER = Trouble(
    "tokenizer",
    "the tokenizer cannot be read",
    "The model directory has none, or its files are not whole or of another version of "
    "transformers.",
    ("copy tokenizer.json and tokenizer_config.json of the model into the directory",),
    "a tokenizer.json that was cut short",
)
VOCABULARY = Trouble(
    "vocabulary",
    "an index error or illegal memory access in the embedding",
    "The tokenizer has ids that the model's vocabulary (vocab_size in config.json) has no row for.",
    ("take tokenizer and config.json from the same revision of the same model",),
    "a tokenizer of 100 tokens and a vocab_size of 32",
)
STOP_TOKENS = Trouble(
    "stop-tokens",
    "generation takes extremely long, GPU power is maxed out, and nothing comes",
    "No stop token ends a turn: neither the tokenizer's end token, nor generation_config.json, "
    "nor the flags name what"
    " the chat template puts after an answer.",
    (
        "--rollout-stop-token-ids N",
        "--rollout-stop TEXT",
        "mend eos_token_id in generation_config.json",
    ),
    "a template that ends turns with <|im_end|> and a tokenizer that stops at <|endoftext|>",
)
END_TOKENS = Trouble(
    "end-tokens-differ",
    "answers end early or run on, or the model serves otherwise than it was trained",
    "config.json or generation_config.json names an end token that is neither the tokenizer's nor "
    "the one that ends a"
    " turn in the chat template; engines stop at all of them.",
    (
        "correct eos_token_id in the file that is named",
        "--rollout-stop-token-ids N adds one for this run",
    ),
    "an eos_token_id in config.json that the tokenizer does not have as its end token",
)
TEMPLATE_TWICE = Trouble(
    "template-twice",
    "the gradient norm is very high and the answers are poor",
    "The data already carries the chat template, and --apply-chat-template puts it into it a "
    "second time.",
    ("leave --apply-chat-template out", "strip the markers from the data"),
    "prompts with <|im_start|> and --apply-chat-template",
)
CHAT_TEMPLATE = Trouble(
    "chat-template",
    "an error at launch about the chat template",
    "The tokenizer has no chat template, one with a syntax error, or one that refuses these "
    "messages.",
    ("take an instruct model, or add a chat_template.jinja", "leave --apply-chat-template out"),
    "a chat_template.jinja with a syntax error",
)

# -- checkpoint
# --------------------------------------------------------------------------------------------------

CHECKPOINT = Trouble(
    "checkpoint",
    "a checkpoint does not load, or garbled text because nothing was loaded",
    "--load or --ref-load names no directory with a latest_checkpointed_iteration.txt or a "
    "Hugging Face model, or the"
    " iteration of --ckpt-step is not there or not whole.",
    (
        "set --load to the --save directory to resume",
        "--ckpt-step N picks an iteration that is there",
    ),
    "--load nowhere",
)
CHECKPOINT_FOREIGN = Trouble(
    "checkpoint-foreign",
    "an error at launch that --save holds another run's checkpoints",
    "This run would overwrite or remove them.",
    ("pass --load with the same folder to resume that run", "another --save"),
    "--save with a folder of checkpoints, without --load",
)
NOTHING_KEPT = Trouble(
    "nothing-kept",
    "a run has ended and there is no model",
    "It was started with --no-save, and without --save-hf.",
    ("leave --no-save out: checkpoints and the model are then in the run folder", "--save-hf DIR"),
    "a run with --no-save",
)

# -- data, reward, hooks
# ---------------------------------------------------------------------------------------------

DATA_FILE = Trouble(
    "data-file",
    "a data file is not found or cannot be read",
    "No such file, of a type that is not known, without rows, or with several splits or "
    "configurations to choose from.",
    (
        "check the path; path:split names a split, path@[a:b] takes a slice",
        f"the types that are read: {doc_url('data.md')}",
    ),
    "--prompt-data nowhere.jsonl",
)
DATA_ROWS = Trouble(
    "data-rows",
    "KeyError, missing fields, parse failures",
    "Rows have no such key, are no JSON, have an empty prompt, a label that the reward cannot "
    "grade, or nothing to"
    " train on; or every prompt is too long.",
    (
        "--input-key and --label-key must match the data",
        "the finding names file, line and the keys that are there",
    ),
    "--input-key promt",
)
DATA_TOO_FEW = Trouble(
    "data-too-few",
    "an error at launch about too few prompts",
    "--num-epoch counts whole batches, and the data has less than one.",
    ("lower --rollout-batch-size", "--num-rollout instead of --num-epoch"),
    "--num-epoch 1 with fewer rows than --rollout-batch-size",
)
EVALUATION_SETS = Trouble(
    "evaluation-sets",
    "an error at launch about evaluation sets",
    "--eval-prompt-data takes pairs of a name and a path; --eval-config a YAML file with known "
    "keys.",
    ("--eval-prompt-data gsm8k gsm8k_test.jsonl",),
    "--eval-prompt-data a b c",
)
REWARD_MISSING = Trouble(
    "reward-missing",
    "an error at launch that there is no reward function",
    "Neither --rm-type nor --custom-rm-path gives one, the name is none that is built in, or what "
    "it needs is missing: "
    "its address, its package or its data.",
    ("--rm-type math compares with the label", "--custom-rm-path module.function"),
    "--rm-type maths",
)
REWARD_FLAT = Trouble(
    "reward-flat",
    "the reward stays flat",
    "The reward function gives the same for the label itself, for another row's label and for "
    "noise.",
    (
        "`slime reward` runs it alone, on answers of your own",
        "check --label-key, and the form of answer it looks for",
    ),
    "a reward function that always returns 0",
)
REWARD_INVERTED = Trouble(
    "reward-inverted",
    "the reward rises and the answers get worse",
    "The reward function scores noise as high as, or higher than, an answer with the label in it.",
    (
        "`slime reward` runs it alone, on answers of your own",
        "check the sign, and which of the two is the label",
    ),
    "a reward function that returns 1 for wrong answers",
)
REWARD_FAILS = Trouble(
    "reward-fails",
    "the first rollout ends in an error of the reward function",
    "It raises, returns no number, or does not answer in time, for a sample made of a row of the "
    "data.",
    ("mend it at the line that the finding names", "`slime reward` runs it alone"),
    "a reward function that raises",
)
HOOK = Trouble(
    "hook",
    "an error at launch about a function of your own",
    "There is no such module or function, importing it fails, or its arguments are not those it "
    "is called with.",
    (
        "module.function or file.py:function, found from the working directory",
        f"each signature: {doc_url('hooks.md')}",
    ),
    "--custom-rm-path nowhere.reward",
)
OLD_PLUGIN = Trouble(
    "old-plugin",
    "special tokens in responses, or numbers among the labels",
    "A function imports a path of earlier versions, and so what it reads is as it was there.",
    ("--rollout-skip-special-tokens and --label-type text give it what new code gets",),
    "a reward function that imports slime.utils.types",
)

# -- plan, credentials
# -----------------------------------------------------------------------------------------------

MEMORY_TRAINING = Trouble(
    "memory-training",
    "out of memory in training",
    "The memory plan of the trainer's GPUs does not fit.",
    (
        "--recompute-activations",
        "a lower --max-tokens-per-gpu (rollout_max_response_len ÷ context_parallel_size at "
        "least), or"
        " --micro-batch-size 1",
        "--sequence-parallel with --tensor-model-parallel-size",
        "--offload-optimizer-states",
    ),
    "--gpu-memory-gb 1",
)
MEMORY_COLOCATED = Trouble(
    "memory-colocated",
    "out of memory when training and engines share GPUs",
    "What the trainer keeps asleep and the engine's fraction do not fit together.",
    (
        "--sglang-mem-fraction-static 0.4",
        "--offload-optimizer-states",
        "a lower --seq-length or --max-tokens-per-gpu",
    ),
    "--colocate --gpu-memory-gb 1",
)
MEMORY_HOST = Trouble(
    "memory-host",
    "the kernel kills a process of the run",
    "The run wants more of this host's memory than it has.",
    (
        "fewer processes on a host",
        "leave out --offload-optimizer-states or --optimizer-cpu-offload",
        "a smaller batch",
    ),
    "a host with 10 MB of memory",
)
WANDB_KEY = Trouble(
    "wandb-key",
    "--use-wandb is refused at launch",
    "There is no API key and no terminal to ask in, or wandb is not installed.",
    (
        "set WANDB_API_KEY",
        "--wandb-mode offline",
        "metrics.jsonl and TensorBoard have the same numbers",
    ),
    "--use-wandb without a key",
)

CHECK_BROKEN = Trouble(
    "check-broken",
    "a check of slime doctor itself ends with an error",
    "Something has a form that nobody expected: a damaged file, a value of another type. A launch "
    "that reads the same"
    " ends of it, too, unless the place is in slime.diagnosis.",
    (
        "the error names what it could not read; look there",
        "SLIME_DEBUG=1 slime train … --dry-run shows the traceback",
    ),
    "a check that raises a ValueError",
)

#: In the order of docs/troubles.md: section → records.
SECTIONS: dict[str, tuple[Trouble, ...]] = {
    "Flags": (
        FLAG_UNKNOWN, FLAG_VALUE, FLAG_MISSING, FLAG_UNSUPPORTED, FLAG_WITHOUT_EFFECT,
        FLAGS_CONTRADICT, BATCH_EQUATION, PARALLEL_LAYOUT, CONTEXT_LENGTH, COLOCATE_ASYNC,
        STALE_WEIGHTS, NO_CONTRAST, NCCL_TIMEOUT,
    ),
    "Host, GPUs, network": (
        OPEN_FILES, SHARED_MEMORY, BYTECODE, TEMPORARY_FOLDER, DISK_ROOM, FOLDER, TORCH_WITHOUT_GPU,
        NCCL_INTERFACE, INFINIBAND, HOSTNAME, PROXY, PORTS, GPUS_MISSING, RAY_UNREACHABLE,
    ),
    "Model and engine": (
        MODEL_DIRECTORY, HUB, MODEL_UNKNOWN, MODEL_FLAGS, MISSING_SHARDS, QUANTISED_WEIGHTS,
        IGNORE_LIST, TRANSFORMER_ENGINE, ENGINE_MISSING, ENGINE_FLAGS, EXTERNAL_ENGINE,
    ),
    "Tokenizer and chat template": (
        TOKENIZER, VOCABULARY, STOP_TOKENS, END_TOKENS, TEMPLATE_TWICE, CHAT_TEMPLATE,
    ),
    "Checkpoints": (CHECKPOINT, CHECKPOINT_FOREIGN, NOTHING_KEPT),
    "Data, rewards, functions of your own": (
        DATA_FILE, DATA_ROWS, DATA_TOO_FEW, EVALUATION_SETS, REWARD_MISSING, REWARD_FLAT,
        REWARD_INVERTED, REWARD_FAILS, HOOK, OLD_PLUGIN,
    ),
    "Memory, credentials": (MEMORY_TRAINING, MEMORY_COLOCATED, MEMORY_HOST, WANDB_KEY),
    "The examination itself": (CHECK_BROKEN,),
    "One round (`slime doctor --round`)": (ROUND_FAILED, LOG_PROBS_DIFFER, LARGE_GRADIENT),
}  # fmt: skip

TROUBLES: dict[str, Trouble] = {
    trouble.name: trouble for group in SECTIONS.values() for trouble in group
}
