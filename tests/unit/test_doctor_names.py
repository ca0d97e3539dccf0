"""Names that `slime doctor` compares: of network interfaces."""

from __future__ import annotations

from slime.diagnosis.checks_host import absent_interfaces


def test_names_of_interfaces() -> None:
    there = {"eth0": [], "eth1": [], "lo": []}
    assert absent_interfaces("eth", there) == absent_interfaces("=eth0,lo", there) == []
    assert absent_interfaces("^ib,docker", there) == absent_interfaces("", there) == []
    assert absent_interfaces("=eth", there) == ["eth"] and absent_interfaces("eth,ib0", there) == [
        "ib0"
    ]
