"""Nodes that share a machine or a limit share it whatever they are called; others share nothing."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.nodes.machines import Machines, Share
from oobleck.control.protocol import Hello, ResourceLimit
from oobleck.job import NodeSpec
from tests.control.bench import hello

GIB = 1 << 30


def spec(name: str, host: str = "", devices: tuple[int, ...] = (0,)) -> NodeSpec:
    return NodeSpec(name=name, host=host or name, devices=devices)


def said(name: str, machine: str = "", *limits: ResourceLimit, container: str = "") -> Hello:
    return hello(name, machine=machine, limits=limits, container=container, num_cores=64, memory_bytes=64 * GIB)


def pod(group: str, cores: int | None = 4, memory_bytes: int | None = 16 * GIB) -> ResourceLimit:
    return ResourceLimit(group=group, num_cores=cores, memory_bytes=memory_bytes)


@pytest.fixture
def machines() -> Machines:
    return Machines()


def test_until_an_agent_speaks_the_names_of_hosts_are_taken_for_machines(machines: Machines):
    for each in (spec("a", "one", (0, 1)), spec("b", "one"), spec("c", "two")):
        machines.put(each, None)
    machines.put(spec("a", "one", (0, 1)), said("a", "m"))
    machines.put(spec("c", "two"), said("c", "n"))
    assert machines.share("a") == Share(num_cores=64 // 3, memory_bytes=64 * GIB // 3, num_workers=3)
    assert machines.share("c") == Share(num_cores=64, memory_bytes=64 * GIB, num_workers=1)


def test_two_names_of_one_machine_share_it(machines: Machines):
    machines.put(spec("a"), said("a", "m"))
    assert machines.share("a").num_cores == 64
    machines.put(spec("alias"), said("alias", "m"))
    assert machines.touched_by("alias") == ("a",)
    assert machines.share("a") == machines.share("alias") == Share(num_cores=32, memory_bytes=32 * GIB, num_workers=2)


def test_one_name_of_two_machines_is_not_shared_once_both_have_spoken(machines: Machines):
    nodes = [NodeSpec(name=name, host="gate", port=port) for name, port in (("a", 1), ("b", 2))]
    for each in nodes:
        machines.put(each, None)
    machines.put(nodes[0], said("a", "m"))
    assert machines.share("a").num_cores == 32
    machines.put(nodes[1], said("b", "n"))
    assert machines.touched_by("b") == ("a",)
    assert machines.share("a").num_cores == machines.share("b").num_cores == 64


def test_pods_of_one_machine_have_what_their_own_limits_leave_them(machines: Machines):
    machines.put(spec("a"), said("a", "m", pod("first")))
    machines.put(spec("b"), said("b", "m", pod("second", 2, 8 * GIB)))
    assert machines.share("a") == Share(num_cores=4, memory_bytes=16 * GIB, num_workers=2)
    assert machines.share("b") == Share(num_cores=2, memory_bytes=8 * GIB, num_workers=2)


def test_nodes_in_one_pod_share_its_limits(machines: Machines):
    machines.put(spec("a"), said("a", "m", pod("one")))
    machines.put(spec("b"), said("b", "m", pod("one")))
    assert machines.share("a") == machines.share("b") == Share(num_cores=2, memory_bytes=8 * GIB, num_workers=2)


def test_limits_that_promise_more_than_the_machine_has_are_cut_to_it(machines: Machines):
    for name in ("a", "b"):
        machines.put(spec(name), said(name, "m", pod(f"of {name}", 60, None)))
    assert machines.share("a") == Share(num_cores=32, memory_bytes=32 * GIB, num_workers=2)


def test_the_same_group_on_two_machines_is_two(machines: Machines):
    for name in ("a", "b"):
        machines.put(spec(name), said(name, f"machine of {name}", pod("kubepods")))
    assert machines.share("a").num_cores == 4


def test_a_worker_has_at_least_a_core(machines: Machines):
    machines.put(spec("a", devices=(0, 1, 2)), said("a", "m", pod("small", 1, None)))
    assert machines.share("a").num_cores == 1


def test_a_device_is_shared_by_nodes_that_see_the_same_ones(machines: Machines):
    machines.put(spec("a", devices=(0, 1)), said("a", "m", container="host"))
    machines.put(spec("alias", devices=(1, 2)), said("alias", "m", container="host"))
    machines.put(spec("pod"), said("pod", "m", container="pod"))
    assert [machines.sharing_device(node) for node in ("a", "alias", "pod")] == [2, 2, 1]


def test_a_node_that_comes_again_elsewhere_leaves_where_it_was(machines: Machines):
    machines.put(spec("a"), said("a", "m"))
    machines.put(spec("b"), said("b", "m"))
    machines.put(spec("b"), None)
    assert machines.share("a").num_cores == 64
    machines.put(spec("b"), said("b", "n"))
    assert machines.touched_by("b") == ()
    assert machines.share("b").num_cores == 64


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["", "m", "n"]), st.sampled_from(["x", "y"])), max_size=20)
)
def test_what_is_known_in_the_end_does_not_depend_on_how_it_came_to_be_known(told):
    """Names are put on hosts and machines in any order, again and again: only the last of each counts."""
    step_by_step, at_once, last = Machines(), Machines(), {}
    for number, machine, host in told:
        name = f"n{number}"
        last[name] = spec(name, host), said(name, machine, pod(host))
        step_by_step.put(*last[name])
    for each in last.values():
        at_once.put(*each)
    for name in last:
        assert step_by_step.share(name) == at_once.share(name)
        assert step_by_step.sharing_device(name) == at_once.sharing_device(name)
        assert set(step_by_step.touched_by(name)) == set(at_once.touched_by(name))


def test_thousands_of_nodes_with_right_names_touch_nobody():
    machines, began_s = Machines(), time.perf_counter()
    for number in range(5000):
        machines.put(spec(f"n{number}"), None)
    for number in range(5000):
        machines.put(spec(f"n{number}"), said(f"n{number}", f"m{number}"))
        assert machines.touched_by(f"n{number}") == ()
    assert time.perf_counter() - began_s < 5
