"""A rank's part of a state: in a slot of shared memory, or as a file on disk with a note that is written last.

<directory>/step-00000120.<start>/      as it was planned; `….end` is what was in memory when ranks ended
    rank-00003.safetensors              the part, as a file of tensors
    rank-00003.json                     its note, size and SHA-256: the part is there when this is

Parts of the same step and start belong together. A *start* is one generation of one run of a script. Its number is one
more than that of any start whose states its ranks can see, so starts that continue from each other are in order,
whatever the clocks of their nodes show.
"""

from __future__ import annotations

import json
import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oobleck.errors import CorruptCheckpoint, PeerError
from oobleck.json_table import load_json
from oobleck.storage.directory import CheckpointDirectory
from oobleck.storage.layer_file import file_digest, read_layer_file, write_file, write_layer_file
from oobleck.storage.layout import Layout, TensorSpec
from oobleck.storage.memory import FlashMemory, Slot, find_slots
from oobleck.wire import decode_json, encode_json

from .shards import Sharding

DIRECTORY_VARIABLE = "OOBLECK_CHECKPOINT_DIR"
MEMORY_VARIABLE = "OOBLECK_CHECKPOINT_MEMORY"
"""Where an agent keeps its ranks' states in shared memory; it is not set without one."""
START_VARIABLE = "OOBLECK_CHECKPOINT_START"

TREE = "__tree__"
"""The entry that has the state's values as JSON, padded with spaces."""
_ANY = "rank*"
_TAKEN = struct.Struct("<Q")
_KEPT_PLANNED = 3
_KEPT_OTHERS = 2
_WRITES = 3

Tensors = Mapping[str, tuple[TensorSpec, memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNote:
    """What is known of a part without its bytes."""

    name: str
    step: int
    start: str
    rank: int
    world_size: int
    number: int
    """How many states this rank has saved since its start, with this one."""
    saved_at: str
    """UTC, ISO 8601: for people, as clocks may be wrong."""
    is_planned: bool
    """Whether it is to be on disk, of all ranks."""
    shardings: tuple[Sharding, ...]
    """Those that tensors of the state have; their pieces are numbered by this order."""
    script: str = ""
    arguments: str = ""
    """As in `ScriptIdentity`; empty where nothing is known of them."""

    def __post_init__(self) -> None:
        is_named = self.name == state_name(self.step, self.start) and not set(self.start) & set("./\0")
        if not is_named or self.step < 0 or not 0 <= self.rank < self.world_size or self.number < 1:
            raise CorruptCheckpoint(
                f"{self.name!r} for step {self.step} of start {self.start!r}, save {self.number} of rank {self.rank} "
                f"of {self.world_size}"
            )
        for each in self.shardings:
            if math.prod(each.mesh) != self.world_size:
                raise CorruptCheckpoint(f"a mesh of {each.mesh} on {self.world_size} ranks")

    @property
    def age(self) -> StateAge:
        return age_of(self.start, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartFile:
    note: PartNote
    size_bytes: int
    sha256: str


class Part:
    """A part that can be read here."""

    def __init__(self, note: PartNote, place: Literal["memory", "disk"], digest: str, where: Slot | Path) -> None:
        self.note = note
        self.place = place
        self.digest = digest
        self._where = where
        self._tensors: Tensors | None = None

    def read(self) -> Tensors:
        """Return its entries, which lie over the memory or the file itself. O(size). Raises CorruptCheckpoint."""
        if self._tensors is None:
            self._tensors = _in_slot(self._where) if isinstance(self._where, Slot) else self._in_file(self._where)
        return self._tensors

    def _in_file(self, path: Path) -> Tensors:
        try:
            digest = file_digest(path)
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: {error.strerror}") from error
        if digest != self.digest:
            raise CorruptCheckpoint(f"{path}: changed: its SHA-256 is not {self.digest}")
        return read_layer_file(path).tensors


def state_name(step: int, start: str) -> str:
    """What a state is called, on disk as well."""
    return f"step-{step:08d}.{start}"


def memory_stem(local_rank: int) -> str:
    """How the memory files of a rank of this node are called."""
    return f"rank{local_rank}"


def note_of(slot: Slot) -> PartNote | None:
    """What a slot says of the part in it; None where that is not for us."""
    try:
        return decode_json(PartNote, slot.note)
    except PeerError:
        return None


def find_parts(
    memory: Path | None, directory: Path, *, tell: Callable[[str], None] = lambda problem: None
) -> Iterator[Part]:
    """All parts that this node has in memory, and those in the directory; nothing of their bytes is looked at.

    `tell` receives the notes that cannot be read, with their files.
    """
    for slot in find_slots(memory, _ANY) if memory is not None else ():
        if (note := note_of(slot)) is not None:
            yield Part(note, "memory", slot.digest, slot)
    for name in CheckpointDirectory(directory).names():
        for path in sorted((directory / name).glob("rank-*.json")):
            try:
                said = _read_note(path.read_bytes())
                file = path.with_suffix(".safetensors")
                size_bytes = file.stat().st_size
            except FileNotFoundError:
                continue  # it is being removed
            except (OSError, PeerError) as error:
                tell(f"{path}: not the note of a part: {error}")
                continue
            if size_bytes == said.size_bytes:
                yield Part(said.note, "disk", said.sha256, file)
            else:
                tell(f"{file}: {size_bytes} bytes, and its note says {said.size_bytes}")


def _read_note(raw: bytes) -> _PartFile:
    """Read a part's note; those of a version before scripts were told apart say nothing of them. Raises PeerError."""
    try:
        said = load_json(raw)
        if isinstance(said, dict) and isinstance(said.get("note"), dict):
            said["note"] = {"script": "", "arguments": "", **said["note"]}
        text = json.dumps(said)
    except ValueError as error:
        raise PeerError(f"it is not JSON: {error}") from error
    return decode_json(_PartFile, text)


def _in_slot(slot: Slot) -> Tensors:
    slot.verify()
    data = slot.data
    return {entry.spec.name: (entry.spec, data[entry.offset : entry.stop]) for entry in slot.memory.layout.entries}


# --- from memory to disk ---------------------------------------------------------------------------------------------


def write_part(directory: Path, note: PartNote, layout: Layout, data: memoryview, *, is_planned: bool) -> None:
    """Write a part to disk. O(size). Raises OSError."""
    target = directory / (note.name if is_planned else f"{note.name}.end")
    for attempt in range(_WRITES):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            _write_into(target, note, layout, data)
        except FileNotFoundError:  # another rank, which is far ahead, has found nothing in the directory yet
            if attempt == _WRITES - 1:
                raise
        else:
            return


def _write_into(target: Path, note: PartNote, layout: Layout, data: memoryview) -> None:
    file = target / f"rank-{note.rank:05d}.safetensors"
    size, digest = write_layer_file(file, layout.entries, data, metadata={"format": "pt"})
    said = encode_json(_PartFile(note=note, size_bytes=size, sha256=digest))
    write_file(file.with_suffix(".json"), [memoryview(said)])


def remove_old(directory: Path, *, start: str) -> None:
    """Remove what is not needed once parts of a start have been written. Raises OSError.

    Kept are the three newest planned states that each rank of this start has saved: a rank that is at its third has
    waited for its agent to take the second, which it does once the first is on disk. Where all ranks save the same
    steps, so the first is whole. Where some are far ahead, the newest state that all have is kept as well. States of
    other starts are kept until this one has three, and one that is whole as far as can be seen here. Of what was in
    memory when ranks ended, the two newest of each rank are kept.
    """
    found = [_Named.of(name) for name in CheckpointDirectory(directory).names()]
    found.sort(key=lambda each: (each.start == start, each.age), reverse=True)
    planned = [each for each in found if each.is_planned]
    own = [each for each in planned if each.start == start]
    old = [each for each in found if not each.is_planned]
    kept = _newest_of_each_rank(directory, old, _KEPT_OTHERS)
    if len(planned) > _KEPT_PLANNED and len(own) >= _KEPT_PLANNED:
        whole = _newest_whole(directory, own)
        kept |= _newest_of_each_rank(directory, own, _KEPT_PLANNED) | {whole}
        old += own if whole is None else planned
    CheckpointDirectory(directory).remove(each.name for each in old if each not in kept)


def _newest_of_each_rank(directory: Path, states: Sequence[_Named], number: int) -> set[_Named | None]:
    """So many states of each rank, of states that are sorted from new to old."""
    if len(states) <= number:
        return set(states)
    kept: set[_Named | None] = set()
    counts: Counter[str] = Counter()
    for each in states:
        ranks = _ranks_in(directory / each.name)
        if any(counts[rank] < number for rank in ranks):
            kept.add(each)
            counts.update(ranks)
    return kept


def _newest_whole(directory: Path, states: Sequence[_Named]) -> _Named | None:
    """The newest state that all ranks have saved that have saved any of these, which are sorted from new to old."""
    there = [_ranks_in(directory / each.name) for each in states]
    savers = frozenset[str]().union(*there)
    return next((each for each, ranks in zip(states, there, strict=True) if ranks == savers), None)


def _ranks_in(state: Path) -> frozenset[str]:
    """The ranks that have a part in a state's directory, by their files' names."""
    return frozenset(path.stem for path in state.glob("rank-*.json"))


@dataclass(frozen=True, slots=True)
class _Named:
    """A state's directory."""

    name: str
    step: int
    start: str
    is_planned: bool

    @property
    def age(self) -> StateAge:
        return age_of(self.start, self.step)

    @classmethod
    def of(cls, name: str) -> _Named:
        step, start, *at_end = (*name.removeprefix("step-").split("."), "")[:3]
        return cls(name, int(step) if step.isdecimal() else 0, start, not any(at_end))


def _taken_path(memory: Path) -> Path:
    return memory.with_name(f"{memory.name}.taken")


def make_room_for_taken(memory: FlashMemory) -> None:
    """Have the memory that `note_taken` needs: where there is none left later, a rank would wait for ever.

    Raises OSError.
    """
    _write_taken(memory.path, 0)


def note_taken(slot: Slot) -> None:
    """Say that a slot may be written over: what was in it is on its way to the disk."""
    _write_taken(slot.memory.path, slot.sequence)


def _write_taken(memory: Path, sequence: int) -> None:
    descriptor = os.open(_taken_path(memory), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, _TAKEN.pack(sequence), 0)
    finally:
        os.close(descriptor)


def is_taken(slot: Slot) -> bool:
    """Whether a slot, or one that was saved after it, has been taken."""
    try:
        raw = _taken_path(slot.memory.path).read_bytes()
    except OSError:
        return False
    return len(raw) == _TAKEN.size and int(_TAKEN.unpack(raw)[0]) >= slot.sequence


_NAME = re.compile(r"s(\d{1,18})-")


@dataclass(frozen=True, slots=True, order=True)
class StateAge:
    """Greater for the newer state: that of the later start, then that of the later step. Clocks have no say."""

    number: int
    step: int
    start: str
    """Two starts have the same number where neither has seen the other: then any order that all ranks have will do."""


def start_name(number: int, unique: str) -> str:
    """Return what a start is called; `unique` tells it from others of its number."""
    return f"s{number}-{unique}"


def start_number(start: str) -> int:
    """Return the number of a start; 0 for one of a version that did not count them."""
    found = _NAME.match(start)
    return int(found[1]) if found else 0


def age_of(start: str, step: int) -> StateAge:
    """Return the age of the state that a start saved after a step."""
    return StateAge(start_number(start), step, start)
