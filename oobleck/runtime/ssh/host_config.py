"""What ssh's own config says of a host, read as ssh reads it where asyncssh alone would not."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import asyncssh

from .asyncssh_adapter import await_asyncio

_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
"""These before asyncssh's own choice, unless ssh's config has one: a packet costs half of what ChaCha20 costs there."""
_ALGORITHMS = ("HostKeyAlgorithms", "KexAlgorithms", "Ciphers", "MACs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A host of a ProxyJump; None leaves a choice to what the config says of that host."""

    host: str
    port: int | None = None
    user: str | None = None

    @classmethod
    def parse(cls, text: str) -> Jump:
        """Read `[user@]host[:port]`, or `ssh://[user@]host[:port]`. Raises ValueError."""
        is_uri = text.startswith("ssh://")
        place = text.removeprefix("ssh://").removesuffix("/") if is_uri else text
        user, _, place = place.rpartition("@")
        if place.startswith("["):
            host, bracket, port = place[1:].partition("]")
            is_good = bool(bracket) and port[:1] in ("", ":")
        else:
            host, _, port = place.partition(":")
            is_good = True
        port = port.removeprefix(":")
        if not host or not is_good or not (port == "" or (port.isdecimal() and 0 < int(port) < 1 << 16)):
            raise ValueError(f"ProxyJump: {text!r} is not [USER@]HOST[:PORT]; an IPv6 address needs brackets")
        return cls(host=host, port=int(port) if port else None, user=(unquote(user) if is_uri else user) or None)


def jumps_of(found: asyncssh.SSHClientConnectionOptions) -> tuple[Jump, ...]:
    """Return the hosts that a host is reached through, the first to connect to first. Raises ValueError."""
    return tuple(Jump.parse(each.strip()) for each in str(found.tunnel).split(",")) if found.tunnel else ()


async def read_config(host: str, asked: dict[str, object]) -> asyncssh.SSHClientConnectionOptions:
    """Read what the config says of a host beyond what is `asked`; loads no keys, so that a missing one harms nothing.

    Raises ValueError or OSError.
    """
    # Without a word on the config asyncssh would read the user's own where it connects, and none here.
    options = {"config": (), **asked, "client_keys": None}
    return await await_asyncio(asyncssh.SSHClientConnectionOptions.construct, host=host, **options)


def keys_asked_for(found: asyncssh.SSHClientConnectionOptions, asked: dict[str, object]) -> dict[str, object]:
    """Return options for asyncssh by which it does with keys and ciphers what ssh does by the same config.

    A key or certificate that is not there is passed over. Where no key is, ssh tries those of its agent.
    """
    options: dict[str, object] = {"utf8_decode_errors": "replace"}  # of a banner
    if not found.config.get("Ciphers"):
        options["encryption_algs"] = _CIPHERS
    if "client_keys" not in asked and found.config.get("IdentityFile"):
        keys = _existing(found, "IdentityFile")
        if keys or _has_agent(found):
            options |= {"client_keys": keys, "ignore_encrypted": True}
    if found.config.get("CertificateFile"):
        options["client_certs"] = _existing(found, "CertificateFile")
    return options


def algorithms_asked_for(found: asyncssh.SSHClientConnectionOptions) -> tuple[str, ...]:
    """Return the options of the config that name algorithms: a server may have none of those."""
    return tuple(name for name in _ALGORITHMS if found.config.get(name))


def _existing(found: asyncssh.SSHClientConnectionOptions, option: str) -> list[Path]:
    """The files that an option names; a key's public half stands for one that only the agent has."""
    named = (Path(name).expanduser() for name in cast("Iterable[str]", found.config.get(option)))
    files = (path if path.exists() else Path(f"{path}.pub") for path in named)
    return [path for path in files if path.exists()]


def _has_agent(found: asyncssh.SSHClientConnectionOptions) -> bool:
    path = found.config.get("IdentityAgent") or os.environ.get("SSH_AUTH_SOCK", "")
    return bool(path) and Path(str(path)).expanduser().exists()


class ProxyCommand:
    """A proxy command that runs: its standard input and output are the connection, of which `socket` is our end.

    asyncssh could run it, as a process of asyncio: one that ends just when its connection is closed is then waited for
    twice, and the wait that comes too late ends the loop with all of its connections.
    """

    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError where it cannot be started."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                raise

    def end(self) -> None:
        """Kill it, with what it has started. Whoever was given the socket closes it."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
