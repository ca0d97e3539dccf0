"""Greedy tokens of a GGUF file, by llama.cpp: a script for whatever interpreter has the package
xllamacpp.

python llama_cpp_generate.py FILE '["a prompt", …]' NUM_TOKENS

The last line of stdout is [[number of prompt tokens, [token, …]], …].
"""

from __future__ import annotations

import json
import sys

import xllamacpp


def main(path: str, prompts: str, count: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.warmup = 512, 1, False
    params.cpuparams.n_threads = 1
    # halves would round keys and values
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    server = xllamacpp.Server(params)
    body = {
        "n_predict": int(count),
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
        "verbose": True,
    }
    answers = [
        server.handle_completions({"prompt": prompt, **body, "return_tokens": True})
        for prompt in json.loads(prompts)
    ]
    print(
        json.dumps(
            [
                [answer["usage"]["prompt_tokens"], answer["__verbose"]["tokens"]]
                for answer in answers
            ]
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
