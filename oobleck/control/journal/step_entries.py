"""Entries about steps: committed, evaluated, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oobleck.control.protocol import CommitRecord
from oobleck.planner import WorkerId

from .entry import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone(Entry):
    record: CommitRecord
    tokens: int

    @property
    def sentence(self) -> str:
        return f"step {self.record.step} committed: loss {self.record.loss:.4f}"

    def evidence(self, worker_id: WorkerId | None) -> str:
        return f"step {self.record.step} was committed with a loss of {self.record.loss}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone(Entry):
    """Many like steps, up to the one committed now: what a simulation of months says in place of one entry a step."""

    first_step: int
    record: CommitRecord
    """Of the last step."""
    tokens_per_step: int

    @property
    def num_steps(self) -> int:
        return self.record.step - self.first_step + 1

    @property
    def sentence(self) -> str:
        return f"steps {self.first_step} to {self.record.step} committed, {self.record.duration_s:.3f} s each"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunsLong(Entry):
    """A step takes far longer than usual, and its workers come on: it is waited for."""

    step: int
    running_s: float
    """Since the step before was committed, or the plan was ordered."""
    computing: tuple[WorkerId, ...]
    """The workers that others wait for; none where all exchange something, and come on with that."""
    microbatch: int | None
    """What the first of these computes, counted from 0; None where it did not say."""

    @property
    def sentence(self) -> str:
        ran = f"{self.running_s:.0f} s" if self.running_s < 120 else f"{self.running_s / 60:.0f} min"
        return f"still running step {self.step} after {ran}: {self._doing}"

    @property
    def _doing(self) -> str:
        """`node2's worker computes microbatch 0`."""
        if not self.computing:
            return "its workers exchange data"
        first, num_others = self.computing[0], len(self.computing) - 1
        what = "computes" if self.microbatch is None else f"computes microbatch {self.microbatch}"
        worker = f"{first.node}'s worker{f' {first.device}' if first.device else ''}"
        return f"{worker} {what}{f', and {num_others} more compute' if num_others else ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated(Entry):
    """The model of a step was evaluated on samples that it is not trained on."""

    step: int
    loss: float
    num_samples: int
    duration_s: float

    @property
    def sentence(self) -> str:
        return f"evaluation after step {self.step}: loss {self.loss:.4f} ({self.num_samples} samples)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiffer(Entry):
    """Copies of a layer differ after a step: memory or a processor has computed wrongly, or kept it so."""

    level: ClassVar[str] = "error"
    step: int
    layer: int
    odd: tuple[WorkerId, ...]
    """They take the layer from the others."""
    trusted: tuple[WorkerId, ...]
    is_sure: bool
    """Whether it is known that the odd ones are wrong: of two that differ it is not."""

    @property
    def sentence(self) -> str:
        odd, trusted = (", ".join(map(str, worker_ids)) for worker_ids in (self.odd, self.trusted))
        text = f"after step {self.step} layer {self.layer} on {odd} differs from that on {trusted}"
        if self.is_sure:
            return f"{text}; {odd} computed or kept it wrongly, and takes it from the others"
        return f"{text}; nobody can tell which is right: {odd} takes it from the others; check all of these nodes"


StepEntry = StepDone | StepRunsLong | StepsDone | Evaluated | ReplicasDiffer
