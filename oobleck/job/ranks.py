"""The job of `oobleck run`: a command that was written for torchrun, and its number of nodes and processes.

A *rank* is one process of the script. All ranks of one start form a *generation*: when one fails, all end, and the next
generation begins on the nodes that are present then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .bounds import bounded, check_spec, require
from .secrets import public_control, secret_digest
from .spec import MAX_NODES, ControlSpec, check_tag

DEFAULT_RESTARTS = 3
DEFAULT_COPY_RATE = 256e6
_MOST_COPIES = 8
_MOST_PARITY_NODES = 32
_MOST_SPARES = 64
_MOST_RANKS = 1024
_COUNTED = ("auto", "cpu", "gpu", "slots")
_MOST_RESTARTS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirection:
    """The streams of a rank that an option applies to."""

    stdout: bool = False
    stderr: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStreams:
    """The value of torchrun's `--redirects` or `--tee`: for all ranks of a node, or for single local ranks."""

    all: Redirection = Redirection()
    single: tuple[tuple[int, Redirection], ...] = ()
    """If it names any rank, the ranks that it does not name have neither stream."""

    def of(self, local_rank: int) -> Redirection:
        return dict(self.single).get(local_rank, Redirection()) if self.single else self.all


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSpec:
    """A command, and how its ranks are started. `tag` and `control` are those of a job."""

    tag: str
    entry: Literal["script", "module", "program"]
    """The type of the command's first word: a Python file, a Python module, or any program."""
    command: tuple[str, ...]
    directory: str
    """The working directory of ranks on every node: the command line's, so that relative names mean the same."""
    is_tag_given: bool = True
    """Whether the user has named the run; otherwise a run of other arguments does not resume from its states."""
    ranks_per_node: str = "slots"
    """A number, or what to count on each node: `slots` (of its line in the hostfile), `gpu`, `cpu`, or `auto` (GPUs, or
    CPUs if there are none)."""
    min_nodes: int = bounded(1, 1, MAX_NODES)
    """With fewer, no generation begins."""
    max_nodes: int = bounded(1, 1, MAX_NODES)
    """More nodes wait as spares."""
    node_unit: int = bounded(1, 1, MAX_NODES)
    """The number of nodes of a generation is a multiple of this."""
    max_restarts: int = bounded(DEFAULT_RESTARTS, 0, _MOST_RESTARTS)
    """This many generations may end because a rank failed; nodes that join, leave or are lost do not count."""
    run_id: str = "none"
    """The name under which ranks know the run (TORCHELASTIC_RUN_ID)."""
    role: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of ranks, on top of their node's."""
    log_dir: str | None = None
    """The directory of ranks' output on every node; None is `ranks` in the run's directory there."""
    redirects: RankStreams = RankStreams()
    """Streams that are not shown."""
    tee: RankStreams = RankStreams()
    """Streams that are shown with the rank's name before each line."""
    shown_ranks: tuple[int, ...] = ()
    """Local ranks whose output is shown; empty for all."""
    master_port: int | None = bounded(None, 1, (1 << 16) - 1)
    """None takes a free port of the first node, another one for each generation."""
    shutdown_timeout_s: float = bounded(30.0, 0, 86_400)
    """How long ranks may take to end after a SIGTERM before they are killed."""
    hang_timeout_s: float = bounded(600.0, 0, 1e8)
    """How long ranks that have printed or saved before may do neither, while one of them uses no processor; 0 sets no
    limit. The default is torch's timeout for NCCL."""
    join_timeout_s: float = bounded(600.0, 0, 1e8)
    hides_devices: bool = False
    """Whether each rank sees only its own GPU, as device 0 (torchrun's `--virtual-local-rank`)."""
    is_warmed: bool = True
    """Whether later generations are forked from a process that has done the imports of the first one."""
    spares: int = bounded(1, 0, _MOST_SPARES)
    """How many processes of each node have run up to their attempts (`oobleck.attempts`), and wait for a lost rank's
    place."""
    copies: int = bounded(1, 0, _MOST_COPIES)
    """How many other nodes get a copy of each part of sharded states in memory."""
    parity_nodes: int = bounded(0, 0, _MOST_PARITY_NODES)
    """Above 0, the parity of the parts of this many nodes takes the place of one copy of each."""
    copy_rate: float = bounded(DEFAULT_COPY_RATE, 1e3, 1e13)
    """Bytes a second that a node may send as copies."""
    control: ControlSpec = field(default_factory=ControlSpec)

    def __post_init__(self) -> None:
        is_parity = 2 <= self.parity_nodes <= _MOST_PARITY_NODES and self.copies == 1
        expected = f"xor:2 to xor:{_MOST_PARITY_NODES}"
        require(is_parity or self.parity_nodes == 0, "--copies", f"xor:{self.parity_nodes}", expected)
        check_spec(self)
        check_tag(self.tag)
        require(bool(self.command and self.command[0]), "command", "", "a script, a module or a program")
        number = self.ranks_per_node
        is_number = number.isdecimal() and len(number) <= 6 and 1 <= int(number) <= _MOST_RANKS
        expected = f"auto, cpu, gpu, slots, or a number from 1 to {_MOST_RANKS:,}"
        require(is_number or number in _COUNTED, "--nproc-per-node", number, expected)
        limits = f"{self.min_nodes}:{self.max_nodes}"
        require(self.min_nodes <= self.max_nodes, "--nnodes", limits, "MIN:MAX, with MIN not above MAX")
        most = self.max_nodes // self.node_unit * self.node_unit
        expected = f"a number of which a multiple is within --nnodes {limits}"
        require(most >= max(1, self.min_nodes), "--node-unit", str(self.node_unit), expected)

    def without_values(self) -> RanksSpec:
        """Return it for the journal: names and digests replace arguments and variables, which may be secret."""
        names = [word.partition("=")[0] for word in self.command[1:] if word.startswith("-")]
        arguments = (*names, secret_digest(self.command)) if self.command[1:] else ()
        environment = {name: secret_digest((name, value)) for name, value in self.environment.items()}
        command, control = (*self.command[:1], *arguments), public_control(self.control)
        return replace(self, command=command, environment=environment, control=control)

    @property
    def room_for_copies(self) -> float:
        """How many other ranks' states a node has to keep for each of its own, about."""
        return min(1.0, 2 / self.parity_nodes) if self.parity_nodes else self.copies

    @property
    def kinds(self) -> str:
        """The command without its arguments, for people."""
        return f"{'-m ' if self.entry == 'module' else ''}{self.command[0]}"
