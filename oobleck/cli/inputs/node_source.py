"""Where a command line takes nodes from, and the nodes that are known before anything starts."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from oobleck.errors import ConfigError, UsageError
from oobleck.host.user_path import expand_user
from oobleck.job import DEFAULT_KIND, MAX_NODES, NodeSpec
from oobleck.runtime.files import read_input

from .hostfile import parse_hostfile
from .kinds_option import KindCount, parse_local
from .options import NodeOptions

_MOST_PER_CORE = 32
_INTERVAL_S = 10.0
_LEAST_INTERVAL_S = 0.1
_POD_PORT = 7077
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*==?[A-Za-z0-9._-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    text: str
    specs: tuple[NodeSpec, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromHostfile(_Listed):
    path: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class FromCommand(_Listed):
    command: str
    interval_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Unlisted:
    """Nodes whose addresses are known only once they run."""

    @property
    def specs(self) -> tuple[NodeSpec, ...]:
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualOnes(_Unlisted):
    """Virtual nodes of this machine, in the order of their kinds."""

    kinds: tuple[KindCount, ...]

    @classmethod
    def alike(cls, count: int) -> VirtualOnes:
        """Return nodes that are all of one kind."""
        return cls(kinds=(KindCount(kind=DEFAULT_KIND, num_nodes=count, devices_per_node=None),))

    @property
    def count(self) -> int:
        return sum(kind.num_nodes for kind in self.kinds)

    @property
    def names(self) -> tuple[str, ...]:
        return _numbered(self.count)

    def shapes(self, *, num_spare: int, num_devices: int) -> tuple[tuple[str, int], ...]:
        """Return the kind and the number of devices of each node; that is `num_devices` unless the kind has its own."""
        each = [(kind.kind, kind.devices_per_node or num_devices) for kind in self.kinds]
        first = [shape for shape, kind in zip(each, self.kinds, strict=True) for _ in range(kind.num_nodes)]
        # Spare nodes follow, of each kind in turn.
        return (*first, *(each[number % len(each)] for number in range(num_spare)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listening(_Unlisted):
    host: str | None
    """None listens on all addresses of this machine."""
    port: int
    """0 takes any free one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialIn(_Listening):
    """Nodes that dial in by themselves, under names of their own."""

    count: int
    """The run begins with this many."""
    keys: Path | None = None
    """A directory of keys that were made beforehand; None makes keys."""
    pods: str | None = None
    """The labels of the pods on which they are, if they are on Kubernetes."""

    @property
    def names(self) -> tuple[str, ...]:
        """As many placeholders as there will be nodes."""
        return _numbered(self.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class FromSlurm(_Listening):
    """Nodes on which Slurm starts `oobleck node`: those of one job, or of all jobs of a name."""

    job_id: str | None
    job_name: str | None
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FromRay(_Listening):
    names: tuple[str, ...]


NodeSource = FromHostfile | FromCommand | VirtualOnes | DialIn | FromSlurm | FromRay


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"node{index}" for index in range(count))


def read_source(hostfile: Path | None, options: NodeOptions) -> NodeSource:
    """Read where nodes come from. Raises UserError."""
    local = parse_local(options.local) if isinstance(options.local, str) else options.local
    hosts_from, dial_in, num_nodes, keys = options.hosts_from, options.dial_in, options.num_nodes, options.keys
    if options.hosts_every is not None and hosts_from is None:
        raise UsageError("--hosts-every: it says how often --hosts-from runs; add that, or leave it out")
    others = (hostfile, local, hosts_from, num_nodes)
    if options.slurm or options.slurm_job is not None:
        if any(each is not None for each in others) or (options.slurm and options.slurm_job):
            raise UsageError("--slurm, or --slurm-job NAME, names all nodes; leave the others out")
        return _from_slurm(options.slurm_job, dial_in or "0")
    if options.ray:
        if any(each is not None for each in (*others, options.kubernetes, keys)):
            raise UsageError("--ray names all nodes; leave the others out")
        import trio

        from oobleck.runtime.launchers import ray_nodes

        host, port = _listening_place(dial_in or "0")
        return FromRay(host=host, port=port, names=trio.run(ray_nodes))
    if options.kubernetes is not None:
        if num_nodes is None:
            raise UsageError("--kubernetes needs --nodes N: the run begins once that many pods have dialled in")
        _check_selector(options.kubernetes)
        dial_in = dial_in or str(_POD_PORT)
    if sum(each is not None for each in (hostfile, local, hosts_from, dial_in)) != 1:
        raise UsageError(
            "name where the nodes come from, in one way: a hostfile, --hosts-from COMMAND, --dial-in PORT, --local N, "
            "--slurm, --slurm-job NAME, --ray or --kubernetes LABELS"
        )
    if (dial_in is None) != (num_nodes is None):
        raise UsageError("--dial-in and --nodes belong together: the run begins once that many nodes have dialled in")
    if keys is not None and dial_in is None:
        raise UsageError("--keys: these are for nodes that dial in; add --dial-in, or leave it out")
    if dial_in is not None and num_nodes is not None:
        host, port = _listening_place(dial_in)
        if not 1 <= num_nodes <= MAX_NODES:
            raise UsageError(f"--nodes: {num_nodes} nodes are not possible; it must be 1 to {MAX_NODES}")
        if keys is not None:
            from oobleck.runtime.launchers import read_keys

            read_keys(keys)  # raises for what is wrong with them
        return DialIn(host=host, port=port, count=num_nodes, keys=keys, pods=options.kubernetes)
    if hostfile is not None:
        text = read_input(hostfile, "hostfile")
        return FromHostfile(path=expand_user(hostfile).absolute(), text=text, specs=_specs(text, str(hostfile)))
    if hosts_from is not None:
        return _from_command(hosts_from, _INTERVAL_S if options.hosts_every is None else options.hosts_every)
    assert local is not None
    most = _MOST_PER_CORE * (os.cpu_count() or 1)
    source = VirtualOnes.alike(local) if isinstance(local, int) else VirtualOnes(kinds=local)
    if not 1 <= source.count <= most:
        raise UsageError(f"--local: {source.count} nodes are not possible here; it must be 1 to {most}")
    return source


def _from_command(command: str, interval_s: float) -> FromCommand:
    """Run the command once. Raises ConfigError if it fails or names no node."""
    if interval_s < _LEAST_INTERVAL_S:
        raise UsageError(f"--hosts-every: {interval_s:g} s is not possible; it must be at least 100ms")
    import trio

    from oobleck.runtime.launchers import HostsCommand

    asked = HostsCommand(command=command)
    text = trio.run(asked.read)
    return FromCommand(command=command, interval_s=interval_s, text=text, specs=_specs(text, asked.source))


def _from_slurm(job_name: str | None, place: str) -> FromSlurm:
    import trio

    from oobleck.runtime.launchers import SlurmJobs

    jobs = SlurmJobs.of_allocation() if job_name is None else SlurmJobs(name=job_name)
    names = [node for job in trio.run(jobs.allocations) for node in job.nodes]
    host, port = _listening_place(place)
    # Several jobs may share a node.
    return FromSlurm(job_id=jobs.job_id, job_name=job_name, host=host, port=port, names=tuple(dict.fromkeys(names)))


def _listening_place(text: str) -> tuple[str | None, int]:
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) >= 1 << 16:
        raise UsageError(f"--dial-in: {text!r} is not PORT or HOST:PORT, as in 7077 or 10.0.0.1:7077")
    return host.removeprefix("[").removesuffix("]") or None, int(port)


def _check_selector(text: str) -> None:
    """Raise UsageError unless the text selects labels by equality; only the API server knows who has them."""
    if not all(_LABEL.fullmatch(each) for each in text.split(",")):
        raise UsageError(f"--kubernetes: {text!r} is not a selector of labels, as in app=oobleck,role=node")
    from oobleck.runtime.launchers import KubernetesAPI

    KubernetesAPI.of_pod()


def _specs(text: str, source: str) -> tuple[NodeSpec, ...]:
    specs = parse_hostfile(text, source=source)
    if not specs:
        raise ConfigError(f"{source}: names no node; write one host per line")
    return specs
