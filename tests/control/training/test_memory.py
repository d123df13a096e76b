"""A worker that runs out of memory: the next plans give nodes of its kind less, or say that none can."""

from __future__ import annotations

import pytest

from oobleck.control.events import MemoryRanOut, NodeFailed
from oobleck.control.journal import ConnectionLost, Notice, ProfileKnown, RecoveryStarted
from oobleck.control.protocol import ErrorKind, Killed, Raised, WorkerExited
from oobleck.planner import profile_from_json
from tests.control.bench import PID, Bench
from tests.control.journals import replay_run
from tests.control.model import Shape

# Any node could hold the whole model, with room for as much again.
ROOMY = Shape(num_nodes=5, num_layers=4, layers_per_device=8, fault_threshold=1)
BY_KERNEL = Killed(signal=9, is_out_of_memory=True)


def training(shape: Shape) -> Bench:
    bench = Bench(shape)
    bench.prepare()
    return bench


def memory_bytes(bench: Bench) -> list[int]:
    """What each profile of the journal gives a device."""
    return [
        profile_from_json(entry.profile_json, source="").device.memory_bytes for entry in bench.journal(ProfileKnown)
    ]


def most_layers(bench: Bench) -> int:
    plan = bench.updates[-1].plan
    return max(len(layers) for layers in plan.layers_at.values())


def warnings(bench: Bench) -> list[str]:
    return [entry.text for entry in bench.journal(Notice) if entry.level == "warning"]


def continue_without(bench: Bench, node: str) -> None:
    """All others answer, and are given a plan."""
    for other in (spec.name for spec in bench.nodes if spec.name != node):
        bench.answer(other, adopted=1, layers=(0, 1, 2, 3))
    bench.wait(0.01)


def test_nodes_get_less_than_what_one_ran_out_of_memory_with():
    bench = training(ROOMY)
    before, largest = memory_bytes(bench)[-1], most_layers(bench)
    bench.say("n2", WorkerExited(device=0, pid=PID, end=BY_KERNEL))
    assert len(memory_bytes(bench)) == 2
    assert memory_bytes(bench)[-1] < before * largest / ROOMY.layers_per_device, "less than it used, not than it has"
    (text,) = warnings(bench)[:1]
    assert text.startswith("n2 ran out of memory: plans use at most ")
    continue_without(bench, "n2")
    assert bench.ended is None
    assert bench.updates[-1].generation == 2
    assert most_layers(bench) < largest


def test_an_error_of_the_device_counts_as_well_and_other_ends_do_not():
    bench = training(ROOMY)
    bench.say("n1", WorkerExited(device=0, pid=PID, end=Killed(signal=9)))
    assert len(memory_bytes(bench)) == 1
    bench = training(ROOMY)
    error = Raised(kind=ErrorKind.MEMORY, message="CUDA out of memory")
    bench.say("n2", WorkerExited(device=0, pid=PID, end=error))
    assert len(memory_bytes(bench)) == 2


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_node_whose_scheduler_has_killed_it_for_its_memory_counts_also_once_it_is_planned_without(
    *, is_told_first: bool
):
    bench = training(ROOMY)
    if is_told_first:
        bench.feed(MemoryRanOut(node="n2"))
    bench.feed(NodeFailed(node="n2", loss=ConnectionLost()))
    continue_without(bench, "n2")
    assert bench.updates[-1].generation == 2
    if not is_told_first:
        bench.feed(MemoryRanOut(node="n2"))
    assert len(memory_bytes(bench)) == 2
    assert [text for text in warnings(bench) if text.startswith("n2 ran out of memory: plans use at most ")]
    bench.feed(MemoryRanOut(node="unknown"))
    assert len(memory_bytes(bench)) == 2


def test_a_plan_that_cannot_use_less_stays_and_says_what_helps():
    bench = training(Shape(num_nodes=2, num_layers=4, layers_per_device=2, fault_threshold=0))
    bench.say("n1", WorkerExited(device=0, pid=PID, end=BY_KERNEL))
    assert len(memory_bytes(bench)) == 1
    (text,) = warnings(bench)[:1]
    assert "no plan of the others needs less (" in text
    assert "give each more memory" in text
    assert bench.journal(RecoveryStarted)
    assert bench.ended is None


def test_the_next_master_knows_it():
    bench = training(ROOMY)
    bench.say("n2", WorkerExited(device=0, pid=PID, end=BY_KERNEL))
    continue_without(bench, "n2")
    replayed = replay_run(bench.entries(bench.commands))
    (kind,) = replayed.kinds
    assert kind.profile.device.memory_bytes == memory_bytes(bench)[-1]
