"""Sizes of what the trainer works on at a time, without torch: the memory plan counts with them too."""

from __future__ import annotations

#: Adam's moments that are on the device at a time with --offload-optimizer-states; one larger parameter is a bucket of
#: its own.
MOMENTS_BUCKET_BYTES = 512 * 1024 * 1024
