"""A run as plain HTML: what its report shows where the page's script does not run."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any


def words_html(runs: Iterable[dict[str, Any]]) -> str:
    """State, crash and alarms of each run, and where to find the numbers.

    Args:
        runs: as `stages.describe` has them.
    """
    needs = (
        "This page needs JavaScript and a browser released in 2023 or later. The run folder holds "
        "the same data:"
    )
    needs += " metrics in metrics.jsonl, samples in samples/."
    parts = [f'<p class="none">{needs}</p>']
    for run in runs:
        state = f'<span class="state">{_text(run["state"])}</span>' if run["state"] else ""
        parts.append(
            f"<h2>{_text(run['name'])} {state}</h2><p>{_text(' · '.join(run['facts']))}</p>"
        )
        if run["crash"]:
            said = "\n".join(
                str(line) for line in (run["crash"]["message"], *(run["crash"]["notes"] or ()))
            )
            parts.append(
                f"<p><b>{_text(run['crash']['error'] or 'The run failed')}:</b></p>"
                f"<pre>{_text(said)}</pre>"
            )
        alarms = [
            f"<li><b>{_text(a['title'])}.</b> {_text(a['detail'])}</li>" for a in run["alarms"]
        ]
        parts.append(f'<ul class="alarms">{"".join(alarms)}</ul>' if alarms else "")
        if run["step"] is not None:
            parts.append(f"<p>Last logged step: {_text(run['step'])}.</p>")
    return "".join(parts)


def _text(value: Any) -> str:
    return html.escape(str(value), quote=True)
