"""Nodes of several kinds in one run: their profiles, and those that join of a kind that nothing is known of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.events import AddRequested, LookUpProfile, ProfileFound, Send, Store
from oobleck.control.journal import NodeAdded, NodeLost, Notice, ProfileKnown, WorkerUp
from oobleck.control.protocol import Killed, Pace, Profiled, ProfileRequest, WorkerExited
from oobleck.control.speed import microbatch_s
from oobleck.control.training import Phase
from oobleck.job import JobSpec, NodeSpec
from oobleck.planner import Profile, profile_from_json, profile_to_json
from tests.control.bench import PID, Bench, ready
from tests.control.journals import replay_run
from tests.control.model import Shape

SHAPE = Shape(num_nodes=4, num_microbatches=12, fault_threshold=0)
SLOW = 2.0
"""How many times as long a slow node takes."""


def slowed(profile: Profile) -> Profile:
    return replace(
        profile,
        layers=tuple(
            replace(
                layer,
                forward_s={count: SLOW * seconds for count, seconds in layer.forward_s.items()},
                backward_s={count: SLOW * seconds for count, seconds in layer.backward_s.items()},
            )
            for layer in profile.layers
        ),
    )


FAST_JSON, SLOW_JSON = profile_to_json(SHAPE.profile), profile_to_json(slowed(SHAPE.profile))
NODES = tuple(
    NodeSpec(name=name, host=name, device=device)
    for name, device in (("f0", "fast"), ("s0", "slow"), ("f1", "fast"), ("s1", "slow"))
)
LATE = NodeSpec(name="late", host="late", device="slow")


def looked_up(commands: object) -> list[str]:
    assert isinstance(commands, list)
    return [command.kind for command in commands if isinstance(command, LookUpProfile)]


def sends(commands: object) -> list[str]:
    """Return the nodes that are asked to measure."""
    assert isinstance(commands, list)
    return [each.node for each in commands if isinstance(each, Send) and isinstance(each.message, ProfileRequest)]


def mixed() -> Bench:
    bench = Bench(SHAPE, nodes=NODES)
    for spec in NODES:
        bench.up(spec.name)
        bench.say(spec.name, ready())
    bench.feed(ProfileFound(profile_json=FAST_JSON, kind="fast"), ProfileFound(profile_json=SLOW_JSON, kind="slow"))
    return bench


def test_each_kind_has_a_profile_of_its_own():
    bench = Bench(SHAPE, nodes=NODES)
    for spec in NODES:
        bench.up(spec.name)
    assert looked_up(bench.say("s1", ready())) == ["slow"]
    assert looked_up(bench.say("f0", ready())) == ["fast"]
    assert looked_up(bench.say("s0", ready())) == []
    bench.say("f1", ready())
    bench.feed(ProfileFound(profile_json=FAST_JSON, kind="fast"))
    assert not bench.updates, "nothing is known of the slow ones"
    sent = bench.feed(ProfileFound(profile_json=None, kind="slow"))[-1]
    assert sent == Send(node="s0", message=ProfileRequest(device=0))
    bench.say("f1", Profiled(device=0, profile_json=FAST_JSON))
    bench.wait(1.0)
    assert bench.ended is not None
    assert "sent a profile that it was not asked for" in bench.ended.reason


def test_kinds_are_cached_apart():
    def key(spec: NodeSpec) -> str:
        bench = Bench(SHAPE, nodes=(spec,))
        bench.up(spec.name)
        (looks,) = (command for command in bench.say(spec.name, ready()) if isinstance(command, LookUpProfile))
        return looks.key

    plain = NodeSpec(name="f0", host="f0")
    assert len({key(plain), key(NODES[0]), key(NODES[1])}) == 3
    assert key(NODES[0]) == key(NODES[2])


def test_slow_nodes_take_the_smaller_share():
    bench = mixed()
    assert bench.ended is None
    shares = {node: each.num_microbatches for each in bench.updates[-1].plan.pipelines for node in each.nodes}
    assert shares == {"f0": 5, "f1": 5, "s0": 1, "s1": 1} or max(shares["s0"], shares["s1"]) < shares["f0"]
    known = bench.journal(ProfileKnown)
    assert [(entry.kind, entry.num_devices) for entry in known] == [("fast", 1), ("slow", 1)]
    assert [profile_from_json(entry.profile_json) for entry in known] == [SHAPE.profile, slowed(SHAPE.profile)]


def test_nodes_that_are_as_slow_as_their_kind_are_not_slow():
    bench = mixed()
    adopt(bench)
    profiles = {"fast": SHAPE.profile, "slow": slowed(SHAPE.profile)}
    plan = bench.updates[-1].plan
    for _ in range(8):
        for spec in NODES:
            located = plan.locate(next(each for each in plan.worker_ids if each.node == spec.name))
            assert located is not None
            stage = plan.pipelines[located[0]].stages[located[1]]
            compute_s = microbatch_s(profiles[spec.device], stage)
            bench.say(spec.name, Pace(device=0, compute_s=compute_s, microbatches=1))
    assert bench.coordinator.phase is Phase.TRAINING
    assert len(bench.updates) == 4, "the first plan alone"


def adopt(bench: Bench, *nodes: str) -> None:
    bench.resume(*(nodes or [spec.name for spec in bench.nodes]))


def fast_alone(job: JobSpec = SHAPE.job) -> Bench:
    """Two nodes of one kind that train, and a third one of another kind, which is asked to join."""
    bench = Bench(SHAPE, nodes=(NODES[0], NODES[2]), job=job)
    for spec in bench.nodes:
        bench.up(spec.name)
        bench.say(spec.name, ready())
    bench.feed(ProfileFound(profile_json=FAST_JSON, kind="fast"))
    adopt(bench)
    bench.feed(AddRequested(spec=LATE))
    bench.up("late")
    return bench


def join(bench: Bench) -> None:
    for node in ("f0", "f1"):
        bench.answer(node, adopted=1, layers=tuple(range(4)))
    bench.wait(0.01)
    bench.answer("late")


@pytest.mark.parametrize("is_found", [True, False])
def test_kinds_that_share_a_machine_are_measured_at_once(is_found: bool):
    nodes = tuple(replace(spec, host="one") for spec in NODES[:2])
    bench = Bench(SHAPE, nodes=nodes)
    for spec in nodes:
        bench.up(spec.name, machine="m")
    bench.say("f0", ready())
    assert not sends(bench.feed(ProfileFound(profile_json=None, kind="fast")))
    assert not sends(bench.say("s0", ready()))
    found = SLOW_JSON if is_found else None
    assert sends(bench.feed(ProfileFound(profile_json=found, kind="slow"))) == (["f0"] if is_found else ["f0", "s0"])


def test_the_others_measure_again_where_one_that_measures_is_lost():
    bench = fast_alone()
    beside = NodeSpec(name="beside", host="late", device="slow")
    bench.feed(AddRequested(spec=beside))
    bench.say("late", ready())
    bench.feed(ProfileFound(profile_json=None, kind="slow"))
    bench.up("beside")
    assert sends(bench.say("beside", ready())) == ["beside", "late"]
    bench.say("late", Profiled(device=0, profile_json=SLOW_JSON))
    assert [known.kind for known in bench.journal(ProfileKnown)] == ["fast"]
    assert sends(bench.fail("beside")) == ["late"]
    bench.say("late", Profiled(device=0, profile_json=SLOW_JSON))
    assert [known.kind for known in bench.journal(ProfileKnown)] == ["fast", "slow"]


def test_nobody_waits_for_a_node_of_its_machine_that_is_lost():
    bench = fast_alone()
    bench.feed(AddRequested(spec=NodeSpec(name="beside", host="late", device="third")))
    bench.up("beside")
    bench.say("late", ready())
    assert not sends(bench.feed(ProfileFound(profile_json=None, kind="slow")))
    assert sends(bench.fail("beside")) == ["late"]


def test_a_node_of_an_unknown_kind_is_measured_before_it_trains():
    bench = fast_alone()
    assert looked_up(bench.say("late", ready())) == ["slow"]
    assert bench.coordinator.phase is Phase.TRAINING
    assert "late is the first node of kind slow" in bench.journal(Notice)[-1].text
    assert not [up for up in bench.journal(WorkerUp) if up.node == "late"]
    sent = bench.feed(ProfileFound(profile_json=None, kind="slow"))[-1]
    assert sent == Send(node="late", message=ProfileRequest(device=0))
    commands = bench.say("late", Profiled(device=0, profile_json=SLOW_JSON))
    assert any(isinstance(command, Store) for command in commands)
    assert [entry.kind for entry in bench.journal(ProfileKnown)] == ["fast", "slow"]
    assert bench.coordinator.phase is Phase.FENCING
    join(bench)
    plan = bench.updates[-1].plan
    assert plan.nodes == ("f0", "f1", "late")
    shares = {node: each.num_microbatches for each in plan.pipelines for node in each.nodes}
    assert shares["late"] < shares["f0"]


def test_a_loss_while_a_node_is_measured_is_planned_without_it():
    bench = fast_alone()
    bench.say("late", ready())
    bench.feed(ProfileFound(profile_json=None, kind="slow"))
    bench.fail("f1")
    bench.answer("f0", adopted=1, layers=tuple(range(4)))
    bench.wait(0.01)
    assert bench.updates[-1].plan.nodes == ("f0",)
    assert bench.ended is None


def test_another_worker_measures_where_the_one_that_was_asked_ends():
    bench = fast_alone()
    bench.say("late", ready())
    bench.feed(ProfileFound(profile_json=None, kind="slow"))
    bench.say("late", WorkerExited(device=0, pid=PID, end=Killed(signal=9)))
    again = bench.say("late", ready(pid=PID + 1))
    assert Send(node="late", message=ProfileRequest(device=0)) in again
    bench.fail("late")
    other = replace(LATE, name="other", host="other")
    bench.feed(AddRequested(spec=other))
    bench.up("other")
    assert Send(node="other", message=ProfileRequest(device=0)) in bench.say("other", ready())
    bench.say("other", Profiled(device=0, profile_json=SLOW_JSON))
    assert bench.coordinator.phase is Phase.FENCING


def test_a_node_whose_profile_is_of_another_model_costs_nobody_else():
    bench = fast_alone()
    bench.say("late", ready())
    bench.feed(ProfileFound(profile_json=None, kind="slow"))
    of_other = replace(SHAPE.profile, layers=SHAPE.profile.layers[1:])
    bench.say("late", Profiled(device=0, profile_json=profile_to_json(of_other)))
    assert bench.coordinator.phase is Phase.TRAINING
    (lost,) = bench.journal(NodeLost)
    assert "the profile of slow has 3 layers, and that of fast 4" in str(lost.loss)
    bench.feed(AddRequested(spec=LATE))
    bench.up("late")
    assert looked_up(bench.say("late", ready())) == ["slow"], "as if nothing had been known of it"


def test_a_node_of_another_kind_is_refused_by_an_interleaved_job_and_costs_nobody_else():
    bench = fast_alone(replace(SHAPE.job, schedule="interleaved"))
    bench.say("late", ready())
    bench.feed(ProfileFound(profile_json=SLOW_JSON, kind="slow"))
    assert bench.coordinator.phase is Phase.TRAINING
    (lost,) = bench.journal(NodeLost)
    assert lost.node == "late"
    assert "schedule is interleaved, and nodes are of 2 kinds (fast, slow)" in str(lost.loss)


@pytest.mark.parametrize("name", ["f0", "n9"])
def test_a_node_of_a_fifth_kind_is_refused(name: str):
    bench = mixed()
    for device in ("c", "d"):
        bench.feed(AddRequested(spec=NodeSpec(name=device, host=device, device=device)))
    bench.fail("f0")
    fifth = NodeSpec(name=name, host=name, device="e")
    bench.feed(AddRequested(spec=fifth))
    assert f"{name} is of kind e, and the job has nodes of c, d, fast, slow" in bench.journal(Notice)[-1].text
    assert fifth not in [entry.node for entry in bench.journal(NodeAdded)]


def test_a_lost_node_may_come_back_as_another_kind():
    bench = mixed()
    adopt(bench)
    bench.fail("f0")
    assert bench.coordinator.phase is Phase.FENCING
    bench.feed(AddRequested(spec=replace(NODES[0], device="slow")))
    bench.up("f0")
    bench.say("f0", ready(pid=9))
    for node in ("s0", "f1", "s1", "f0"):
        bench.answer(node, adopted=1 if node != "f0" else 0, layers=(0, 1, 2, 3) if node != "f0" else ())
    bench.wait(0.5)
    layers = {worker_id.node: held for worker_id, held in bench.updates[-1].plan.layers_at.items()}
    assert len(layers["f0"]) == len(layers["s1"]) < len(layers["f1"]), "it has a slow node's share of their pipeline"


def test_a_new_master_knows_the_profiles_of_all_kinds():
    bench = mixed()
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    assert [(kind.name, kind.profile) for kind in replayed.kinds] == [
        ("fast", SHAPE.profile),
        ("slow", slowed(SHAPE.profile)),
    ]


def test_a_profile_that_cannot_be_read_has_another_node_measure():
    bench = fast_alone()
    bench.say("late", ready())
    bench.feed(ProfileFound(profile_json=None, kind="slow"))
    other = replace(LATE, name="other", host="other")
    bench.feed(AddRequested(spec=other))
    bench.up("other")
    bench.say("other", ready())
    commands = bench.say("late", Profiled(device=0, profile_json="{torn"))
    assert [lost.node for lost in bench.journal(NodeLost)] == ["late"]
    assert Send(node="other", message=ProfileRequest(device=0)) in commands
    bench.say("other", Profiled(device=0, profile_json=SLOW_JSON))
    assert bench.coordinator.phase is Phase.FENCING


def test_a_worker_out_of_memory_leaves_plans_of_several_kinds_as_they_are_which_is_said():
    bench = mixed()
    known = len(bench.journal(ProfileKnown))
    bench.say("s0", WorkerExited(device=0, pid=PID, end=Killed(signal=9, is_out_of_memory=True)))
    assert len(bench.journal(ProfileKnown)) == known
    (text,) = [entry.text for entry in bench.journal(Notice) if "ran out of memory, and" in entry.text]
    assert "plans for several kinds of nodes stay: add nodes, give each more memory" in text
