"""Processes over the stub device, forked from one that has imported torch: members of NCCL groups, to be lost."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tools.gpu.stub import device as stub

PATIENCE_S = 60.0
"""How long a member may take on a busy machine."""

_PRELOADED = ["torch", "torch.distributed", "oobleck.training.comm", "tests.cuda_stub.roles"]


class Member:
    """A process that plays a role, and says what comes of it."""

    def __init__(self, process: Any, pipe: Connection) -> None:
        self.process = process
        self.pipe = pipe

    def hear(self, *, within_s: float = PATIENCE_S) -> Any:
        """Return the next thing that it says. Fails if it ends, or says nothing in time."""
        assert self.pipe.poll(within_s), f"it has said nothing for {within_s} s"
        return self.pipe.recv()

    def is_silent(self, for_s: float) -> bool:
        return not self.pipe.poll(for_s)

    def say(self, word: object = None) -> None:
        self.pipe.send(word)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


class Members:
    """Starts members that meet in a directory; none is left in the end."""

    def __init__(self, directory: Path, *, devices: int = 4) -> None:
        self.directory = directory
        self.control = stub.Control(directory)
        self._variables = dict(stub.environment(directory, devices=devices))
        self._context = multiprocessing.get_context("forkserver")
        self._started: list[Member] = []

    def start(self, role: Callable[..., None], *arguments: object, **variables: str) -> Member:
        here, there = self._context.Pipe()
        # The server is forked with these; what it forks is told its own.
        before = dict(os.environ)
        os.environ.update(self._variables)
        try:
            self._context.set_forkserver_preload(_PRELOADED)
            settings = {**self._variables, **variables}
            process = self._context.Process(target=_play, args=(role, there, settings, self.directory, arguments))
            process.start()
        finally:
            os.environ.clear()
            os.environ.update(before)
        there.close()
        self._started.append(Member(process, here))
        return self._started[-1]

    def close(self) -> None:
        for member in self._started:
            member.process.kill()
            member.process.join()


def _play(
    role: Callable[..., None], pipe: Connection, settings: dict[str, str], directory: Path, arguments: tuple[Any, ...]
) -> None:
    os.environ.update(settings)
    role(pipe, directory, *arguments)
    # Threads of aborted groups may go on, and Python would wait for them.
    os._exit(0)


def wait_until(condition: Callable[[], object], *, within_s: float = PATIENCE_S, poll_s: float = 0.01) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s, "it has not come to that in time"
        time.sleep(poll_s)
