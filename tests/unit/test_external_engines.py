"""Who may join a run, who leaves it, and what their deaths mean; the servers are fakes, and no run
is started."""

from __future__ import annotations

import asyncio
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import web

from slime.cli import engines as command
from slime.cluster.command_inbox import FOLDER, CommandInbox, EngineCommand, send_command
from slime.cluster.engine_table import ALL_MEMORY, EngineEntry, EngineTable, State, external_engine
from slime.cluster.external_engines import ExternalEngines
from slime.cluster.waiting import ActorDied, NamedActor
from slime.config import Config, make_config
from slime.config.addresses import engine_url
from slime.embedded.weight_update import ABILITIES
from slime.engines.api import WEIGHT_PROBE, EngineError
from slime.engines.wire.abilities import SGLANG
from slime.errors import RunFailed, UserError
from slime.files import read_object
from tests.support import toy


class Server:
    """An engine that answers questions about itself. Knobs may be turned while it runs."""

    def __init__(self, model: Path) -> None:
        own = json.loads((model / "config.json").read_text())
        self.model: dict[str, Any] = {
            "model_path": str(model), "is_generation": True, "model_type": own["model_type"],
            "architectures": own["architectures"],
        }  # fmt: skip
        self.server: dict[str, Any] = {
            "abilities": ABILITIES.to_json(),
            "dtype": "bfloat16",
            "context_length": 64,
            "random_seed": 1,
            "enable_deterministic_inference": False,
        }
        self.tokens: list[int] | None = None
        self.requests = 0
        self.aborted = 0
        self.url = ""

    async def answer(self, request: web.Request) -> web.Response:
        if request.path == "/abort_request":
            self.aborted += 1
            self.requests = max(0, self.requests - 1)
        if request.path == "/tokenize" and self.tokens is None:
            raise web.HTTPNotFound
        loads = {"loads": [{"num_running_reqs": self.requests, "num_waiting_reqs": 0}]}
        answers = {"/model_info": self.model, "/server_info": self.server, "/v1/loads": loads}
        return web.json_response(answers.get(request.path, {"tokens": self.tokens}))


@contextmanager
def served(server: Server) -> Iterator[Server]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.2)

    async def start() -> None:
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()

    asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield server
    finally:
        asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("model"), "llama")


@pytest.fixture
def serve(model: Path) -> Iterator[Callable[..., Server]]:
    """``serve(…)``: a `Server` that runs until the end of the test; keywords go into its
    /server_info."""
    with ExitStack() as stack:
        yield lambda **info: stack.enter_context(served(_with(Server(model), info)))


def _with(server: Server, info: dict[str, Any]) -> Server:
    server.server |= info
    return server


class FakeRun:
    """Two engines of the run's own and a router. ``log`` records what is done to them."""

    def __init__(
        self, config: Config, inbox: CommandInbox | None = None, *, shares_gpus: bool = False
    ) -> None:
        self.log: list[str] = []
        self.routers: Any = SimpleNamespace(
            urls={"policy": "http://router:1"},
            remove_worker=lambda url: self.log.append(f"out {url}"),
        )
        self.answers_alone = True
        self.table = EngineTable([EngineEntry(n, (f"engine-{n}",)) for n in (0, 1)])
        for n in (0, 1):
            self.table.mark_launched(n, [f"http://127.0.0.1:{n + 1}"])
        self.external = ExternalEngines(config, self.table, self, inbox, shares_gpus=shares_gpus)

    def drop_fleets(self) -> None: ...

    def stop_engine(self, engine: EngineEntry) -> None:
        self.log.append(f"end {engine.name}")

    def admit(self) -> None:
        for engine in self.table.in_state(State.REJOINING):
            self.table.mark_admitted(engine.number)

    def join(self, url: str) -> EngineEntry:
        """As after `add` and a push."""
        engine = self.table.mark_joined(url, 1)
        self.table.rejoin()
        self.table.mark_admitted(engine.number)
        return engine


@pytest.fixture
def make_run(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., FakeRun]]:
    made: list[FakeRun] = []

    def make(
        inbox: CommandInbox | None = None, *, shares_gpus: bool = False, **flags: Any
    ) -> FakeRun:
        flags = {"hf_checkpoint": str(model), **flags}
        made.append(FakeRun(make_config(**flags), inbox, shares_gpus=shares_gpus))
        return made[-1]

    monkeypatch.setattr("slime.deadlines.EXTERNAL_ENGINES_DRAIN_POLL", 0.0)
    yield make
    for run in made:
        run.external.close()


MakeRun = Callable[..., FakeRun]
Serve = Callable[..., Server]

# -- joining ---------------------------------------------------------------------------------------


def test_it_joins_with_the_next_push(make_run: MakeRun, serve: Serve) -> None:
    run, server = make_run(), serve()
    said = run.external.add(server.url.removeprefix("http://"))
    assert said == f"{server.url} gets weights with the next push, then requests"
    [engine] = run.table.in_state(State.STARTED)
    assert engine.url == server.url and engine not in run.table.policy
    run.table.rejoin()
    assert engine in run.table.policy and not run.table.to_release([engine], ALL_MEMORY)
    assert run.table.mark_admitted(engine.number) >= 0
    assert run.table.pop_seconds_away() == [], "it is no restart"
    with pytest.raises(UserError, match="is an engine of this run already"):
        run.external.add(server.url)


def test_without_a_trainer_it_has_requests_at_once(make_run: MakeRun, serve: Serve) -> None:
    run, server = make_run(debug_rollout_only=True), serve()
    assert "there is no trainer" in run.external.add(server.url)
    assert [engine.url for engine in run.table.in_state(State.SERVING)][-1] == server.url


def test_an_engine_of_several_ranks(make_run: MakeRun, serve: Serve) -> None:
    loaders = ["slime.engines.sglang.weight_probe.report"]
    run = make_run()
    server = serve(abilities=None, version="0.5.16", tp_size=4, custom_weight_loader=loaders)
    run.external.add(server.url)
    assert run.table.in_state(State.STARTED)[0].ranks == 4


@pytest.mark.parametrize(
    ("info", "flags", "why"),
    [
        ({"context_length": 16}, {"rollout_max_context_len": 32}, "context_length is 16"),
        ({}, {"deterministic_rollout": True}, "not deterministic"),
        ({"abilities": SGLANG.to_json()}, {}, "could not check which weights"),
        ({"pp_size": 2}, {}, "pp_size is 2"),
        ({"disaggregation_mode": "decode"}, {}, "one half of a pair"),
        (
            {
                "abilities": None,
                "version": "0.5.16",
                "custom_weight_loader": [WEIGHT_PROBE],
                "speculative_accept_threshold_acc": 0.9,
            },
            {},
            "accepts drafts that the policy would not",
        ),
    ],
)
def test_what_it_was_started_with_does_not_fit(
    info: dict[str, Any], flags: dict[str, Any], why: str, make_run: MakeRun, serve: Serve
) -> None:
    run, server = make_run(**flags), serve(**info)
    with pytest.raises(UserError, match=server.url) as caught:
        run.external.add(server.url)
    assert (
        why in caught.value.why
        and "start it" in caught.value.fix
        and not run.table.in_state(State.STARTED)
    )


def test_another_model_is_refused_by_its_name_and_by_its_shape(
    make_run: MakeRun, serve: Serve, model: Path, tmp_path: Path
) -> None:
    run, server = make_run(), serve()
    server.model["model_type"] = "qwen3"
    with pytest.raises(UserError, match="serves another model than --hf-checkpoint"):
        run.external.add(server.url)
    server.model["model_type"] = "llama"
    other = json.loads((model / "config.json").read_text()) | {"intermediate_size": 96}
    (tmp_path / "config.json").write_text(json.dumps(other))
    server.model["model_path"] = str(tmp_path)
    with pytest.raises(UserError, match="serves another model than --hf-checkpoint") as caught:
        run.external.add(server.url)
    assert "96" in caught.value.why


def test_another_tokenizer_is_refused(make_run: MakeRun, serve: Serve) -> None:
    run, server = make_run(), serve()
    server.tokens = [1, 2, 3]
    with pytest.raises(UserError, match="another tokenizer"):
        run.external.add(server.url)


def test_engines_must_be_alike(make_run: MakeRun, serve: Serve) -> None:
    first, second = serve(), serve(dtype="float32", random_seed=2)
    run = make_run(rollout_external_engine_addrs=(first.url, second.url))
    table = EngineTable(unlaunched(first.url, second.url))
    external = ExternalEngines(run.external.config, table, run, None, shares_gpus=False)
    with pytest.raises(UserError, match=f"{second.url} is not like the others") as caught:
        external.check_named()
    assert "--dtype bfloat16" in caught.value.fix
    second.server["dtype"] = "bfloat16"
    external.check_named()


def unlaunched(*urls: str) -> list[EngineEntry]:
    return [external_engine(number, url) for number, url in enumerate(urls)]


def test_equal_seeds_are_warned_of(make_run: MakeRun, serve: Serve) -> None:
    run, first, second = make_run(), serve(), serve()
    run.join(first.url)
    run.table.mark_left(0)
    run.table.mark_left(1)
    assert "same random_seed" in run.external.add(second.url)


def test_who_does_not_answer_is_named(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match=r"no engine answers at http://127\.0\.0\.1:9"):
        make_run().external.add("127.0.0.1:9")


def test_where_memory_is_shared_nobody_joins(make_run: MakeRun, serve: Serve) -> None:
    server = serve()
    with pytest.raises(UserError, match=f"{server.url} cannot take part with --colocate"):
        make_run(shares_gpus=True).external.add(server.url)
    run = make_run()
    run.answers_alone = False
    with pytest.raises(UserError, match="prefill and decode"):
        run.external.add(server.url)


def test_the_router_is_no_engine(make_run: MakeRun) -> None:
    with pytest.raises(UserError, match="is the router of this run"):
        make_run().external.add("router:1")


_STRANGE = ["http://[::1", "h" * 64 + ".example:1"]


@pytest.mark.parametrize(
    "address",
    ["nonsense", "host", "https://host:1", "host:1/v1", "host:x", "a b:1", "u@host:1", *_STRANGE],
)
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(UserError, match="is no address of an engine"):
        engine_url(address, "here")


def test_flags_that_cannot_be() -> None:
    with pytest.raises(UserError, match=r"names http://a:1 2 times"):
        make_config(rollout_external_engine_addrs=("a:1", "http://a:1"))
    with pytest.raises(UserError, match="is no address"):
        make_config(rollout_external_engine_addrs=("a",))
    assert make_config(rollout_external_engine_addrs=("a:1",)).cluster.rollout_num_gpus == 0
    assert (
        make_config(
            rollout_external_engine_addrs=("a:1",), rollout_num_gpus=2
        ).cluster.rollout_num_gpus
        == 2
    )


def test_options_of_engines_that_the_run_does_not_start_are_warned_of() -> None:
    options = {"sglang_mem_fraction_static": 0.8, "sglang_pp_size": 2, "sglang_dtype": "bfloat16"}
    flags: dict[str, Any] = {"rollout_engine": "sglang", **options}
    flags["rollout_num_gpus_per_engine"] = 2
    external = {"rollout_external_engine_addrs": ("a:1",)}
    [warning] = make_config(**flags, **external, router_policy="random").warnings
    assert warning.endswith(
        "left out: --rollout-num-gpus-per-engine, --sglang-mem-fraction-static, --sglang-pp-size"
    )
    for others in ({**external, "rollout_num_gpus": 2}, {"rollout_num_gpus": 2}):
        assert make_config(**flags, **others).warnings == ()
    [warning] = make_config(**external, embedded_max_slots=3, rollout_engine="embedded").warnings
    assert warning.endswith("left out: --embedded-max-slots")


# -- leaving ---------------------------------------------------------------------------------------


def test_who_leaves_has_its_requests_come_back(make_run: MakeRun, serve: Serve) -> None:
    run, server = make_run(), serve()
    run.join(server.url)
    server.requests = 3
    assert run.external.remove(server.url) == f"{server.url} has left"
    assert run.log == [f"out {server.url}"] and server.aborted == 3 and not server.requests
    assert server.url not in [engine.url for engine in run.table.policy]
    with pytest.raises(UserError, match="is no engine of this run"):
        run.external.remove(server.url)


def test_an_engine_of_its_own_is_ended(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run()
    monkeypatch.setattr(ExternalEngines, "_drain", lambda self, url: True)
    assert (
        "engine-1 (http://127.0.0.1:2) has left, and its server was stopped"
        in run.external.remove("engine-1")
    )
    assert run.log == ["out http://127.0.0.1:2", "end engine-1"]
    with pytest.raises(UserError, match=r"engine-0 .* is the last engine that serves"):
        run.external.remove("127.0.0.1:1")


def test_one_that_joins_may_leave_before_it_serves(make_run: MakeRun, serve: Serve) -> None:
    run, server = make_run(), serve()
    run.external.add(server.url)
    run.external.remove(server.url)
    assert run.log == [] and not run.table.in_state(State.STARTED) and not server.aborted


def test_one_that_is_restarted_cannot_leave(make_run: MakeRun) -> None:
    run = make_run(use_fault_tolerance=True)
    run.table.mark_lost(1, "was killed")
    with pytest.raises(UserError, match="engine-1 cannot leave while it is down"):
        run.external.remove("engine-1")


# -- death -----------------------------------------------------------------------------------------


def dead() -> Future[Any]:
    answer: Future[Any] = Future()
    error = EngineError("http://ext:1", "/health failed: ClientConnectorError")
    error.__cause__ = ConnectionRefusedError()
    answer.set_exception(error)
    return answer


def slow() -> Future[Any]:
    answer: Future[Any] = Future()
    error = EngineError("http://ext:1", "/health gave no answer within 5 s")
    error.__cause__ = TimeoutError()
    answer.set_exception(error)
    return answer


def answering(run: FakeRun, *answers: Future[Any]) -> None:
    """What http://ext:1 says, question by question."""
    left = list(answers)
    fleet = SimpleNamespace(
        urls=("http://ext:1",), start_get=lambda *_: left.pop(0), close=lambda: None
    )
    run.external._liveness._fleet = fleet  # type: ignore[assignment]


def test_without_fault_tolerance_its_death_ends_the_run(make_run: MakeRun) -> None:
    run = make_run()
    run.join("http://ext:1")
    answering(run, dead(), dead())
    run.external.poll()
    # the first answer; another question, as one may meet a connection that was closed
    run.external.poll()
    with pytest.raises(
        RunFailed, match="the external engine http://ext:1 no longer answers"
    ) as caught:
        run.external.poll()
    assert "--use-fault-tolerance" in caught.value.fix


def test_with_it_the_run_goes_on_and_it_may_come_back(
    make_run: MakeRun, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    run = make_run(use_fault_tolerance=True)
    run.join("http://ext:1")
    answering(run, dead(), dead())
    run.external.poll_for_deaths()
    assert run.log == ["out http://ext:1"] and run.table.num_lost == 1
    assert len(run.table.policy) == 2 and "engines left: 2" in caplog.text
    run.join("http://ext:1")


def test_one_that_was_lost_behind_the_routers_back_is_taken_out_later(make_run: MakeRun) -> None:
    """Back alive, it would get requests but no weights."""
    run = make_run(use_fault_tolerance=True)
    taken_out, run.routers.remove_worker = run.routers.remove_worker, no_answer
    run.external.drop(run.join("http://ext:1"), "hangs")
    with pytest.raises(UserError, match="cannot leave now: the router"):
        run.external.remove(run.join("http://ext:2").url)
    run.routers.remove_worker = taken_out
    run.external.poll()
    assert run.log == ["out http://ext:1"]


def no_answer(url: str) -> None:
    raise EngineError("http://router:1", "/workers gave no answer within 10 s")


def test_numbers_are_not_given_twice(make_run: MakeRun) -> None:
    """The slots of the engines that were started with the run go by them."""
    run = make_run()
    run.table.mark_left(1)
    assert run.table.mark_joined("http://ext:1", 4).number == 2


def test_newcomers_are_not_blamed_for_the_death_of_a_trainer(make_run: MakeRun) -> None:
    run = make_run()
    run.table.mark_joined("http://ext:1", 1)
    run.table.rejoin()
    with pytest.raises(ActorDied), run.external.drop_newcomers_on_failure():
        raise ActorDied("trainer-0 died").naming(NamedActor("trainer-0"))
    assert run.table.num_lost == 0 and len(run.table.policy) == 3


def test_who_is_slow_lives(make_run: MakeRun) -> None:
    run = make_run()
    run.join("http://ext:1")
    answering(run, *(slow() for _ in range(4)))
    for _ in range(3):
        run.external.poll()
    run.external.poll_for_deaths()
    assert len(run.table.policy) == 3


def test_the_last_one_ends_the_run(make_run: MakeRun) -> None:
    run = make_run(use_fault_tolerance=True)
    engine = run.join("http://ext:1")
    run.table.mark_left(0)
    run.table.mark_left(1)
    with pytest.raises(RunFailed, match="http://ext:1 hangs") as caught:
        run.external.drop(engine, "hangs")
    assert caught.value.why == "it was the last engine"


def test_a_push_that_fails_of_a_newcomer_is_repeated_without_it(make_run: MakeRun) -> None:
    run = make_run()
    run.table.mark_joined("http://ext:1", 1)
    run.table.rejoin()
    with pytest.raises(UserError, match="shapes differ"), run.external.drop_newcomers_on_failure():
        raise UserError("shapes differ")
    assert run.table.num_lost == 1 and len(run.table.policy) == 2
    with pytest.raises(UserError, match="shapes differ"), run.external.drop_newcomers_on_failure():
        raise UserError("shapes differ")
    assert run.table.num_lost == 1, "then it is nobody's fault, and the push is not repeated"


# -- orders ----------------------------------------------------------------------------------------


def order(run: Path, name: str, **words: str) -> Path:
    path = run / FOLDER / f"{name:0>16}.order.json"
    path.write_text(json.dumps(words))
    return path


def test_orders_are_obeyed_and_answered(make_run: MakeRun, serve: Serve, tmp_path: Path) -> None:
    run, server = make_run(CommandInbox(tmp_path)), serve()
    order(tmp_path, "1", verb="add", url=server.url)
    order(tmp_path, "2", verb="add", url=server.url)
    order(tmp_path, "3", verb="dance")
    order(tmp_path, "4", verb="list")
    run.external.poll()
    answers = [read_object(tmp_path / FOLDER / f"{n:0>16}.answer.json") for n in (1, 2, 3, 4)]
    assert "next push" in answers[0]["said"] and "already" in answers[1]["refused"]["what"]
    assert "unknown command 'dance'" in answers[2]["refused"]["what"]
    assert [(row["kind"], row["state"]) for row in answers[3]["engines"]] == [
        ("own", "serving"), ("own", "serving"), ("external", "joining"),
    ]  # fmt: skip
    assert not list((tmp_path / FOLDER).glob("*.order.json"))


def test_nobody_moves_during_a_push(make_run: MakeRun, serve: Serve, tmp_path: Path) -> None:
    run, server = make_run(CommandInbox(tmp_path)), serve()
    waiting = order(tmp_path, "1", verb="add", url=server.url)
    listing = order(tmp_path, "2", verb="list")
    with run.external.freeze_membership():
        run.external.poll()
        assert waiting.exists() and not listing.exists() and not run.table.in_state(State.STARTED)
    run.external.poll()
    assert not waiting.exists() and run.table.in_state(State.STARTED)


def test_what_others_put_there_harms_nobody(tmp_path: Path) -> None:
    order_desk = CommandInbox(tmp_path)
    folder = tmp_path / FOLDER
    (folder / "notes.txt").write_text("hello")
    order(tmp_path, "1", verb="x" * 5000)
    (folder / f"{2:016}.order.json").write_text("{")
    (folder / f"{3:016}.order.json").symlink_to("/dev/zero")
    os.mkfifo(folder / f"{4:016}.order.json")
    assert [one.verb for one in order_desk.take()] == ["", "", "", ""]
    for one in order_desk.take():
        order_desk.answer(one, {})
    assert order_desk.take() == []
    order(tmp_path, "5", verb="add")
    order_desk.close()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_an_idle_folder_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inbox = CommandInbox(tmp_path, clock=lambda: time.time() + 60)
    assert inbox.take() == []
    monkeypatch.setattr(Path, "iterdir", lambda self: pytest.fail("nothing has changed"))
    assert inbox.take() == []
    monkeypatch.undo()
    os.utime(tmp_path / FOLDER, (1, 1))
    order(tmp_path, "1", verb="list")
    assert inbox.take() == [EngineCommand(f"{1:016}", "list")]


def running(run: Path, state: str = "running", pid: int | None = None) -> Path:
    entry = {"state": state, "pid": pid or os.getpid(), "host": os.uname().nodename, "started": 1.0}
    (run / "run.json").write_text(json.dumps({"stages": {"": entry}}))
    return run


@pytest.mark.parametrize(
    ("state", "pid", "said"),
    [("finished", None, "finished"), ("running", 2**30, "its driver was killed")],
)
def test_a_run_that_does_not_run(state: str, pid: int | None, said: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"does not run: it is .*{said}"):
        send_command(running(tmp_path, state, pid), "list")


def test_a_folder_of_no_run_and_a_run_without_engines(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        send_command(tmp_path, "list")
    with pytest.raises(UserError, match="has no engines"):
        send_command(running(tmp_path), "list")


def test_an_order_that_nobody_answers_is_taken_back(tmp_path: Path) -> None:
    CommandInbox(running(tmp_path))
    with pytest.raises(RunFailed, match=r"no answer within 0 s, and the command was withdrawn"):
        send_command(tmp_path, "add", "host:1", seconds=0.0)
    assert not list((tmp_path / FOLDER).iterdir())


def test_the_command(
    make_run: MakeRun, serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a driver that looks about, in a thread."""
    run, server = make_run(CommandInbox(running(tmp_path))), serve()
    server.requests = 2
    run.table.mark_left(0)
    run.join(server.url)
    stop = threading.Event()

    def drive() -> None:
        while not stop.wait(0.02):
            run.external.poll()

    driver = threading.Thread(target=drive)
    driver.start()
    try:
        command.main([str(tmp_path)])
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == ["engine", "state", "requests", "url"]
        assert lines[1].split() == ["engine-1", "serving", "no", "answer", "http://127.0.0.1:2"]
        assert lines[2].split() == ["external", "serving", "2", server.url]
        with pytest.raises(UserError, match="already"):
            command.main(["add", str(tmp_path), server.url])
        command.main(["remove", str(tmp_path), server.url])
        assert capsys.readouterr().out == f"{server.url} has left\n"
    finally:
        stop.set()
        driver.join()
