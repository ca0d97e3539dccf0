"""SGLang's application, of which the stand-in keeps what is put before it."""

from __future__ import annotations

from typing import Any


class _App:
    def __init__(self) -> None:
        self.inference_only = False

    def add_middleware(self, kind: type, access: Any) -> None:
        kind(self, access)
        self.inference_only = access.inference_only


app = _App()
