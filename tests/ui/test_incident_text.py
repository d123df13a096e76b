"""Incidents in words."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.journal import Failure, Finding, Incident, JobStarted, WorkerDown, diagnose
from oobleck.control.protocol import ErrorKind, Killed, Raised
from oobleck.ui.incident_text import incident_lines, incident_news
from tests.control.journals import run_with_a_loss


def test_the_story_of_a_loss_is_told_whole():
    (incident,) = diagnose(run_with_a_loss())
    assert incident_lines(incident) == (
        "[0:00:25] #1 node3: contact was lost",
        "    because its connection was lost",
        "    done    the run continues without node3",
        "            pipeline 1 cannot go on alone; its microbatches go to the others",
        "    cost    0.050 s without progress, no step lost, 4 microbatches done again, 28.0 MB copied, node3 gone",
        "    to do   See whether the machine is up and SSH answers. The node is tried again automatically.",
    )


def test_what_has_given_a_lost_node_is_told():
    origin = "pod training/oobleck-node-3 on machine-7"
    entries = [
        replace(entry, nodes=tuple(replace(node, origin=origin) for node in entry.nodes))
        if isinstance(entry, JobStarted)
        else entry
        for entry in run_with_a_loss()
    ]
    (incident,) = diagnose(entries)
    assert f"    where   {origin}" in incident_lines(incident)


def test_what_is_under_way_is_one_line():
    down = WorkerDown(t_s=7.0, node="a", device=0, pid=8, end=Killed(signal=9))
    root = Finding(t_s=7.0, failure=Failure.KILLED, node="a", evidence=down)
    incident = Incident(number=2, findings=(root,))
    assert (
        incident_news(incident) == "[0:00:07] #2 a: a process was killed from outside: killed by signal 9; recovering …"
    )


def test_control_characters_of_elsewhere_and_long_tracebacks_are_kept_in_bounds():
    traceback = "\n".join(f"  line {number} \x1b[31m" for number in range(100))
    error = Raised(kind=ErrorKind.CODE, message="\x1b[31m\nValueError", traceback=traceback)
    down = WorkerDown(t_s=7.0, node="a", device=0, pid=8, end=error)
    root = Finding(t_s=7.0, failure=Failure.USER_EXCEPTION, node="a", evidence=down)
    many = tuple(Finding(t_s=8.0, failure=Failure.PEER, node=f"n{i}", evidence=down) for i in range(50))
    lines = incident_lines(Incident(number=1, findings=(root, *many), ended_s=9.0, is_fatal=True))
    assert len(lines) < 30
    assert not any("\x1b" in line for line in lines)
    assert "the job ended over it" in lines[0]
    assert any("and 42 more" in line for line in lines)
