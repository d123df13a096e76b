"""Sections of a step: carries out the effects of `control.commit.partial_commit` with real sums, while a program runs.

What is done of a step is set aside without a copy; its sums are added to those that are committed. When
anything is begun, taken or given up is for `PartialCommit` to say; here is how, and the waiting.
`sim/cluster/sections.py` is the same without tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

import torch
from torch import nn

from oobleck.control.commit import (
    AwaitSection,
    CommitState,
    Effects,
    Fold,
    GiveBack,
    GroupKey,
    Outcome,
    PartialCommit,
    PostSection,
    PostTotals,
    SectionEffect,
    TakeSums,
    TakeTotals,
    Totals,
)
from oobleck.planner import WorkerId
from oobleck.training.comm import GroupTable, HostCopy, Reduction, Waiter

from .executor import StepWork
from .reduction import GradientReducer, counted_in

__all__ = ["SectionGroups", "SectionSums"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SectionGroups:
    """Who sums with whom under a plan."""

    parameters: Mapping[str, nn.Parameter]
    reducer: GradientReducer
    """The one that also ends the step: it has no sums under way when a section begins."""
    everyone: GroupKey


@dataclass(slots=True, kw_only=True)
class _Posted:
    """A section whose gradients are on their way."""

    own: dict[str, torch.Tensor]
    """This worker's gradients, set aside."""
    losses: list[torch.Tensor]
    loss: HostCopy | None
    counts: dict[int, int]
    sums: dict[str, torch.Tensor] | None = None
    """Once they are all here."""
    agreement: Reduction | None = None
    vector: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """The section's loss, and how often each microbatch of the step is in it."""


class SectionSums:
    """Mutable: the committed sums, and the section that is on its way to them. The executor's `SectionCommitter`."""

    def __init__(
        self,
        partial_commit: PartialCommit,
        commit_state: CommitState,
        groups: GroupTable,
        waiter: Waiter,
        *,
        num_microbatches: int,
        tells: bool,
        work: Callable[[], StepWork | None],
        carry_out: Callable[[Effects], None],
        on_folded: Callable[[], None],
    ) -> None:
        """`tells` if this worker tells of losses and counts: of the devices that share a stage, one does.

        `work` is what is done of the step in flight, `carry_out` carries out what `partial_commit` asks for, and
        `on_folded` is called whenever another section is committed.
        """
        self._partial_commit = partial_commit
        self._commit_state = commit_state
        self._waiter = waiter
        self._groups = groups
        self._num_microbatches = num_microbatches
        self._tells = tells
        self._work = work
        self._carry_out = carry_out
        self._on_folded = on_folded
        self._in_force: SectionGroups | None = None
        self._posted: _Posted | None = None
        self.sums: dict[str, torch.Tensor] = {}
        """Of the gradients of what is committed, by parameter; empty where nothing is."""

    def adopt(self, groups: SectionGroups | None, sums: Mapping[str, torch.Tensor]) -> None:
        """A plan comes into force, with these sums committed of the step in flight; None for a spare."""
        self._in_force, self.sums = groups, dict(sums)

    def end_step(self) -> None:
        """The step is applied: nothing is committed of the next."""
        self.sums = {}

    def tensors_of(self, names: Iterable[str]) -> tuple[torch.Tensor, ...]:
        """Return what is committed for these parameters, as it is: it changes with each section."""
        return tuple(self.sums[name] for name in names)

    # --- while a program runs ------------------------------------------------------------------------------

    def begin(self, work: StepWork) -> None:
        """Have what is done of a step committed, beside what follows. Raises Interrupted if the pipeline is stopped."""
        self._carry_out(self._partial_commit.begin(work.step))

    def look(self) -> None:
        """Move on as far as the others let us. Never blocks, raises nothing."""
        if self._partial_commit.is_busy and self._can_move():
            self._carry_out(self._partial_commit.look())

    def look_until(
        self, ready: Callable[[], bool], interrupted: Callable[[], bool], waits_for: Iterable[WorkerId]
    ) -> None:
        """Look after the section while waiting for something else: others could wait for our part in it.

        Returns once `ready`, or with nothing to look after. Raises Interrupted once `interrupted`.
        """
        waits_for = tuple(waits_for)
        while self._partial_commit.is_busy and not ready():
            self._waiter.wait(lambda: ready() or self._can_move(), interrupted, waits_for, poll_s=self._poll_s)
            self.look()

    # --- effects -------------------------------------------------------------------------------------------

    def carry_out(self, effect: SectionEffect) -> Outcome:
        """Carry one effect of the partial commit out. Raises what the effect may raise."""
        match effect:
            case PostSection():
                self._post()
            case TakeSums():
                return self._take_sums()
            case PostTotals():
                self._post_totals()
            case TakeTotals():
                return self._take_totals()
            case Fold():
                self._fold()
            case AwaitSection():
                self._waiter.wait(self._can_move, self._commit_state.is_fenced, self._awaited(), poll_s=self._poll_s)
            case GiveBack():
                self._give_back()
            case _:
                assert_never(effect)
        return None

    def _post(self) -> None:
        work, groups = self._work(), self._groups_in_force
        assert work is not None
        own: dict[str, torch.Tensor] = {}
        for name, parameter in groups.parameters.items():
            if parameter.grad is not None:
                own[name], parameter.grad = parameter.grad.detach(), None
        losses, work.losses = work.losses, []
        counts, work.counts = work.counts, {}
        self._posted = _Posted(
            own=own, losses=losses, loss=HostCopy(torch.stack(losses)) if losses else None, counts=counts
        )
        groups.reducer.begin(own)

    def _take_sums(self) -> bool:
        reducer = self._groups_in_force.reducer
        if not reducer.is_done():
            return False
        self._section.sums = reducer.finish(self._commit_state.is_fenced)
        return True

    def _post_totals(self) -> None:
        section, everyone = self._section, self._groups_in_force.everyone
        section.vector = self._contribution(section)
        if len(everyone.members) > 1:
            section.agreement = self._groups[everyone].all_reduce(section.vector, self._waiter)

    def _contribution(self, section: _Posted) -> torch.Tensor:
        vector = torch.zeros(1 + self._num_microbatches, dtype=torch.float64)
        if self._tells:
            vector[0] = 0.0 if section.loss is None else sum(section.loss.wait().tolist())
            for microbatch, count in section.counts.items():
                vector[1 + microbatch] = count
        return vector

    def _take_totals(self) -> Totals | None:
        section = self._section
        if section.agreement is not None:
            if not section.agreement.is_done():
                return None
            section.agreement.wait(self._commit_state.is_fenced)
        loss, *counts = section.vector.tolist()
        return Totals(loss, counted_in(counts))

    def _fold(self) -> None:
        sums = self._section.sums
        assert sums is not None
        with torch.no_grad():
            if self.sums:
                assert self.sums.keys() == sums.keys()
                names = list(self.sums)
                torch._foreach_add_([self.sums[name] for name in names], [sums[name] for name in names])
            else:
                self.sums = {name: gradient.clone() for name, gradient in sums.items()}
        self._posted = None
        self._on_folded()

    def _give_back(self) -> None:
        work, section, groups = self._work(), self._section, self._groups_in_force
        assert work is not None, "a section is of the step in flight"
        self._posted = None
        groups.reducer.abandon()
        work.losses = [*section.losses, *work.losses]
        work.counts = {
            key: section.counts.get(key, 0) + work.counts.get(key, 0) for key in section.counts | work.counts
        }
        for name, gradient in section.own.items():
            parameter = groups.parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    # --- what is waited for --------------------------------------------------------------------------------

    @property
    def _section(self) -> _Posted:
        assert self._posted is not None
        return self._posted

    @property
    def _groups_in_force(self) -> SectionGroups:
        assert self._in_force is not None
        return self._in_force

    def _can_move(self) -> bool:
        section = self._section
        if section.sums is None:
            return self._groups_in_force.reducer.is_done()
        return section.agreement is None or section.agreement.is_done()

    def _awaited(self) -> tuple[WorkerId, ...]:
        section = self._section
        if section.sums is None:
            return self._groups_in_force.reducer.awaited
        return () if section.agreement is None else section.agreement.others

    @property
    def _poll_s(self) -> float | None:
        return self._groups_in_force.reducer.poll_s if self._section.sums is None else None
