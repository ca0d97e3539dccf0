"""How the code is built, in numbers: the tables of docs/architecture.md. Run it in the repository's
root.

python tools/measure_structure.py
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.import_graph import FILES, PACKAGE, imports_of_modules, in_circles, longest_chain


def main() -> None:
    lines = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    imports = imports_of_modules()
    importers = Counter(target for targets in imports.values() for target in targets)
    chain = longest_chain(imports, "loop")
    print("| | now |\n|---|--:|")
    print(f"| files, lines under `slime/` | {len(lines)}, {thousands(sum(lines.values()))} |")
    print(f"| longest import chain from the loop | {len(chain)} |")
    print(f"| files in circles | {len(in_circles(imports))} |")
    print(
        "| files imported by exactly one other | "
        f"{sum(count == 1 for count in importers.values())} |"
    )
    print("\n| package | files, lines |\n|---|--:|")
    packages: dict[str, list[int]] = {}
    for path, count in lines.items():
        inside = path.relative_to(PACKAGE).parts
        packages.setdefault(inside[0] if len(inside) > 1 else "beside the packages", []).append(
            count
        )
    for name, counts in packages.items():
        print(f"| `{name}` | {len(counts)}, {thousands(sum(counts))} |")
    print("\n" + " → ".join(chain))


def thousands(count: int) -> str:
    """
    >>> thousands(12345)
    '12.3k'
    """
    return f"{count / 1000:.1f}k"


if __name__ == "__main__":
    main()
