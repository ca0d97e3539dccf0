"""Routes of SGLang's server that this engine does not have: status 400, with the route and the reason.

Status 400, since OpenAI's client sends a request again that was answered with 501.
"""

from __future__ import annotations

from aiohttp import web

from slime.engines.embedded.fields import BadRequest

_EMBEDDING = "this is a model for generation, not for embeddings or classification"
_SESSIONS = "it keeps no sessions; prompts that share a prefix find it in the cache without one"
_ADAPTERS = "it has no LoRA adapters"
_PROFILE = "it has no profiler; py-spy shows what the engine thread does"

#: Path → why it is refused.
REFUSED = {
    "/encode": _EMBEDDING,
    "/classify": _EMBEDDING,
    "/v1/embeddings": _EMBEDDING,
    "/v1/classify": _EMBEDDING,
    "/v1/rerank": _EMBEDDING,
    "/v1/score": "ask /generate for input log-probs (return_logprob, logprob_start_len) instead",
    "/v1/responses": "it speaks /v1/chat/completions and /v1/completions",
    "/v1/messages": "it speaks /v1/chat/completions and /v1/completions",
    "/concate_and_append_request": "SGLang has taken this route out, too",
    "/open_session": _SESSIONS,
    "/close_session": _SESSIONS,
    "/load_lora_adapter": _ADAPTERS,
    "/load_lora_adapter_from_tensors": _ADAPTERS,
    "/unload_lora_adapter": _ADAPTERS,
    "/parse_function_call": "it has no tool-call parser; the text of an answer is returned as it is",
    "/separate_reasoning": "it has no reasoning parser; the text of an answer is returned as it is",
    "/start_profile": _PROFILE,
    "/stop_profile": _PROFILE,
    "/update_weights_from_ipc": "use /update_weights_from_tensor, _distributed or _disk",
    "/set_internal_state": "its settings come from its command line",
    "/configure_logging": "its settings come from its command line",
    "/metrics": "ask /v1/loads or /server_info for its counters",
}


async def _refuse(request: web.Request) -> web.Response:
    raise BadRequest(f"the embedded engine does not support {request.path}: {REFUSED[request.path]}")


routes = [web.route("*", path, _refuse) for path in REFUSED]
