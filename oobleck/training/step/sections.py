"""Sections of a step: carries out the effects of `control.steps.PartialCommit` with real sums, while a program runs.

`PartialCommit` decides when a section begins, is committed or is given up. `sim/cluster/sections.py` does the same
without tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import assert_never

import torch

from oobleck.control import steps
from oobleck.control.protocol import Subject, Tally, Topic, Totals
from oobleck.planner import WorkerId
from oobleck.training.comm import HostCopy, PeerAgreements, Waiter

from .reduction import PlanReducer
from .step_work import StepWork


@dataclass(slots=True, kw_only=True)
class _Posted:
    """A section whose sums are under way."""

    work: StepWork  # it was taken from this, and may be given back to it
    own: dict[str, torch.Tensor]  # this worker's gradients
    losses: list[torch.Tensor]
    loss: HostCopy | None
    counted: list[int]
    num_items: int
    sums: dict[str, torch.Tensor] | None = None  # until all are complete
    subject: Subject | None = None  # until this worker has posted its part of the section's agreement


@dataclass(slots=True)
class SectionSums:
    """The committed sums, and the section that is to be added to them."""

    partial_commit: steps.PartialCommit
    commit_state: steps.CommitState
    waiter: Waiter
    agreements: PeerAgreements
    _: KW_ONLY
    drive: Callable[[steps.WorkerEffects], None]
    """Carries out effects of `partial_commit`, those of sections by `carry_out`."""
    sums: dict[str, torch.Tensor] = field(init=False, default_factory=dict)
    """The committed sums of gradients, keyed by parameter."""
    _in_force: PlanReducer | None = field(init=False, default=None)
    _work: StepWork | None = field(init=False, default=None)  # of the step in flight, once a section of it has begun
    _posted: _Posted | None = field(init=False, default=None)

    def adopt(self, in_force: PlanReducer | None, sums: Mapping[str, torch.Tensor]) -> None:
        """Put a plan in force, with these committed sums of the step in flight; None for a spare."""
        # This reducer also ends the step: its own sums are never under way when a section begins.
        self._in_force, self.sums = in_force, dict(sums)

    def end_step(self) -> None:
        """Drop the committed sums of a step that is applied."""
        self.sums = {}

    def begin_step_sums(self) -> bool:
        """Return whether the step's own sums may be posted: no section is under way, and none has failed."""
        return self.partial_commit.begin_step_sums()

    def begin(self, work: StepWork) -> None:
        """Begin to commit the work so far, while the program goes on. Raises Interrupted if the pipeline is stopped."""
        self._work = work
        self.drive(self.partial_commit.begin(work.step))

    def look(self) -> None:
        """Advance as far as possible without waiting. Never blocks, raises nothing."""
        if self.partial_commit.is_busy and self._can_move():
            self.drive(self.partial_commit.look())

    def look_until(
        self, ready: Callable[[], bool], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId]
    ) -> None:
        """Advance the section during a wait for something else. Raises Interrupted once `interrupted`.

        Returns once `ready`, or once no section is under way.
        """
        waits_for = tuple(waits_for)
        # The workers that this one waits for may themselves wait for its part of the section.
        while self.partial_commit.is_busy and not ready():
            self.waiter.wait(lambda: ready() or self._can_move(), interrupted, waits_for, poll_s=self._poll_s)
            self.look()

    def carry_out(self, effect: steps.SectionEffect) -> steps.EffectOutcome:
        match effect:
            case steps.PostSection():
                self._post()
            case steps.TakeSums():
                reducer = self._plan.reducer
                # This runs between two instructions of a program, which never stops for a section.
                if not reducer.is_done():
                    return False
                self._section.sums = reducer.finish(self.commit_state.is_fenced)
                return True
            case steps.PostTotals(number=number):
                section = self._section
                loss = 0.0 if section.loss is None else sum(section.loss.wait().tolist())
                section.subject = Subject(Topic.SECTION, section.work.step, number)
                part = Totals((loss, float(section.num_items)), Tally.of(section.counted))
                self.agreements.bring(self._plan.committee, section.subject, part)
            case steps.TakeTotals():
                return self._take_totals()
            case steps.Fold():
                self._fold()
            case steps.AwaitSection():
                self.waiter.wait(self._can_move, self.commit_state.is_fenced, self._awaited(), poll_s=self._poll_s)
            case steps.GiveBack():
                self._give_back()
            case _:
                assert_never(effect)
        return None

    def _post(self) -> None:
        work, reducer = self._work, self._plan.reducer
        assert work is not None
        # Gradients are set aside without a copy: the next backward pass begins new ones.
        own: dict[str, torch.Tensor] = {}
        for name, parameter in reducer.parameters.items():
            if parameter.grad is not None:
                own[name], parameter.grad = parameter.grad.detach(), None
        losses, work.losses = work.losses, []
        counted, work.counted = work.counted, []
        num_items, work.num_items = work.num_items, 0
        # Copied now, so that reading the loss later waits for no computation that is launched meanwhile.
        loss = HostCopy(torch.stack(losses)) if losses else None
        self._posted = _Posted(work=work, own=own, losses=losses, loss=loss, counted=counted, num_items=num_items)
        reducer.begin(own)

    def _take_totals(self) -> steps.SectionTotals | None:
        subject, committee = self._section.subject, self._plan.committee
        assert subject is not None
        if not self.agreements.is_done(committee, subject):
            return None
        total = self.agreements.wait(committee, subject, self.commit_state.is_fenced)
        loss, num_items = total.numbers
        return steps.SectionTotals(loss, total.counted, int(num_items))

    def _fold(self) -> None:
        sums = self._section.sums
        assert sums is not None
        with torch.no_grad():
            if self.sums:
                assert self.sums.keys() == sums.keys()
                names = list(self.sums)
                torch._foreach_add_([self.sums[name] for name in names], [sums[name] for name in names])
            else:
                # Copies, as these sums are views of the reducer's buffers, which the next section writes to.
                self.sums = {name: gradient.clone() for name, gradient in sums.items()}
        self._posted = None

    def _give_back(self) -> None:
        section, reducer = self._section, self._plan.reducer
        work, self._posted = section.work, None
        # The sums ran in copies, so this worker's own gradients are as it set them aside.
        reducer.abandon()
        # In front, so that results are in the same order as without the section.
        work.losses = [*section.losses, *work.losses]
        work.counted = [*section.counted, *work.counted]
        work.num_items += section.num_items
        for name, gradient in section.own.items():
            parameter = reducer.parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    @property
    def _section(self) -> _Posted:
        assert self._posted is not None
        return self._posted

    @property
    def _plan(self) -> PlanReducer:
        assert self._in_force is not None
        return self._in_force

    def _can_move(self) -> bool:
        section = self._section
        if section.sums is None:
            return self._plan.reducer.is_done()
        return section.subject is None or self.agreements.is_done(self._plan.committee, section.subject)

    def _awaited(self) -> tuple[WorkerId, ...]:
        section = self._section
        if section.sums is None:
            return self._plan.reducer.awaited
        return self.agreements.others(self._plan.committee)

    @property
    def _poll_s(self) -> float | None:
        # Messages of an agreement wake the waiter, so that needs no polling.
        return self._plan.reducer.poll_s if self._section.sums is None else None
