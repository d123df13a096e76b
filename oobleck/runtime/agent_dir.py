"""An agent's own directory on its node: its socket, and the ids of the processes it answers for.

Only its user can read it. It lies in the system's temporary directory, because the path of a UNIX socket must be
short and the home directory may be shared between nodes.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "AgentDir",
    "clean_command",
    "end_command",
    "forget_command",
    "has_living_agents",
    "is_alive_command",
    "kill_command",
    "signal_command",
    "slow_command",
]


_MEMORY = "/dev/shm"  # noqa: S108  memory that outlives its processes; the directory in it is ours alone
_MAX_NAME_CHARS = 24
"""Of a node in a path: with the longest tag and user id, sockets in /tmp stay below the limit of 107 bytes."""

_SLOW_PERIOD_S = 0.1
"""How often a slowed worker is stopped and continued."""


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
        return Path(tempfile.gettempdir()) / f"oobleck-{os.getuid()}" / self.run_id

    @property
    def path(self) -> Path:
        return self.job_path / _directory_name(self.node)

    @property
    def socket(self) -> Path:
        return self.path / "agent.sock"

    @property
    def fork_server_socket(self) -> Path:
        return self.job_path / "fork.sock"

    @property
    def fork_server_pid(self) -> Path:
        return self.job_path / "fork.pid"

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
        """Where the process id of the agent (`agent`) or of a worker (`worker0`) is noted."""
        return self.path / f"{role}.pid"

    def create(self) -> None:
        """Make the directory, readable by its user alone. Raises PermissionError when somebody else owns it."""
        for path in (self.job_path.parent, self.job_path, self.path):
            path.mkdir(mode=0o700, exist_ok=True)
            if path.stat().st_uid != os.getuid():
                raise PermissionError(f"{path} belongs to another user; remove it, or set TMPDIR")
            path.chmod(0o700)


def has_living_agents(run_id: str) -> bool:
    """Whether an agent of a run lives on this machine."""
    return any(map(_is_ours, AgentDir(run_id, "any").job_path.glob("*/agent.pid")))


def _is_ours(pid_file: Path) -> bool:
    """Whether the process lives whose id is noted there, and is one of ours: after a reboot it may be another's."""
    try:
        return b"oobleck" in Path(f"/proc/{int(pid_file.read_text())}/cmdline").read_bytes()
    except (OSError, ValueError):
        return False


def signal_command(run_id: str, node: str, signal: str, *, processes: str = "*") -> str:
    """A shell command that sends a signal (KILL, STOP, …) to the node's agent and workers; fails if there are none.

    `processes` chooses among them: `agent`, `worker0`, or a shell's pattern; or it is `fork_server`, which forks the
    workers of all nodes of a machine.
    """
    chosen = "../fork" if processes == "fork_server" else processes
    return f"(cd {_directory(run_id, node)} && kill -{signal} $({_pids(chosen)})) 2>/dev/null"


def kill_command(run_id: str, node: str) -> str:
    """A shell command that kills the agent and the workers of a node at once."""
    return f"{signal_command(run_id, node, 'KILL')}; true"


def slow_command(run_id: str, node: str, factor: float) -> str:
    """A shell command after which the workers of a node take `factor` times as long as usual; 1 is their usual speed.

    A loop on the node stops and continues them. It ends with them, with the agent, and with the next such command.
    """
    workers = _pids("worker*")
    run_s = _SLOW_PERIOD_S / factor
    loop = (
        f"echo $$ >slow.pid; while [ -e slow.pid ] && kill -STOP $({workers}); "
        f"do sleep {_SLOW_PERIOD_S - run_s:.4f}; kill -CONT $({workers}); sleep {run_s:.4f}; done"
    )
    begin = f"sh -c {shlex.quote(loop)} oobleck-slow" if factor > 1 else "true"
    end = f"kill -KILL $({_pids('slow')}); rm -f slow.pid; kill -CONT $({workers})"
    return f"cd {_directory(run_id, node)} && {{ {end}; {begin} & }} </dev/null >/dev/null 2>&1"


def is_alive_command(run_id: str, node: str) -> str:
    """A shell command that succeeds where the agent of a node lives."""
    return f'cd {_directory(run_id, node)} 2>/dev/null && [ -n "$({_pids("agent")})" ]'


def end_command(run_id: str, node: str) -> str:
    """A shell command that ends what is left of a node's processes, and removes its directory.

    What nodes of this machine share stays, for others of them may just be starting.
    """
    return f"{kill_command(run_id, node)}; rm -rf {_directory(run_id, node)}"


def clean_command(run_id: str, node: str) -> str:
    """Like `end_command`; removes the run's directory as well, unless others use it."""
    job = f'"{_base()}"/{shlex.quote(run_id)}'
    return (
        f'{end_command(run_id, node)}; rm -f {job}/fork.lock {job}/fork.pid; rmdir {job} "{_base()}" 2>/dev/null; true'
    )


def _pids(processes: str) -> str:
    """A shell command, for the agent's directory, that prints the ids of living processes of ours.

    Ids that were noted before a reboot may be others' now.
    """
    return f'for p in $(cat ./{processes}.pid 2>/dev/null); do grep -qsa oobleck "/proc/$p/cmdline" && echo "$p"; done'


def _directory(run_id: str, node: str) -> str:
    return f'"{_base()}"/{shlex.quote(run_id)}/{shlex.quote(_directory_name(node))}'


def forget_command(run_id: str, node: str) -> str:
    """A shell command that gives back the memory in which a node keeps states."""
    run = f'"{_MEMORY}/oobleck-$(id -u)"/{shlex.quote(run_id)}'
    return f'rm -rf {run}/{shlex.quote(_directory_name(node))}; rmdir {run} "$(dirname {run})" 2>/dev/null; true'


def _base() -> str:
    return "${TMPDIR:-/tmp}/oobleck-$(id -u)"


def _directory_name(node: str) -> str:
    """A node's name, cut where it is too long to be part of a socket's path."""
    if len(node) <= _MAX_NAME_CHARS:
        return node
    digest = hashlib.sha256(node.encode()).hexdigest()[:8]
    return f"{node[: _MAX_NAME_CHARS - 9]}-{digest}"
