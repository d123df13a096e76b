"""From one plan to the next, as a state machine: `step(state, given, now_s) -> (state, effects)`.

`TRANSITIONS` has all that can change a state; an input that it does not list changes nothing. The diagram in
`docs/architecture.md` is made from it. Nothing outside of the state says where a recovery is; even the deadline
is read from it, by `deadline`. What to do about a loss is decided elsewhere, and arrives as an input.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from oobleck.control.events import SendAll
from oobleck.control.journal import PlanCause
from oobleck.control.membership import reading_s

from .fencing import answered, begin, end_again, left, look_again, lose_more, overdue, to_deciding, use_answers
from .states import (
    Accusing,
    Adopting,
    Answered,
    AwaitingNetwork,
    AwaitingWorkers,
    BeginRecovery,
    CheckpointReported,
    CheckpointWanted,
    Deciding,
    Ended,
    FailureSuspected,
    Fencing,
    HeldUp,
    Input,
    LocatingCheckpoint,
    MoreLost,
    NodeDrained,
    NodeGone,
    NodeReached,
    Overdue,
    PlanInForce,
    PlanOrdered,
    Preparing,
    RecoveryBegun,
    RecoveryEnded,
    RunEnded,
    Settling,
    State,
    Step,
    Suspecting,
    TimePassed,
    Training,
    TrainingBegun,
    WorkersResumed,
    WorkersWanted,
)


@dataclass(frozen=True, slots=True)
class Transition:
    """In any of `states`, an input of the kind `given` may lead to any of `targets`."""

    states: tuple[type[State], ...]
    given: type[Input]
    targets: tuple[type[State], ...]
    """None: the state stays the same one. Its values may change, or there are effects."""
    why: str


TRAINED = (Training, Adopting, Suspecting)
"""Steps are committed in these."""
FENCED = (
    Fencing,
    Overdue,
    Settling,
    Accusing,
    AwaitingNetwork,
    Deciding,
    AwaitingWorkers,
    LocatingCheckpoint,
)
"""Nothing is committed in these."""
_ASKED = (Fencing, Overdue)
ASKING = (*_ASKED, Settling)
"""All are asked where they stand, and nothing is done with their answers yet."""
_SAME: tuple[type[State], ...] = ()

TRANSITIONS = (
    Transition((Preparing,), TrainingBegun, (Training,), "the first plan is ordered"),
    # Training
    Transition((Training, Adopting), FailureSuspected, (Suspecting,), "a collective failed under a survivor"),
    Transition((Suspecting,), FailureSuspected, _SAME, "another survivor reports it"),
    Transition((Suspecting,), TimePassed, _SAME, "nothing explains it: have all regroup"),
    Transition(TRAINED, RecoveryBegun, (Fencing,), "a loss, or another reason for a new plan"),
    Transition(TRAINED, RecoveryBegun, (Deciding,), "no worker is left to ask"),
    # Asking where all stand
    Transition(FENCED, RecoveryBegun, (Fencing,), "another loss: ask again under a newer generation"),
    Transition(FENCED, RecoveryBegun, (Deciding,), "no worker is left to ask"),
    Transition(ASKING, MoreLost, _SAME, "ask nobody again; the others answer, or more losses may follow at once"),
    Transition(_ASKED, MoreLost, (Settling,), "all others have answered; more losses may follow at once"),
    Transition(ASKING, MoreLost, (Deciding,), "no worker is left"),
    Transition(_ASKED, Answered, _SAME, "others have still to answer"),
    Transition(_ASKED, Answered, (Settling,), "all have answered; more losses may follow at once"),
    Transition(_ASKED, Answered, (Deciding,), "all have answered"),
    Transition(_ASKED, Answered, (Accusing,), "the answers explain a hang"),
    Transition(_ASKED, NodeDrained, _SAME, "others have still to answer"),
    Transition(_ASKED, NodeDrained, (Settling,), "all others have answered; more losses may follow at once"),
    Transition(_ASKED, NodeDrained, (Deciding,), "all others have answered, or there are none"),
    Transition(_ASKED, NodeDrained, (Accusing,), "the answers of the others explain a hang"),
    Transition(_ASKED, NodeReached, _SAME, "ask its workers again"),
    Transition((Fencing,), TimePassed, (Overdue,), "answers are missing: they may wait unread"),
    Transition((Overdue,), TimePassed, _SAME, "most are silent: wait for them; a few: give them up"),
    Transition((Settling,), Answered, _SAME, "answered once more"),
    Transition((Settling,), Answered, (Deciding,), "losses have settled"),
    Transition((Settling,), Answered, (Accusing,), "losses have settled; the answers explain a hang"),
    Transition((Settling,), NodeDrained, _SAME, "its answer is not needed"),
    Transition((Settling,), NodeDrained, (Deciding,), "losses have settled, or no worker is left"),
    Transition((Settling,), NodeDrained, (Accusing,), "losses have settled; the answers explain a hang"),
    Transition((Settling,), TimePassed, (Deciding,), "losses have settled"),
    Transition((Settling,), TimePassed, (Accusing,), "losses have settled; the answers explain a hang"),
    Transition((Accusing,), TimePassed, (Deciding,), "the accused are still there: decide, and end them again"),
    # Too many do not reach each other
    Transition(_ASKED, Answered, (AwaitingNetwork,), "more nodes are cut off than may be lost"),
    Transition(_ASKED, NodeDrained, (AwaitingNetwork,), "more nodes are cut off than may be lost"),
    Transition((Settling,), Answered, (AwaitingNetwork,), "losses have settled; too many others are cut off"),
    Transition((Settling,), NodeDrained, (AwaitingNetwork,), "losses have settled; too many others are cut off"),
    Transition((Settling,), TimePassed, (AwaitingNetwork,), "losses have settled; too many others are cut off"),
    Transition((AwaitingNetwork,), TimePassed, _SAME, "have all asked again whom they reach"),
    Transition((AwaitingNetwork,), NodeDrained, _SAME, "have the others asked again at once"),
    # What is decided
    Transition((Deciding,), PlanOrdered, (Adopting,), "all have their orders"),
    Transition((Deciding,), WorkersWanted, (AwaitingWorkers,), "the others cannot do it alone"),
    Transition((Deciding,), CheckpointWanted, (LocatingCheckpoint,), "a layer has no living copy"),
    Transition((AwaitingWorkers,), NodeGone, (Deciding,), "it may be the one that was waited for"),
    Transition((AwaitingWorkers,), TimePassed, (Deciding,), "none was ready in time"),
    Transition((LocatingCheckpoint,), CheckpointReported, (Deciding,), "it may be the last answer"),
    Transition((LocatingCheckpoint,), TimePassed, (Deciding,), "not all have answered in time"),
    Transition((Accusing, AwaitingWorkers, LocatingCheckpoint), NodeDrained, (Deciding,), "decide without it"),
    # The new plan
    Transition((Adopting, Suspecting), WorkersResumed, _SAME, "others have still to compute, or to report"),
    Transition((Adopting,), WorkersResumed, (Training,), "all compute under the new plan"),
    Transition((Adopting, Suspecting), NodeReached, _SAME, "its orders may be lost: have all regroup"),
    # Anywhere
    Transition((Suspecting, Fencing, Overdue, Settling), HeldUp, _SAME, "what was said meanwhile is read first"),
    Transition((AwaitingNetwork,), HeldUp, _SAME, "what was said meanwhile is read first"),
    Transition((Accusing, AwaitingWorkers, LocatingCheckpoint), HeldUp, _SAME, "what was said meanwhile is read first"),
    Transition((Preparing,), RunEnded, (Ended,), "it cannot begin"),
    Transition(TRAINED, RunEnded, (Ended,), "all steps are committed, or a stop was asked for"),
    Transition(FENCED, RunEnded, (Ended,), "there is no way on"),
)


class Phase(StrEnum):
    """What the run is doing, as seen from outside."""

    PREPARING = "preparing"
    TRAINING = "training"
    FENCING = "fencing"
    ENDED = "ended"


_SUSPICION_S = 0.2
"""How long a failed collective waits for its cause, usually the loss of a node; then all regroup. All of these are at
least so long, and longer where more workers report."""
_LOOK_S = 0.1
"""Answers that wait unread when their time is over are read within this."""
_FIND_S = 30.0
"""How long workers may look for checkpoints."""


_PHASES: Mapping[type[State], Phase] = {
    Preparing: Phase.PREPARING,
    **dict.fromkeys(TRAINED, Phase.TRAINING),
    **dict.fromkeys(FENCED, Phase.FENCING),
    Ended: Phase.ENDED,
}
"""A table, since the phase is asked for several times at every event."""


def phase(state: State) -> Phase:
    """Which phase a state belongs to."""
    return _PHASES[type(state)]


def deadline(state: State) -> float:
    """When TimePassed changes a state; infinity for never."""
    match state:
        case Preparing() | Training() | Adopting() | Deciding() | Ended():
            return math.inf
        case Suspecting() | Fencing() | Overdue() | Settling() | Accusing() | AwaitingNetwork():
            return state.until_s
        case AwaitingWorkers():
            return state.recovery.returns_by_s
        case LocatingCheckpoint():
            return state.recovery.found_by_s
        case _:
            assert_never(state)


def step(state: State, given: Input, now_s: float) -> Step:
    """Return the next state, and the effects in the order in which to carry them out.

    An answer costs O(1), and the last one O(workers).
    """
    match given:
        case TrainingBegun():
            return (Training(generation=given.generation), ()) if isinstance(state, Preparing) else (state, ())
        case RecoveryBegun():
            return begin(state, given, now_s)
        case MoreLost():
            return lose_more(state, given, now_s)
        case Answered():
            return answered(state, given, now_s)
        case FailureSuspected():
            return _suspect(state, given, now_s), ()
        case PlanOrdered() | WorkersWanted() | CheckpointWanted():
            return _decided(state, given, now_s), ()
        case CheckpointReported():
            return to_deciding(state) if isinstance(state, LocatingCheckpoint) else (state, ())
        case WorkersResumed():
            return _resumed(state, given)
        case NodeReached():
            return _reached(state, given.node)
        case NodeGone():
            return to_deciding(state) if isinstance(state, AwaitingWorkers) else (state, ())
        case NodeDrained():
            return left(state, given.node, now_s)
        case TimePassed():
            return (state, ()) if now_s < deadline(state) else _late(state, given, now_s)
        case HeldUp():
            return _wait(state, given.until_s), ()
        case RunEnded():
            return _end(state)
        case _:
            assert_never(given)


# --- training --------------------------------------------------------------------------------------------------------


def _suspect(state: State, suspected: FailureSuspected, now_s: float) -> State:
    until_s = now_s + reading_s(_SUSPICION_S, suspected.num_workers)
    match state:
        case Training() | Adopting() if state.generation == suspected.generation:
            return Suspecting(training=state, since_s=now_s, until_s=until_s)
        case Suspecting() if state.training.generation == suspected.generation:
            return replace(state, until_s=min(state.until_s, until_s))
        case _:
            return state


def _reached(state: State, node: str) -> Step:
    match state:
        case Fencing() | Overdue():
            awaited = tuple(sorted(worker_id for worker_id in state.awaited if worker_id.node == node))
            return state, (SendAll(worker_ids=awaited, message=state.recovery.fence),) if awaited else ()
        case Adopting() | Suspecting(training=Adopting()):
            adopting = state if isinstance(state, Adopting) else state.training
            assert isinstance(adopting, Adopting)
            is_awaited = any(worker_id.node == node for worker_id in adopting.awaited)
            return state, (BeginRecovery(cause=PlanCause.MASTER_LOST),) if is_awaited else ()
        case _:
            return state, ()


# --- time ------------------------------------------------------------------------------------------------------------


def _late(state: State, passed: TimePassed, now_s: float) -> Step:
    """A state's deadline is over."""
    match state:
        case Suspecting():
            return state, (BeginRecovery(cause=PlanCause.PEER_FAILED, detect_s=now_s - state.since_s),)
        case Fencing(recovery=recovery, statuses=statuses):
            until_s = now_s + reading_s(_LOOK_S, len(recovery.asked))
            return Overdue(recovery=recovery, statuses=statuses, until_s=until_s), ()
        case Overdue():
            return overdue(state, passed, now_s)
        case Settling():
            return use_answers(state, now_s)
        case Accusing(stuck=stuck):
            deciding, effects = to_deciding(state)
            return deciding, (*effects, *end_again(stuck))
        case AwaitingNetwork():
            return look_again(state, passed, now_s)
        case AwaitingWorkers() | LocatingCheckpoint():
            return to_deciding(state)
        case Preparing() | Training() | Adopting() | Deciding() | Ended():
            return state, ()
        case _:
            assert_never(state)


def _wait(state: State, until_s: float) -> State:
    match state:
        case Suspecting() | Fencing() | Overdue() | Settling() | Accusing() | AwaitingNetwork():
            return replace(state, until_s=max(state.until_s, until_s))
        case AwaitingWorkers(recovery=recovery):
            return replace(state, recovery=replace(recovery, returns_by_s=max(recovery.returns_by_s, until_s)))
        case LocatingCheckpoint(recovery=recovery):
            return replace(state, recovery=replace(recovery, found_by_s=max(recovery.found_by_s, until_s)))
        case Preparing() | Training() | Adopting() | Deciding() | Ended():
            return state
        case _:
            assert_never(state)


# --- what was decided ------------------------------------------------------------------------------------------------


def _decided(state: State, decided: PlanOrdered | WorkersWanted | CheckpointWanted, now_s: float) -> State:
    if not isinstance(state, Deciding):
        return state
    recovery, statuses, is_unexplained = state.recovery, state.statuses, state.is_unexplained
    match decided:
        case PlanOrdered():
            return Adopting(recovery=recovery, ordered=decided, ordered_s=now_s)
        case WorkersWanted():
            by_s = min(recovery.returns_by_s, now_s + recovery.control.start_timeout_s)
            return AwaitingWorkers(
                recovery=replace(recovery, returns_by_s=by_s), statuses=statuses, is_unexplained=is_unexplained
            )
        case CheckpointWanted():
            by_s = min(recovery.found_by_s, now_s + reading_s(_FIND_S, len(recovery.asked)))
            return LocatingCheckpoint(
                recovery=replace(recovery, found_by_s=by_s), statuses=statuses, is_unexplained=is_unexplained
            )
        case _:
            assert_never(decided)


# --- adopting, and the end -------------------------------------------------------------------------------------------


def _resumed(state: State, given: WorkersResumed) -> Step:
    """The last worker that computes under the new plan ends the recovery."""
    match state:
        case Suspecting(training=Adopting()):
            training, effects = _resumed(state.training, given)
            assert isinstance(training, Training | Adopting)
            return replace(state, training=training), effects
        case Adopting() if state.generation == given.message.generation:
            resumed = state.resumed.adding(given.worker_ids, given.message)
            adopting = replace(state, resumed=resumed)
            if not resumed.has_all(state.ordered.worker_ids):
                return adopting, ()
            ended = RecoveryEnded(recovery=state.recovery, adopting=adopting)
            return Training(generation=state.generation), (ended, PlanInForce())
        case _:
            return state, ()


def _end(state: State) -> Step:
    overtaken_by = "the run ended before"
    match state:
        case Preparing() | Training() | Suspecting(training=Training()):
            return Ended(), ()
        case Adopting():
            return Ended(), (RecoveryEnded(recovery=state.recovery, adopting=state, overtaken_by=overtaken_by),)
        case Suspecting():
            return _end(state.training)
        case (
            Fencing()
            | Overdue()
            | Settling()
            | Accusing()
            | AwaitingNetwork()
            | Deciding()
            | AwaitingWorkers()
            | LocatingCheckpoint()
        ):
            return Ended(), (RecoveryEnded(recovery=state.recovery, adopting=None, overtaken_by=overtaken_by),)
        case Ended():
            return state, ()
        case _:
            assert_never(state)
