"""Which host keys are trusted: those that ssh's files, the user's and the machine's, list for the names it looks up.

asyncssh alone reads fewer of these files than ssh does. This module indexes them by the rules of sshd(8) and
ssh_config(5), and hands asyncssh the keys.
"""

from __future__ import annotations

import binascii
import hmac
import logging
import os
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import asyncssh
import trio

_log = logging.getLogger("oobleck.ssh")

_USER_FILES = ("~/.ssh/known_hosts", "~/.ssh/known_hosts2")
_GLOBAL_FILES = ("/etc/ssh/ssh_known_hosts", "/etc/ssh/ssh_known_hosts2")
_REVOKED = "@revoked"
_MARKERS = ("@cert-authority", _REVOKED)
_SIGNS_OF_A_PATTERN = frozenset("*?!")
_DEFAULT_PORT = 22
_ACCEPTING = ("accept-new", "no", "false", "off")  # ssh prints `false` for the last two
_POLICY_TIMEOUT_S = 5.0
_ANY = "host"  # the name under which asyncssh receives the matching keys


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownHosts:
    files: tuple[Path, ...]
    """Listed in ssh's order, whether they exist or not."""
    own: Path | None
    """The user's file, to which ssh adds keys."""
    names: tuple[str, ...]
    """Tried in this order; the first one with a key counts."""

    @property
    def readable(self) -> tuple[Path, ...]:
        return tuple(path for path in self.files if os.access(path, os.R_OK) and path.is_file())

    def knows_host(self, files: HostKeyFiles) -> bool:
        """Whether the files have any key of this host. Raises OSError for unreadable files."""
        host_keys, authorities, *_ = files.trusted(self.readable, self.names).match("", "", None)
        return bool(host_keys or authorities)

    def add(self, key: asyncssh.SSHKey, *, is_hashed: bool) -> None:
        """Add a host's key to the user's file. Raises OSError."""
        name, path = self.names[0], self.own
        assert path is not None
        if is_hashed:
            salt = os.urandom(20)
            pair = (salt, hmac.digest(salt, name.encode(), "sha1"))
            name = "|1|" + "|".join(binascii.b2a_base64(part, newline=False).decode() for part in pair)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One write, as other connections add theirs at the same time.
        with open(path, "ab", opener=lambda file, flags: os.open(file, flags, 0o600)) as file:
            file.write(name.encode() + b" " + key.export_public_key().strip() + b"\n")

    def as_option(self, files: HostKeyFiles) -> asyncssh.SSHKnownHosts | bytes:
        """Return asyncssh's `known_hosts` argument."""
        # Without any file, as with `UserKnownHostsFile none`, asyncssh by itself would check nothing.
        return files.trusted(self.readable, self.names) if self.readable else b""


class HostKeyFiles:
    """An index of each known_hosts file, renewed when the file changes."""

    def __init__(self) -> None:
        self._known: dict[Path, tuple[tuple[int, ...], _Index]] = {}

    def trusted(self, paths: Sequence[Path], names: Sequence[str]) -> asyncssh.SSHKnownHosts:
        """Return the keys for a host with these names. Raises OSError for unreadable files, now or when used."""
        for path in paths:
            self.index_of(path)
        return _Trusted(self, paths, names)

    def index_of(self, path: Path) -> _Index:
        """Return a file's index; O(lines) for a new or changed file. Raises OSError."""
        status = path.stat()
        # asyncssh would parse every key of every file for each connection, which blocks the master for minutes if a
        # file lists thousands of nodes.
        version = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        known = self._known.get(path)
        if known is None or known[0] != version:
            known = self._known[path] = version, _Index(path.read_text(encoding="utf-8", errors="replace"))
        return known[1]


class _Trusted(asyncssh.SSHKnownHosts):
    """The keys of one host, which asyncssh parses only when it needs them."""

    def __init__(self, files: HostKeyFiles, paths: Sequence[Path], names: Sequence[str]) -> None:
        super().__init__()
        self._files = files
        self._paths = paths
        self._names = names

    def match(self, host: str, addr: str, port: int | None) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
        """Return the keys for the host's own names."""
        # asyncssh would also trust the key of an address for any name, which ssh does not: anyone may answer there.
        lines: dict[str, None] = {}
        for name in self._names:
            lines |= {line: None for path in self._paths for line in self._files.index_of(path).lines_for(name)}
            if not all(line.startswith(_REVOKED) for line in lines):
                break
        return asyncssh.import_known_hosts("\n".join(lines)).match(_ANY, "", None)


class _Index:
    """The lines of one file, indexed by host name. Like ssh, it skips malformed lines."""

    def __init__(self, text: str) -> None:
        # All lines have `_ANY` in place of their names.
        self._lines: list[str] = []
        self._by_name: defaultdict[str, list[int]] = defaultdict(list)
        # These lines have host names that are not known yet: (salt, hash, number).
        self._hashed: list[tuple[bytes, bytes, int]] = []
        self._searched: set[str] = set()  # names whose hashed lines are known
        # These lines have patterns: (pattern, excluded pattern, number).
        self._patterns: list[tuple[re.Pattern[str], re.Pattern[str] | None, int]] = []
        for line in text.splitlines():
            words = line.split(None, 2)
            if words and words[0].startswith("@"):
                marker, words = words[0], " ".join(words[1:]).split(None, 1)
            else:
                marker, words = "", line.split(None, 1)
            if len(words) == 2 and not words[0].startswith("#") and marker in ("", *_MARKERS):
                self._note(words[0], len(self._lines))
                key = words[1].encode("ascii", "replace").decode()  # its comment may be in any encoding
                self._lines.append(f"{marker} {_ANY} {key}".lstrip())

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

    def lines_for(self, name: str) -> list[str]:
        """Return the lines for a name, in the file's order; O(patterns), and O(hashed lines) for a new name."""
        if name not in self._searched:
            self._search(name)
        numbers = {*self._by_name.get(name, ())}
        for yes, no, number in self._patterns:
            if yes.fullmatch(name) and not (no is not None and no.fullmatch(name)):
                numbers.add(number)
        return [self._lines[number] for number in sorted(numbers)]

    def _search(self, name: str) -> None:
        self._searched.add(name)
        value = name.encode()
        numbers = {number for salt, digest, number in self._hashed if hmac.digest(salt, value, "sha1") == digest}
        if numbers:
            self._by_name[name] += numbers
            # A hash belongs to one name, so no other name needs comparing with these lines.
            self._hashed = [line for line in self._hashed if line[2] not in numbers]


def _pattern(words: Iterable[str]) -> re.Pattern[str]:
    """Combine ssh's patterns, in which only `*` and `?` are special."""
    return re.compile("|".join(re.escape(word).replace(r"\*", ".*").replace(r"\?", ".") for word in words))


def _hashed(pattern: str) -> tuple[bytes, bytes] | None:
    """Return the salt and the hash of a hashed host name; None for anything else."""
    words = pattern.split("|")
    if len(words) != 4 or words[:2] != ["", "1"]:
        return None
    try:
        return binascii.a2b_base64(words[2]), binascii.a2b_base64(words[3])
    except binascii.Error:
        return None


def find_known_hosts(options: asyncssh.SSHClientConnectionOptions) -> KnownHosts:
    """Find where ssh looks a host's key up."""
    user_files = cast("Iterable[str]", options.config.get("UserKnownHostsFile", _USER_FILES))
    global_files = cast("Iterable[str]", options.config.get("GlobalKnownHostsFile", _GLOBAL_FILES))
    host, port = str(options.host).lower(), int(options.port)
    # An alias is the only name. At another port than 22, the bare name counts only if the one with the port has no key.
    if options.host_key_alias:
        names: tuple[str, ...] = (str(options.host_key_alias).lower(),)
    else:
        names = (host,) if port == _DEFAULT_PORT else (f"[{host}]:{port}", host)
    files = tuple(Path(name).expanduser() for name in (*user_files, *global_files))
    own = next((Path(name).expanduser() for name in user_files), None)
    return KnownHosts(files=files, own=own, names=names)


class NewHost(asyncssh.SSHClient):
    """Trusts the key that a host shows which no file knows, and adds it to the user's file."""

    def __init__(self, known_hosts: KnownHosts, *, is_hashed: bool) -> None:
        self._known_hosts = known_hosts
        self._is_hashed = is_hashed
        self._key: asyncssh.SSHKey | None = None

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self._key = key
        return True

    def begin_auth(self, username: str) -> None:
        """Called once the host has proved that the key is its own."""
        if self._key is None:
            return
        name = self._known_hosts.names[0]
        try:
            self._known_hosts.add(self._key, is_hashed=self._is_hashed)
        except OSError as error:
            _log.warning("the host key of %s is not added to %s: %s", name, error.filename, error.strerror)
        else:
            _log.info("the host key of %s is trusted from now on: %s", name, self._key.get_fingerprint())


async def new_host(known_hosts: KnownHosts, files: HostKeyFiles, ssh: Sequence[str]) -> NewHost | None:
    """Return a client that trusts an unknown host, if StrictHostKeyChecking in ssh's config says so; else None.

    `ssh` is the command that would connect to the host. Raises OSError for unreadable files.
    """
    # Without a file of the user's, ssh has no place for a new key and refuses it.
    if known_hosts.own is None or known_hosts.knows_host(files):
        return None
    # asyncssh does not read this option; ssh itself says what its config comes to.
    with trio.move_on_after(_POLICY_TIMEOUT_S):
        try:
            answer = await trio.run_process(
                [ssh[0], "-G", *ssh[1:]], capture_stdout=True, stderr=subprocess.DEVNULL, check=False
            )
        except FileNotFoundError:
            return None
        said = dict(line.split(" ", 1) for line in answer.stdout.decode(errors="replace").splitlines() if " " in line)
        if said.get("stricthostkeychecking") in _ACCEPTING:
            return NewHost(known_hosts, is_hashed=said.get("hashknownhosts") == "yes")
    return None
