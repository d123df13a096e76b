"""What `oobleck run` runs: a command that was written for torchrun, and on how many nodes and processes.

A *rank* is one process of the script. All ranks of one start form a *generation*: when one fails, all end, and the next
generation begins on the nodes that are there then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .bounds import bounded, check_spec, require
from .spec import MAX_NODES, ControlSpec, check_tag

DEFAULT_RESTARTS = 3
_MOST_RANKS = 1024
_COUNTED = ("auto", "cpu", "gpu", "slots")
_MOST_RESTARTS = 1_000_000


def _digest(words: Iterable[str]) -> str:
    """By which two are seen to be equal or not; too short to tell what they are."""
    return f"sha256:{hashlib.sha256(chr(0).join(words).encode(errors='surrogateescape')).hexdigest()[:8]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Redirection:
    """Which of a rank's streams an option is about."""

    stdout: bool = False
    stderr: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStreams:
    """What torchrun's `--redirects` or `--tee` says: of all ranks of a node, or of single ones by their local rank."""

    all: Redirection = Redirection()
    single: tuple[tuple[int, Redirection], ...] = ()
    """Those that are not named here have neither, where any is named."""

    def of(self, local_rank: int) -> Redirection:
        """What it says of one rank."""
        return dict(self.single).get(local_rank, Redirection()) if self.single else self.all


@dataclass(frozen=True, slots=True, kw_only=True)
class RanksSpec:
    """A command, and how its ranks are started. `tag` and `control` are as of a job."""

    tag: str
    entry: Literal["script", "module", "program"]
    """What the first word of the command is: a Python file, a Python module, or any program."""
    command: tuple[str, ...]
    directory: str
    """Where ranks begin, on every node: that of the command line, so that relative names mean the same."""
    is_tag_given: bool = True
    """Whether the user has named the run; else a run of other arguments does not continue from its states."""
    ranks_per_node: str = "slots"
    """A number, or what to count on each node: `slots` (of its line in the hostfile), `gpu`, `cpu`, or `auto` (GPUs, or
    CPUs where there are none)."""
    min_nodes: int = bounded(1, 1, MAX_NODES)
    """With fewer, no generation begins."""
    max_nodes: int = bounded(1, 1, MAX_NODES)
    """More wait as spares."""
    node_unit: int = bounded(1, 1, MAX_NODES)
    """A generation has a multiple of so many nodes."""
    max_restarts: int = bounded(DEFAULT_RESTARTS, 0, _MOST_RESTARTS)
    """So many generations may end because a rank failed; nodes that come, leave or are lost do not count."""
    run_id: str = "none"
    """What ranks know the run by (TORCHELASTIC_RUN_ID)."""
    role: str = "default"
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of ranks, beside that of their node."""
    log_dir: str | None = None
    """Where ranks' output lies, on every node; None is `ranks` in the run's directory there."""
    redirects: RankStreams = RankStreams()
    """What is not shown."""
    tee: RankStreams = RankStreams()
    """What is shown with the rank's name before each line."""
    shown_ranks: tuple[int, ...] = ()
    """Local ranks whose output is shown; empty for all."""
    master_port: int | None = bounded(None, 1, (1 << 16) - 1)
    """None: any that is free on the first node, another one for each generation."""
    shutdown_timeout_s: float = bounded(30.0, 0, 86_400)
    """How long ranks that are asked to end (SIGTERM) may take before they are killed."""
    hang_timeout_s: float = bounded(600.0, 0, 1e8)
    """How long ranks that have printed or saved before may do neither, while one of them uses no processor; 0: for
    ever. As torch's own timeout for NCCL."""
    join_timeout_s: float = bounded(600.0, 0, 1e8)
    """How long a run waits for `min_nodes`."""
    hides_devices: bool = False
    """Whether each rank sees its own GPU alone, as device 0 (torchrun's `--virtual-local-rank`)."""
    is_warmed: bool = True
    """Whether later generations are forked from a process that has imported what the first one did."""
    control: ControlSpec = field(default_factory=ControlSpec)

    def __post_init__(self) -> None:
        check_spec(self)
        check_tag(self.tag)
        require(bool(self.command and self.command[0]), "command", "", "a script, a module or a program")
        number = self.ranks_per_node
        is_number = number.isdecimal() and len(number) <= 6 and 1 <= int(number) <= _MOST_RANKS
        expected = f"auto, cpu, gpu, slots, or a number from 1 to {_MOST_RANKS:,}"
        require(is_number or number in _COUNTED, "--nproc-per-node", number, expected)
        limits = f"{self.min_nodes}:{self.max_nodes}"
        require(self.min_nodes <= self.max_nodes, "--nnodes", limits, "MIN:MAX, with MIN not above MAX")
        has_multiple = self.max_nodes // self.node_unit * self.node_unit >= self.min_nodes
        require(
            has_multiple and self.node_unit <= self.max_nodes,
            "--node-unit",
            str(self.node_unit),
            f"a number of which a multiple is within --nnodes {limits}",
        )

    def without_values(self) -> RanksSpec:
        """Return it as it may be kept: names and a digest in place of arguments and variables, which may be secret."""
        names = [word.partition("=")[0] for word in self.command[1:] if word.startswith("-")]
        command = self.command[:1] if len(self.command) == 1 else (*self.command[:1], *names, _digest(self.command))
        environment = {name: _digest((name, value)) for name, value in self.environment.items()}
        return replace(self, command=command, environment=environment)

    @property
    def kinds(self) -> str:
        """What the command is, for people."""
        return f"{'-m ' if self.entry == 'module' else ''}{self.command[0]}"
