"""A worker's part of a step: the step's samples, its own place in the pipeline, and what it has done."""

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
    """The pipeline as one of its stages sees it: who comes before and after, and the group that links them."""

    stage: int
    num_stages: int
    num_chunks: int = 1
    """Of each stage."""
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
            num_chunks=len(seat.chunks),
            group=group,
            rank=share.rank,
            degree=share.degree,
            schedule=seat.schedule,
        )

    def member(self, stage: int) -> int:
        """The neighbour at another stage, as the group counts: the device of like rank."""
        return stage * self.degree + self.rank

    def is_first(self, chunk: int = 0) -> bool:
        """Whether a chunk has the model's first layer; by default, whether any of this stage has."""
        return (self.stage, chunk) == (0, 0)

    def is_last(self, chunk: int) -> bool:
        """Whether a chunk has the model's last layer."""
        return (self.stage, chunk) == (self.num_stages - 1, self.num_chunks - 1)

    def before(self, chunk: int) -> tuple[int, int]:
        """(stage, chunk) that hidden states come from; not for the first of all."""
        return (self.stage - 1, chunk) if self.stage else (self.num_stages - 1, chunk - 1)

    def after(self, chunk: int) -> tuple[int, int]:
        """(stage, chunk) that hidden states go to; not for the last of all."""
        return (self.stage + 1, chunk) if self.stage + 1 < self.num_stages else (0, chunk + 1)

    def cut_after(self, chunk: int) -> int:
        """A number for where the model is cut after a chunk, unlike that of any other cut between the same two stages.

        Two stages are neighbours both ways, where there are no others.
        """
        return 2 * chunk + (self.stage == self.num_stages - 1)

    def cut_before(self, chunk: int) -> int:
        """The same of the cut before a chunk."""
        stage, before = self.before(chunk)
        return 2 * before + (stage == self.num_stages - 1)

    def tag(self, microbatch: int, cut: int) -> int:
        """What the two ends of a message agree on, whose number is no other's between the two stages, either way."""
        return 2 * self.num_chunks * microbatch + cut

    @property
    def reports(self) -> bool:
        """Whether it reports its stage's losses and counts: of the devices that share the stage, which have the same,
        one does."""
        return self.rank == 0

    @property
    def splits_backward(self) -> bool:
        """Whether it takes its backward passes in two parts: the first stage of a pipeline never does."""
        return self.schedule is ScheduleKind.ZERO_BUBBLE and not self.is_first()


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """The samples of a step, over all pipelines, in the order in which microbatches take them."""

    dataset: Dataset
    step: int
    samples: Sequence[int]
    """Indices."""
    divisor: int
    """What its losses are divided by while it runs: predicted tokens, as far as they are known without reading them.
    When all is summed, `item_share_of` those that were counted corrects it."""
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
    num_items: int = 0
    """Tokens that count in the microbatches of `losses`."""
    sends: list[tuple[Pending, torch.Tensor]] = field(default_factory=list)
    """Posted sends and what they read from, where their group does not keep it."""

    def loss_and(self, squared_norm: torch.Tensor | None) -> tuple[float, float]:
        """Return its share of the step's loss, and the value of a squared norm, if there is one, else 0.

        Both are read at once, as that is where the host waits for the device: once in a step.
        """
        read = self.losses if squared_norm is None else [*self.losses, squared_norm]
        values = torch.stack([each.double() for each in read]).tolist() if read else []
        return sum(values[: len(self.losses)], 0.0), sum(values[len(self.losses) :], 0.0)


def item_share_of(num_items: float, *, divisor: int) -> float:
    """Return what sums that were divided by `divisor` must be divided by as well, to be means over `num_items` tokens.

    Exactly 1 where the two agree. Where no token counts, there is no mean: the sums, which are zero, stay as they are.
    """
    return num_items / divisor if num_items else 1.0
