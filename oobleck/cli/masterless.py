"""Describes runs whose master has died: which nodes still train, since when, and which command takes them over.

No process listens for such a run, so all of this comes from its directory: the journal, and the noted command.
"""

from __future__ import annotations

import time
from pathlib import Path

from oobleck.control.journal import JobStarted, NodeState, RunView, ScriptStarted
from oobleck.errors import ConfigError
from oobleck.job import ControlSpec
from oobleck.runtime.files import RunDirectory
from oobleck.runtime.journals import has_end, read_journal
from oobleck.ui.formatting import duration_text

from .common_options import continuing

_MOST_RUNS = 3
_MOST_NODES = 8
_GONE = frozenset({NodeState.LOST, NodeState.ENDED})


def describe_masterless(base_dir: Path, tag: str | None) -> str:
    """Describe the run of this tag if it has lost its master, or without a tag the newest such runs that still train.

    Returns an empty string if there is none. Reads their whole journals.
    """
    tags = [tag] if tag is not None else [path.parent.name for path in base_dir.glob("*/journal.jsonl")]
    runs = [RunDirectory(base_dir=base_dir, tag=each) for each in tags]
    left = [run for run in runs if run.journal.is_file() and not (run.master and run.master.lives)]
    left = [run for run in left if not has_end(run.journal)]
    left.sort(key=lambda run: run.journal.stat().st_mtime, reverse=True)
    texts = (_describe(run, is_named=tag is not None) for run in left[:_MOST_RUNS])
    return "\n".join(text for text in texts if text)


def _describe(run: RunDirectory, *, is_named: bool) -> str:
    view, control, is_script = RunView(), ControlSpec(), False
    last_s = 0.0
    try:
        for entry in read_journal(run.journal):
            view.apply(entry)
            last_s = max(last_s, entry.t_s)
            if isinstance(entry, JobStarted):
                control = entry.job.control
            elif isinstance(entry, ScriptStarted):
                control, is_script = entry.run.control, True
    except ConfigError as error:
        return f"run {run.tag} has no master, and its journal cannot be read: {error}" if is_named else ""
    # Entries count from the run's start, so only the file tells how long ago the last one was written.
    silent_s = max(0.0, time.time() - run.journal.stat().st_mtime)
    is_over = silent_s > control.orphan_timeout_s
    if is_over and not is_named:
        return ""
    snapshot = view.at(last_s)
    nodes = [node.name for node in snapshot.nodes if node.state not in _GONE]
    shown = ", ".join(nodes[:_MOST_NODES]) + (f" and {len(nodes) - _MOST_NODES} more" if nodes[_MOST_NODES:] else "")
    where = "" if is_script else f", at step {snapshot.step} of {snapshot.max_steps}"
    minutes = f"{control.orphan_timeout_s / 60:g} minutes"
    if is_over:
        state = f"its nodes ({shown}) end by themselves after {minutes} without a master"
        then = "starts it again" if is_script else "continues from its newest state"
    else:
        state = f"its nodes ({shown}) continue for up to {minutes} without one"
        then = "takes it over"
    # `oobleck.launch` starts its runs with this option, by words that are of no use to a person.
    is_a_persons = run.command and "--until-eof" not in run.command
    if not is_a_persons:
        what_to_do = f"The program that started it {then} if it gives its command again"
    elif "…" in run.command:  # it has what may be secret, and is not noted in full
        what_to_do = f"The same command {then}: {continuing(run.command)}"
    else:
        what_to_do = f"`oobleck resume {run.tag}` {then}: {continuing(run.command)}"
    return (
        f"run {run.tag} has no master: {_whereabouts(run)}, and its journal ended {duration_text(silent_s)} ago"
        f"{where}; {state}. {what_to_do}"
    )


def _whereabouts(run: RunDirectory) -> str:
    if (master := run.master) is None:
        return "none has started"
    if master.is_of_this_boot:
        return f"process {master.pid} has died"
    return f"process {master.pid} was on another machine, or on this one before its last restart"
