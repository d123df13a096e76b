"""The coordinator's machine: what each event leads to, phase by phase. What races may do is `test_commit`'s."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest

from oobleck.control.events import (
    AddRequested,
    Command,
    Connect,
    Disconnect,
    DrainRequested,
    KillRequested,
    NodeFailed,
    ProfileFound,
    Record,
    Send,
    StopRequested,
)
from oobleck.control.journal import (
    Action,
    AgentLeft,
    ConnectionLost,
    HangExplained,
    JobEnded,
    LayersArriving,
    LossCause,
    NodeAdded,
    NodeConnected,
    NodeLeft,
    NodeLost,
    NodeUnfit,
    Notice,
    PaceChanged,
    PlanAdopted,
    PlanCause,
    RecoveryDone,
    RecoveryStarted,
    Silent,
    StepDone,
    TerminationNoticed,
    Unfit,
    Unreachable,
    WorkerDown,
    WorkerUp,
)
from oobleck.control.plans import update_of
from oobleck.control.protocol import (
    AgentStopped,
    ErrorKind,
    Exited,
    Fence,
    Finished,
    FinishStep,
    Heartbeat,
    Killed,
    KillWorker,
    LayersMoving,
    Leaving,
    Pace,
    PeerFailed,
    PlanNeeded,
    PlanOrder,
    Raised,
    StartWorker,
    StepCommitted,
    StopAgent,
    Unseen,
    WorkerAddress,
    WorkerExited,
    WorkerStarted,
    end_text,
)
from oobleck.control.recovery import Phase
from oobleck.control.training.coordinator import Coordinator
from oobleck.errors import ExitCode
from oobleck.job import ControlSpec, NodeSpec
from oobleck.planner import WorkerId, profile_to_json
from tests.calls import calls_of
from tests.control.bench import PID, Bench, hello, living, ready, sends
from tests.control.journals import replay_run
from tests.control.model import Shape
from tests.control.steps.test_judgement import record

PAIRS = Shape(layers_per_device=2)
"""Four nodes in two pipelines of two."""
MANY = Shape(num_nodes=400, num_pipelines=8, num_microbatches=8)
SINGLES = Shape(num_nodes=3, num_pipelines=3)
"""Three nodes, each a pipeline."""


def crash(device: int = 0, *, pid: int = PID) -> WorkerExited:
    return WorkerExited(device=device, pid=pid, end=Killed(signal=9))


CRASH, CRASH_OF_1 = crash(), crash(1)


def raising(message: str) -> WorkerExited:
    error = Raised(kind=ErrorKind.CODE, message=message, traceback=f"Traceback\n{message}")
    return WorkerExited(device=0, pid=8, end=error)


def training(shape: Shape = SINGLES) -> Bench:
    """A run in which everybody has adopted the first plan."""
    bench = Bench(shape)
    bench.prepare()
    return bench


def held(bench: Bench, node: str, generation: int | None = None) -> tuple[int, ...]:
    """The layers that a plan gives a node."""
    update = next(update for update in bench.updates if generation in (None, update.generation))
    located = update.plan.locate(WorkerId(node=node, device=0))
    return tuple(update.plan.pipelines[located[0]].stages[located[1]].layers) if located else ()


def answer_all(bench: Bench, *nodes: str, **fields) -> None:
    """Everybody answers, with the first plan in force, and losses have settled."""
    for node in nodes:
        bench.answer(node, **({"adopted": 1, "layers": held(bench, node, 1)} | fields))
    bench.wait(0.01)


def stop(*, now: bool = False) -> StopRequested:
    return StopRequested(now=now, exit_code=130, reason="interrupted")


# --- preparing -----------------------------------------------------------------------------------------------


def test_all_nodes_are_reached_at_once():
    bench = Bench(PAIRS)
    assert [command.node for command in bench.commands if isinstance(command, Connect)] == list(PAIRS.nodes)


def test_failures_to_start_are_told_together():
    bench = Bench(PAIRS)
    bench.fail("n0", Unreachable(problem="no route"))
    bench.wait(0.5)
    bench.fail("n2", Unreachable(problem="no python"))
    assert bench.ended is None
    bench.wait(0.5)
    assert bench.ended is not None
    assert bench.ended.exit_code == 1
    assert bench.ended.reason.splitlines()[1:] == ["n0: no route", "n2: no python"]


def test_a_worker_that_dies_before_training_ends_the_start():
    bench = Bench(SINGLES)
    bench.up("n0")
    bench.say("n0", WorkerExited(device=0, pid=8, end=Exited(exit_code=3)))
    assert bench.journal(NodeLost)[0].loss.cause is LossCause.WORKER_EXITED


def test_a_stop_before_training_is_immediate():
    bench = Bench(PAIRS)
    bench.up("n0")
    commands = bench.feed(stop())
    assert Send(node="n0", message=StopAgent(reason="interrupted")) in commands
    assert bench.ended is not None
    assert bench.ended.exit_code == 130


def test_nodes_with_different_numbers_of_devices_train_together():
    bench = Bench(nodes=(NodeSpec(name="a", host="a", devices=(0, 1)), NodeSpec(name="b", host="b")))
    bench.prepare()
    assert bench.ended is None
    assert bench.updates[0].plan.nodes == ("a", "b")
    assert len(bench.updates) == 3, "one for each worker"


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            {"tensor_parallel": 2},
            "tensor_parallel is 2, and nodes are of 2 kinds (default×2, other×2); stages on several devices need nodes",
        ),
        (
            {"schedule": "interleaved"},
            "default×2, other×2); their pipelines have one chunk a stage: choose 1f1b, zero-bubble or auto",
        ),
    ],
)
def test_what_needs_nodes_of_one_kind_is_refused_for_several(job: dict[str, object], words: str):
    shape = Shape(num_nodes=2, devices=2)
    nodes = (shape.nodes[0], replace(shape.nodes[1], device="other"))
    bench = Bench(shape, nodes=nodes, job=replace(shape.job, **job))
    bench.prepare()
    assert bench.ended is not None
    assert bench.ended.exit_code == 78
    assert words in bench.ended.reason


def test_a_run_has_few_kinds():
    nodes = tuple(NodeSpec(name=f"n{number}", host=f"n{number}", device=f"d{number}") for number in range(5))
    bench = Bench(Shape(num_nodes=5), nodes=nodes)
    bench.prepare()
    assert bench.ended is not None
    assert bench.ended.exit_code == 78
    assert "the nodes are of 5 kinds: d0, d1, d2, d3, d4; a run may have 4" in bench.ended.reason


def test_a_model_that_no_plan_fits_is_the_users_to_change():
    bench = Bench(Shape(num_nodes=2, layers_per_device=1))
    bench.prepare()
    assert bench.ended is not None
    assert bench.ended.exit_code == 78
    assert "there are 2" in bench.ended.reason


def test_a_node_may_be_added_before_training():
    bench = Bench(SINGLES)
    for spec in bench.nodes:
        bench.up(spec.name)
        bench.say(spec.name, ready())
    bench.feed(AddRequested(spec=NodeSpec(name="late", host="late")))
    bench.feed(ProfileFound(profile_json=profile_to_json(SINGLES.profile)))
    assert not bench.updates
    bench.up("late")
    bench.say("late", ready())
    assert "late" in bench.updates[0].plan.nodes


# --- training ------------------------------------------------------------------------------------------------


def test_a_step_is_recorded_once_whoever_tells_of_it():
    bench = training()
    for node in ("n0", "n1", "n2"):
        bench.commit(node, 1)
    assert [entry.record.step for entry in bench.journal(StepDone)] == [1]
    assert bench.journal(StepDone)[0].tokens == bench.job.data.sequence_length


def test_the_run_ends_when_all_have_finished():
    bench = training()
    for step in range(1, 4):
        bench.commit("n0", step)
    bench.say("n0", Finished(device=0, applied=3))
    bench.say("n1", Finished(device=0, applied=3))
    assert bench.ended is None
    bench.say("n2", Finished(device=0, applied=3))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.DONE
    assert bench.coordinator.phase is Phase.ENDED
    assert bench.coordinator.next_deadline() == math.inf


@pytest.mark.parametrize(("policy", "exit_code"), [("stop", ExitCode.FAILED), ("skip", ExitCode.DONE)])
def test_a_bad_step_that_is_to_end_the_run_does_so_also_where_all_steps_are_done(policy: str, exit_code: ExitCode):
    bench = Bench(job=replace(Shape().job, on_bad_step=policy))
    bench.prepare()
    nodes = [spec.name for spec in bench.nodes]
    for step in range(1, 4):
        for node in nodes:
            told = record(step)
            bad = replace(told, is_skipped=True, loss=math.nan, grad_norm=math.nan)
            bench.say(node, StepCommitted(device=0, record=bad if step == 2 else told))
    for node in nodes:
        bench.say(node, Finished(device=0, applied=3))
    assert bench.ended is not None
    assert bench.ended.exit_code == exit_code
    assert ("step 2 has a loss of nan" in bench.ended.reason) == (policy == "stop")
    assert bench.commit("n0", 4) == []
    assert bench.wait(100) == []


def test_reading_that_one_of_many_has_finished_looks_at_no_other() -> None:
    """Else the end of a run of 10,000 nodes is the looks of each at all before it."""
    bench = training(Shape(num_nodes=24, num_pipelines=24, num_microbatches=24))
    bench.commit("n0", 1)
    calls = [calls_of(partial(bench.say, f"n{number}", Finished(device=0, applied=1))) for number in range(23)]
    assert bench.ended is None
    assert len(set(calls[1:])) == 1, calls
    bench.say("n23", Finished(device=0, applied=1))
    assert bench.ended is not None


def test_finished_before_a_fence_is_not_finished_after_it():
    bench = training()
    bench.say("n0", Finished(device=0, applied=1))
    bench.fail("n2")
    bench.say("n1", Finished(device=0, applied=1))
    answer_all(bench, "n0", "n1", applied=1, last_record=record(1))
    assert bench.coordinator.phase is Phase.TRAINING
    bench.say("n0", Finished(device=0, applied=3))
    assert bench.ended is None
    bench.say("n1", Finished(device=0, applied=3))
    assert bench.ended is not None


def test_a_stop_lets_the_step_in_flight_be_committed():
    bench = training()
    asked = bench.messages(bench.feed(stop()))
    assert asked == [FinishStep(device=0)] * 3
    bench.commit("n0", 1)
    for node in ("n0", "n1", "n2"):
        bench.say(node, Finished(device=0, applied=1))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.INTERRUPTED
    assert [entry.record.step for entry in bench.journal(StepDone)] == [1]


def test_a_stop_now_is_now():
    bench = training()
    bench.feed(stop(now=True))
    assert bench.ended is not None
    assert bench.journal(JobEnded)[0].exit_code == 130


def test_a_stop_outlives_a_recovery():
    bench = training()
    bench.feed(stop())
    bench.fail("n2")
    asked = bench.feed(stop())
    assert {command.node for command in asked if isinstance(command, Send)} == {"n0", "n1"}
    answer_all(bench, "n0", "n1")
    assert bench.messages(bench.commands)[-2:] == [FinishStep(device=0)] * 2


def test_heartbeats_that_ask_are_answered():
    bench = training()
    assert bench.messages(bench.say("n0", Heartbeat(sequence=None)), "n0") == []
    assert bench.messages(bench.say("n0", Heartbeat(sequence=5)), "n0") == [Heartbeat(sequence=5)]


# --- losses --------------------------------------------------------------------------------------------------


def test_a_loss_fences_all_survivors():
    bench = training()
    commands = bench.fail("n1")
    assert Disconnect(node="n1") in commands
    assert bench.messages(commands) == [Fence(device=0, generation=2, lost=("n1",))] * 2
    assert bench.coordinator.phase is Phase.FENCING
    assert bench.fail("n1") == [], "it is lost already"


def test_orders_wait_for_every_answer_and_for_losses_to_settle():
    bench = training()
    bench.fail("n2")
    bench.answer("n0", adopted=1, layers=held(bench, "n0"))
    bench.answer("n1", adopted=1, layers=held(bench, "n1"))
    assert [update.generation for update in bench.updates] == [1, 1, 1]
    bench.wait(0.005)
    assert bench.messages(bench.fail("n1")) == [], "n0 is not asked again: what it has answered stays true"
    bench.wait(0.005)
    assert [update.generation for update in bench.updates] == [1, 1, 1], "more of its rack may follow"
    bench.wait(0.005)
    assert [update.generation for update in bench.updates] == [1, 1, 1, 2]
    assert bench.updates[-1].plan.nodes == ("n0",)
    (started,) = bench.journal(RecoveryStarted)
    assert started.nodes == ("n2",)


def test_a_rack_that_goes_at_once_is_one_generation_and_fences_each_survivor_once():
    bench = training()
    commands = [*bench.fail("n2"), *bench.fail("n1")]
    fences = [send for command in commands for send in sends(command) if isinstance(send.message, Fence)]
    assert [(send.node, send.message.generation) for send in fences] == [("n0", 2), ("n1", 2)]
    bench.answer("n0", adopted=1, layers=held(bench, "n0"))
    bench.wait(0.01)
    assert bench.updates[-1].generation == 2
    bench.resume("n0")
    (done,) = bench.journal(RecoveryDone)
    assert (done.generation, done.nodes) == (2, ("n2", "n1"))


def test_a_worker_that_has_another_plan_is_told_the_whole_plan():
    bench = training()
    bench.fail("n2")
    knows = bench.updates[0].ordered.id
    for node in ("n0", "n1"):
        bench.answer(node, adopted=1, layers=held(bench, node), knows=knows)
    commands = bench.wait(0.01)
    told = {send.node: send.message for command in commands for send in sends(command)}
    assert {node: order.common.delta.base for node, order in told.items()} == dict.fromkeys(("n0", "n1"), knows)
    commands = bench.say("n1", PlanNeeded(device=0, generation=2))
    (again,) = bench.messages(commands, "n1")
    assert update_of(None, again, WorkerId(node="n1", device=0)).ordered == bench.updates[-1].ordered
    assert bench.say("n1", PlanNeeded(device=0, generation=1)) == [], "of a plan that is over"
    bench.fail("n0")
    assert bench.messages(bench.say("n1", PlanNeeded(device=0, generation=2))) == [], "it is asked again anyway"


def test_answers_to_an_older_fence_are_ignored():
    bench = training()
    bench.fail("n2")
    bench.feed(DrainRequested(node="n1"))
    bench.answer("n0", generation=2, adopted=1, layers=(0, 1, 2, 3))
    bench.answer("n1", generation=2, adopted=1, layers=(0, 1, 2, 3))
    bench.wait(0.01)
    assert bench.coordinator.phase is Phase.FENCING


def test_the_step_in_flight_is_finished_by_the_whole_pipelines():
    bench = training()
    bench.fail("n2")
    answer_all(bench, "n0", "n1", microbatches_done=1)
    update = bench.updates[-1]
    assert (update.finish, update.boundary, update.lost, update.initial) == (1, 1, ("n2",), False)
    first = bench.updates[0].plan
    broken = next(index for index, pipeline in enumerate(first.pipelines) if "n2" in pipeline.nodes)
    dealt = sorted(microbatch for segment in update.segments for microbatch in segment.microbatches)
    assert dealt == list(first.microbatches_of(broken))
    assert bench.journal(RecoveryStarted)[-1].generation == update.generation


def test_a_step_that_a_whole_pipeline_failed_in_is_forgotten_and_never_finished():
    bench = training()
    bench.fail("n2")
    answer_all(bench, "n0", "n1", applied=1, last_record=record(1), broken=True)
    assert bench.updates[-1].finish is None
    bench.fail("n1")
    answer_all(bench, "n0", applied=1, last_record=record(1))
    assert bench.updates[-1].finish is None, "some may have forgotten it"


LONG = Shape(num_nodes=4, num_layers=6, layers_per_device=3, num_microbatches=40, layer_s=1.0)
"""Two pipelines of two nodes, whose steps take about 63 s; three nodes in one pipeline take 84 s."""


@pytest.mark.parametrize(("done", "finish"), [(0, None), (4, None), (19, 1), (20, 1)])
def test_a_step_is_finished_unless_all_survivors_run_it_again_in_less_time(done: int, finish: int | None):
    bench = training(LONG)
    first = bench.updates[0].plan
    lost = first.pipelines[1].nodes[0]
    bench.fail(lost)
    answer_all(bench, *(node for node in sorted(first.nodes) if node != lost), microbatches_done=done)
    update = bench.updates[-1]
    assert (update.finish, update.boundary, bool(update.segments)) == (finish, finish or 0, finish is not None)
    adopted = bench.journal(PlanAdopted)[-1]
    assert adopted.finish == finish


def test_a_short_step_is_finished_although_running_it_again_were_quicker():
    bench = training(replace(LONG, layer_s=0.01))
    first = bench.updates[0].plan
    bench.fail(first.pipelines[1].nodes[0])
    answer_all(bench, *(node for node in sorted(first.nodes) if node != first.pipelines[1].nodes[0]))
    assert bench.updates[-1].finish == 1


def test_all_that_is_run_again_counts_as_redone():
    bench = training(LONG)
    first = bench.updates[0].plan
    lost, *others = sorted(first.nodes)
    bench.fail(lost)
    answer_all(bench, *others, microbatches_done=4)
    bench.resume(*others)
    assert bench.journal(RecoveryDone)[-1].microbatches_redone == 4 + 4


def test_a_worker_that_has_not_adopted_the_plan_cannot_finish_its_step():
    bench = training()
    bench.fail("n2")
    bench.answer("n0", adopted=1, layers=held(bench, "n0"))
    bench.answer("n1")
    bench.wait(0.01)
    update = bench.updates[-1]
    assert (update.finish, update.initial, update.transfers) == (None, True, ())


def test_steps_told_by_answers_are_recorded_in_turn():
    bench = training()
    bench.fail("n2")
    bench.answer("n1", applied=2, last_record=record(2), adopted=1, layers=held(bench, "n1"))
    bench.commit("n0", 1)
    bench.answer("n0", applied=1, last_record=record(1), reduced=2, adopted=1, layers=held(bench, "n0"))
    bench.wait(0.01)
    assert [entry.record.step for entry in bench.journal(StepDone)] == [1, 2]
    assert bench.updates[-1].catch_up == record(2)


def test_losing_everybody_ends_the_run():
    bench = training()
    for node in ("n0", "n1", "n2"):
        bench.fail(node)
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.FAILED
    assert [entry.node for entry in bench.journal(NodeLost)] == ["n0", "n1", "n2"]


def test_losing_the_last_copy_of_a_layer_ends_the_run_with_its_name():
    bench = training(PAIRS)
    stages = {node: held(bench, node) for node in ("n0", "n1", "n2", "n3")}
    bench.commit("n0", 1)
    gone = [node for node in stages if stages[node][0] == 0]
    left = [node for node in stages if node not in gone]
    for node in gone:
        bench.fail(node)
    answer_all(bench, *left, applied=1, last_record=record(1))
    assert bench.ended is not None
    assert all(node in bench.ended.reason for node in gone)
    assert "layers 0, 1" in bench.ended.reason


def test_redundancy_below_f_is_told():
    bench = training(PAIRS)
    bench.fail("n3")
    answer_all(bench, "n0", "n1", "n2")
    (warning,) = [entry.text for entry in bench.journal(Notice) if entry.level == "warning"]
    assert "f = 1" in warning
    assert not bench.journal(PlanAdopted)[-1].redundant


def test_a_recovery_is_told_when_all_compute_again():
    bench = training()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    bench.resume("n0")
    assert not bench.journal(RecoveryDone)
    bench.resume("n1", "n1")
    (done,) = bench.journal(RecoveryDone)
    assert done.nodes == ("n2",)
    assert done.why is LossCause.CONNECTION_LOST
    assert done.bytes_moved == 10
    assert bench.resume("n0") == []


def test_a_recovery_that_a_loss_overtakes_or_an_end_cuts_short_is_told_as_well():
    bench = training()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    bench.fail("n1")
    assert len(bench.journal(RecoveryDone)) == 1
    answer_all(bench, "n0")
    bench.feed(stop(now=True))
    assert [done.nodes for done in bench.journal(RecoveryDone)] == [("n2",), ("n1",)]


# --- what nobody says ----------------------------------------------------------------------------------------


def test_a_silent_node_is_lost_when_its_lease_ends():
    bench = training()
    bench.beat_until(2.9, "n0", "n1")
    assert not bench.journal(NodeLost)
    bench.beat_until(3.0, "n0", "n1")
    assert not bench.journal(NodeLost), "what it said may wait to be read"
    bench.beat_until(3.1, "n0", "n1")
    (lost,) = bench.journal(NodeLost)
    assert (lost.node, lost.loss.cause) == ("n2", LossCause.LEASE_EXPIRED)
    assert lost.loss.silent_s == pytest.approx(3.1)


def test_early_deadlines_do_nothing():
    bench = training()
    assert bench.wait(2.0) == []


def test_a_master_that_was_held_up_blames_nobody():
    bench = training()
    assert bench.wait(60.0) == []
    assert not bench.journal(NodeLost)
    bench.beat_until(bench.now_s + 2.9, "n0", "n1", "n2")
    assert not bench.journal(NodeLost)


def test_a_worker_that_answers_no_fence_is_frozen_though_its_agent_is_not():
    bench = training()
    bench.fail("n2")
    bench.answer("n0", adopted=1, layers=held(bench, "n0"))
    bench.beat_until(bench.now_s + 3.5, "n0", "n1")
    assert bench.journal(NodeLost)[-1].node == "n1"
    assert bench.journal(NodeLost)[-1].loss == Silent(silent_s=3.5, is_worker=True)


def test_a_master_that_was_held_up_waits_for_answers_once_more():
    bench = training()
    bench.fail("n2")
    bench.wait(60.0)
    assert len(bench.journal(NodeLost)) == 1
    answer_all(bench, "n0", "n1")
    assert bench.updates[-1].generation == 2


def test_a_failed_collective_without_a_loss_leads_to_a_regrouping():
    bench = training()
    failed = PeerFailed(device=0, generation=1, detail="reset by peer")
    bench.say("n0", failed)
    bench.wait(0.1)
    bench.say("n1", failed)
    bench.wait(0.1)
    (started,) = bench.journal(RecoveryStarted)
    assert (started.nodes, started.cause) == ((), PlanCause.PEER_FAILED)
    answer_all(bench, "n0", "n1", "n2")
    assert bench.updates[-1].generation == 2


@pytest.mark.parametrize("generation", [0, 2])
def test_a_failure_in_another_generation_is_no_suspicion(generation: int):
    bench = training()
    bench.say("n0", PeerFailed(device=0, generation=generation, detail="late"))
    assert bench.wait(1.0) == []


def test_regroupings_that_lead_nowhere_end():
    bench = training()
    for generation in range(1, 5):
        bench.say("n0", PeerFailed(device=0, generation=generation, detail="reset by peer"))
        bench.wait(0.2)
        if bench.ended is None:
            answer_all(bench, "n0", "n1", "n2")
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.FAILED
    assert "3 regroupings" in bench.ended.reason


def test_no_step_for_ten_times_as_long_as_one_takes_is_a_hang():
    bench = training()
    nodes = ("n0", "n1", "n2")
    bench.commit("n0", 1)
    bench.beat_until(9.9, *nodes)
    assert not bench.journal(RecoveryStarted)
    bench.beat_until(10.1, *nodes)
    assert bench.journal(RecoveryStarted)[0].cause is PlanCause.HANG


def test_a_step_that_takes_as_long_as_its_plan_foretold_is_no_hang_for_the_next_master_either():
    bench = training(replace(SINGLES, layer_s=5.0))
    nodes = ("n0", "n1", "n2")
    predicted_s = bench.journal(PlanAdopted)[-1].predicted_step_s
    assert 9.9 * predicted_s > bench.job.control.start_timeout_s
    bench.beat_until(9.9 * predicted_s, *nodes)
    assert not bench.journal(RecoveryStarted)
    bench.commit("n0", 1)
    succeed(bench, *nodes)
    bench.beat_until(bench.now_s + 9.9 * predicted_s, *nodes)
    assert not bench.journal(RecoveryStarted)
    bench.beat_until(bench.now_s + predicted_s, *nodes)
    assert bench.journal(RecoveryStarted)[0].cause is PlanCause.HANG


def test_the_first_step_may_take_as_long_as_a_start():
    bench = training()
    bench.beat_until(119.0, "n0", "n1", "n2")
    assert not bench.journal(RecoveryStarted)
    bench.beat_until(121.0, "n0", "n1", "n2")
    assert bench.journal(RecoveryStarted)


# --- workers that end, nodes that come and go ----------------------------------------------------------------


def test_a_worker_is_started_again_in_its_place_three_times():
    bench = training()
    for restart in range(1, 4):
        commands = bench.say("n2", crash(pid=7 + restart))
        assert Send(node="n2", message=StartWorker(device=0)) in commands
        assert len(bench.journal(WorkerDown)) == restart
        bench.say("n2", WorkerStarted(device=0, pid=8 + restart), ready(pid=8 + restart))
        assert bench.journal(RecoveryStarted)[-1].generation == 2 + restart, (
            "the loss of one that is waited for is no new one"
        )
    bench.say("n2", crash(pid=11))
    assert bench.journal(NodeLost)[-1].node == "n2"


def test_a_worker_that_comes_back_takes_part_again():
    bench = training()
    bench.commit("n0", 1)
    bench.say("n2", CRASH)
    answer_all(bench, "n0", "n1", applied=1, last_record=record(1))
    bench.resume("n0", "n1")
    bench.say("n2", ready(pid=9))
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.JOINED
    layers = bench.updates[-1].plan.owners_of(0)
    assert WorkerId(node="n2", device=0) not in layers
    for node in ("n0", "n1"):
        bench.answer(node, adopted=2, layers=(0, 1, 2, 3), applied=2, last_record=record(2))
    bench.answer("n2")
    bench.wait(0.01)
    assert "n2" in bench.updates[-1].plan.nodes
    bench.resume("n0", "n1", "n2")
    assert bench.journal(RecoveryDone)[-1].action is Action.RESTART_WORKER


def test_a_worker_that_dies_again_before_it_is_ready_is_started_again():
    bench = training()
    bench.say("n2", CRASH)
    commands = bench.say("n2", WorkerExited(device=0, pid=9, end=Killed(signal=9)))
    assert Send(node="n2", message=StartWorker(device=0)) in commands
    assert len(bench.journal(RecoveryStarted)) == 1


def test_the_error_that_ends_every_worker_ends_the_run_with_its_traceback():
    bench = training()
    error = raising("ValueError: bad sample")
    for node in ("n0", "n1", "n2"):
        bench.say(node, error)
    assert bench.ended is not None
    assert "bad sample" in bench.ended.reason
    assert end_text(bench.journal(WorkerDown)[0].end) == "ValueError: bad sample"


def test_a_spare_that_has_not_met_the_error_of_all_that_train_does_not_hide_it():
    bench = training(Shape(num_nodes=3, num_layers=1, num_pipelines=2))
    computing = bench.updates[-1].plan.nodes
    assert len(computing) == 2
    bench.say(computing[0], raising("ValueError: bad sample"))
    assert bench.ended is None
    bench.say(computing[1], raising("ValueError: bad sample"))
    assert bench.ended is not None
    assert (bench.ended.exit_code, "bad sample" in bench.ended.reason) == (ExitCode.FAILED, True)


def test_an_error_of_the_only_node_that_trains_may_be_its_own_where_another_is_left():
    bench = training(Shape(num_nodes=2, num_layers=1, num_pipelines=1, fault_threshold=0))
    (computing,) = bench.updates[-1].plan.nodes
    bench.say(computing, raising("ValueError: bad sample"))
    assert bench.ended is None


def test_an_error_that_cost_the_last_copy_is_told_instead_of_the_layers():
    bench = training(PAIRS)
    bench.commit("n0", 1)
    first = [node for node in ("n0", "n1", "n2", "n3") if held(bench, node)[0] == 0]
    left = [node for node in ("n0", "n1", "n2", "n3") if node not in first]
    for node in first:
        bench.say(node, raising("ValueError: bad sample"))
        bench.fail(node)
    answer_all(bench, *left, applied=1, last_record=record(1))
    assert bench.ended is not None
    assert "bad sample" in bench.ended.reason


def test_an_error_that_training_got_over_is_not_blamed_for_the_end():
    bench = training()
    bench.say("n2", raising("ValueError: cosmic ray"))
    answer_all(bench, "n0", "n1")
    bench.commit("n0", 1)
    for node in ("n0", "n1", "n2"):
        bench.fail(node)
    assert bench.ended is not None
    assert bench.journal(JobEnded)[-1].error is None
    assert "cosmic ray" not in bench.ended.reason


def pairs_of_devices() -> Bench:
    """Two nodes of two devices each, in training."""
    return training(Shape(num_nodes=2, devices=2))


def test_workers_of_one_node_end_together_and_are_started_again():
    bench = pairs_of_devices()
    bench.commit("n0", 1)
    commands = bench.say("n1", CRASH)
    assert Send(node="n1", message=StartWorker(device=0)) in commands
    assert Send(node="n1", message=KillWorker(device=1)) in commands
    (down,) = bench.journal(WorkerDown)
    assert (down.device, down.also) == (0, (1,))
    assert bench.journal(RecoveryStarted)[-1].why is LossCause.WORKER_EXITED
    killed = bench.say("n1", CRASH_OF_1)
    assert killed == [Send(node="n1", message=StartWorker(device=1))], "it ended for the other: that is no new failure"
    bench.say("n1", ready(0, pid=20))
    assert len(bench.journal(RecoveryStarted)) == 1, "one of two"
    bench.say("n1", ready(1, pid=21))
    assert len(bench.journal(RecoveryStarted)) == 2, "the node joins again"
    assert not bench.journal(NodeLost)


def test_what_a_worker_says_that_was_told_to_end_is_ignored():
    bench = pairs_of_devices()
    bench.commit("n0", 1)
    bench.say("n1", CRASH)
    steps = len(bench.journal(StepDone))
    bench.say("n1", StepCommitted(device=1, record=record(2)), ready(1))
    assert len(bench.journal(StepDone)) == steps
    assert bench.coordinator.phase is Phase.FENCING
    bench.say("n1", ready(0, pid=20))
    assert len(bench.journal(RecoveryStarted)) == 1, "its other worker has still to come back"


def test_workers_that_all_end_by_themselves_are_one_failure():
    bench = pairs_of_devices()
    for pid in (8, 9, 10):
        for device in range(2):
            bench.say("n1", crash(device, pid=pid))
        bench.say("n1", ready(0, pid=pid + 1), ready(1, pid=pid + 1))
    assert len(bench.journal(WorkerDown)) == 3
    assert not bench.journal(NodeLost)
    bench.say("n1", crash(pid=11))
    assert bench.journal(NodeLost)[0].node == "n1"


def test_a_master_that_takes_over_ends_the_workers_that_were_to_end():
    bench = pairs_of_devices()
    bench.commit("n0", 1)
    bench.say("n1", CRASH)
    succeed(bench, "n0")
    commands = bench.up("n1", generation=1, workers=living(1))
    assert Send(node="n1", message=StartWorker(device=0)) in commands
    assert Send(node="n1", message=KillWorker(device=1)) in commands
    told_again = bench.say("n1", ready(), CRASH)
    assert not bench.journal(WorkerDown), "it is known, and so is what it said before"
    assert not [message for message in bench.messages(told_again) if isinstance(message, StartWorker)], "once is enough"
    assert Send(node="n1", message=StartWorker(device=1)) in bench.say("n1", CRASH_OF_1)


def test_a_master_that_takes_over_leaves_the_worker_that_took_the_place_of_one_that_was_to_end():
    bench = pairs_of_devices()
    bench.commit("n0", 1)
    bench.say("n1", CRASH)
    succeed(bench, "n0")
    commands = bench.up("n1", generation=1, workers=living(0, 1, pid=9))
    assert not [message for message in bench.messages(commands) if isinstance(message, KillWorker)]
    bench.say("n1", CRASH_OF_1, ready(0, pid=9), ready(1, pid=9))
    assert not bench.journal(WorkerDown)
    assert [up.pid for up in bench.journal(WorkerUp)[-2:]] == [9, 9]


def test_a_new_node_trains_as_soon_as_it_is_ready():
    bench = training()
    spec = NodeSpec(name="n9", host="n9")
    assert Connect(node=spec) in bench.feed(AddRequested(spec=spec))
    assert bench.journal(NodeAdded)[0].node == spec
    bench.up("n9")
    assert bench.coordinator.phase is Phase.TRAINING
    bench.say("n9", ready())
    answer_all(bench, "n0", "n1", "n2")
    assert bench.coordinator.phase is Phase.FENCING, "the new one answers as well"
    bench.answer("n9")
    assert "n9" in bench.updates[-1].plan.nodes


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (NodeSpec(name="n1", host="host1"), "n1 is in the job already"),
    ],
)
def test_a_node_that_cannot_be_added_is_told(spec: NodeSpec, words: str):
    bench = training()
    bench.feed(AddRequested(spec=spec))
    assert words in bench.journal(Notice)[-1].text
    assert not bench.journal(NodeAdded)


def test_a_new_node_that_does_not_fit_costs_nobody_else():
    bench = training()
    bench.feed(AddRequested(spec=NodeSpec(name="n9", host="n9")))
    bench.up("n9")
    bench.say("n9", ready(data_digest="other text"))
    assert bench.ended is None
    assert "n9:0 and n0:0 differ in the data" in bench.journal(NodeLost)[0].loss.problem
    assert bench.coordinator.phase is Phase.TRAINING


def test_a_new_node_that_cannot_be_reached_disturbs_nobody():
    bench = training()
    bench.feed(AddRequested(spec=NodeSpec(name="n9", host="n9")))
    bench.fail("n9", Unreachable(problem="no route to host"))
    assert bench.coordinator.phase is Phase.TRAINING
    assert bench.journal(NodeLost)[0].node == "n9"


def test_a_drained_node_leaves_once_all_compute_without_it():
    bench = training()
    bench.feed(DrainRequested(node="n2"))
    assert bench.feed(DrainRequested(node="n2")) == [], "it leaves already"
    answer_all(bench, "n0", "n1", "n2")
    assert "n2" not in bench.updates[-1].plan.nodes
    assert bench.resume("n0") == []
    assert Send(node="n2", message=StopAgent(reason="drained", is_dismissal=True)) in bench.resume("n1")
    assert bench.say("n2", CRASH) == [], "its worker was ended"
    bench.say("n2", AgentStopped(reason="drained"))
    assert bench.journal(NodeLeft)[0].node == "n2"
    assert not bench.journal(NodeLost)


def test_a_loss_after_a_node_was_dismissed_does_not_wait_for_it():
    bench = training()
    bench.feed(DrainRequested(node="n2"))
    answer_all(bench, "n0", "n1", "n2")
    bench.resume("n0", "n1")
    bench.fail("n1")
    bench.answer("n0", adopted=2, layers=(0, 1, 2, 3))
    bench.wait(0.01)
    assert bench.updates[-1].plan.nodes == ("n0",)


def test_a_drained_node_may_leave_while_a_new_master_asks_where_all_stand():
    bench = training()
    bench.commit("n0", 1)
    bench.feed(DrainRequested(node="n2"))
    answer_all(bench, "n0", "n1", "n2", applied=1, last_record=record(1))
    bench.resume("n0", "n1")
    succeed(bench, "n0", "n1", "n2")
    assert bench.coordinator.phase is Phase.FENCING
    for node in ("n0", "n1"):
        bench.answer(node, applied=1, last_record=record(1), adopted=2, layers=(0, 1, 2, 3))
    bench.wait(0.01)
    assert bench.coordinator.phase is Phase.FENCING
    bench.say("n2", AgentStopped(reason="drained"))
    bench.wait(0.01)
    assert bench.coordinator.phase is Phase.TRAINING


def test_a_draining_node_whose_worker_dies_is_lost():
    bench = training()
    bench.feed(DrainRequested(node="n2"))
    bench.say("n2", CRASH)
    assert bench.journal(NodeLost)[0].node == "n2"
    assert bench.journal(RecoveryStarted)[-1].nodes == ("n2",)


def test_nobody_is_let_go_whom_the_job_cannot_go_on_without():
    bench = training(Shape(num_nodes=2, layers_per_device=2, fault_threshold=0))
    bench.feed(DrainRequested(node="n1"))
    answer_all(bench, "n0", "n1")
    assert bench.ended is None
    assert bench.journal(Notice)[-1].level == "warning"
    assert "n1" in bench.journal(Notice)[-1].text
    assert "n1" in bench.updates[-1].plan.nodes


def test_a_run_whose_nodes_are_all_drained_and_have_notice_stops_with_all_of_them():
    """As where a StatefulSet is deleted: the API says so of each pod, and each agent has SIGTERM."""
    bench = training()
    for node in ("n0", "n1", "n2"):
        bench.feed(DrainRequested(node=node))
    for node in ("n0", "n1", "n2"):
        bench.say(node, Leaving(reason="SIGTERM"))
    answer_all(bench, "n0", "n1", "n2")
    assert set(bench.updates[-1].plan.nodes) == {"n0", "n1", "n2"}
    assert bench.messages(bench.commands)[-3:] == [FinishStep(device=0)] * 3
    for node in ("n0", "n1", "n2"):
        bench.say(node, Finished(device=0, applied=1))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.RESUMABLE


@pytest.mark.parametrize("node", ["nobody", "n9"])
def test_only_nodes_that_train_can_be_drained(node: str):
    bench = training()
    bench.feed(AddRequested(spec=NodeSpec(name="n9", host="n9")))
    bench.feed(DrainRequested(node=node))
    assert bench.journal(Notice)[-1].level == "warning"
    assert node in bench.journal(Notice)[-1].text
    assert bench.coordinator.phase is Phase.TRAINING


def test_nothing_is_drained_before_training():
    bench = Bench(SINGLES)
    bench.up("n0")
    bench.say("n0", ready())
    bench.feed(DrainRequested(node="n0"))
    assert bench.journal(Notice)[-1].level == "warning"
    assert "n0" in bench.journal(Notice)[-1].text


def test_an_agent_that_stops_by_itself_is_lost():
    bench = training()
    bench.say("n2", AgentStopped(reason="no master came"))
    (lost,) = bench.journal(NodeLost)
    assert lost.loss == AgentLeft(reason="no master came")


# --- nonsense ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (hello("n2"), "a second hello"),
        (ready(pid=9), "n2 cannot become ready while it is ready"),
        (Finished(device=1, applied=1), "speaks for device 1; it has 1"),
        (PeerFailed(device=-1, generation=1, detail=""), "speaks for device -1"),
    ],
)
def test_nonsense_costs_the_node_that_says_it(message, words: str):
    bench = training()
    bench.say("n2", message)
    (lost,) = bench.journal(NodeLost)
    assert lost.node == "n2"
    assert words in lost.loss.problem
    assert bench.coordinator.phase is Phase.FENCING


def test_the_lost_are_not_listened_to():
    bench = training()
    bench.fail("n2")
    assert bench.commit("n2", 1) == []
    assert bench.say("n2", Heartbeat(sequence=1)) == []


def test_every_node_that_connects_is_told():
    bench = training()
    assert [entry.node for entry in bench.journal(NodeConnected)] == ["n0", "n1", "n2"]


# --- nobody is gone, and nothing goes on ---------------------------------------------------------------------


def told(bench: Bench, *nodes: str, **fields) -> list[Command]:
    """These answer, with the first plan in force and its first step applied; then losses have settled."""
    commands = []
    for node in nodes:
        layers = held(bench, node, 1)
        commands += bench.answer(node, adopted=1, applied=1, last_record=record(1), layers=layers, **fields)
    return commands + bench.wait(0.01)


def hang(bench: Bench) -> tuple[Fence, ...]:
    """Let time pass until it is a hang; returns what all are asked."""
    bench.commit("n0", 1)
    bench.beat_until(bench.now_s + 11.0, *(spec.name for spec in bench.nodes))
    return tuple(said for said in bench.messages(bench.commands) if isinstance(said, Fence) and said.probe_addresses)


def test_a_hang_asks_all_whom_they_wait_for_and_reach():
    bench = training()
    fences = hang(bench)
    assert len(fences) == 3
    assert [bell.worker_id.node for bell in fences[0].probe_addresses] == ["n0", "n1", "n2"]


def test_a_worker_that_all_wait_for_is_ended_and_comes_back():
    bench = training()
    hang(bench)
    for node in ("n0", "n2"):
        bench.answer(
            node, adopted=1, layers=held(bench, node, 1), waits_for=(WorkerId(node="n1", device=0),), stack="here"
        )
    assert Send(node="n1", message=KillWorker(device=0)) in told(bench, "n1")
    (explained,) = bench.journal(HangExplained)
    assert explained.stuck == (WorkerId(node="n1", device=0),)
    assert [stack for _, stack in explained.stacks] == ["here", "here"]
    assert Send(node="n1", message=StartWorker(device=0)) in bench.say("n1", CRASH)
    told(bench, "n0", "n2")
    assert bench.updates[-1].plan.nodes == ("n0", "n2")


def test_workers_that_were_slow_alone_are_not_ended():
    """After a stall of all, each that computes is waited for: to end them all could end the last copy of a layer."""
    bench = training()
    hang(bench)
    told(bench, "n0", waits_for=(WorkerId(node="n1", device=0), WorkerId(node="n2", device=0)))
    told(bench, "n1", "n2", has_come_on=True)
    assert not [said for said in bench.messages(bench.commands) if isinstance(said, KillWorker)]
    assert bench.coordinator.phase is Phase.TRAINING
    assert {worker_id.node for worker_id in bench.updates[-1].regrouped} == {"n0", "n1", "n2"}


def test_a_stuck_worker_that_cannot_be_ended_does_not_stop_the_others_for_ever():
    bench = training()
    hang(bench)
    for node in ("n0", "n2"):
        told(bench, node, waits_for=(WorkerId(node="n1", device=0),))
    told(bench, "n1")
    assert bench.coordinator.phase is Phase.FENCING
    bench.beat_until(bench.now_s + 3.1, *(spec.name for spec in bench.nodes))
    assert bench.coordinator.phase is Phase.TRAINING


def test_a_node_that_its_peers_do_not_reach_is_left_out_for_good():
    bench = training()
    hang(bench)
    for node in ("n0", "n1"):
        told(bench, node, unreachable=(WorkerId(node="n2", device=0),))
    told(bench, "n2")
    (lost,) = bench.journal(NodeLost)
    assert (lost.node, lost.loss.cause) == ("n2", LossCause.CUT_OFF)
    told(bench, "n0", "n1")
    assert bench.updates[-1].plan.nodes == ("n0", "n1")
    assert [entry.why for entry in bench.journal(RecoveryStarted)] == [PlanCause.HANG, LossCause.CUT_OFF]
    bench.beat_until(bench.now_s + 30.0, "n0", "n1")
    assert not [command for command in bench.commands if isinstance(command, Connect) and command.attach]
    assert len([command for command in bench.commands if isinstance(command, Connect)]) == 3, "it is not tried again"


def test_a_hang_that_nobody_can_explain_is_a_regrouping():
    bench = training()
    hang(bench)
    told(bench, "n0", "n1", "n2")
    assert (bench.journal(HangExplained)[0].cut_off, bench.journal(HangExplained)[0].stuck) == ((), ())
    assert bench.coordinator.phase is Phase.TRAINING
    update = bench.updates[-1]
    assert update.finish is None
    assert set(update.pipeline_generations) == {update.generation}, "no group that hangs is kept"
    assert {worker_id.node for worker_id in update.regrouped} == {"n0", "n1", "n2"}


def test_a_step_under_a_plan_is_told_after_the_one_that_was_finished_before_it():
    """A newcomer has no part in that one, and its agent may be heard sooner than the others'."""
    bench = training()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    generation, boundary = bench.updates[-1].generation, bench.updates[-1].boundary
    assert boundary == 1
    # A master that takes over hears all that the newcomer's agent has kept for it.
    for step in range(2, 60):
        bench.say("n0", StepCommitted(device=0, record=replace(record(step), generation=generation)))
    assert not bench.journal(StepDone)
    bench.say("n1", StepCommitted(device=0, record=replace(record(1), generation=generation)))
    assert [done.record.step for done in bench.journal(StepDone)] == list(range(1, 60))


def test_steps_after_one_whose_report_was_lost_are_told_at_the_next_recovery():
    bench = training()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    generation = bench.updates[-1].generation
    second, third = (replace(record(step), generation=generation) for step in (2, 3))
    bench.say("n0", StepCommitted(device=0, record=second))
    bench.fail("n1")
    bench.answer("n0", adopted=generation, applied=3, last_record=third, layers=held(bench, "n0", generation))
    bench.wait(0.01)
    assert [done.record.step for done in bench.journal(StepDone)] == [2, 3]


def test_orders_say_whose_groups_cannot_be_kept():
    bench = training()
    assert bench.updates[-1].regrouped == bench.updates[-1].plan.worker_ids, "all are new"
    bench.fail("n2")
    bench.answer("n0", adopted=1, layers=held(bench, "n0", 1), has_open_groups=True)
    bench.answer("n1", adopted=1, layers=held(bench, "n1", 1))
    bench.wait(0.01)
    update = bench.updates[-1]
    assert [worker_id.node for worker_id in update.regrouped] == ["n0"]


def test_orders_say_where_those_listen_that_became_ready_since_the_plan_that_a_worker_has():
    def told(commands: list[Command]) -> dict[str, list[str]]:
        orders = [send for command in commands for send in sends(command) if isinstance(send.message, PlanOrder)]
        return {send.node: [each.worker_id.node for each in send.message.common.addresses] for send in orders}

    bench = training()
    nodes = ["n0", "n1", "n2"]
    assert told(bench.commands) == dict.fromkeys(nodes, nodes)
    knows = bench.updates[0].ordered.id
    bench.say("n2", crash())
    address = WorkerAddress(worker_id=WorkerId(node="n2", device=0), host="10.0.0.1", port=10)
    for node in ("n0", "n1"):
        bench.answer(node, adopted=1, layers=held(bench, node, 1), knows=knows)
    bench.say("n2", WorkerStarted(device=0, pid=9), ready(pid=9, address=address))
    for node in ("n0", "n1"):
        bench.answer(node, adopted=1, layers=held(bench, node, 1), knows=knows)
    bench.answer("n2")
    assert told(bench.wait(0.01)) == {"n0": ["n2"], "n1": ["n2"], "n2": nodes}


# --- lost nodes are tried again ------------------------------------------------------------------------------


def patient(**control) -> Bench:
    """A run that tries lost nodes again after 10 s."""
    job = replace(SINGLES.job, control=ControlSpec(heartbeat_interval_s=0.5, lease_s=3.0, rejoin_after_s=10.0))
    bench = Bench(SINGLES, job=job)
    bench.prepare()
    return bench


def test_a_lost_node_is_tried_again_and_joins_anew():
    bench = patient()
    bench.fail("n2")
    assert [(entry.is_requested, entry.is_tried_again) for entry in bench.journal(NodeLost)] == [(False, True)]
    answer_all(bench, "n0", "n1")
    bench.commands.clear()
    bench.beat_until(bench.now_s + 10.1, "n0", "n1")
    assert Connect(node=bench.nodes[2]) in bench.commands
    bench.up("n2", pid=99)
    assert bench.journal(NodeAdded)[0].node.name == "n2"
    bench.say("n2", ready(pid=100))
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.JOINED


def test_a_node_that_stays_away_is_tried_ever_less_and_nobody_is_told():
    bench = patient()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    bench.beat_until(bench.now_s + 10.1, "n0", "n1")
    lost = len(bench.journal(NodeLost))
    bench.fail("n2", Unreachable(problem="no route"))
    assert len(bench.journal(NodeLost)) == lost
    bench.commands.clear()
    bench.beat_until(bench.now_s + 19.0, "n0", "n1")
    assert not [command for command in bench.commands if isinstance(command, Connect)]
    bench.beat_until(bench.now_s + 2.0, "n0", "n1")
    assert Connect(node=bench.nodes[2]) in bench.commands


def test_the_next_master_tries_a_lost_node_again_that_the_one_before_would_have():
    bench = patient()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    bench.resume("n0", "n1")
    succeed(bench, "n0", "n1")
    assert Connect(node=bench.nodes[2]) not in bench.commands
    bench.beat_until(bench.now_s + 10.1, "n0", "n1")
    assert Connect(node=bench.nodes[2]) in bench.commands


def test_a_node_that_is_found_faulty_before_it_comes_back_is_told_and_tried_later():
    bench = patient()
    bench.fail("n2")
    answer_all(bench, "n0", "n1")
    bench.beat_until(bench.now_s + 10.1, "n0", "n1")
    bench.commands.clear()
    bench.feed(NodeFailed(node="n2", loss=Unfit(fault="no memory")))
    assert [(entry.node, entry.fault, entry.is_tried_again) for entry in bench.journal(NodeUnfit)] == [
        ("n2", "no memory", True)
    ]
    bench.beat_until(bench.now_s + 21.0, "n0", "n1")
    assert Connect(node=bench.nodes[2]) in bench.commands


def test_the_third_loss_in_ten_minutes_is_no_promise_to_try_again():
    bench = patient()
    for number in range(3):
        bench.fail("n2")
        answer_all(bench, "n0", "n1")
        bench.resume("n0", "n1")
        bench.beat_until(bench.now_s + 10.1, "n0", "n1")
        bench.up("n2", pid=99 + number)
        bench.say("n2", ready(pid=200 + number))
        answer_all(bench, "n0", "n1", "n2")
        bench.resume("n0", "n1", "n2")
        if len(bench.journal(NodeLost)) == 3:
            break
    assert [entry.is_tried_again for entry in bench.journal(NodeLost)] == [True, True, False]
    assert bench.journal(Notice)[-1].level == "warning"
    assert "n2" in bench.journal(Notice)[-1].text


def test_a_node_that_ends_again_and_again_and_always_comes_back_is_left_out():
    bench = patient()
    came = AddRequested(spec=bench.nodes[2], by_itself=True)
    for number in range(3):
        bench.fail("n2")
        answer_all(bench, "n0", "n1")
        bench.resume("n0", "n1")
        back = bench.feed(came)
        assert (Connect(node=bench.nodes[2]) in back) == (number < 2)
        if number < 2:
            bench.up("n2", pid=99 + number)
            bench.say("n2", ready(pid=200 + number))
            answer_all(bench, "n0", "n1", "n2")
            bench.resume("n0", "n1", "n2")
    assert "`oobleck add n2` adds it at once" in bench.journal(Notice)[-1].text
    assert Connect(node=bench.nodes[2]) in bench.feed(AddRequested(spec=bench.nodes[2]))


def test_a_node_that_the_user_kills_is_not_tried_again():
    bench = patient()
    bench.feed(KillRequested(node="n2"))
    bench.fail("n2")
    assert [(entry.is_requested, entry.is_tried_again) for entry in bench.journal(NodeLost)] == [(True, False)]
    answer_all(bench, "n0", "n1")
    bench.commands.clear()
    bench.beat_until(bench.now_s + 60.0, "n0", "n1")
    assert not [command for command in bench.commands if isinstance(command, Connect)]


def test_a_node_with_notice_of_its_end_is_drained():
    bench = training()
    bench.say("n2", Leaving(reason="spot"))
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.DRAINED
    assert [(entry.node, entry.reason) for entry in bench.journal(TerminationNoticed)] == [("n2", "spot")]


def test_a_notice_during_the_start_is_acted_on_once_training_begins():
    bench = Bench(SINGLES)
    for node in ("n0", "n1", "n2"):
        bench.up(node)
    bench.say("n2", Leaving(reason="spot"))
    assert bench.ended is None
    bench.prepare()
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.DRAINED
    assert bench.journal(RecoveryStarted)[-1].nodes == ("n2",)


def test_a_notice_to_a_node_whose_worker_is_started_again_is_acted_on_once_it_is_back():
    bench = training()
    bench.say("n2", WorkerExited(device=0, pid=8, end=Killed(signal=9)))
    bench.say("n2", Leaving(reason="spot"))
    answer_all(bench, "n0", "n1")
    bench.say("n2", ready(pid=9))
    answer_all(bench, "n0", "n1", adopted=2)
    bench.answer("n2")
    assert bench.updates[-1].generation > 2
    assert "n2" not in bench.updates[-1].plan.nodes


def test_nobody_is_lost_by_silence_before_training_and_the_start_says_who_is_silent():
    bench = Bench(SINGLES)
    for node in ("n0", "n1", "n2"):
        bench.up(node)
    bench.beat_until(60.0, "n0", "n1")
    assert bench.ended is None
    bench.beat_until(130.0, "n0", "n1")
    assert bench.ended is not None
    assert [node for node in ("n0", "n1", "n2") if node in bench.ended.reason.rpartition(";")[2]] == ["n2"]


# --- where most are silent -----------------------------------------------------------------------------------


FOURS = Shape(num_nodes=4)
FOUR = ("n0", "n1", "n2", "n3")


def test_where_half_fall_silent_at_once_they_are_waited_for():
    job = FOURS.job
    bench = Bench(FOURS, job=replace(job, control=replace(job.control, orphan_timeout_s=600.0)))
    bench.prepare()
    bench.beat_until(60.0, "n0", "n1")
    assert not bench.journal(NodeLost)
    assert [entry.level for entry in bench.journal(Notice)] == ["warning"]
    bench.beat_until(bench.now_s + 10.0, *FOUR)
    assert not bench.journal(NodeLost)
    assert [entry.level for entry in bench.journal(Notice)] == ["warning", "info"]


def test_where_all_are_silent_nothing_hangs():
    bench = training(FOURS)
    bench.beat_until(15.0)
    assert not bench.journal(NodeLost)
    assert not bench.journal(RecoveryStarted)


def test_those_who_stay_silent_when_most_are_back_are_lost_some_time_later():
    bench = training(FOURS)
    bench.beat_until(10.0, "n0")
    bench.beat_until(15.0, "n0", "n1", "n2")
    assert not bench.journal(NodeLost), "the others were as silent, and are about to be heard"
    bench.beat_until(30.0, "n0", "n1", "n2")
    assert [lost.node for lost in bench.journal(NodeLost)] == ["n3"]


def test_connections_that_are_closed_are_proof_however_many_they_are():
    bench = training(FOURS)
    bench.beat_until(5.0, "n0")
    for node in ("n1", "n2", "n3"):
        bench.fail(node)
    assert [lost.node for lost in bench.journal(NodeLost)] == ["n1", "n2", "n3"]


def test_workers_that_all_answer_no_fence_are_waited_for():
    bench = training(FOURS)
    bench.fail("n3")
    bench.beat_until(15.0, *FOUR)
    assert len(bench.journal(NodeLost)) == 1
    answer_all(bench, "n0", "n1", "n2")
    assert bench.updates[-1].generation == 2


def test_a_node_that_is_reached_again_is_fenced_once_more():
    """The first fence may have been lost on the way."""
    bench = training(FOURS)
    bench.fail("n3")
    again = bench.up("n1", generation=1, workers=living(0))
    fences = [send for command in again for send in sends(command) if isinstance(send.message, Fence)]
    assert [(send.node, send.message.generation) for send in fences] == [("n1", 2)]
    assert len(bench.journal(RecoveryStarted)) == 1


def test_orders_that_may_be_lost_on_the_way_are_given_anew():
    bench = training(FOURS)
    bench.fail("n3")
    answer_all(bench, "n0", "n1", "n2")
    bench.up("n1", generation=1, workers=living(0))
    assert bench.journal(RecoveryStarted)[-1].generation == 3
    assert not [lost for lost in bench.journal(NodeLost) if lost.node == "n1"]


# --- another master takes over -------------------------------------------------------------------------------


def succeed(bench: Bench, *nodes: str, pid: int = 7, generation: int = 1) -> Coordinator:
    """A new coordinator made from the journal, with these nodes' agents attached."""
    bench.entries_before += [command.entry for command in bench.commands if isinstance(command, Record)]
    replayed = replay_run(bench.entries_before)
    assert replayed is not None
    bench.commands.clear()
    bench.coordinator = Coordinator(
        bench.job, bench.nodes, started_at="2026-01-01T00:00:00Z", python_version="3.11.0", replayed=replayed
    )
    bench.commands += bench.coordinator.start(bench.now_s)
    for node in nodes:
        bench.up(node, pid=pid, generation=generation, workers=living(0))
    return bench.coordinator


def test_an_agent_that_is_met_again_before_the_first_plan_is_told_of_none():
    bench = Bench(SINGLES)
    for workers in ((), living(0)):
        bench.up("n0", workers=workers)
    assert bench.ended is None
    assert not bench.updates


def test_a_new_master_attaches_to_all_and_stops_nobody():
    bench = training()
    bench.commit("n0", 1)
    coordinator = succeed(bench, "n0", "n1", "n2")
    assert [command.node.name for command in bench.commands if isinstance(command, Connect) and command.attach] == [
        "n0",
        "n1",
        "n2",
    ]
    assert not [command for command in bench.commands if isinstance(command, Send)]
    assert coordinator.phase is Phase.TRAINING
    bench.commit("n0", 2)
    assert [entry.record.step for entry in bench.journal(StepDone)] == [2]


def test_orders_that_nobody_may_have_received_are_given_again():
    bench = training()
    bench.commit("n0", 1)
    bench.fail("n2")
    told(bench, "n0", "n1")
    coordinator = succeed(bench, "n0", "n1", generation=2)
    assert coordinator.phase is Phase.FENCING
    assert bench.journal(RecoveryStarted)[0].cause is PlanCause.MASTER_LOST


def test_nodes_that_a_new_master_has_still_to_reach_are_not_taken_for_frozen():
    bench = training()
    bench.commit("n0", 1)
    bench.fail("n2")
    told(bench, "n0", "n1")
    succeed(bench)
    bench.wait(bench.job.control.lease_s + 0.1)
    for node in ("n0", "n1"):
        bench.up(node, pid=7, generation=2, workers=living(0))
    assert not bench.journal(NodeLost)


def test_a_new_master_has_time_to_reach_hundreds_of_nodes():
    """It logs in to one after the other, while those that it has reached already are heard of."""
    bench = training(MANY)
    nodes = [spec.name for spec in bench.nodes]
    bench.commit("n0", 1)
    succeed(bench, *nodes[:300])
    control = bench.job.control
    bench.beat_until(bench.now_s + control.connect_timeout_s + control.lease_s + 1.0, *nodes[:300])
    for node in nodes[300:350]:
        bench.up(node, pid=7, generation=1, workers=living(0))
    assert not bench.journal(NodeLost)
    bench.beat_until(bench.now_s + 25.0, *nodes[:350])
    assert {lost.node for lost in bench.journal(NodeLost)} == set(nodes[350:]), "those that are never reached are lost"


def test_workers_that_take_a_plan_up_one_after_the_other_hang_in_nothing():
    bench = training(FOURS)
    bench.commit("n0", 1)
    bench.fail("n3")
    told(bench, "n0", "n1", "n2")
    for node in ("n0", "n1"):
        bench.beat_until(bench.now_s + 29.0 if node == "n0" else bench.now_s + 9.0, "n0", "n1", "n2")
        bench.resume(node)
    assert [entry.why for entry in bench.journal(RecoveryStarted)] == [LossCause.CONNECTION_LOST]
    bench.beat_until(bench.now_s + 11.0, "n0", "n1", "n2")
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.HANG


def test_a_plan_may_take_three_times_as_long_as_the_ones_before():
    bench = training(FOURS)
    bench.commit("n0", 1)
    bench.fail("n3")
    told(bench, "n0", "n1", "n2")
    bench.beat_until(bench.now_s + 25.0, "n0", "n1", "n2")
    bench.resume("n0", "n1", "n2")
    bench.commit("n0", 2, generation=2)
    bench.fail("n2")
    for node in ("n0", "n1"):
        layers = held(bench, node, 2)
        bench.answer(node, adopted=2, applied=2, last_record=record(2, generation=2), layers=layers)
    bench.wait(0.01)
    num_recoveries = len(bench.journal(RecoveryStarted))
    bench.beat_until(bench.now_s + 70.0, "n0", "n1")
    assert len(bench.journal(RecoveryStarted)) == num_recoveries
    bench.beat_until(bench.now_s + 10.0, "n0", "n1")
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.HANG


def test_a_node_that_was_joining_when_the_master_died_joins_anew():
    bench = training()
    bench.commit("n0", 1)
    spec = NodeSpec(name="n9", host="n9")
    bench.feed(AddRequested(spec=spec))
    bench.up("n9")
    for _ in range(3):
        succeed(bench, "n0", "n1", "n2")
        assert bench.commands.count(Connect(node=spec)) == 1


def test_a_new_master_orders_changes_of_the_plan_that_it_knows_from_the_journal():
    bench = training()
    bench.commit("n0", 1)
    knows, layers = bench.updates[0].ordered.id, {node: held(bench, node) for node in ("n0", "n1")}
    succeed(bench, "n0", "n1", "n2")
    bench.fail("n2")
    for node in ("n0", "n1"):
        bench.answer(node, adopted=1, applied=1, last_record=record(1), layers=layers[node], knows=knows)
    orders = [message for message in bench.messages(bench.wait(0.01)) if isinstance(message, PlanOrder)]
    assert [(order.common.delta.base, order.common.addresses) for order in orders] == [(knows, ())] * 2


def test_a_new_master_learns_of_slow_nodes_once_it_has_found_them():
    bench = training()
    bench.commit("n0", 1)
    succeed(bench, "n0", "n1", "n2")

    def tell_paces() -> list[tuple[str, float]]:
        for _ in range(5):
            for node in ("n0", "n1", "n2"):
                bench.say(node, Pace(device=0, compute_s=3.0 if node == "n2" else 1.0, microbatches=4))
        return [(entry.node, entry.factor) for entry in bench.journal(PaceChanged)]

    assert not tell_paces()
    bench.beat_until(bench.now_s + 2.0, "n0", "n1", "n2")
    assert tell_paces() == [("n2", 3.0)]


def test_a_new_master_knows_the_slow_nodes_of_the_one_before():
    bench = training()
    bench.commit("n0", 1)
    for factor in (3.0, 1.0, 2.0):
        bench.commands.append(Record(entry=PaceChanged(t_s=bench.now_s, node="n2", factor=factor)))
    succeed(bench, "n0", "n1", "n2")
    replayed = replay_run(bench.entries_before)
    assert replayed is not None
    assert replayed.slow == {"n2": 2.0}
    ends = [
        NodeLost(t_s=9.0, node="n2", loss=ConnectionLost()),
        WorkerDown(t_s=9.0, node="n2", device=0, pid=8, end=Unseen()),
        RecoveryStarted(t_s=9.0, generation=2, nodes=("n2",), cause=PlanCause.RETRIED),
        PaceChanged(t_s=9.0, node="n2", factor=1.0),
    ]
    for end in ends:
        after = replay_run([*bench.entries_before, end])
        assert after is not None
        assert after.slow == {}


def test_an_agent_that_is_another_one_has_lost_its_state():
    bench = training()
    bench.commit("n0", 1)
    succeed(bench, "n0", "n1")
    bench.up("n2", pid=99)
    assert bench.journal(NodeLost)[0].node == "n2"
    assert bench.coordinator.phase is Phase.FENCING


def test_a_worker_whose_restart_was_lost_is_started():
    bench = training()
    bench.commit("n0", 1)
    bench.say("n2", CRASH)
    told(bench, "n0", "n1")
    bench.commit("n0", 2)
    succeed(bench, "n0", "n1", generation=2)
    bench.up("n2", generation=1, workers=())
    assert Send(node="n2", message=StartWorker(device=0)) in bench.commands


def test_a_journal_whose_end_is_lost_is_not_gone_on_with():
    bench = training()
    bench.commit("n0", 1)
    succeed(bench)
    bench.up("n0", pid=7, generation=9, workers=living(0))
    assert bench.ended is not None
    assert "--resume never" in bench.ended.reason


def test_words_that_are_said_again_are_not_new():
    bench = training()
    bench.commit("n0", 1)
    succeed(bench, "n0", "n1", "n2")
    bench.say("n1", ready())
    assert not bench.journal(RecoveryStarted)
    bench.say("n1", WorkerExited(device=0, pid=3, end=Killed(signal=9)))
    assert not bench.journal(WorkerDown)


def test_a_stop_that_the_master_before_asked_for_ends_the_run_well():
    bench = training()
    bench.commit("n0", 1)
    succeed(bench, "n0", "n1", "n2")
    for node in ("n0", "n1", "n2"):
        bench.say(node, Finished(device=0, applied=1))
    assert bench.ended is not None
    assert bench.ended.exit_code == ExitCode.DONE


def test_new_lines_of_the_hostfile_join_the_run_that_is_taken_over():
    bench = training()
    bench.commit("n0", 1)
    bench.nodes = (*bench.nodes, NodeSpec(name="n9", host="n9"))
    succeed(bench, "n0", "n1", "n2")
    assert Connect(node=bench.nodes[-1]) in bench.commands


def test_a_run_that_never_trained_or_has_ended_leaves_nothing_to_take_over():
    bench = Bench(SINGLES)
    bench.up("n0")
    entries = [command.entry for command in bench.commands if isinstance(command, Record)]
    assert replay_run(entries) is None
    assert replay_run([]) is None
    bench = training()
    bench.feed(stop(now=True))
    assert replay_run([command.entry for command in bench.commands if isinstance(command, Record)]) is None


def test_long_transfers_of_the_newest_plan_are_told_of():
    bench = training()
    for generation in (0, 1):
        moving = LayersMoving(device=0, generation=generation, received_bytes=250, all_bytes=1000)
        bench.say("n1", moving)
    (arriving,) = bench.journal(LayersArriving)
    assert (arriving.node, arriving.generation) == ("n1", 1)
    assert "25%" in arriving.sentence
