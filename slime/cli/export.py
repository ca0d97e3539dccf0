"""`slime export`: a model as one GGUF file, for llama.cpp, Ollama and LM Studio.

slime export outputs/sums --gguf sums.gguf
ollama create sums -f <(echo FROM ./sums.gguf)          # or: llama-cli -m sums.gguf
"""

from __future__ import annotations

from pathlib import Path

from slime.checkpoints.gguf_export import hf_to_gguf
from slime.cli.arguments import Arguments
from slime.cli.model_source import add_model_arguments, model_directory, model_name
from slime.observe.run_folder import check_no_run_writes


def main(argv: list[str]) -> int:
    """Write the file and say where it is. Returns the exit status."""
    parser = Arguments("slime export", __doc__)
    add_model_arguments(parser)
    add = parser.add_argument
    add("--gguf", required=True, metavar="FILE", help="the file to write")
    add(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of the matrices (default: the model's)",
    )
    add(
        "--pre-tokenizer",
        help="llama.cpp's name of how text is cut into words, where it is not known here",
    )
    flags = parser.parse_args(argv)
    check_no_run_writes(Path(flags.gguf), "--gguf")
    directory = model_directory(flags.path, flags.hf_checkpoint)
    path = hf_to_gguf(
        directory, flags.gguf, flags.dtype, flags.pre_tokenizer, model_name(flags.path)
    )
    print(f"wrote {path} ({path.stat().st_size / 1e6:.3g} MB) from {directory}")
    return 0
