"""Before training: who fits, what they are told, and which profile is used."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from oobleck.control.events import End, LookUpProfile, ProfileFound, Record, Send, Store
from oobleck.control.journal import MeasurementBegun
from oobleck.control.nodes import Alike
from oobleck.control.protocol import Configure, Profiled, ProfileRequest, StartWorker
from oobleck.job import NodeSpec
from oobleck.planner import profile_from_json, profile_to_json, with_speed
from tests.control.bench import Bench, ready
from tests.control.model import Shape

PROFILE = profile_to_json(Shape().profile)


@pytest.fixture
def bench() -> Bench:
    return Bench(Shape(num_nodes=2))


def test_a_node_is_configured_and_its_workers_are_started():
    bench = Bench(Shape(num_nodes=1, devices=2))
    configure, *starts = bench.messages(bench.up("n0"), "n0")
    assert isinstance(configure, Configure)
    assert configure.devices == (0, 1)
    assert configure.address == "10.0.0.1"
    assert starts == [StartWorker(device=0), StartWorker(device=1)]


def test_cores_and_memory_of_a_machine_are_shared_by_its_workers():
    nodes = (NodeSpec(name="a", host="one"), NodeSpec(name="b", host="one"), NodeSpec(name="c", host="two"))
    bench = Bench(Shape(num_nodes=3), nodes=nodes)
    shared, alone = (bench.messages(bench.up(node), node)[0] for node in ("a", "c"))
    assert isinstance(shared, Configure)
    assert isinstance(alone, Configure)
    assert (shared.torch_threads, shared.device_memory_bytes) == (2, 1 << 29)
    assert (alone.torch_threads, alone.device_memory_bytes) == (4, 1 << 30)


def test_a_node_on_the_machine_of_another_name_halves_what_both_were_told():
    nodes = (NodeSpec(name="a", host="one"), NodeSpec(name="alias", host="two"), NodeSpec(name="c", host="three"))
    bench = Bench(Shape(num_nodes=3), nodes=nodes)
    (alone, *_) = bench.messages(bench.up("a", machine="m"), "a")
    bench.up("c", machine="n")
    commands = bench.up("alias", machine="m")
    (told_again,) = bench.messages(commands, "a")
    (shared, *_) = bench.messages(commands, "alias")
    assert [each.torch_threads for each in (alone, told_again, shared) if isinstance(each, Configure)] == [4, 2, 2]
    assert not bench.messages(commands, "c")
    assert not bench.messages(bench.up("alias", machine="m"), "a"), "nothing has changed since"


def test_workers_that_share_a_device_are_counted():
    nodes = (
        NodeSpec(name="a", host="one", devices=(0, 1)),
        NodeSpec(name="b", host="one", devices=(1, 2)),
        NodeSpec(name="c", host="one", devices=(3, 4)),
        NodeSpec(name="d", host="two", devices=(0, 1)),
    )
    bench = Bench(Shape(num_nodes=4, devices=2), nodes=nodes)
    configures = [bench.messages(bench.up(node), node)[0] for node in "abcd"]
    assert [each.num_sharing for each in configures if isinstance(each, Configure)] == [2, 2, 1, 1]


def test_the_job_may_say_threads_and_memory():
    shape = Shape(num_nodes=1)
    job = replace(shape.job, torch_threads=3, device_memory_bytes=12345)
    bench = Bench(shape, job=job)
    configure = bench.messages(bench.up("n0"), "n0")[0]
    assert isinstance(configure, Configure)
    assert (configure.torch_threads, configure.device_memory_bytes) == (3, 12345)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"oobleck_version": "0.0.0"}, "install the same version on both"),
        ({"protocol": 0}, "install the same version on both"),
        ({"python_version": "3.9.1"}, "use the same minor version on both"),
    ],
)
def test_another_environment_is_told_with_what_to_change(bench: Bench, fields, words):
    bench.up("n0", **fields)
    bench.wait(1.0)
    assert bench.ended is not None
    assert words in bench.ended.reason


def test_a_profile_is_of_the_memory_that_its_gpu_had():
    """One that was measured while other programs held less of it would promise memory that is not there."""

    def key(memory_bytes: int | None) -> str:
        bench = Bench(Shape(num_nodes=1))
        bench.up("n0")
        (looks,) = (
            command
            for command in bench.say("n0", ready(device_memory_bytes=memory_bytes))
            if isinstance(command, LookUpProfile)
        )
        return looks.key

    assert len({key(None), key(72 << 30), key(41 << 30)}) == 3
    assert key(72 << 30) == key(72 << 30)


def test_the_first_worker_settles_which_profile_is_looked_up(bench: Bench):
    bench.up("n0")
    bench.up("n1")
    assert any(isinstance(command, LookUpProfile) for command in bench.say("n0", ready()))
    assert not any(isinstance(command, LookUpProfile) for command in bench.say("n1", ready()))


def test_training_begins_with_a_cached_profile(bench: Bench):
    bench.prepare()
    assert len(bench.updates) == 2


@pytest.mark.parametrize("cached", [None, "{torn", PROFILE.replace('"version": 1', '"version": 0')])
def test_a_profile_that_cannot_be_used_is_measured_and_cached(bench: Bench, cached: str | None):
    bench.up("n0")
    bench.say("n0", ready())
    told, sent = bench.feed(ProfileFound(profile_json=cached))
    assert sent == Send(node="n0", message=ProfileRequest(device=0))
    assert isinstance(told, Record)
    assert told.entry.sentence == "n0:0 measures what the model's layers cost"
    commands = bench.say("n0", Profiled(device=0, profile_json=PROFILE))
    (stored,) = [command for command in commands if isinstance(command, Store)]
    assert stored.value_json == PROFILE
    bench.up("n1")
    bench.say("n1", ready())
    assert len(bench.updates) == 2


def asked(commands: Iterable[Any]) -> list[str]:
    return [each.node for each in commands if isinstance(each, Send) and isinstance(each.message, ProfileRequest)]


def test_all_workers_of_a_machine_measure_at_the_same_time_once_they_are_ready():
    nodes = (NodeSpec(name="a", host="one"), NodeSpec(name="b", host="other"), NodeSpec(name="c", host="two"))
    bench = Bench(Shape(num_nodes=3), nodes=nodes)
    for node, machine in (("a", "m"), ("b", "m"), ("c", "n")):
        bench.up(node, machine=machine)
    bench.say("a", ready())
    bench.say("c", ready())
    assert not asked(bench.feed(ProfileFound(profile_json=None))), "b is not ready, and computes on the same machine"
    commands = bench.say("b", ready())
    assert asked(commands) == ["a", "b"]
    (told,) = (each.entry for each in commands if isinstance(each, Record) and isinstance(each.entry, MeasurementBegun))
    assert told.sentence == "a:0 and 1 more of its machine measure what the model's layers cost"


def test_a_node_of_the_same_host_is_waited_for_before_its_machine_is_known():
    nodes = (NodeSpec(name="a", host="one"), NodeSpec(name="b", host="one"))
    bench = Bench(Shape(num_nodes=2), nodes=nodes)
    bench.up("a", machine="m")
    bench.say("a", ready())
    assert not asked(bench.feed(ProfileFound(profile_json=None)))
    bench.up("b", machine="m")
    assert asked(bench.say("b", ready())) == ["a", "b"]


def test_the_profile_has_the_median_times_of_those_who_measured_and_the_least_memory():
    bench = Bench(Shape(num_nodes=1, devices=3))
    bench.up("n0")
    for device in range(3):
        bench.say("n0", ready(device=device))
    assert asked(bench.feed(ProfileFound(profile_json=None, kind=bench.nodes[0].kind))) == ["n0"] * 3
    profile = Shape().profile
    for device, (speed, memory_bytes) in enumerate(((0.5, 1 << 30), (0.25, 1 << 31), (1.0, 1 << 29))):
        own = with_speed(replace(profile, device=replace(profile.device, memory_bytes=memory_bytes)), speed)
        commands = bench.say("n0", Profiled(device=device, profile_json=profile_to_json(own)))
        assert bool([command for command in commands if isinstance(command, Store)]) is (device == 2)
    (stored,) = (command for command in commands if isinstance(command, Store))
    expected = with_speed(replace(profile, device=replace(profile.device, memory_bytes=1 << 29)), 0.5)
    assert profile_from_json(stored.value_json) == expected


def test_one_worker_compiles_before_all_of_its_machine_measure():
    """They find what it has compiled; what it took meanwhile does not count."""
    bench = Bench(Shape(num_nodes=1, devices=2), job=replace(Shape().job, compile=True))
    bench.up("n0")
    for device in range(2):
        bench.say("n0", ready(device=device))
    profile_json = profile_to_json(Shape().profile)
    slow_json = profile_to_json(with_speed(Shape().profile, 0.5))
    assert asked(bench.feed(ProfileFound(profile_json=None, kind=bench.nodes[0].kind))) == ["n0"]
    commands = bench.say("n0", Profiled(device=0, profile_json=slow_json))
    assert asked(commands) == ["n0"] * 2
    assert not [command for command in commands if isinstance(command, Store)]
    bench.say("n0", Profiled(device=1, profile_json=profile_json))
    (stored,) = (
        command
        for command in bench.say("n0", Profiled(device=0, profile_json=profile_json))
        if isinstance(command, Store)
    )
    assert stored.value_json == profile_json


def test_workers_on_other_numbers_of_a_machine_have_other_profiles():
    def key(*hosts: str) -> str:
        nodes = tuple(NodeSpec(name=f"n{index}", host=host) for index, host in enumerate(hosts))
        # Their threads and memory are the job's, so the number alone differs.
        shape = Shape(num_nodes=len(nodes))
        bench = Bench(shape, nodes=nodes, job=replace(shape.job, torch_threads=1, device_memory_bytes=1 << 30))
        bench.up("n0")
        (looks,) = (command for command in bench.say("n0", ready()) if isinstance(command, LookUpProfile))
        return looks.key

    assert len({key("one"), key("one", "one"), key("one", "one", "one")}) == 3
    assert key("one") == key("one", "two")


def test_a_profile_that_comes_for_a_lost_node_is_nobodys(bench: Bench):
    bench.up("n0")
    bench.say("n0", ready())
    bench.fail("n0")
    assert bench.feed(ProfileFound(profile_json=None)) == []


def test_a_profile_that_nobody_asked_for_costs_the_node(bench: Bench):
    bench.up("n0")
    bench.say("n0", Profiled(device=0, profile_json=PROFILE))
    bench.wait(1.0)
    assert bench.ended is not None
    assert bench.ended.reason.splitlines()[1].startswith("n0: ")


@pytest.mark.parametrize(
    ("other", "problem"),
    [
        ({"data_digest": "other"}, "n1:0 and n0:0 differ in the data (other and"),
        (
            {"alike": ((Alike.WEIGHTS, "b"), (Alike.LOSS, "a sum"))},
            f"n1:0 and n0:0 differ in {Alike.WEIGHTS} (b and a); give model.path",
        ),
        (
            {"alike": ((Alike.WEIGHTS, "a"), (Alike.LOSS, "the mean"))},
            f"n1:0 and n0:0 differ in {Alike.LOSS} (the mean and a sum)",
        ),
    ],
)
def test_a_worker_that_is_unlike_the_others_is_named_and_nothing_begins(
    bench: Bench, other: dict[str, Any], problem: str
):
    for node in ("n0", "n1"):
        bench.up(node)
    bench.say("n0", ready(alike=((Alike.WEIGHTS, "a"), (Alike.LOSS, "a sum"))))
    commands = bench.say("n1", ready(**other))
    (end,) = [command for command in commands if isinstance(command, End)]
    assert end.exit_code == 78
    assert problem in end.reason


def test_who_is_waited_for_is_told(bench: Bench):
    bench.up("n0")
    bench.say("n0", ready())
    bench.beat_until(bench.job.control.start_timeout_s, "n0")
    assert bench.ended is not None
    assert bench.ended.reason.endswith(": n1 (connecting)")


def test_a_missing_profile_is_told(bench: Bench):
    for node in ("n0", "n1"):
        bench.up(node)
        bench.say(node, ready())
    bench.beat_until(bench.job.control.start_timeout_s, "n0", "n1")
    assert bench.ended is not None
    assert bench.ended.reason.endswith(" profile")
