"""Check over HTTP whether an external engine fits the run. Imports no Ray.

    GET  /model_info    the model: architecture, and its directory if this host sees it
    GET  /server_info   kind of engine, dtype, context, start options
    POST /tokenize      a line of text, which must give the tokens of --hf-checkpoint

The following push and its canary prove that the weights have the right shapes and that the engine
computes the trainer's log-probs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime import deadlines
from slime.config.addresses import engine_url
from slime.config.config import Config
from slime.engines import keys
from slime.engines.api import WEIGHT_LOADER, WEIGHT_PROBE, EngineClient, EngineError
from slime.engines.keys import VARIABLE
from slime.engines.wire.abilities import Abilities
from slime.errors import UserError
from slime.models import family_of
from slime.models.spec import ModelSpec, check_same_model, read_hf_config
from slime.models.vision import seeing
from slime.prompts.tokenizer import load_tokenizer

_LINE = "The answer to 3 + 4 is 7, “naïve” or not.\n\tx = {'a': [1, 2]}"


@dataclass(frozen=True)
class EngineInfo:
    """What an engine reports about itself.

    Attributes:
        model: its ``/model_info``; server: its ``/server_info``.
        tokens: its tokens of `_LINE`; None if it does not tokenize.
    """

    model: Mapping[str, Any]
    server: Mapping[str, Any]
    tokens: list[int] | None = None

    @property
    def abilities(self) -> Abilities:
        return Abilities.read(self.server)


def fetch_engine_info(url: str) -> EngineInfo:
    """Ask an engine about itself.

    Raises:
        UserError: nothing answers there, or something other than an engine.
    """

    async def questions() -> EngineInfo:
        async with EngineClient(url, timeout=deadlines.ENGINE_FIT_ANSWER) as engine:
            model = await engine.get("/model_info")
            server = await engine.get("/server_info")
            try:
                answer = await engine.post(
                    "/tokenize", {"prompt": _LINE, "add_special_tokens": False}
                )
            except EngineError:  # the engine has no tokenizer, or its version lacks the route
                answer = {}
            return EngineInfo(model, server, answer.get("tokens"))

    try:
        info = asyncio.run(questions())
    except EngineError as error:
        if error.status == 401:
            raise UserError(
                f"the engine at {url} requires another key",
                why=error.what,
                fix=f"begin the run with {VARIABLE} set to the key that the engine was started "
                "with",
            ) from error
        raise UserError(
            f"no engine answers at {url}",
            why=error.what,
            fix="start it first (slime serve DIR --control-routes, python -m slime.embedded,"
            " sglang.launch_server), wait until it answers, and name its address as it is reached "
            "from this host",
        ) from error
    if info.model.get("is_generation") is not True or not info.server.get("dtype"):
        raise UserError(
            f"the server at {url} is not a generating engine",
            why=f"its /model_info is {dict(info.model)!r:.300}",
            fix="name the engine itself, not a router",
        )
    return info


def check_fit(
    config: Config,
    url: str,
    info: EngineInfo,
    other: tuple[str, EngineInfo] | None,
    warn: Callable[[str], None],
) -> None:
    """Check that an engine fits the run.

    Args:
        other: URL and info of an engine of the run; None if there is none yet.
        warn: called with warnings about possible mistakes.
    Raises:
        UserError: names the address and the mismatch.
    """
    _check_model(config, url, info.model)
    _check_tokens(config, url, info.tokens)
    _check_server(config, url, info)
    if other is not None:
        _check_likeness(url, info, *other)
        if info.server.get("random_seed") == other[1].server.get("random_seed"):
            warn(
                f"{url} was started with the same random_seed as {other[0]}: samples of one prompt "
                "that are spread over both may be identical; another --random-seed helps"
            )


def _check_model(config: Config, url: str, info: Mapping[str, Any]) -> None:
    flags = config.checkpoint
    wanted = read_hf_config(flags.model_dir)
    for name in ("model_type", "architectures"):
        if info.get(name) and wanted.get(name) and info[name] != wanted[name]:
            raise UserError(
                f"the engine at {url} serves another model than --hf-checkpoint",
                why=f"its {name} is {info[name]}, of {flags.model_dir} {wanted[name]}",
                fix="start it with the model of this run",
            )
    folder = Path(str(info.get("model_path")))
    if not (folder / "config.json").is_file():
        return  # on another host: the push checks it
    own, its = (
        family_of(path, flags.model_name).model_spec(path) for path in (flags.model_dir, folder)
    )
    try:
        check_same_model(own, its, folder)
    except UserError as error:
        raise UserError(
            f"the engine at {url} serves another model than --hf-checkpoint",
            why=error.why,
            fix="start it with that one",
        ) from error


def _check_tokens(config: Config, url: str, tokens: list[int] | None) -> None:
    if tokens is None:
        return
    trusted = config.checkpoint.trust_remote_code
    tokenizer = load_tokenizer(str(config.checkpoint.hf_checkpoint), trust_remote_code=trusted)
    own = tokenizer.encode(_LINE, add_special_tokens=False)
    if tokens != own:
        raise UserError(
            f"the engine at {url} has another tokenizer than --hf-checkpoint",
            why=f"it encodes a line as {tokens[:12]}…, and the run as {own[:12]}…",
            fix="start it with the tokenizer of this run",
        )


def _check_server(config: Config, url: str, engine: EngineInfo) -> None:
    info = engine.server
    longest = config.rollout.rollout_max_context_len
    context = info.get("context_length")
    seeing_spec = _seeing_spec(config)
    lacks: list[tuple[bool, str, str]] = [
        (
            bool(longest and context and longest > context),
            f"its context_length is {context}, and --rollout-max-context-len {longest}",
            "start it with a longer context",
        ),
        (
            config.rollout.deterministic and not info.get("enable_deterministic_inference"),
            "it is not deterministic, and --deterministic-rollout wants that",
            "start it with --deterministic (embedded) or --enable-deterministic-inference (SGLang)",
        ),
        (
            config.train.use_rollout_routing_replay
            and not info.get("enable_return_routed_experts"),
            "it does not return routed experts, which --use-rollout-routing-replay needs",
            "start it with --enable-return-routed-experts",
        ),
        (
            engine.abilities.check == "slices"
            and WEIGHT_PROBE not in (info.get("custom_weight_loader") or ()),
            "the run could not check which weights it holds",
            f"start it where slime is installed, with --custom-weight-loader {WEIGHT_PROBE} "
            f"{WEIGHT_LOADER}",
        ),
        (
            int(info.get("pp_size") or 1) > 1,
            f"its pp_size is {info.get('pp_size')}, and SGLang numbers a push's members by "
            "tensor-parallel rank only",
            "start it without --pp-size",
        ),
        (
            not engine.abilities.samples_exactly,
            "it accepts drafts that the policy would not have sampled",
            "start it without --speculative-accept-threshold-single and -acc",
        ),
        (
            info.get("disaggregation_mode") not in (None, "null"),
            f"it is a {info.get('disaggregation_mode')} server, one half of a pair",
            "start it without --disaggregation-mode",
        ),
    ]
    if seeing_spec is not None:
        lacks += image_faults(seeing_spec, engine)
    for is_so, why, fix in lacks:
        if is_so:
            raise UserError(f"the engine at {url} cannot take part", why=why, fix=fix)


def image_faults(spec: ModelSpec, engine: EngineInfo) -> list[tuple[bool, str, str]]:
    """Return faults of an engine with images of a model: whether it has the fault, why, and a
    fix."""
    abilities = engine.abilities
    return [
        (
            "linear_attention_freq" in spec.transformer and not abilities.sees_in_hybrids,
            f"it is {abilities.engine} {engine.server.get('version')}, which computes images of "
            "this model with one of the three rows of positions",
            "start a newer version (SGLang after 0.5.18) or the embedded engine, or leave "
            "--multimodal-keys out",
        ),
        (
            spec.has_bidirectional_images and not abilities.sees_both_ways,
            f"it is {abilities.engine}, in which tokens of an image of this model do not always "
            "attend to each other in both directions",
            "start the embedded engine, or leave --multimodal-keys out",
        ),
    ]


def _seeing_spec(config: Config) -> ModelSpec | None:
    """Return the architecture of a run that reads images; None for other runs."""
    path = config.checkpoint.hf_checkpoint
    if not config.images.multimodal_keys or path is None:
        return None
    family = family_of(path, config.checkpoint.model_name)
    return family.model_spec(seeing(read_hf_config(path)))


def _check_likeness(url: str, info: EngineInfo, other_url: str, other: EngineInfo) -> None:
    facts = [
        ("kind", info.abilities.engine, other.abilities.engine),
        ("dtype", info.server.get("dtype"), other.server.get("dtype")),
    ]
    for name, here, there in facts:
        if here != there:
            raise UserError(
                f"the engine at {url} is not like the others",
                why=f"its {name} is {here}, of {other_url} {there}; a push treats all alike",
                fix="start it like the others"
                + (f", with --dtype {there}" if name == "dtype" else ""),
            )


def external_urls(config: Config) -> list[str]:
    """Return the URLs of --rollout-external-engine-addrs, and register their API key."""
    flag = "--rollout-external-engine-addrs"
    urls = [engine_url(address, flag) for address in config.engine.rollout_external_engine_addrs]
    keys.register_external(*urls)
    return urls
