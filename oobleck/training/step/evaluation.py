"""Evaluation between two steps: each pipeline runs its share of the samples forward, and all sum their losses.

No step is in flight meanwhile, so a failure costs only time: an interrupted worker gives up, and recovery proceeds as
between any two steps. A plan that takes effect at a step whose evaluation is due begins with the evaluation, so that
all workers of the plan agree; plans take effect there until the coordinator has received the outcome.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from oobleck.control.steps import Evaluation
from oobleck.errors import ConfigError
from oobleck.job import JobSpec
from oobleck.training.comm import Waiter, blaming_peers
from oobleck.training.data import NO_SAMPLE, Batch, Dataset
from oobleck.training.flow import Carried
from oobleck.training.model import MicrobatchKey, StageModel

from .messages import Messages, Sent
from .node_sums import NodeSums
from .step_work import PipelineRank, item_share_of

_PROGRESS_INTERVAL_S = 1.0
# Messages that a stage may send before the next stage has received them. Each takes memory.
_SENDS_AHEAD = 2

SumUp = Callable[[tuple[float, ...]], tuple[float, ...]]

_Sums = Mapping[int, tuple[float, float]]
"""The sums of losses and of predicted tokens, keyed by the number of a batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Microbatch:
    numbers: Sequence[int]
    """Its samples, filled up with `NO_SAMPLE`."""
    batch: int
    """The number of the batch that it is a part of; 0 if all samples are one."""
    first: int
    """The position of its first sample in that batch."""


class Evaluator:
    def __init__(
        self,
        job: JobSpec,
        dataset: Dataset,
        model: StageModel,
        waiter: Waiter,
        *,
        node_sums: NodeSums | None,
        interrupted: Callable[[], bool],
        on_progress: Callable[[int], None],
    ) -> None:
        """`interrupted` ends any wait. `on_progress` is called with the step about every second.

        `node_sums` has begun before each `run`; None unless the stage is sharded. Raises ConfigError where there are
        fewer samples than one microbatch has.
        """
        self._job = job
        self._dataset = dataset
        self._model = model
        self._waiter = waiter
        self._node_sums = node_sums
        self._interrupted = interrupted
        self._on_progress = on_progress
        evaluated = dataset.evaluated
        self._is_by_batches = evaluated is not None
        """Whether the loss is the mean of batches' losses, and not that over all predicted tokens."""
        self._leaves_out_nan = evaluated is None or evaluated.leaves_out_nan
        asked = min(dataset.num_samples, job.max_eval_samples or dataset.num_samples)
        # The last microbatch of a batch is completed by rows that do not count, or else left out.
        self._num_samples = asked if dataset.fills_up else asked - asked % job.microbatch_size
        if not self._num_samples:
            raise ConfigError(
                f"eval_steps: {asked} samples are not one microbatch of {job.microbatch_size}; keep more by "
                "data.validation_split, or raise max_eval_samples"
            )
        batches = (range(dataset.num_samples),) if evaluated is None else evaluated.batches
        self._batches = list(_first_samples(batches, self._num_samples))
        self._microbatches = [
            each for number, batch in enumerate(self._batches) for each in _cut(number, batch, job.microbatch_size)
        ]

    def run(self, step: int, pipeline_rank: PipelineRank, *, share: tuple[int, int], sum_up: SumUp) -> Evaluation:
        """Evaluate the model of a step, together with all others in the plan.

        `share` is the number of this pipeline, or of its lane, and how many there are; `sum_up` sums numbers over all
        workers. Raises Interrupted or PeerLost; messages may then be stuck in the groups.
        """
        began_s = time.monotonic()
        # Kept until the total, since a send that is dropped early holds up those after it.
        sends: deque[list[Sent]] = deque()
        sums = self._run_forward(step, pipeline_rank, share, sends)
        if self._is_by_batches:
            loss, num_samples = sum_up(self._of_batches(sums, counts=pipeline_rank.part[0] == 0))
            loss = loss / num_samples if num_samples else math.nan
        else:
            loss, num_items = sum_up(sums.get(0, (0.0, 0.0)))
            loss = self._mean(0, loss, num_items)
        return Evaluation(
            loss=loss,
            num_samples=sum(map(len, self._batches)),
            duration_s=time.monotonic() - began_s,
        )

    def _mean(self, batch: int, loss: float, num_items: float) -> float:
        return loss / item_share_of(num_items, divisor=self._divisor(batch))

    def _divisor(self, batch: int) -> int:
        # Known without reading the samples; `item_share_of` corrects it once all tokens are counted.
        return self._dataset.divisor_of_batch(len(self._batches[batch]))

    def _of_batches(self, sums: _Sums, *, counts: bool) -> tuple[float, float]:
        """Return the sum of losses of whole batches, weighed by their samples, and the number of these if it counts."""
        total = num_samples = 0.0
        for number, (loss, num_items) in sorted(sums.items()):
            has_loss = bool(num_items) or not self._dataset.counts_items
            mean = self._mean(number, loss, num_items) if has_loss else math.nan
            if math.isfinite(mean) or not self._leaves_out_nan:
                total += mean * len(self._batches[number])
                num_samples += len(self._batches[number]) * counts
        return total, num_samples

    def _shares(self, num_pipelines: int) -> list[list[int]]:
        """Return the microbatches of each pipeline: those of a batch are of one, which knows what its loss is."""
        shares: list[list[int]] = [[] for _ in range(num_pipelines)]
        for index, each in enumerate(self._microbatches):
            shares[(each.batch if self._is_by_batches else index) % num_pipelines].append(index)
        return shares

    def _run_forward(
        self, step: int, pipeline_rank: PipelineRank, share: tuple[int, int], sends: deque[list[Sent]]
    ) -> _Sums:
        """Run this pipeline's share forward; returns its sums on the last stage, none on others."""
        sums: dict[int, tuple[float, float]] = {}
        reported_s = -_PROGRESS_INTERVAL_S
        shares, num_microbatches = self._shares(share[1]), len(self._microbatches)
        own = shares[share[0]]
        if self._node_sums is not None:
            # All devices of a stage run as many, as they gather weights in them: some run one that others count.
            own += range(num_microbatches, num_microbatches + max(map(len, shares)) - len(own))
        with self._model.evaluating(), torch.no_grad():
            for index, chunk in _in_rounds(pipeline_rank, own):
                if time.monotonic() - reported_s >= _PROGRESS_INTERVAL_S:
                    reported_s = time.monotonic()
                    self._on_progress(step)
                hidden = self._received(pipeline_rank, index, chunk)
                microbatch = self._microbatches[min(index, num_microbatches - 1)]
                whole = self._load(microbatch)
                batch = whole if pipeline_rank.part[1] == 1 else whole.part(*pipeline_rank.part)
                key = MicrobatchKey(seed=self._job.seed, step=step, microbatch=index)
                with nullcontext() if self._node_sums is None else self._node_sums.forward(chunk):
                    output = self._model.carry(
                        batch.to(self._model.device),
                        hidden,
                        num_items=self._divisor(microbatch.batch),
                        key=key,
                        chunk=chunk,
                    )
                if not pipeline_rank.is_last(chunk):
                    if len(sends) == _SENDS_AHEAD:
                        self._waiter.call(partial(_wait_sent, sends[0]), self._interrupted)
                        sends.popleft()
                    target, _ = pipeline_rank.after(chunk)
                    tag = pipeline_rank.tag(index, pipeline_rank.cut_after(chunk))
                    messages = self._messages(pipeline_rank)
                    sends.append(messages.send_and_wait_later(output, pipeline_rank.member(target), tag))
                elif pipeline_rank.reports and index < num_microbatches:
                    assert isinstance(output, torch.Tensor)
                    loss, num_items = sums.get(microbatch.batch, (0.0, 0.0))
                    # A device with a part of each sample divides its part of the loss by the tokens of all parts.
                    counted = whole if self._is_by_batches else batch
                    sums[microbatch.batch] = loss + float(output), num_items + counted.num_items
        return sums

    def _received(self, pipeline_rank: PipelineRank, index: int, chunk: int) -> Carried | None:
        interrupted = self._interrupted
        # Raises Interrupted if there is a fence: a first stage may have no other wait.
        self._waiter.wait(lambda: not interrupted(), interrupted)
        if pipeline_rank.is_first(chunk):
            return None
        source, _ = pipeline_rank.before(chunk)
        tag = pipeline_rank.tag(index, pipeline_rank.cut_before(chunk))
        messages = self._messages(pipeline_rank)
        found: list[Carried] = []
        self._waiter.call(lambda: found.append(messages.receive(pipeline_rank.member(source), tag, chunk)), interrupted)
        return found[0]

    def _messages(self, pipeline_rank: PipelineRank) -> Messages:
        assert pipeline_rank.group is not None
        return Messages(self._model, pipeline_rank.group, self._job.microbatch_size)

    def _load(self, microbatch: _Microbatch) -> Batch:
        within = self._batches[microbatch.batch] if self._is_by_batches else None
        return self._dataset.batch(microbatch.numbers, first=microbatch.first, within=within)


def _first_samples(batches: Iterable[Sequence[int]], most: int) -> Iterator[Sequence[int]]:
    """Yield batches, up to `most` samples in all."""
    for batch in batches:
        if most <= 0:
            return
        yield batch[:most]
        most -= len(batch)


def _cut(number: int, batch: Sequence[int], size: int) -> Iterator[_Microbatch]:
    for first in range(0, len(batch), size):
        own = batch[first : first + size]
        yield _Microbatch(numbers=[*own, *[NO_SAMPLE] * (size - len(own))], batch=number, first=first)


def _in_rounds(pipeline_rank: PipelineRank, microbatches: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield (microbatch, chunk) in the order of an interleaved schedule."""
    # As many microbatches as there are stages pass all chunks before the next ones do, which keeps each stage busy
    # while the first of them comes round.
    size = pipeline_rank.num_stages
    for start in range(0, len(microbatches), size):
        for chunk in range(pipeline_rank.num_chunks):
            for microbatch in microbatches[start : start + size]:
                yield microbatch, chunk


def _wait_sent(parts: list[Sent]) -> None:
    with blaming_peers("send"):
        for work, _ in parts:
            work.wait()
