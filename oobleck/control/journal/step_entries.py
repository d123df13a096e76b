"""Entries about steps: committed, evaluated, compared."""

from __future__ import annotations

from dataclasses import dataclass

from oobleck.control.protocol import CommitRecord
from oobleck.planner import WorkerId


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDone:
    t_s: float
    record: CommitRecord
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsDone:
    """Many like steps, one after the other: what a simulation of months says in place of one entry a step."""

    t_s: float
    """When the last was committed."""
    first_step: int
    record: CommitRecord
    """Of the last step."""
    tokens_per_step: int

    @property
    def num_steps(self) -> int:
        return self.record.step - self.first_step + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRunsLong:
    """A step takes far longer than usual, and its workers come on: it is waited for."""

    t_s: float
    step: int
    running_s: float
    """Since the step before was committed, or the plan was ordered."""
    computing: tuple[WorkerId, ...]
    """The workers that others wait for; none where all exchange something, and come on with that."""
    microbatch: int | None
    """What the first of these computes, counted from 0; None where it did not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """The model of a step was evaluated on samples that it is not trained on."""

    t_s: float
    step: int
    loss: float
    num_samples: int
    duration_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasDiffer:
    """Copies of a layer differ after a step: memory or a processor has computed wrongly, or kept it so."""

    t_s: float
    step: int
    layer: int
    odd: tuple[WorkerId, ...]
    """They take the layer from the others."""
    trusted: tuple[WorkerId, ...]
    is_sure: bool
    """Whether it is known that the odd ones are wrong: of two that differ it is not."""
