"""Reads ssh's config for a host the way ssh does, where asyncssh alone would not."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast
from urllib.parse import unquote

import asyncssh

from oobleck.host.process_group import signal_group

from .asyncssh_adapter import await_asyncio

# These are tried before asyncssh's own: a packet costs half as much as with ChaCha20.
_CIPHERS = "^aes128-gcm@openssh.com,aes256-gcm@openssh.com"
_ALGORITHMS = ("HostKeyAlgorithms", "KexAlgorithms", "Ciphers", "MACs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Jump:
    """A host of a ProxyJump; None leaves a choice to that host's own config."""

    host: str
    port: int | None = None
    user: str | None = None

    @classmethod
    def parse(cls, text: str) -> Jump:
        """Parse `[user@]host[:port]` or `ssh://[user@]host[:port]`. Raises ValueError."""
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


def jumps_of(resolved: asyncssh.SSHClientConnectionOptions) -> tuple[Jump, ...]:
    """Return the hosts of a ProxyJump in the order of connecting. Raises ValueError."""
    return tuple(Jump.parse(each.strip()) for each in str(resolved.tunnel).split(",")) if resolved.tunnel else ()


async def read_config(host: str, arguments: dict[str, object]) -> asyncssh.SSHClientConnectionOptions:
    """Resolve the config's options for a host, after asyncssh's `arguments`. Raises ValueError or OSError."""
    # Without a `config`, asyncssh reads the user's own when it connects, but none here. Loading no keys lets a missing
    # one do no harm.
    options = {"config": (), **arguments, "client_keys": None}
    return await await_asyncio(asyncssh.SSHClientConnectionOptions.construct, host=host, **options)


def key_arguments(resolved: asyncssh.SSHClientConnectionOptions, arguments: dict[str, object]) -> dict[str, object]:
    """Return arguments by which asyncssh treats the config's keys and ciphers as ssh does."""
    more: dict[str, object] = {"utf8_decode_errors": "replace"}  # a banner may be in any encoding
    if not resolved.config.get("Ciphers"):
        more["encryption_algs"] = _CIPHERS
    if "client_keys" not in arguments and resolved.config.get("IdentityFile"):
        keys = _existing(resolved, "IdentityFile")
        agent = resolved.config.get("IdentityAgent") or os.environ.get("SSH_AUTH_SOCK", "")
        # ssh ignores missing keys and certificates. If none of the keys exists, it tries its agent's.
        if keys or (agent and Path(str(agent)).expanduser().exists()):
            more |= {"client_keys": keys, "ignore_encrypted": True}
    if resolved.config.get("CertificateFile"):
        more["client_certs"] = _existing(resolved, "CertificateFile")
    return more


def configured_algorithms(resolved: asyncssh.SSHClientConnectionOptions) -> tuple[str, ...]:
    """Return the options that name algorithms in the config: a server may support none of these."""
    return tuple(name for name in _ALGORITHMS if resolved.config.get(name))


def _existing(resolved: asyncssh.SSHClientConnectionOptions, option: str) -> list[Path]:
    named = (Path(name).expanduser() for name in cast("Iterable[str]", resolved.config.get(option)))
    # A public half alone stands for a key that only the agent has.
    files = (path if path.exists() else Path(f"{path}.pub") for path in named)
    return [path for path in files if path.exists()]


class ProxyCommand:
    """A running proxy command, whose standard input and output are the other end of `socket`."""

    # asyncssh could run it as an asyncio process. But if that ends just as its connection is closed, it is waited for
    # twice, and the second wait ends the loop with all of its connections.
    def __init__(self, command: Sequence[str]) -> None:
        """Raises OSError if the command cannot be started."""
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
        """Kill the command and its children; the socket's owner closes the socket."""
        signal_group(self._process.pid)
        self._process.wait()
