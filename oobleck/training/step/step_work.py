"""A worker's part of a step: the step's samples, its own place in the pipeline, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oobleck.control.commit import PlaceInPlan
from oobleck.schedule import ScheduleKind
from oobleck.training.comm import Group, Pending
from oobleck.training.data import NO_SAMPLE, Batch, Dataset
from oobleck.training.model import MicrobatchKey, Share

__all__ = ["GlobalBatch", "PipelineRank", "StepWork"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """The pipeline as one of its stages sees it: who comes before and after, and the group that links them."""

    stage: int
    num_stages: int
    group: Group | None
    """None for a pipeline of one worker."""
    rank: int
    """Which of the devices that share the stage this is."""
    degree: int
    """How many share each stage."""
    schedule: ScheduleKind

    @classmethod
    def of(cls, seat: PlaceInPlan, share: Share, group: Group | None) -> PipelineRank:
        """Return the view of a worker that has this place in its plan, and this share of its stage."""
        return cls(
            stage=seat.stage,
            num_stages=seat.num_stages,
            group=group,
            rank=share.rank,
            degree=share.degree,
            schedule=seat.schedule,
        )

    def member(self, stage: int) -> int:
        """The neighbour at another stage, as the group counts: the device of like rank."""
        return stage * self.degree + self.rank

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def reports(self) -> bool:
        """Whether it reports its stage's losses and counts: of the devices that share the stage, which have the same,
        one does."""
        return self.rank == 0

    @property
    def splits_backward(self) -> bool:
        """Whether it takes its backward passes in two parts: the first stage of a pipeline never does."""
        return self.schedule is ScheduleKind.ZERO_BUBBLE and not self.is_first


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of a step, over all pipelines, in the order in which microbatches take them."""

    dataset: Dataset
    step: int
    samples: Sequence[int]
    """Indices."""
    num_items: int
    """Predicted tokens in the step: what its loss is averaged over."""
    microbatch_size: int
    seed: int

    @property
    def num_samples(self) -> int:
        """The last step may have fewer than others."""
        return sum(index != NO_SAMPLE for index in self.samples)

    def load(self, microbatch: int) -> Batch:
        """Return a microbatch's samples, on the CPU. Raises ShardUnreadable."""
        first = microbatch * self.microbatch_size
        return self.dataset.batch(self.samples[first : first + self.microbatch_size], step=self.step)

    def key(self, microbatch: int) -> MicrobatchKey:
        """Return what randomness in a microbatch depends on."""
        return MicrobatchKey(seed=self.seed, step=self.step, microbatch=microbatch)


@dataclass(slots=True)
class StepWork:
    """What this worker has done of the step in flight. Gradients are in the parameters' `grad`."""

    step: int
    losses: list[torch.Tensor] = field(default_factory=list)
    """Its microbatches' losses, on the device, where it is the one to report them; on last stages only."""
    counted: list[int] = field(default_factory=list)
    """Each microbatch as often as it went through, noted by first stages, where it ends."""
    sends: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)
    """Posted sends and what they read from."""

    @property
    def loss(self) -> float:
        """Its share of the step's loss. Waits for the device."""
        return sum(torch.stack(self.losses).tolist()) if self.losses else 0.0
