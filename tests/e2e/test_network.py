"""The network is cut and healed: between the master and a node, and between two nodes that the master reaches."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

import pytest

from tests.network import MASTER, Network, needs_networks, serve_network

from .elastic import ENDLESS, Elastic, Reference, assert_all_is_right, nodes_of, recoveries, stopped
from .harness import Runner, incidents, processes_with, started_at, worker_pids

pytestmark = [needs_networks, pytest.mark.slow]

NODES = ("alpha", "beta", "gamma")
_IPTABLES = shutil.which("iptables", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Network]:
    with serve_network(tmp_path, NODES) as network:
        yield network


@pytest.fixture
def hosts(network: Network, tmp_path: Path) -> tuple[str, ...]:
    hostfile, config = tmp_path / "hosts.txt", tmp_path / "ssh_config"
    hostfile.write_text("\n".join(NODES))
    config.write_text("".join(server.host_config([node]) for node, server in network.servers.items()))
    return (str(hostfile), "--ssh-config", str(config), "--no-check")


def test_cut_cables_cost_their_nodes_and_healed_ones_bring_them_back(
    runner: Runner, endless_reference: Reference, network: Network, hosts: tuple[str, ...]
) -> None:
    settings = ("rejoin_after_s=1", "lease_s=2", "connect_timeout_s=2")
    given = [word for setting in settings for word in ("--set", f"control.{setting}")]
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), *given)
    with runner.up(*options, nodes=hosts, within=network.on(MASTER)) as up:
        up.wait_for_step(5)
        # The master loses sight of a node that goes on training, as far as it knows.
        worker = worker_pids(runner)["gamma"]
        birth = started_at(worker)
        network.cut(MASTER, "gamma")
        up.wait_for("gamma lost: silent for")
        up.wait_for_loss("gamma")
        up.wait_for_steps(3)
        assert started_at(worker) == birth, "nobody can end it"
        network.heal(MASTER, "gamma")
        up.wait_for("gamma taken in; pipelines grow")
        assert started_at(worker) != birth
        up.wait_for_steps(3)
        # A node's only cable is cut: its peers and the master lose it.
        network.unplug("beta")
        up.wait_for("beta lost: silent for")
        up.wait_for_loss("beta")
        network.plug_in("beta")
        up.wait_for("beta taken in; pipelines grow")
        up.wait_for_steps(3)
        # The master reaches both of two nodes that do not reach each other: one of them is left out, until it is added.
        network.cut("alpha", "gamma")
        up.wait_for("the network between gamma and their peers is cut")
        up.wait_for_loss("gamma")
        up.wait_for_steps(3)
        network.heal("alpha", "gamma")
        run = Elastic(runner, up)
        run.command("add", "gamma")
        up.wait_for("gamma taken in; pipelines grow")
        up.wait_for_steps(3)
        outcome = run.stop()
    assert_all_is_right(outcome, endless_reference)
    assert [cause for cause, _, _ in recoveries(outcome)] == [
        *("lease_expired", "joined") * 2,
        "cut_off",
        "joined",
    ]
    assert nodes_of(outcome) == list(NODES)
    found = [(incident["root"]["failure"], incident["root"]["node"]) for incident in incidents(runner)]
    assert found == [("frozen", "gamma"), ("frozen", "beta"), ("cut_off", "gamma")]
    assert not any(processes_with(f"TMPDIR={network.temporary / node}") for node in NODES)


def pairs() -> Iterator[tuple[str, str]]:
    yield from combinations(NODES, 2)


@pytest.mark.parametrize(
    "is_one_way",
    [
        pytest.param(False, id="both-ways"),
        pytest.param(True, id="one-way", marks=pytest.mark.skipif(_IPTABLES is None, reason="there is no iptables")),
    ],
)
def test_a_network_that_fails_between_all_nodes_is_waited_for_and_costs_no_step(
    runner: Runner, endless_reference: Reference, network: Network, hosts: tuple[str, ...], is_one_way: bool
) -> None:
    """The master reaches all nodes, and they do not reach each other: as when their switch is started again."""
    options = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), "--set", "control.connect_timeout_s=4")
    with runner.up(*options, nodes=hosts, within=network.on(MASTER)) as up:
        up.wait_for_step(5)
        before = worker_pids(runner)
        for one, other in pairs():
            if is_one_way:
                network.drop(one, other)
            else:
                network.cut(one, other)
        up.wait_for("the network is waited for")
        time.sleep(10.0)
        for one, other in pairs():
            if is_one_way:
                network.let_through(one, other)
            else:
                network.heal(one, other)
        up.wait_for("the network is back after")
        up.wait_for_steps(5)
        assert worker_pids(runner) == before
        outcome = stopped(runner, up)
    assert_all_is_right(outcome, endless_reference)
    assert outcome.exit_code == 0
    assert [entry for entry in runner.journal() if entry["@type"] == "NodeLost"] == []
