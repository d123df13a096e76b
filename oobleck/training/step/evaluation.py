"""Evaluation between two steps: each pipeline runs its share of the samples forward, and all sum their losses.

No step is in flight meanwhile, so a failure costs only time: an interrupted worker gives up, and recovery proceeds as
between any two steps. A plan that takes effect at a step whose evaluation is due begins with the evaluation, so that
all workers of the plan agree; plans take effect there until the coordinator has received the outcome.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
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
        self._num_samples = min(dataset.num_samples, job.max_eval_samples or dataset.num_samples)
        self._num_microbatches = self._num_samples // job.microbatch_size
        if dataset.fills_up:  # the last microbatch is completed by rows that do not count
            self._num_microbatches = -(-self._num_samples // job.microbatch_size)
        if not self._num_microbatches:
            raise ConfigError(
                f"eval_steps: {self._num_samples} samples are not one microbatch of {job.microbatch_size}; keep more "
                "by data.validation_split, or raise max_eval_samples"
            )
        # Known without reading the samples; `item_share_of` corrects it once all tokens are counted.
        self._divisor = self._num_microbatches * job.microbatch_size * dataset.items_per_sample

    def run(self, step: int, pipeline_rank: PipelineRank, *, share: tuple[int, int], sum_up: SumUp) -> Evaluation:
        """Evaluate the model of a step, together with all others in the plan.

        `share` is the number of this pipeline, or of its lane, and how many there are; `sum_up` sums numbers over all
        workers. Raises Interrupted or PeerLost; messages may then be stuck in the groups.
        """
        began_s = time.monotonic()
        # Kept until the total, since a send that is dropped early holds up those after it.
        sends: deque[list[Sent]] = deque()
        loss, num_items = sum_up(self._sum_losses(step, pipeline_rank, share, sends))
        return Evaluation(
            loss=loss / item_share_of(num_items, divisor=self._divisor),
            num_samples=min(self._num_samples, self._num_microbatches * self._job.microbatch_size),
            duration_s=time.monotonic() - began_s,
        )

    def _sum_losses(
        self, step: int, pipeline_rank: PipelineRank, share: tuple[int, int], sends: deque[list[Sent]]
    ) -> tuple[float, float]:
        """Run this pipeline's share forward; returns losses and tokens on the last stage, zeros on others."""
        total = num_items = 0.0
        reported_s = -_PROGRESS_INTERVAL_S
        own = range(share[0], self._num_microbatches, share[1])
        if self._node_sums is not None:
            # All devices of a stage run as many, as they gather weights in them: some run one that others count.
            own = range(share[0], -(-self._num_microbatches // share[1]) * share[1], share[1])
        with self._model.evaluating(), torch.no_grad():
            for microbatch, chunk in _in_rounds(pipeline_rank, own):
                if time.monotonic() - reported_s >= _PROGRESS_INTERVAL_S:
                    reported_s = time.monotonic()
                    self._on_progress(step)
                hidden = self._received(pipeline_rank, microbatch, chunk)
                batch = self._load(min(microbatch, self._num_microbatches - 1))
                if pipeline_rank.part[1] > 1:
                    batch = batch.part(*pipeline_rank.part)
                key = MicrobatchKey(seed=self._job.seed, step=step, microbatch=microbatch)
                with nullcontext() if self._node_sums is None else self._node_sums.forward(chunk):
                    output = self._model.carry(
                        batch.to(self._model.device), hidden, num_items=self._divisor, key=key, chunk=chunk
                    )
                if not pipeline_rank.is_last(chunk):
                    if len(sends) == _SENDS_AHEAD:
                        self._waiter.call(partial(_wait_sent, sends[0]), self._interrupted)
                        sends.popleft()
                    target, _ = pipeline_rank.after(chunk)
                    tag = pipeline_rank.tag(microbatch, pipeline_rank.cut_after(chunk))
                    messages = self._messages(pipeline_rank)
                    sends.append(messages.send_and_wait_later(output, pipeline_rank.member(target), tag))
                elif pipeline_rank.reports and microbatch < self._num_microbatches:
                    assert isinstance(output, torch.Tensor)
                    total += float(output)
                    num_items += batch.num_items
        return total, num_items

    def _received(self, pipeline_rank: PipelineRank, microbatch: int, chunk: int) -> Carried | None:
        interrupted = self._interrupted
        # Raises Interrupted if there is a fence: a first stage may have no other wait.
        self._waiter.wait(lambda: not interrupted(), interrupted)
        if pipeline_rank.is_first(chunk):
            return None
        source, _ = pipeline_rank.before(chunk)
        tag = pipeline_rank.tag(microbatch, pipeline_rank.cut_before(chunk))
        messages = self._messages(pipeline_rank)
        found: list[Carried] = []
        self._waiter.call(lambda: found.append(messages.receive(pipeline_rank.member(source), tag, chunk)), interrupted)
        return found[0]

    def _messages(self, pipeline_rank: PipelineRank) -> Messages:
        assert pipeline_rank.group is not None
        return Messages(self._model, pipeline_rank.group, self._job.microbatch_size)

    def _load(self, microbatch: int) -> Batch:
        size = self._job.microbatch_size
        numbers = range(microbatch * size, (microbatch + 1) * size)
        return self._dataset.batch([number if number < self._num_samples else NO_SAMPLE for number in numbers])


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
