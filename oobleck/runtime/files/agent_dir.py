"""An agent's own directory on its node: its socket, and the processes that it is responsible for.

Only its user can read it. It is in the system's temporary directory (see `private_paths`), because a UNIX socket needs
a short path and nodes may share a home directory.

The master reaches into it by shell commands. They find the directory by the same rule, enter it only if it is ours, and
signal only processes that are noted there, by pid and start (see `process_id`).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, WorkersUnavailable
from oobleck.host.writing import write_whole

from .private_paths import TEMPORARY_DIRECTORY_SHELL, private_directory, temporary_directory
from .process_id import ProcessId

_MEMORY = "/dev/shm"  # noqa: S108  memory that outlives its processes; the directory in it is ours alone
MEMORY_OWNER = "agent.pid"
"""Names the process that owns a directory in memory; its other files are somewhere that depends on TMPDIR."""
ONLY_COPY = "only-copy"
"""Marks a directory in memory that has a state which no disk has."""
RUN_ENVIRONMENT = "OOBLECK_RUN_ENVIRONMENT"
"""The variable with a digest of those that a run gives to its processes; unset if there are none."""
_MAX_NAME_CHARS = 24  # with the longest tag and user id, sockets in /tmp stay below the limit of 107 bytes

_SLOW_PERIOD_S = 0.1
_END_POLLS = 40  # a big process takes some time to give its memory back
_END_POLL_S = 0.05


class AgentDir:
    """The paths of the agent of `node` in a run; nothing exists before `create`."""

    def __init__(self, run_id: str, node: str) -> None:
        # The tag alone would not do: other masters, or other base directories, may have runs with the same one here.
        self.run_id = run_id
        self.node = node
        user, name = f"oobleck-{os.getuid()}", _directory_name(node)
        self.job_path = temporary_directory() / user / run_id
        """All agents of the run on this machine share it."""
        self.path = self.job_path / name
        self.socket = self.path / "agent.sock"
        self.answer = self.path / "agent.json"
        """The agent's answer to the master that started it, for later masters."""
        self.fork_server_socket = self.job_path / "fork.sock"
        self.fork_server_pid = self.job_path / "fork.pid"
        self.fork_server_lock = self.job_path / "fork.lock"
        self.fork_warmth = self.job_path / "fork.warm"
        """A file that exists while ranks are forked from a process with the first ranks' imports."""
        shared = Path(_MEMORY)
        self.memory = shared / user / run_id / name if os.access(shared, os.W_OK) else self.path / "memory/of/states"
        """The directory for states, on the memory file system if there is one: it outlives all processes."""

    def pid_file(self, role: str) -> Path:
        """The file with the process id of a role, such as `agent` or `worker0`."""
        return self.path / f"{role}.pid"

    def note_process(self, role: str, pid: int) -> None:
        """Note the process of a role, unless it has ended already. Raises WorkersUnavailable."""
        _note(self.pid_file(role), pid)

    def note_fork_server(self, pid: int) -> None:
        """Note the process that forks the workers of all agents on this machine. Raises WorkersUnavailable."""
        _note(self.fork_server_pid, pid)

    def create(self) -> None:
        """Create the directory, readable by its user only. Raises ConfigError if its path is not ours."""
        for path in (self.job_path.parent, self.job_path, self.path):
            private_directory(path)

    def remove(self) -> None:
        """Remove the agent's files, but nothing that other nodes or the fork server still use."""
        with suppress(OSError):
            for path in (self.socket, self.answer, *self.path.glob("*.pid")):
                path.unlink(missing_ok=True)
            # `rmdir` fails, and ends this loop, at the first directory that others still use.
            for path in (self.path, self.job_path, self.job_path.parent):
                path.rmdir()


def remove_states(run_id: str) -> None:
    """Remove the states of a run in this machine's memory, from which a new run of its tag would continue."""
    of_user = Path(_MEMORY) / f"oobleck-{os.getuid()}"
    with suppress(OSError, ConfigError):
        of_user.lstat()  # there may be none
        private_directory(of_user)
        shutil.rmtree(of_user / run_id, ignore_errors=True)


def _note(path: Path, pid: int) -> None:
    process = ProcessId.of(pid)
    if process is None:
        path.unlink(missing_ok=True)
    else:
        try:
            write_whole(path, f"{process}\n")
        except OSError as error:  # a process that is not noted could not be ended later
            raise WorkersUnavailable(f"{path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class AgentCommands:
    """Shell commands by which the master reaches into the agent's directory on `node`."""

    run_id: str
    node: str

    def signal(self, signal: str, *, processes: str = "*") -> str:
        """Send a signal (KILL, STOP, …) to the agent and its workers; fails if there are none.

        `processes` selects some of them: `agent`, `worker0`, a shell's pattern, or `fork_server`, which forks the
        workers of all nodes of a machine.
        """
        chosen = "../fork" if processes == "fork_server" else processes
        return _in_shell(f"{self._enter} && kill -{signal} $({_pids(chosen)})")

    def kill(self) -> str:
        """Kill the agent and its workers; fails if there are none, or if one still lives after some seconds."""
        return _in_shell(f"{self._enter} && {_KILL}")

    def slow(self, factor: float) -> str:
        """Make the workers take `factor` times as long as usual; 1 restores their speed."""
        workers = _pids("worker*")
        run_s = _SLOW_PERIOD_S / factor
        # The loop stops and continues the workers. It ends with them, with the agent, and with the next such command.
        loop = (
            f"{_NOTE_SELF} >slow.pid; while [ -e slow.pid ] && kill -STOP $({workers}); "
            f"do sleep {_SLOW_PERIOD_S - run_s:.4f}; kill -CONT $({workers}); sleep {run_s:.4f}; done"
        )
        begin = f"sh -c {shlex.quote(loop)} oobleck-slow" if factor > 1 else "true"
        end = f"kill -KILL $({_pids('slow')}); rm -f slow.pid; kill -CONT $({workers})"
        return _in_shell(f"{self._enter} && {{ {end}; {begin} & }} </dev/null >/dev/null 2>&1")

    def is_alive(self) -> str:
        """Succeed if the agent lives."""
        return _in_shell(f'{self._enter} && [ -n "$({_pids("agent")})" ]')

    def answer(self) -> str:
        """Print the answer of a living agent, which says where to reach it; fails if there is none."""
        # No Python: on a machine with many training nodes its start would dominate a new master's.
        return _in_shell(f'{self._enter} && [ -n "$({_pids("agent")})" ] && cat agent.json')

    def end(self) -> str:
        """End the node's remaining processes, and remove its directory."""
        return _in_shell(self._end)

    def clean(self) -> str:
        """Like `end`, and remove the run's directory and unused memory too, unless other nodes use them."""
        run = shlex.quote(self.run_id)
        has_nodes = "ls | grep -Eqvx 'fork[.](lock|pid|sock|warm)'"
        # A fork server without agents ends and removes its files, unless it was killed (or stopped, hence CONT).
        left = f"rm -f fork.lock; kill -CONT $({_pids('fork')}) || rm -f fork.pid fork.sock fork.warm"
        remove = f'(cd {run} && {{ {has_nodes} || {{ {left}; }}; }}); rmdir {run}; cd / && rmdir "$base"'
        # A node on which nothing could start has nothing but its owner's note in memory.
        forget = self._remove_memory(f'[ "$(ls -A {self._path})" = {MEMORY_OWNER} ] && rm -r {self._path}')
        return _in_shell(f"{self._end}; {_OURS} && {{ {remove}; }}; {forget}; true")

    def forget(self, *, keeps_only_copy: bool = False) -> str:
        """Remove the memory with the node's states, unless `keeps_only_copy` and it is marked as the only copy."""
        unless_marked = f"[ -e {self._path}/{ONLY_COPY} ] || " if keeps_only_copy else ""
        return _in_shell(f"{self._remove_memory(f'{unless_marked}rm -rf {self._path}')}; true")

    @property
    def _path(self) -> str:
        return f"{shlex.quote(self.run_id)}/{shlex.quote(_directory_name(self.node))}"

    @property
    def _enter(self) -> str:
        return f"{_OURS} && cd {self._path}"

    @property
    def _end(self) -> str:
        return f"({_OURS} && {{ (cd {self._path} && {_KILL}); rm -rf {self._path}; }})"

    def _remove_memory(self, remove: str) -> str:
        remove_all = f'{remove}; rmdir {shlex.quote(self.run_id)}; cd / && rmdir "$base"'
        return f"base={_MEMORY}/oobleck-$(id -u); {_ENTER_BASE} && {{ {remove_all}; }}"


def end_here(run_id: str, temporary: Path) -> None:
    """End what a run without a master has left of its nodes on this machine, whose sockets are below `temporary`."""
    for node in (temporary / f"oobleck-{os.getuid()}" / run_id).glob("*/"):
        command = ["/bin/sh", "-c", AgentCommands(run_id, node.name).clean()]
        subprocess.run(command, env={**os.environ, "TMPDIR": str(temporary)}, check=False)


# --- pieces of commands for a POSIX shell -----------------------------------------------------------------------

# Anyone may have created that name in a shared directory, so $base is entered only if it is ours.
_ENTER_BASE = '[ -d "$base" ] && [ ! -L "$base" ] && [ -O "$base" ] && cd "$base"'

# This is the directory of all this user's runs on the node; a node may have none yet.
_OURS = f"{TEMPORARY_DIRECTORY_SHELL}; base=$temporary/oobleck-$(id -u); {_ENTER_BASE}"

# The name in the kernel's status may hold spaces and brackets, so only what follows the last `) ` is split: then $1 is
# the state of process $p, and ${20} its start.
_STAT = """stat=$(cat "/proc/$p/stat"); set -- ${stat##*') '}"""

_BOOT = "/proc/sys/kernel/random/boot_id"
_NOTE_SELF = f'p=$$; {_STAT}; echo "$p ${{20}} $(cat {_BOOT})"'


def _in_shell(script: str) -> str:
    # The user's login shell may be any, so another one runs the script.
    return f"exec /bin/sh -c {shlex.quote(script)} 2>/dev/null"


def _pids(processes: str) -> str:
    """Return a script that prints, in the agent's directory, the pids of living processes that are noted there."""
    # Another process may have a noted pid by now; it has another start.
    return (
        f'read -r boot <{_BOOT} || boot=unknown; for f in ./{processes}.pid; do [ -r "$f" ] || continue; '
        f'read -r p began when <"$f"; {_STAT}; '
        '[ "$1" != Z ] && [ "${20}" = "$began" ] && [ "$when" = "$boot" ] && echo "$p"; done; true'
    )


# A killed process keeps its memory and sockets for a moment, so this also waits until all of them are gone.
_KILL = (
    f'killed=$({_pids("*")}) && [ -n "$killed" ] && {{ kill -KILL $killed; n=0; until [ -z "$({_pids("*")})" ]; '
    f"do [ $n -lt {_END_POLLS} ] || exit 1; n=$((n + 1)); sleep {_END_POLL_S}; done; }}"
)


def _directory_name(node: str) -> str:
    """Return a node's name, cut if it is too long for a socket's path."""
    if len(node) <= _MAX_NAME_CHARS:
        return node
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"{node[: _MAX_NAME_CHARS - 9]}-{digest}"
