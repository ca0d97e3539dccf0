"""The router's process: sglang-router's own launcher, on a host where SGLang is installed too.

Its debugging router, which nobody starts here, tries to import SGLang, and with it torch: 14 s on a host with GPUs, at
every launch and every restart of a router. Told that there is none, it does without.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    modules: dict[str, Any] = sys.modules
    modules["sglang"] = None  # an import of it fails at once
    from sglang_router.launch_router import main as launch

    launch()


if __name__ == "__main__":
    main()
