"""The logs of a node: its agent's, with the lines of its workers, and the output of a script's ranks.

A shell on the node lists and reads them, so that it needs nothing else there; so does this machine's for its own files.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePosixPath

from oobleck.errors import UsageError

MOST_LOG_BYTES = 1 << 20
"""How much of a log is read at once."""
_RANK_LOG = re.compile(r"ranks/[^/]+/attempt_([0-9]+)/[0-9]+/std(?:out|err)\.log")


def agent_log(node: str) -> str:
    """Return the name of an agent's log in the directory of its run."""
    return f"agent-{node}.log"


def path_in_shell(path: PurePosixPath) -> str:
    """Return a path for a shell, which knows the home directory that `~` stands for."""
    text = str(path)
    return f'"$HOME"/{shlex.quote(text[2:])}' if text.startswith("~/") else shlex.quote(text)


@dataclass(frozen=True, slots=True)
class NodeLogs:
    """Shell commands about the logs of `node` in the run's directory there."""

    directory: PurePosixPath
    node: str

    def list(self) -> str:
        """Print the size and the name of each log; `parse_list` reads that. Fails if there is no such directory."""
        ranks = f"ranks/{shlex.quote(self.node)}/attempt_*/*"
        names = f"{shlex.quote(agent_log(self.node))} {ranks}/stdout.log {ranks}/stderr.log"
        return self._inside(f"wc -c {names} 2>/dev/null; true")

    def read(self, name: str, offset: int) -> str:
        """Print up to `MOST_LOG_BYTES` of a log from `offset` on. Raises UsageError for a file that is no log."""
        if name != agent_log(self.node) and not (
            _RANK_LOG.fullmatch(name) and PurePosixPath(name).parts[1] == self.node
        ):
            raise UsageError(f"{name} is no log of {self.node}")
        return self._inside(f"tail -c +{offset + 1} {shlex.quote(name)} | head -c {MOST_LOG_BYTES}")

    def _inside(self, script: str) -> str:
        return f"exec /bin/sh -c {shlex.quote(f'cd {path_in_shell(self.directory)} && {{ {script}; }}')}"


def parse_list(printed: bytes) -> dict[str, int]:
    """Return the sizes of logs by name: the agent's, and those of the newest start of the ranks."""
    sizes: dict[str, int] = {}
    for line in printed.decode(errors="replace").splitlines():
        size, _, name = line.strip().partition(" ")
        if name != "total" and size.isdecimal():
            sizes[name] = int(size)
    attempts = {name: int(match[1]) for name in sizes if (match := _RANK_LOG.fullmatch(name))}
    newest = max(attempts.values(), default=0)
    return {name: size for name, size in sorted(sizes.items()) if attempts.get(name, newest) == newest}
