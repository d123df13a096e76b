"""Which nodes share a machine, and how much of it each of their workers may use.

An agent reports its machine by the kernel's name for it; until then, the host's name is a guess. Two names may be one
machine, and two containers of a machine may each have limits of their own.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

from oobleck.control.protocol import Hello
from oobleck.job import NodeSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """What one worker of a node may use of its machine."""

    num_cores: int
    memory_bytes: int
    num_workers: int
    """The workers of the machine, this one included."""


_Key = tuple[str, ...]


class Machines:
    """Counts workers by what they share. Each change and query is O(devices and limits of a node)."""

    def __init__(self) -> None:
        self._placed: dict[str, tuple[NodeSpec, Hello | None]] = {}
        # Dicts in place of sets: their order is that of insertion, so `touched_by` is the same in every process.
        self._nodes: defaultdict[_Key, dict[str, None]] = defaultdict(dict)
        """The nodes whose agents have spoken, keyed by machine and by host."""
        self._names: defaultdict[_Key, Counter[_Key]] = defaultdict(Counter)
        """How often each machine has each host's name, and vice versa."""
        self._workers: Counter[_Key] = Counter()
        self._devices: defaultdict[_Key, Counter[int]] = defaultdict(Counter)

    def put(self, spec: NodeSpec, hello: Hello | None) -> None:
        """Replace what is known of a node; `hello` is None until its agent has spoken."""
        if spec.name in self._placed:
            self._count(*self._placed[spec.name], sign=-1)
        self._placed[spec.name] = spec, hello
        self._count(spec, hello, sign=1)

    def share(self, node: str) -> Share:
        """Return the share of each worker of a node whose agent has spoken; at least a core."""
        spec, hello = self._placed[node]
        assert hello is not None
        # Nodes whose agents have not spoken may be on this machine: their workers count until that is known.
        guessed = self._workers["guessed", spec.host]
        sharing = self._workers[_machine(spec, hello)] + guessed
        num_workers = sharing
        cores, memory = [hello.num_cores // sharing], [hello.memory_bytes // sharing]
        for limit in hello.limits:
            sharing = self._workers[_group(spec, hello, limit.group)] + guessed
            if limit.num_cores is not None:
                cores.append(limit.num_cores // sharing)
            if limit.memory_bytes is not None:
                memory.append(limit.memory_bytes // sharing)
        return Share(num_cores=max(1, min(cores)), memory_bytes=min(memory), num_workers=num_workers)

    def sharing_device(self, node: str) -> int:
        """Return how many workers compute on the most shared device of a node, over all nodes that see that device."""
        spec, hello = self._placed[node]
        known = [self._devices["guessed", spec.host]]
        if hello is not None:
            known.append(self._devices[_container(spec, hello)])
        return max(sum(devices[device] for devices in known) for device in spec.devices)

    def touched_by(self, node: str) -> tuple[str, ...]:
        """Return the other nodes whose share may have changed since this node's agent has spoken.

        There are none as long as the hosts' names were right; else it costs O(nodes of the machine).
        """
        spec, hello = self._placed[node]
        assert hello is not None
        machine, host = _machine(spec, hello), ("at", spec.host)
        if len(self._names[machine]) == len(self._names[host]) == 1 and not hello.limits:
            return ()
        return tuple(name for name in {**self._nodes[machine], **self._nodes[host]} if name != node)

    def _count(self, spec: NodeSpec, hello: Hello | None, *, sign: int) -> None:
        if hello is None:
            shared: list[_Key] = [("guessed", spec.host)]
            device_key = shared[0]
        else:
            machine, host = _machine(spec, hello), ("at", spec.host)
            shared = [machine, *(_group(spec, hello, limit.group) for limit in hello.limits)]
            device_key = _container(spec, hello)
            # Both ways, so that a machine with two names and a name of two machines are both noticed.
            for key, name in ((machine, host), (host, machine)):
                self._names[key][name] += sign
                self._names[key] = +self._names[key]  # unary plus drops the names that are not used any more
                if sign > 0:
                    self._nodes[key][spec.name] = None
                else:
                    del self._nodes[key][spec.name]
        for key in shared:
            self._workers[key] += sign * spec.num_devices
        for device in spec.devices:
            self._devices[device_key][device] += sign


def _machine(spec: NodeSpec, hello: Hello | None) -> _Key:
    """The machine of an agent; the one of its host's name where the agent cannot report it."""
    return ("machine", hello.machine) if hello is not None and hello.machine else ("host", spec.host)


def _group(spec: NodeSpec, hello: Hello, group: str) -> _Key:
    return ("group", *_machine(spec, hello), group)


def _container(spec: NodeSpec, hello: Hello) -> _Key:
    return ("container", *_machine(spec, hello), hello.container)
