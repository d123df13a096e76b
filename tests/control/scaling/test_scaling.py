"""Which nodes rest, and when that changes: the coordinator's machine under a scaling policy."""

from __future__ import annotations

from dataclasses import replace

from oobleck.control.events import AddRequested, DrainRequested
from oobleck.control.journal import (
    LossCause,
    NodeLeft,
    PlanAdopted,
    PlanCause,
    RecoveryDone,
    RecoveryStarted,
    ScalingDecided,
    StepDone,
)
from oobleck.control.journal.view import RunView
from oobleck.control.nodes import Membership
from oobleck.control.plans import update_of
from oobleck.control.protocol import AgentStopped, Killed, Pace, PlanOrder, Resumed, WorkerExited
from oobleck.control.recovery import Phase
from oobleck.control.scaling import Scaling
from oobleck.control.steps import Progress
from oobleck.job import NodeSpec, ScalingSpec
from oobleck.planner import ExecutionPlan, Profile, WorkerId
from tests.control.bench import Bench, ready
from tests.control.journals import replay_run
from tests.control.model import Shape


class Costly(Shape):
    """One layer that cannot be cut, and a network that is slow to reduce its gradients: six nodes are the fastest,
    and the last two of them add 17 % of what each of four gives."""

    @property
    def profile(self) -> Profile:
        profile = super().profile
        network = replace(profile.network, inter_node_bytes_per_s=3125.0)
        return replace(profile, network=network)


SIX = Costly(num_nodes=6, num_layers=1, layer_s=0.12, num_microbatches=12)
EFFICIENT = ScalingSpec(policy="efficient")
RESTING = ("n4", "n5")


def training(scaling: ScalingSpec = EFFICIENT, shape: Shape = SIX) -> Bench:
    bench = Bench(shape, job=replace(shape.job, scaling=scaling, max_steps=10_000))
    bench.prepare()
    return bench


def plan(bench: Bench) -> ExecutionPlan:
    return bench.updates[-1].plan


def everybody(bench: Bench) -> tuple[str, ...]:
    return (*plan(bench).nodes, *plan(bench).spares)


def answer_all(bench: Bench, *nodes: str) -> None:
    """All of these hold what the newest plan gives them; then what belongs together has come together."""
    layers = {worker_id.node: tuple(sorted(held)) for worker_id, held in plan(bench).layers_at.items()}
    newest = bench.journal(PlanAdopted)[-1].generation
    done = [entry.record for entry in bench.journal(StepDone)]
    applied = done[-1].step if done else 0
    for node in nodes:
        adopted = newest if node in layers else 0
        last = done[-1] if done else None
        bench.answer(node, adopted=adopted, layers=layers.get(node, ()), applied=applied, last_record=last)
    bench.wait(0.01)


def recover(bench: Bench, *nodes: str) -> None:
    answer_all(bench, *nodes)
    bench.resume(*plan(bench).nodes)


def commit_for(bench: Bench, seconds: float, *, first: int, step_s: float) -> int:
    """Let training go on for so long; returns the next step."""
    end_s, step = bench.now_s + seconds, first
    while bench.now_s < end_s and bench.coordinator.phase is Phase.TRAINING:
        bench.beat_until(min(end_s, bench.now_s + step_s), *everybody(bench))
        generation = bench.journal(PlanAdopted)[-1].generation
        bench.commit(plan(bench).nodes[0], step, generation=generation, duration_s=step_s)
        step += 1
    return step


def test_a_node_that_rests_is_told_of_every_generation_and_takes_no_part() -> None:
    bench = training()
    (decided,) = bench.journal(ScalingDecided)
    assert (decided.num_nodes, decided.num_available) == (4, 6)
    assert plan(bench).spares == RESTING
    told = [command for command in bench.commands if bench.messages([command], "n5")]
    order = bench.messages(told, "n5")[-1]
    assert isinstance(order, PlanOrder)
    assert update_of(None, order, WorkerId(node="n5", device=0)) == bench.updates[0]


def test_a_loss_is_made_good_by_a_node_that_rests_without_a_wait() -> None:
    bench = training()
    bench.fail("n1")
    recover(bench, "n0", "n2", "n3", *RESTING)
    assert len(plan(bench).nodes) == 4
    assert len(plan(bench).spares) == 1
    assert len(bench.journal(ScalingDecided)) == 1


def test_a_lost_node_that_comes_back_rests_where_another_took_its_place() -> None:
    bench = training()
    bench.fail("n1")
    recover(bench, "n0", "n2", "n3", *RESTING)
    before = bench.generation
    bench.feed(AddRequested(spec=NodeSpec(name="n1", host="host1")))
    bench.up("n1", pid=9)
    bench.say("n1", ready(pid=10))
    assert bench.coordinator.phase is Phase.TRAINING
    assert bench.generation == before


def test_a_worker_that_is_started_again_trains_again_where_nobody_took_its_place() -> None:
    bench = training(shape=replace(SIX, num_nodes=4))
    bench.say("n1", WorkerExited(device=0, pid=8, end=Killed(signal=9)))
    recover(bench, "n0", "n2", "n3")
    assert "n1" not in plan(bench).nodes
    bench.say("n1", ready(pid=10))
    assert bench.coordinator.phase is Phase.FENCING
    answer_all(bench, "n0", "n1", "n2", "n3")
    assert "n1" in plan(bench).nodes


def test_the_loss_of_a_node_that_rests_disturbs_nobody_once_all_train_without_it() -> None:
    bench = training()
    bench.commit("n0", 1)
    before = bench.generation
    bench.say("n4", WorkerExited(device=0, pid=8, end=Killed(signal=9)))
    bench.say("n4", ready(pid=10))
    bench.fail("n5")
    assert bench.coordinator.phase is Phase.TRAINING
    assert bench.generation == before
    bench.fail("n1")
    recover(bench, "n0", "n2", "n3", "n4")
    assert set(plan(bench).nodes) == {"n0", "n2", "n3", "n4"}
    assert not plan(bench).spares


def test_a_node_that_rests_may_be_waited_for_until_a_step_is_committed_without_it() -> None:
    bench = training()
    bench.fail("n5")
    assert bench.coordinator.phase is Phase.FENCING


def test_a_node_that_comes_in_the_middle_of_a_recovery_is_asked_too() -> None:
    bench = training()
    bench.fail("n1")
    bench.feed(AddRequested(spec=NodeSpec(name="n1", host="host1")))
    bench.up("n1", pid=9)
    bench.say("n1", ready(pid=10))
    recover(bench, "n0", "n1", "n2", "n3", *RESTING)
    assert len(plan(bench).nodes) == 4
    assert len(plan(bench).spares) == 2


def test_a_slow_node_rests_in_place_of_a_healthy_one() -> None:
    bench = training()
    for _ in range(5):
        for node in plan(bench).nodes:
            bench.say(node, Pace(device=0, compute_s=3.0 if node == "n0" else 1.0, microbatches=4))
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.SLOW
    recover(bench, "n0", "n1", "n2", "n3", *RESTING)
    assert "n0" in plan(bench).spares
    assert len(plan(bench).nodes) == 4


def test_a_drained_node_is_replaced_by_one_that_rests() -> None:
    bench = training()
    bench.feed(DrainRequested(node="n2"))
    recover(bench, "n0", "n1", "n2", "n3", *RESTING)
    assert len(plan(bench).nodes) == 4
    assert "n2" not in everybody(bench)
    bench.say("n2", AgentStopped(reason="drained"))
    assert bench.journal(NodeLeft)[0].node == "n2"


def test_a_node_that_rests_can_be_drained() -> None:
    bench = training()
    bench.feed(DrainRequested(node="n5"))
    recover(bench, "n0", "n1", "n2", "n3", *RESTING)
    assert plan(bench).nodes == ("n0", "n1", "n2", "n3")
    assert plan(bench).spares == ("n4",)


LATE = ScalingSpec(policy="deadline", deadline_s=1e5)


def test_fewer_nodes_have_to_be_the_better_number_for_a_minute() -> None:
    """The first look comes a minute after the start, and another number is taken a minute later."""
    bench = training(LATE)
    assert plan(bench).spares == ()
    commit_for(bench, 119.0, first=1, step_s=1.0)
    assert not bench.journal(RecoveryStarted)
    commit_for(bench, 2.0, first=200, step_s=1.0)
    assert bench.journal(RecoveryStarted)[-1].cause is PlanCause.SCALED
    assert bench.journal(ScalingDecided)[-1].num_nodes == 2
    recover(bench, *(f"n{index}" for index in range(6)))
    assert len(plan(bench).nodes) == 2
    (done,) = bench.journal(RecoveryDone)
    assert (done.cause, len(done.nodes)) == (PlanCause.SCALED, 4)


def test_steps_that_take_longer_than_predicted_count_as_they_were_measured() -> None:
    """By the profile two nodes would do; steps take ten times as long."""
    bench = training(replace(LATE, deadline_s=8e4))
    predicted_s = bench.journal(PlanAdopted)[0].predicted_step_s
    step = commit_for(bench, 600.0, first=1, step_s=10 * predicted_s)
    assert step > 20
    assert not bench.journal(RecoveryStarted)


def test_a_change_costs_what_changes_were_measured_to_cost() -> None:
    """After a recovery that took three hours nothing seems worth another change."""
    bench = training(LATE)
    bench.fail("n5")
    answer_all(bench, "n0", "n1", "n2", "n3", "n4")
    said = Resumed(device=0, generation=2, transfer_s=0.0, received_bytes=0, resumed_s=10_900.0, busy_s=())
    for node in plan(bench).nodes:
        bench.say(node, said)
    (done,) = bench.journal(RecoveryDone)
    assert done.stall_s > 10_000
    commit_for(bench, 600.0, first=1, step_s=1.0)
    assert [entry.why for entry in bench.journal(RecoveryStarted)] == [LossCause.CONNECTION_LOST]


def test_a_new_master_and_a_view_know_the_number_of_nodes() -> None:
    bench = training()
    bench.commit("n0", 1, generation=1)
    entries = bench.entries(bench.commands)
    replayed = replay_run(entries)
    assert replayed is not None
    assert replayed.target == 4
    view = RunView()
    for entry in entries:
        view.apply(entry)
    assert view.at(1.0).scaling.startswith("4 of 6 nodes ")


def test_moves_repay_within_the_interval_between_the_changes_so_far() -> None:
    """The job's interval counts as one more that came before the run; a new master goes on with the same."""
    bench = training(ScalingSpec())
    scaling = Scaling(bench.job, Membership.of(()), Progress(bench.job))
    assert scaling.horizon_s(0.0) == bench.job.change_interval_s == 3600.0
    assert scaling.horizon_s(3600.0) == 7200.0
    for node in ("n1", "n2"):
        bench.fail(node)
        recover(bench, *sorted(set(everybody(bench)) - {"n1", node}))
    done = bench.journal(RecoveryDone)
    assert len(done) == 2
    for each in done:
        scaling.recovery_done(each)
    assert scaling.horizon_s(3600.0) == 2400.0
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    after = Scaling(bench.job, Membership.of(()), Progress(bench.job))
    after.restore(replayed.target, replayed.num_changes, 0.0)
    assert after.horizon_s(3600.0) == 2400.0


def test_all_nodes_are_used_without_a_decision_by_default() -> None:
    bench = training(ScalingSpec())
    assert plan(bench).spares == ()
    assert not bench.journal(ScalingDecided)
    assert bench.coordinator.reviews_s == float("inf")


def test_a_run_that_began_with_too_few_nodes_takes_in_those_that_make_it_safe_at_once() -> None:
    shape = replace(SIX, num_nodes=1)
    bench = training(shape=shape)
    assert len(plan(bench).nodes) == 1, "it is all there are"
    bench.commit("n0", 1)
    for index, node in enumerate(("n1", "n2"), start=1):
        bench.feed(AddRequested(spec=NodeSpec(name=node, host=f"host{index}")))
        bench.up(node, pid=9)
        bench.say(node, ready(pid=10))
        if bench.coordinator.phase is Phase.FENCING:
            answer_all(bench, "n0", node)
    assert set(plan(bench).nodes) == {"n0", "n1"}, "f + 1, and no more before that pays"
