"""Command lines of the reference system at toy size: what they ask for stays, and each size becomes
one that four processes on a CPU can train."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import yaml

from benchmarks.toy_models import EOS, PAD, VOCABULARY, character_tokenizer
from slime.checkpoints.quantised_files import plain_weights, quantise_directory
from slime.models.ignore_list import recommended
from slime.models.quantised import Fp8, Int4, Quantisation
from tests.support.reference_lines import GROUPS, ROLES, published_config
from tests.support.tiny_models import stack_experts

#: A flag and its values.
Flag = tuple[str, list[str]]
#: Prompts of a rollout and samples of each: so many that rewards differ within one group at least.
PROMPTS = 8
SAMPLES = 4
#: Longest prompt and response together, in tokens.
LENGTH = 64
#: Flags of what a CPU has not.
NOT_ON_A_CPU = ("--attention-backend",)
#: Values of flags that say how large something is.
SIZES = {
    "--rollout-batch-size": PROMPTS,
    "--over-sampling-batch-size": 2 * PROMPTS,
    "--rollout-max-response-len": 8,
    "--rollout-max-context-len": LENGTH,
    "--eval-max-response-len": 8,
    "--n-samples-per-eval-prompt": 1,
    "--max-tokens-per-gpu": 1024,
    "--num-rollout": 1,
    "--num-epoch": 1,
    "--save-interval": 1,
    "--eval-interval": 1,
    "--data-pad-size-multiplier": 16,
    "--actor-num-nodes": 1,
    "--decoder-last-pipeline-num-layers": 1,
    "--decoder-first-pipeline-num-layers": 1,
    "--rollout-stop-token-ids": VOCABULARY[EOS],
    "--rollout-num-gpus-per-engine": 1,
}
#: Functions of files that are not provided → those that stand for them.
STAND_INS = {
    "examples.coding_agent_rl.generate.generate": "tests.support.toy_lines.with_reward",
    "examples.multi_agent.rollout_with_multi_agents.generate_with_multi_agents": (
        "tests.support.toy.with_a_tool"
    ),
    "generate_with_retool.generate": "tests.support.toy.with_a_tool",
    "generate_with_retool.reward_func": "tests.support.toy_lines.score",
    "generate_with_tau.generate": "tests.support.toy_lines.with_reward",
    "slime.rollout._fanout_test_helpers.compact_generate": "tests.support.toy_lines.fan_out",
    "slime.rollout._fanout_test_helpers.grpo_normalize_by_group_index": (
        "tests.support.toy_lines.normalize_by_group"
    ),
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp": (
        "tests.support.toy_lines.importance_weights"
    ),
}
#: The answer to every prompt, and tokens that give it as graders of mathematics read it: a random
#: model says one of them in every second response.
LABEL = "7"
ANSWERS = tuple(f"</think>{space}\\boxed{{{LABEL}}}" for space in ("", " ", "\n"))
#: Folders and files that lines write: flag → name in the folder of the run.
WRITTEN = {
    "--save": "checkpoints",
    "--load": "checkpoints",
    "--update-weight-disk-dir": "pushes",
}
#: What lines read, of which `Files` gives the toys.
PLACES = (
    *("--hf-checkpoint", "--ref-load", "--opd-teacher-load", "--prompt-data"),
    *("--eval-prompt-data", "--megatron-config-path", "--custom-config-path"),
)
#: Files that lines of one test of the reference pass on to each other, if their paths are relative.
PASSED_ON = (
    *("--save-debug-rollout-data", "--load-debug-rollout-data"),
    *("--ci-save-grad-norm", "--ci-load-grad-norm"),
)
#: Sizes of a toy of any family.
SHAPE: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 4 * LENGTH,
    "bos_token_id": None,
    "eos_token_id": VOCABULARY[EOS],
    "pad_token_id": VOCABULARY[PAD],
}
#: Sizes that only some families have.
OWN_SHAPE: dict[str, Any] = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "shared_expert_intermediate_size": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "num_nextn_predict_layers": 0,
    "mtp_num_hidden_layers": 0,
}


@dataclasses.dataclass(frozen=True)
class Launch:
    """A line at toy size.

    Attributes:
        names: of the lines that are this one at toy size.
        flags: those of paths have no value, or one that `Files.words` makes a path of.
        model: config.json of the toy.
        quantised: "fp8", "int4" or "".
    """

    names: tuple[str, ...]
    entry: str
    flags: tuple[tuple[str, tuple[str, ...]], ...]
    model: str
    quantised: str

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes a run: lines with the same one are launched once."""
        return (self.entry, tuple(sorted(self.flags)), self.model, self.quantised)

    def has(self, flag: str) -> bool:
        return any(name == flag for name, _ in self.flags)

    def value(self, flag: str) -> str:
        """The first value of a flag, the last time it is given."""
        return [values for name, values in self.flags if name == flag][-1][0]


def flags_of(argv: list[str]) -> list[Flag]:
    flags: list[Flag] = []
    for word in argv:
        if word.startswith("--"):
            flags.append((word, []))
        else:
            flags[-1][1].append(word)
    return flags


def launches(lines: Iterable[dict[str, Any]]) -> list[Launch]:
    """The lines at toy size; lines that do not differ then are one launch.

    A line that loads what another one writes comes behind it.
    """
    found: dict[tuple[Any, ...], Launch] = {}
    for line in sorted(lines, key=_readers_last):
        one = shrink(line)
        before = found.get(one.key, one)
        names = (*(before.names if before is not one else ()), line["name"])
        found[one.key] = dataclasses.replace(before, names=names)
    return list(found.values())


def _readers_last(line: dict[str, Any]) -> int:
    return sum(
        flag in line["argv"] for flag in ("--load-debug-rollout-data", "--ci-load-grad-norm")
    )


def shrink(line: dict[str, Any]) -> Launch:
    flags = flags_of(line["argv"])
    given = dict(flags)
    model = toy_config(line["argv"])
    sizes = {
        **SIZES,
        **_layout(given),
        **_batch(given),
        **_model_sizes(model),
        "--num-rollout": _rollouts(given),
    }
    kept: list[tuple[str, tuple[str, ...]]] = []
    for name, values in flags:
        if name in NOT_ON_A_CPU:
            continue
        if name in sizes:
            if sizes[name] is not None:
                kept.append((name, (str(sizes[name]),)))
        elif values and values[0] in STAND_INS:
            kept.append((name, (STAND_INS[values[0]],)))
        elif name in PLACES or name in WRITTEN:
            kept.append((name, ("",)))
        elif name == "--sglang-config":
            kept.append((name, ("one model" if "pd_mooncake" in values[0] else "two models",)))
        else:
            kept.append((name, tuple(values)))
    if "--colocate" in given and "--debug-rollout-only" not in given:
        kept = [(name, values) for name, values in kept if name != "--rollout-num-gpus"]
    return Launch(
        (line["name"],),
        line["entry"],
        tuple(kept),
        json.dumps(model, sort_keys=True),
        _quantised(given["--hf-checkpoint"][0]),
    )


def _quantised(path: str) -> str:
    """How published weights of that name are stored."""
    name = Path(path).name
    if name.endswith(("FP8", "fp8")) or name.startswith("DeepSeek-R1"):
        return "fp8"
    return "int4" if name.endswith("INT4") or name == "Kimi-K2-Thinking" else ""


def _layout(given: dict[str, list[str]]) -> dict[str, Any]:
    """Each way of splitting a model that the line has splits it in two, as far as there are
    processes: four that train, or two beside engines of their own."""
    ways = {
        "--pipeline-model-parallel-size": 1,
        "--context-parallel-size": 1,
        "--tensor-model-parallel-size": 1,
    }
    world = 1
    limit = 4 if "--colocate" in given else 2
    for way in ways:
        if int(given.get(way, ["1"])[0]) > 1 and 2 * world <= limit:
            ways[way] = 2
            world *= 2
    if world == 1:
        world = 2
    layout: dict[str, Any] = {**ways, "--actor-num-gpus-per-node": world}
    if "--expert-model-parallel-size" in given:
        room = world // ways["--pipeline-model-parallel-size"]
        wanted = int(given["--expert-model-parallel-size"][0])
        layout["--expert-model-parallel-size"] = min(2, wanted, room)
    layout["--rollout-num-gpus"] = min(2, int(given.get("--rollout-num-gpus", ["2"])[0]))
    return layout


def _batch(given: dict[str, list[str]]) -> dict[str, Any]:
    """As many steps of the optimiser for each rollout as the line has."""
    samples = int(given.get("--n-samples-per-prompt", ["1"])[0])
    prompts = int(given["--rollout-batch-size"][0])
    fewer = 1 if samples == 1 else SAMPLES
    total = int(given.get("--global-batch-size", ["0"])[0])
    steps = max(1, samples * prompts // total) if total else 1
    return {
        "--n-samples-per-prompt": fewer,
        "--global-batch-size": PROMPTS * fewer // steps,
    }


def _rollouts(given: dict[str, list[str]]) -> int:
    """One in which the policy learns, behind those of the critic alone."""
    return 1 + int(given.get("--num-critic-only-steps", ["0"])[0])


def toy_config(argv: list[str]) -> dict[str, Any]:
    """The config.json of the line's model with the sizes of a toy."""
    config = published_config(argv)
    own = {name: value for name, value in OWN_SHAPE.items() if config.get(name) is not None}
    config = {**config, **SHAPE, **own}
    if "kv_lora_rank" in own:
        config["num_key_value_heads"] = SHAPE["num_attention_heads"]
    if config.get("layer_types") or config.get("full_attention_interval"):
        config["layer_types"] = ["linear_attention", "full_attention"]
        config.pop("full_attention_interval")
        config["rope_parameters"] = {**config["rope_parameters"], "mrope_section": [1, 1, 0]}
    return config


def _model_sizes(model: dict[str, Any]) -> dict[str, Any]:
    """Flags that describe a model, as the toy has it."""
    experts = model.get("n_routed_experts") or model.get("num_experts")
    own = model.get("moe_intermediate_size")
    shared = model.get("shared_expert_intermediate_size") or (own or 0) * (
        model.get("n_shared_experts") or 0
    )
    dense = model.get("first_k_dense_replace") or 0
    wide = own if model["model_type"] == "qwen3_5_moe_text" else model["intermediate_size"]
    layers = model["num_hidden_layers"]
    nested = "kv_lora_rank" in model
    return {
        "--num-layers": layers,
        "--hidden-size": model["hidden_size"],
        "--ffn-hidden-size": wide,
        "--num-attention-heads": model["num_attention_heads"],
        "--num-query-groups": model["num_key_value_heads"],
        "--kv-channels": model["v_head_dim"] if nested else model.get("head_dim", 16),
        "--vocab-size": model["vocab_size"],
        "--num-experts": experts,
        "--moe-layer-freq": str([int(layer >= dense) for layer in range(layers)]).replace(" ", ""),
        "--moe-ffn-hidden-size": own,
        "--moe-shared-expert-intermediate-size": shared,
        "--moe-router-topk": model.get("num_experts_per_tok"),
        "--moe-router-num-groups": model.get("n_group"),
        "--moe-router-group-topk": model.get("topk_group"),
        "--q-lora-rank": model.get("q_lora_rank"),
        "--kv-lora-rank": model.get("kv_lora_rank"),
        "--qk-head-dim": model.get("qk_nope_head_dim"),
        "--qk-pos-emb-head-dim": model.get("qk_rope_head_dim"),
        "--v-head-dim": model.get("v_head_dim"),
    }


# -- files -----------------------------------------------------------------------------------------


class Files:
    """What stands for the files that lines name, in one folder; each model is made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._models: dict[tuple[str, str], Path] = {}

    def words(self, launch: Launch, run: Path, teacher_url: str = "") -> list[str]:
        """The command line of a launch, whose own files are in the folder ``run``."""
        run.mkdir(parents=True, exist_ok=True)
        plain = self.model(launch.model, "")
        words: list[str] = []
        for name, values in launch.flags:
            if name == "--hf-checkpoint":
                values = (str(self.model(launch.model, launch.quantised)),)
            elif name == "--ref-load":
                values = (str(plain),)
            elif name == "--opd-teacher-load":
                values = (str(self.teacher(launch)),)
            elif name == "--rm-url":
                values = (teacher_url,)
            elif name == "--prompt-data":
                values = (str(self.data(launch)),)
            elif name == "--eval-prompt-data":
                values = ("sums", f"{self.data(launch)}@[0:2]")
            elif name in WRITTEN:
                values = (str(run / WRITTEN[name]),)
            elif name in PASSED_ON:
                path = Path(values[0])
                values = (str(run / path.name if path.is_absolute() else self.folder / path),)
            elif name == "--sglang-config":
                values = (self._yaml(run, "groups", _groups(launch, values[0])),)
            elif name == "--megatron-config-path":
                values = (self._yaml(run, "roles", _roles(run)),)
            elif name == "--custom-config-path":
                values = (self._yaml(run, "custom", {"use_tis": True}),)
            words += [name, *values]
        return [*words, "--output-dir", str(run), "--run-name", "run"]

    def model(self, config: str, quantised: str) -> Path:
        key = (config, quantised)
        if key not in self._models:
            folder = self.folder / f"model-{len(self._models)}"
            if quantised:
                plain = self.model(config, "")
                rules = recommended(plain_weights(plain)[1])
                chosen = {
                    "fp8": Quantisation("fp8", Fp8((16, 16))),
                    "int4": Quantisation("compressed-tensors", Int4(16), rules),
                }[quantised]
                quantise_directory(plain, folder, chosen)
            else:
                _write_model(json.loads(config), folder)
            self._models[key] = folder
        return self._models[key]

    def teacher(self, launch: Launch) -> Path:
        """A model of the same shape with other weights."""
        folder = self.folder / f"teacher-of-{launch.names[0]}"
        if not folder.exists():
            _write_model(json.loads(launch.model), folder, seed=1)
        return folder

    def data(self, launch: Launch) -> Path:
        """Sums under the keys of the line: chat messages, with answers where a line learns from
        them."""
        key = launch.value("--input-key")
        learns_answers = launch.has("--loss-type")
        path = self.folder / f"{key}-{'answers' if learns_answers else 'prompts'}.jsonl"
        rows = []
        for number in range(PROMPTS):
            messages = [{"role": "user", "content": f"{number}+{number}="}]
            if learns_answers:
                messages.append({"role": "assistant", "content": LABEL})
            plain = not learns_answers and not launch.has("--apply-chat-template")
            prompt = messages[0]["content"] if plain else messages
            rows.append({key: prompt, "label": LABEL, "metadata": {"number": number}})
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    def _yaml(self, run: Path, name: str, content: Any) -> str:
        path = run / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return str(path)


def _groups(launch: Launch, models: str) -> Any:
    """The policy's servers, and with "two models" one of a model that no push reaches."""
    size = "--actor-num-gpus-per-node" if launch.has("--colocate") else "--rollout-num-gpus"
    engines = int(launch.value(size))
    groups = yaml.safe_load(yaml.safe_dump(GROUPS))
    [policy] = groups["sglang"]
    policy["server_groups"][0]["num_gpus"] = engines
    if models == "two models":
        policy["server_groups"][0]["num_gpus"] = engines - 1
        beside = {"name": "beside", "update_weights": False, "server_groups": [{"num_gpus": 1}]}
        groups["sglang"].append(beside)
    return groups


def _roles(run: Path) -> Any:
    roles = yaml.safe_load(yaml.safe_dump(ROLES))
    roles["megatron"][1]["overrides"]["save"] = str(run / "critic")
    return roles


def _write_model(config: dict[str, Any], folder: Path, seed: int = 0) -> None:
    import transformers

    stored = config["model_type"]
    known = "deepseek_v3" if stored == "kimi_k2" else stored
    described = transformers.AutoConfig.for_model(**{**config, "model_type": known})
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(described, dtype=torch.bfloat16)
    model.get_input_embeddings().weight.data[VOCABULARY[PAD]].normal_(0, 0.02)
    model.generation_config.eos_token_id = VOCABULARY[EOS]
    model.save_pretrained(folder)
    if stored.startswith("qwen3_5_moe"):
        stack_experts(folder)
    if stored != known:
        written = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**written, "model_type": stored}))
    tokenizer = character_tokenizer()
    tokenizer.add_tokens(list(ANSWERS))
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['content'] }}"
        "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)


# -- functions that stand for those of files that are not provided -------------------------------


async def with_reward(args: Any, sample: Any, sampling_params: dict[str, Any]) -> Any:
    """Turns with a tool, whose reward the function gives itself."""
    from tests.support import toy

    sample = await toy.with_a_tool(args, sample, sampling_params)
    sample.reward = toy.distinct_share(args, sample)
    return sample


async def score(args: Any, sample: Any, **_: Any) -> dict[str, float]:
    """A reward with a key, as --reward-key asks for."""
    from tests.support import toy

    return {"score": toy.distinct_share(args, sample)}


async def fan_out(args: Any, sample: Any, sampling_params: dict[str, Any]) -> list[Any]:
    """Several samples of a prompt instead of one."""
    import copy

    from slime.rollout.generate import generate

    copies = [copy.deepcopy(sample) for _ in range(SAMPLES)]
    return [await generate(args, one, dict(sampling_params)) for one in copies]


def normalize_by_group(args: Any, samples: list[Any]) -> tuple[list[float], list[float]]:
    """Rewards less the mean of those of their prompt."""
    rewards = [float(sample.reward) for sample in samples]
    of_group: dict[int, list[float]] = {}
    for sample, reward in zip(samples, rewards, strict=True):
        of_group.setdefault(sample.group_index, []).append(reward)
    means = {group: sum(found) / len(found) for group, found in of_group.items()}
    return rewards, [
        reward - means[sample.group_index] for sample, reward in zip(samples, rewards, strict=True)
    ]


def importance_weights(
    args: Any,
    *,
    pg_loss: torch.Tensor,
    train_log_probs: list[torch.Tensor],
    rollout_log_probs: list[torch.Tensor],
    loss_masks: list[torch.Tensor],
    **_: Any,
) -> tuple[torch.Tensor, list[torch.Tensor], dict[str, torch.Tensor]]:
    """Truncated importance weights of tokens."""
    apart = torch.cat(train_log_probs) - torch.cat(rollout_log_probs)
    weights = apart.exp().clamp(max=2.0)
    return pg_loss * weights, loss_masks, {"mis_weight": weights.detach()}
