"""The generate function for the environment of openenv_server.py, at OPENENV_URL."""

import os

from slime.environments.openenv import OpenEnvEnvironment

WORLD = OpenEnvEnvironment(
    os.environ.get("OPENENV_URL", "http://127.0.0.1:8000"),
    act=lambda text: {"text": text},
    observe=lambda seen: str(seen["text"]),
)
generate = WORLD.generate
