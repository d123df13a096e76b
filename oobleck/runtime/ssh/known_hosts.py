"""Which host keys are trusted: those in ssh's own files, the user's and the machine's, for the names that ssh looks up.

asyncssh alone reads fewer of them than ssh does, and takes `UserKnownHostsFile none` for leave to check nothing. It
trusts the key of an address for any name, which ssh does not: who answers at the address of a node may be anybody. It
would also parse every key of every file for each connection, which with a file for thousands of nodes blocks the
master for minutes. So files are indexed once, by the rules of sshd(8) and ssh_config(5), and asyncssh gets the keys.
"""

from __future__ import annotations

import binascii
import hmac
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import asyncssh

_USER_FILES = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_FILES = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_REVOKED = "@revoked"
_MARKERS = ("@cert-authority", _REVOKED)
_SIGNS_OF_A_PATTERN = frozenset("*?!")
_DEFAULT_PORT = 22
_ANY = "host"  # the name under which asyncssh gets the keys that count


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHosts:
    """The files to look a host up in, and the names that it has there."""

    files: tuple[Path, ...]
    """In ssh's order, whether they exist or not."""
    names: tuple[str, ...]
    """The first that has a key counts."""

    @property
    def readable(self) -> tuple[Path, ...]:
        return tuple(path for path in self.files if os.access(path, os.R_OK) and path.is_file())

    def knows_host(self, files: HostKeyFiles) -> bool:
        """Whether any key of this host is there. Raises OSError for broken files."""
        host_keys, authorities, *_ = files.trusted(self.readable, self.names).match("", "", None)
        return bool(host_keys or authorities)

    def as_option(self, files: HostKeyFiles) -> asyncssh.SSHKnownHosts | bytes:
        """The value of asyncssh's `known_hosts`; without any file nothing is trusted."""
        return files.trusted(self.readable, self.names) if self.readable else b""


class HostKeyFiles:
    """The known_hosts files as they were when they were read last. One that has changed is read again."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], _Index]] = {}

    def trusted(self, paths: Sequence[Path], names: Sequence[str]) -> asyncssh.SSHKnownHosts:
        """What asyncssh is to find there for a host of these names. Raises OSError for broken files, then or now."""
        for path in paths:
            self.index_of(path)
        return _Trusted(self, paths, names)

    def index_of(self, path: Path) -> _Index:
        """Return a file's index; O(lines) where the file is new or has changed. Raises OSError."""
        told = path.stat()
        version = (told.st_dev, told.st_ino, told.st_size, told.st_mtime_ns)
        known = self._known.get(path)
        if known is None or known[0] != version:
            known = self._known[path] = version, _Index(path.read_text(encoding="utf-8", errors="replace"))
        return known[1]


class _Trusted(asyncssh.SSHKnownHosts):
    """Files in ssh's order, of which asyncssh parses the keys that count for one host."""

    def __init__(self, files: HostKeyFiles, paths: Sequence[Path], names: Sequence[str]) -> None:
        super().__init__()
        self._files = files
        self._paths = paths
        self._names = names

    def match(self, host: str, addr: str, port: int | None) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
        """Return the keys of the host's own names, whatever asyncssh asks for: an address has none to give."""
        lines: dict[_Line, None] = {}
        for name in self._names:
            lines |= {line: None for path in self._paths for line in self._files.index_of(path).lines_for(name)}
            if any(line.marker != _REVOKED for line in lines):
                break
        return asyncssh.import_known_hosts("\n".join(map(str, lines))).match(_ANY, "", None)


@dataclass(frozen=True, slots=True)
class _Line:
    """What a line says of the hosts that it is for."""

    marker: str
    key: str

    def __str__(self) -> str:
        key = self.key.encode("ascii", "replace").decode()  # a comment may be in any encoding
        return f"{self.marker} {_ANY} {key}".lstrip()


class _Index:
    """The lines of one file by the names that they are for. What ssh cannot read is passed over, as ssh does."""

    def __init__(self, text: str) -> None:
        self._lines: list[_Line] = []
        self._by_name: defaultdict[str, list[int]] = defaultdict(list)
        self._hashed: list[tuple[bytes, bytes, int]] = []
        """The lines of which nobody knows yet for whom they are: (salt, hash, number)."""
        self._searched: set[str] = set()  # the names whose hashed lines are known
        self._patterns: list[tuple[re.Pattern[str], re.Pattern[str] | None, int]] = []
        """The lines for names of a form: (those, but not these, number)."""
        for line in text.splitlines():
            words = line.split(None, 2)
            if words and words[0].startswith("@"):
                marker, words = words[0], " ".join(words[1:]).split(None, 1)
            else:
                marker, words = "", line.split(None, 1)
            if len(words) == 2 and not words[0].startswith("#") and marker in ("", *_MARKERS):
                self._note(words[0], len(self._lines))
                self._lines.append(_Line(marker, words[1]))

    def _note(self, names: str, number: int) -> None:
        if names.startswith("|"):
            if (hashed := _hashed(names)) is not None:
                self._hashed.append((*hashed, number))
        elif _SIGNS_OF_A_PATTERN.isdisjoint(names):
            for name in names.lower().split(","):
                self._by_name[name].append(number)
        else:
            words = names.lower().split(",")
            no = [word[1:] for word in words if word.startswith("!")]
            yes = [word for word in words if not word.startswith("!")]
            self._patterns.append((_pattern(yes), _pattern(no) if no else None, number))

    def lines_for(self, name: str) -> list[_Line]:
        """Return the lines for a name, in the file's order; O(patterns), and O(hashed lines) for a new name."""
        if name not in self._searched:
            self._search(name)
        found = {*self._by_name.get(name, ())}
        for yes, no, number in self._patterns:
            if yes.fullmatch(name) and not (no is not None and no.fullmatch(name)):
                found.add(number)
        return [self._lines[number] for number in sorted(found)]

    def _search(self, name: str) -> None:
        """Find a name's hashed lines. A hash is of one name: no other one is compared with what was found."""
        self._searched.add(name)
        value = name.encode()
        numbers = {number for salt, digest, number in self._hashed if hmac.digest(salt, value, "sha1") == digest}
        if numbers:
            self._by_name[name] += numbers
            self._hashed = [line for line in self._hashed if line[2] not in numbers]


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    """What matches any of ssh's patterns, in which `*` and `?` alone have a meaning."""
    return re.compile("|".join(re.escape(word).replace(r"\*", ".*").replace(r"\?", ".") for word in words))


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
    """Find where a host's key is looked up, by all that asyncssh and ssh's config say of the host.

    An alias is the name by itself. A host at another port than SSH's has a name of its own there, and one without the
    port that counts where that has no key.
    """
    user_files = cast("Iterable[str]", options.config.get("UserKnownHostsFile", _USER_FILES))
    global_files = cast("Iterable[str]", options.config.get("GlobalKnownHostsFile", _GLOBAL_FILES))
    host, port = str(options.host).lower(), int(options.port)
    if options.host_key_alias:
        names: tuple[str, ...] = (str(options.host_key_alias).lower(),)
    else:
        names = (host,) if port == _DEFAULT_PORT else (f"[{host}]:{port}", host)
    files = tuple(Path(name).expanduser() for name in (*user_files, *global_files))
    return KnownHosts(files=files, names=names)
