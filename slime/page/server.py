"""The server behind `slime watch`: the page and its JSON. It only reads, and answers only GET."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import orjson
from aiohttp import web

from slime import deadlines
from slime.errors import UserError
from slime.http_access import Handler, guard
from slime.log import get_logger
from slime.observe.catalog import phases
from slime.observe.run_data import Stage
from slime.page import stages
from slime.page.folders import RunWatch, runs_below
from slime.page.lanes import timeline_of, traced_steps
from slime.page.page_files import PAGE
from slime.page.rows import SORTS, Query, short_texts

logger = get_logger(__name__)

_MAX_SAMPLES = 200
_MAX_GROUPS = 100
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
_LARGEST = 1 << 62


class Runs:
    """The runs on display by the ids that the page uses; a thread keeps them up to date.

    Args:
        paths: run folders, or folders of runs, whose new runs are added as they appear.
        cache: folder of the indexes; None: temporary folders, deleted with this object.
    Raises:
        UserError: one of `paths` is neither.
    """

    def __init__(self, paths: list[Path], cache: Path | None = None) -> None:
        self._paths = paths
        self._cache = cache
        self._watches: dict[Path, RunWatch] = {}
        self._troubles: dict[Path, str] = {}
        self._stop = threading.Event()
        self._looking = threading.Lock()
        runs_below(paths)  # raise errors in the paths at once
        self._find()
        self._thread = threading.Thread(target=self._keep_fresh, name="watch", daemon=True)

    def _find(self) -> None:
        for given in self._paths:
            with contextlib.suppress(UserError):  # deleted meanwhile: continue with the others
                for path in runs_below([given]):
                    if path not in self._watches:
                        self._tried(path, lambda path=path: self._add(path))  # type: ignore[misc]

    def _add(self, path: Path) -> None:
        self._watches[path] = RunWatch(path, self._cache)

    def _refresh(self) -> None:
        for path, watch in self._watches.items():
            self._tried(path, watch.refresh)
        self._refreshed = time.monotonic()

    def _refresh_unless_closed(self) -> bool:
        """Keep curves up to date while an index is built, which may take minutes; False if the
        server ends."""
        if time.monotonic() - self._refreshed > deadlines.PAGE_POLL:
            self._refresh()
        return not self._stop.is_set()

    def _tried(self, path: Path, action: Callable[[], Any]) -> None:
        """Run ``action`` and log a failure once, so that an unreadable run does not affect the
        others."""
        try:
            action()
        # a deleted folder, a full disk, invalid files: tried again later
        except Exception as problem:
            trouble = f"{type(problem).__name__}: {problem}"
            if self._troubles.get(path) != trouble:
                self._troubles[path] = trouble
                logger.warning(
                    "could not read what is new in %s, and will try again: %s", path, trouble
                )

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread and close the indexes."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        for watch in self._watches.values():
            watch.index.close()

    def look(self) -> None:
        """Read everything new, once."""
        with self._looking:
            self._find()
            self._refresh()
            for path, watch in self._watches.items():
                if self._stop.is_set():
                    return
                update = functools.partial(
                    watch.index.update, watch.stages(), self._refresh_unless_closed
                )
                self._tried(path, update)

    def _keep_fresh(self) -> None:
        while not self._stop.is_set():
            try:
                self.look()
            except OSError as problem:  # a folder was deleted
                logger.warning("could not look for new runs: %s", problem)
            self._stop.wait(deadlines.PAGE_POLL)

    def all(self) -> dict[str, tuple[RunWatch, Stage]]:
        """Return id → run and stage, the newest first. An id is a hash of the folder's path, so
        that addresses of the page stay valid when the server restarts."""
        found = {}
        for watch in list(self._watches.values()):
            for stage in reversed(watch.stages()):
                found[f"{watch.key}.{stage.name}"] = (watch, stage)
        return found


class Pages:
    """The request handlers. They read files in threads, so that a long search does not block other
    requests."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs
        self._pool = ThreadPoolExecutor(4, thread_name_prefix="answer")

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def routes(self) -> list[web.RouteDef]:
        questions = {
            "runs": self._runs,
            "metrics": self._metrics,
            "phases": self._phases,
            "engines": self._engines,
            "timeline": self._timeline,
            "steps": self._steps,
            "groups": self._groups,
            "samples": self._samples,
            "sample": self._sample,
            "settings": self._settings,
            "differences": self._differences,
        }
        answers = [
            web.get(f"/api/{name}", self._answering(question))
            for name, question in questions.items()
        ]
        return [
            web.get("/", self._asset),
            web.get("/{name:[a-z_]+[.](?:js|css)}", self._asset),
            *answers,
        ]

    async def _asset(self, request: web.Request) -> web.Response:
        name = request.match_info.get("name", "index.html")
        file = PAGE.joinpath(name)
        if not file.is_file():
            raise web.HTTPNotFound
        return web.Response(
            text=file.read_text(encoding="utf-8"), content_type=_TYPES["." + name.split(".")[-1]]
        )

    def _answering(self, question: Callable[[web.Request], Any]) -> Handler:
        def encoded(request: web.Request) -> bytes:
            return orjson.dumps(question(request))

        async def answer(request: web.Request) -> web.Response:
            body = await asyncio.get_running_loop().run_in_executor(self._pool, encoded, request)
            response = web.Response(body=body, content_type="application/json")
            response.enable_compression()
            return response

        return answer

    def _asked(self, request: web.Request) -> tuple[RunWatch, Stage]:
        found = self.runs.all().get(request.query.get("run", ""))
        if found is None:
            raise web.HTTPNotFound(text="there is no such run\n")
        return found

    def _runs(self, request: web.Request) -> dict[str, Any]:
        known = self.runs.all()
        return stages.all_runs(
            [watch.describe(stage, key) for key, (watch, stage) in known.items()]
        )

    def _metrics(self, request: web.Request) -> dict[str, Any]:
        watch, stage = self._asked(request)
        names = request.query.get("names")
        wanted = None if names is None else [unquote(name) for name in names.split(",") if name]
        return watch.metrics(
            stage, wanted, _number(request, "generation", -1), _number(request, "since", 0)
        )

    def _phases(self, request: web.Request) -> list[dict[str, Any]]:
        return phases(self._asked(request)[1])

    def _engines(self, request: web.Request) -> dict[str, Any]:
        return stages.engines(self._asked(request)[1])

    def _timeline(self, request: web.Request) -> dict[str, Any]:
        watch, stage = self._asked(request)
        steps = traced_steps(watch.path, stage)
        step = _number(request, "step", steps[-1] if steps else 0)
        return {"steps": steps, "step": step, "timeline": timeline_of(watch.path, stage, step)}

    def _steps(self, request: web.Request) -> dict[str, Any]:
        watch, stage = self._asked(request)
        return {"steps": watch.index.steps(stage.name), **watch.index.progress()}

    def _query(self, request: web.Request, stage: Stage) -> Query:
        asked = request.query
        sort = asked.get("sort", "step")
        if sort not in SORTS or asked.get("kind", "rollout") not in ("rollout", "eval"):
            raise web.HTTPBadRequest(
                text=f"samples are sorted by {', '.join(SORTS)}; kinds are rollout and eval\n"
            )
        return Query(
            stage=stage.name,
            kind=asked.get("kind", "rollout"),
            step=_number(request, "step", None),
            group=_number(request, "group", None),
            dataset=asked.get("dataset"),
            status=asked.get("status"),
            prompt=asked.get("prompt"),
            words=tuple(asked.get("search", "").split()),
            sort=sort,
            descending=asked.get("descending") == "1",
        )

    def _groups(self, request: web.Request) -> dict[str, Any]:
        watch, stage = self._asked(request)
        groups, more = watch.index.groups(self._query(request, stage), *_page(request, _MAX_GROUPS))
        return {"groups": [_short(group) for group in groups], "more": more}

    def _samples(self, request: web.Request) -> dict[str, Any]:
        watch, stage = self._asked(request)
        rows, more = watch.index.find(self._query(request, stage), *_page(request, _MAX_SAMPLES))
        whole = request.query.get("whole") == "1"
        return {"samples": rows if whole else [_short(row) for row in rows], "more": more}

    def _sample(self, request: web.Request) -> dict[str, Any]:
        watch, stage = self._asked(request)
        found = watch.index.sample(_number(request, "id", -1))
        if found is None or found["stage"] != stage.name:
            raise web.HTTPNotFound(text="the sample is no longer there\n")
        return found

    def _settings(self, request: web.Request) -> list[dict[str, str]]:
        return stages.settings(self._asked(request)[1])

    def _differences(self, request: web.Request) -> dict[str, Any]:
        known = self.runs.all()
        keys = [key for key in request.query.get("runs", "").split(",") if key in known]
        return {"runs": keys, "flags": stages.settings_that_differ([known[key][1] for key in keys])}


def _number(request: web.Request, name: str, default: Any) -> Any:
    text = request.query.get(name)
    if text is None or text == "":
        return default
    try:
        value = int(text)
    except ValueError:
        value = _LARGEST
    if abs(value) >= _LARGEST:
        raise web.HTTPBadRequest(text=f"{name} must be a whole number\n")
    return value


def _page(request: web.Request, most: int) -> tuple[int, int]:
    """Return offset and limit of a page of rows."""
    return max(0, _number(request, "offset", 0)), min(most, max(1, _number(request, "limit", 50)))


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Replace a row's line by the beginnings of its texts, for a list."""
    return {**{k: v for k, v in row.items() if k != "record"}, **short_texts(row["record"])}


def application(runs: Runs, token: str | None, cookie: str = "slime_watch") -> web.Application:
    """Return the application that serves ``runs`` over HTTP.

    Args:
        token: that requests need; None: none.
        cookie: name of the cookie that keeps the token.
    """
    app = web.Application(middlewares=[guard(token, cookie)])
    pages = Pages(runs)
    app.add_routes(pages.routes())

    async def begin(app: web.Application) -> None:
        runs.start()

    async def end(app: web.Application) -> None:
        pages.close()
        await asyncio.get_running_loop().run_in_executor(None, runs.close)

    app.on_startup.append(begin)
    app.on_cleanup.append(end)
    return app
