"""A hub on this machine: the few routes of Hugging Face's that downloads and uploads of
huggingface_hub need."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class StubHub(BaseHTTPRequestHandler):
    """Serves folders by "models/org/name" and "datasets/org/name", and keeps what is uploaded in
    ``uploads``."""

    folders: ClassVar[dict[str, Path]] = {}
    uploads: ClassVar[dict[str, dict[str, bytes]]] = {}
    tokens: ClassVar[set[str | None]] = set()

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if path == "/":
            return self._send(b"a hub", "text/html")
        if found := re.fullmatch(r"/api/(models|datasets)/(\w[\w.-]*/[\w.-]+)(/.*)?", path):
            folder = self.folders.get(f"{found[1]}/{found[2]}")
            if folder is None:
                return self._missing("RepoNotFound")
            if (found[3] or "").startswith("/tree/"):
                return self._json([_entry(folder, file) for file in _files(folder)])
            return self._json(
                {"id": found[2], "sha": COMMIT, "siblings": [], "private": False, "downloads": 0}
            )
        found = re.fullmatch(r"/(datasets/)?(\w[\w.-]*/[\w.-]+)/resolve/\w+/(.+)", path)
        folder = (
            self.folders.get(f"{'datasets' if found and found[1] else 'models'}/{found[2]}")
            if found
            else None
        )
        if folder is None or found is None or not (folder / found[3]).is_file():
            return self._missing("EntryNotFound")
        content = (folder / found[3]).read_bytes()
        self._send(content, "application/octet-stream", ETag=f'"{_blob(content)}"')

    do_HEAD = do_GET

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.tokens.add(self.headers.get("Authorization"))
        path = urlsplit(self.path).path
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            return self._json({"url": f"{self._root}/{name}", "name": name, "id": "1"})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if path.endswith("/preupload/main"):
            files = [
                {"path": file["path"], "uploadMode": "regular"}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": [file | {"shouldIgnore": False} for file in files]})
        found = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/commit/main", path)
        if found is None:
            return self._missing("EntryNotFound")
        lines = [json.loads(line) for line in body.splitlines()]
        files = {
            line["value"]["path"]: line["value"]["content"]
            for line in lines
            if line["key"] == "file"
        }
        self.uploads[found[1]] = {
            name: base64.b64decode(content) for name, content in files.items()
        }
        self._json(
            {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{self._root}/{found[1]}/commit/{COMMIT}",
            }
        )

    @property
    def _root(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def _json(self, value: Any) -> None:
        self._send(json.dumps(value).encode(), "application/json")

    def _missing(self, code: str) -> None:
        self._send(b"{}", "application/json", status=404, **{"X-Error-Code": code})

    def _send(self, content: bytes, kind: str, status: int = 200, **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "X-Repo-Commit": COMMIT, **headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nothing on stderr."""


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _entry(folder: Path, file: Path) -> dict[str, Any]:
    content = file.read_bytes()
    return {
        "type": "file",
        "path": str(file.relative_to(folder)),
        "size": len(content),
        "oid": _blob(content),
    }


def _blob(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextlib.contextmanager
def stub_hub(**folders: Path) -> Iterator[tuple[str, type[StubHub]]]:
    """(its address, its state); ``folders`` by kind__org__name: models__me__tiny."""

    class Hub(StubHub):
        pass

    Hub.folders = {"/".join(name.split("__")): path for name, path in folders.items()}
    Hub.uploads, Hub.tokens = {}, set()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", Hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
