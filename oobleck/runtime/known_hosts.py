"""Which host keys are trusted: those in ssh's own files, the user's and the machine's.

asyncssh alone reads fewer of them than ssh does, and takes `UserKnownHostsFile none` for leave to check nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import asyncssh

__all__ = ["KnownHosts", "find_known_hosts"]

_USER_FILES = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_FILES = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHosts:
    """The files to look a host up in, and the name that it has there."""

    files: tuple[Path, ...]
    """In ssh's order, whether they exist or not."""
    host: str
    port: int

    @property
    def readable(self) -> tuple[Path, ...]:
        return tuple(path for path in self.files if os.access(path, os.R_OK) and path.is_file())

    @property
    def knows_host(self) -> bool:
        """Whether any key of this host is there. Raises OSError or ValueError for broken files."""
        known = asyncssh.read_known_hosts([str(path) for path in self.readable])
        host_keys, authorities, *_ = known.match(self.host, "", self.port)
        return bool(host_keys or authorities)

    def as_option(self) -> list[str] | bytes:
        """The value of asyncssh's `known_hosts`; without any file nothing is trusted."""
        return [str(path) for path in self.readable] or b""


def find_known_hosts(options: asyncssh.SSHClientConnectionOptions) -> KnownHosts:
    """Find where a host's key is looked up, by all that asyncssh and ssh's config say of the host."""
    user_files = cast("Iterable[str]", options.config.get("UserKnownHostsFile", _USER_FILES))
    global_files = cast("Iterable[str]", options.config.get("GlobalKnownHostsFile", _GLOBAL_FILES))
    return KnownHosts(
        files=_expanded(*user_files, *global_files),
        host=str(options.host_key_alias or options.host),
        port=int(options.port),
    )


def _expanded(*names: str) -> tuple[Path, ...]:
    return tuple(Path(name).expanduser() for name in names)
