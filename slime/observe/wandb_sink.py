"""Weights & Biases (the ``wandb`` extra). Imported only with ``--use-wandb``."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any

from slime.errors import UserError
from slime.files import json_safe, without_secrets
from slime.observe.run_folder import RunFolder

if TYPE_CHECKING:
    from slime.config.config import Config


class WandbSink:
    """One W&B run per run folder and stage; its id is kept there, so that resuming continues the same curves."""

    def __init__(self, config: Config, run: RunFolder) -> None:
        try:
            import wandb
        except ImportError as error:
            raise UserError("--use-wandb needs the package wandb", fix="pip install 'slime-rl[wandb]'") from error
        observe = config.observe
        if observe.wandb_key:
            wandb.login(key=observe.wandb_key, host=observe.wandb_host)
        options = wandb.Settings(console="off")  # our own logs are in the run folder; leave stdout alone
        if observe.wandb_host:
            options.base_url = observe.wandb_host  # also where the key comes from WANDB_API_KEY
        group = observe.wandb_group
        if group and not observe.disable_wandb_random_suffix:
            group = f"{group}-{_kept(run, 'wandb-suffix', secrets.token_hex(3))}"
        settings = {name: without_secrets(name, json_safe(value)) for name, value in vars(config.flat()).items()}
        self._run: Any = wandb.init(
            project=observe.wandb_project or "slime",
            entity=observe.wandb_team,
            group=group,
            name=f"{run.path.name}-{run.stage}" if run.stage else run.path.name,
            id=_kept(run, "wandb-id", secrets.token_hex(5), asked=observe.wandb_run_id),
            resume="allow",
            mode=observe.wandb_mode,
            dir=observe.wandb_dir or str(run.path),
            config=settings,
            settings=options,
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._run.log({**metrics, "step": step})

    def rewind(self, next_step: int) -> None:
        """W&B history cannot be cut; repeated steps show up as later points at the same ``step``."""

    def close(self) -> None:
        self._run.finish()


def _kept(run: RunFolder, name: str, fresh: str, asked: str | None = None) -> str:
    """A value that stays the same over resumes of this stage, unless another one is ``asked`` for."""
    path = run.path / f".{name}{'-' + run.stage if run.stage else ''}"
    if asked or not path.exists():
        path.write_text(asked or fresh)
    return path.read_text().strip()
