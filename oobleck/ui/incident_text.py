"""An incident as a few lines for a tired person."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from oobleck.control import journal

from .formatting import bytes_text, duration_text, one_line, seconds_text

_MAX_CONSEQUENCES = 8
_MAX_EVIDENCE_LINES = 12


def incident_news(incident: journal.Incident) -> str:
    """Return one line for an incident that has just begun."""
    root = incident.root
    what = f"[{duration_text(root.t_s)}] #{incident.number} {incident.title}"
    return f"{what}: {one_line(root.text)}; recovering …"


def incident_lines(incident: journal.Incident) -> tuple[str, ...]:
    """Return the whole story: what, why, what followed, what the run did, what it cost, what to do."""
    return tuple(_lines(incident))


def _lines(incident: journal.Incident) -> Iterator[str]:
    fatal = "; the job ended over it" if incident.is_fatal else ""
    yield f"[{duration_text(incident.root.t_s)}] #{incident.number} {incident.title}{fatal}"
    yield from _told("because", (*_lines_of(incident.root.text), *_lines_of(incident.root.detail)))
    yield from _told("where", (one_line(incident.root.origin),) if incident.root.origin else ())
    shown = incident.consequences[:_MAX_CONSEQUENCES]
    texts = ((f"{finding.node}: " if finding.node else "") + one_line(finding.text) for finding in shown)
    yield from _told("then", texts)
    if len(incident.consequences) > len(shown):
        yield from _told("", (f"and {len(incident.consequences) - len(shown)} more",))
    yield from _told("done", (one_line(response.text) for response in incident.responses))
    cost = "not known yet: the recovery is under way" if incident.ended_s is None else _cost(incident)
    yield from _told("cost", (cost,))
    yield from _told("to do", (incident.advice,))


def _told(label: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield f"    {label:8}{text}"
        label = ""


def _lines_of(text: str) -> Iterator[str]:
    """Yield the last lines of a text, such as a traceback, with their indentation."""
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
