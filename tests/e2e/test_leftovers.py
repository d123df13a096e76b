"""What plans leave behind in those who live through them: nothing, of sockets, threads and memory."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest

from oobleck.cli.inputs.job_file import load_job
from oobleck.runtime.control_client import AddRequest, ControlRequest, DrainRequest, KillRequest, request
from oobleck.runtime.files.run_dir import RunDirectory

from .elastic import ENDLESS, TOLERANCE, Elastic, assert_nothing_lost, stopped
from .harness import TAG, Runner, worker_pids
from .reference import each_reference_loss

SETTLING_S = 20.0
"""What is given up ends by itself, some time later."""


A_NEIGHBOUR_MORE = 6
"""Descriptors or threads: the last plan may be of another shape than the one that was counted first."""

ROUNDS = 4
"""A busy machine has slow nodes, for which plans are of other shapes; but what leaks is more after each plan."""


@dataclass(frozen=True)
class Held:
    """What the processes of those that stay have open."""

    worker_descriptors: int
    worker_threads: int
    agents_descriptors: tuple[int, ...]
    master_descriptors: int


def counts(held: Held) -> tuple[int, ...]:
    """All of them in one order."""
    return held.worker_descriptors, held.worker_threads, *held.agents_descriptors, held.master_descriptors


def holdings(run: Elastic, runner: Runner) -> Held:
    """Of node0's worker, which lives all along, of the agents that stay, and of the master."""
    worker = worker_pids(runner)["node0"]
    agents = [pid for node in ("node0", "node1") for pid in runner.pids(node, "agent")]
    return Held(
        worker_descriptors=_count(worker, "fd"),
        worker_threads=_count(worker, "task"),
        agents_descriptors=tuple(_count(agent, "fd") for agent in agents),
        master_descriptors=_count(run.up.process.pid, "fd"),
    )


def settled(run: Elastic, runner: Runner, expected: Held | None = None) -> Held:
    """What is held once it is no more than expected; without an expectation, once it stays for a second."""
    end_s = time.monotonic() + SETTLING_S
    before: list[Held] = []
    while time.monotonic() < end_s:
        before.append(holdings(run, runner))
        if before[-1] == expected or (expected is None and len(before) > 10 and len(set(before[-10:])) == 1):
            break
        time.sleep(0.1)
    return before[-1]


def resident_bytes(pid: int) -> int:
    """Memory of a process that it shares with none."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def _count(pid: int, kind: str) -> int:
    return len(os.listdir(f"/proc/{pid}/{kind}"))


def ask(runner: Runner, wanted: ControlRequest) -> None:
    request(RunDirectory(base_dir=runner.base_dir, tag=TAG).control_socket, wanted)


def drain_and_add(run: Elastic, runner: Runner) -> None:
    ask(runner, DrainRequest(node="node2"))
    run.up.wait_for("node2 has left")
    ask(runner, AddRequest(node="node2"))
    run.up.wait_for("node2 taken in; pipelines grow")


def kill_and_add(run: Elastic, runner: Runner) -> None:
    ask(runner, KillRequest(node="node2"))
    run.up.wait_for_loss("node2")
    ask(runner, AddRequest(node="node2"))
    run.up.wait_for("node2 taken in; pipelines grow")


def restart_a_worker(run: Elastic, runner: Runner) -> None:
    os.kill(worker_pids(runner)["node1"], signal.SIGKILL)
    run.up.wait_for("node1 taken in; worker restarted")


ALL = ("--local", "4")
"""They form two pipelines of two, so that node0 has neighbours of the same kinds whenever all are in."""

Change = Callable[[Elastic, Runner], None]
EVERY_KIND: Sequence[Change] = (restart_a_worker, drain_and_add, kill_and_add)


@pytest.mark.slow
def test_a_survivor_of_many_plans_holds_what_it_held_after_the_first_few(
    start: Callable[..., Any], runner: Runner
) -> None:
    within = ("/bin/sh", "-c", 'ulimit -S -n 256; exec "$@"', "sh")
    with start("--set", "control.lease_s=30", nodes=ALL, within=within) as run:
        for change in EVERY_KIND:
            change(run, runner)
        for pid in (run.up.process.pid, *runner.pids("node0", "agent"), worker_pids(runner)["node0"]):
            soft, hard = psutil.Process(pid).rlimit(psutil.RLIMIT_NOFILE)
            assert soft == hard, f"process {pid} may open {soft} files, and could {hard}"
        first = settled(run, runner)
        for change in (drain_and_add, *EVERY_KIND):
            change(run, runner)
        more: list[list[int]] = []
        for _ in range(ROUNDS):
            run.up.wait_for_steps(3)
            later = settled(run, runner, expected=first)
            more.append([now - before for now, before in zip(counts(later), counts(first), strict=True)])
            if max(more[-1]) <= A_NEIGHBOUR_MORE:
                break
            drain_and_add(run, runner)
        assert max(more[-1]) <= A_NEIGHBOUR_MORE, more  # four changes that leak leave 40
        run.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_changes_fit_into_few_descriptors(start: Callable[..., Any], runner: Runner) -> None:
    """Each process may have 128: what one plan left behind would be too much after a few more."""
    within = ("/bin/sh", "-c", 'ulimit -n 128; exec "$@"', "sh")
    with start("--set", "control.lease_s=30", nodes=ALL, within=within) as run:
        drain_and_add(run, runner)
        first = settled(run, runner)
        for _ in range(12):
            for change in (drain_and_add, kill_and_add):
                change(run, runner)
        bytes_before = resident_bytes(worker_pids(runner)["node0"])
        for _ in range(13):
            for change in (drain_and_add, kill_and_add):
                change(run, runner)
        run.up.wait_for_steps(3)
        assert settled(run, runner, expected=first) == first
        assert resident_bytes(worker_pids(runner)["node0"]) - bytes_before < 32 << 20
        run.stop()


MANY = (
    *("--set", "global_batch_size=64", "--set", "num_pipelines=16"),
    *("--set", "control.lease_s=120", "--set", "control.start_timeout_s=600", "--set", "control.connect_timeout_s=120"),
)
"""For 64 workers; leases are long because they share a few processors."""


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(psutil.virtual_memory().available < 14 << 30, reason="64 workers need 14 GiB of memory")
def test_sixty_four_workers_survive_ten_losses_with_1024_descriptors_each(runner: Runner) -> None:
    within = ("/bin/sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")
    given = ("--job", str(runner.job_file()), "--steps", str(ENDLESS), *MANY)
    with runner.up(*given, nodes=("--local", "64"), within=within) as up:
        up.wait_for_step(3)
        lost = [f"node{number}" for number in range(3, 63, 6)]
        for node in lost:
            runner.signal(node)
            Elastic(runner, up).wait_for_recovery(node)
            up.wait_for_steps(2)
        outcome = stopped(runner, up)
    assert_nothing_lost(outcome, len(outcome.losses))
    job = replace(load_job(runner.job_file().read_text(), source="test"), global_batch_size=64, max_steps=ENDLESS)
    expected = islice(each_reference_loss(job, runner.directory / "cache"), len(outcome.losses))
    assert max(abs(one - other) for one, other in zip(outcome.losses, expected, strict=True)) < TOLERANCE
    assert runner.left_over() == []


@pytest.mark.slow
def test_idle_connections_to_its_ports_do_not_end_a_local_run(start: Callable[..., Any], runner: Runner) -> None:
    """More than there are descriptors for, from anybody on this machine; and a node comes and goes meanwhile."""
    within = ("/bin/sh", "-c", 'ulimit -n 256; exec "$@"', "sh")
    with start("--set", "control.lease_s=30", nodes=("--local", "3"), within=within) as run, ExitStack() as idle:
        master = psutil.Process(run.up.process.pid)
        ports = {one.laddr.port for one in master.net_connections("tcp") if one.status == psutil.CONN_LISTEN}
        for number in range(400):
            idle.enter_context(socket.create_connection(("127.0.0.1", sorted(ports)[number % len(ports)])))
        kill_and_add(run, runner)
        run.up.wait_for_steps(3)
        run.stop()
    assert "Traceback" not in "".join(run.up.output)
