"""Workers that end while their agents live are waited for where nobody could go on without them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oobleck.control.events import AddRequested, ProfileFound, Send
from oobleck.control.journal import (
    Action,
    Failure,
    ForkServerDown,
    LossCause,
    NodeLost,
    PlanAdopted,
    RecoveryDone,
    RecoveryStarted,
    StepDone,
    WorkerDown,
    diagnose,
)
from oobleck.control.journal.incidents import Measure
from oobleck.control.protocol import (
    AgentStopped,
    CheckpointsFound,
    ErrorKind,
    FindCheckpoints,
    Finished,
    ForkServerEnded,
    Killed,
    ProfileRequest,
    Raised,
    StartWorker,
    WorkerEnd,
    WorkerExited,
    checkpoint_name,
)
from oobleck.control.recovery import Phase
from oobleck.control.steps import Progress
from oobleck.control.training.shutdown import Shutdown
from oobleck.errors import ExitCode
from oobleck.job import CheckpointSpec, NodeSpec
from oobleck.planner import WorkerId, profile_to_json
from tests.control import test_checkpoints
from tests.control.bench import Bench, ready
from tests.control.model import Shape
from tests.control.steps.test_judgement import record
from tests.control.training.test_coordinator import PAIRS, SINGLES, answer_all, held, training

NODES = ("n0", "n1", "n2")
SIGKILL = Killed(signal=9)
ERROR = Raised(kind=ErrorKind.CODE, message="ValueError: bad sample", traceback="Traceback\nValueError: bad sample")


def crash(bench: Bench, *nodes: str, pid: int = 8, end: WorkerEnd = SIGKILL) -> None:
    for node in nodes:
        bench.say(node, WorkerExited(device=0, pid=pid, end=end))


def come_back(bench: Bench, *nodes: str, pid: int = 18, **fields) -> None:
    for node in nodes:
        bench.say(node, ready(pid=pid, **fields))


def again(bench: Bench, *nodes: str, pid: int = 18, **fields) -> None:
    """The workers are back, and answer the fence with nothing in their hands."""
    come_back(bench, *nodes, pid=pid, **fields)
    for node in nodes:
        bench.answer(node)
    bench.wait(0.01)


def measuring(bench: Bench) -> list[str]:
    """The nodes whose workers were asked to measure the profile."""
    sent = [command for command in bench.commands if isinstance(command, Send)]
    return [command.node for command in sent if isinstance(command.message, ProfileRequest)]


def test_a_run_without_workers_waits_for_them_and_begins_again_where_nothing_is_saved():
    bench = training()
    bench.commit("n0", 1)
    bench.commit("n0", 2)
    crash(bench, *NODES)
    assert bench.ended is None
    assert bench.coordinator.phase is Phase.FENCING
    assert [Send(node=node, message=StartWorker(device=0)) in bench.commands for node in NODES] == [True] * 3
    updates = len(bench.updates)
    come_back(bench, "n0")
    bench.answer("n0")
    bench.wait(0.01)
    assert len(bench.updates) == updates, "the others are waited for"
    come_back(bench, "n1", "n2")
    for node in NODES:
        bench.answer(node)
    bench.wait(0.01)
    (update, *_) = new = bench.updates[updates:]
    assert len(new) == 3
    assert (update.initial, update.boundary, update.restore, update.finish) == (True, 0, None, None)
    plan = bench.journal(PlanAdopted)[-1]
    assert (plan.action, plan.restored, plan.restored_step) == (Action.BEGIN_AGAIN, None, 0)
    bench.resume(*NODES)
    done = bench.journal(RecoveryDone)[-1]
    assert (done.why, done.action, done.steps_lost) == (LossCause.WORKER_EXITED, Action.BEGIN_AGAIN, 2)
    bench.commit("n0", 1, generation=bench.generation)
    assert [entry.record.step for entry in bench.journal(StepDone)] == [1, 2, 1]
    assert bench.journal(NodeLost) == []


def test_before_the_first_step_nothing_is_lost_by_that():
    bench = training()
    crash(bench, *NODES)
    again(bench, *NODES)
    assert (len(bench.updates), bench.updates[-1].initial) == (6, True)
    assert bench.journal(PlanAdopted)[-1].restored_step is None


def test_a_run_without_workers_goes_back_to_what_their_memory_has():
    bench = test_checkpoints.training(CheckpointSpec(save_steps=5))
    for step in range(1, 8):
        bench.commit("n0", step)
    crash(bench, "n0", "n1")
    again(bench, "n0", "n1", saves=True)
    request = max(each.request for each in bench.messages(bench.commands) if isinstance(each, FindCheckpoints))
    for node, layers in (("n0", (0, 1)), ("n1", (2, 3))):
        found = (test_checkpoints.state(5, in_memory=True, layers=layers),)
        bench.say(node, CheckpointsFound(device=0, request=request, found=found, problems=(), unfinished=()))
    plan = bench.journal(PlanAdopted)[-1]
    name = checkpoint_name(test_checkpoints.RUN, step=5, generation=1)
    assert (plan.action, plan.restored, plan.restored_step) == (Action.CHECKPOINT, name, 5)
    bench.resume("n0", "n1")
    assert bench.journal(RecoveryDone)[-1].steps_lost == 2


def test_workers_that_end_before_the_last_step_is_saved_run_it_again():
    bench = test_checkpoints.training(CheckpointSpec(save_steps=5))
    bench.commit("n0", 100)
    for node in ("n0", "n1"):
        bench.say(node, Finished(device=0, applied=100, computed_s=1.0, waited_s=1.0))
    assert bench.ended is None, "the last step is not saved yet"
    crash(bench, "n0", "n1")
    again(bench, "n0", "n1", saves=True)
    request = max(each.request for each in bench.messages(bench.commands) if isinstance(each, FindCheckpoints))
    for node in ("n0", "n1"):
        found = (test_checkpoints.state(95, in_memory=True),)
        bench.say(node, CheckpointsFound(device=0, request=request, found=found, problems=(), unfinished=()))
    assert bench.ended is None
    assert bench.updates[-1].boundary == 95


def test_where_some_layers_have_no_copy_left_the_others_wait_for_their_workers_too():
    bench = training(PAIRS)
    bench.commit("n0", 1)
    first = [node for node in ("n0", "n1", "n2", "n3") if held(bench, node)[0] == 0]
    others = [node for node in ("n0", "n1", "n2", "n3") if node not in first]
    crash(bench, *first)
    answer_all(bench, *others, applied=1, last_record=record(1))
    assert len(bench.journal(PlanAdopted)) == 1
    come_back(bench, *first)
    answer_all(bench, *others, applied=1, last_record=record(1))
    for node in first:
        bench.answer(node)
    bench.wait(0.01)
    assert {update.initial for update in bench.updates[4:]} == {True}
    assert bench.journal(PlanAdopted)[-1].restored_step == 0


def test_a_layer_that_a_lost_node_took_with_it_ends_the_run_though_workers_come_back():
    bench = training(PAIRS)
    bench.commit("n0", 1)
    gone, crashed = (node for node in ("n0", "n1", "n2", "n3") if held(bench, node)[0] == 0)
    others = [node for node in ("n0", "n1", "n2", "n3") if node not in (gone, crashed)]
    crash(bench, *others)
    bench.fail(gone)
    bench.fail(crashed)
    again(bench, *others)
    assert bench.ended is not None
    assert bench.ended.reason.endswith("layers 0, 1, 2, 3")


def test_nobody_is_waited_for_for_ever():
    bench = training()
    crash(bench, *NODES)
    bench.beat_until(bench.job.control.start_timeout_s + 1.0, *NODES)
    assert bench.ended is not None
    assert bench.ended.reason.endswith("within 120 s: n0, n1, n2")


def test_those_who_came_back_go_on_without_who_does_not():
    bench = training()
    bench.commit("n0", 1)
    crash(bench, *NODES)
    again(bench, "n0", "n1")
    bench.beat_until(bench.job.control.start_timeout_s + 1.0, *NODES)
    assert bench.ended is None
    assert bench.updates[-1].plan.nodes == ("n0", "n1")


def test_the_loss_of_the_last_node_that_was_waited_for_is_not_waited_for():
    bench = training()
    bench.commit("n0", 1)
    crash(bench, *NODES)
    again(bench, "n0", "n1")
    updates = len(bench.updates)
    bench.fail("n2")
    assert len(bench.updates) == updates + 2


def skip(bench: Bench, seconds: float) -> None:
    """Time passes; everybody is heard of."""
    bench.now_s += seconds
    bench.say_all(*NODES)


def rounds(bench: Bench, count: int, *, apart_s: float) -> None:
    """All workers are killed and come back so many times, or until the run ends."""
    for number in range(count):
        crash(bench, *NODES, pid=8 + number)
        if bench.ended is None:
            again(bench, *NODES, pid=9 + number)
            skip(bench, apart_s)


def test_workers_that_are_killed_now_and_then_never_cost_a_node():
    bench = training(replace(SINGLES, max_steps=100))
    for number in range(8):
        bench.commit("n0", number + 1, generation=bench.generation)
        crash(bench, *NODES, pid=8 + number)
        again(bench, *NODES, pid=9 + number)
        for step in range(1, number + 2):
            bench.commit("n0", step, generation=bench.generation)
        skip(bench, 250.0)
    assert bench.journal(NodeLost) == []
    assert bench.ended is None


@pytest.mark.parametrize("apart_s", [0.0, 700.0])
def test_workers_that_end_again_and_again_without_a_new_step_end_the_run_with_what_they_died_of(apart_s: float):
    bench = training()
    bench.commit("n0", 1)
    rounds(bench, 4, apart_s=apart_s)
    assert bench.ended is not None
    assert len(bench.journal(WorkerDown)) == 9
    assert bench.ended.exit_code == 1
    assert [words in bench.ended.reason for words in ("n0: ", "n1: ", "n2: ")] == [True] * 3
    assert bench.ended.reason.count(" 3 times") == bench.ended.reason.count("signal 9") == 3


def test_different_errors_are_tried_again_and_told_in_the_end():
    bench = training()
    for number in range(4):
        for node in NODES:
            error = Raised(kind=ErrorKind.MEMORY, message=f"MemoryError: {node}")
            crash(bench, node, pid=8 + number, end=error)
        assert (bench.ended is None) is (number < 3)
        if number < 3:
            again(bench, *NODES, pid=9 + number)
    assert "MemoryError: n" in bench.ended.reason


def test_the_error_of_all_workers_is_not_tried_again():
    bench = training()
    crash(bench, *NODES, end=ERROR)
    assert bench.ended is not None
    assert (bench.ended.exit_code, "ValueError: bad sample" in bench.ended.reason) == (1, True)


@pytest.mark.parametrize(
    ("ends", "exit_code"),
    [
        (dict.fromkeys(("n0", "n1"), ERROR), ExitCode.FAILED),
        ({"n0": ERROR, "n1": replace(ERROR, message="ValueError: another sample")}, ExitCode.RESUMABLE),
        ({"n0": ERROR, "n1": SIGKILL}, ExitCode.RESUMABLE),
        (dict.fromkeys(("n0", "n1"), replace(ERROR, kind=ErrorKind.PEER)), ExitCode.RESUMABLE),
    ],
)
def test_a_run_that_one_error_has_left_too_few_nodes_is_not_worth_resuming(
    ends: dict[str, WorkerEnd], exit_code: ExitCode
):
    """The third node holds the last stage, and does not get as far as the error."""
    bench = with_a_checkpoint()
    until_given_up(bench, ends)
    answer_all(bench, "n2")
    test_checkpoints.tell(bench, nodes=("n2",))
    assert bench.ended is not None
    assert bench.ended.exit_code == exit_code
    is_told = exit_code is ExitCode.FAILED
    assert bench.ended.reason.startswith("an error ended the workers" if is_told else "cannot continue after losing")
    assert ("Traceback" in bench.ended.reason) is is_told


@pytest.mark.parametrize(("second", "exit_code"), [(ERROR, ExitCode.FAILED), (SIGKILL, ExitCode.RESUMABLE)])
def test_an_error_that_two_nodes_have_met_one_after_the_other_is_the_jobs(second: WorkerEnd, exit_code: ExitCode):
    bench = with_a_checkpoint()
    until_given_up(bench, {"n0": ERROR})
    answer_all(bench, "n1", "n2")
    test_checkpoints.tell(bench, test_checkpoints.state(5), nodes=("n1", "n2"))
    bench.resume("n1", "n2")
    bench.commit("n1", 6, generation=bench.generation)
    until_given_up(bench, {"n1": second})
    answer_all(bench, "n2")
    test_checkpoints.tell(bench, nodes=("n2",))
    assert bench.ended is not None
    assert bench.ended.exit_code == exit_code


def test_an_error_of_long_ago_ends_no_run_that_waits_for_a_newcomer():
    bench = training()
    bench.commit("n0", 1)
    crash(bench, "n0", end=ERROR)
    answer_all(bench, "n1", "n2")
    bench.resume("n1", "n2")
    for step in range(2, 6):
        bench.commit("n1", step, generation=bench.generation)
    bench.feed(AddRequested(spec=NodeSpec(name="n9", host="n9")))
    bench.up("n9")
    for node in NODES:
        bench.fail(node)
    crash(bench, "n9")
    assert bench.ended is None, "no node of the plan is left, so none of them has met it"


@pytest.mark.parametrize("nodes", [(), ("n0",), ("n0", "n1"), ("n0", "n2")])
def test_an_error_is_the_jobs_where_all_that_are_lost_have_met_it(nodes: tuple[str, ...]):
    unused: Any = None
    shutdown = Shutdown(SINGLES.job, unused, Progress(SINGLES.job), unused, unused)
    for node in ("n0", "n1"):
        shutdown.note_error(WorkerId(node=node, device=0), ERROR)
    assert shutdown.is_jobs_own(nodes) is shutdown.is_same_error(nodes) is (set(nodes) in ({"n0"}, {"n0", "n1"}))


def with_a_checkpoint() -> Bench:
    """A run of three nodes, two of which it needs."""
    bench = test_checkpoints.started(shape=Shape(num_nodes=3, num_pipelines=1, layers_per_device=2, max_steps=100))
    test_checkpoints.tell(bench, nodes=NODES)
    bench.commit("n0", 5)
    test_checkpoints.save(bench, 5)
    return bench


def until_given_up(bench: Bench, ends: dict[str, WorkerEnd]) -> None:
    """End the workers of these nodes as often as they are started again."""
    for number in range(4):
        for node, end in ends.items():
            crash(bench, node, pid=8 + number, end=end)
        if number < 3:
            come_back(bench, *ends, pid=9 + number)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_worker_that_is_killed_before_training_is_started_again(is_known: bool):
    bench = Bench()
    for spec in bench.nodes:
        bench.up(spec.name)
        bench.say(spec.name, ready())
    if not is_known:
        bench.feed(ProfileFound(profile_json=None))
    (asked,) = [
        sent.node for sent in bench.commands if isinstance(sent, Send) and isinstance(sent.message, ProfileRequest)
    ] or ["n0"]
    bench.say(asked, WorkerExited(device=0, pid=8, end=Killed(signal=9)))
    assert [entry.node for entry in bench.journal(WorkerDown)] == [asked]
    come_back(bench, asked)
    if not is_known:
        requests = [
            sent.node for sent in bench.commands if isinstance(sent, Send) and isinstance(sent.message, ProfileRequest)
        ]
        assert len(requests) == 2, "another one measures"
    bench.feed(ProfileFound(profile_json=profile_to_json(bench.shape.profile)))
    assert bench.journal(NodeLost) == bench.journal(RecoveryStarted) == []
    assert len(bench.updates) == len(bench.nodes)


def test_what_a_killed_worker_was_asked_of_checkpoints_all_are_asked_again():
    bench = test_checkpoints.started()
    test_checkpoints.tell(bench, nodes=("n0",))
    crash(bench, "n1")
    come_back(bench, "n1", saves=True)
    test_checkpoints.tell(bench, nodes=("n0", "n1"))
    assert len(bench.updates) == 2


def test_a_worker_that_fails_before_training_ends_the_start():
    bench = Bench()
    bench.up("n0")
    crash(bench, "n0", end=ERROR)
    assert bench.journal(NodeLost)[0].loss.cause is LossCause.WORKER_EXITED


def test_the_end_of_a_fork_server_is_told_and_explained():
    bench = training()
    bench.say("n1", ForkServerEnded(end=Killed(signal=9), is_restarted=True))
    (down,) = bench.journal(ForkServerDown)
    assert (down.node, down.end, down.is_restarted) == ("n1", Killed(signal=9), True)
    (incident,) = diagnose(Bench.entries(bench.commands))
    assert (incident.root.failure, incident.root.node) == (Failure.FORK_SERVER, "n1")
    assert incident.root.evidence is down
    assert [response.measure for response in incident.responses] == [Measure.FORK_SERVER_RESTARTED]


def test_an_agent_that_can_start_no_worker_is_not_taken_for_one_that_was_stopped():
    bench = training()
    bench.say("n1", AgentStopped(reason="its fork server ended 4 times", is_failure=True))
    assert bench.journal(NodeLost)[0].loss.cause is LossCause.WORKER_EXITED


def test_ends_that_a_new_master_is_told_again_are_counted_once():
    bench = training(replace(SINGLES, num_nodes=2, num_pipelines=2))
    crash(bench, "n1", pid=8)
    crash(bench, "n1", pid=9)
    for pid in (8, 9, 8, 9):
        crash(bench, "n1", pid=pid)
    assert len(bench.journal(WorkerDown)) == 2
    assert bench.journal(NodeLost) == []
