"""Contradictions between flags, found before anything starts. Each error says which flags, and what to do.

`check` holds for every configuration; `check_complete` adds what a run needs that a part of it does not.
"""

from __future__ import annotations

from slime.config.checks_megatron import check_megatron
from slime.config.checks_train import check_training
from slime.config.needs import check_needs, without
from slime.config.ranges import check_ranges
from slime.config.resolve import Draft
from slime.config.specs import option_of
from slime.errors import UserError
from slime.host import num_gpus


def check(draft: Draft) -> None:
    """Refuse contradictions.

    Raises:
        UserError: the first one found.
    """
    for step in (
        check_ranges, check_needs, _one_of_several, _entry, _host, _placement, _parallel, _batches, _lengths,
        _algorithm, _evaluation, _debug, _names, check_training, check_megatron,
    ):  # fmt: skip
        step(draft)


def _one_of_several(draft: Draft) -> None:
    """Flags that need one of several others, or a combination."""
    if draft.differs("save_interval") and not (draft["save"] or draft["save_hf"]):
        raise UserError(
            "--save-interval has no effect without --save or --save-hf", fix="pass one of them, or leave it out"
        )
    if draft["ref_update_interval"] is not None and not (draft["use_kl_loss"] or draft["kl_coef"]):
        raise UserError(
            "--ref-update-interval has no effect without a reference model",
            why="one is loaded for --use-kl-loss or --kl-coef",
            fix="pass one of them, or leave it out",
        )
    for dest in ("tis_clip", "tis_clip_low"):
        if draft.differs(dest) and not (draft["use_tis"] or draft["get_mismatch_metrics"]):
            raise without(dest, "--use-tis")
    own_advantages = draft["custom_advantage_function_path"] is not None  # it may read any flag
    if draft.differs("gamma") and draft["advantage_estimator"] != "reinforce_plus_plus" and not own_advantages:
        raise UserError(
            f"--gamma has no effect with --advantage-estimator {draft['advantage_estimator']}",
            why="every token of a sample has the sample's own reward; only reinforce_plus_plus discounts",
            fix="leave --gamma out",
        )
    if draft["use_dynamic_batch_size"] and draft["max_tokens_per_gpu"] is None:
        raise UserError(
            "--use-dynamic-batch-size needs --max-tokens-per-gpu",
            why="it packs micro-batches up to that many tokens",
            fix=f"start with rollout_max_response_len ÷ context_parallel_size: --max-tokens-per-gpu "
            f"{-(-draft['rollout_max_response_len'] // draft['context_parallel_size'])}",
        )


def _entry(draft: Draft) -> None:
    if draft["async_buffer_size"] > 0 and draft["colocate"]:
        other = "train_async" if draft.entry == "train_async" else f"--async-buffer-size {draft['async_buffer_size']}"
        raise UserError(
            f"--colocate cannot be used with {other}",
            why="generation runs while the trainer trains, so they cannot take turns on the same GPUs",
            fix="remove --colocate and give the engines GPUs of their own with --rollout-num-gpus, or use train.py",
        )


def _host(draft: Draft) -> None:
    """What depends on whether the trainer has GPUs, judged by this host (SLIME_NUM_GPUS speaks for the others)."""
    on_gpu = num_gpus() > 0
    where = "on GPUs" if on_gpu else "without GPUs (SLIME_NUM_GPUS=<n> says that the trainer's hosts have some)"
    wrong = {"nccl"} if not on_gpu else {"gloo"}
    if draft["distributed_backend"] in wrong:
        raise UserError(
            f"--distributed-backend {draft['distributed_backend']} cannot be used {where}", fix="leave it at auto"
        )
    missing = {"fused", "unfused", "local"} if on_gpu else {"flash", "fused"}
    if on_gpu and draft["transformer_impl"] == "transformer_engine":
        missing = set()  # it has them all, and says itself which of them the GPU cannot run
    if draft["attention_backend"] in missing:
        raise UserError(
            f"--attention-backend {draft['attention_backend']} is not there {where}",
            why="torch's variable-length flash attention is used" if on_gpu else "torch's own attention is used",
            fix="pass auto or flash" if on_gpu else "pass auto, unfused or local",
        )


def _placement(draft: Draft) -> None:
    gpus, per_engine = draft["rollout_num_gpus"], draft["rollout_num_gpus_per_engine"]
    if gpus % per_engine:
        raise UserError(
            f"--rollout-num-gpus {gpus} is not a multiple of --rollout-num-gpus-per-engine {per_engine}",
            fix=f"pass --rollout-num-gpus {max(1, gpus // per_engine) * per_engine}",
        )
    per_node = draft["num_gpus_per_node"]
    if draft.is_given("num_gpus_per_node") and per_engine > per_node:
        if draft["rollout_engine"] != "sglang":
            raise UserError(
                f"--rollout-num-gpus-per-engine {per_engine} is more than --num-gpus-per-node {per_node}",
                why="the embedded engine does not reach over nodes",
                fix="pass --rollout-engine sglang",
            )
        if per_engine % per_node:
            raise UserError(
                f"--rollout-num-gpus-per-engine {per_engine} is not a multiple of --num-gpus-per-node {per_node}",
                why="an engine that reaches over nodes has the same number of GPUs on each",
            )
    if draft["rollout_engine"] != "sglang" and draft["sglang_config"] is not None:
        raise UserError(
            "--sglang-config describes SGLang servers, and the engines of this run are embedded ones",
            fix="pass --rollout-engine sglang, or leave --sglang-config out",
        )
    for dest in ("offload_train", "offload_rollout"):
        if draft[dest] and not draft["colocate"]:
            raise UserError(
                f"{option_of(dest)} has no effect without --colocate",
                why="trainer and engines have GPUs of their own",
                fix=f"remove {option_of(dest)} (or --offload), or pass --colocate",
            )


def _parallel(draft: Draft) -> None:
    tensor, pipeline = draft["tensor_model_parallel_size"], draft["pipeline_model_parallel_size"]
    context, expert = draft["context_parallel_size"], draft["expert_model_parallel_size"]
    nodes, per_node = draft["actor_num_nodes"], draft["actor_num_gpus_per_node"]
    world, model = nodes * per_node, tensor * pipeline * context
    gpus = f"actor_num_nodes × actor_num_gpus_per_node = {nodes} × {per_node} = {world}"
    if world % model:
        raise UserError(
            f"{world} trainer GPUs cannot be divided by {model}",
            why=f"{gpus}; tensor × pipeline × context parallel size = {tensor} × {pipeline} × {context} = {model}",
            fix="let the product of the parallel sizes divide the number of GPUs",
        )
    expert_tensor = draft["expert_tensor_parallel_size"] or tensor
    if expert > 1 and world % (expert_tensor * expert * pipeline):
        raise UserError(
            f"{world} trainer GPUs cannot be divided by {expert_tensor * expert * pipeline}",
            why=f"{gpus}; expert tensor × expert × pipeline parallel size = {expert_tensor} × {expert} × {pipeline}",
            fix="let that product divide the number of GPUs; --expert-tensor-parallel-size 1 is usual",
        )
    experts = draft.values.get("num_experts")
    if expert > 1 and experts is not None and experts % expert:
        raise UserError(f"--num-experts {experts} cannot be divided by --expert-model-parallel-size {expert}")
    if draft["sequence_parallel"] and tensor == 1:
        raise UserError(
            "--sequence-parallel needs --tensor-model-parallel-size of at least 2",
            why="it splits what tensor parallelism leaves whole",
            fix="remove --sequence-parallel, or raise --tensor-model-parallel-size",
        )
    _context_exchange(draft)
    _virtual_stages(draft, pipeline)
    if sum(bool(draft[name]) for name in ("bf16", "fp16", "fp32")) != 1:
        chosen = [f"--{name}" for name in ("bf16", "fp16", "fp32") if draft[name]]
        raise UserError(
            f"{' and '.join(chosen) or 'none of the precisions'} cannot be chosen",
            fix="choose one of --bf16, --fp16, --fp32",
        )


def _context_exchange(draft: Draft) -> None:
    asked = draft.values.get("cp_comm_type")
    kinds = {asked} if isinstance(asked, str) else set(asked or ())
    if kinds - {"a2a"} and draft.values.get("transformer_impl") != "transformer_engine":
        raise UserError(
            f"--cp-comm-type {' '.join(sorted(kinds))} needs Transformer Engine",
            why="without it, context parallelism exchanges heads for tokens (a2a) around each attention",
            fix="leave the flag out, or pass a2a",
        )


def _virtual_stages(draft: Draft, pipeline: int) -> None:
    by_layers, by_count = draft["num_layers_per_virtual_pipeline_stage"], draft["num_virtual_stages_per_pipeline_rank"]
    if by_layers is not None and by_count is not None:
        raise UserError(
            "--num-layers-per-virtual-pipeline-stage and --num-virtual-stages-per-pipeline-rank say the same thing",
            fix="give one of them",
        )
    if (by_layers is not None or by_count is not None) and pipeline == 1:
        raise UserError("virtual pipeline stages need --pipeline-model-parallel-size of at least 2")


def _batches(draft: Draft) -> None:
    model = draft["tensor_model_parallel_size"] * draft["pipeline_model_parallel_size"] * draft["context_parallel_size"]
    data_parallel = draft["actor_num_nodes"] * draft["actor_num_gpus_per_node"] // model
    micro, batch = draft["micro_batch_size"], draft["global_batch_size"]
    is_static = not draft["use_dynamic_batch_size"] and not draft["debug_rollout_only"]
    is_asked = draft.is_given("rollout_batch_size") or draft.is_given("global_batch_size")
    if is_static and is_asked and batch % (micro * data_parallel):
        raise UserError(
            f"global_batch_size {batch} cannot be divided by {micro * data_parallel}",
            why=f"micro_batch_size × data-parallel size = {micro} × {data_parallel} = {micro * data_parallel}",
            fix="change --global-batch-size or --micro-batch-size, or pack by tokens with --use-dynamic-batch-size "
            "--max-tokens-per-gpu",
        )
    if draft["over_sampling_batch_size"] < draft["rollout_batch_size"]:
        raise UserError(
            f"--over-sampling-batch-size {draft['over_sampling_batch_size']} is less than --rollout-batch-size "
            f"{draft['rollout_batch_size']}",
            fix="let it be at least as large",
        )


def _lengths(draft: Draft) -> None:
    cap, context = draft["seq_length"], draft["rollout_max_context_len"]
    for dest in ("rollout_max_context_len", "eval_max_context_len"):
        if cap is not None and draft[dest] is not None and draft[dest] > cap:
            raise UserError(
                f"{option_of(dest)} {draft[dest]} is more than --seq-length {cap}",
                why="--seq-length is the hard cap of prompt plus response",
                fix="lower the first or raise the second",
            )
    prompt = draft["rollout_max_prompt_len"]
    if context is not None and prompt is not None and prompt > context - 1:
        raise UserError(
            f"--rollout-max-prompt-len {prompt} leaves no token to generate",
            why=f"the context is {context} tokens (--rollout-max-context-len or --seq-length)",
            fix=f"pass at most {context - 1}",
        )


def _algorithm(draft: Draft) -> None:
    estimator = draft["advantage_estimator"]
    if draft["kl_coef"] != 0 and draft["kl_loss_coef"] != 0:
        raise UserError(
            "--kl-coef and --kl-loss-coef are both set", fix="choose the penalty in the reward or in the loss"
        )
    if draft["kl_coef"] != 0 and estimator in ("grpo", "gspo", "cispo"):
        raise UserError(
            f"--kl-coef has no effect with --advantage-estimator {estimator}",
            why="its advantage is the group-normalised reward alone",
            fix="use --use-kl-loss --kl-loss-coef instead",
        )
    if estimator.startswith("reinforce_plus_plus") and not draft["normalize_advantages"]:
        raise UserError(f"--advantage-estimator {estimator} needs --normalize-advantages")
    if draft["use_rollout_logprobs"] and draft["use_tis"]:
        raise UserError(
            "--use-rollout-logprobs and --use-tis exclude each other",
            why="with the engine's log-probs as the old policy's there is no mismatch left to correct",
            fix="choose one",
        )
    if draft["tis_clip_low"] > draft["tis_clip"]:
        raise UserError(f"--tis-clip-low {draft['tis_clip_low']:g} is more than --tis-clip {draft['tis_clip']:g}")
    if draft["eps_clip_c"] is not None and estimator == "cispo":
        raise UserError(
            "--eps-clip-c has no effect with --advantage-estimator cispo",
            why="CISPO clips the importance weight, not the loss",
            fix="leave it out",
        )
    if draft["get_mismatch_metrics"] and draft["custom_tis_function_path"] is None:
        raise UserError("--get-mismatch-metrics needs --custom-tis-function-path")
    if draft["loss_type"] == "custom_loss" and draft["custom_loss_function_path"] is None:
        raise UserError("--loss-type custom_loss needs --custom-loss-function-path")
    if draft["loss_type"] == "sft_loss" and draft["n_samples_per_prompt"] != 1:
        raise UserError(
            f"--loss-type sft_loss with --n-samples-per-prompt {draft['n_samples_per_prompt']}",
            why="supervised fine-tuning trains on the data's own answers, one per prompt",
            fix="pass --n-samples-per-prompt 1",
        )
    if draft["only_train_params_name_list"] and draft["freeze_params_name_list"]:
        raise UserError(
            "--only-train-params-name-list and --freeze-params-name-list exclude each other", fix="give one"
        )
    if draft["use_checkpoint_opt_param_scheduler"] and draft["override_opt_param_scheduler"]:
        raise UserError(
            "--use-checkpoint-opt-param-scheduler and --override-opt-param-scheduler exclude each other",
            fix="give the first to keep the checkpoint's settings; without either, those of the flags are taken",
        )
    if draft["update_weight_transport"] == "disk" and draft["update_weight_disk_dir"] is None:
        raise UserError("--update-weight-transport disk needs --update-weight-disk-dir")
    if draft["offload_optimizer_states"] and draft["optimizer_cpu_offload"]:
        raise UserError(
            "--offload-optimizer-states and --optimizer-cpu-offload exclude each other",
            why="with the second the moments stay in host memory, and so does the step",
            fix="give the first for a step on the GPU, or the second",
        )
    if draft["min_lr"] > draft["lr"]:
        raise UserError(f"--min-lr {draft['min_lr']:g} is more than --lr {draft['lr']:g}")
    if draft["lr_warmup_init"] > draft["lr"]:
        raise UserError(f"--lr-warmup-init {draft['lr_warmup_init']:g} is more than --lr {draft['lr']:g}")


def _evaluation(draft: Draft) -> None:
    has_data = bool(draft["eval_prompt_data"] or draft["eval_config"])
    if draft["eval_interval"] is not None and not has_data and draft["eval_function_path"] is None:
        raise UserError(
            "--eval-interval needs evaluation data", fix="pass --eval-prompt-data NAME PATH or --eval-config"
        )
    samples, most = draft["n_samples_per_eval_prompt"], max(draft["eval_pass_k"] or (0,))
    if most > samples and has_data and not draft["eval_config"]:
        raise UserError(
            f"--eval-pass-k {most} needs at least as many samples of each evaluation prompt",
            why=f"--n-samples-per-eval-prompt is {samples}",
            fix=f"pass --n-samples-per-eval-prompt {most} or more, or a smaller --eval-pass-k",
        )


def _names(draft: Draft) -> None:
    for dest, fix in (("run_name", "put the path into --output-dir"), ("stage", "give it a single word")):
        name = draft[dest]
        if name is not None and (name in ("", ".", "..") or "/" in name):
            raise UserError(
                f"{option_of(dest)} {name!r} is no name of a folder",
                why="the run folder is --output-dir/--run-name, one level deep, so that tensorboard finds all runs; "
                "folders of a stage are inside",
                fix=f"leave the slash out; {fix}",
            )


def _debug(draft: Draft) -> None:
    if draft["debug_rollout_only"] and draft["debug_train_only"]:
        why = "--load-debug-rollout-data implies --debug-train-only" if draft["load_debug_rollout_data"] else ""
        raise UserError("--debug-rollout-only and --debug-train-only exclude each other", why=why, fix="choose one")
    if draft["debug_rollout_only"] and draft["loss_type"] == "sft_loss":
        raise UserError(
            "--debug-rollout-only with --loss-type sft_loss has nothing to do",
            why="supervised fine-tuning generates nothing",
            fix="leave one of them out",
        )
    for dest in ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data", "save_hf"):
        try:
            # evaluations are written among the rollouts, under a name instead of a number
            for rollout_id in (0, "eval_0") if dest == "save_debug_rollout_data" else (0,):
                (draft[dest] or "").format(rollout_id=rollout_id)
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"{option_of(dest)} {draft[dest]} cannot be filled in",
                why=f"the only field is {{rollout_id}}; {type(error).__name__}: {error}",
                fix="write {{ and }} for braces that are meant",
            ) from error
    for dest in ("save_debug_rollout_data", "load_debug_rollout_data", "save_debug_train_data"):
        pattern = draft[dest] or ""
        if (
            pattern
            and pattern.format(rollout_id=0) == pattern.format(rollout_id=1)
            and draft["num_rollout"] not in (None, 0, 1)
        ):
            raise UserError(
                f"{option_of(dest)} {draft[dest]} has no {{rollout_id}} in it",
                why="every rollout would have the same file",
                fix="put {rollout_id} into the name, e.g. dump_{rollout_id}.pt",
            )


def check_complete(draft: Draft) -> None:
    """Refuse what cannot be launched: something that a run needs is missing.

    Raises:
        UserError: names the flag.
    """
    if not draft.is_given("rollout_batch_size"):
        raise UserError("--rollout-batch-size is required", why="it is the number of prompts per rollout")
    rollouts, epochs = draft["num_rollout"], draft["num_epoch"]
    if rollouts is None and epochs is None:
        raise UserError("--num-rollout is required", fix="pass --num-rollout, or --num-epoch to go over the data")
    if rollouts is not None and epochs is not None:
        raise UserError("--num-rollout and --num-epoch both say how long to train", fix="give one of them")
    if draft["hf_checkpoint"] is None:
        raise UserError(
            "--hf-checkpoint is required",
            why="tokenizer and architecture are read from it",
            fix="pass a Hugging Face model directory (config.json, *.safetensors, tokenizer)",
        )
    if rollouts == 0 and not (draft["eval_prompt_data"] or draft["eval_config"]):
        raise UserError(
            "--num-rollout 0 only evaluates, but there is no evaluation data", fix="pass --eval-prompt-data"
        )
    draws_prompts = draft["rollout_global_dataset"] and draft["data_source_path"] is None and rollouts != 0
    if draws_prompts and draft["prompt_data"] is None and draft["load_debug_rollout_data"] is None:
        raise UserError(
            "--prompt-data is required",
            fix="pass a JSONL or Parquet file; --disable-rollout-global-dataset when the rollout function has its own",
        )
    start = draft["start_rollout_id"]
    if rollouts and start is not None and start >= rollouts:
        raise UserError(
            f"--start-rollout-id {start} leaves nothing to train: --num-rollout is {rollouts}",
            why="--num-rollout counts all rollouts of the run, those before the start included",
            fix=f"pass --num-rollout of at least {start + 1}, or leave --start-rollout-id out",
        )
    has_samples = draft["load_debug_rollout_data"] is not None or draft["loss_type"] == "sft_loss"
    if draft["debug_train_only"] and not has_samples and rollouts != 0:
        raise UserError(
            "--debug-train-only has nothing to train on",
            why="no engine is started, and no samples are loaded",
            fix="pass --load-debug-rollout-data PATTERN, written before by --save-debug-rollout-data",
        )
    generates = not draft["debug_train_only"] and draft["loss_type"] != "sft_loss" and rollouts != 0
    if generates and draft["rollout_num_gpus"] == 0:
        raise UserError("--rollout-num-gpus is 0: there would be no engine", fix="pass at least 1")
