"""Megatron checkpoint → Hugging Face directory; the same as `slime convert megatron-to-hf`.

python tools/convert_torch_dist_to_hf.py --input-dir CKPT/iter_0000010 --origin-hf-dir MODEL \\
    --output-dir OUT
"""

import sys

from slime.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
