"""A node one of whose devices fails, again and again, goes on with the others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oobleck.control.events import AddRequested, Connect, DrainRequested, ProfileFound
from oobleck.control.journal import NodeAdded, NodeLost, Notice, PlanAdopted
from oobleck.control.protocol import Configure, ErrorKind, Killed, Raised, StartWorker, WorkerExited
from oobleck.control.training import Phase
from oobleck.job import NodeSpec
from oobleck.planner import WorkerId, profile_to_json
from tests.control.bench import PID, Bench, ready
from tests.control.journals import replay_run
from tests.control.model import Shape

SHAPE = Shape(num_nodes=3, devices=4, num_microbatches=12, layers_per_device=2, fault_threshold=1)
ENDS = 4
"""After so many ends of its workers within ten minutes, a node is given up."""


def training(shape: Shape = SHAPE) -> Bench:
    bench = Bench(shape)
    bench.prepare()
    bench.resume(*(spec.name for spec in bench.nodes))
    return bench


def spec_of(bench: Bench, node: str) -> NodeSpec:
    """Return a node as it was last taken in."""
    specs = [*bench.nodes, *(added.node for added in bench.journal(NodeAdded))]
    return [spec for spec in specs if spec.name == node][-1]


def crash(bench: Bench, node: str, devices: list[int]) -> None:
    """End the workers of these devices one after the other, each once all of the node are ready."""
    pids = dict.fromkeys(range(spec_of(bench, node).num_devices), PID)
    for device in devices:
        others = [each for each in pids if each != device] if len(set(pids.values())) == 1 else []
        bench.say(node, WorkerExited(device=device, pid=pids[device], end=Killed(signal=9)))
        if bench.journal(NodeLost):
            return
        for other in others:
            bench.say(node, WorkerExited(device=other, pid=pids[other], end=Killed(signal=9)))
        for each in [device, *others]:
            pids[each] += 1
            bench.say(node, ready(each, pid=pids[each]))


def come_up(bench: Bench, node: str, *, kind: str | None) -> None:
    """Have a node's agent and its workers come up; `kind` is looked up, and has been measured before."""
    bench.up(node, pid=17)
    for device in range(spec_of(bench, node).num_devices):
        bench.say(node, ready(device, pid=99))
    if kind is not None:
        bench.feed(ProfileFound(profile_json=profile_to_json(SHAPE.profile), kind=kind))


def answer(bench: Bench, *nodes: str) -> None:
    """Have all workers of these nodes answer the fence, with the layers that the plan in force gave them."""
    newest = bench.journal(PlanAdopted)[-1]
    for node in nodes:
        for device in range(spec_of(bench, node).num_devices):
            layers = newest.plan.layers_at.get(WorkerId(node, device), frozenset())
            adopted = newest.generation if layers else 0
            bench.answer(node, device=device, adopted=adopted, layers=tuple(sorted(layers)))
    bench.wait(0.5)


def test_a_node_goes_on_without_the_device_that_fails():
    bench = training()
    crash(bench, "n2", [2] * ENDS)
    assert [(lost.node, lost.is_tried_again) for lost in bench.journal(NodeLost)] == [("n2", True)]
    without = replace(bench.nodes[2], devices=(0, 1, 3))
    assert [added.node for added in bench.journal(NodeAdded)] == [without]
    assert Connect(node=without) in bench.commands
    words = "n2 is tried with 3 of its 4 devices: only the worker of its device 2 ended, each time"
    assert words in [notice.text for notice in bench.journal(Notice)]
    answer(bench, "n0", "n1")
    come_up(bench, "n2", kind="default×3")
    answer(bench, "n0", "n1", "n2")
    plan = bench.updates[-1].plan
    assert {each for each in plan.worker_ids if each.node == "n2"} == {WorkerId("n2", device) for device in range(3)}
    (configured,) = (
        each for each in bench.messages(bench.commands, "n2") if isinstance(each, Configure) and len(each.devices) == 3
    )
    assert configured.devices == (0, 1, 3)


def test_a_second_device_may_fail_and_none_is_left_in_the_end():
    shape = replace(SHAPE, devices=2, layers_per_device=4)
    bench = training(shape)
    crash(bench, "n2", [1] * ENDS)
    answer(bench, "n0", "n1")
    come_up(bench, "n2", kind="default")
    for _ in range(ENDS):
        bench.say("n2", WorkerExited(device=0, pid=99 + _, end=Killed(signal=9)))
        bench.say("n2", ready(0, pid=100 + _))
    assert [lost.node for lost in bench.journal(NodeLost)] == ["n2", "n2"]
    assert [added.node.devices for added in bench.journal(NodeAdded)] == [(0,)]


@pytest.mark.parametrize("devices", [[2, 2, 2, 3], [3, 2, 2, 2], [0, 1, 2, 3]])
def test_a_node_whose_workers_end_here_and_there_is_lost_as_a_whole(devices: list[int]):
    bench = training()
    crash(bench, "n2", devices)
    assert [lost.node for lost in bench.journal(NodeLost)] == ["n2"]
    assert not bench.journal(NodeAdded)


@pytest.mark.parametrize("is_met_elsewhere", [True, False])
@pytest.mark.parametrize("kind", [ErrorKind.CODE, ErrorKind.DEVICE, ErrorKind.DATA])
def test_no_device_is_to_blame_for_an_error_that_others_meet_or_the_user_made(
    kind: ErrorKind, *, is_met_elsewhere: bool
):
    bench = training()
    crash(bench, "n2", [2] * (ENDS - 1))
    bad = Raised(kind=kind, message="ValueError: sample 7 is empty")
    if is_met_elsewhere:
        bench.say("n1", WorkerExited(device=0, pid=PID, end=bad))
    bench.say("n2", WorkerExited(device=2, pid=PID + ENDS - 1, end=bad))
    assert [lost.node for lost in bench.journal(NodeLost)] == ["n2"]
    assert len(bench.journal(NodeAdded)) == (0 if is_met_elsewhere or kind.is_users else 1)


def test_a_node_that_leaves_is_not_tried_again():
    bench = training()
    crash(bench, "n2", [2] * (ENDS - 1))
    bench.feed(DrainRequested(node="n2"))
    bench.say("n2", WorkerExited(device=2, pid=PID + ENDS - 1, end=Killed(signal=9)))
    assert [lost.node for lost in bench.journal(NodeLost)] == ["n2"]
    assert not bench.journal(NodeAdded)


def test_the_only_node_is_waited_for():
    bench = training(replace(SHAPE, num_nodes=1))
    crash(bench, "n0", [2] * ENDS)
    assert bench.ended is None
    assert bench.journal(NodeAdded)[-1].node.devices == (0, 1, 3)
    starts = [each for each in bench.messages(bench.commands, "n0") if isinstance(each, StartWorker)]
    come_up(bench, "n0", kind="default×3")
    assert bench.coordinator.phase is not Phase.ENDED
    more = [each for each in bench.messages(bench.commands, "n0") if isinstance(each, StartWorker)]
    assert [each.device for each in more[len(starts) :]] == [0, 1, 2]


def test_stages_on_several_devices_need_them_all():
    bench = training(replace(SHAPE, sharding_devices=2))
    crash(bench, "n2", [2] * ENDS)
    assert not bench.journal(NodeAdded)
    assert not bench.journal(NodeLost)[0].is_tried_again
    notices = [notice.text for notice in bench.journal(Notice)]
    assert "n2 is of kind default×3, and the job has nodes of default×4; it may have at most 1" in notices
    assert not any("is tried with" in text for text in notices)


def test_a_repaired_node_has_all_of_its_devices_again():
    bench = training()
    crash(bench, "n2", [2] * ENDS)
    answer(bench, "n0", "n1")
    whole = bench.nodes[2]
    bench.feed(AddRequested(spec=whole))
    assert "n2 is in the job already" in bench.journal(Notice)[-1].text
    bench.fail("n2")
    bench.feed(AddRequested(spec=whole))
    assert bench.journal(NodeAdded)[-1].node == whole
    come_up(bench, "n2", kind=None)
    answer(bench, "n0", "n1", "n2")
    assert {each for each in bench.updates[-1].plan.worker_ids if each.node == "n2"} == {
        WorkerId("n2", device) for device in range(4)
    }


def test_the_next_master_knows_which_devices_are_left_wherever_it_takes_over():
    bench = training()
    crash(bench, "n2", [2] * ENDS)
    moved = {spec.name: replace(spec, port=2200 + number) for number, spec in enumerate(bench.nodes)}
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    replayed.relocate(moved)
    assert replayed.interrupted == (replace(moved["n2"], devices=(0, 1, 3)),)
    answer(bench, "n0", "n1")
    come_up(bench, "n2", kind="default×3")
    replayed = replay_run(bench.entries(bench.commands))
    assert replayed is not None
    replayed.relocate(moved)
    assert replayed.members["n2"].spec == NodeSpec(name="n2", host="host2", devices=(0, 1, 3), port=2202)
