"""What must hold of every run, whatever happens to it (DESIGN.md, section 8), read from what it left.

Workers raise a Violation on the spot where a sum lacks a microbatch, a layer is sent by somebody who does not hold
it, or layers of different histories are put together; here is the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

from oobleck.control.events import BatchReceived, Disconnect, Event, MessageReceived, SendOrders
from oobleck.control.journal import JobEnded, JobStarted, MasterResumed, NodeConnected, PlanAdopted, StepDone
from oobleck.control.protocol import CommitRecord, PlanUpdate, Status, StepCommitted
from oobleck.sim.cluster.fabric import Violation
from oobleck.sim.cluster.run import ClusterRun

__all__ = ["check_liveness", "check_safety"]

_MOST_SETTLED_PLANS = 10
"""Slow nodes are found out, moved to, and tried again."""
_RETRIES_S = 20.0
"""And so often, at the most, later."""


def check_safety(played: ClusterRun, *, num_microbatches: int) -> None:
    """Nothing that is promised is broken at any time. Needs the run's decisions."""
    _check_plans(played, num_microbatches)
    _check_steps(played)
    _check_records(played)
    _check_orders(played)
    ends = [entry for entry in played.entries if isinstance(entry, JobEnded)]
    if len(ends) != 1 or not isinstance(played.entries[-1], JobEnded):
        raise Violation(f"the journal has {len(ends)} ends, and ends with {played.entries[-1]}")


def _check_plans(played: ClusterRun, num_microbatches: int) -> None:
    newest = 0
    for entry in played.entries:
        if not isinstance(entry, PlanAdopted):
            continue
        if entry.generation <= newest:
            raise Violation(f"generation {entry.generation} gets a plan after that of {newest}")
        newest = entry.generation
        if entry.plan.num_microbatches != num_microbatches:
            raise Violation(f"{entry.plan.num_microbatches} microbatches are planned, not {num_microbatches}")


def _check_steps(played: ClusterRun) -> None:
    """Each is committed once, in turn, and again only once all have gone back to before it."""
    newest = 0
    for entry in played.entries:
        if isinstance(entry, PlanAdopted) and entry.restored_step is not None:
            if entry.restored_step > newest:
                raise Violation(f"step {entry.restored_step} is gone back to after step {newest}")
            newest = entry.restored_step
        if not isinstance(entry, StepDone):
            continue
        record = entry.record
        if record.step != newest + 1:
            raise Violation(f"step {record.step} is committed after step {newest}")
        newest = record.step
        if record.samples_missing or record.samples_repeated:
            raise Violation(f"step {record.step} misses or repeats samples")


def _check_records(played: ClusterRun) -> None:
    """What is known of a step is the same for all workers: relays put equal answers together."""
    known: dict[tuple[int, int], CommitRecord] = {}
    for decided in played.decisions:
        if any(_is_beginning(command) for command in decided.commands):
            known.clear()  # perhaps another run
        for record in _records_in(decided.event):
            first = known.setdefault((record.generation, record.step), record)
            if record != first:
                raise Violation(f"a worker knows {record}, and another {first}")


def _records_in(event: Event | None) -> Iterator[CommitRecord]:
    match event:
        case MessageReceived(message=StepCommitted(record=record)):
            yield record
        case MessageReceived(message=Status(last_record=record)) | BatchReceived(message=Status(last_record=record)):
            if record is not None:
                yield record


def _check_orders(played: ClusterRun) -> None:
    """All of a generation are ordered the same, and layers are read from nodes that are not known to be gone."""
    updates: dict[tuple[int, int], PlanUpdate] = {}
    gone: set[str] = set()
    life = 0
    for decided in played.decisions:
        if any(_is_beginning(command) for command in decided.commands):
            life += 1  # another master: it does not know of orders that it finds no trace of
        for command in decided.commands:
            match command:
                case Disconnect(node=node):
                    gone.add(node)
                case SendOrders(update=update):
                    first = updates.setdefault((life, update.generation), update)
                    if (first.plan, first.transfers, first.boundary) != (
                        update.plan,
                        update.transfers,
                        update.boundary,
                    ):
                        raise Violation(f"generation {update.generation} orders different things")
                    for item in update.transfers:
                        if {item.source.node, item.target.node} & gone:
                            raise Violation(f"generation {update.generation} moves a layer with a lost node: {item}")
                case _:
                    entry = getattr(command, "entry", None)
                    if isinstance(entry, NodeConnected):
                        gone.discard(entry.node)


def _is_beginning(command: object) -> bool:
    return isinstance(getattr(command, "entry", None), JobStarted | MasterResumed)


def check_liveness(played: ClusterRun, *, last_fault_s: float, within_s: float) -> None:
    """After the last fault, steps are committed again within a bound, and plans settle; unless the run had to end."""
    if played.end.exit_code != 0:
        return
    steps_s = [entry.t_s for entry in played.entries if isinstance(entry, StepDone) and entry.t_s > last_fault_s]
    if not steps_s or steps_s[0] > last_fault_s + within_s:
        raise Violation(f"no step within {within_s:g} s of the last fault at {last_fault_s:g} s; then at {steps_s[:1]}")
    settled_s = last_fault_s + within_s
    plans = [e for e in played.entries if isinstance(e, PlanAdopted) and e.t_s > settled_s]
    most = _MOST_SETTLED_PLANS + (played.entries[-1].t_s - settled_s) / _RETRIES_S
    if len(plans) > most:
        raise Violation(f"{len(plans)} plans after {settled_s:g} s, when nothing happened any more: at most {most:.0f}")
