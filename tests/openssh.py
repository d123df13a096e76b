"""A real OpenSSH server on a loopback port, with host keys, users' keys and files of its own.

It changes nothing outside its directory, and `oobleck` reaches it by an ssh config file, as it would a cluster.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

SSHD = "/usr/sbin/sshd"

REPOSITORY = Path(__file__).parents[1]

_START_TIMEOUT_S = 10.0
_END_TIMEOUT_S = 5.0

_SERVER_CONFIG = """\
ListenAddress {host}:{port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
{more}
AllowStreamLocalForwarding yes
SetEnv {environment}
"""

_HOST_CONFIG = """\
Host {names}
  HostName {host}
  Port {port}
  IdentityFile {directory}/client_key
  UserKnownHostsFile {directory}/known_hosts
"""


def why_not() -> str | None:
    """Why no OpenSSH server can be started here; None when one can."""
    if not Path(SSHD).exists():
        return f"there is no {SSHD}"
    if shutil.which("ssh-keygen") is None:
        return "there is no ssh-keygen"
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        return "there is no /run/sshd, which sshd needs when it is started by root"
    return None


needs_openssh = pytest.mark.skipif(why_not() is not None, reason=str(why_not()))


@dataclass(frozen=True)
class OpenSSH:
    """A server under way."""

    directory: Path
    port: int
    process: psutil.Process
    host: str = "127.0.0.1"

    @property
    def client_key(self) -> Path:
        return self.directory / "client_key"

    @property
    def known_hosts(self) -> Path:
        return self.directory / "known_hosts"

    @property
    def log(self) -> str:
        return (self.directory / "log").read_text()

    def host_config(self, names: Sequence[str]) -> str:
        """The part of an ssh config file by which these names reach the server."""
        return _HOST_CONFIG.format(names=" ".join(names), host=self.host, port=self.port, directory=self.directory)

    def kill_sessions(self) -> None:
        """Kill the processes that serve open connections; what they have started lives on."""
        for session in self.process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it ended by itself meanwhile
                if session.name().startswith("sshd"):
                    _end_session(session)

    def kill(self) -> None:
        """Kill the server with its sessions."""
        self.kill_sessions()
        _end(self.process)


@contextmanager
def serve_openssh(
    directory: Path,
    *,
    environment: Mapping[str, str] | None = None,
    more_config: str = "",
    host: str = "127.0.0.1",
    within: Sequence[str] = (),
) -> Iterator[OpenSSH]:
    """Serve on a free port until the context ends; `environment` is that of every session.

    Sessions have a home directory of their own: bash reads ~/.bashrc for sshd's commands too, and what users do there
    (pyenv waits for a lock) takes as long as it takes.

    `within` is a command that runs others where `host` is an address of theirs, in a network namespace for instance.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    _make_keys(directory)
    sessions = {"HOME": str(directory), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", **(environment or {})}
    settings = " ".join(f"{name}={value}" for name, value in sessions.items())
    server = _start(directory, settings, more_config, host, within)
    key = (directory / "host_key.pub").read_text()
    server.known_hosts.write_text(f"[{host}]:{server.port} {key}")
    try:
        yield server
    finally:
        server.kill()


def make_key(path: Path) -> None:
    """Make a key pair without a passphrase: `path` and `path`.pub."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _make_keys(directory: Path) -> None:
    for name in ("host_key", "client_key"):
        make_key(directory / name)
    shutil.copy(directory / "client_key.pub", directory / "authorized_keys")


def _start(directory: Path, environment: str, more: str, host: str, within: Sequence[str]) -> OpenSSH:
    """Start the server; the port is tried again where somebody else was quicker to take it."""
    for _ in range(3):
        port = free_port()
        config = directory / "sshd_config"
        text = _SERVER_CONFIG.format(host=host, port=port, directory=directory, environment=environment, more=more)
        config.write_text(text)
        log = directory / "log"
        log.unlink(missing_ok=True)
        command = [*within, SSHD, "-D", "-f", str(config), "-E", str(log)]
        process = psutil.Popen(command, stdin=subprocess.DEVNULL)
        if _listens(log, process):
            return OpenSSH(directory, port, process, host)
        _end(process)
    raise AssertionError(f"sshd does not start: {(directory / 'log').read_text()}")


def _listens(log: Path, process: psutil.Process) -> bool:
    """Wait until the server says that it listens."""
    deadline_s = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if log.exists() and "Server listening on" in log.read_text():
            return True
        time.sleep(0.02)
    return False


def _end(process: psutil.Process) -> None:
    """Kill a process and wait for its end."""
    with suppress(psutil.NoSuchProcess):
        process.kill()
    process.wait(_END_TIMEOUT_S)


def _end_session(session: psutil.Process) -> None:
    """Kill a process that is no child of ours and wait for its end; it is for others to take note of it.

    Those are sshd and, where that has ended before, the machine's first process, which may let it wait for seconds.
    """
    with suppress(psutil.NoSuchProcess):
        session.kill()
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        while session.is_running() and session.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline_s, f"{session} was killed and lives"
            time.sleep(0.001)
