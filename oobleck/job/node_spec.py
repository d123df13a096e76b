"""The nodes that a user names for a job: how to reach each, and what it has."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from oobleck.errors import ConfigError

DEFAULT_KIND = "default"
"""The name of devices that no line of a hostfile names."""
_KIND_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,63}")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """One line of the hostfile: how to reach a node, and which of its devices to use."""

    name: str
    """Unique in the job: the host, or host#2, host#3, … if the host appears again."""
    host: str
    devices: tuple[int, ...] = (0,)
    port: int | None = None
    """None leaves it to ~/.ssh/config."""
    user: str | None = None
    address: str | None = None
    """Process groups listen there: at an address of the node, its name, or one of its network interfaces. None is the
    address by which SSH reached it."""
    origin: str = ""
    """The scheduler's job that it comes from, for people: `Slurm's job 17`. Empty if a user has named the node."""
    device: str = DEFAULT_KIND
    """The name of its devices; nodes with other devices compute at another speed."""
    domain: str = ""
    """Nodes of the same one may fail together (a rack, a zone); empty if the user has named none."""

    @property
    def failure_domain(self) -> str:
        """What may fail as a whole: its domain, or its machine."""
        return f"domain {self.domain}" if self.domain else self.host

    @property
    def num_devices(self) -> int:
        return len(self.devices)

    @property
    def kind(self) -> str:
        """A name, as `A40` or `A100×8`, for all nodes with as many devices of the same name."""
        return self.device if self.num_devices == 1 else f"{self.device}×{self.num_devices}"


def relocated(node: NodeSpec, specs: Mapping[str, NodeSpec]) -> NodeSpec:
    """Return a node, reached as a spec of its name says now, if there is one."""
    # Running workers and the plans of earlier masters count on the devices, so these stay as they were.
    return replace(specs.get(node.name, node), device=node.device, devices=node.devices)


def check_kind_name(name: str) -> None:
    """Raise ConfigError for a bad name of a node's devices."""
    # A number alone is a typing error: it belongs to `devices`.
    if not _KIND_NAME.fullmatch(name) or name.isdecimal():
        raise ConfigError(
            f"{name!r} is not a name of a kind of devices; use letters, digits, '.', '_', '+' and '-', at most 64, as "
            "in A100"
        )
