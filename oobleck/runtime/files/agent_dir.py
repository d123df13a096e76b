"""An agent's own directory on its node: its socket, and which processes it answers for.

Only its user can read it. It lies in the system's temporary directory (see `places`), because the path of a UNIX
socket must be short and the home directory may be shared between nodes.

The master reaches into it by commands for a shell. They find the directory by the same rule, enter it only where it
is ours, and send signals to no process but those that are noted there, by number and start (see `process_id`).
"""

from __future__ import annotations

import hashlib
import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import WorkersUnavailable
from oobleck.host.writing import write_whole

from .private_paths import TEMPORARY_DIRECTORY_SHELL, private_directory, temporary_directory
from .process_id import ProcessId

_MEMORY = "/dev/shm"  # noqa: S108  memory that outlives its processes; the directory in it is ours alone
MEMORY_OWNER = "agent.pid"
"""Which process answers for what lies in a directory in memory; where its other files are depends on TMPDIR."""
ONLY_COPY = "only-copy"
"""A file in there that says that it has what no disk has."""
_MAX_NAME_CHARS = 24
"""Of a node in a path: with the longest tag and user id, sockets in /tmp stay below the limit of 107 bytes."""

_SLOW_PERIOD_S = 0.1  # how often a slowed worker is stopped and continued
_END_POLLS = 40
_END_POLL_S = 0.05
"""How often, and in which steps, a killed process is looked for: a big one needs its time to give memory back."""


@dataclass(frozen=True, slots=True)
class AgentDir:
    """The directory of the agent of `node` in a run.

    `run_id` tells apart the runs of a tag that other masters, or other base directories, may have on this machine.
    """

    run_id: str
    node: str

    @property
    def job_path(self) -> Path:
        """What all agents of the run on this machine share."""
        return temporary_directory() / f"oobleck-{os.getuid()}" / self.run_id

    @property
    def path(self) -> Path:
        return self.job_path / _directory_name(self.node)

    @property
    def socket(self) -> Path:
        return self.path / "agent.sock"

    @property
    def answer(self) -> Path:
        """What the agent told the master that started it, for any that comes after."""
        return self.path / "agent.json"

    @property
    def fork_server_socket(self) -> Path:
        return self.job_path / "fork.sock"

    @property
    def fork_server_pid(self) -> Path:
        return self.job_path / "fork.pid"

    @property
    def fork_warmth(self) -> Path:
        """There while ranks are forked from a process that has imported what the first ones did."""
        return self.job_path / "fork.warm"

    @property
    def fork_server_lock(self) -> Path:
        return self.job_path / "fork.lock"

    @property
    def memory(self) -> Path:
        """Where states lie: in the memory file system, which outlives all processes, where there is one."""
        shared = Path(_MEMORY)
        if not os.access(shared, os.W_OK):
            return self.path / "memory" / "of" / "states"
        return shared / f"oobleck-{os.getuid()}" / self.run_id / _directory_name(self.node)

    def pid_file(self, role: str) -> Path:
        """Where it is noted which process the agent (`agent`) or a worker (`worker0`) is."""
        return self.path / f"{role}.pid"

    def note_process(self, role: str, pid: int) -> None:
        """Note which process has a role; one that has ended already is not noted."""
        _note(self.pid_file(role), pid)

    def note_fork_server(self, pid: int) -> None:
        """Note which process forks the workers of all agents here."""
        _note(self.fork_server_pid, pid)

    def create(self) -> None:
        """Make the directory, readable by its user alone. Raises ConfigError where somebody else has put something."""
        for path in (self.job_path.parent, self.job_path, self.path):
            private_directory(path)

    def remove(self) -> None:
        """Remove what an agent leaves that ends; what other nodes or the fork server still use stays."""
        with suppress(OSError):
            for path in (self.socket, self.answer, *self.path.glob("*.pid")):
                path.unlink(missing_ok=True)
            for path in (self.path, self.job_path, self.job_path.parent):
                path.rmdir()


def _note(path: Path, pid: int) -> None:
    found = ProcessId.of(pid)
    if found is None:
        path.unlink(missing_ok=True)
    else:
        try:
            write_whole(path, f"{found}\n")
        except OSError as error:  # a process that nobody could end later is not begun with
            raise WorkersUnavailable(f"{path}: {error.strerror}") from error


def signal_command(run_id: str, node: str, signal: str, *, processes: str = "*") -> str:
    """A shell command that sends a signal (KILL, STOP, …) to the node's agent and workers; fails if there are none.

    `processes` chooses among them: `agent`, `worker0`, or a shell's pattern; or it is `fork_server`, which forks the
    workers of all nodes of a machine.
    """
    chosen = "../fork" if processes == "fork_server" else processes
    return _in_shell(f"{_enter(run_id, node)} && kill -{signal} $({_pids(chosen)})")


def kill_command(run_id: str, node: str) -> str:
    """A shell command that kills the agent and the workers of a node at once.

    It fails if there are none, or if one of them still lives after some seconds.
    """
    return _in_shell(f"{_enter(run_id, node)} && {_kill()}")


def slow_command(run_id: str, node: str, factor: float) -> str:
    """A shell command after which the workers of a node take `factor` times as long as usual; 1 is their usual speed.

    A loop on the node stops and continues them. It ends with them, with the agent, and with the next such command.
    """
    workers = _pids("worker*")
    run_s = _SLOW_PERIOD_S / factor
    loop = (
        f"{_NOTE_SELF} >slow.pid; while [ -e slow.pid ] && kill -STOP $({workers}); "
        f"do sleep {_SLOW_PERIOD_S - run_s:.4f}; kill -CONT $({workers}); sleep {run_s:.4f}; done"
    )
    begin = f"sh -c {shlex.quote(loop)} oobleck-slow" if factor > 1 else "true"
    end = f"kill -KILL $({_pids('slow')}); rm -f slow.pid; kill -CONT $({workers})"
    return _in_shell(f"{_enter(run_id, node)} && {{ {end}; {begin} & }} </dev/null >/dev/null 2>&1")


def is_alive_command(run_id: str, node: str) -> str:
    """A shell command that succeeds where the agent of a node lives."""
    return _in_shell(f'{_enter(run_id, node)} && [ -n "$({_pids("agent")})" ]')


def answer_command(run_id: str, node: str) -> str:
    """A shell command that prints where the agent of a node can be reached; fails where none lives.

    It starts no Python: on a machine of many nodes that all train, this would take longer than all else that a new
    master does.
    """
    return _in_shell(f'{_enter(run_id, node)} && [ -n "$({_pids("agent")})" ] && cat agent.json')


def end_command(run_id: str, node: str) -> str:
    """A shell command that ends what is left of a node's processes, and removes its directory.

    What nodes of this machine share stays, for others of them may just be starting.
    """
    return _in_shell(_end(run_id, node))


def clean_command(run_id: str, node: str) -> str:
    """Like `end_command`; removes the run's directory as well, unless others use it.

    The fork server removes its own files when it ends, but for one that was killed.
    """
    job = shlex.quote(run_id)
    has_nodes = "ls | grep -Eqvx 'fork[.](lock|pid|sock|warm)'"
    # A fork server without agents ends, unless somebody has stopped it.
    left = f"rm -f fork.lock; kill -CONT $({_pids('fork')}) || rm -f fork.pid fork.sock fork.warm"
    remove = f'(cd {job} && {{ {has_nodes} || {{ {left}; }}; }}); rmdir {job}; cd / && rmdir "$base"'
    return _in_shell(f"{_end(run_id, node)}; {_OURS} && {{ {remove}; }}; {_forget_if_empty(run_id, node)}; true")


def _forget_if_empty(run_id: str, node: str) -> str:
    """Give back memory in which nothing was ever saved: that of a node on which nothing could start."""
    run = shlex.quote(run_id)
    memory = f"{run}/{shlex.quote(_directory_name(node))}"
    remove = f'[ "$(ls -A {memory})" = {MEMORY_OWNER} ] && rm -r {memory}; rmdir {run}; cd / && rmdir "$base"'
    return f"base={_MEMORY}/oobleck-$(id -u); {_ENTER_BASE} && {{ {remove}; }}"


def forget_command(run_id: str, node: str, *, keeps_only_copy: bool = False) -> str:
    """A shell command that gives back the memory in which a node keeps states.

    With `keeps_only_copy`, what is marked as not being on any disk stays.
    """
    run = shlex.quote(run_id)
    memory = f"{run}/{shlex.quote(_directory_name(node))}"
    unless_marked = f"[ -e {memory}/{ONLY_COPY} ] || " if keeps_only_copy else ""
    remove = f'{unless_marked}rm -rf {memory}; rmdir {run}; cd / && rmdir "$base"'
    return _in_shell(f"base={_MEMORY}/oobleck-$(id -u); {_ENTER_BASE} && {{ {remove}; }}; true")


# What follows are pieces of commands for a POSIX shell.

_ENTER_BASE = '[ -d "$base" ] && [ ! -L "$base" ] && [ -O "$base" ] && cd "$base"'
"""Anybody may have put something under that name into a directory that all users share."""

_OURS = f"{TEMPORARY_DIRECTORY_SHELL}; base=$temporary/oobleck-$(id -u); {_ENTER_BASE}"
"""Goes into the directory of all runs of this user on the node; fails where there is none that is ours."""

_STAT = """stat=$(cat "/proc/$p/stat"); set -- ${stat##*') '}"""
"""Takes apart what the kernel says of process $p, from its state on: $1, and its start, ${20}."""

_BOOT = "/proc/sys/kernel/random/boot_id"
_NOTE_SELF = f'p=$$; {_STAT}; echo "$p ${{20}} $(cat {_BOOT})"'


def _in_shell(script: str) -> str:
    """The user's own shell on a node may be any; errors are of no interest."""
    return f"exec /bin/sh -c {shlex.quote(script)} 2>/dev/null"


def _enter(run_id: str, node: str) -> str:
    """Goes into the agent's directory."""
    return f"{_OURS} && cd {_relative(run_id, node)}"


def _end(run_id: str, node: str) -> str:
    directory = _relative(run_id, node)
    return f"({_OURS} && {{ (cd {directory} && {_kill()}); rm -rf {directory}; }})"


def _relative(run_id: str, node: str) -> str:
    return f"{shlex.quote(run_id)}/{shlex.quote(_directory_name(node))}"


def _kill() -> str:
    """Kills what is noted in the agent's directory, and waits until it is gone."""
    living = _pids("*")
    wait = f'until [ -z "$({living})" ]; do [ $n -lt {_END_POLLS} ] || exit 1; n=$((n + 1)); sleep {_END_POLL_S}; done'
    return f'killed=$({living}) && [ -n "$killed" ] && {{ kill -KILL $killed; n=0; {wait}; }}'


def _pids(processes: str) -> str:
    """Prints, in the agent's directory, the numbers of living processes that are noted there.

    A number that was noted may be another process's now, which did not begin when ours did.
    """
    return (
        f'read -r boot <{_BOOT} || boot=unknown; for f in ./{processes}.pid; do [ -r "$f" ] || continue; '
        f'read -r p began when <"$f"; {_STAT}; '
        '[ "$1" != Z ] && [ "${20}" = "$began" ] && [ "$when" = "$boot" ] && echo "$p"; done; true'
    )


def _directory_name(node: str) -> str:
    """A node's name, cut where it is too long to be part of a socket's path."""
    if len(node) <= _MAX_NAME_CHARS:
        return node
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"{node[: _MAX_NAME_CHARS - 9]}-{digest}"
