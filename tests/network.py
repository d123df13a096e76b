"""Machines on a network of their own, as far as the kernel can tell, whose cables a test can cut.

Each machine is a network namespace with an OpenSSH server in it; a switch, in one more, joins them. Nothing of the
host's own network is changed.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from .openssh import OpenSSH, serve_openssh, why_not

MASTER = "master"


def ip(*words: str) -> None:
    """Run `ip`; raises subprocess.CalledProcessError with what it said."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=10)


def why_no_networks() -> str | None:
    """Why no networks can be made here; None when they can."""
    name = f"obtest{os.getpid()}"
    try:
        ip("netns", "add", name)
        try:
            ip("-n", name, "link", "add", "name", "left", "type", "veth", "peer", "name", "right")
            ip("-n", name, "link", "add", "name", "switch", "type", "bridge")
        finally:
            ip("netns", "del", name)
    except FileNotFoundError:
        return "there is no `ip` command"
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    return why_not()


_WHY_NOT = why_no_networks()

needs_networks = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))


@dataclass(frozen=True)
class Network:
    """Machines under way: a master's, which has no server, and the nodes'."""

    prefix: str
    temporary: Path
    """Holds a temporary directory for each node, named for it; its path is short, for sockets' paths are."""
    addresses: dict[str, str]
    servers: dict[str, OpenSSH]

    def on(self, machine: str) -> tuple[str, ...]:
        """What makes a command run on a machine."""
        return ("ip", "netns", "exec", self._namespace(machine))

    def unplug(self, machine: str) -> None:
        """Cut a machine off from all others."""
        ip("-n", self._namespace("switch"), "link", "set", "dev", machine, "down")

    def plug_in(self, machine: str) -> None:
        ip("-n", self._namespace("switch"), "link", "set", "dev", machine, "up")

    def cut(self, one: str, other: str) -> None:
        """Let nothing through between two machines that go on reaching all others."""
        for source, target in ((one, other), (other, one)):
            ip("-n", self._namespace(source), "route", "add", "blackhole", f"{self.addresses[target]}/32")

    def heal(self, one: str, other: str) -> None:
        for source, target in ((one, other), (other, one)):
            ip("-n", self._namespace(source), "route", "del", "blackhole", f"{self.addresses[target]}/32")

    def drop(self, source: str, target: str) -> None:
        """Lose what one machine sends to another; the other way all goes through."""
        self._change_filter("-A", source, target)

    def let_through(self, source: str, target: str) -> None:
        self._change_filter("-D", source, target)

    def _change_filter(self, action: str, source: str, target: str) -> None:
        rule = ("iptables", action, "OUTPUT", "-d", self.addresses[target], "-j", "DROP")
        subprocess.run([*self.on(source), *rule], check=True, capture_output=True, text=True, timeout=10)

    def _namespace(self, machine: str) -> str:
        return f"{self.prefix}-{machine}"


@contextmanager
def serve_network(directory: Path, nodes: Sequence[str]) -> Iterator[Network]:
    """Make the machines, and start their servers; each node has a temporary and a home directory of its own."""
    prefix = f"ob{os.getpid()}"
    addresses = {machine: f"10.77.0.{number}" for number, machine in enumerate((MASTER, *nodes), start=1)}
    with ExitStack() as stack:
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ob")))
        network = Network(prefix, temporary, addresses, {})
        switch = f"{prefix}-switch"
        _add(stack, switch)
        ip("-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        ip("-n", switch, "link", "set", "bridge", "up")
        for machine, address in addresses.items():
            _add(stack, f"{prefix}-{machine}")
            _connect(f"{prefix}-{machine}", switch, machine, address)
        for node in nodes:
            home = directory / node
            for path in (home, temporary / node):
                path.mkdir(mode=0o700)
            environment = {"TMPDIR": str(temporary / node), "HOME": str(home)}
            serving = serve_openssh(
                home / "ssh", environment=environment, host=addresses[node], within=network.on(node)
            )
            network.servers[node] = stack.enter_context(serving)
        yield network


def _add(stack: ExitStack, namespace: str) -> None:
    ip("netns", "add", namespace)
    stack.callback(_delete, namespace)
    ip("-n", namespace, "link", "set", "lo", "up")


def _delete(namespace: str) -> None:
    with suppress(subprocess.CalledProcessError):
        ip("netns", "del", namespace)


def _connect(namespace: str, switch: str, machine: str, address: str) -> None:
    """Lay a cable from a machine to the switch."""
    ip("-n", namespace, "link", "add", "name", "eth0", "type", "veth", "peer", "name", machine, "netns", switch)
    ip("-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "up")
    ip("-n", switch, "link", "set", "dev", machine, "master", "bridge", "up")
