"""slime: reinforcement-learning post-training of language models."""

from slime import legacy_paths

__version__ = "0.1.0"

legacy_paths.install()
