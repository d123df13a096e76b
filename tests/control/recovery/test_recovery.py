"""The recovery's state machine: every state is given every input, and does what its table says and nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from oobleck.control.events import EndRun, Record, SendAll
from oobleck.control.journal import Action, CutOff, HangExplained, LossCause, Notice, PlanCause, Silent
from oobleck.control.protocol import Fence, Resumed, Status
from oobleck.control.recovery import FENCED, TRAINED, TRANSITIONS, deadline, step
from oobleck.control.recovery.gathered import Gathered
from oobleck.control.recovery.machine import learn, transition
from oobleck.control.recovery.states import (
    Accusing,
    Adopting,
    Answered,
    AwaitingNetwork,
    AwaitingWorkers,
    BeginRecovery,
    CheckpointReported,
    CheckpointWanted,
    Decide,
    Ended,
    FailureSuspected,
    Fencing,
    GiveUp,
    HeldUp,
    Input,
    LocatingCheckpoint,
    MoreLost,
    NetworkDown,
    NodeDrained,
    NodeGone,
    NodeReached,
    PlanOrdered,
    Preparing,
    Recovery,
    RecoveryBegun,
    RecoveryEffect,
    RecoveryEnded,
    RunEnded,
    State,
    Suspecting,
    TimePassed,
    Training,
    TrainingBegun,
    WorkersResumed,
    WorkersWanted,
)
from oobleck.job import ControlSpec
from oobleck.planner import WorkerId
from tests.examples import examples

CONTROL = ControlSpec()
A, B, C = (WorkerId(node=node, device=0) for node in "abc")
ALL = (A, B, C)
FENCED_S = 100.0
SETTLED_S = FENCED_S + 1.0
LONG_AFTER_S = FENCED_S + 10_000.0
GENERATION = 3

STATUS = Status(
    device=0,
    generation=GENERATION,
    applied=1,
    last_record=None,
    reduced=None,
    adopted=2,
    layers=(),
    microbatches_done=0,
    broken=False,
)
WAITS = replace(STATUS, waits_for=(A, B))
"""Somebody waits for `a` and `b`, who wait for nobody."""
CUT = replace(STATUS, unreachable=(A, B))
DOWN = replace(STATUS, layers=(1,), unreachable=(A, B))
"""Nobody but the one that its peers do not reach holds this layer: it is the network that has failed."""
RESUMED = Resumed(device=0, generation=GENERATION, transfer_s=0.0, received_bytes=0, resumed_s=0.0, busy_s=())
ORDERED = PlanOrdered(worker_ids=ALL, action=Action.REINSTANTIATE, layers_moved=0, microbatches_redone=0, steps_lost=0)
FENCE = Fence(device=0, generation=GENERATION, lost=(), probe_addresses=())
PLAIN = Recovery(
    began_s=99.0,
    detect_s=0.5,
    cause=PlanCause.LOSS,
    loss=LossCause.CONNECTION_LOST,
    nodes=("d",),
    control=CONTROL,
    fault_threshold=1,
    fence=FENCE,
    fenced_s=FENCED_S,
    lost_s=FENCED_S,
    asked=ALL,
    explains=False,
)
HANG = replace(PLAIN, cause=PlanCause.HANG, loss=None, explains=True)
RECOVERIES = (PLAIN, HANG, replace(PLAIN, asked=(A,)))
LOSS = BeginRecovery(nodes=("b",), cause=PlanCause.LOSS, loss=LossCause.CONNECTION_LOST)
BEGUN = RecoveryBegun(
    wanted=LOSS,
    control=CONTROL,
    fault_threshold=1,
    fence=replace(FENCE, generation=GENERATION + 1),
    asked=(A, C),
    heard_s=FENCED_S,
    num_regroups=0,
)


def fencing(
    recovery: Recovery, statuses: dict[WorkerId, Status], until_s: float, *, is_overdue: bool = False
) -> Fencing:
    return Fencing(recovery=recovery, statuses=Gathered(statuses), until_s=until_s, is_overdue=is_overdue)


def states() -> Iterator[State]:
    """Every kind of state, with every kind of value that matters to a transition."""
    trained: tuple[Training | Adopting, ...] = (
        Training(generation=GENERATION),
        *(
            Adopting(
                recovery=PLAIN, ordered=ORDERED, ordered_s=FENCED_S, resumed=Gathered(dict.fromkeys(resumed, RESUMED))
            )
            for resumed in ((), (B, C))
        ),
    )
    yield from (Preparing(), Ended(), *trained)
    for training in trained:
        yield Suspecting(training=training, since_s=FENCED_S, until_s=SETTLED_S)
    for recovery in RECOVERIES:
        for said in (STATUS, WAITS, CUT, DOWN):
            statuses = {worker_id: said if worker_id == C else STATUS for worker_id in recovery.asked if worker_id != A}
            for awaited in {recovery.asked, (A,)}:
                waits = {worker_id: status for worker_id, status in statuses.items() if worker_id not in awaited}
                for is_overdue in (False, True):
                    yield fencing(recovery, waits, FENCED_S + 30, is_overdue=is_overdue)
            yield fencing(recovery, {**statuses, A: STATUS}, FENCED_S + 0.01)
        statuses = dict.fromkeys(recovery.asked, STATUS)
        yield Accusing(recovery=recovery, statuses=statuses, stuck=(A,), until_s=FENCED_S + 30)
        waited = replace(recovery, explains=True, cut_off=("b", "c"), cut_since_s=FENCED_S)
        yield AwaitingNetwork(recovery=waited, until_s=FENCED_S + 3)
        for is_unexplained in (False, True):
            limited = replace(recovery, returns_by_s=FENCED_S + 60, found_by_s=FENCED_S + 30)
            yield AwaitingWorkers(recovery=limited, statuses=statuses, is_unexplained=is_unexplained)
            yield LocatingCheckpoint(recovery=limited, statuses=statuses, is_unexplained=is_unexplained)


def inputs() -> Iterator[Input]:
    yield TrainingBegun(generation=1)
    for cause, num_regroups in ((PlanCause.LOSS, 0), (PlanCause.HANG, 1), (PlanCause.HANG, 4)):
        for asked in ((A, C), ()):
            yield replace(BEGUN, wanted=replace(LOSS, cause=cause), num_regroups=num_regroups, asked=asked)
    for nodes in (("a",), ("b",), ("a", "b", "c")):
        yield MoreLost(nodes=nodes, fence=replace(FENCE, lost=nodes))
    for status in (STATUS, WAITS, CUT, DOWN, replace(STATUS, generation=GENERATION - 1)):
        for worker_ids in ((A,), (B,), ALL):
            yield Answered(worker_ids=worker_ids, status=status)
    yield from (FailureSuspected(generation=generation, num_workers=2) for generation in (GENERATION - 1, GENERATION))
    yield from (ORDERED, WorkersWanted(), CheckpointWanted(), CheckpointReported())
    for generation in (GENERATION - 1, GENERATION):
        yield from (
            WorkersResumed(worker_ids=worker_ids, message=replace(RESUMED, generation=generation))
            for worker_ids in ((A,), ALL)
        )
    for node in "abd":
        yield from (NodeReached(node=node), NodeDrained(node=node))
    yield from (NodeGone(), RunEnded(), HeldUp(until_s=LONG_AFTER_S + 1))
    yield from (TimePassed(is_suspicious=is_suspicious) for is_suspicious in (False, True))


TIMES_S = (FENCED_S, SETTLED_S, LONG_AFTER_S)


def test_every_state_does_with_every_input_what_the_table_says_and_nothing_else():
    reached = set()
    for state in states():
        for given in inputs():
            for now_s in TIMES_S:
                after, effects = step(state, given, now_s)
                known = (
                    None if isinstance(given, TimePassed) and now_s < deadline(state) else learn(state, given, now_s)
                )
                row = None if known is None else transition(known, given, now_s)
                if row is None:
                    assert (after, effects) == (state if known is None else known, ())
                    assert type(after) is type(state)
                    continue
                assert type(after) is (row.target or type(state)), f"{state} became {after} by {given}, with {effects}"
                reached.add((TRANSITIONS.index(row), type(state), type(given)))
    listed = {
        (index, source, given)
        for index, row in enumerate(TRANSITIONS)
        for source in row.sources
        for given in row.inputs
    }
    dead = [(source.__name__, given.__name__, TRANSITIONS[index].why) for index, source, given in listed - reached]
    assert not dead, "rows that nothing reaches"


def test_the_table_has_a_row_for_each_input_and_a_way_to_each_state():
    listed = {kind for row in TRANSITIONS for kind in row.inputs}
    assert listed == set(get_args(Input)) - {HeldUp} == {type(given) for given in inputs()} - {HeldUp}
    assert {row.target for row in TRANSITIONS} == {*get_args(State), None} - {Preparing}
    assert {type(state) for state in states()} == set(get_args(State)) == {Preparing, *TRAINED, *FENCED, Ended}


def test_every_wait_of_a_recovery_has_an_end():
    for state in states():
        assert math.isfinite(deadline(state)) == isinstance(state, (Suspecting, *FENCED))


def test_nothing_that_is_reported_shortens_a_wait_for_messages_that_are_not_read_yet():
    held_s = LONG_AFTER_S + 1
    for state in states():
        if not isinstance(state, Suspecting):
            continue
        held, _ = step(state, HeldUp(until_s=held_s), SETTLED_S)
        for given in inputs():
            if isinstance(given, FailureSuspected):
                after, _ = step(held, given, SETTLED_S)
                assert deadline(after) >= held_s


def test_time_before_the_deadline_changes_nothing():
    for state in states():
        for is_suspicious in (False, True):
            before_s = math.nextafter(deadline(state), 0.0)
            assert step(state, TimePassed(is_suspicious=is_suspicious), before_s) == (state, ())


def test_answers_are_judged_in_the_order_in_which_the_workers_were_asked():
    """So that the same answers lead to the same decision, in whatever order they arrive."""
    state: State = Fencing(recovery=PLAIN, statuses=Gathered(), until_s=200.0)
    effects: tuple[RecoveryEffect, ...] = ()
    for worker_id in (C, A, B):
        state, effects = step(state, Answered(worker_ids=(worker_id,), status=STATUS), SETTLED_S)
    (decide,) = effects
    assert isinstance(decide, Decide)
    assert tuple(decide.answers.statuses) == ALL


def test_a_loss_during_a_recovery_belongs_to_it():
    waiting = AwaitingWorkers(
        recovery=replace(PLAIN, returns_by_s=150.0, found_by_s=130.0), statuses={}, is_unexplained=True
    )
    after, _ = step(waiting, replace(BEGUN, wanted=replace(LOSS, loss=LossCause.LEASE_EXPIRED)), 110.0)
    assert isinstance(after, Fencing)
    recovery = after.recovery
    assert (recovery.began_s, recovery.detect_s, recovery.loss) == (99.0, 0.5, LossCause.CONNECTION_LOST)
    assert recovery.nodes == ("d", "b")
    assert recovery.returns_by_s == 150.0, "no later loss extends it"
    assert recovery.found_by_s == math.inf, "what was found before may be lost with the node"


def test_losses_while_all_are_asked_ask_nobody_again() -> None:
    """What the others have said stays; those who are lost are not waited for, and their answers not used."""
    state: State = Fencing(recovery=PLAIN, statuses=Gathered({A: STATUS, B: STATUS}), until_s=200.0)
    state, effects = step(state, MoreLost(nodes=("b",), fence=replace(FENCE, lost=("b", "d"))), SETTLED_S)
    assert isinstance(state, Fencing)
    assert (state.awaited, effects) == ((C,), ())
    assert state.recovery.nodes == ("d", "b")
    state, effects = step(state, NodeReached(node="c"), SETTLED_S)
    (again,) = effects
    assert isinstance(again, SendAll)
    assert again == SendAll(worker_ids=(C,), message=replace(FENCE, lost=("b", "d"))), "it hears of all of them"
    state, effects = step(state, MoreLost(nodes=("c",), fence=FENCE), SETTLED_S)
    assert isinstance(state, Fencing)
    assert (deadline(state) > SETTLED_S, effects) == (True, ()), "more may follow at once"
    state, (decide,) = step(state, TimePassed(is_suspicious=False), deadline(state))
    assert isinstance(decide, Decide)
    assert tuple(decide.answers.statuses) == (A,)


def test_each_loss_of_a_rack_has_the_next_one_waited_for() -> None:
    state: State = fencing(PLAIN, dict.fromkeys(ALL, STATUS), SETTLED_S)
    first_s = deadline(state)
    state, _ = step(state, MoreLost(nodes=("a",), fence=FENCE), first_s)
    assert deadline(state) > first_s


def test_a_hang_is_explained_by_a_node_that_is_lost_meanwhile() -> None:
    state: State = Fencing(recovery=HANG, statuses=Gathered({A: WAITS, B: WAITS}), until_s=200.0)
    state, _ = step(state, MoreLost(nodes=("c",), fence=FENCE), SETTLED_S)
    _, effects = step(state, TimePassed(is_suspicious=False), deadline(state))
    assert [type(effect) for effect in effects] == [Decide]


def test_a_cut_network_is_what_a_hang_came_from():
    accusing = Accusing(recovery=HANG, statuses={}, stuck=(), until_s=130.0)
    after, _ = step(accusing, replace(BEGUN, wanted=replace(LOSS, loss=LossCause.CUT_OFF)), 110.0)
    assert isinstance(after, Fencing)
    assert (after.recovery.cause, after.recovery.loss) == (PlanCause.LOSS, LossCause.CUT_OFF)


def test_a_node_that_its_peers_do_not_reach_is_given_up():
    said = replace(STATUS, unreachable=(A,))
    state = fencing(HANG, {A: STATUS, B: said, C: said}, SETTLED_S)
    after, effects = step(state, TimePassed(is_suspicious=False), SETTLED_S)
    assert isinstance(after, Accusing)
    assert effects[-1] == GiveUp(nodes=("a",), loss=CutOff())


def awaiting(**fields) -> AwaitingNetwork:
    """Two nodes have been cut off since all were fenced; all are asked again in three seconds."""
    waited = replace(HANG, cause=PlanCause.NETWORK, cut_off=("b", "c"), cut_since_s=FENCED_S, **fields)
    return AwaitingNetwork(recovery=waited, until_s=FENCED_S + 3.0)


def asked_again(statuses: dict[WorkerId, Status], now_s: float) -> tuple[State, tuple[RecoveryEffect, ...]]:
    """All are asked again while the network is waited for, and have answered."""
    look = replace(BEGUN, wanted=BeginRecovery(cause=PlanCause.NETWORK), asked=ALL)
    state, _ = step(awaiting(), look, now_s)
    for worker_id, status in statuses.items():
        said = Answered(worker_ids=(worker_id,), status=replace(status, generation=GENERATION + 1))
        state, effects = step(state, said, now_s)
    is_settling = isinstance(state, Fencing) and state.is_complete
    return step(state, TimePassed(is_suspicious=False), now_s + 0.02) if is_settling else (state, effects)


def entries_in(effects: tuple[RecoveryEffect, ...]) -> list[object]:
    return [effect.entry for effect in effects if isinstance(effect, Record)]


HOLDS = replace(STATUS, layers=(1,))
CUT_OFF_FROM_A = {A: HOLDS, B: replace(HOLDS, unreachable=(A, C)), C: replace(HOLDS, unreachable=(A,))}
"""No two of them reach each other."""


def test_more_nodes_that_are_cut_off_than_may_be_lost_are_waited_for():
    state = fencing(HANG, CUT_OFF_FROM_A, SETTLED_S)
    after, effects = step(state, TimePassed(is_suspicious=False), SETTLED_S)
    assert isinstance(after, AwaitingNetwork)
    assert (after.recovery.cut_off, after.recovery.cut_since_s) == (("b", "c"), SETTLED_S)
    assert deadline(after) == SETTLED_S + CONTROL.lease_s
    assert [type(entry) for entry in entries_in(effects)] == [HangExplained, Notice]
    after, effects = step(after, TimePassed(is_suspicious=False), deadline(after))
    assert effects == (BeginRecovery(cause=PlanCause.NETWORK),)


def test_all_are_asked_again_at_growing_intervals_and_nothing_is_told_twice():
    after, effects = asked_again(CUT_OFF_FROM_A, FENCED_S + 100.0)
    assert isinstance(after, AwaitingNetwork)
    assert deadline(after) == pytest.approx(FENCED_S + 110.0, abs=0.1)
    assert effects == ()
    after, _ = asked_again(CUT_OFF_FROM_A, FENCED_S + 1000.0)
    assert deadline(after) == pytest.approx(FENCED_S + 1030.0, abs=0.1)


def test_a_network_that_is_back_is_gone_on_with_and_no_group_is_trusted():
    after, effects = asked_again(dict.fromkeys(ALL, HOLDS), FENCED_S + 20.0)
    decide = effects[-1]
    assert isinstance(decide, Decide)
    assert decide.answers.is_unexplained
    waiting, _ = step(after, WorkersWanted(), FENCED_S + 20.0)
    assert isinstance(waiting, AwaitingWorkers)
    assert waiting.is_unexplained, "what is decided later knows of it, too"
    (entry,) = entries_in(effects)
    assert isinstance(entry, Notice)
    assert "back after 20.0 s" in entry.text


def test_a_network_that_comes_back_in_parts_is_waited_for_once_more():
    """One node is less than may be lost; but the next look may find it well."""
    nearly = {A: HOLDS, B: HOLDS, C: replace(HOLDS, unreachable=(A, B))}
    after, _ = asked_again(nearly, FENCED_S + 20.0)
    assert isinstance(after, AwaitingNetwork)
    assert after.recovery.cut_off == ("c",)
    state = fencing(after.recovery, nearly, SETTLED_S)
    after, effects = step(state, TimePassed(is_suspicious=False), FENCED_S + 24.0)
    assert isinstance(after, Accusing)
    assert effects[-1] == GiveUp(nodes=("c",), loss=CutOff())


def test_a_network_that_does_not_come_back_ends_the_run():
    _, effects = asked_again(CUT_OFF_FROM_A, FENCED_S + CONTROL.network_timeout_s)
    (down,) = effects
    assert isinstance(down, NetworkDown)
    assert (down.nodes, round(down.waited_s)) == (("b", "c"), CONTROL.network_timeout_s)


def test_a_loss_while_the_network_is_waited_for_does_not_end_the_wait():
    after, _ = step(awaiting(), BEGUN, FENCED_S + 10.0)
    assert isinstance(after, Fencing)
    assert (after.recovery.explains, after.recovery.cut_since_s) == (True, FENCED_S)
    after, _ = step(after, MoreLost(nodes=("d",), fence=FENCE), FENCED_S + 10.5)
    assert isinstance(after, Fencing)
    assert after.recovery.explains


def test_nobody_is_asked_about_the_network_by_a_master_that_may_be_cut_off_itself():
    after, effects = step(awaiting(), TimePassed(is_suspicious=True), FENCED_S + 3.0)
    assert (deadline(after), effects) == (FENCED_S + 3.0 + CONTROL.lease_s, ())


def test_a_recovery_that_another_one_overtakes_is_accounted_for():
    adopting = Adopting(recovery=PLAIN, ordered=ORDERED, ordered_s=101.0)
    after, effects = step(adopting, BEGUN, 110.0)
    assert isinstance(after, Fencing)
    assert after.recovery.began_s == 110.0, "it is another one"
    (ended,) = (effect for effect in effects if isinstance(effect, RecoveryEnded))
    assert (ended.recovery, ended.adopting, bool(ended.overtaken_by)) == (PLAIN, adopting, True)


def test_reports_of_an_older_plan_end_no_recovery():
    adopting = Adopting(recovery=PLAIN, ordered=ORDERED, ordered_s=101.0)
    stale = replace(RESUMED, generation=GENERATION - 1)
    assert step(adopting, WorkersResumed(worker_ids=ALL, message=stale), 110.0) == (adopting, ())


def test_a_run_that_regroups_without_a_step_is_given_up():
    for num_regroups in (3, 4):
        hang = replace(BEGUN, wanted=BeginRecovery(cause=PlanCause.HANG), num_regroups=num_regroups)
        _, effects = step(Training(generation=1), hang, 110.0)
        is_given_up = num_regroups > 3
        assert any(isinstance(effect, EndRun) for effect in effects) == is_given_up
        assert any(isinstance(effect, SendAll) for effect in effects) != is_given_up


def test_workers_are_waited_for_as_long_as_a_start_may_take_and_no_longer():
    waiting, _ = step(fencing(PLAIN, dict.fromkeys(ALL, STATUS), SETTLED_S), WorkersWanted(), 110.0)
    assert deadline(waiting) == 110.0 + CONTROL.start_timeout_s
    again, (decide,) = step(waiting, NodeGone(), 120.0)
    assert isinstance(decide, Decide)
    waiting, _ = step(again, WorkersWanted(), 120.0)
    assert deadline(waiting) == 110.0 + CONTROL.start_timeout_s


def test_checkpoints_are_looked_for_once():
    locating, _ = step(fencing(PLAIN, dict.fromkeys(ALL, STATUS), SETTLED_S), CheckpointWanted(), 110.0)
    again, (decide,) = step(locating, CheckpointReported(), 120.0)
    assert isinstance(decide, Decide)
    assert deadline(step(again, CheckpointWanted(), 120.0)[0]) == deadline(locating) < math.inf


@pytest.mark.parametrize("decided", [ORDERED, WorkersWanted(), CheckpointWanted()])
def test_nothing_is_decided_before_all_have_answered(decided: Input):
    state = fencing(PLAIN, {A: STATUS, B: STATUS}, SETTLED_S)
    assert step(state, decided, SETTLED_S) == (state, ())


def test_silent_nodes_are_given_up_unless_most_are_silent():
    late = fencing(PLAIN, {B: STATUS, C: STATUS}, 130.0, is_overdue=True)
    after, effects = step(late, TimePassed(is_suspicious=False), 130.0)
    assert (after, effects) == (late, (GiveUp(nodes=("a",), loss=Silent(silent_s=30.0, is_worker=True)),))
    after, effects = step(late, TimePassed(is_suspicious=True), 130.0)
    assert (deadline(after), effects) == (130.0 + CONTROL.lease_s, ())
    most = fencing(PLAIN, {C: STATUS}, FENCED_S + 0.1, is_overdue=True)
    after, effects = step(most, TimePassed(is_suspicious=False), FENCED_S + 0.1)
    assert (deadline(after), effects) == (FENCED_S + 0.1 + CONTROL.lease_s, ())


def test_an_answer_of_a_worker_that_was_not_asked_completes_nothing():
    stranger = WorkerId(node="e", device=0)
    state: State = Fencing(recovery=PLAIN, statuses=Gathered({A: STATUS, B: STATUS}), until_s=200.0)
    state, effects = step(state, Answered(worker_ids=(stranger,), status=STATUS), SETTLED_S)
    assert isinstance(state, Fencing)
    assert (state.awaited, effects) == ((C,), ())


@pytest.mark.parametrize("cause", [PlanCause.PEER_FAILED, PlanCause.HANG])
def test_doorbells_are_rung_only_where_nobody_knows_why_nothing_moves(cause: PlanCause):
    for num_regroups in (1, 2):
        fence = replace(FENCE, probe_addresses=("unix:/a", "unix:/b"))
        begun = replace(BEGUN, wanted=replace(LOSS, cause=cause), num_regroups=num_regroups, fence=fence)
        _, effects = step(Training(generation=1), begun, 100.0)
        (fence,) = (effect.message for effect in effects if isinstance(effect, SendAll))
        assert isinstance(fence, Fence)
        assert bool(fence.probe_addresses) == (cause is PlanCause.HANG or num_regroups > 1)


speakers = st.sampled_from((ALL, ALL, (A,), (B,), (C,)))
ages = st.sampled_from((0, 0, 0, 1))
"""How many generations a message is late."""


class Walk(RuleBasedStateMachine):
    """A recovery by any path; decisions are drawn. What began is accounted for exactly once."""

    def __init__(self) -> None:
        super().__init__()
        self.state: State = Preparing()
        self.now_s = 0.0
        self.generation = 0
        self.begun = self.ended = 0
        self.decision: Input = WorkersWanted()

    def give(self, given: Input) -> None:
        before = self.state
        self.state, effects = step(before, given, self.now_s)
        if (self.state, effects) == (before, ()):
            return
        if isinstance(given, RecoveryBegun) and isinstance(before, TRAINED):
            self.begun += 1
        self.ended += sum(isinstance(effect, RecoveryEnded) for effect in effects)
        if any(isinstance(effect, EndRun) for effect in effects):
            self.give(RunEnded())
        for effect in effects:
            if isinstance(effect, Decide):  # as the coordinator does: within the same event
                assert tuple(effect.answers.statuses) == effect.answers.recovery.asked
                self.give(self.decision)
                assert isinstance(self.state, Adopting | AwaitingWorkers | LocatingCheckpoint)

    @precondition(lambda self: isinstance(self.state, Preparing))
    @rule()
    def begin_training(self) -> None:
        self.give(TrainingBegun(generation=self.generation))

    @precondition(lambda self: not isinstance(self.state, Preparing))
    @rule(
        cause=st.sampled_from(
            (PlanCause.LOSS, PlanCause.HANG, PlanCause.PEER_FAILED, PlanCause.NETWORK, PlanCause.JOINED)
        ),
        asked=st.sampled_from((ALL, ALL, (A, C), (B,), ())),
        num_regroups=st.integers(0, 4),
    )
    def begin(self, cause: PlanCause, asked: tuple[WorkerId, ...], num_regroups: int) -> None:
        self.generation += 1
        fence = replace(FENCE, generation=self.generation)
        wanted = replace(LOSS, cause=cause)
        begun = replace(BEGUN, wanted=wanted, asked=asked, num_regroups=num_regroups, fence=fence, heard_s=self.now_s)
        self.give(begun)

    @rule(nodes=st.sampled_from((("a",), ("b",), ("b", "c"))))
    def lose_more(self, nodes: tuple[str, ...]) -> None:
        self.give(MoreLost(nodes=nodes, fence=replace(FENCE, lost=nodes)))

    @rule(
        worker_id=st.sampled_from(ALL),
        said=st.sampled_from((STATUS, WAITS, CUT, DOWN)),
        age=st.sampled_from((0, 0, 0, 1)),
    )
    def answer(self, worker_id: WorkerId, said: Status, age: int) -> None:
        status = replace(said, generation=self.generation - age)
        self.give(Answered(worker_ids=(worker_id,), status=status))

    @rule(worker_id=st.sampled_from(ALL), age=st.sampled_from((0, 0, 0, 1)))
    def resume(self, worker_id: WorkerId, age: int) -> None:
        message = replace(RESUMED, generation=self.generation - age)
        self.give(WorkersResumed(worker_ids=(worker_id,), message=message))

    @precondition(lambda self: isinstance(self.state, TRAINED))
    @rule()
    def suspect(self) -> None:
        self.give(FailureSuspected(generation=self.generation, num_workers=2))

    @rule(node=st.sampled_from("abc"), kind=st.sampled_from((NodeReached, NodeDrained)))
    def hear_of_node(self, node: str, kind: type[NodeReached] | type[NodeDrained]) -> None:
        self.give(kind(node=node))

    @rule(given=st.sampled_from((NodeGone(), CheckpointReported())))
    def hear(self, given: Input) -> None:
        self.give(given)

    @precondition(lambda self: math.isfinite(deadline(self.state)))
    @rule(is_suspicious=st.booleans())
    def reach_deadline(self, is_suspicious: bool) -> None:
        self.now_s = max(self.now_s, deadline(self.state))
        self.give(TimePassed(is_suspicious=is_suspicious))

    @rule(seconds=st.floats(0.0, 40.0))
    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds

    @rule(seconds=st.floats(0.0, 5.0))
    def hold_up(self, seconds: float) -> None:
        self.give(HeldUp(until_s=self.now_s + seconds))

    @rule(decision=st.sampled_from((ORDERED, ORDERED, WorkersWanted(), CheckpointWanted())))
    def decide_later(self, decision: PlanOrdered | WorkersWanted | CheckpointWanted) -> None:
        self.decision = decision

    @precondition(lambda self: not isinstance(self.state, (Preparing, Ended)))
    @rule(is_meant=st.sampled_from((False,) * 9 + (True,)))
    def end(self, is_meant: bool) -> None:
        if is_meant:
            self.give(RunEnded())

    @invariant()
    def each_recovery_is_accounted_for_once(self) -> None:
        is_open = isinstance(self.state, (Adopting, *FENCED)) or (
            isinstance(self.state, Suspecting) and isinstance(self.state.training, Adopting)
        )
        assert self.begun - self.ended == is_open

    @invariant()
    def a_recovery_never_waits_for_ever(self) -> None:
        if isinstance(self.state, FENCED):
            assert math.isfinite(deadline(self.state))


TestWalk = Walk.TestCase
TestWalk.settings = examples(60)
