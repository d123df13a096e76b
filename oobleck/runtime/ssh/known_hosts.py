"""Which host keys are trusted: those in ssh's own files, the user's and the machine's.

asyncssh alone reads fewer of them than ssh does, and takes `UserKnownHostsFile none` for leave to check nothing. It
would also parse every key of every file for each connection, which with a file for thousands of nodes blocks the
master for minutes. So files are indexed once, and asyncssh gets the lines that a host may match: what they mean is
its business.
"""

from __future__ import annotations

import binascii
import hmac
import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import asyncssh

__all__ = ["HostKeyFiles", "KnownHosts", "find_known_hosts"]

_USER_FILES = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_FILES = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_MARKERS = ("@cert-authority", "@revoked")
_SIGNS_OF_A_PATTERN = frozenset("*?|/!")


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

    def knows_host(self, files: HostKeyFiles) -> bool:
        """Whether any key of this host is there. Raises OSError or ValueError for broken files."""
        host_keys, authorities, *_ = files.trusted(self.readable).match(self.host, "", self.port)
        return bool(host_keys or authorities)

    def as_option(self, files: HostKeyFiles) -> asyncssh.SSHKnownHosts | bytes:
        """The value of asyncssh's `known_hosts`; without any file nothing is trusted."""
        return files.trusted(self.readable) if self.readable else b""


class HostKeyFiles:
    """The known_hosts files as they were when they were read last. One that has changed is read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], _Index]] = {}

    def trusted(self, paths: Sequence[Path]) -> asyncssh.SSHKnownHosts:
        """What asyncssh is to look hosts up in. Raises OSError or ValueError for broken files, then or now."""
        for path in paths:
            self.index_of(path)
        return _Trusted(self, paths)

    def index_of(self, path: Path) -> _Index:
        """Return a file's index; O(lines) where the file is new or has changed. Raises OSError or ValueError."""
        told = path.stat()
        version = (told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns)
        known = self._known.get(path)
        if known is None or known[0] != version:
            known = self._known[path] = version, _Index(path.read_text(encoding="utf-8"))
        return known[1]


class _Trusted(asyncssh.SSHKnownHosts):
    """Files in ssh's order, of which asyncssh parses the lines that matter."""

    def __init__(self, files: HostKeyFiles, paths: Sequence[Path]) -> None:
        super().__init__()
        self._files = files
        self._paths = paths

    def match(self, host: str, addr: str, port: int | None) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
        names = {name for name in (host, addr) if name}
        if port:
            names |= {f"[{name}]:{port}" for name in names}
        lines = (line for path in self._paths for line in self._files.index_of(path).lines_for(sorted(names)))
        return asyncssh.import_known_hosts("\n".join(lines)).match(host, addr, port)


class _Index:
    """The lines of one file by the names that they are for. What has no plain name may be for any host."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines()
        self._by_name: defaultdict[str, list[int]] = defaultdict(list)
        self._hashed: list[tuple[bytes, bytes, int]] = []
        """The lines of which nobody knows yet for whom they are: (salt, hash, number)."""
        self._searched: set[str] = set()
        """The names whose hashed lines are known."""
        self._always: list[int] = []
        for number, line in enumerate(self._lines):
            words = line.split(None, 2)
            if not words or words[0].startswith("#"):
                continue
            pattern = words[1] if words[0] in _MARKERS and len(words) > 1 else words[0]
            if (hashed := _hashed(pattern)) is not None:
                self._hashed.append((*hashed, number))
            elif _SIGNS_OF_A_PATTERN.isdisjoint(pattern) and not pattern.startswith("@") and len(words) > 1:
                for name in pattern.split(","):
                    self._by_name[name].append(number)
            else:
                self._always.append(number)  # a pattern, or nonsense, of which asyncssh is to complain

    def lines_for(self, names: Iterable[str]) -> list[str]:
        """Return the lines that may be for one of the names, in the file's order; O(hashed lines) for a new name."""
        found = {*self._always}
        for name in names:
            if name not in self._searched:
                self._search(name)
            found.update(self._by_name.get(name, ()))
        return [self._lines[number] for number in sorted(found)]

    def _search(self, name: str) -> None:
        """Find a name's hashed lines. A hash is of one name: no other one is compared with what was found."""
        self._searched.add(name)
        value = name.encode()
        numbers = {number for salt, digest, number in self._hashed if hmac.digest(salt, value, "sha1") == digest}
        if numbers:
            self._by_name[name] += numbers
            self._hashed = [line for line in self._hashed if line[2] not in numbers]


def _hashed(pattern: str) -> tuple[bytes, bytes] | None:
    """The salt and the hash of a host name that is hashed; None for anything else."""
    words = pattern.split("|")
    if len(words) != 4 or words[:2] != ["", "1"]:
        return None
    try:
        return binascii.a2b_base64(words[2]), binascii.a2b_base64(words[3])
    except binascii.Error:
        return None


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
