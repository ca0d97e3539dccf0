"""Write slime/config/sglang_flags.json from a published SGLang wheel, which is downloaded but not
installed.

python tools/make_sglang_flag_table.py 0.5.16
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from slime.config.engine_flags import TABLE, sglang_args_of, table_as_json


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", help="version of SGLang on PyPI")
    parser.add_argument("--wheel", type=Path, help="wheel that is already here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wheel = options.wheel or download(options.version, Path(folder))
        source = zipfile.ZipFile(wheel).read("sglang/srt/server_args.py").decode("utf-8")
    table = table_as_json(options.version, sglang_args_of(source))
    rows = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in table["arguments"])
    TABLE.write_text(
        f'{{\n  "version": "{options.version}",\n  "arguments": [\n{rows}\n  ]\n}}\n',
        encoding="utf-8",
    )
    print(f"{len(table['arguments'])} arguments of SGLang {options.version} → {TABLE}")


def download(version: str, folder: Path) -> Path:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--dest",
        str(folder),
        f"sglang=={version}",
    ]
    subprocess.run(command, check=True, timeout=600)
    return next(folder.glob("sglang-*.whl"))


if __name__ == "__main__":
    main()
