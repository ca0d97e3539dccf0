"""Hugging Face directory → Megatron checkpoint; the same as `slime convert hf-to-megatron`.

python tools/convert_hf_to_megatron.py --hf_model_path MODEL --save_path CKPT
"""

import sys

from slime.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
