"""What a new user sees of a run that says no more than it must: its lines, its page, and a batch
that can teach."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime.page import report
from tests.support.runs import Run


def test_a_run_of_few_words_is_told_in_short_lines_and_has_a_page_while_it_goes_on(
    run: Run, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, live = report.write_report, []

    def watched(folder: Path) -> Path:
        page = write(folder)
        live.append('<html lang="en" data-live>' in page.read_text())
        return page

    monkeypatch.setattr(report, "write_report", watched)
    flags = [
        "--num-rollout", 2, "--custom-rm-path", "tests.support.toy.digit_share",
        "--rollout-max-response-len", 4
    ]  # fmt: skip
    evaluation = ["--eval-prompt-data", "sums", f"{data}@[0:4]", "--eval-interval", 2]
    result = run("first-look", *flags, *evaluation, "--colocate")
    assert result.series("rollout/num_samples") == [256.0, 256.0], (
        "32 prompts, 8 samples of each, without a word"
    )

    lines = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("first-look  ")
    ]
    lines = [line for line in lines if "  warning: " not in line]
    told = [" ".join(line.split()[1:4]) for line in lines]
    assert told == [
        "ready after " + lines[0].split()[3],
        "step 0/2 held-out:",
        "step 1/2 reward",
        "step 2/2 reward",
        "step 2/2 held-out:",
    ]
    assert max(map(len, lines)) < 130 and all(" entropy " in line for line in lines[2:4])
    assert not any(word in " ".join(lines) for word in ("loss", " kl ", "eval 0"))
    assert live[:1] == [True]
    final = (result.path / "report.html").read_text()
    assert "data-live" not in final and "finished" in final
