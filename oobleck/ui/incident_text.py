"""An incident as a few lines that a tired person understands."""

from __future__ import annotations

from collections.abc import Iterator

from oobleck.control import journal

from .formatting import bytes_text, duration_text, one_line, seconds_text

_MAX_CONSEQUENCES = 8
_MAX_EVIDENCE_LINES = 12


def incident_news(incident: journal.Incident) -> str:
    """One line for an incident that has just begun."""
    root = incident.root
    what = f"[{duration_text(root.t_s)}] #{incident.number} {incident.title}"
    return f"{what}: {one_line(root.text)}; recovering …"


def incident_lines(incident: journal.Incident) -> tuple[str, ...]:
    """The whole story: what, why, what followed, what was done, what it cost, what to do."""
    return tuple(_lines(incident))


def _lines(incident: journal.Incident) -> Iterator[str]:
    fatal = "; the job ended over it" if incident.is_fatal else ""
    yield f"[{duration_text(incident.root.t_s)}] #{incident.number} {incident.title}{fatal}"
    yield from _told("because", _evidence(incident.root))
    yield from _told("where", (one_line(incident.root.origin),) if incident.root.origin else ())
    shown = incident.consequences[:_MAX_CONSEQUENCES]
    yield from _told("then", (f"{_who(finding)}{one_line(finding.text)}" for finding in shown))
    if len(incident.consequences) > len(shown):
        yield from _told("", (f"and {len(incident.consequences) - len(shown)} more",))
    yield from _told("done", (one_line(response.text) for response in incident.responses))
    yield from _told(
        "cost", ("not known yet: the recovery is under way" if incident.ended_s is None else _cost(incident),)
    )
    yield from _told("to do", (incident.advice,))


def _told(label: str, texts: Iterator[str] | tuple[str, ...]) -> Iterator[str]:
    """Texts below each other, the first beside its label."""
    for text in texts:
        yield f"    {label:8}{text}"
        label = ""


def _who(finding: journal.Finding) -> str:
    return f"{finding.node}: " if finding.node else ""


def _evidence(finding: journal.Finding) -> Iterator[str]:
    """What it is, and the last lines of what more there is, as of a traceback."""
    yield from _lines_of(finding.text)
    yield from _lines_of(finding.detail)


def _lines_of(text: str) -> Iterator[str]:
    for line in text.strip().splitlines()[-_MAX_EVIDENCE_LINES:]:
        indent = len(line) - len(line.lstrip())
        yield " " * indent + one_line(line)


def _cost(incident: journal.Incident) -> str:
    parts = [f"{seconds_text(incident.stall_s)} without progress"]
    parts.append(f"{incident.steps_lost} steps lost" if incident.steps_lost else "no step lost")
    if incident.microbatches_redone:
        parts.append(f"{incident.microbatches_redone} microbatches done again")
    if incident.bytes_moved:
        parts.append(f"{bytes_text(incident.bytes_moved)} copied")
    if incident.lost:
        parts.append(f"{', '.join(incident.lost)} gone")
    return ", ".join(parts)
