"""Real agents that speak through each other: relays are killed, frozen and stopped, and the losses stay the same.

With a fan-out of 2, two of six agents speak to the master, and each of them is the relay of two others.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from .harness import SHORT_LEASE, Runner, Up
from .test_silence import stalled

NUM_NODES = 6
NODES = tuple(f"node{index}" for index in range(NUM_NODES))
RELAYS = ("--set", "control.relay_nodes=4", "--set", "control.relay_fanout=2")
LOCAL = ("--local", str(NUM_NODES))


def links(runner: Runner, node: str) -> tuple[int, int]:
    """How many agents speak through a node's agent, and how many relays it has."""
    (pid,) = runner.pids(node, "agent")
    connections = psutil.Process(pid).net_connections("tcp")
    ports = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
    linked = [connection for connection in connections if connection.status == psutil.CONN_ESTABLISHED]
    children = sum(connection.laddr.port in ports for connection in linked)
    return children, len(linked) - children


def relays_of(runner: Runner, up: Up, nodes: tuple[str, ...] = NODES) -> list[str]:
    """The nodes that are relays, once all but two have one, and both ends of each link say so.

    They are asked one after the other, and a link may come about meanwhile.
    """
    while True:
        found = {node: links(runner, node) for node in nodes}
        if [sum(ends) for ends in zip(*found.values(), strict=True)] == [len(nodes) - 2] * 2:
            return [node for node, (children, _) in found.items() if children]
        up.wait_for("] step ")


def lost(runner: Runner) -> list[str]:
    return [entry["node"] for entry in runner.journal() if entry["@type"] == "NodeLost"]


def generations(runner: Runner) -> list[int]:
    return [entry["generation"] for entry in runner.journal() if entry["@type"] == "PlanAdopted"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_relays_that_are_killed_and_frozen_are_lost_alone(runner: Runner, start: Callable[..., Any]) -> None:
    with start(*RELAYS, *SHORT_LEASE, "--set", "control.rejoin_after_s=0", nodes=LOCAL) as run:
        killed, frozen = relays_of(runner, run.up)
        before = generations(runner)[-1]
        runner.signal(killed)
        run.wait_for_recovery(killed)
        run.up.wait_for_steps(3)
        assert lost(runner) == [killed]
        assert generations(runner)[-1] == before + 1, "its children were reached in the same recovery"
        with stalled(runner.pids(frozen)):
            run.wait_for_recovery(frozen)
            run.up.wait_for_steps(3)
        assert lost(runner) == [killed, frozen]
        run.stop()
    assert [recovery["nodes"] for recovery in run.outcome.summary["recoveries"]] == [[killed], [frozen]]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_relay_that_stops_for_a_moment_costs_nobody(runner: Runner, start: Callable[..., Any]) -> None:
    with start(*RELAYS, "--set", "control.lease_s=6", nodes=LOCAL) as run:
        relay = relays_of(runner, run.up)[0]
        with stalled(runner.pids(relay, "agent")):
            time.sleep(3.0)  # longer than its children wait for it
            assert sum(links(runner, node)[1] for node in NODES if node != relay) == 2, "those of the other one"
        run.up.wait_for_steps(5)
        assert lost(runner) == []
        run.stop()
    assert run.outcome.summary["recoveries"] == []
