"""The runs on which a failure trace plays: one that somebody has started, or a local one of our own."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from oobleck.errors import ExitCode, OobleckError, UsageError
from oobleck.runtime.control_client import ControlRequest, NoActiveRun, StatusRequest, StopRequest, request
from oobleck.runtime.files import ProcessId, RunDirectory
from oobleck.runtime.processes import restart_master
from oobleck.runtime.python_process import module_command

_ANSWER_TIMEOUT_S = 15.0
_START_TIMEOUT_S = 60.0
_POLL_S = 0.1


class _Run:
    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def ask(self, asked: ControlRequest) -> Mapping[str, object]:
        return request(self._directory.control_socket, asked, _ANSWER_TIMEOUT_S)


class RunningRun(_Run):
    """A run whose master somebody else has started on this machine."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes that the run knows, lost ones included."""
        nodes = self.ask(StatusRequest())["nodes"]
        return tuple(str(node["name"]) for node in nodes) if isinstance(nodes, list) else ()

    def freeze_master(self, frozen_s: float) -> None:
        _freeze(self._master.pid, frozen_s)

    def crash_master(self, down_s: float) -> None:
        # The last `--resume` counts, so this replaces the one that the master was started with.
        restart_master(self._master, "--resume", "auto", down_s=down_s)
        _wait_until_it_listens(self._directory)

    @property
    def _master(self) -> ProcessId:
        master = self._directory.master
        if master is None:
            raise UsageError(f"{self._directory.path} does not say which process is the run's master")
        return master

    def wait_until(self, at_s: float) -> bool:
        time.sleep(max(0.0, at_s - time.monotonic()))
        return True


class LocalRun(_Run):
    """A run of `oobleck up --local N`: a child of this process that shares its output."""

    def __init__(self, directory: RunDirectory, options: Sequence[str]) -> None:
        """`options` are those of `oobleck up`."""
        super().__init__(directory)
        place = ("--tag", directory.tag, "--base-dir", str(directory.base_dir))
        self._command = module_command("oobleck", "up", *options, *place)
        # An older run of this tag is not the one to play on.
        self._process = self._start(resume="never")

    def _start(self, *, resume: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*self._command, "--resume", resume], stdin=subprocess.DEVNULL)

    def freeze_master(self, frozen_s: float) -> None:
        _freeze(self._process.pid, frozen_s)

    def crash_master(self, down_s: float) -> None:
        self._process.kill()
        self._process.wait()
        time.sleep(down_s)
        self._process = self._start(resume="auto")
        _wait_until_it_listens(self._directory, self._process)

    def wait_until(self, at_s: float) -> bool:
        while self._process.poll() is None and (left_s := at_s - time.monotonic()) > 0:
            time.sleep(min(left_s, _POLL_S))
        return self._process.poll() is None

    def wait_for_training(self) -> bool:
        """Wait for the first step; returns False when the run ended before."""
        while self.wait_until(time.monotonic() + _POLL_S):
            with suppress(OobleckError):  # it is not listening yet, or is busy
                if self.ask(StatusRequest())["step"]:
                    return True
        return False

    def stop(self) -> int:
        """End the run after its step, unless it has ended; returns its exit code."""
        with suppress(NoActiveRun):
            self.ask(StopRequest())
        return self._process.wait()

    @contextmanager
    def ended_with_us(self) -> Iterator[None]:
        """End the run before we end. Ctrl-C reaches it from the terminal."""
        # SIGTERM is passed on, and so is the end of the terminal, which the run alone would outlive.
        ends = [signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # which nohup sets
            ends.append(signal.SIGHUP)
        before = {number: signal.signal(number, _exit) for number in ends}
        try:
            yield
        except KeyboardInterrupt:
            raise SystemExit(self._process.wait()) from None
        finally:
            if self._process.poll() is None:
                self._process.terminate()
                self._process.wait()
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)


def _wait_until_it_listens(directory: RunDirectory, process: subprocess.Popen[bytes] | None = None) -> None:
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while process is None or process.poll() is None:
        try:
            request(directory.control_socket, StatusRequest(), 1.0)
        except OobleckError as error:
            if time.monotonic() > deadline_s:
                raise UsageError(f"the run's master does not listen {_START_TIMEOUT_S:g} s after its start") from error
            time.sleep(_POLL_S)
        else:
            return


def _freeze(pid: int, frozen_s: float) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(frozen_s)
        finally:
            # An interrupt must not leave the master stopped.
            os.kill(pid, signal.SIGCONT)
