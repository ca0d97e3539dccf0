"""What parts of the trainer take at most, without torch: the memory plan counts with it too."""

from __future__ import annotations

#: Adam's moments that are on the device at a time with --offload-optimizer-states; one larger parameter is a bucket of
#: its own.
MOMENTS_BUCKET_BYTES = 512 * 1024 * 1024

#: What flash-attn-4 is for: major compute capabilities (Hopper and Blackwell, of data centres), dimensions of a head.
FLASH4_MAJORS, FLASH4_WIDEST = (9, 10), 128
