"""Executes the compiled program of one stage, instruction by instruction.

This module decides nothing: the program states what to compute, receive and send, and in which order. Helper threads
post receives ahead in the program's order, so that a tensor has often arrived before its instruction. Sends are posted
and forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from oobleck.control.steps import CommitState, Interrupted
from oobleck.schedule import Instruction, Op, Program
from oobleck.training.comm import DeviceWork, Inbox, Pending, Post
from oobleck.training.data import Batch
from oobleck.training.model import StageModel, WeightGradients

from .sections import SectionSums
from .step_work import GlobalBatch, PipelineRank, StepWork

_Passing = tuple[int, int]
"""A microbatch, and the chunk of the stage that it passes."""
_GRADIENT_OPS = (Op.BACKWARD, Op.BACKWARD_WEIGHT)
_COMPUTING_OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)


class Execution:
    """Runs one program for some microbatches of a step, which have the step's numbers."""

    def __init__(
        self,
        batch: GlobalBatch,
        work: StepWork,
        pipeline_rank: PipelineRank,
        model: StageModel,
        commit_state: CommitState,
        *,
        put_off: WeightGradients | None,
        sections: SectionSums | None,
        device_work: DeviceWork | None,
    ) -> None:
        """Results are added to `work`. `put_off` holds gradients for BACKWARD_WEIGHT, `sections` advance between
        instructions, and `device_work` times a GPU's computation; each is None where the program needs none.
        """
        self._batch = batch
        self._work = work
        self._pipeline_rank = pipeline_rank
        self._model = model
        self._commit_state = commit_state
        self._put_off = put_off
        self._sections = sections
        self._device_work = device_work
        self._interrupted = commit_state.is_pipeline_stopped
        self._batches: dict[int, Batch] = {}
        self._num_items: dict[int, int] = {}
        """Counted tokens of loaded microbatches, where this stage reports losses."""
        self._inputs: dict[_Passing, torch.Tensor] = {}
        self._outputs: dict[_Passing, torch.Tensor] = {}
        self._output_gradients: dict[_Passing, torch.Tensor] = {}
        self._inboxes: dict[int, Inbox] = {}
        """The inboxes for neighbours' messages, keyed by the neighbour's stage."""
        self._steps: dict[Op, Callable[[int, int], None]] = {
            Op.LOAD: self._load,
            Op.RECV_F: self._receive_forward,
            Op.FORWARD: self._forward,
            Op.SEND_F: self._send_forward,
            Op.RECV_B: self._receive_backward,
            Op.BACKWARD: self._backward,
            Op.BACKWARD_INPUT: self._backward_input,
            Op.BACKWARD_WEIGHT: self._backward_weight,
            Op.SEND_B: self._send_backward,
            Op.COMMIT_SECTION: self._begin_section,
        }

    def run(
        self, program: Program, microbatches: Sequence[int], *, around_last: AbstractContextManager[object]
    ) -> None:
        """Run a stage's program up to the instructions that end a step; adds to the work and to the gradients.

        The program's positions 0 .. m-1 stand for `microbatches`, the step's numbers. `around_last` is entered for the
        backward pass after which gradients are final.

        Raises Interrupted once the pipeline is stopped, PeerLost when a neighbour is gone, or ShardUnreadable;
        gradients are then partial.
        """
        self._expect(program, microbatches)
        last = max((at for at, instruction in enumerate(program) if instruction.op in _GRADIENT_OPS), default=None)
        if self._device_work is not None:
            self._device_work.begin()
        with self._model.casting_once():
            for at, instruction in enumerate(program):
                if instruction.op.is_tail:
                    break
                with around_last if at == last else nullcontext(), self._timing(instruction.op):
                    self._steps[instruction.op](microbatches[_position(instruction)], instruction.chunk)
                if self._sections is not None:
                    self._sections.look()

    def _timing(self, op: Op) -> AbstractContextManager[object]:
        return self._device_work.piece() if self._device_work is not None and op in _COMPUTING_OPS else nullcontext()

    def _expect(self, program: Program, microbatches: Sequence[int]) -> None:
        """Begin to receive all messages, those of each neighbour in the program's order."""
        for instruction in program:
            op, chunk = instruction.op, instruction.chunk
            if op not in (Op.RECV_F, Op.RECV_B):
                continue
            stage, _ = self._pipeline_rank.before(chunk) if op is Op.RECV_F else self._pipeline_rank.after(chunk)
            inbox, post = self._inbox_of(stage)
            inbox.expect(self._tag(op, microbatches[_position(instruction)], chunk), post)

    def _inbox_of(self, stage: int) -> tuple[Inbox, Post]:
        """Return the inbox for a neighbour's messages, and the function that posts the receive of one."""
        group, source, model = self._pipeline_rank.group, self._pipeline_rank.member(stage), self._model
        assert group is not None
        shape = (self._batch.microbatch_size, model.structure.sequence_length, model.structure.hidden_size)

        def post(tag: int) -> tuple[Pending, torch.Tensor]:
            return group.post_receive_ahead(shape, model.hidden_dtype, model.device, source, tag)

        if stage not in self._inboxes:
            self._inboxes[stage] = group.inbox(source)
        return self._inboxes[stage], post

    def _check(self) -> None:
        """Raise Interrupted if the pipeline is stopped, before a piece of computation, which cannot be interrupted."""
        if self._interrupted():
            raise Interrupted

    def _take(self, stage: int) -> torch.Tensor:
        inbox = self._inboxes[stage]
        if self._sections is not None:
            self._sections.look_until(inbox.has_arrived, self._interrupted, [inbox.source])
        return inbox.take(self._interrupted)

    def _load(self, microbatch: int, _chunk: int) -> None:
        self._check()
        batch = self._batch.load(microbatch)
        if self._reports_loss(self._pipeline_rank.num_chunks - 1):
            self._num_items[microbatch] = batch.num_items
        self._batches[microbatch] = batch.to(self._model.device)

    def _receive_forward(self, microbatch: int, chunk: int) -> None:
        stage, _ = self._pipeline_rank.before(chunk)
        self._inputs[microbatch, chunk] = self._take(stage).requires_grad_()

    def _forward(self, microbatch: int, chunk: int) -> None:
        self._outputs[microbatch, chunk] = self._model.forward(
            self._batches[microbatch],
            self._inputs.get((microbatch, chunk)),
            num_items=self._batch.divisor,
            key=self._batch.key(microbatch),
            chunk=chunk,
        )
        if chunk == self._pipeline_rank.num_chunks - 1:
            del self._batches[microbatch]

    def _send_forward(self, microbatch: int, chunk: int) -> None:
        stage, _ = self._pipeline_rank.after(chunk)
        self._send(Op.SEND_F, microbatch, chunk, self._outputs[microbatch, chunk].detach(), stage)

    def _receive_backward(self, microbatch: int, chunk: int) -> None:
        stage, _ = self._pipeline_rank.after(chunk)
        self._output_gradients[microbatch, chunk] = self._take(stage)

    def _backward(self, microbatch: int, chunk: int) -> None:
        self._backward_input(microbatch, chunk)
        self._backward_weight(microbatch, chunk)

    def _backward_input(self, microbatch: int, chunk: int) -> None:
        """Run a backward pass, with all gradients but those of weights that are put off."""
        self._check()
        if self._put_off is not None:
            self._put_off.begin(microbatch)
        passing = microbatch, chunk
        output, gradient = self._outputs.pop(passing), self._output_gradients.pop(passing, None)
        if self._reports_loss(chunk):
            self._work.losses.append(output.detach())
            self._work.num_items += self._num_items.pop(microbatch)
        if output.requires_grad:  # False on a first stage that trains nothing
            output.backward(gradient)  # type: ignore[no-untyped-call]

    def _backward_weight(self, microbatch: int, chunk: int) -> None:
        if self._put_off is not None:
            self._put_off.finish(microbatch)
        if chunk == 0:  # a microbatch returns to a stage's chunks in reverse: it is done here
            self._commit_state.note_microbatch()
        if self._pipeline_rank.is_first(chunk) and self._pipeline_rank.reports:
            self._work.counted.append(microbatch)

    def _send_backward(self, microbatch: int, chunk: int) -> None:
        gradient = self._inputs.pop((microbatch, chunk)).grad
        assert gradient is not None
        stage, _ = self._pipeline_rank.before(chunk)
        self._send(Op.SEND_B, microbatch, chunk, gradient, stage)

    def _reports_loss(self, chunk: int) -> bool:
        return self._pipeline_rank.is_last(chunk) and self._pipeline_rank.reports

    def _begin_section(self, _microbatch: int, _chunk: int) -> None:
        assert self._sections is not None, "a program with sections needs their sums"
        self._sections.begin(self._work)

    def _send(self, op: Op, microbatch: int, chunk: int, tensor: torch.Tensor, target: int) -> None:
        group, member = self._pipeline_rank.group, self._pipeline_rank.member(target)
        assert group is not None
        tensor = tensor.contiguous()
        # A group that does not keep what it sends returns the send, whose tensor must live until the step is committed.
        if (pending := group.send_off(tensor, member, self._tag(op, microbatch, chunk))) is not None:
            self._work.sends.append((pending, tensor))

    def _tag(self, op: Op, microbatch: int, chunk: int) -> int:
        """Return a number that no other message of the step has between the same two workers.

        Two stages may exchange messages of several chunks, in both directions of the computation.
        """
        rank, is_backward = self._pipeline_rank, op in (Op.SEND_B, Op.RECV_B)
        cut = rank.cut_before(chunk) if op in (Op.RECV_F, Op.SEND_B) else rank.cut_after(chunk)
        return 2 * rank.tag(microbatch, cut) + is_backward


def _position(instruction: Instruction) -> int:
    assert instruction.microbatch is not None, instruction
    return instruction.microbatch
