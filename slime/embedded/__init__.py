"""The embedded engine: SGLang's HTTP protocol over slime's own continuous batching, on CPU or GPU,
with only torch.

    HTTP thread (aiohttp)                        engine thread
    server, generate_routes, control_routes  ──► engine ── scheduler ─┬─ kv_cache  slots, prefixes
    openai_routes, request parsing, text     ◄── (events per step)    ├─ model     prefill, decode
                                                                      ├─ sampler   tokens, log-probs
                                                                      └─ weights   names, updates

A request is one or more `Sequence`s; a sequence has a slot in the KV cache from its prefill to its
last token. Each step of the engine thread admits waiting sequences, prefills a bounded number of
tokens, and decodes one token for every running sequence.
"""
