"""The generations of a script's ranks: no rank starts before all of the generation before are gone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events import EndRun
from oobleck.control.journal import GenerationCause
from oobleck.control.scripts.machine import TRANSITIONS, deadline, start, step
from oobleck.control.scripts.states import (
    Ask,
    Asking,
    Begin,
    Candidate,
    Clear,
    Ending,
    Failed,
    Finished,
    Gathering,
    GiveUpSilent,
    Gone,
    Input,
    Leave,
    LetGo,
    Over,
    Ready,
    Roster,
    Rules,
    Running,
    Signal,
    State,
    StopAsked,
    TooFew,
)
from tests.examples import examples

NODES = ("a", "b", "c", "d")
RULES = Rules(
    min_nodes=2,
    max_nodes=3,
    max_restarts=1,
    waits_for_all_s=10,
    waits_for_min_s=60,
    grace_s=5,
    patience_s=30,
)
PATIENT = replace(RULES, waits_for_all_s=100)
STOP = EndRun(exit_code=130, reason="stopped")


def there(*names: str, num_expected: int = 0) -> Roster:
    return Roster(candidates=tuple(Candidate(node=name, num_ranks=2) for name in names), num_expected=num_expected)


def running(*names: str, rules: Rules = RULES) -> Running:
    state, _ = step(start(0), Ready(node=names[-1], generation=0), 1.0, roster=there(*names), rules=rules)
    assert isinstance(state, Running)
    return state


def test_the_first_generation_waits_for_nodes_on_their_way_but_not_for_ever():
    roster = there("a", "b", num_expected=1)
    state, effects = step(start(0), Ready(node="b", generation=0), 1, roster=roster, rules=RULES)
    assert isinstance(state, Gathering)
    assert effects == ()
    assert deadline(state, RULES) == 10
    state, effects = step(state, Signal.TIME_PASSED, 10, roster=roster, rules=RULES)
    assert isinstance(state, Running)


def test_it_begins_at_once_with_as_many_nodes_as_it_may_have_and_the_rest_are_spares():
    state, (begin,) = step(start(0), Ready(node="d", generation=0), 1, roster=there(*NODES), rules=RULES)
    assert isinstance(state, Running)
    assert isinstance(begin, Begin)
    assert [(each.node, each.first_rank, each.num_ranks) for each in begin.nodes] == [
        ("a", 0, 2),
        ("b", 2, 2),
        ("c", 4, 2),
    ]


def test_too_few_nodes_end_the_run_when_none_is_on_its_way():
    state, (end,) = step(start(0), Gone(node="b"), 1, roster=there("a"), rules=RULES)
    assert isinstance(state, Over)
    assert isinstance(end, EndRun)
    assert "at least 2 must be" in end.reason


def test_missing_nodes_are_told_at_once_after_a_loss_and_every_minute_from_then_on():
    state, _ = step(running("a", "b"), Gone(node="b"), 5, roster=Roster(), rules=RULES)
    state, (missing,) = step(state, Ready(node="a", generation=1), 6, roster=there("a"), rules=RULES)
    assert missing == TooFew(num_missing=1, until_s=66)
    patient = replace(RULES, waits_for_min_s=600)
    assert deadline(state, patient) == 66
    assert step(state, Signal.TIME_PASSED, 65, roster=there("a"), rules=patient) == (state, ())
    state, (missing,) = step(state, Signal.TIME_PASSED, 66, roster=there("a"), rules=patient)
    assert missing == TooFew(num_missing=1, until_s=606)
    state, (begin,) = step(state, Ready(node="c", generation=1), 67, roster=there("a", "c"), rules=patient)
    assert isinstance(begin, Begin)


def test_a_node_whose_loss_leaves_nobody_is_told_of_at_once_too():
    alone = replace(RULES, min_nodes=1)
    state, _ = step(running("a", rules=replace(alone, max_nodes=1)), Gone(node="a"), 5, roster=Roster(), rules=alone)
    assert deadline(state, alone) == 5
    state, (missing,) = step(state, Signal.TIME_PASSED, 5, roster=Roster(), rules=alone)
    assert missing == TooFew(num_missing=1, until_s=65)
    assert deadline(state, alone) == 65


def test_a_start_that_waits_on_after_its_first_timeout_is_due_at_the_second():
    hasty = replace(RULES, waits_for_min_s=4, waits_for_all_s=8)
    state, effects = step(start(0), Signal.TIME_PASSED, 4, roster=there("a", "b", num_expected=1), rules=hasty)
    assert (isinstance(state, Gathering), effects) == (True, ())
    assert deadline(state, hasty) == 8
    state, (begin,) = step(state, Signal.TIME_PASSED, 8, roster=there("a", "b", num_expected=1), rules=hasty)
    assert isinstance(begin, Begin)
    slow = replace(RULES, waits_for_min_s=8, waits_for_all_s=4)
    state, effects = step(start(0), Signal.TIME_PASSED, 4, roster=there("a", num_expected=1), rules=slow)
    assert (isinstance(state, Gathering), effects) == (True, ())
    assert deadline(state, slow) == 8
    state, (end,) = step(state, Signal.TIME_PASSED, 8, roster=there("a", num_expected=1), rules=slow)
    assert isinstance(end, EndRun)


def test_a_start_that_waits_for_more_nodes_than_it_needs_tells_nothing():
    state, effects = step(start(0), Signal.TIME_PASSED, 10, roster=there("a", "b", num_expected=1), rules=PATIENT)
    assert (isinstance(state, Gathering), effects) == (True, ())
    assert deadline(state, PATIENT) == 60
    state, effects = step(start(0), Signal.TIME_PASSED, 10, roster=there("a", num_expected=1), rules=PATIENT)
    assert effects == (TooFew(num_missing=1, until_s=60),)


def test_a_failed_rank_ends_all_at_once_and_the_next_generation_begins_when_the_last_is_gone():
    state, (clear,) = step(
        running("a", "b"), Failed(node="b", generation=1, reason="rank 2"), 5, roster=Roster(), rules=RULES
    )
    assert isinstance(clear, Clear)
    assert (clear.nodes, clear.grace_s) == (("a", "b"), 0)
    state, effects = step(state, Ready(node="b", generation=1), 5.1, roster=there("b"), rules=RULES)
    assert isinstance(state, Ending)
    assert effects == ()
    state, (begin,) = step(state, Ready(node="a", generation=1), 5.2, roster=there("a", "b"), rules=RULES)
    assert isinstance(begin, Begin)
    assert (begin.generation, begin.num_failures, begin.cause) == (2, 1, GenerationCause.RANK_FAILED)


def test_one_restart_is_allowed_and_the_second_failure_ends_the_run_with_its_reason():
    state: State = running("a", "b")
    for generation in (1, 2):
        failed = Failed(node="b", generation=generation, reason="rank 2 failed")
        state, _ = step(state, failed, 5, roster=Roster(), rules=RULES)
        state, _ = step(state, Ready(node="b", generation=generation), 5, roster=there("b"), rules=RULES)
        state, effects = step(state, Ready(node="a", generation=generation), 5, roster=there("a", "b"), rules=RULES)
    assert isinstance(state, Over)
    assert isinstance(effects[0], EndRun)
    assert effects[0].reason.startswith("rank 2 failed\n1 restart allowed")


def test_lost_nodes_cost_no_restart():
    state: State = running("a", "b", "c")
    for generation, lost in ((1, "c"), (2, "b")):
        rules = replace(RULES, min_nodes=1, max_restarts=0)
        left = [name for name in ("a", "b") if name < lost]
        state, _ = step(state, Gone(node=lost), 5, roster=Roster(), rules=rules)
        for name in left:
            state, effects = step(state, Ready(node=name, generation=generation), 5, roster=there(*left), rules=rules)
        assert isinstance(effects[0], Begin)
        assert effects[0].num_failures == 0


def test_a_rank_that_failed_because_of_a_node_whose_loss_is_known_later_costs_no_restart():
    """Its collectives fail at once; that the node is gone may take the master a lease."""
    rules, failed = replace(RULES, max_restarts=0), Failed(node="a", generation=1, reason="connection reset")
    ending, _ = step(running("a", "b", "c", rules=rules), failed, 2, roster=there("a", "b", "c"), rules=rules)
    ending, _ = step(ending, Ready(node="a", generation=1), 3, roster=there(), rules=rules)
    ending, _ = step(ending, Gone(node="c"), 4, roster=there(), rules=rules)
    state, (begin,) = step(ending, Ready(node="b", generation=1), 5, roster=there("a", "b"), rules=rules)
    assert isinstance(state, Running)
    assert isinstance(begin, Begin)
    assert (begin.cause, begin.num_failures) == (GenerationCause.NODE_LOST, 0)
    ending, _ = step(running("a", "b", rules=rules), replace(failed, is_final=True), 2, roster=there(), rules=rules)
    ending, _ = step(ending, Ready(node="a", generation=1), 3, roster=there(), rules=rules)
    state, _ = step(ending, Gone(node="b"), 4, roster=there("a"), rules=rules)
    assert isinstance(state, Over), "what would fail again at every start does so without that node too"


def test_ranks_are_asked_to_end_and_have_time_where_none_has_failed():
    for given_input, cause in (
        (Ready(node="c", generation=1), GenerationCause.NODE_JOINED),
        (Leave(node="a"), GenerationCause.NODE_DRAINED),
        (StopAsked(end=STOP, now=False), GenerationCause.STOPPED),
    ):
        _, effects = step(running("a", "b"), given_input, 5, roster=there("c"), rules=RULES)
        assert isinstance(effects[0], Clear)
        assert (effects[0].cause, effects[0].grace_s) == (cause, 5)


def test_a_node_that_comes_when_the_first_ranks_have_finished_starts_nothing_again():
    state, _ = step(running("a", "b"), Finished(node="a", generation=1), 5, roster=Roster(), rules=RULES)
    state, effects = step(state, Ready(node="c", generation=1), 5, roster=there("c"), rules=RULES)
    assert (isinstance(state, Running), effects) == (True, ())


@pytest.mark.parametrize("ending", [Failed(node="b", generation=1, reason=""), Leave(node="b")])
def test_a_lost_node_whose_ranks_had_finished_is_not_waited_for(ending: Input):
    state, _ = step(running("a", "b", "c"), Finished(node="a", generation=1), 5, roster=Roster(), rules=RULES)
    state, effects = step(state, Gone(node="a"), 6, roster=Roster(), rules=RULES)
    assert (isinstance(state, Running), effects) == (True, ())
    state, (clear,) = step(state, ending, 7, roster=Roster(), rules=RULES)
    assert isinstance(clear, Clear)
    assert clear.nodes == ("b", "c")
    for name, left in (("b", ("b",)), ("c", ("b", "c"))):
        state, effects = step(state, Ready(node=name, generation=1), 8, roster=there(*left), rules=RULES)
    assert isinstance(effects[0], Begin)


def test_a_node_whose_ranks_have_finished_may_go():
    state, _ = step(running("a", "b"), Finished(node="a", generation=1), 5, roster=Roster(), rules=RULES)
    state, effects = step(state, Leave(node="a"), 6, roster=Roster(), rules=RULES)
    assert (isinstance(state, Running), effects) == (True, (LetGo(node="a"),))
    state, (end,) = step(state, Finished(node="b", generation=1), 7, roster=Roster(), rules=RULES)
    assert isinstance(end, EndRun)


def test_nodes_that_finish_or_are_lost_after_they_had_finished_end_the_run_well():
    state, _ = step(running("a", "b"), Finished(node="a", generation=1), 5, roster=Roster(), rules=RULES)
    state, _ = step(state, Gone(node="a"), 6, roster=Roster(), rules=RULES)
    state, effects = step(state, Ready(node="a", generation=1), 7, roster=there("a"), rules=RULES)
    assert (isinstance(state, Running), effects) == (True, ())
    state, (end,) = step(state, Finished(node="b", generation=1), 8, roster=there("a"), rules=RULES)
    assert isinstance(end, EndRun)
    assert end.exit_code == 0


def test_an_agent_that_never_says_that_its_ranks_are_gone_is_given_up():
    state, _ = step(running("a", "b"), Failed(node="b", generation=1, reason=""), 5, roster=Roster(), rules=RULES)
    state, _ = step(state, Ready(node="b", generation=1), 6, roster=there("b"), rules=RULES)
    assert deadline(state, RULES) == 35
    state, effects = step(state, Signal.TIME_PASSED, 35, roster=there("b"), rules=RULES)
    assert effects == (GiveUpSilent(nodes=("a",), waited_s=30),)


INPUTS = st.one_of(
    *(st.builds(kind, node=st.sampled_from(NODES), generation=st.integers(0, 6)) for kind in (Ready, Finished)),
    st.builds(Failed, node=st.sampled_from(NODES), generation=st.integers(0, 6), reason=st.just("why")),
    *(st.builds(kind, node=st.sampled_from(NODES)) for kind in (Gone, Leave)),
    st.sampled_from(Signal),
    st.builds(StopAsked, end=st.just(STOP), now=st.booleans()),
)
ALLOWED = {
    (before, given_input, target)
    for each in TRANSITIONS
    for before in each.before
    for given_input in each.given
    for target in (*each.targets, *([before] if each.stays else []))
}


class World:
    """Nodes and their ranks, as the machine's effects make them; what it is told is true."""

    def __init__(self) -> None:
        self.state: State = start(0)
        self.now_s = 0.0
        self.here: dict[str, int | None] = {}
        """By node: the generation whose ranks run there; None for none."""
        self.leaving: set[str] = set()
        self.over: list[EndRun] = []

    def give(self, given_input: Input) -> None:
        idle = tuple(
            node for node in NODES if node in self.here and self.here[node] is None and node not in self.leaving
        )
        before = self.state
        self.state, effects = step(before, given_input, self.now_s, roster=there(*idle, num_expected=1), rules=RULES)
        if self.state is not before or effects:
            kind = given_input if isinstance(given_input, Signal) else type(given_input)
            assert (type(before), kind, type(self.state)) in ALLOWED
        for effect in effects:
            match effect:
                case Begin():
                    assert not [node for node, ranks in self.here.items() if ranks is not None], "a rank still runs"
                    assert {each.node for each in effect.nodes} <= set(idle)
                    assert RULES.min_nodes <= len(effect.nodes) <= RULES.max_nodes
                    self.here.update((each.node, effect.generation) for each in effect.nodes)
                case EndRun():
                    self.over.append(effect)
                case LetGo(node=node):
                    self.here.pop(node, None)
                case Ask() | Clear() | GiveUpSilent():
                    pass

    def happen(self, draw: st.DataObject) -> None:
        self.now_s += draw.draw(st.sampled_from((0.0, 1.0, 40.0, 100.0)))
        given_input = draw.draw(INPUTS)
        match given_input:
            case Ready(node=node):
                if isinstance(self.state, Running) and self.here.get(node) is not None:
                    return  # its ranks run
                self.here[node] = None
                self.leaving.discard(node)
                self.give(Ready(node=node, generation=self.state.past.generation))
            case Gone(node=node) if node in self.here:
                del self.here[node]
                self.give(given_input)
            case Leave(node=node) if node in self.here:
                self.leaving.add(node)
                self.give(given_input)
            case Failed(node=node) | Finished(node=node) if self.here.get(node) is not None:
                self.give(replace(given_input, generation=self.here[node]))
            case Signal() | StopAsked():
                self.give(given_input)


@examples(300)
@given(st.data())
def test_whatever_happens_no_two_generations_run_at_once_and_every_change_is_in_the_table(draw: st.DataObject):
    world = World()
    for _ in range(draw.draw(st.integers(1, 30))):
        world.happen(draw)
    assert len(world.over) == isinstance(world.state, Over)


@given(INPUTS, st.floats(0, 100))
def test_when_it_is_over_nothing_changes_it(given_input: Input, now_s: float):
    over, _ = step(start(0), StopAsked(end=STOP, now=True), 0, roster=Roster(), rules=RULES)
    assert step(over, given_input, now_s, roster=there(*NODES), rules=RULES) == (over, ())
    assert deadline(over, RULES) == math.inf


UNITS = replace(RULES, min_nodes=2, max_nodes=5, node_unit=2)


def test_a_generation_has_a_multiple_of_the_unit() -> None:
    state = running("a", "b", "c", rules=UNITS)
    assert state.names == ("a", "b")
    assert running("a", "b", "c", "d", "e", rules=UNITS).names == ("a", "b", "c", "d")


def test_a_node_that_comes_makes_all_start_again_once_a_unit_is_whole() -> None:
    state = running("a", "b", "c", rules=UNITS)
    alone = step(state, Ready(node="c", generation=1), 2.0, roster=there("c"), rules=UNITS)
    assert alone == (state, ())
    following, _ = step(state, Ready(node="d", generation=1), 3.0, roster=there("c", "d"), rules=UNITS)
    assert isinstance(following, Ending)


def test_a_lost_node_takes_its_unit_along() -> None:
    state = running("a", "b", "c", "d", rules=UNITS)
    ending, _ = step(state, Gone(node="b"), 2.0, roster=there(), rules=UNITS)
    for node in ("a", "c"):
        ending, _ = step(ending, Ready(node=node, generation=1), 3.0, roster=there(), rules=UNITS)
    following, _ = step(ending, Ready(node="d", generation=1), 4.0, roster=there("a", "c", "d"), rules=UNITS)
    assert isinstance(following, Running)
    assert following.names == ("a", "c")


def test_as_many_nodes_are_missing_as_make_a_unit_whole() -> None:
    for min_nodes, num_missing in ((1, 1), (2, 1), (3, 3), (4, 3)):
        rules = replace(UNITS, min_nodes=min_nodes)
        _, effects = step(start(0), Signal.TIME_PASSED, 10.0, roster=there("a", num_expected=1), rules=rules)
        assert effects == (TooFew(num_missing=num_missing, until_s=60.0),)


@pytest.mark.parametrize(
    ("present", "changes", "now_s", "reason"),
    [
        ((), {}, 0.0, "no node is there to run on; at least 2 must be"),
        ((), {"min_nodes": 1}, 0.0, "no node is there to run on"),
        ((), {"min_nodes": 1}, 100.0, "no node is there to run on, after 100 s (--join-timeout)"),
        (("a",), {}, 1.0, "1 node is there; at least 2 must be (--nnodes 1:4 would do with fewer)"),
        (
            ("a",),
            {"min_nodes": 1, "node_unit": 2},
            100.0,
            "1 node is there, after 100 s (--join-timeout); a multiple of 2 must be (--node-unit), and at least 1",
        ),
    ],
)
def test_too_few_nodes_are_told_with_what_would_change_it(
    present: tuple[str, ...], changes: dict[str, int], now_s: float, reason: str
) -> None:
    rules = replace(UNITS, **{"min_nodes": 2, "max_nodes": 4, "node_unit": 1, **changes})  # type: ignore[arg-type]
    state, (end,) = step(start(0), Signal.TIME_PASSED, now_s, roster=there(*present), rules=rules)
    assert isinstance(state, Over)
    assert isinstance(end, EndRun)
    assert end.reason == reason


def test_all_start_again_when_they_hang_and_not_more_often_than_allowed() -> None:
    hang = Failed(node="a", generation=1, reason="it hangs", is_hang=True)
    ending, (clear,) = step(running("a", "b"), hang, 2.0, roster=there(), rules=RULES)
    assert isinstance(ending, Ending)
    assert isinstance(clear, Clear)
    assert (clear.cause, clear.grace_s, ending.past.num_failures) == (GenerationCause.HANG, 0.0, 1)
    ending, _ = step(running("a", "b"), hang, 2.0, roster=there(), rules=replace(RULES, max_restarts=0))
    assert isinstance(ending, Ending)
    assert ending.then is not None
    assert "no restart is allowed" in ending.then.reason


def test_ranks_that_show_no_sign_are_asked_where_they_are_until_one_stirs_or_time_is_over() -> None:
    state, (ask,) = step(running("a", "b"), Signal.QUIET, 2.0, roster=there(), rules=RULES)
    assert isinstance(state, Asking)
    assert ask == Ask(generation=1, nodes=("a", "b"))
    assert deadline(state, RULES) == 7.0
    assert step(state, Signal.QUIET, 3.0, roster=there(), rules=RULES) == (state, ())
    stirred, effects = step(state, Signal.STIRRED, 3.0, roster=there(), rules=RULES)
    assert (stirred, effects) == (running("a", "b"), ())
    finishing, _ = step(state, Finished(node="b", generation=1), 3.0, roster=there(), rules=RULES)
    assert isinstance(finishing, Asking)
    assert finishing.unfinished == ("a",)
    ending, _ = step(state, Failed(node="a", generation=1, reason=""), 3.0, roster=there(), rules=RULES)
    assert isinstance(ending, Ending)


def after_failures(*has_saved: bool, given_input: Input | None = None) -> tuple[State, Clear]:
    """What follows failures one after the other, each after all ranks had saved, or before; the last is `given`."""
    rules = replace(RULES, max_restarts=99)
    state: State = running("a", "b")
    for generation, saved in enumerate(has_saved, start=1):
        now = Roster(has_saved=saved)
        failed: Input = Failed(node="b", generation=generation, reason="rank 2 failed")
        if given_input is not None and generation == len(has_saved):
            failed = given_input
        state, (clear, *_) = step(state, failed, 5, roster=now, rules=rules)
        assert isinstance(clear, Clear)
        for node in ("a", "b"):
            state, _ = step(state, Ready(node=node, generation=generation), 5, roster=there("a", "b"), rules=rules)
    return state, clear


@pytest.mark.parametrize(
    ("has_saved", "keeps"),
    [
        ((True,), True),
        ((False,), True),
        ((False, False), True),
        ((False, False, False), False),
        ((False, False, True), True),
        ((False, False, False, False), True),
        ((False, True, False, False), True),
    ],
)
def test_ranks_keep_their_processes_until_three_generations_got_nowhere(has_saved: tuple[bool, ...], keeps: bool):
    assert after_failures(*has_saved)[1].keeps is keeps


def test_ranks_that_hang_or_whose_run_ends_keep_nothing():
    hang = Failed(node="b", generation=1, reason="hangs", is_hang=True)
    assert not after_failures(True, given_input=hang)[1].keeps
    final = Failed(node="b", generation=1, reason="lost", is_final=True)
    _, (clear,) = step(running("a", "b"), final, 5, roster=Roster(has_saved=True), rules=RULES)
    assert isinstance(clear, Clear)
    assert not clear.keeps
    _, (clear,) = step(running("a", "b"), StopAsked(end=STOP, now=False), 5, roster=Roster(), rules=RULES)
    assert isinstance(clear, Clear)
    assert not clear.keeps


def test_ranks_keep_their_processes_where_a_node_joins_leaves_or_is_lost():
    for given_input in (Ready(node="c", generation=1), Leave(node="a"), Gone(node="a")):
        _, (clear,) = step(running("a", "b"), given_input, 5, roster=there("c"), rules=RULES)
        assert isinstance(clear, Clear)
        assert clear.keeps
