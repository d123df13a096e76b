"""SSH servers in front of the nodes of `control_plane.py`: the embedded one, in a process of its own, or OpenSSH's.

    python tools/bench/control_servers.py --nodes 256 --directory DIR

Nodes are reached as those of a hostfile are: by names that an ssh config resolves, with a key of the run's own, and
host keys from a known_hosts file.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import asyncssh
import trio

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.runtime.ssh import open_ssh_loop, serve_local_nodes

__all__ = ["Reach", "serve_embedded", "serve_openssh", "why_no_openssh"]

_SSHD = "/usr/sbin/sshd"
_HOST = "127.0.0.1"
_START_S = 60.0
_SSHD_CONFIG = """\
ListenAddress {host}:{port}
HostKey {directory}/host_key
AuthorizedKeysFile {directory}/client_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
MaxStartups {startups}
LogLevel ERROR
SetEnv TMPDIR={directory}
"""
"""All nodes are behind one server here, so it has to let in as many at once as many servers would."""
_CLIENT_CONFIG = """\
Host node*
  HostName {host}
  User {user}
  IdentityFile {directory}/client_key
  UserKnownHostsFile {directory}/known_hosts
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How nodes are reached: what `oobleck up` is given."""

    hostfile: Path
    config: Path


def why_no_openssh() -> str | None:
    """Why no OpenSSH server can be started here; None when one can."""
    if not Path(_SSHD).exists() or shutil.which("ssh-keygen") is None:
        return f"there is no {_SSHD}, or no ssh-keygen"
    if os.getuid() == 0 and not Path("/run/sshd").is_dir():
        return "there is no /run/sshd, which sshd needs when it is started by root"
    return None


@contextmanager
def serve_embedded(num_nodes: int, directory: Path) -> Iterator[Reach]:
    """Serve each node on a port of its own, by the SSH server of `--local`, until the context ends."""
    command = [sys.executable, __file__, "--nodes", str(num_nodes), "--directory", str(directory)]
    environment = {**os.environ, "TMPDIR": str(directory)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            ports = json.loads(server.stdout.readline())
            yield _write_reach(directory, ports, user="oobleck")
        finally:
            server.stdin.close()  # upon which it ends
            server.wait(_START_S)


@contextmanager
def serve_openssh(num_nodes: int, directory: Path) -> Iterator[Reach]:
    """Serve all nodes by one OpenSSH server until the context ends."""
    for name in ("host_key", "client_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)], check=True)
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
    config = directory / "sshd_config"
    config.write_text(_SSHD_CONFIG.format(host=_HOST, port=port, directory=directory, startups=4 * num_nodes))
    host_key = (directory / "host_key.pub").read_text()
    (directory / "known_hosts").write_text(f"[{_HOST}]:{port} {host_key}")
    with subprocess.Popen([_SSHD, "-D", "-f", str(config)], stdin=subprocess.DEVNULL) as server:
        try:
            _wait_until_it_listens(port)
            yield _write_reach(directory, [port] * num_nodes, user=os.environ.get("USER", "root"))
        finally:
            server.terminate()


def _wait_until_it_listens(port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection((_HOST, port)).close()
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.02)
        else:
            return


def _write_reach(directory: Path, ports: Sequence[int], *, user: str) -> Reach:
    reach = Reach(hostfile=directory / "hosts", config=directory / "ssh_config")
    reach.hostfile.write_text("".join(f"node{index} port={port}\n" for index, port in enumerate(ports)))
    reach.config.write_text(_CLIENT_CONFIG.format(host=_HOST, user=user, directory=directory))
    return reach


async def _serve(num_nodes: int, directory: Path) -> None:
    async with open_ssh_loop(), serve_local_nodes(num_nodes) as (nodes, options):
        (client_key,), (host_key,) = options.client_keys or (), options.host_keys or ()
        assert isinstance(client_key, asyncssh.SSHKey)
        client_key.write_private_key(directory / "client_key")
        public = host_key.export_public_key().decode()
        (directory / "known_hosts").write_text("".join(f"[{_HOST}]:{node.port} {public}" for node in nodes))
        print(json.dumps([node.port for node in nodes]), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    trio.run(_serve, arguments.nodes, arguments.directory)


if __name__ == "__main__":
    main()
