"""The memory plan as text: a table for a dry run, a few lines for a launch."""

from __future__ import annotations

from collections.abc import Iterator

from slime.memory.plan import MemoryPlan, Phase

_SMALL = 0.05e9  # what is less is added up in one row


def gb(nbytes: float) -> str:
    """Example:
    >>> gb(1.25e9), gb(3e6)
    ('1.2', '0.0')
    """
    return f"{nbytes / 1e9:.1f}"


def summary(plan: MemoryPlan) -> list[str]:
    """One line per group of devices: each phase's total, and the limit."""
    lines = [f"memory plan: {_devices(plan)}"]
    by_devices: dict[str, list[Phase]] = {}
    for phase in plan.phases:
        by_devices.setdefault(phase.devices, []).append(phase)
    for devices, phases in by_devices.items():
        totals = ", ".join(f"{phase.name} {gb(phase.total)} GB" for phase in phases)
        lines.append(f"  {devices}: {totals} (limit {gb(plan.limit)})")
    return lines + [f"  {line}" for line in _remarks(plan)]


def table(plan: MemoryPlan) -> str:
    """Every use of every phase.

    Example:
        devices  phase     of       what            GB   total   limit
        GPU 0-3  generate  engine   weights        4.0
                           engine   KV cache      94.7
                           trainer  asleep         2.2   100.9   135.4
    """
    rows: list[tuple[str, ...]] = [("devices", "phase", "of", "what", "GB", "total", "limit")]
    devices = ""
    for phase in plan.phases:
        uses = [use for use in phase.largest if use.nbytes >= _SMALL]
        rest = phase.total - sum(use.nbytes for use in uses)
        entries = [(use.owner, use.what, gb(use.nbytes)) for use in uses]
        if rest:
            entries.append(("", "all that is smaller", gb(rest)))
        for index, entry in enumerate(entries):
            last = index == len(entries) - 1
            over = " !" if phase.total > plan.limit else ""
            rows.append(
                (
                    phase.devices if index == 0 and phase.devices != devices else "",
                    phase.name if index == 0 else "",
                    *entry,
                    gb(phase.total) if last else "",
                    gb(plan.limit) + over if last else "",
                )
            )
        devices = phase.devices
    lines = [f"memory plan: {_devices(plan)}", *_aligned(rows), *_remarks(plan)]
    return "\n".join(lines)


def _aligned(rows: list[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        left = [cell.ljust(width) for cell, width in zip(row[:4], widths)]
        right = [cell.rjust(width) for cell, width in zip(row[4:], widths[4:])]
        yield "  ".join([*left, *right]).rstrip()


def _devices(plan: MemoryPlan) -> str:
    device = plan.device
    if not device.on_gpu:
        return f"{gb(device.nbytes)} GB {device.source}"
    count = plan.facts.placement.total
    return f"{count} GPU{'s' if count > 1 else ''} of {gb(device.nbytes)} GB ({device.source})"


def _remarks(plan: MemoryPlan) -> list[str]:
    lines = list(plan.notes)
    if plan.host:
        over = "; more than this host has" if plan.host > plan.host_limit else ""
        lines.append(f"host memory of a trainer node: {gb(plan.host)} GB for copies and offloaded states{over}")
    return lines
