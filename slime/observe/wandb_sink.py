"""Weights & Biases (the ``wandb`` extra). Imported only with ``--use-wandb``."""

from __future__ import annotations

import os
import secrets
import sys
from typing import TYPE_CHECKING, Any

from slime.errors import UserError
from slime.observe.run_folder import RunFolder
from slime.observe.trackers import kept, shown_name, shown_settings, tracker_package
from slime.processes.owner import will_hang
from slime.redact import redact_argv

if TYPE_CHECKING:
    from slime.config.config import Config


#: Advice if there is no server.
_OFFLINE = (
    "pass --wandb-mode offline (`wandb sync` uploads the run later), or leave --use-wandb out: "
    "metrics.jsonl and TensorBoard have the same numbers"
)


def check_key(config: Config) -> None:
    """Check before the launch that an online run has an API key. In a terminal, W&B asks for it.

    Raises:
        UserError: wandb is not installed, or there is no key.
    """
    wandb = tracker_package("wandb")
    observe = config.observe
    if (
        observe.wandb_key
        or (observe.wandb_mode or os.environ.get("WANDB_MODE") or "online") != "online"
    ):
        return
    try:
        wandb.login(host=observe.wandb_host, verify=False)
    except wandb.errors.Error as error:
        raise UserError(
            "--use-wandb: there is no API key for W&B",
            why="neither WANDB_API_KEY nor `wandb login` gave one, and there is no terminal to "
            f"ask in ({error})",
            fix=f"{_OFFLINE}; or set WANDB_API_KEY",
        ) from error


class WandbSink:
    """One W&B run per run folder and stage. The folder keeps its id, so that a resumed run
    continues the same curves."""

    def __init__(self, config: Config, run: RunFolder) -> None:
        wandb = tracker_package("wandb")
        observe = config.observe
        # the run folder has the logs; W&B need not capture stdout
        options = wandb.Settings(console="off")
        if observe.wandb_host:
            options.base_url = observe.wandb_host
        if observe.wandb_key:
            options.api_key = observe.wandb_key  # wandb.login would write it to ~/.netrc
        group = observe.wandb_group
        if group and not observe.disable_wandb_random_suffix:
            group = f"{group}-{kept(run, 'wandb-suffix', secrets.token_hex(3))}"
        argv = sys.argv
        sys.argv = redact_argv(argv)  # W&B stores it in its metadata
        try:
            self._run: Any = wandb.init(
                project=observe.wandb_project or "slime",
                entity=observe.wandb_team,
                group=group,
                name=shown_name(run),
                id=kept(run, "wandb-id", secrets.token_hex(5), asked=observe.wandb_run_id),
                resume="allow",
                mode=observe.wandb_mode,
                dir=observe.wandb_dir or str(run.path),
                config=shown_settings(config),
                settings=options,
            )
        except wandb.errors.Error as error:
            will_hang()
            raise UserError(
                "--use-wandb: W&B lets no run begin", why=str(error), fix=_OFFLINE
            ) from error
        finally:
            sys.argv = argv
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def rewind(self, next_step: int) -> None:
        """Do nothing: W&B cannot delete history, so repeated steps become later points of the same
        ``step``."""

    def close(self) -> None:
        self._run.finish()
