"""What an agent and its ranks tell each other: which states in memory to keep, and which losses were bad."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oobleck.control.protocol import BadLosses
from oobleck.errors import CorruptCheckpoint, PeerError
from oobleck.storage.layer_file import write_file
from oobleck.wire import decode_json, encode_json

from .part import check_numbers

SLOTS_TO_COPY = 4
"""The slots of a rank whose states are copied: for the protected state, the one that is being copied, the newest one
that is whole, and the one that is being written. With three, some ranks would overwrite the state that is protected
from now on, while others overwrite the one that was protected before."""
_FILE = "kept.json"
_BAD_FILE = "bad{}.json"


def note_bad(memory: Path, local_rank: int, bad: BadLosses) -> None:
    """Tell the agent why a rank is about to end. Raises OSError."""
    write_file(memory / _BAD_FILE.format(local_rank), [memoryview(encode_json(bad))])


def bad_in(memory: Path, local_rank: int) -> BadLosses | None:
    """Return what a rank of any start has told last."""
    try:
        bad = decode_json(BadLosses, (memory / _BAD_FILE.format(local_rank)).read_bytes())
        check_numbers(bad.step, world_size=1 + max((rank for rank, _ in bad.losses), default=0))
    except (OSError, PeerError, CorruptCheckpoint):
        return None
    return bad


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    names: tuple[str, ...] = ()
    """The states to keep, the protected one first."""
    from_step: int | None = None
    """The first state is kept, too, that is saved from this step on, since a start whose name ends with `start`."""
    start: str = ""


def note_kept(memory: Path, kept: Kept) -> None:
    """Tell the ranks that save in a directory. Raises OSError."""
    write_file(memory / _FILE, [memoryview(encode_json(kept))])


def kept_in(memory: Path) -> Kept:
    """Return what the agent has told last."""
    try:
        return decode_json(Kept, (memory / _FILE).read_bytes())
    except (OSError, PeerError):
        return Kept()
