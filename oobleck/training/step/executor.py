"""Executes the compiled program of one stage, instruction by instruction.

This module decides nothing: the program states what to compute, receive and send, and in which order.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, field

import torch

from oobleck.control.steps import CommitState, Interrupted
from oobleck.schedule import Instruction, Op, Program
from oobleck.training.comm import DeviceWork, Inbox, Post
from oobleck.training.data import Batch
from oobleck.training.flow import Carried, gradients_of, leaf_of, run_backward
from oobleck.training.model import StageModel
from oobleck.training.weight_gradients import WeightGradients

from .messages import Messages
from .node_sums import NodeSums
from .reading import BatchReader, Reading
from .sections import SectionSums
from .step_work import GlobalBatch, PipelineRank, StepWork

_Passing = tuple[int, int]  # a microbatch, and the chunk of the stage that it passes
_UPSTREAM_OPS = (Op.RECV_F, Op.SEND_B)  # messages from and to the previous virtual stage
_GRADIENT_OPS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_COMPUTING_OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


@dataclass(slots=True, kw_only=True)
class Execution:
    """Runs one program for some microbatches of a step, which have the step's numbers."""

    batch: GlobalBatch
    work: StepWork
    pipeline_rank: PipelineRank
    model: StageModel
    commit_state: CommitState
    put_off: WeightGradients | None
    """Holds gradients for BACKWARD_WEIGHT; None if the program has none."""
    sections: SectionSums | None
    """Advance between instructions; None if the program commits none."""
    device_work: DeviceWork | None
    """Times a GPU's computation; None on the host."""
    reader: BatchReader
    node_sums: NodeSums | None = None
    """None unless the stage is sharded."""
    _reading: Reading | None = field(init=False, default=None)
    _batches: dict[int, Batch] = field(init=False, default_factory=dict)
    _num_items: dict[int, int] = field(init=False, default_factory=dict)
    """Counted tokens of loaded microbatches, where this stage reports losses."""
    _inputs: dict[_Passing, Carried] = field(init=False, default_factory=dict)
    _outputs: dict[_Passing, Carried] = field(init=False, default_factory=dict)
    _output_gradients: dict[_Passing, list[torch.Tensor]] = field(init=False, default_factory=dict)
    _inboxes: dict[int, Inbox] = field(init=False, default_factory=dict)  # keyed by the neighbour's stage
    _messages: Messages = field(init=False)

    def __post_init__(self) -> None:
        if (group := self.pipeline_rank.group) is not None:
            self._messages = Messages(self.model, group, self.batch.microbatch_size)

    def run(
        self, program: Program, microbatches: Sequence[int], *, around_last: AbstractContextManager[object]
    ) -> None:
        """Run a stage's program up to the instructions that end a step; adds to the work and to the gradients.

        The program's positions 0 .. m-1 stand for `microbatches`, the step's numbers. `around_last` is entered for the
        backward pass after which gradients are final.

        Raises Interrupted once the pipeline is stopped, PeerLost when a neighbour is gone, or ShardUnreadable;
        gradients are then partial.
        """
        if self.node_sums is not None:
            self.node_sums.begin()
        self._expect(program, microbatches)
        last = max((at for at, instruction in enumerate(program) if instruction.op in _GRADIENT_OPS), default=None)
        if self.device_work is not None:
            self.device_work.begin()
        loads = [microbatches[_position(each)] for each in program if each.op is Op.LOAD]
        self._reading = self.reader.begin(self.batch.load, loads)
        casting = self.model.casting_once() if self.node_sums is None else self.node_sums.casting()
        with closing(self._reading), casting:
            for at, instruction in enumerate(program):
                if instruction.op.is_tail:
                    break
                with around_last if at == last else nullcontext(), self._timing(instruction.op):
                    self._execute(instruction.op, microbatches[_position(instruction)], instruction.chunk)
                if self.sections is not None:
                    self.sections.look()
        if self.node_sums is not None:
            self.node_sums.conclude()

    def _timing(self, op: Op) -> AbstractContextManager[object]:
        return self.device_work.piece() if self.device_work is not None and op in _COMPUTING_OPS else nullcontext()

    def _execute(self, op: Op, microbatch: int, chunk: int) -> None:
        rank, passing = self.pipeline_rank, (microbatch, chunk)
        match op:
            case Op.LOAD:
                self._check()
                assert self._reading is not None
                batch = self._reading.take(microbatch)
                if self._reports_loss(rank.num_chunks - 1):
                    self._num_items[microbatch] = batch.num_items
                self._batches[microbatch] = batch
            case Op.RECV_F:
                # SEND_B sends the gradient of this input.
                taken, tag = self._take(op, chunk), self._tag(op, microbatch, chunk)
                self._inputs[passing] = leaf_of(self._messages.received(tag, taken, chunk))
            case Op.FORWARD:
                self._forward(microbatch, chunk)
            case Op.SEND_F:
                target, tag = self._address(op, microbatch, chunk)
                self.work.sends += self._messages.send(self._outputs[passing], target, tag)
            case Op.RECV_B:
                taken, tag = self._take(op, chunk), self._tag(op, microbatch, chunk)
                self._output_gradients[passing] = self._messages.gradients(tag, taken, self._outputs[passing])
            case Op.BACKWARD | Op.BACKWARD_INPUT | Op.BACKWARD_WEIGHT:
                if op is not Op.BACKWARD_WEIGHT:
                    self._backward_input(microbatch, chunk)
                if op is not Op.BACKWARD_INPUT:
                    self._backward_weight(microbatch, chunk)
            case Op.SEND_B:
                target, tag = self._address(op, microbatch, chunk)
                self.work.sends += self._messages.send_gradients(gradients_of(self._inputs.pop(passing)), target, tag)
            case Op.COMMIT_SECTION:
                if self.node_sums is not None:
                    self.node_sums.conclude()
                if self.sections is not None:
                    self.sections.begin(self.work)
            case _:
                raise AssertionError(f"{op} ends a step, and is no part of a pipeline's work")

    def _expect(self, program: Program, microbatches: Sequence[int]) -> None:
        """Begin to receive all messages, those of each neighbour in the program's order."""
        # Helper threads post them ahead, so that a tensor has often arrived before its instruction.
        for instruction in program:
            op, chunk = instruction.op, instruction.chunk
            if op not in (Op.RECV_F, Op.RECV_B):
                continue
            inbox, post = self._inbox_of(self._neighbour(op, chunk), op, chunk)
            inbox.expect(self._tag(op, microbatches[_position(instruction)], chunk), post)

    def _inbox_of(self, stage: int, op: Op, chunk: int) -> tuple[Inbox, Post]:
        """Return the inbox for a neighbour's messages, and the function that posts the receive of one."""
        rank = self.pipeline_rank
        assert rank.group is not None
        source = rank.member(stage)
        if stage not in self._inboxes:
            self._inboxes[stage] = rank.group.inbox(source)
        return self._inboxes[stage], self._messages.post_from(source, to_chunk=chunk if op is Op.RECV_F else None)

    def _neighbour(self, op: Op, chunk: int) -> int:
        rank = self.pipeline_rank
        return (rank.before(chunk) if op in _UPSTREAM_OPS else rank.after(chunk))[0]

    def _check(self) -> None:
        """Raise Interrupted if the pipeline is stopped, before a piece of computation, which cannot be interrupted."""
        if self.commit_state.is_pipeline_stopped():
            raise Interrupted

    def _take(self, op: Op, chunk: int) -> torch.Tensor:
        inbox = self._inboxes[self._neighbour(op, chunk)]
        # The neighbour may be waiting for this worker's part of a section before it sends.
        if self.sections is not None:
            self.sections.look_until(inbox.has_arrived, self.commit_state.is_pipeline_stopped, [inbox.source])
        return inbox.take(self.commit_state.is_pipeline_stopped)

    def _forward(self, microbatch: int, chunk: int) -> None:
        with nullcontext() if self.node_sums is None else self.node_sums.forward(chunk):
            self._outputs[microbatch, chunk] = self.model.carry(
                self._batches[microbatch],
                self._inputs.get((microbatch, chunk)),
                num_items=self.batch.divisor,
                key=self.batch.key(microbatch),
                chunk=chunk,
            )
        if chunk == self.pipeline_rank.num_chunks - 1:
            del self._batches[microbatch]

    def _backward_input(self, microbatch: int, chunk: int) -> None:
        """Run a backward pass, with all gradients but those of weights that are put off."""
        self._check()
        if self.put_off is not None:
            self.put_off.begin(microbatch)
        passing = microbatch, chunk
        output, gradients = self._outputs.pop(passing), self._output_gradients.pop(passing, None)
        if self._reports_loss(chunk):
            assert isinstance(output, torch.Tensor)
            # Kept on the device: reading a loss here would wait for everything launched so far.
            self.work.losses.append(output.detach())
            self.work.num_items += self._num_items.pop(microbatch)
        with nullcontext() if self.node_sums is None else self.node_sums.backward(chunk):
            run_backward(output, gradients)

    def _backward_weight(self, microbatch: int, chunk: int) -> None:
        if self.put_off is not None:
            self.put_off.finish(microbatch)
        # A backward pass takes a stage's chunks in reverse, so a microbatch is done with the first of them.
        if chunk == 0:
            self.commit_state.note_microbatch()
        if self.pipeline_rank.is_first(chunk) and self.pipeline_rank.counts:
            self.work.counted.append(self.batch.number(microbatch))

    def _reports_loss(self, chunk: int) -> bool:
        return self.pipeline_rank.is_last(chunk) and self.pipeline_rank.reports

    def _address(self, op: Op, microbatch: int, chunk: int) -> tuple[int, int]:
        return self.pipeline_rank.member(self._neighbour(op, chunk)), self._tag(op, microbatch, chunk)

    def _tag(self, op: Op, microbatch: int, chunk: int) -> int:
        """Return a number that no other message of the step has between the same two workers."""
        # Two stages may exchange messages of several chunks, in both directions of the computation.
        rank, is_backward = self.pipeline_rank, op in (Op.SEND_B, Op.RECV_B)
        cut = rank.cut_before(chunk) if op in _UPSTREAM_OPS else rank.cut_after(chunk)
        return 2 * rank.tag(microbatch, cut) + is_backward


def _position(instruction: Instruction) -> int:
    assert instruction.microbatch is not None, instruction
    return instruction.microbatch
