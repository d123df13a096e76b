"""Attempts: what is swallowed and what is not, what is fenced off, and what a process keeps after many losses."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import oobleck
from oobleck.control.protocol import ATTEMPTS, PAST, WAITS, BecomeRank, InterruptRank
from oobleck.errors import UsageError
from oobleck.training.attempts import Interrupted, Line, check_attempt, line, note_saved, set_line
from oobleck.wire import encode_frame

SCRIPT = Path(__file__).with_name("lossy_script.py")
MOST_GROWTH_BYTES = 24 << 20
"""Of a process's memory in all later losses together: allocators keep some, and one leaked model of each would be
more."""


@dataclass
class Agent:
    """Plays the agent of this process."""

    sock: socket.socket

    def heard(self) -> bytes:
        return self.sock.recv(1)

    def interrupt(self, *, after_save: bool = False) -> None:
        self.sock.sendall(encode_frame(InterruptRank(after_save=after_save)))

    def place(self, **environment: str) -> None:
        ours, theirs = socket.socketpair()
        order = BecomeRank(
            entry="script",
            command=("s.py",),
            directory="/",
            environment=environment,
            stdout="",
            stderr="",
            logs_imports=False,
        )
        frame = encode_frame(order)
        socket.send_fds(self.sock, [frame[:1]], [theirs.fileno()])
        self.sock.sendall(frame[1:])
        ours.close()
        theirs.close()


def enter(order: BecomeRank, overflow: socket.socket) -> None:
    overflow.close()
    os.environ.update(order.environment)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    ours, theirs = socket.socketpair()
    monkeypatch.setenv("RANK", "0")
    set_line(Line(theirs, enter, is_spare=False, hears_within_s=2.0))
    ours.settimeout(60)
    yield Agent(ours)
    ours.shutdown(socket.SHUT_RDWR)
    for each in threading.enumerate():
        if each.name == "oobleck-attempts":
            each.join(60)
    ours.close()
    theirs.close()
    set_line(None)


def await_end() -> None:
    """Wait as a collective does that a lost rank makes fail."""
    the_line = line.the_line()
    assert the_line is not None
    assert the_line.wait_until_over(60)


def test_a_function_whose_body_runs_after_its_call_is_refused_by_name():
    async def later():
        pass

    def in_turn():
        yield

    for function, name in ((later, "later"), (in_turn, "in_turn")):
        with pytest.raises(UsageError, match=f"{name} runs only after its call"):
            oobleck.resilient(function)


def test_without_oobleck_run_there_is_one_attempt():
    assert len(list(oobleck.attempts())) == 1
    check_attempt()
    note_saved()


def test_a_function_is_called_again_with_its_new_place_and_the_same_random_numbers(agent: Agent):
    seen = []

    @oobleck.resilient
    def train(start: int) -> int:
        seen.append((os.environ["RANK"], random.random(), float(torch.rand(1))))
        if len(seen) < 3:
            agent.interrupt()
            await_end()
            agent.place(RANK=str(len(seen)))
            raise RuntimeError("Connection closed by peer")
        return start + len(seen)

    assert train(10) == 13
    assert [rank for rank, _, _ in seen] == ["0", "1", "2"]
    assert len({numbers for _, *numbers in map(tuple, seen) for numbers in [tuple(numbers)]}) == 1
    assert [agent.heard() for _ in range(4)] == [ATTEMPTS, WAITS, WAITS, PAST]


@pytest.mark.parametrize("kind", [RuntimeError, ValueError])
def test_an_error_of_the_scripts_own_is_raised_at_once(agent: Agent, kind: type[Exception]):
    @oobleck.resilient
    def train() -> None:
        raise kind("mine")

    own = line.the_line()
    assert own is not None
    own.hears_within_s = 60.0
    begun_s = time.monotonic()
    with pytest.raises(kind, match="mine"):
        train()
    assert time.monotonic() < begun_s + 55.0, "no news is waited for"
    assert [agent.heard(), agent.heard()] == [ATTEMPTS, PAST]


def test_an_error_that_may_be_of_a_collective_is_raised_if_no_rank_is_lost(agent: Agent):
    @oobleck.resilient
    def train() -> None:
        try:
            raise dist.DistNetworkError("Connection closed by peer")
        except RuntimeError as error:
            raise ValueError("wrapped") from error

    with pytest.raises(ValueError, match="wrapped"):
        train()


def test_the_news_may_come_after_the_error(agent: Agent):
    counts = []
    for attempt in oobleck.attempts():
        with attempt:
            counts.append(attempt.number)
            if not attempt.number:
                threading.Timer(0.2, lambda: (agent.interrupt(), agent.place())).start()
                raise dist.DistNetworkError("Connection closed by peer")
    assert counts == [0, 1]


def test_a_later_loop_keeps_no_process_for_a_new_rank_would_run_the_first_one_meanwhile(agent: Agent):
    assert oobleck.resilient(lambda: "trained")() == "trained"
    assert [agent.heard(), agent.heard()] == [ATTEMPTS, PAST]

    @oobleck.resilient
    def evaluate() -> None:
        raise dist.DistNetworkError("Connection closed by peer")

    begun_s = time.monotonic()
    with pytest.raises(dist.DistNetworkError):
        evaluate()
    assert time.monotonic() < begun_s + 1.0
    agent.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        agent.heard()


def test_a_loop_within_an_attempt_leaves_its_interruption_to_the_outer_one(agent: Agent):
    inner: list[int] = []

    @oobleck.resilient
    def step() -> None:
        inner.append(len(inner))
        if len(inner) == 1:
            agent.interrupt()
            await_end()
            agent.place()
            raise RuntimeError("Connection closed by peer")

    oobleck.resilient(step)()
    assert inner == [0, 1]
    assert [agent.heard() for _ in range(3)] == [ATTEMPTS, WAITS, PAST]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_end_that_is_asked_for_is_never_swallowed(agent: Agent, kind: type[BaseException]):
    @oobleck.resilient
    def train() -> None:
        agent.interrupt()
        await_end()
        raise kind

    with pytest.raises(kind):
        train()


def test_nothing_is_saved_in_an_attempt_that_is_over_even_where_a_script_swallows_errors(agent: Agent):
    for attempt in oobleck.attempts():
        with attempt:
            check_attempt()
            if attempt.number:
                break
            agent.interrupt()
            await_end()
            with pytest.raises(Interrupted):
                check_attempt()
            agent.place()
    check_attempt()


def test_a_thread_of_an_earlier_attempt_saves_nothing_in_the_next(agent: Agent):
    go, raised = threading.Event(), list[BaseException | None]()

    def save_late() -> None:
        go.wait(60)
        try:
            check_attempt()
            raised.append(None)
        except Interrupted as error:
            raised.append(error)

    threads = []
    for attempt in oobleck.attempts():
        with attempt:
            threads.append(thread := threading.Thread(target=save_late))
            thread.start()
            if not attempt.number:
                agent.interrupt()
                await_end()
                agent.place()
                raise Interrupted
            go.set()
            for each in threads:
                each.join()
    assert [type(each) for each in sorted(raised, key=lambda each: each is None)] == [Interrupted, type(None)]


def test_where_nodes_change_an_attempt_ends_after_its_next_save(agent: Agent):
    steps = []
    for attempt in oobleck.attempts():
        with attempt:
            if attempt.number:
                break
            the_line = line.the_line()
            assert the_line is not None
            agent.interrupt(after_save=True)
            while the_line.asked_s is None:
                pass
            check_attempt()
            steps.append(1)
            agent.place()
            note_saved()
            steps.append(2)
    assert steps == [1]


def test_a_process_group_made_before_is_refused_by_name(agent: Agent, tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(UsageError, match="init_process_group was called before"):
            next(oobleck.attempts())
    finally:
        dist.destroy_process_group()


def test_a_group_whose_making_was_interrupted_leaves_no_number_behind(agent: Agent, monkeypatch: pytest.MonkeyPatch):
    """Else this rank would look for its next group under another name than new ranks do."""
    names = []
    with socket.socket() as unserved:
        unserved.bind(("127.0.0.1", 0))
        waits_for = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unserved.getsockname()[1]), "WORLD_SIZE": "2"}
        for name, value in waits_for.items():
            monkeypatch.setenv(name, value)
        for attempt in oobleck.attempts():
            with attempt:
                if not attempt.number:
                    agent.interrupt()
                    agent.place(RANK="0", WORLD_SIZE="1", MASTER_PORT="0")
                    dist.init_process_group("gloo", rank=1, world_size=2)
                dist.init_process_group("gloo")
                names.append(dist.group.WORLD.group_name)
                dist.destroy_process_group()
    dist.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    names.append(dist.group.WORLD.group_name)
    dist.destroy_process_group()
    assert names[0] == names[1]


WAITS_ALONE = """
import socket, threading, time
import torch.distributed as dist
from oobleck.control.protocol import InterruptRank
from oobleck.training.attempts import Line, attempts, set_line
from oobleck.wire import encode_frame

ours, theirs = socket.socketpair()
set_line(Line(theirs, lambda order, overflow: None, is_spare=False))

def interrupt():
    time.sleep(1)
    ours.sendall(encode_frame(InterruptRank(after_save=False)))

threading.Thread(target=interrupt, daemon=True).start()
for attempt in attempts():
    with attempt:
        dist.TCPStore("127.0.0.1", 0, 2, is_master=True)
"""


def test_a_rank_that_waits_in_its_store_for_others_is_given_up_and_says_so():
    """Nothing ends torch's wait, which uses a processor a hundred times a second."""
    done = subprocess.run([sys.executable, "-c", WAITS_ALONE], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert "its attempt is over, and it does not leave" in done.stderr
    assert "line 18, in <module>" in done.stderr, "where it waits"


@pytest.mark.slow  # tests/e2e/test_attempts.py has fewer losses
@pytest.mark.parametrize(("kind", "losses"), [("ddp", 8), ("ddp", 100), ("fsdp", 100)])
def test_no_number_of_an_aborted_collective_is_used_and_nothing_is_left_of_many_losses(kind: str, losses: int):
    """Each rank is interrupted at a random point of its collectives, and keeps its process."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), kind, str(losses)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["wrong"] == 0
    for counts in found["counts"]:
        assert len(counts) == losses
        (third_fds, third_tasks, third_bytes), (fds, tasks, resident) = counts[2], counts[-1]
        assert (fds, tasks) <= (third_fds, third_tasks), counts
        assert resident <= third_bytes + MOST_GROWTH_BYTES
