"""Executes the compiled program of one stage, instruction by instruction.

Nothing is decided here: the program says what is computed, received and sent, and in which order. Receives are
posted ahead by helper threads in the program's own order, so that a tensor is often there before it is asked
for; sends are posted and forgotten until the step is committed, by which time every receiver has them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch._C._distributed_c10d import Work

from oobleck.control.standing import PeerLost
from oobleck.schedule import Instruction, Op, Program

from .data import Batch, Dataset
from .groups import Group
from .models import MicrobatchKey, StageModel
from .signals import Signals

__all__ = ["Lane", "StepWork", "execute"]

_READ_AHEAD = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """The pipeline as one of its stages sees it: who comes before and after, and the group that links them."""

    stage: int
    num_stages: int
    group: Group | None
    """None for a pipeline of one stage."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


@dataclass(slots=True, kw_only=True)
class StepWork:
    """What this worker has done of the step in flight. Gradients are in the parameters' `grad`."""

    step: int
    samples: Sequence[int]
    """Indices of the step's samples, over all pipelines."""
    seed: int
    microbatch_size: int
    items_per_sample: int
    """Predicted tokens in one sample."""
    waited_s: float = 0.0
    """How long it waited for its neighbours."""
    loss: float = 0.0
    """Its share of the step's loss; non-zero on last stages only."""
    counts: dict[int, int] = field(default_factory=dict)
    """How often each microbatch went through, noted by first stages, where it ends."""
    sends: list[tuple[Work, torch.Tensor]] = field(default_factory=list)
    """Posted sends and what they read from."""

    @property
    def num_items(self) -> int:
        """Predicted tokens in the step: what its loss is averaged over."""
        return len(self.samples) * self.items_per_sample

    def samples_of(self, microbatch: int) -> Sequence[int]:
        first = microbatch * self.microbatch_size
        return self.samples[first : first + self.microbatch_size]


class _Receiver:
    """Receives the tensors of one direction in order, at most `_READ_AHEAD` of them before they are taken."""

    def __init__(
        self, group: Group, source: int, tags: Sequence[int], like: Callable[[], torch.Tensor], signals: Signals
    ) -> None:
        self._ready: deque[torch.Tensor] = deque()
        self._failure: PeerLost | None = None
        self._room = threading.Semaphore(_READ_AHEAD)
        self._signals = signals

        def receive_all() -> None:
            for tag in tags:
                self._room.acquire()
                tensor = like()
                try:
                    group.receive(tensor, source, tag)
                except PeerLost as error:
                    self._failure = error
                    signals.announce()
                    return
                self._ready.append(tensor)
                signals.announce()

        threading.Thread(target=receive_all, daemon=True, name=f"receive from {source}").start()

    def take(self, interrupted: Callable[[], bool]) -> torch.Tensor:
        """Wait for the next tensor. Raises Interrupted or PeerLost."""
        self._signals.wait(lambda: bool(self._ready) or self._failure is not None, interrupted)
        if not self._ready:
            assert self._failure is not None
            raise self._failure
        tensor = self._ready.popleft()
        self._room.release()
        return tensor


def execute(
    program: Program,
    microbatches: Sequence[int],
    *,
    work: StepWork,
    model: StageModel,
    dataset: Dataset,
    lane: Lane,
    on_backward: Callable[[], None],
    signals: Signals,
    interrupted: Callable[[], bool],
) -> None:
    """Run a stage's program for the given microbatches, adding to `work` and to the gradients.

    The program's positions 0 .. m-1 stand for `microbatches`, the step's own numbers. The instructions that
    end a step (reduce, commit, apply) are not this function's: it stops before them.

    Raises Interrupted once `interrupted()`, PeerLost when a neighbour is gone; gradients are then partial.
    """
    _Execution(program, microbatches, work, model, dataset, lane, on_backward, signals, interrupted).run()


class _Execution:
    def __init__(
        self,
        program: Program,
        microbatches: Sequence[int],
        work: StepWork,
        model: StageModel,
        dataset: Dataset,
        lane: Lane,
        on_backward: Callable[[], None],
        signals: Signals,
        interrupted: Callable[[], bool],
    ) -> None:
        self._program = program
        self._microbatches = microbatches
        self._work = work
        self._model = model
        self._dataset = dataset
        self._lane = lane
        self._on_backward = on_backward
        self._signals = signals
        self._interrupted = interrupted
        self._batches: dict[int, Batch] = {}
        self._inputs: dict[int, torch.Tensor] = {}
        self._outputs: dict[int, torch.Tensor] = {}
        self._output_gradients: dict[int, torch.Tensor] = {}
        self._forwards = self._receiver(Op.RECV_F, lane.stage - 1)
        self._backwards = self._receiver(Op.RECV_B, lane.stage + 1)
        self._steps: dict[Op, Callable[[int], None]] = {
            Op.LOAD: self._load,
            Op.RECV_F: self._receive_forward,
            Op.FORWARD: self._forward,
            Op.SEND_F: self._send_forward,
            Op.RECV_B: self._receive_backward,
            Op.BACKWARD: self._backward,
            Op.SEND_B: self._send_backward,
        }

    def run(self) -> None:
        for instruction in self._program:
            step = self._steps.get(instruction.op)
            if step is None:
                break
            assert instruction.microbatch is not None, instruction
            step(instruction.microbatch)

    def _receiver(self, op: Op, source: int) -> _Receiver | None:
        positions = [_position(instruction) for instruction in self._program if instruction.op is op]
        if not positions:
            return None
        assert self._lane.group is not None
        tags = [self._tag(op, position) for position in positions]
        structure = self._model.structure
        shape = (self._work.microbatch_size, structure.sequence_length, structure.hidden_size)
        dtype, device = self._model.hidden_dtype, self._model.device
        return _Receiver(
            self._lane.group, source, tags, lambda: torch.empty(shape, dtype=dtype, device=device), self._signals
        )

    def _tag(self, op: Op, position: int) -> int:
        return 2 * self._microbatches[position] + (op in (Op.SEND_B, Op.RECV_B))

    def _check(self) -> None:
        """Computation is not interruptible; look once for each piece of it."""
        self._signals.wait(lambda: not self._interrupted(), self._interrupted)

    def _load(self, position: int) -> None:
        self._check()
        self._batches[position] = self._dataset.batch(self._work.samples_of(self._microbatches[position]))

    def _receive_forward(self, position: int) -> None:
        assert self._forwards is not None
        self._inputs[position] = self._take(self._forwards).requires_grad_()

    def _forward(self, position: int) -> None:
        self._outputs[position] = self._model.forward(
            self._batches.pop(position),
            self._inputs.get(position),
            num_items=self._work.num_items,
            key=MicrobatchKey(seed=self._work.seed, step=self._work.step, microbatch=self._microbatches[position]),
        )

    def _send_forward(self, position: int) -> None:
        self._send(Op.SEND_F, position, self._outputs[position].detach(), self._lane.stage + 1)

    def _receive_backward(self, position: int) -> None:
        assert self._backwards is not None
        self._output_gradients[position] = self._take(self._backwards)

    def _take(self, receiver: _Receiver) -> torch.Tensor:
        began_s = time.monotonic()
        tensor = receiver.take(self._interrupted)
        self._work.waited_s += time.monotonic() - began_s
        return tensor

    def _backward(self, position: int) -> None:
        self._check()
        output = self._outputs.pop(position)
        if self._lane.is_last:
            self._work.loss += float(output.detach())
            output.backward()  # type: ignore[no-untyped-call]
        else:
            output.backward(self._output_gradients.pop(position))  # type: ignore[no-untyped-call]
        self._on_backward()
        if self._lane.is_first:
            microbatch = self._microbatches[position]
            self._work.counts[microbatch] = self._work.counts.get(microbatch, 0) + 1

    def _send_backward(self, position: int) -> None:
        gradient = self._inputs.pop(position).grad
        assert gradient is not None
        self._send(Op.SEND_B, position, gradient, self._lane.stage - 1)

    def _send(self, op: Op, position: int, tensor: torch.Tensor, target: int) -> None:
        assert self._lane.group is not None
        tensor = tensor.contiguous()
        self._work.sends.append((self._lane.group.send(tensor, target, self._tag(op, position)), tensor))


def _position(instruction: Instruction) -> int:
    assert instruction.microbatch is not None, instruction
    return instruction.microbatch
