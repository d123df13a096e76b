"""Every kind of failure, remedy, measure, loss and end has its sentence, and none of them lacks a fact."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from oobleck.control.journal import (
    Action,
    AgentLeft,
    Failure,
    ForkServerDown,
    JournalEntry,
    Loss,
    LossCause,
    NodeLost,
    NodeUnfit,
    NoWorkerStarts,
    PlanCause,
    RecoveryStarted,
    ReplicasDiffer,
    Silent,
    StatesProtected,
    WorkerEnded,
    failure_of_end,
)
from oobleck.control.journal.failures import Remedy
from oobleck.control.journal.incidents import Measure, Response
from oobleck.control.protocol import (
    ErrorKind,
    Exited,
    Killed,
    NotStarted,
    Raised,
    ServerEnd,
    Unseen,
    WorkerEnd,
    end_text,
    server_end_text,
)
from oobleck.planner import WorkerId
from tests.control.journals import recovered

ENDS = {
    Killed: Killed(signal=9),
    Exited: Exited(exit_code=3),
    Unseen: Unseen(),
    Raised: Raised(kind=ErrorKind.CODE, message="ValueError: bad"),
    NotStarted: NotStarted(problem="no memory"),
}
_VALUES = {
    "problem": "no route", "fault": "no memory", "reason": "told to", "silent_s": 3.14, "num_unread": 7, "pid": 8,
    "end": Killed(signal=9), "is_worker": False, "had_no_master": False,
}  # fmt: skip


def losses() -> list[Loss]:
    """One of each kind."""
    return [cls(**{field.name: _VALUES[field.name] for field in fields(cls)}) for cls in get_args(Loss)]


@pytest.mark.parametrize("cls", get_args(JournalEntry))
def test_each_entry_has_a_sentence_of_its_own(cls: type):
    assert "sentence" in vars(cls)


@pytest.mark.parametrize("failure", Failure)
def test_each_failure_has_a_sentence_and_a_remedy(failure: Failure):
    assert failure.text
    assert failure.remedy in Remedy


@pytest.mark.parametrize("remedy", Remedy)
def test_each_remedy_has_a_sentence_of_its_own(remedy: Remedy):
    text = remedy.text(node="n1", repeated=3)
    assert text.endswith(".") or "grep" in text
    assert "{" not in text
    assert [other for other in Remedy if other.text(node="n1", repeated=3) == text] == [remedy]


@pytest.mark.parametrize("measure", Measure)
def test_each_measure_has_a_sentence(measure: Measure):
    assert Response(measure=measure, subject="n1", position=7, reason="the reason").text


@pytest.mark.parametrize("loss", losses(), ids=lambda loss: type(loss).__name__)
def test_each_loss_has_a_cause_a_failure_and_a_sentence_with_all_its_facts(loss: Loss):
    assert loss.cause in LossCause
    assert loss.failure in Failure
    text = NodeLost(t_s=1.0, node="n1", loss=loss).sentence
    assert text == f"n1 lost: {loss.text}"
    for field in fields(loss):
        value = getattr(loss, field.name)
        if isinstance(value, str):
            assert value in text
        elif isinstance(value, float):
            assert "3.1 s" in text


@pytest.mark.parametrize("loss", losses(), ids=lambda loss: type(loss).__name__)
def test_a_node_that_the_user_had_killed_is_no_failure_unless_its_own_came_first(loss: Loss):
    own = (AgentLeft, NoWorkerStarts, Silent, WorkerEnded)
    lost = NodeLost(t_s=1.0, node="n1", loss=loss, is_requested=True)
    assert lost.failure is (loss.failure if isinstance(loss, own) else Failure.REQUESTED)
    assert ("killed on request" in lost.sentence) is (lost.failure is not loss.failure)


@pytest.mark.parametrize("kind", ErrorKind)
def test_each_kind_of_error_is_a_failure(kind: ErrorKind):
    assert failure_of_end(Raised(kind=kind, message="bad")) in Failure


def test_every_cause_of_a_loss_belongs_to_one():
    assert {loss.cause for loss in losses()} == set(LossCause)


def test_no_cause_of_a_plan_is_called_like_one_of_a_loss():
    assert not {cause.value for cause in PlanCause} & {cause.value for cause in LossCause}


@pytest.mark.parametrize("cls", get_args(WorkerEnd))
def test_each_end_of_a_worker_has_a_sentence(cls: type):
    assert end_text(ENDS[cls])


@pytest.mark.parametrize("cls", get_args(ServerEnd))
def test_each_end_of_a_fork_server_has_a_sentence_that_says_whether_there_is_another(cls: type):
    again, never = (
        ForkServerDown(t_s=1.0, node="n1", end=ENDS[cls], is_restarted=is_restarted).sentence
        for is_restarted in (True, False)
    )
    assert server_end_text(ENDS[cls]) in again
    assert again != never


@pytest.mark.parametrize("cause", PlanCause)
def test_each_cause_of_a_plan_is_said_when_it_begins_and_when_it_is_over(cause: PlanCause):
    begun = RecoveryStarted(t_s=1.0, generation=2, nodes=("n1",), cause=cause).sentence
    assert ("n1" in begun) == (cause is not PlanCause.MEASURED), "which is about no node"
    assert "n1" in recovered(1.0, 2, "n1", cause=cause).sentence


@pytest.mark.parametrize("is_tried_again", [True, False])
def test_an_unfit_node_is_told_with_its_fault(is_tried_again: bool):
    assert "no memory" in NodeUnfit(t_s=1.0, node="n1", fault="no memory", is_tried_again=is_tried_again).sentence


@pytest.mark.parametrize("is_sure", [True, False])
def test_copies_that_differ_are_named_with_those_who_have_them(is_sure: bool):
    odd, trusted = (WorkerId(node=node, device=0) for node in ("n1", "n2"))
    text = ReplicasDiffer(t_s=1.0, step=5, layer=2, odd=(odd,), trusted=(trusted,), is_sure=is_sure).sentence
    assert all(part in text for part in ("step 5", "layer 2", "n1:0", "n2:0"))
    assert ("either may be right" in text) is not is_sure


@pytest.mark.parametrize(
    ("newest", "protected", "num_missing", "said"),
    [
        (1, 1, 0, "saved states: step 1, which outlives the loss of a node"),
        (9, 8, 0, "saved states: step 9; that of step 8 outlives the loss of a node"),
        (9, None, 2, "saved states: step 9; none outlives the loss of a node: 2 parts without a copy"),
        (None, None, 0, "saved states: none"),
    ],
)
def test_saved_states_say_which_of_them_outlives_a_node(
    newest: int | None, protected: int | None, num_missing: int, said: str
) -> None:
    entry = StatesProtected(t_s=1.0, newest=newest, protected=protected, num_missing=num_missing)
    assert entry.sentence == said


def test_each_action_has_words_of_its_own() -> None:
    assert len({action.words for action in Action}) == len(Action)
    assert not {action.words for action in Action} & {"reinstantiate", "absorb"}
