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
from oobleck.control.nodes import reading_s

from . import fencing, states


@dataclass(frozen=True, slots=True)
class Transition:
    """In any of `before`, an input of the kind `given` may lead to any of `targets`."""

    before: tuple[type[states.State], ...]
    given: type[states.Input]
    targets: tuple[type[states.State], ...]
    """None: the state stays the same one. Its values may change, or there are effects."""
    why: str


TRAINED = (states.Training, states.Adopting, states.Suspecting)
"""Steps are committed in these."""
FENCED = (
    states.Fencing,
    states.Overdue,
    states.Settling,
    states.Accusing,
    states.AwaitingNetwork,
    states.Deciding,
    states.AwaitingWorkers,
    states.LocatingCheckpoint,
)
"""Nothing is committed in these."""
_ASKED = (states.Fencing, states.Overdue)
ASKING = (*_ASKED, states.Settling)
"""All are asked where they stand, and nothing is done with their answers yet."""
_SAME: tuple[type[states.State], ...] = ()

TRANSITIONS = (
    Transition(
        (states.Preparing,),
        states.TrainingBegun,
        (states.Training,),
        "the first plan is ordered",
    ),
    # Training
    Transition(
        (states.Training, states.Adopting),
        states.FailureSuspected,
        (states.Suspecting,),
        "a collective failed under a survivor",
    ),
    Transition((states.Suspecting,), states.FailureSuspected, _SAME, "another survivor reports it"),
    Transition((states.Suspecting,), states.TimePassed, _SAME, "nothing explains it: have all regroup"),
    Transition(TRAINED, states.RecoveryBegun, (states.Fencing,), "a loss, or another reason for a new plan"),
    Transition(TRAINED, states.RecoveryBegun, (states.Deciding,), "no worker is left to ask"),
    # Asking where all stand
    Transition(
        FENCED,
        states.RecoveryBegun,
        (states.Fencing,),
        "another loss: ask again under a newer generation",
    ),
    Transition(FENCED, states.RecoveryBegun, (states.Deciding,), "no worker is left to ask"),
    Transition(
        ASKING,
        states.MoreLost,
        _SAME,
        "ask nobody again; the others answer, or more losses may follow at once",
    ),
    Transition(
        _ASKED,
        states.MoreLost,
        (states.Settling,),
        "all others have answered; more losses may follow at once",
    ),
    Transition(ASKING, states.MoreLost, (states.Deciding,), "no worker is left"),
    Transition(_ASKED, states.Answered, _SAME, "others have still to answer"),
    Transition(
        _ASKED,
        states.Answered,
        (states.Settling,),
        "all have answered; more losses may follow at once",
    ),
    Transition(_ASKED, states.Answered, (states.Deciding,), "all have answered"),
    Transition(_ASKED, states.Answered, (states.Accusing,), "the answers explain a hang"),
    Transition(_ASKED, states.NodeDrained, _SAME, "others have still to answer"),
    Transition(
        _ASKED,
        states.NodeDrained,
        (states.Settling,),
        "all others have answered; more losses may follow at once",
    ),
    Transition(_ASKED, states.NodeDrained, (states.Deciding,), "all others have answered, or there are none"),
    Transition(_ASKED, states.NodeDrained, (states.Accusing,), "the answers of the others explain a hang"),
    Transition(_ASKED, states.NodeReached, _SAME, "ask its workers again"),
    Transition(
        (states.Fencing,),
        states.TimePassed,
        (states.Overdue,),
        "answers are missing: they may wait unread",
    ),
    Transition(
        (states.Overdue,),
        states.TimePassed,
        _SAME,
        "most are silent: wait for them; a few: give them up",
    ),
    Transition((states.Settling,), states.Answered, _SAME, "answered once more"),
    Transition((states.Settling,), states.Answered, (states.Deciding,), "losses have settled"),
    Transition(
        (states.Settling,),
        states.Answered,
        (states.Accusing,),
        "losses have settled; the answers explain a hang",
    ),
    Transition((states.Settling,), states.NodeDrained, _SAME, "its answer is not needed"),
    Transition(
        (states.Settling,),
        states.NodeDrained,
        (states.Deciding,),
        "losses have settled, or no worker is left",
    ),
    Transition(
        (states.Settling,),
        states.NodeDrained,
        (states.Accusing,),
        "losses have settled; the answers explain a hang",
    ),
    Transition((states.Settling,), states.TimePassed, (states.Deciding,), "losses have settled"),
    Transition(
        (states.Settling,),
        states.TimePassed,
        (states.Accusing,),
        "losses have settled; the answers explain a hang",
    ),
    Transition(
        (states.Accusing,),
        states.TimePassed,
        (states.Deciding,),
        "the accused are still there: decide, and end them again",
    ),
    # Too many do not reach each other
    Transition(_ASKED, states.Answered, (states.AwaitingNetwork,), "more nodes are cut off than may be lost"),
    Transition(
        _ASKED,
        states.NodeDrained,
        (states.AwaitingNetwork,),
        "more nodes are cut off than may be lost",
    ),
    Transition(
        (states.Settling,),
        states.Answered,
        (states.AwaitingNetwork,),
        "losses have settled; too many others are cut off",
    ),
    Transition(
        (states.Settling,),
        states.NodeDrained,
        (states.AwaitingNetwork,),
        "losses have settled; too many others are cut off",
    ),
    Transition(
        (states.Settling,),
        states.TimePassed,
        (states.AwaitingNetwork,),
        "losses have settled; too many others are cut off",
    ),
    Transition((states.AwaitingNetwork,), states.TimePassed, _SAME, "have all asked again whom they reach"),
    Transition((states.AwaitingNetwork,), states.NodeDrained, _SAME, "have the others asked again at once"),
    # What is decided
    Transition((states.Deciding,), states.PlanOrdered, (states.Adopting,), "all have their orders"),
    Transition(
        (states.Deciding,),
        states.WorkersWanted,
        (states.AwaitingWorkers,),
        "the others cannot do it alone",
    ),
    Transition(
        (states.Deciding,),
        states.CheckpointWanted,
        (states.LocatingCheckpoint,),
        "a layer has no living copy",
    ),
    Transition(
        (states.AwaitingWorkers,),
        states.NodeGone,
        (states.Deciding,),
        "it may be the one that was waited for",
    ),
    Transition(
        (states.AwaitingWorkers,),
        states.TimePassed,
        (states.Deciding,),
        "none was ready in time",
    ),
    Transition(
        (states.LocatingCheckpoint,),
        states.CheckpointReported,
        (states.Deciding,),
        "it may be the last answer",
    ),
    Transition(
        (states.LocatingCheckpoint,),
        states.TimePassed,
        (states.Deciding,),
        "not all have answered in time",
    ),
    Transition(
        (states.Accusing, states.AwaitingWorkers, states.LocatingCheckpoint),
        states.NodeDrained,
        (states.Deciding,),
        "decide without it",
    ),
    # The new plan
    Transition(
        (states.Adopting, states.Suspecting),
        states.WorkersResumed,
        _SAME,
        "others have still to compute, or to report",
    ),
    Transition(
        (states.Adopting,),
        states.WorkersResumed,
        (states.Training,),
        "all compute under the new plan",
    ),
    Transition(
        (states.Adopting, states.Suspecting),
        states.NodeReached,
        _SAME,
        "its orders may be lost: have all regroup",
    ),
    # Anywhere
    Transition(
        (states.Suspecting, states.Fencing, states.Overdue, states.Settling),
        states.HeldUp,
        _SAME,
        "what was said meanwhile is read first",
    ),
    Transition((states.AwaitingNetwork,), states.HeldUp, _SAME, "what was said meanwhile is read first"),
    Transition(
        (states.Accusing, states.AwaitingWorkers, states.LocatingCheckpoint),
        states.HeldUp,
        _SAME,
        "what was said meanwhile is read first",
    ),
    Transition((states.Preparing,), states.RunEnded, (states.Ended,), "it cannot begin"),
    Transition(TRAINED, states.RunEnded, (states.Ended,), "all steps are committed, or a stop was asked for"),
    Transition(FENCED, states.RunEnded, (states.Ended,), "there is no way on"),
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


_PHASES: Mapping[type[states.State], Phase] = {
    states.Preparing: Phase.PREPARING,
    **dict.fromkeys(TRAINED, Phase.TRAINING),
    **dict.fromkeys(FENCED, Phase.FENCING),
    states.Ended: Phase.ENDED,
}
"""A table, since the phase is asked for several times at every event."""


def phase(state: states.State) -> Phase:
    """Which phase a state belongs to."""
    return _PHASES[type(state)]


def deadline(state: states.State) -> float:
    """When TimePassed changes a state; infinity for never."""
    match state:
        case states.Preparing() | states.Training() | states.Adopting() | states.Deciding() | states.Ended():
            return math.inf
        case (
            states.Suspecting()
            | states.Fencing()
            | states.Overdue()
            | states.Settling()
            | states.Accusing()
            | states.AwaitingNetwork()
        ):
            return state.until_s
        case states.AwaitingWorkers():
            return state.recovery.returns_by_s
        case states.LocatingCheckpoint():
            return state.recovery.found_by_s
        case _:
            assert_never(state)


def step(state: states.State, given: states.Input, now_s: float) -> states.Step:
    """Return the next state, and the effects in the order in which to carry them out.

    An answer costs O(1), and the last one O(workers).
    """
    match given:
        case states.TrainingBegun():
            return (
                (states.Training(generation=given.generation), ())
                if isinstance(state, states.Preparing)
                else (state, ())
            )
        case states.RecoveryBegun():
            return fencing.begin(state, given, now_s)
        case states.MoreLost():
            return fencing.lose_more(state, given, now_s)
        case states.Answered():
            return fencing.answered(state, given, now_s)
        case states.FailureSuspected():
            return _suspect(state, given, now_s), ()
        case states.PlanOrdered() | states.WorkersWanted() | states.CheckpointWanted():
            return _decided(state, given, now_s), ()
        case states.CheckpointReported():
            return fencing.to_deciding(state) if isinstance(state, states.LocatingCheckpoint) else (state, ())
        case states.WorkersResumed():
            return _resumed(state, given)
        case states.NodeReached():
            return _reached(state, given.node)
        case states.NodeGone():
            return fencing.to_deciding(state) if isinstance(state, states.AwaitingWorkers) else (state, ())
        case states.NodeDrained():
            return fencing.left(state, given.node, now_s)
        case states.TimePassed():
            return (state, ()) if now_s < deadline(state) else _late(state, given, now_s)
        case states.HeldUp():
            return _wait(state, given.until_s), ()
        case states.RunEnded():
            return _end(state)
        case _:
            assert_never(given)


# --- training --------------------------------------------------------------------------------------------------------


def _suspect(state: states.State, suspected: states.FailureSuspected, now_s: float) -> states.State:
    until_s = now_s + reading_s(_SUSPICION_S, suspected.num_workers)
    match state:
        case states.Training() | states.Adopting() if state.generation == suspected.generation:
            return states.Suspecting(training=state, since_s=now_s, until_s=until_s)
        case states.Suspecting() if state.training.generation == suspected.generation:
            return replace(state, until_s=min(state.until_s, until_s))
        case _:
            return state


def _reached(state: states.State, node: str) -> states.Step:
    match state:
        case states.Fencing() | states.Overdue():
            awaited = tuple(sorted(worker_id for worker_id in state.awaited if worker_id.node == node))
            return state, (SendAll(worker_ids=awaited, message=state.recovery.fence),) if awaited else ()
        case states.Adopting() | states.Suspecting(training=states.Adopting()):
            adopting = state if isinstance(state, states.Adopting) else state.training
            assert isinstance(adopting, states.Adopting)
            is_awaited = any(worker_id.node == node for worker_id in adopting.awaited)
            return state, (states.BeginRecovery(cause=PlanCause.MASTER_LOST),) if is_awaited else ()
        case _:
            return state, ()


# --- time ------------------------------------------------------------------------------------------------------------


def _late(state: states.State, passed: states.TimePassed, now_s: float) -> states.Step:
    """A state's deadline is over."""
    match state:
        case states.Suspecting():
            return state, (states.BeginRecovery(cause=PlanCause.PEER_FAILED, detect_s=now_s - state.since_s),)
        case states.Fencing(recovery=recovery, statuses=statuses):
            until_s = now_s + reading_s(_LOOK_S, len(recovery.asked))
            return states.Overdue(recovery=recovery, statuses=statuses, until_s=until_s), ()
        case states.Overdue():
            return fencing.overdue(state, passed, now_s)
        case states.Settling():
            return fencing.use_answers(state, now_s)
        case states.Accusing(stuck=stuck):
            deciding, effects = fencing.to_deciding(state)
            return deciding, (*effects, *fencing.end_again(stuck))
        case states.AwaitingNetwork():
            return fencing.look_again(state, passed, now_s)
        case states.AwaitingWorkers() | states.LocatingCheckpoint():
            return fencing.to_deciding(state)
        case states.Preparing() | states.Training() | states.Adopting() | states.Deciding() | states.Ended():
            return state, ()
        case _:
            assert_never(state)


def _wait(state: states.State, until_s: float) -> states.State:
    match state:
        case (
            states.Suspecting()
            | states.Fencing()
            | states.Overdue()
            | states.Settling()
            | states.Accusing()
            | states.AwaitingNetwork()
        ):
            return replace(state, until_s=max(state.until_s, until_s))
        case states.AwaitingWorkers(recovery=recovery):
            return replace(state, recovery=replace(recovery, returns_by_s=max(recovery.returns_by_s, until_s)))
        case states.LocatingCheckpoint(recovery=recovery):
            return replace(state, recovery=replace(recovery, found_by_s=max(recovery.found_by_s, until_s)))
        case states.Preparing() | states.Training() | states.Adopting() | states.Deciding() | states.Ended():
            return state
        case _:
            assert_never(state)


# --- what was decided ------------------------------------------------------------------------------------------------


def _decided(
    state: states.State,
    decided: states.PlanOrdered | states.WorkersWanted | states.CheckpointWanted,
    now_s: float,
) -> states.State:
    if not isinstance(state, states.Deciding):
        return state
    recovery, statuses, is_unexplained = state.recovery, state.statuses, state.is_unexplained
    match decided:
        case states.PlanOrdered():
            return states.Adopting(recovery=recovery, ordered=decided, ordered_s=now_s)
        case states.WorkersWanted():
            by_s = min(recovery.returns_by_s, now_s + recovery.control.start_timeout_s)
            return states.AwaitingWorkers(
                recovery=replace(recovery, returns_by_s=by_s), statuses=statuses, is_unexplained=is_unexplained
            )
        case states.CheckpointWanted():
            by_s = min(recovery.found_by_s, now_s + reading_s(_FIND_S, len(recovery.asked)))
            return states.LocatingCheckpoint(
                recovery=replace(recovery, found_by_s=by_s), statuses=statuses, is_unexplained=is_unexplained
            )
        case _:
            assert_never(decided)


# --- adopting, and the end -------------------------------------------------------------------------------------------


def _resumed(state: states.State, given: states.WorkersResumed) -> states.Step:
    """The last worker that computes under the new plan ends the recovery."""
    match state:
        case states.Suspecting(training=states.Adopting()):
            training, effects = _resumed(state.training, given)
            assert isinstance(training, states.Training | states.Adopting)
            return replace(state, training=training), effects
        case states.Adopting() if state.generation == given.message.generation:
            resumed = state.resumed.adding(given.worker_ids, given.message)
            adopting = replace(state, resumed=resumed)
            if not resumed.has_all(state.ordered.worker_ids):
                return adopting, ()
            ended = states.RecoveryEnded(recovery=state.recovery, adopting=adopting)
            return states.Training(generation=state.generation), (ended, states.PlanInForce())
        case _:
            return state, ()


def _end(state: states.State) -> states.Step:
    overtaken_by = "the run ended before"
    match state:
        case states.Preparing() | states.Training() | states.Suspecting(training=states.Training()):
            return states.Ended(), ()
        case states.Adopting():
            return states.Ended(), (
                states.RecoveryEnded(recovery=state.recovery, adopting=state, overtaken_by=overtaken_by),
            )
        case states.Suspecting():
            return _end(state.training)
        case (
            states.Fencing()
            | states.Overdue()
            | states.Settling()
            | states.Accusing()
            | states.AwaitingNetwork()
            | states.Deciding()
            | states.AwaitingWorkers()
            | states.LocatingCheckpoint()
        ):
            return states.Ended(), (
                states.RecoveryEnded(recovery=state.recovery, adopting=None, overtaken_by=overtaken_by),
            )
        case states.Ended():
            return state, ()
        case _:
            assert_never(state)
