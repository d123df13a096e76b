"""What workers send each other over links of their own, without agents or master.

To commit, parts go up a tree of workers, and totals down it. A link begins with three frames by which each side proves
that it knows the listener's ticket: see `WorkerAddress`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from oobleck.plan import WorkerId

_WORD = 1 << 64


@dataclass(frozen=True, slots=True)
class Tally:
    """How many microbatches were counted, and which: a missing or repeated one changes the digest."""

    count: int = 0
    digest: int = 0
    """The sum of their hashes, modulo 2^64, so that their order does not matter."""

    @classmethod
    def of(cls, microbatches: Iterable[int], *, num_lanes: int = 1) -> Tally:
        """Count microbatches; with several lanes, each stands for one microbatch of each lane."""
        count = digest = 0
        for microbatch in (each * num_lanes + lane for each in microbatches for lane in range(num_lanes)):
            # Hashed, because with plain numbers a missing microbatch and a repeated one could cancel each other out.
            count += 1
            digest += _mixed(microbatch)
        return cls(count, digest % _WORD)

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.count + other.count, (self.digest + other.digest) % _WORD)

    def __sub__(self, other: Tally) -> Tally:
        return Tally(self.count - other.count, (self.digest - other.digest) % _WORD)


def _mixed(number: int) -> int:
    """Hash a number to 64 bits: splitmix64 (Steele et al., OOPSLA 2014)."""
    state = (number + 1) * 0x9E3779B97F4A7C15 % _WORD
    state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    state = (state ^ state >> 27) * 0x94D049BB133111EB % _WORD
    return state ^ state >> 31


class Topic(StrEnum):
    STEP = "step"
    SECTION = "section"
    EVALUATION = "evaluation"
    LOSS_SCALE = "loss_scale"


@dataclass(frozen=True, slots=True)
class Subject:
    """What a committee agrees on, once in a generation."""

    topic: Topic
    step: int
    section: int = 0


@dataclass(frozen=True, slots=True)
class Totals:
    """The part of one worker, or the sum of several."""

    numbers: tuple[float, ...]
    """Their meaning and their number follow from the topic."""
    counted: Tally = Tally()

    def __add__(self, other: Totals) -> Totals:
        numbers = tuple(mine + theirs for mine, theirs in zip(self.numbers, other.numbers, strict=True))
        return Totals(numbers, self.counted + other.counted)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartUp:
    """To a worker's parent: its part and those of all below it. For a step, all of them have passed `note_reduced`."""

    generation: int
    """The committee's generation, whose plan and losses all its members know."""
    subject: Subject
    part: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class TotalDown:
    """To a worker's children: the sum of all parts, as the root has added it up; the same bits for all."""

    generation: int
    subject: Subject
    total: Totals


CommitMessage = PartUp | TotalDown


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupValue:
    """A value that a member of a forming group shares with other members."""

    generation: int
    key: str
    value: bytes


PeerMessage = GroupValue | CommitMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkChallenge:
    """The listener's first frame on a connection."""

    nonce: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkHello:
    """The caller's first frame: who it is, where it listens itself, and its proof."""

    worker_id: WorkerId
    host: str
    port: int
    nonce: bytes
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkProof:
    """The listener's proof; messages may follow in both directions."""

    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkEnd:
    """The sender does not need the link any more. A link that ends without this shows the end of the peer."""


LinkMessage = LinkChallenge | LinkHello | LinkProof | LinkEnd | PeerMessage
