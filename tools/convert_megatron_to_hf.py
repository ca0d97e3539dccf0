"""Megatron checkpoint → Hugging Face directory; the same as `slime convert megatron-to-hf`.

python tools/convert_megatron_to_hf.py --load_path CKPT --hf_model_path MODEL --save_path OUT
"""

import sys

from slime.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
