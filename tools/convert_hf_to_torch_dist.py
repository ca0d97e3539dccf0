"""Hugging Face directory → Megatron checkpoint; the same as `slime convert hf-to-megatron`.

[torchrun --nproc-per-node 4] tools/convert_hf_to_torch_dist.py --hf-checkpoint MODEL --save CKPT
"""

import sys

from slime.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
