"""Values that messages carry: what is known of steps, sections and parts of a step once they are committed."""

from __future__ import annotations

from dataclasses import dataclass, field

from oobleck.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """What is known of a committed step once it is committed: equal on every rank."""

    step: int
    generation: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_samples: int
    samples_repeated: int
    samples_missing: int
    duration_s: float
    """The mean of all workers: from their part of the step before to that of this one."""
    loss_scale: float = 1.0
    """What the loss was multiplied with, in float16."""
    item_share: float = 1.0
    """The tokens that count in the step, over those that gradients were divided by before all of them were read."""
    is_skipped: bool = False
    """Its gradients overflowed in float16: the step counts, and left the parameters as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRecord:
    """What is known of a section of a step once its gradients are committed: equal on every rank."""

    step: int
    generation: int
    """Of the plan under which it was run."""
    number: int
    """Sections of the step that are committed under that plan, this one included."""
    loss: float
    """The part of the step's loss that all its committed microbatches make, before it is divided by `item_share`."""
    num_items: int = 0
    """Tokens that count in these microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialStep:
    """What of a step is committed when a plan comes into force in the middle of it."""

    microbatches: tuple[int, ...] = ()
    """Sorted."""
    loss: float = 0.0
    """The part of the step's loss that these make, as in `SectionRecord`."""
    num_items: int = 0
    """Tokens that count in them."""
    generation: int = 0
    """Of the plan under which the newest of them were run; 0 where nothing is committed."""
    number: int = 0
    """Sections of the step that were committed under that plan."""


NOTHING = PartialStep()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An extra program of a whole pipeline: microbatches of the step in flight that a broken one leaves."""

    segment: int
    """Identifies the segment; increasing."""
    pipeline: int
    """Index in the plan under which the step was begun."""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where a worker listens for its peers, for as long as its process lives."""

    worker_id: WorkerId
    host: str
    port: int
    ticket: bytes = field(default=b"", repr=False)
    """Random. Only those whom the master told it may speak there, and they believe nobody who does not know it."""
