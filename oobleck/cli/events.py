"""`oobleck events`: explains the failures of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import Annotated

import typer

from oobleck.control import journal
from oobleck.runtime.journals import find_journal, follow_journal, read_journal
from oobleck.ui.incident_text import incident_lines, incident_news
from oobleck.wire import encode_json

from .common_options import BaseDirOption, JsonOption, base_dir_of, complete_tags, one_run

RunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Tag of the run, or its journal; by default, the newest run.",
        show_default=False,
        autocompletion=complete_tags,
    ),
]

RunTagOption = Annotated[
    str | None, typer.Option("--tag", help="Tag of the run: the same as RUN.", autocompletion=complete_tags)
]


def events(
    run: RunArgument = None,
    *,
    tag: RunTagOption = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the run until it ends.")] = False,
    as_json: JsonOption = False,
    base_dir: BaseDirOption = None,
) -> None:
    """Explain each failure of a run, active or finished: its cause, its consequences, what the run did, what that
    cost, and what is left for you to do.

    With --json each incident is one line, which --follow prints once the incident is over.
    """
    path = find_journal(base_dir_of(base_dir), one_run(run, tag))
    if follow:
        for incident in _news(follow_journal(path)):
            if incident.ended_s is not None or not as_json:
                _tell(incident, as_json=as_json)
        return
    incidents = journal.diagnose(read_journal(path))
    for incident in incidents:
        _tell(incident, as_json=as_json)
    if not incidents and not as_json:
        typer.echo(f"nothing has gone wrong in {path.parent.name}")


def _tell(incident: journal.Incident, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_to_json(incident)))
    elif incident.ended_s is None:
        typer.echo(incident_news(incident))
    else:
        typer.echo("\n".join((*incident_lines(incident), "")))


def _to_json(incident: journal.Incident) -> dict[str, object]:
    """Return the incident as JSON: enums for programs, each with its sentence for people."""
    return {
        "number": incident.number,
        "title": incident.title,
        "root": _finding_to_json(incident.root),
        "consequences": [_finding_to_json(finding) for finding in incident.consequences],
        "responses": [asdict(response) for response in incident.responses],
        "actions": [response.text for response in incident.responses],
        "stall_s": incident.stall_s,
        "microbatches_redone": incident.microbatches_redone,
        "steps_lost": incident.steps_lost,
        "bytes_moved": incident.bytes_moved,
        "lost": incident.lost,
        "ended_s": incident.ended_s,
        "is_fatal": incident.is_fatal,
        "repeated": incident.repeated,
        "remedies": incident.remedies,
        "advice": incident.advice,
    }


def _finding_to_json(finding: journal.Finding) -> dict[str, object]:
    return {
        "t_s": finding.t_s,
        "failure": finding.failure,
        "node": finding.node,
        "origin": finding.origin,
        "device": None if finding.worker_id is None else finding.worker_id.device,
        "is_tried_again": finding.is_tried_again,
        "evidence": f"{finding.text}\n{finding.detail}".strip(),
        "entry": json.loads(encode_json(finding.evidence)),
    }


def _news(entries: Iterator[journal.JournalEntry | None]) -> Iterator[journal.Incident]:
    """Yield each incident when it has begun, unless it is over by then, and again when it is over."""
    diagnosis = journal.Diagnosis()
    begun = done = 0
    for entry in entries:
        # An incident is news only once all that is written has been read: it may be over by then.
        if entry is not None:
            diagnosis.apply(entry)
            continue
        incidents = diagnosis.incidents[done:]
        for incident in incidents:
            if incident.ended_s is not None:
                done = incident.number
                begun = max(begun, done)
                yield incident
            elif incident.number > begun:
                begun = incident.number
                yield incident
    yield from diagnosis.incidents[done:]
