"""`oobleck node` processes, each a node that dials in."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from .harness import Runner

END_S = 60.0


class Nodes:
    """Nodes by their names."""

    def __init__(self, runner: Runner, directory: Path) -> None:
        self._runner = runner
        self._directory = directory
        self._home = directory / "home"
        self._home.mkdir()
        (self._home / ".oobleck").symlink_to(runner.base_dir)  # logs lie where other runs' are
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, name: str, *arguments: str, **variables: str) -> None:
        """Start `oobleck node` with its arguments, within further variables."""
        command = [sys.executable, "-m", "oobleck", "node", *arguments]
        environment = {**self._runner.environment, "HOME": str(self._home), **variables}
        with (self._directory / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stderr=log)

    def power_off(self, *names: str) -> None:
        """Kill all that is on some nodes, whose connections end at once."""
        for name in names:
            self._processes[name].kill()
        for name in names:
            self._runner.signal(name)
            self._processes[name].wait()

    def give_notice(self, name: str) -> None:
        self._processes[name].send_signal(signal.SIGTERM)

    def suspend(self, *names: str) -> None:
        """Stop the processes that dial in; what they have started runs on."""
        for name in names:
            self._processes[name].send_signal(signal.SIGSTOP)

    def resume(self, *names: str) -> None:
        for name in names:
            self._processes[name].send_signal(signal.SIGCONT)

    def ended(self, name: str) -> int:
        """The exit code, once there is one."""
        return self._processes[name].wait(END_S)

    def said(self, name: str) -> str:
        return (self._directory / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
