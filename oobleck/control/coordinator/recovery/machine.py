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

from . import fencing
from . import states as recovery_states


@dataclass(frozen=True, slots=True)
class Transition:
    """In any of `states`, an input of the kind `given` may lead to any of `targets`."""

    states: tuple[type[recovery_states.State], ...]
    given: type[recovery_states.Input]
    targets: tuple[type[recovery_states.State], ...]
    """None: the state stays the same one. Its values may change, or there are effects."""
    why: str


TRAINED = (recovery_states.Training, recovery_states.Adopting, recovery_states.Suspecting)
"""Steps are committed in these."""
FENCED = (
    recovery_states.Fencing,
    recovery_states.Overdue,
    recovery_states.Settling,
    recovery_states.Accusing,
    recovery_states.AwaitingNetwork,
    recovery_states.Deciding,
    recovery_states.AwaitingWorkers,
    recovery_states.LocatingCheckpoint,
)
"""Nothing is committed in these."""
_ASKED = (recovery_states.Fencing, recovery_states.Overdue)
ASKING = (*_ASKED, recovery_states.Settling)
"""All are asked where they stand, and nothing is done with their answers yet."""
_SAME: tuple[type[recovery_states.State], ...] = ()

TRANSITIONS = (
    Transition(
        (recovery_states.Preparing,),
        recovery_states.TrainingBegun,
        (recovery_states.Training,),
        "the first plan is ordered",
    ),
    # Training
    Transition(
        (recovery_states.Training, recovery_states.Adopting),
        recovery_states.FailureSuspected,
        (recovery_states.Suspecting,),
        "a collective failed under a survivor",
    ),
    Transition((recovery_states.Suspecting,), recovery_states.FailureSuspected, _SAME, "another survivor reports it"),
    Transition(
        (recovery_states.Suspecting,), recovery_states.TimePassed, _SAME, "nothing explains it: have all regroup"
    ),
    Transition(
        TRAINED, recovery_states.RecoveryBegun, (recovery_states.Fencing,), "a loss, or another reason for a new plan"
    ),
    Transition(TRAINED, recovery_states.RecoveryBegun, (recovery_states.Deciding,), "no worker is left to ask"),
    # Asking where all stand
    Transition(
        FENCED,
        recovery_states.RecoveryBegun,
        (recovery_states.Fencing,),
        "another loss: ask again under a newer generation",
    ),
    Transition(FENCED, recovery_states.RecoveryBegun, (recovery_states.Deciding,), "no worker is left to ask"),
    Transition(
        ASKING,
        recovery_states.MoreLost,
        _SAME,
        "ask nobody again; the others answer, or more losses may follow at once",
    ),
    Transition(
        _ASKED,
        recovery_states.MoreLost,
        (recovery_states.Settling,),
        "all others have answered; more losses may follow at once",
    ),
    Transition(ASKING, recovery_states.MoreLost, (recovery_states.Deciding,), "no worker is left"),
    Transition(_ASKED, recovery_states.Answered, _SAME, "others have still to answer"),
    Transition(
        _ASKED,
        recovery_states.Answered,
        (recovery_states.Settling,),
        "all have answered; more losses may follow at once",
    ),
    Transition(_ASKED, recovery_states.Answered, (recovery_states.Deciding,), "all have answered"),
    Transition(_ASKED, recovery_states.Answered, (recovery_states.Accusing,), "the answers explain a hang"),
    Transition(_ASKED, recovery_states.NodeDrained, _SAME, "others have still to answer"),
    Transition(
        _ASKED,
        recovery_states.NodeDrained,
        (recovery_states.Settling,),
        "all others have answered; more losses may follow at once",
    ),
    Transition(
        _ASKED, recovery_states.NodeDrained, (recovery_states.Deciding,), "all others have answered, or there are none"
    ),
    Transition(
        _ASKED, recovery_states.NodeDrained, (recovery_states.Accusing,), "the answers of the others explain a hang"
    ),
    Transition(_ASKED, recovery_states.NodeReached, _SAME, "ask its workers again"),
    Transition(
        (recovery_states.Fencing,),
        recovery_states.TimePassed,
        (recovery_states.Overdue,),
        "answers are missing: they may wait unread",
    ),
    Transition(
        (recovery_states.Overdue,),
        recovery_states.TimePassed,
        _SAME,
        "most are silent: wait for them; a few: give them up",
    ),
    Transition((recovery_states.Settling,), recovery_states.Answered, _SAME, "answered once more"),
    Transition(
        (recovery_states.Settling,), recovery_states.Answered, (recovery_states.Deciding,), "losses have settled"
    ),
    Transition(
        (recovery_states.Settling,),
        recovery_states.Answered,
        (recovery_states.Accusing,),
        "losses have settled; the answers explain a hang",
    ),
    Transition((recovery_states.Settling,), recovery_states.NodeDrained, _SAME, "its answer is not needed"),
    Transition(
        (recovery_states.Settling,),
        recovery_states.NodeDrained,
        (recovery_states.Deciding,),
        "losses have settled, or no worker is left",
    ),
    Transition(
        (recovery_states.Settling,),
        recovery_states.NodeDrained,
        (recovery_states.Accusing,),
        "losses have settled; the answers explain a hang",
    ),
    Transition(
        (recovery_states.Settling,), recovery_states.TimePassed, (recovery_states.Deciding,), "losses have settled"
    ),
    Transition(
        (recovery_states.Settling,),
        recovery_states.TimePassed,
        (recovery_states.Accusing,),
        "losses have settled; the answers explain a hang",
    ),
    Transition(
        (recovery_states.Accusing,),
        recovery_states.TimePassed,
        (recovery_states.Deciding,),
        "the accused are still there: decide, and end them again",
    ),
    # Too many do not reach each other
    Transition(
        _ASKED, recovery_states.Answered, (recovery_states.AwaitingNetwork,), "more nodes are cut off than may be lost"
    ),
    Transition(
        _ASKED,
        recovery_states.NodeDrained,
        (recovery_states.AwaitingNetwork,),
        "more nodes are cut off than may be lost",
    ),
    Transition(
        (recovery_states.Settling,),
        recovery_states.Answered,
        (recovery_states.AwaitingNetwork,),
        "losses have settled; too many others are cut off",
    ),
    Transition(
        (recovery_states.Settling,),
        recovery_states.NodeDrained,
        (recovery_states.AwaitingNetwork,),
        "losses have settled; too many others are cut off",
    ),
    Transition(
        (recovery_states.Settling,),
        recovery_states.TimePassed,
        (recovery_states.AwaitingNetwork,),
        "losses have settled; too many others are cut off",
    ),
    Transition(
        (recovery_states.AwaitingNetwork,), recovery_states.TimePassed, _SAME, "have all asked again whom they reach"
    ),
    Transition(
        (recovery_states.AwaitingNetwork,), recovery_states.NodeDrained, _SAME, "have the others asked again at once"
    ),
    # What is decided
    Transition(
        (recovery_states.Deciding,), recovery_states.PlanOrdered, (recovery_states.Adopting,), "all have their orders"
    ),
    Transition(
        (recovery_states.Deciding,),
        recovery_states.WorkersWanted,
        (recovery_states.AwaitingWorkers,),
        "the others cannot do it alone",
    ),
    Transition(
        (recovery_states.Deciding,),
        recovery_states.CheckpointWanted,
        (recovery_states.LocatingCheckpoint,),
        "a layer has no living copy",
    ),
    Transition(
        (recovery_states.AwaitingWorkers,),
        recovery_states.NodeGone,
        (recovery_states.Deciding,),
        "it may be the one that was waited for",
    ),
    Transition(
        (recovery_states.AwaitingWorkers,),
        recovery_states.TimePassed,
        (recovery_states.Deciding,),
        "none was ready in time",
    ),
    Transition(
        (recovery_states.LocatingCheckpoint,),
        recovery_states.CheckpointReported,
        (recovery_states.Deciding,),
        "it may be the last answer",
    ),
    Transition(
        (recovery_states.LocatingCheckpoint,),
        recovery_states.TimePassed,
        (recovery_states.Deciding,),
        "not all have answered in time",
    ),
    Transition(
        (recovery_states.Accusing, recovery_states.AwaitingWorkers, recovery_states.LocatingCheckpoint),
        recovery_states.NodeDrained,
        (recovery_states.Deciding,),
        "decide without it",
    ),
    # The new plan
    Transition(
        (recovery_states.Adopting, recovery_states.Suspecting),
        recovery_states.WorkersResumed,
        _SAME,
        "others have still to compute, or to report",
    ),
    Transition(
        (recovery_states.Adopting,),
        recovery_states.WorkersResumed,
        (recovery_states.Training,),
        "all compute under the new plan",
    ),
    Transition(
        (recovery_states.Adopting, recovery_states.Suspecting),
        recovery_states.NodeReached,
        _SAME,
        "its orders may be lost: have all regroup",
    ),
    # Anywhere
    Transition(
        (recovery_states.Suspecting, recovery_states.Fencing, recovery_states.Overdue, recovery_states.Settling),
        recovery_states.HeldUp,
        _SAME,
        "what was said meanwhile is read first",
    ),
    Transition(
        (recovery_states.AwaitingNetwork,), recovery_states.HeldUp, _SAME, "what was said meanwhile is read first"
    ),
    Transition(
        (recovery_states.Accusing, recovery_states.AwaitingWorkers, recovery_states.LocatingCheckpoint),
        recovery_states.HeldUp,
        _SAME,
        "what was said meanwhile is read first",
    ),
    Transition((recovery_states.Preparing,), recovery_states.RunEnded, (recovery_states.Ended,), "it cannot begin"),
    Transition(
        TRAINED, recovery_states.RunEnded, (recovery_states.Ended,), "all steps are committed, or a stop was asked for"
    ),
    Transition(FENCED, recovery_states.RunEnded, (recovery_states.Ended,), "there is no way on"),
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


_PHASES: Mapping[type[recovery_states.State], Phase] = {
    recovery_states.Preparing: Phase.PREPARING,
    **dict.fromkeys(TRAINED, Phase.TRAINING),
    **dict.fromkeys(FENCED, Phase.FENCING),
    recovery_states.Ended: Phase.ENDED,
}
"""A table, since the phase is asked for several times at every event."""


def phase(state: recovery_states.State) -> Phase:
    """Which phase a state belongs to."""
    return _PHASES[type(state)]


def deadline(state: recovery_states.State) -> float:
    """When TimePassed changes a state; infinity for never."""
    match state:
        case (
            recovery_states.Preparing()
            | recovery_states.Training()
            | recovery_states.Adopting()
            | recovery_states.Deciding()
            | recovery_states.Ended()
        ):
            return math.inf
        case (
            recovery_states.Suspecting()
            | recovery_states.Fencing()
            | recovery_states.Overdue()
            | recovery_states.Settling()
            | recovery_states.Accusing()
            | recovery_states.AwaitingNetwork()
        ):
            return state.until_s
        case recovery_states.AwaitingWorkers():
            return state.recovery.returns_by_s
        case recovery_states.LocatingCheckpoint():
            return state.recovery.found_by_s
        case _:
            assert_never(state)


def step(state: recovery_states.State, given: recovery_states.Input, now_s: float) -> recovery_states.Step:
    """Return the next state, and the effects in the order in which to carry them out.

    An answer costs O(1), and the last one O(workers).
    """
    match given:
        case recovery_states.TrainingBegun():
            return (
                (recovery_states.Training(generation=given.generation), ())
                if isinstance(state, recovery_states.Preparing)
                else (state, ())
            )
        case recovery_states.RecoveryBegun():
            return fencing.begin(state, given, now_s)
        case recovery_states.MoreLost():
            return fencing.lose_more(state, given, now_s)
        case recovery_states.Answered():
            return fencing.answered(state, given, now_s)
        case recovery_states.FailureSuspected():
            return _suspect(state, given, now_s), ()
        case recovery_states.PlanOrdered() | recovery_states.WorkersWanted() | recovery_states.CheckpointWanted():
            return _decided(state, given, now_s), ()
        case recovery_states.CheckpointReported():
            return fencing.to_deciding(state) if isinstance(state, recovery_states.LocatingCheckpoint) else (state, ())
        case recovery_states.WorkersResumed():
            return _resumed(state, given)
        case recovery_states.NodeReached():
            return _reached(state, given.node)
        case recovery_states.NodeGone():
            return fencing.to_deciding(state) if isinstance(state, recovery_states.AwaitingWorkers) else (state, ())
        case recovery_states.NodeDrained():
            return fencing.left(state, given.node, now_s)
        case recovery_states.TimePassed():
            return (state, ()) if now_s < deadline(state) else _late(state, given, now_s)
        case recovery_states.HeldUp():
            return _wait(state, given.until_s), ()
        case recovery_states.RunEnded():
            return _end(state)
        case _:
            assert_never(given)


# --- training --------------------------------------------------------------------------------------------------------


def _suspect(
    state: recovery_states.State, suspected: recovery_states.FailureSuspected, now_s: float
) -> recovery_states.State:
    until_s = now_s + reading_s(_SUSPICION_S, suspected.num_workers)
    match state:
        case recovery_states.Training() | recovery_states.Adopting() if state.generation == suspected.generation:
            return recovery_states.Suspecting(training=state, since_s=now_s, until_s=until_s)
        case recovery_states.Suspecting() if state.training.generation == suspected.generation:
            return replace(state, until_s=min(state.until_s, until_s))
        case _:
            return state


def _reached(state: recovery_states.State, node: str) -> recovery_states.Step:
    match state:
        case recovery_states.Fencing() | recovery_states.Overdue():
            awaited = tuple(sorted(worker_id for worker_id in state.awaited if worker_id.node == node))
            return state, (SendAll(worker_ids=awaited, message=state.recovery.fence),) if awaited else ()
        case recovery_states.Adopting() | recovery_states.Suspecting(training=recovery_states.Adopting()):
            adopting = state if isinstance(state, recovery_states.Adopting) else state.training
            assert isinstance(adopting, recovery_states.Adopting)
            is_awaited = any(worker_id.node == node for worker_id in adopting.awaited)
            return state, (recovery_states.BeginRecovery(cause=PlanCause.MASTER_LOST),) if is_awaited else ()
        case _:
            return state, ()


# --- time ------------------------------------------------------------------------------------------------------------


def _late(state: recovery_states.State, passed: recovery_states.TimePassed, now_s: float) -> recovery_states.Step:
    """A state's deadline is over."""
    match state:
        case recovery_states.Suspecting():
            return state, (recovery_states.BeginRecovery(cause=PlanCause.PEER_FAILED, detect_s=now_s - state.since_s),)
        case recovery_states.Fencing(recovery=recovery, statuses=statuses):
            until_s = now_s + reading_s(_LOOK_S, len(recovery.asked))
            return recovery_states.Overdue(recovery=recovery, statuses=statuses, until_s=until_s), ()
        case recovery_states.Overdue():
            return fencing.overdue(state, passed, now_s)
        case recovery_states.Settling():
            return fencing.use_answers(state, now_s)
        case recovery_states.Accusing(stuck=stuck):
            deciding, effects = fencing.to_deciding(state)
            return deciding, (*effects, *fencing.end_again(stuck))
        case recovery_states.AwaitingNetwork():
            return fencing.look_again(state, passed, now_s)
        case recovery_states.AwaitingWorkers() | recovery_states.LocatingCheckpoint():
            return fencing.to_deciding(state)
        case (
            recovery_states.Preparing()
            | recovery_states.Training()
            | recovery_states.Adopting()
            | recovery_states.Deciding()
            | recovery_states.Ended()
        ):
            return state, ()
        case _:
            assert_never(state)


def _wait(state: recovery_states.State, until_s: float) -> recovery_states.State:
    match state:
        case (
            recovery_states.Suspecting()
            | recovery_states.Fencing()
            | recovery_states.Overdue()
            | recovery_states.Settling()
            | recovery_states.Accusing()
            | recovery_states.AwaitingNetwork()
        ):
            return replace(state, until_s=max(state.until_s, until_s))
        case recovery_states.AwaitingWorkers(recovery=recovery):
            return replace(state, recovery=replace(recovery, returns_by_s=max(recovery.returns_by_s, until_s)))
        case recovery_states.LocatingCheckpoint(recovery=recovery):
            return replace(state, recovery=replace(recovery, found_by_s=max(recovery.found_by_s, until_s)))
        case (
            recovery_states.Preparing()
            | recovery_states.Training()
            | recovery_states.Adopting()
            | recovery_states.Deciding()
            | recovery_states.Ended()
        ):
            return state
        case _:
            assert_never(state)


# --- what was decided ------------------------------------------------------------------------------------------------


def _decided(
    state: recovery_states.State,
    decided: recovery_states.PlanOrdered | recovery_states.WorkersWanted | recovery_states.CheckpointWanted,
    now_s: float,
) -> recovery_states.State:
    if not isinstance(state, recovery_states.Deciding):
        return state
    recovery, statuses, is_unexplained = state.recovery, state.statuses, state.is_unexplained
    match decided:
        case recovery_states.PlanOrdered():
            return recovery_states.Adopting(recovery=recovery, ordered=decided, ordered_s=now_s)
        case recovery_states.WorkersWanted():
            by_s = min(recovery.returns_by_s, now_s + recovery.control.start_timeout_s)
            return recovery_states.AwaitingWorkers(
                recovery=replace(recovery, returns_by_s=by_s), statuses=statuses, is_unexplained=is_unexplained
            )
        case recovery_states.CheckpointWanted():
            by_s = min(recovery.found_by_s, now_s + reading_s(_FIND_S, len(recovery.asked)))
            return recovery_states.LocatingCheckpoint(
                recovery=replace(recovery, found_by_s=by_s), statuses=statuses, is_unexplained=is_unexplained
            )
        case _:
            assert_never(decided)


# --- adopting, and the end -------------------------------------------------------------------------------------------


def _resumed(state: recovery_states.State, given: recovery_states.WorkersResumed) -> recovery_states.Step:
    """The last worker that computes under the new plan ends the recovery."""
    match state:
        case recovery_states.Suspecting(training=recovery_states.Adopting()):
            training, effects = _resumed(state.training, given)
            assert isinstance(training, recovery_states.Training | recovery_states.Adopting)
            return replace(state, training=training), effects
        case recovery_states.Adopting() if state.generation == given.message.generation:
            resumed = state.resumed.adding(given.worker_ids, given.message)
            adopting = replace(state, resumed=resumed)
            if not resumed.has_all(state.ordered.worker_ids):
                return adopting, ()
            ended = recovery_states.RecoveryEnded(recovery=state.recovery, adopting=adopting)
            return recovery_states.Training(generation=state.generation), (ended, recovery_states.PlanInForce())
        case _:
            return state, ()


def _end(state: recovery_states.State) -> recovery_states.Step:
    overtaken_by = "the run ended before"
    match state:
        case (
            recovery_states.Preparing()
            | recovery_states.Training()
            | recovery_states.Suspecting(training=recovery_states.Training())
        ):
            return recovery_states.Ended(), ()
        case recovery_states.Adopting():
            return recovery_states.Ended(), (
                recovery_states.RecoveryEnded(recovery=state.recovery, adopting=state, overtaken_by=overtaken_by),
            )
        case recovery_states.Suspecting():
            return _end(state.training)
        case (
            recovery_states.Fencing()
            | recovery_states.Overdue()
            | recovery_states.Settling()
            | recovery_states.Accusing()
            | recovery_states.AwaitingNetwork()
            | recovery_states.Deciding()
            | recovery_states.AwaitingWorkers()
            | recovery_states.LocatingCheckpoint()
        ):
            return recovery_states.Ended(), (
                recovery_states.RecoveryEnded(recovery=state.recovery, adopting=None, overtaken_by=overtaken_by),
            )
        case recovery_states.Ended():
            return state, ()
        case _:
            assert_never(state)
