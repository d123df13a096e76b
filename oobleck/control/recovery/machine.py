"""From one plan to the next, as a state machine: `step(state, given, now_s) -> (state, effects)`.

`TRANSITIONS` is the machine: an input first changes what the state knows (`learn`), and then the first row whose guard
holds says where it leads and what is done. An input without such a row does no more. The diagram in
`docs/architecture.md` is made from the rows. The state alone says where a recovery is; even the deadline follows from
it. Decisions about a loss are made elsewhere: the machine asks for one by `Decide`, and the next input is the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias, TypeVar, assert_never

from oobleck.control.journal import PlanCause
from oobleck.control.nodes import reading_s

from . import fencing, states

T = TypeVar("T")

_Kinds: TypeAlias = type[T] | tuple[type[T], ...]


def always(_state: states.State, _given: states.Input, _now_s: float) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Transition:
    """In any of the states `before`, any of the inputs `given` leads to `target` if the guard holds.

    Both functions take the state after it has learned of the input, the input and the time.
    """

    before: _Kinds[states.State]
    given: _Kinds[states.Input]
    target: type[states.State] | None
    """None for the same state. Its values may change, or there are effects."""
    do: Callable[..., states.Step]
    why: str
    guard: Callable[..., bool] = always

    @property
    def sources(self) -> tuple[type[states.State], ...]:
        return self.before if isinstance(self.before, tuple) else (self.before,)

    @property
    def inputs(self) -> tuple[type[states.Input], ...]:
        return self.given if isinstance(self.given, tuple) else (self.given,)


TRAINED = (states.Training, states.Adopting, states.Suspecting)
"""Steps are committed in these."""
FENCED = (states.Fencing, states.Accusing, states.AwaitingNetwork, states.AwaitingWorkers, states.LocatingCheckpoint)
"""Nothing is committed in these."""
_BEGUN = (*TRAINED, *FENCED)


class Phase(StrEnum):
    """What the run is doing, for those outside."""

    PREPARING = "preparing"
    TRAINING = "training"
    FENCING = "fencing"
    ENDED = "ended"


# A failed collective waits this long for its cause, usually the loss of a node, and then all regroup.
_SUSPICION_S = 0.2
# Workers may look for checkpoints this long. Both times are longer if more workers report.
_FIND_S = 30.0

_PHASES: Mapping[type[states.State], Phase] = {
    states.Preparing: Phase.PREPARING,
    **dict.fromkeys(TRAINED, Phase.TRAINING),
    **dict.fromkeys(FENCED, Phase.FENCING),
    states.Ended: Phase.ENDED,
}


def phase(state: states.State) -> Phase:
    # Every event asks several times, so this is a look-up and not a match.
    return _PHASES[type(state)]


def deadline(state: states.State) -> float:
    """When TimePassed changes a state; infinity for never."""
    match state:
        case states.Preparing() | states.Training() | states.Adopting() | states.Ended():
            return math.inf
        case states.Suspecting() | states.Fencing() | states.Accusing() | states.AwaitingNetwork():
            return state.until_s
        case states.AwaitingWorkers():
            return state.recovery.returns_by_s
        case states.LocatingCheckpoint():
            return state.recovery.found_by_s
        case _:
            assert_never(state)


def step(state: states.State, given: states.Input, now_s: float) -> states.Step:
    """Return the next state, and the effects in their order. An answer costs O(1), and the last one O(workers)."""
    if isinstance(given, states.TimePassed) and now_s < deadline(state):
        return state, ()
    known = learn(state, given, now_s)
    if known is None:
        return state, ()
    row = transition(known, given, now_s)
    return (known, ()) if row is None else row.do(known, given, now_s)


def transition(known: states.State, given: states.Input, now_s: float) -> Transition | None:
    """Return the row for an input that the state has learned of; None if the input does no more."""
    rows = _ROWS.get((type(known), type(given)), ())
    return next((row for row in rows if row.guard(known, given, now_s)), None)


def learn(state: states.State, given: states.Input, now_s: float) -> states.State | None:
    """Add an input to what a state knows; None for an input that does not concern it, such as a late answer."""
    match given, state:
        case ((states.Answered() | states.MoreLost() | states.NodeDrained() | states.TimePassed()), states.Fencing()):
            return fencing.learn(state, given, now_s)
        case states.NodeDrained(node=node), (
            states.Accusing() | states.AwaitingNetwork() | states.AwaitingWorkers() | states.LocatingCheckpoint()
        ):
            return replace(state, recovery=fencing.without(state.recovery, (node,)))
        case states.FailureSuspected(), (states.Training() | states.Adopting()):
            return state if state.generation == given.generation else None
        case states.FailureSuspected(), states.Suspecting():
            # The first report's limit stays: a later one would undo `HeldUp`, and all regroup before messages are read.
            return state if state.training.generation == given.generation else None
        case states.WorkersResumed(), states.Adopting():
            return _resumed(state, given)
        case states.WorkersResumed(), states.Suspecting(training=states.Adopting() as adopting):
            resumed = _resumed(adopting, given)
            return None if resumed is None else replace(state, training=resumed)
        case states.HeldUp(until_s=until_s), _:
            return _waiting_until(state, until_s)
        case _:
            return state


# --- guards ----------------------------------------------------------------------------------------------------------


def regroups_in_vain(_state: states.State, begun: states.RecoveryBegun, _now_s: float) -> bool:
    return begun.num_regroups > fencing.MAX_REGROUPS


def nobody_to_ask(_state: states.State, begun: states.RecoveryBegun, _now_s: float) -> bool:
    return not begun.asked


def nobody_left(state: states.Fencing, _given: states.Input, _now_s: float) -> bool:
    return not state.recovery.asked


def some_are_missing(state: states.Fencing, _given: states.Input, _now_s: float) -> bool:
    return not state.is_complete


def time_is_up(state: states.Fencing, _given: states.Input, _now_s: float) -> bool:
    return not state.is_complete and not state.is_overdue


def may_settle(state: states.Fencing, _given: states.Input, now_s: float) -> bool:
    return now_s < state.recovery.settles_s


def all_answered(state: states.Deciding, _given: states.Input, _now_s: float) -> bool:
    return not isinstance(state, states.Fencing) or state.is_complete


def network_is_down(state: states.Fencing, _given: states.Input, _now_s: float) -> bool:
    return state.finding is not None and state.finding.is_network_down


def hang_is_explained(state: states.Fencing, _given: states.Input, _now_s: float) -> bool:
    return state.finding is not None and bool(state.finding.cut_off or state.finding.stuck)


def master_may_be_cut_off(_state: states.State, passed: states.TimePassed, _now_s: float) -> bool:
    return passed.is_suspicious


def its_workers_are_awaited(
    state: states.Fencing | states.Adopting | states.Suspecting, reached: states.NodeReached, _now_s: float
) -> bool:
    asking = state.training if isinstance(state, states.Suspecting) else state
    awaited = () if isinstance(asking, states.Training) else asking.awaited
    return any(worker_id.node == reached.node for worker_id in awaited)


def all_resumed(state: states.Adopting | states.Suspecting, _given: states.Input, _now_s: float) -> bool:
    adopting = state.training if isinstance(state, states.Suspecting) else state
    return isinstance(adopting, states.Adopting) and adopting.resumed.has_all(adopting.ordered.worker_ids)


# --- what is done ----------------------------------------------------------------------------------------------------


def _stay(state: states.State, _given: states.Input, _now_s: float) -> states.Step:
    return state, ()


def _begin_training(_state: states.Preparing, begun: states.TrainingBegun, _now_s: float) -> states.Step:
    return states.Training(generation=begun.generation), ()


def _suspected_until_s(suspected: states.FailureSuspected, now_s: float) -> float:
    return now_s + reading_s(_SUSPICION_S, suspected.num_workers)


def _suspect(state: states.Training | states.Adopting, suspected: states.FailureSuspected, now_s: float) -> states.Step:
    return states.Suspecting(training=state, since_s=now_s, until_s=_suspected_until_s(suspected, now_s)), ()


def _regroup(state: states.Suspecting, _passed: states.TimePassed, now_s: float) -> states.Step:
    return state, (states.BeginRecovery(cause=PlanCause.PEER_FAILED, detect_s=now_s - state.since_s),)


def _order_again(state: states.State, _reached: states.NodeReached, _now_s: float) -> states.Step:
    return state, (states.BeginRecovery(cause=PlanCause.MASTER_LOST),)


def _adopt(state: states.Deciding, ordered: states.PlanOrdered, now_s: float) -> states.Step:
    return states.Adopting(recovery=state.recovery, ordered=ordered, ordered_s=now_s), ()


def _await_workers(state: states.Deciding, _wanted: states.WorkersWanted, now_s: float) -> states.Step:
    answers, control = fencing.answers_in(state), state.recovery.control
    # The limit of the first wait stays: each worker that becomes ready begins the recovery again.
    by_s = min(state.recovery.returns_by_s, now_s + control.start_timeout_s)
    recovery, said = replace(state.recovery, returns_by_s=by_s), answers.statuses
    return states.AwaitingWorkers(recovery=recovery, statuses=said, is_unexplained=answers.is_unexplained), ()


def _locate_checkpoint(state: states.Deciding, _wanted: states.CheckpointWanted, now_s: float) -> states.Step:
    answers, asked = fencing.answers_in(state), state.recovery.asked
    by_s = min(state.recovery.found_by_s, now_s + reading_s(_FIND_S, len(asked)))
    recovery, said = replace(state.recovery, found_by_s=by_s), answers.statuses
    return states.LocatingCheckpoint(recovery=recovery, statuses=said, is_unexplained=answers.is_unexplained), ()


def _resumed(adopting: states.Adopting, given: states.WorkersResumed) -> states.Adopting | None:
    if adopting.generation != given.message.generation:
        return None
    return replace(adopting, resumed=adopting.resumed.adding(given.worker_ids, given.message))


def _train(state: states.Adopting | states.Suspecting, given: states.WorkersResumed, now_s: float) -> states.Step:
    if isinstance(state, states.Suspecting):
        assert isinstance(state.training, states.Adopting)
        training, effects = _train(state.training, given, now_s)
        assert isinstance(training, states.Training)
        # The failed collective has no explanation yet, so the suspicion outlives the recovery.
        return replace(state, training=training), effects
    ended = states.RecoveryEnded(recovery=state.recovery, adopting=state)
    return states.Training(generation=state.generation), (ended, states.PlanInForce())


def _waiting_until(state: states.State, until_s: float) -> states.State | None:
    match state:
        case states.Suspecting() | states.Fencing() | states.Accusing() | states.AwaitingNetwork():
            return replace(state, until_s=max(state.until_s, until_s))
        case states.AwaitingWorkers(recovery=recovery):
            return replace(state, recovery=replace(recovery, returns_by_s=max(recovery.returns_by_s, until_s)))
        case states.LocatingCheckpoint(recovery=recovery):
            return replace(state, recovery=replace(recovery, found_by_s=max(recovery.found_by_s, until_s)))
        case states.Preparing() | states.Training() | states.Adopting() | states.Ended():
            return None
        case _:
            assert_never(state)


def _end(state: states.State, _ended: states.RunEnded, _now_s: float) -> states.Step:
    if isinstance(state, states.Suspecting):
        state = state.training
    if isinstance(state, states.Preparing | states.Training | states.Ended):
        return states.Ended(), ()
    adopting = state if isinstance(state, states.Adopting) else None
    ended = states.RecoveryEnded(recovery=state.recovery, adopting=adopting, overtaken_by="the run ended before")
    return states.Ended(), (ended,)


# --- the table -------------------------------------------------------------------------------------------------------

_PLANNED = (states.Training, states.Adopting)
_ADOPTED = (states.Adopting, states.Suspecting)
_WAITING = (states.Accusing, states.AwaitingWorkers, states.LocatingCheckpoint)
_DECIDING = (states.Fencing, *_WAITING)
_LESS_TO_ASK = (states.MoreLost, states.NodeDrained)
_ANSWERS = (states.Answered, states.MoreLost, states.NodeDrained)
_COMPLETED = (states.Answered, states.NodeDrained, states.TimePassed)
_SAME = None

# For one state and one kind of input, the order of the rows counts: the first whose guard holds is taken.
TRANSITIONS = (
    Transition(states.Preparing, states.TrainingBegun, states.Training, _begin_training, "the first plan is ordered"),
    # Training
    Transition(_PLANNED, states.FailureSuspected, states.Suspecting, _suspect, "a collective failed under a survivor"),
    Transition(states.Suspecting, states.FailureSuspected, _SAME, _stay, "another survivor reports it"),
    Transition(states.Suspecting, states.TimePassed, _SAME, _regroup, "nothing explains it: have all regroup"),
    # Asking where all stand
    Transition(
        _BEGUN, states.RecoveryBegun, states.Fencing, fencing.give_in, "regrouping does not help", regroups_in_vain
    ),
    Transition(
        _BEGUN, states.RecoveryBegun, states.Fencing, fencing.begin_alone, "decide: no worker is left", nobody_to_ask
    ),
    Transition(_BEGUN, states.RecoveryBegun, states.Fencing, fencing.begin, "a loss, or another reason for a new plan"),
    Transition(states.Fencing, _LESS_TO_ASK, _SAME, fencing.decide, "decide: no worker is left", nobody_left),
    Transition(states.Fencing, _ANSWERS, _SAME, _stay, "others have still to answer", some_are_missing),
    Transition(
        states.Fencing, states.NodeReached, _SAME, fencing.ask_again, "ask its workers again", its_workers_are_awaited
    ),
    Transition(states.Fencing, states.TimePassed, _SAME, fencing.become_overdue, "answers may wait unread", time_is_up),
    Transition(
        states.Fencing, states.TimePassed, _SAME, fencing.overdue, "wait for most, give a few up", some_are_missing
    ),
    Transition(states.Fencing, _ANSWERS, _SAME, _stay, "all have answered; more losses may follow", may_settle),
    Transition(
        states.Fencing, _COMPLETED, states.AwaitingNetwork, fencing.await_network, "too many cut off", network_is_down
    ),
    Transition(
        states.Fencing, _COMPLETED, states.Accusing, fencing.accuse, "the answers explain a hang", hang_is_explained
    ),
    Transition(states.Fencing, _COMPLETED, _SAME, fencing.decide, "decide: all have answered, and losses settled"),
    Transition(
        states.Accusing, states.TimePassed, _SAME, fencing.decide_and_end_again, "decide: the accused are still there"
    ),
    # Too many do not reach each other
    Transition(states.AwaitingNetwork, states.TimePassed, _SAME, fencing.look_later, "wait", master_may_be_cut_off),
    Transition(states.AwaitingNetwork, states.TimePassed, _SAME, fencing.look_again, "ask all whom they reach"),
    Transition(states.AwaitingNetwork, states.NodeDrained, _SAME, fencing.look_at_once, "ask the others at once"),
    # What is decided
    Transition(_DECIDING, states.PlanOrdered, states.Adopting, _adopt, "all have their orders", all_answered),
    Transition(
        _DECIDING,
        states.WorkersWanted,
        states.AwaitingWorkers,
        _await_workers,
        "the others cannot do it alone",
        all_answered,
    ),
    Transition(
        _DECIDING,
        states.CheckpointWanted,
        states.LocatingCheckpoint,
        _locate_checkpoint,
        "a layer has no living copy",
        all_answered,
    ),
    Transition(states.AwaitingWorkers, states.NodeGone, _SAME, fencing.decide, "decide: it may be the awaited one"),
    Transition(states.AwaitingWorkers, states.TimePassed, _SAME, fencing.decide, "decide: none was ready in time"),
    Transition(
        states.LocatingCheckpoint, states.CheckpointReported, _SAME, fencing.decide, "decide: it may be the last"
    ),
    Transition(
        states.LocatingCheckpoint, states.TimePassed, _SAME, fencing.decide, "decide: not all have answered in time"
    ),
    Transition(_WAITING, states.NodeDrained, _SAME, fencing.decide, "decide without it"),
    # The new plan
    Transition(
        states.Adopting, states.WorkersResumed, states.Training, _train, "all compute under the new plan", all_resumed
    ),
    Transition(states.Suspecting, states.WorkersResumed, _SAME, _train, "all compute under the new plan", all_resumed),
    Transition(
        _ADOPTED, states.NodeReached, _SAME, _order_again, "its orders may be lost: regroup", its_workers_are_awaited
    ),
    # Anywhere
    Transition(states.Preparing, states.RunEnded, states.Ended, _end, "it cannot begin"),
    Transition(TRAINED, states.RunEnded, states.Ended, _end, "all steps are committed, or a stop was asked for"),
    Transition(FENCED, states.RunEnded, states.Ended, _end, "there is no way on"),
)

# The answers of thousands of workers come one by one, so each looks only at the rows of its own state and kind.
_ROWS: Mapping[tuple[type[states.State], type[states.Input]], tuple[Transition, ...]] = {
    (source, given): tuple(row for row in TRANSITIONS if source in row.sources and given in row.inputs)
    for source in (states.Preparing, *_BEGUN)
    for given in {kind for row in TRANSITIONS for kind in row.inputs}
}
