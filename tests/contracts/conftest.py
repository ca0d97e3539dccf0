"""Servers and models that the contract tests share: one server of each implementation for the whole
session."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.contract_servers import ENGINES, Server
from tests.support.embedded_models import save_tiny_model


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("engines")
    group.addoption(
        "--engine", choices=["sglang"], help="run the shared contract against this engine only"
    )
    group.addoption(
        "--model", help="Hugging Face directory that it serves; default: a tiny random one"
    )
    group.addoption("--engine-flags", default="", help="more flags for its server")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --engine, only the tests that hold for every engine."""
    if config.getoption("--engine", default=None) is not None:
        items[:] = [item for item in items if item.path.name == "test_shared_contract.py"]


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny", "qwen3")


@pytest.fixture(scope="session")
def other_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "other", "qwen3", seed=7)


@pytest.fixture(scope="session", params=list(ENGINES))
def server(
    request: pytest.FixtureRequest, model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with ENGINES[request.param](
        model_dir, tmp_path_factory.mktemp("log") / "server.log"
    ) as running_server:
        yield running_server


@pytest.fixture
def engine(server: Server, model_dir: Path) -> Iterator[Server]:
    """The server, with the weights of ``model_dir``, version "0", nothing cached and nothing
    paused."""
    server.ok("/continue_generation")
    server.ok("/flush_cache")
    yield server
    server.ok("/continue_generation")
    server.ok("/update_weights_from_disk", {"model_path": str(model_dir), "weight_version": "0"})
