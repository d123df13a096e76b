"""Which links are timed before the first plan, and what becomes of the answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from oobleck.control.events import Command, LinkFound, LookUpLink, ProfileFound, Store
from oobleck.control.journal import Notice, ProfileKnown
from oobleck.control.protocol import LinkTimed, TimeLink, WorkerAddress
from oobleck.job import NodeSpec
from oobleck.planner import Profile, WorkerId, profile_from_json, profile_to_json
from oobleck.planner.profiles import LINKS, LinkSpeed, link_from_json
from tests.control.bench import Bench, ready, sends
from tests.control.model import Shape

LINK = LinkSpeed(bytes_per_s=2e9, latency_s=3e-5)
SECONDS = tuple((size, LINK.latency_s + size / LINK.bytes_per_s) for size in (1 << 10, 1 << 17, 1 << 23))


def up(num_nodes: int, *, devices: int = 1, hosts: Sequence[str] = (), profile: Profile | None = None) -> Bench:
    """All are ready, and the profile, in which the network is assumed, is known."""
    shape = Shape(num_nodes=num_nodes, devices=devices)
    nodes = tuple(
        NodeSpec(name=f"n{index}", host=hosts[index] if hosts else f"host{index}", devices=tuple(range(devices)))
        for index in range(num_nodes)
    )
    bench = Bench(shape, nodes=nodes)
    for spec in nodes:
        bench.up(spec.name)
        for device in range(devices):
            address = WorkerAddress(worker_id=WorkerId(node=spec.name, device=device), host="10.0.0.1", port=9)
            bench.say(spec.name, ready(device, address=address, device_name="H100"))
    profile_json = profile_to_json(profile or assumed(shape.profile))
    bench.feed(ProfileFound(profile_json=profile_json, kind=nodes[0].kind))
    return bench


def assumed(profile: Profile) -> Profile:
    return replace(profile, network=replace(profile.network, assumed=LINKS))


def looked_up(bench: Bench) -> list[str]:
    return [command.key for command in bench.commands if isinstance(command, LookUpLink)]


def find(bench: Bench, link_json: str | None = None) -> list[Command]:
    """Answer the newest question for what is cached."""
    return bench.feed(LinkFound(key=looked_up(bench)[-1], link_json=link_json))


def asked(commands: Sequence[Command]) -> list[tuple[str, int, str, bool]]:
    """Who is to time which link, and who leads."""
    messages = [(send.node, send.message) for command in commands for send in sends(command)]
    return [
        (node, message.device, str(message.peer.worker_id), message.leads)
        for node, message in messages
        if isinstance(message, TimeLink)
    ]


def known(bench: Bench) -> Profile:
    """What plans are made of."""
    (entry,) = bench.journal(ProfileKnown)
    return profile_from_json(entry.profile_json)


def said(bench: Bench) -> list[tuple[str, str]]:
    return [(entry.level, entry.text) for entry in bench.journal(Notice) if "links" in entry.text]


def test_two_nodes_time_their_link_and_the_first_plan_is_made_with_it():
    bench = up(2)
    assert asked(find(bench)) == [("n0", 0, "n1:0", True), ("n1", 0, "n0:0", False)]
    assert bench.updates == []
    commands = bench.say("n0", LinkTimed(device=0, seconds=SECONDS))
    (stored,) = (command for command in commands if isinstance(command, Store))
    assert stored.key == looked_up(bench)[0]
    link, speed = link_from_json(stored.value_json)
    assert link == "inter_node"
    assert speed.bytes_per_s == pytest.approx(2e9)
    network = known(bench).network
    assert network.inter_node_bytes_per_s == pytest.approx(2e9)
    assert network.inter_node_latency_s == pytest.approx(3e-5)
    assert network.assumed == ("intra_node",)
    assert said(bench) == [("info", "links between nodes: 2 GB/s, 30 µs (timed between n0:0 and n1:0)")]
    assert len(bench.updates) == 2


def test_what_an_earlier_run_has_timed_is_not_timed_again():
    first = up(2)
    find(first)
    first.say("n0", LinkTimed(device=0, seconds=SECONDS))
    (stored,) = (command for command in first.commands if isinstance(command, Store))
    second = up(2)
    assert looked_up(second) == [stored.key]
    assert asked(find(second, stored.value_json)) == []
    assert known(second) == known(first)
    assert said(second) == [("info", "links between nodes: 2 GB/s, 30 µs (timed in an earlier run)")]


def test_a_torn_file_is_timed_again():
    assert len(asked(find(up(2), "{torn"))) == 2


def test_devices_of_one_node_are_timed_after_nodes():
    bench = up(2, devices=2)
    find(bench)
    bench.say("n0", LinkTimed(device=0, seconds=SECONDS))
    assert bench.updates == []
    assert asked(find(bench)) == [
        ("n0", 0, "n0:1", True),
        ("n0", 1, "n0:0", False),
        ("n1", 0, "n1:1", True),
        ("n1", 1, "n1:0", False),
    ]
    for node in ("n0", "n1"):
        bench.say(node, LinkTimed(device=0, seconds=SECONDS))
    assert known(bench).network.assumed == ()
    assert len(set(looked_up(bench))) == 2
    assert bench.updates


def test_three_pairs_of_many_machines_are_timed_at_once_and_their_median_is_taken():
    bench = up(8, hosts=["a", "a", "b", "c", "d", "e", "f", "g"])
    leaders = [node for node, _, _, leads in asked(find(bench)) if leads]
    assert leaders == ["n0", "n3", "n5"], "n1 is on the machine of n0"
    for node, factor in zip(leaders, (1.0, 50.0, 1.1), strict=True):
        bench.say(node, LinkTimed(device=0, seconds=tuple((size, factor * time_s) for size, time_s in SECONDS)))
    assert known(bench).network.inter_node_bytes_per_s == pytest.approx(2e9 / 1.1)


def test_nodes_of_one_machine_time_one_link_which_is_of_another_kind():
    bench = up(4, hosts=["one"] * 4)
    assert [node for node, *_ in asked(find(bench))] == ["n0", "n1"]
    assert looked_up(bench) != looked_up(up(4))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_link_that_cannot_be_timed_stays_assumed_and_that_is_said(devices: int):
    bench = up(2, devices=devices)
    find(bench)
    bench.say("n0", LinkTimed(device=0, error="no answer from n1:0 within 5 s"))
    if devices == 2:
        find(bench)
        bench.say("n0", LinkTimed(device=0, error="refused"))
        bench.say("n1", LinkTimed(device=0, seconds=SECONDS))
    network = known(bench).network
    assert network.inter_node_bytes_per_s == bench.shape.profile.network.inter_node_bytes_per_s
    assert network.assumed == (LINKS if devices == 1 else ("inter_node",))
    assert not any(isinstance(command, Store) for command in bench.commands[:-1]) or devices == 2
    text = "the speed of links between nodes stays assumed; they could not be timed: no answer from n1:0 within 5 s"
    assert said(bench)[0] == ("warning", text)
    assert bench.updates


def test_nobody_is_waited_for_longer_than_a_limit():
    bench = up(2)
    find(bench)
    assert bench.coordinator.next_deadline() == pytest.approx(7.0)
    bench.wait(7.0)
    assert said(bench)[0][1].endswith("n0:0 has not answered within 7 s")
    assert len(bench.updates) == 2
    bench.say("n0", LinkTimed(device=0, seconds=SECONDS))
    assert known(bench).network.assumed == LINKS, "too late: the plan is made"
    assert bench.ended is None


@pytest.mark.parametrize("seconds", [((1024, 1e-4),), ((1024, 0.0), (4096, 1.0)), ((0, 1e-4), (4096, 1e-3)), ()])
def test_times_that_make_no_sense_cost_the_node(seconds: tuple[tuple[int, float], ...]):
    bench = up(2)
    find(bench)
    bench.say("n0", LinkTimed(device=0, seconds=seconds))
    bench.wait(1.0)
    assert bench.ended is not None
    assert "timed a link at" in bench.ended.reason


def test_nothing_is_timed_where_the_profile_knows_the_network_or_there_is_one_worker():
    bench = up(2, profile=Shape(num_nodes=2).profile)
    assert looked_up(bench) == []
    assert bench.updates
    assert looked_up(up(1)) == []
    assert len(looked_up(up(1, devices=2))) == 1, "a link within the node"
