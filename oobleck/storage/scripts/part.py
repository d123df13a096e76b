"""A rank's part of a state: in a slot of shared memory, or as a file on disk with a note that is written last.

<directory>/step-00000120.<start>/      a planned state; `….end` is a state that was in memory when ranks ended
    rank-00003.safetensors              the part, as a file of tensors
    rank-00003.json                     its note, size and SHA-256, which make the part valid

Parts of the same step and start belong together. A *start* is one generation of one run of a script. Its number is one
more than that of any start whose states its ranks can see, so that starts which continue from each other are ordered,
whatever their nodes' clocks show.
"""

from __future__ import annotations

import math
import os
import re
import struct
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from oobleck.errors import CorruptCheckpoint, PeerError, shown
from oobleck.job import MAX_STEPS
from oobleck.storage.directory import CheckpointDirectory
from oobleck.storage.layer_file import file_digest, read_layer_file, write_file, write_layer_file
from oobleck.storage.layout import Layout, TensorSpec
from oobleck.storage.memory import FlashMemory, Slot, find_slots
from oobleck.wire import decode_json, encode_json

from .shards import Sharding

DIRECTORY_VARIABLE = "OOBLECK_CHECKPOINT_DIR"
MEMORY_VARIABLE = "OOBLECK_CHECKPOINT_MEMORY"
"""An agent's directory for its ranks' states in shared memory; unset without an agent."""
START_VARIABLE = "OOBLECK_CHECKPOINT_START"
LOCAL_RANK_VARIABLE = "OOBLECK_CHECKPOINT_LOCAL_RANK"
"""A rank's number on its node, whatever LOCAL_RANK says."""
COPIES_VARIABLE = "OOBLECK_CHECKPOINT_COPIES"
"""How many states of another rank a rank leaves room for; 0: sharded states have no copies on other nodes."""
GRACE_VARIABLE = "OOBLECK_SHUTDOWN_TIMEOUT"
"""How many seconds ranks may take to end after a SIGTERM; unset without an agent."""
SAVED_VARIABLE = "OOBLECK_CHECKPOINT_SAVED"
"""The newest step that the ranks of an earlier generation had all saved; unset if there is none."""

TREE = "__tree__"
"""The entry for the state's values as JSON, padded with spaces."""
_ANY = "rank*"
_COPY = "rankcopy"
PARITY = "parity"
_TAKEN = struct.Struct("<Q")
_KEPT_PLANNED = 3
_KEPT_OTHERS = 2
_WRITES = 10
_MOST_RANKS = 1 << 20

Tensors = Mapping[str, tuple[TensorSpec, memoryview]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartNote:
    name: str
    step: int
    start: str
    rank: int
    world_size: int
    number: int
    """Counts this rank's saves since its start, from 1."""
    saved_at: str
    """UTC, ISO 8601; for people only, because clocks may be wrong."""
    is_planned: bool
    """Whether all ranks' parts of this state are to be written to disk."""
    shardings: tuple[Sharding, ...]
    """The shardings of the state's tensors; pieces refer to them by their index."""
    script: str = ""
    arguments: str = ""
    """These are as in `ScriptIdentity`; empty if unknown."""
    from_step: int = 0
    """The step that the rank continued from at its start."""
    worked_s: float = 0.0
    """Seconds from there to this save."""
    loss: str = ""
    """As text, because not-a-number equals nothing; empty if unknown."""
    recent_losses: tuple[float, ...] = ()
    """Those that the rank compares its next ones with; empty if it compares none."""

    def __post_init__(self) -> None:
        check_numbers(self.step, self.from_step, world_size=self.world_size)
        # The start is a part of a directory's name, which is split at its dots.
        is_named = self.name == state_name(self.step, self.start) and not set(self.start) & set("./\0")
        if not is_named or not 0 <= self.rank < self.world_size or self.number < 1:
            raise CorruptCheckpoint(
                f"{self.name!r} for step {self.step} of start {self.start!r}, save {self.number} of rank {self.rank} "
                f"of {self.world_size}"
            )
        for each in self.shardings:
            if math.prod(each.mesh) != self.world_size:
                raise CorruptCheckpoint(f"a mesh of {each.mesh} on {self.world_size} ranks")

    @property
    def age(self) -> StateAge:
        return StateAge.of(self.start, self.step)


def check_numbers(*steps: int, world_size: int) -> None:
    """Raise CorruptCheckpoint for numbers of a note that no script has, and that an agent could not send."""
    for step in steps:
        if not 0 <= step <= MAX_STEPS:
            raise CorruptCheckpoint(f"step {shown(step)}; steps are from 0 to {MAX_STEPS:,}")
    if not 0 < world_size <= _MOST_RANKS:
        raise CorruptCheckpoint(f"{shown(world_size)} ranks; there are 1 to {_MOST_RANKS:,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartFile:
    note: PartNote
    size_bytes: int
    sha256: str


class Part:
    """A part that this node can read."""

    def __init__(
        self, note: PartNote, place: Literal["memory", "disk"], where: Slot | Path, *, digest: str = ""
    ) -> None:
        self.note = note
        self.place = place
        self._digest = digest
        self._where = where
        self._tensors: Tensors | None = None

    def read(self) -> Tensors:
        """Return its entries, which are views of the memory or the file. O(size). Raises CorruptCheckpoint."""
        if self._tensors is None:
            if isinstance(self._where, Slot):
                self._where.verify()
                data = self._where.data
                entries = self._where.memory.layout.entries
                self._tensors = {each.spec.name: (each.spec, data[each.offset : each.stop]) for each in entries}
            else:
                self._tensors = self._in_file(self._where)
        return self._tensors

    def _in_file(self, path: Path) -> Tensors:
        try:
            digest = file_digest(path)
        except OSError as error:
            raise CorruptCheckpoint(f"{path}: {error.strerror}") from error
        if digest != self._digest:
            raise CorruptCheckpoint(f"{path}: changed: its SHA-256 is not {self._digest}")
        return read_layer_file(path).tensors


def state_name(step: int, start: str) -> str:
    return f"step-{step:08d}.{start}"


def memory_stem(local_rank: int) -> str:
    return f"rank{local_rank}"


def copy_stem(rank: int, start: str) -> str:
    """Return the stem of the files for copies of another node's parts, which a rank has saved since a start."""
    return f"{_COPY}{rank}-{start}"


def copy_start(path: Path) -> str | None:
    """Return the start of the parts in a file of copies or parities; None for a rank's own file."""
    return path.stem.partition("-")[2] if path.name.startswith((_COPY, PARITY)) else None


def note_of(slot: Slot) -> PartNote | None:
    """Return the note of the part in a slot; None if it is not a part."""
    try:
        return decode_json(PartNote, slot.note)
    except PeerError:
        return None


def find_parts(
    memory: Path | None, directory: Path, *, tell: Callable[[str], None] = lambda problem: None
) -> Iterator[Part]:
    """Yield all parts in this node's memory and in the directory; reads only notes.

    `tell` receives the problems of unusable notes, with their files.
    """
    for slot in find_slots(memory, _ANY) if memory is not None else ():
        if (note := note_of(slot)) is not None:
            yield Part(note, "memory", slot)
    for name in CheckpointDirectory(directory).names():
        for path in sorted((directory / name).glob("rank-*.json")):
            try:
                part = decode_json(_PartFile, path.read_bytes())
                file = path.with_suffix(".safetensors")
                size_bytes = file.stat().st_size
            except FileNotFoundError:
                continue  # the part is being removed
            except (OSError, PeerError) as error:
                tell(f"{path}: not the note of a part: {error}")
                continue
            if size_bytes == part.size_bytes:
                yield Part(part.note, "disk", file, digest=part.sha256)
            else:
                tell(f"{file}: {size_bytes} bytes, and its note says {part.size_bytes}")


# --- from memory to disk ---------------------------------------------------------------------------------------------


def write_part(directory: Path, note: PartNote, layout: Layout, data: memoryview, *, is_planned: bool) -> None:
    """Write a part to disk. O(size). Raises OSError."""
    target = directory / (note.name if is_planned else f"{note.name}.end")
    file = target / f"rank-{note.rank:05d}.safetensors"
    for attempt in range(_WRITES):
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            size, digest = write_layer_file(file, layout.entries, data, metadata={"format": "pt"})
            part = encode_json(_PartFile(note=note, size_bytes=size, sha256=digest))
            # The note follows the file that it describes: without a note, a part does not count.
            write_file(file.with_suffix(".json"), [memoryview(part)])
        except FileNotFoundError:  # the agent of a rank that is far ahead has removed the still empty directory
            if attempt == _WRITES - 1:
                raise
        else:
            return


def remove_old(directory: Path, *, start: str) -> None:
    """Remove states that are no longer needed once parts of a start have been written. Raises OSError.

    Keeps each rank's three newest planned states of this start, and its two newest states from memory at ranks' ends.
    """
    states = [_Named.of(name) for name in CheckpointDirectory(directory).names()]
    states.sort(key=lambda each: (each.start == start, each.age), reverse=True)
    planned = [each for each in states if each.is_planned]
    own = [each for each in planned if each.start == start]
    old = [each for each in states if not each.is_planned]
    # A rank at its third planned state has waited for its agent to take the second, which follows once the first is on
    # disk. So if all ranks save the same steps, the first is whole. If some are far ahead, the newest state that all
    # have must be kept too. Other starts' states go only once this start has three, and one that looks whole here.
    kept = _newest_of_each_rank(directory, old, _KEPT_OTHERS)
    if len(planned) > _KEPT_PLANNED and len(own) >= _KEPT_PLANNED:
        whole = _newest_whole(directory, own)
        kept |= _newest_of_each_rank(directory, own, _KEPT_PLANNED) | {whole}
        old += own if whole is None else planned
    CheckpointDirectory(directory).remove(each.name for each in old if each not in kept)


def _newest_of_each_rank(directory: Path, states: Sequence[_Named], number: int) -> set[_Named | None]:
    """Choose each rank's first `number` of the states."""
    if len(states) <= number:
        return set(states)
    kept: set[_Named | None] = set()
    counts: Counter[str] = Counter()
    for each in states:
        ranks = _ranks_in(directory / each.name)
        # Ranks need not be equally far, so the newest states of one rank may lack the parts of another. One without
        # parts that is newer than all others was begun a moment ago.
        if not counts or any(counts[rank] < number for rank in ranks):
            kept.add(each)
            counts.update(ranks)
    return kept


def _newest_whole(directory: Path, states: Sequence[_Named]) -> _Named | None:
    """Return the first state that has the parts of all ranks which saved any of these states."""
    ranks_of = {each: _ranks_in(directory / each.name) for each in states}
    savers = frozenset[str]().union(*ranks_of.values())
    return next((each for each, ranks in ranks_of.items() if ranks == savers), None)


def _ranks_in(state: Path) -> frozenset[str]:
    return frozenset(path.stem for path in state.glob("rank-*.json"))


@dataclass(frozen=True, slots=True)
class _Named:
    name: str
    step: int
    start: str
    is_planned: bool

    @property
    def age(self) -> StateAge:
        return StateAge.of(self.start, self.step)

    @classmethod
    def of(cls, name: str) -> _Named:
        step, start, *at_end = (*name.removeprefix("step-").split("."), "")[:3]
        return cls(name, int(step) if step.isdecimal() else 0, start, not any(at_end))


def _taken_path(memory: Path) -> Path:
    return memory.with_name(f"{memory.name}.taken")


def make_room_for_taken(memory: FlashMemory) -> None:
    """Allocate the memory that `note_taken` needs. Raises OSError."""
    _write_taken(memory.path, 0)  # if it lacked memory later, the rank would wait endlessly


def note_taken(slot: Slot) -> None:
    """Note that a slot may be overwritten, because its state is on its way to the disk."""
    # In a file of its own, because only the rank writes to its slots.
    _write_taken(slot.memory.path, slot.sequence)


def _write_taken(memory: Path, sequence: int) -> None:
    descriptor = os.open(_taken_path(memory), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, _TAKEN.pack(sequence), 0)
    finally:
        os.close(descriptor)


def is_taken(slot: Slot) -> bool:
    """Whether a slot's state, or a later one, has been taken."""
    try:
        raw = _taken_path(slot.memory.path).read_bytes()
    except OSError:
        return False
    return len(raw) == _TAKEN.size and int(_TAKEN.unpack(raw)[0]) >= slot.sequence


_NAME = re.compile(r"s(\d{1,18})-")


@dataclass(frozen=True, slots=True, order=True)
class StateAge:
    """Greater for newer states: first by start, then by step, never by clock."""

    number: int
    step: int
    start: str  # orders starts with the same number, which have not seen each other; any common order will do

    @classmethod
    def of(cls, start: str, step: int) -> StateAge:
        return cls(start_number(start), step, start)


def start_name(number: int, unique: str) -> str:
    """Return the name of a start; `unique` distinguishes starts with the same number."""
    return f"s{number}-{unique}"


def start_number(start: str) -> int:
    """Return the number of a start; 0 if an old version saved it without one."""
    match = _NAME.match(start)
    return int(match[1]) if match else 0
