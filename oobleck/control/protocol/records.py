"""The bases of all messages from and to a worker, and values that messages carry.

The agent relays by the bases, and the master checks by them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from oobleck.plan import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class FromWorker:
    """From a worker of the node, or from its agent about one."""

    needs_orders: ClassVar[bool] = True
    """Only a worker that has had a plan can send this; before the first plan it is dropped."""
    outlives_worker: ClassVar[bool] = False
    """It counts even if the worker was asked to end since; else it is dropped then."""
    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForWorker:
    """To one worker; its agent passes it on."""

    device: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitRecord:
    """A committed step: equal on every rank."""

    step: int
    generation: int
    loss: float
    grad_norm: float
    learning_rate: float
    num_samples: int
    samples_repeated: int
    samples_missing: int
    duration_s: float
    """From a worker's part of the step before to its part of this one; the mean of all workers."""
    loss_scale: float = 1.0
    """The factor of the loss in float16."""
    item_share: float = 1.0
    """The tokens that count in the step, over the predicted ones by which gradients were divided."""
    is_skipped: bool = False
    """Its gradients overflowed in float16, or it was bad and the job skips such steps: it counts, and left the
    parameters as they were."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionRecord:
    """A section of a step whose gradients are committed: equal on every rank."""

    step: int
    generation: int
    """The generation of the plan under which it ran."""
    number: int
    """How many sections of the step are committed under that plan, this one included."""
    loss: float
    """The share of the step's loss of all its committed microbatches, before division by `item_share`."""
    num_items: int = 0
    """The tokens that count in these microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialStep:
    """The committed part of a step, when a plan comes into force in the middle of it."""

    microbatches: tuple[int, ...] = ()
    """Sorted."""
    loss: float = 0.0
    """As in `SectionRecord`, like `num_items`."""
    num_items: int = 0
    generation: int = 0
    """The generation of the plan under which the newest of them ran; 0 where nothing is committed."""
    number: int = 0
    """How many sections of the step were committed under that plan."""


NOTHING = PartialStep()


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """An extra program of a whole pipeline: microbatches of the step in flight that a broken pipeline leaves."""

    segment: int
    """Identifies the segment; increasing."""
    pipeline: int
    """Its index in the plan under which the step began."""
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAddress:
    """Where a worker listens for its peers, for as long as its process lives."""

    worker_id: WorkerId
    host: str
    port: int
    # Not in the text of this value, which may end up in a log.
    ticket: bytes = field(default=b"", repr=False)
    """Random. The master sends it to the peers, and each side of a link proves to the other that it knows it."""
