"""slime: reinforcement-learning post-training of language models."""

from typing import TYPE_CHECKING, Any

from slime.compat import import_paths

if TYPE_CHECKING:
    from slime.run.api import TrainingRun, train

__version__ = "0.1.0"
__all__ = ["TrainingRun", "train"]

import_paths.install()


def __getattr__(name: str) -> Any:
    """Return the Python interface (`slime.run.api`), imported at its first use: `slime --help` does
    not need it."""
    if name not in __all__:
        raise AttributeError(f"module 'slime' has no attribute '{name}'")
    from slime.run import api

    return getattr(api, name)
