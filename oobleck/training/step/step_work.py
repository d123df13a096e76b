"""A worker's part of a step: the step's samples, its own place in the pipeline, and its results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from oobleck.control.steps import PlaceInPlan
from oobleck.schedule import ScheduleKind
from oobleck.training.comm import Group, Pending
from oobleck.training.data import NO_SAMPLE, Batch, Dataset
from oobleck.training.model import MicrobatchKey, Share


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRank:
    """The pipeline as one of its stages sees it: the neighbours, and the group that links them."""

    stage: int
    num_stages: int
    num_chunks: int = 1
    group: Group | None
    """None for a pipeline of one worker."""
    rank: int
    """This device's number among those that share the stage."""
    degree: int
    schedule: ScheduleKind
    is_sharded: bool = False
    part: tuple[int, int] = (0, 1)
    """The number of this device's part of each sample, and how many there are."""

    @classmethod
    def of(cls, seat: PlaceInPlan, share: Share, group: Group | None) -> PipelineRank:
        """Return the view of a worker with this place in its plan, and this share of its stage."""
        return cls(
            stage=seat.stage,
            num_stages=seat.num_stages,
            num_chunks=len(seat.chunks),
            group=group,
            rank=share.rank,
            degree=share.degree,
            schedule=seat.schedule,
            is_sharded=share.is_sharded,
            part=share.part,
        )

    def member(self, stage: int) -> int:
        """Return the group's number of the neighbour at another stage: the device of the same rank."""
        return stage * self.degree + self.rank

    def is_first(self, chunk: int = 0) -> bool:
        """Return whether a chunk has the model's first layer; by default, whether any chunk of this stage has."""
        return (self.stage, chunk) == (0, 0)

    def is_last(self, chunk: int) -> bool:
        return (self.stage, chunk) == (self.num_stages - 1, self.num_chunks - 1)

    def before(self, chunk: int) -> tuple[int, int]:
        """Return the (stage, chunk) before a chunk that is not the model's first."""
        return (self.stage - 1, chunk) if self.stage else (self.num_stages - 1, chunk - 1)

    def after(self, chunk: int) -> tuple[int, int]:
        """Return the (stage, chunk) after a chunk that is not the model's last."""
        return (self.stage + 1, chunk) if self.stage + 1 < self.num_stages else (0, chunk + 1)

    def cut_after(self, chunk: int) -> int:
        """Return a number of the cut after a chunk that no other cut between the same two stages has."""
        # In a pipeline of two stages each is before the other, so the cut back to the first stage needs its own number.
        return 2 * chunk + (self.stage == self.num_stages - 1)

    def cut_before(self, chunk: int) -> int:
        stage, before = self.before(chunk)
        return 2 * before + (stage == self.num_stages - 1)

    def tag(self, microbatch: int, cut: int) -> int:
        """Return a message's number, which no other message between the two stages has, in either direction."""
        return 2 * self.num_chunks * microbatch + cut

    @property
    def reports(self) -> bool:
        """Whether this device reports losses and tokens: its own, or those that all that share the stage have."""
        return self.rank == 0 or self.is_sharded

    @property
    def counts(self) -> bool:
        """Whether this device says which microbatches were computed: one of those that share them does."""
        return self.reports and self.part[0] == 0

    @property
    def splits_backward(self) -> bool:
        """Whether backward passes run in two parts: never on the first stage, which sends no gradients on."""
        return self.schedule is ScheduleKind.ZERO_BUBBLE and not self.is_first()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of a step, over all pipelines, in the order in which microbatches take them."""

    dataset: Dataset
    step: int
    samples: Sequence[int]
    """Indices in the dataset."""
    divisor: int
    """The divisor of the losses while the step runs; `item_share_of` corrects it once tokens are counted."""
    microbatch_size: int
    seed: int
    lane: tuple[int, int] = (0, 1)
    """As `Share.lane`."""
    part: tuple[int, int] = (0, 1)
    """As `Share.part`."""

    @property
    def num_samples(self) -> int:
        """The number of samples, which may be smaller in the last step."""
        # Places without a sample fill the last step's microbatches up.
        return sum(index != NO_SAMPLE for index in self.samples)

    def number(self, microbatch: int) -> int:
        """Return the number in the step of what this device computes of a plan's microbatch."""
        # Whoever computes it and whatever the plan, it has these samples and draws these random numbers.
        lane, num_lanes = self.lane
        return microbatch * num_lanes + lane

    def load(self, microbatch: int) -> Batch:
        """Return a microbatch's samples, or this device's part of them, on the CPU. Raises ShardUnreadable."""
        first = self.number(microbatch) * self.microbatch_size
        batch = self.dataset.batch(self.samples[first : first + self.microbatch_size], step=self.step, first=first)
        return batch if self.part[1] == 1 else batch.part(*self.part)

    def key(self, microbatch: int) -> MicrobatchKey:
        """Return the key of all randomness in a microbatch."""
        return MicrobatchKey(seed=self.seed, step=self.step, microbatch=self.number(microbatch))


@dataclass(slots=True)
class StepWork:
    """This worker's results of the step in flight, except gradients, which are in the parameters' `grad`."""

    step: int
    losses: list[torch.Tensor] = field(default_factory=list)
    """The microbatches' losses, on the device; only on last stages, and on the device that reports them."""
    counted: list[int] = field(default_factory=list)
    """Each microbatch as often as its last backward pass ran, noted by first stages."""
    num_items: int = 0
    """Tokens that count in the microbatches of `losses`."""
    sends: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)
    """Posted sends with their tensors, where the group does not keep these."""

    def loss_and(self, squared_norm: torch.Tensor | None) -> tuple[float, float]:
        """Return the worker's share of the step's loss, and the value of a squared norm, 0 for None."""
        # One read of both: the host waits for the device here, once in a step.
        read = self.losses if squared_norm is None else [*self.losses, squared_norm]
        values = torch.stack([each.double() for each in read]).tolist() if read else []
        return sum(values[: len(self.losses)], 0.0), sum(values[len(self.losses) :], 0.0)


def item_share_of(num_items: float, *, divisor: int) -> float:
    """Return the factor by which to divide sums, already divided by `divisor`, to get means over `num_items` tokens."""
    # Exactly 1 where the two agree, so that nothing is rounded. Where no token counts, the sums are zero and stay so.
    return num_items / divisor if num_items else 1.0
