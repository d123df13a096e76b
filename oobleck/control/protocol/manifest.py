"""A checkpoint as a value, which its manifest file and messages hold, and which saved state is the newest.

A checkpoint's name is unique: step, run and generation. Within a run, a state of a later generation is newer, then one
of a later step. A run that continues from another run's checkpoint is newer than all of that run. Only runs that begin
from nothing are compared by clocks: by when they saved last.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from oobleck.errors import ConfigError

from .data_position import DataPosition

MANIFEST_VERSION = 1

_TIME = re.compile(r"\d{4}-\d{2}-\d{2}(T\d{2}:\d{2}(:\d{2}(\.\d+)?)?([+-]\d{2}:\d{2}|Z)?)?")
# A peer's manifest must not lead out of the checkpoint's directory, and file systems allow at most 255 characters.
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,199}")
_MOST_DIGITS = 18
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The state in a slot of memory."""

    name: str
    """The checkpoint that it is a part of."""
    step: int
    generation: int
    saved_at: str
    """UTC, ISO 8601, by the machine's own clock."""
    position: DataPosition | None = None
    """The run's position in its shards after that step; None where samples have numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The file of one layer, or of a part of it."""

    layer: int
    part: int = 0
    """Its number, where devices shared each stage."""
    file: str
    size_bytes: int
    sha256: str

    def __post_init__(self) -> None:
        if not _FILE_NAME.fullmatch(self.file):
            raise ConfigError(f"shard file {self.file!r}: must be a name in the checkpoint's own directory")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A complete checkpoint: the model's state after a step, and how to continue from there.

    The position in the data is `position` for shards; else it is a function of (seed, step, global batch size).
    """

    version: int
    name: str
    tag: str
    run: str
    """See `run_digest`."""
    saved_at: str
    """UTC, ISO 8601: when the last share was in memory."""
    step: int
    generation: int
    loss: float | None
    """The step's loss; None where no worker reported it."""
    seed: int
    global_batch_size: int
    samples_seen: int
    data_digest: str
    layer_names: tuple[str, ...]
    num_parts: int = 1
    """How many parts each layer has: the devices that shared a stage."""
    shards: tuple[Shard, ...]
    position: DataPosition | None = None
    """As in `SavedState`."""
    origin: str | None = None
    """The checkpoint that the run began from; None for the model's initial values."""
    is_final: bool = False
    """Whether the run had nothing more to train: no other run removes this checkpoint."""

    @property
    def size_bytes(self) -> int:
        return sum(shard.size_bytes for shard in self.shards)


def run_digest(tag: str, started_at: str) -> str:
    """Return eight hexadecimal digits that identify a run among others of its tag."""
    return hashlib.sha256(f"{tag}:{started_at}".encode()).hexdigest()[:8]


def checkpoint_name(run: str, *, step: int, generation: int) -> str:
    # A generation commits each step once, so nothing is ever written twice under one name.
    return f"step-{step:08d}.{run}.{generation}"


def run_of(name: str) -> str:
    """Return the digest of the run in a checkpoint's name; empty for any other name."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def generation_of(name: str) -> int:
    """Return the generation in a checkpoint's name; 0 for any other name."""
    last = name.split(".")[-1]
    # Any directory may have a name like this, and Python refuses to read numbers of thousands of digits.
    return int(last) if last.isdecimal() and len(last) <= _MOST_DIGITS else 0


def what_is_wrong(manifest: Manifest) -> str | None:
    """Return what no run would write in a manifest; None where nothing is wrong. O(shards)."""
    layers, parts = len(manifest.layer_names), manifest.num_parts
    numbers = {"step": 0, "generation": 0, "samples_seen": 0, "num_parts": 1, "global_batch_size": 1}
    for key, least in numbers.items():
        if getattr(manifest, key) < least:
            return f"{key} is {getattr(manifest, key)}; it must be at least {least}"
    name = checkpoint_name(manifest.run, step=manifest.step, generation=manifest.generation)
    if manifest.name != name:
        return f"its step, run and generation are those of {name}"
    if not layers:
        return "it has no layers"
    if parts > max(1, len(manifest.shards)):
        return f"num_parts is {parts}, and there are {len(manifest.shards)} files"
    if not _TIME.fullmatch(manifest.saved_at):
        return f"saved_at is {manifest.saved_at!r}, which is not a time"
    seen: set[tuple[int, int]] = set()
    for shard in manifest.shards:
        if shard.layer not in range(layers) or shard.part not in range(parts):
            place = f"part {shard.part} of layer {shard.layer}"
            return f"{shard.file} is {place}; there are {layers} layers of {parts} parts"
        if (shard.layer, shard.part) in seen:
            return f"part {shard.part} of layer {shard.layer} has two files"
        if shard.size_bytes <= 0 or not _SHA256.fullmatch(shard.sha256):
            return f"{shard.file} has {shard.size_bytes} bytes and the SHA-256 {shard.sha256!r}"
        seen.add((shard.layer, shard.part))
    return None


Age = tuple[str, str, int, str, str, int, int, str]
"""Greater for the newer state."""


class Aged(Protocol):
    """The properties of a saved state that its age follows from."""

    @property
    def name(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def saved_at(self) -> str: ...
    @property
    def origin(self) -> str | None: ...


def ages(states: Iterable[Aged]) -> Mapping[str, Age]:
    """Return the age of each state, keyed by its name. O(n·d), with d runs that continue from each other."""
    listed = list(states)
    saved_at: dict[str, str] = {}
    before: dict[str, str] = {}
    for each in listed:
        saved_at[each.run] = max(saved_at.get(each.run, ""), each.saved_at)
        if each.origin is not None:
            before[each.run] = run_of(each.origin)
    lines = {run: _line(run, before) for run in saved_at}
    last_of_root: dict[str, str] = {}
    for run, line in lines.items():
        last_of_root[line[-1]] = max(last_of_root.get(line[-1], ""), saved_at[run])
    found: dict[str, Age] = {}
    for each in listed:
        # Runs with the same root continue from each other, each after the master of the one before had ended. So their
        # depth decides, and no clock.
        *ancestors, root = lines[each.run]
        run_age = (last_of_root[root], root, len(ancestors), saved_at[each.run], each.run)
        found[each.name] = (*run_age, generation_of(each.name), each.step, each.name)
    return found


def _line(run: str, before: Mapping[str, str]) -> list[str]:
    """Return a run, the one that it continues from, and so on."""
    line = [run]
    while (run := before.get(run, "")) and run not in line:  # a damaged manifest may close a circle
        line.append(run)
    return line
