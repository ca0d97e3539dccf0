"""`slime bundle`: pack what a bug report about a run needs into one .tar.gz.

slime bundle outputs/sums                         writes sums-bundle.tar.gz here
slime bundle outputs/sums --samples               with prompts and responses of the newest step

It contains the settings and logs (of large ones the ends), the newest metrics, crash folders,
versions, and what `slime explain` says. Not in it: weights, keys and tokens, and, without
--samples, prompts and responses.
"""

from __future__ import annotations

from pathlib import Path

from slime.cli.arguments import Arguments
from slime.cli.explain import as_text
from slime.diagnosis.bundle import bundle
from slime.diagnosis.explain import explain
from slime.observe.run_folder import check_no_run_writes


def main(argv: list[str]) -> int:
    """Write the archive and list its files; returns the exit status.

    Raises:
        UserError: the folder is not a run folder, or the archive cannot be written.
    """
    parser = Arguments("slime bundle", __doc__)
    parser.add_argument("run_dir", help="a run folder, outputs/<run>")
    parser.add_argument(
        "--output", help="the archive to write; default: <run>-bundle.tar.gz in this directory"
    )
    parser.add_argument(
        "--samples",
        action="store_true",
        help="put samples in, too: prompts and responses, which may be private",
    )
    arguments = parser.parse_args(argv)
    folder = Path(arguments.run_dir)
    found = explain(folder)
    output = Path(arguments.output or f"{folder.resolve().name}-bundle.tar.gz")
    check_no_run_writes(output, "--output")
    packed = bundle(folder, output, found, as_text(found), with_samples=arguments.samples)
    for name, size in packed.sizes.items():
        print(f"  {size:>12,}  {name}")
    for name in packed.left_out:
        print(f"  left out: {name}")
    print(f"{packed.path}: {packed.path.stat().st_size:,} bytes, {len(packed.sizes)} files")
    print(
        "samples are in it: prompts and responses"
        if arguments.samples
        else "samples are not in it (--samples puts them in), nor are weights; keys and tokens are "
        "hidden"
    )
    print(
        "Contains paths, host names, your functions' output and error texts; review it before "
        "sharing."
    )
    return 0
