"""Sweep mode: a failure trace straight into the real coordinator, from one event to the next.

Months of a cluster of thousands of nodes take seconds, since nothing happens between events: no heartbeat is
sent, and steps are summed up. Decisions are the coordinator's and the planner's own; workers answer at once
(see `analytic_workers`), and what takes time is said by `costs` and by the schedule's timeline on the profile.

When the coordinator cannot continue, its job is started again from the newest checkpoint, as soon as the nodes
that are there hold the model.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from oobleck.control.journal import JobEnded, JournalEntry
from oobleck.sim.trace import Trace

from .faults import Faults
from .job_run import JobRun
from .settings import SweepSettings


def sweep(
    trace: Trace, settings: SweepSettings, *, report: Callable[[float], None] = lambda _: None
) -> tuple[JournalEntry, ...]:
    """Play a trace and return the journal of the run, with entries of many steps in place of one a step.

    `report` is called now and then with the seconds that are simulated. Raises PlanningError where not even all
    nodes of the trace hold the model.
    """
    with _few_collections():
        return _play(trace, settings, report)


@contextmanager
def _few_collections() -> Iterator[None]:
    """Collect cycles a hundredth as often: hardly any are left, and each search goes through all plans so far."""
    before = gc.get_threshold()
    gc.set_threshold(100 * before[0], *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _play(trace: Trace, settings: SweepSettings, report: Callable[[float], None]) -> tuple[JournalEntry, ...]:
    run = JobRun(trace, settings)
    faults = Faults(run)
    for event in trace.events:
        run.agenda.at(event.t_s, partial(faults.happen, event))
    run.begin()
    while (next_s := min(run.agenda.next_s, run.crew.next_s)) <= trace.duration_s:
        run.move_to(next_s)
        run.agenda.do_due()
        if run.crew.has_finished:
            run.finish()
        if run.is_over:
            return tuple(run.log.entries)
        report(run.agenda.now_s)
    run.move_to(trace.duration_s)
    reason = f"the trace ends after {run.log.newest_step} steps"
    run.log.record(JobEnded(t_s=trace.duration_s, exit_code=0, reason=reason))
    return tuple(run.log.entries)
