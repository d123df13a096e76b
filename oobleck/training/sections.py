"""What of a step is banked: sums of its sections' gradients, which all owners have and no failure can take.

A section is summed and agreed on beside the computation, which does not stop for it:

    nothing ── begin ──> reducing ── all sums are here ──> committing ── all have theirs ──> banked: nothing again
                            └──────── a fence or a failure: given back, and nothing is banked any more ────┘

`sim/bank.py` is the same without tensors; model tests explore it. A section is begun only after the one before it is
banked, and the step's own reduction only after the last, so all members of a group post its sums in one order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from oobleck.control.messages import NOTHING, Banked, BankRecord
from oobleck.control.sections import banked_after, num_sections_of
from oobleck.control.standing import Interrupted, PeerLost, Standing
from oobleck.planner import ExecutionPlan, Place

from .executor import StepWork
from .groups import GroupKey, GroupTable, Reduction
from .reduction import GradientReducer
from .signals import Signals
from .staging import HostCopy

__all__ = ["Account", "Bank"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """What a plan says of banking: who sums with whom, and what was banked before it."""

    plan: ExecutionPlan
    generation: int
    num_sections: int
    """Of a whole step."""
    before: Banked
    """Of the step in flight when the plan came into force."""
    parameters: Mapping[str, nn.Parameter]
    reducer: GradientReducer
    """The one that also ends the step: it has no sums under way when a section begins."""
    key: GroupKey
    """The group of all workers."""


@dataclass(slots=True, kw_only=True)
class _Section:
    """A section whose gradients are on their way."""

    number: int
    step: int
    own: dict[str, torch.Tensor]
    """This worker's gradients, set aside."""
    losses: list[torch.Tensor]
    loss: HostCopy | None
    counts: dict[int, int]
    sums: dict[str, torch.Tensor] | None = None
    """Once they are all here."""
    commit: Reduction | None = None
    vector: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """The section's loss, and how often each microbatch of the step is in it."""
    failure: PeerLost | None = None


class Bank:
    """Mutable: what is banked of the step in flight, and the section that is about to be."""

    def __init__(
        self,
        standing: Standing,
        groups: GroupTable,
        signals: Signals,
        *,
        num_microbatches: int,
        tells: bool,
        on_banked: Callable[[], None],
        on_failed: Callable[[int, PeerLost], None],
    ) -> None:
        """`tells` if this worker tells of losses and counts: of the devices that share a stage, one does.

        `on_banked` is called whenever another section is banked, `on_failed` with the plan's generation when one
        fails: others wait for it, and this pipeline's own work goes on.
        """
        self._standing = standing
        self._groups = groups
        self._signals = signals
        self._num_microbatches = num_microbatches
        self._tells = tells
        self._on_banked = on_banked
        self._on_failed = on_failed
        self._account: Account | None = None
        self._section: _Section | None = None
        self._before = NOTHING
        self._number = 0
        self.sums: dict[str, torch.Tensor] = {}
        """Of the gradients of what is banked, by parameter; empty where nothing is."""
        self.loss = 0.0
        """The part of the step's loss that what is banked makes."""

    # --- what is banked ------------------------------------------------------------------------------------

    @property
    def before(self) -> tuple[int, ...]:
        """The microbatches of the step in flight that were banked before the plan in force."""
        return self._before.microbatches

    @property
    def microbatches(self) -> tuple[int, ...]:
        """All that are banked of the step in flight."""
        return self._microbatches_after(self._number)

    @property
    def num_sections(self) -> int:
        """Into how many sections the step in flight is cut under the plan in force."""
        account = self._account
        return 1 if account is None else num_sections_of(account.plan, self.before, account.num_sections)

    def is_at(self, banked: Banked) -> bool:
        """Tell whether just this is banked here."""
        generation = 0 if self._account is None else self._account.generation
        here = (generation, self._number) if self._number else (self._before.generation, self._before.number)
        return here == (banked.generation, banked.number)

    def tensors_of(self, names: Iterable[str]) -> tuple[torch.Tensor, ...]:
        """Return what is banked for these parameters, as it is: it changes with each section."""
        return tuple(self.sums[name] for name in names)

    def adopt(self, account: Account | None, sums: Mapping[str, torch.Tensor]) -> None:
        """A plan comes into force, with these sums banked of the step in flight; None for a spare."""
        assert self._section is None, "what was on its way is given back before"
        self._account = account
        self._before = NOTHING if account is None else account.before
        self._number, self.loss, self.sums = 0, self._before.loss, dict(sums)

    def end_step(self) -> None:
        """The step is applied: nothing is banked of the next."""
        self._before, self._number, self.loss, self.sums = NOTHING, 0, 0.0, {}

    # --- a section -----------------------------------------------------------------------------------------

    @property
    def is_clear(self) -> bool:
        """Nothing is on its way, nor was and failed."""
        return self._section is None

    def begin(self, work: StepWork) -> None:
        """Have what is done of a step banked, beside what follows; nothing is, once a section failed or was fenced.

        Waits for the section before. Raises Interrupted where the pipeline is stopped.
        """
        try:
            self.settle()
        except PeerLost:
            return  # it is told: the pipeline's own work is sound
        except Interrupted:
            if self._standing.is_pipeline_stopped():
                raise
            return
        if self._standing.is_fenced():
            return
        account = self._account
        assert account is not None
        own: dict[str, torch.Tensor] = {}
        for name, parameter in account.parameters.items():
            if parameter.grad is not None:
                own[name], parameter.grad = parameter.grad.detach(), None
        losses, work.losses = work.losses, []
        counts, work.counts = work.counts, {}
        self._section = _Section(
            number=self._number + 1,
            step=work.step,
            own=own,
            losses=losses,
            loss=HostCopy(torch.stack(losses)) if losses else None,
            counts=counts,
        )
        account.reducer.begin(own)

    def look(self) -> None:
        """Move on as far as the others let us. Never blocks, raises nothing."""
        section = self._section
        if section is None or section.failure is not None or self._standing.is_fenced():
            return
        try:
            self._move(section)
        except PeerLost as error:
            section.failure = error
            assert self._account is not None
            self._on_failed(self._account.generation, error)
        except Interrupted:
            pass  # a fence came first: whoever ordered it decides what becomes of the section

    def look_until(
        self, ready: Callable[[], bool], interrupted: Callable[[], bool], waits_for: Iterable[Place]
    ) -> None:
        """Look after the section while waiting for something else: others could wait for our part in it.

        Returns once `ready`, or with nothing to look after. Raises Interrupted once `interrupted`.
        """
        waits_for = tuple(waits_for)
        while self._is_busy and not ready():
            self._signals.wait(lambda: ready() or self._can_move(), interrupted, waits_for, poll_s=self._poll_s)
            self.look()

    def settle(self) -> None:
        """Wait until the section on its way is banked. Raises Interrupted or PeerLost; it is still there then."""
        while (section := self._section) is not None:
            if section.failure is not None:
                raise section.failure
            self._signals.wait(self._can_move, self._standing.is_fenced, self._awaited(), poll_s=self._poll_s)
            if self._standing.is_fenced():
                raise Interrupted
            self.look()

    def catch_up(self, record: BankRecord) -> None:
        """Bank by order what is reduced, if it is not banked yet."""
        if self._standing.catch_up_bank(record):
            section = self._section
            assert section is not None
            self._fold(section, record)

    def give_back(self, work: StepWork | None) -> None:
        """Give up the section on its way: it counts as work that was done of the step, not banked."""
        section, self._section = self._section, None
        if section is None:
            return
        account = self._account
        assert account is not None
        assert work is not None, "a section is of the step in flight"
        account.reducer.abandon()
        work.losses = [*section.losses, *work.losses]
        work.counts = {
            key: section.counts.get(key, 0) + work.counts.get(key, 0) for key in section.counts | work.counts
        }
        for name, gradient in section.own.items():
            parameter = account.parameters[name]
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    # --- how it moves --------------------------------------------------------------------------------------

    def _move(self, section: _Section) -> None:
        """Take the next moves that can be made. Raises Interrupted or PeerLost."""
        account = self._account
        assert account is not None
        fenced = self._standing.is_fenced
        if section.sums is None and account.reducer.is_done():
            section.sums = account.reducer.finish(fenced)
            self._standing.note_bank_reduced(section.number)
            section.vector = self._contribution(section)
            if len(account.key.members) > 1:
                section.commit = self._groups[account.key].all_reduce(section.vector, self._signals)
        if section.sums is not None and (section.commit is None or section.commit.is_done()):
            if section.commit is not None:
                section.commit.wait(fenced)
            loss, *counts = section.vector.tolist()
            fresh = set(self._microbatches_after(section.number)).difference(self.microbatches)
            expected = [float(microbatch in fresh) for microbatch in range(self._num_microbatches)]
            assert counts == expected, f"section {section.number} of step {section.step}: microbatches counted {counts}"
            record = BankRecord(
                step=section.step,
                generation=account.generation,
                number=section.number,
                loss=self.loss + loss,
            )
            self._standing.bank(record)
            self._fold(section, record)

    def _contribution(self, section: _Section) -> torch.Tensor:
        vector = torch.zeros(1 + self._num_microbatches, dtype=torch.float64)
        if self._tells:
            vector[0] = 0.0 if section.loss is None else sum(section.loss.wait().tolist())
            for microbatch, count in section.counts.items():
                vector[1 + microbatch] = count
        return vector

    def _fold(self, section: _Section, record: BankRecord) -> None:
        """Put a section's sums to those that are banked. Nothing can interrupt this."""
        assert section.sums is not None, f"section {record.number} of step {record.step} is claimed to be reduced"
        with torch.no_grad():
            if self.sums:
                assert self.sums.keys() == section.sums.keys()
                names = list(self.sums)
                torch._foreach_add_([self.sums[name] for name in names], [section.sums[name] for name in names])
            else:
                self.sums = {name: gradient.clone() for name, gradient in section.sums.items()}
        self._section = None
        self._number, self.loss = record.number, record.loss
        self._on_banked()

    def _microbatches_after(self, number: int) -> tuple[int, ...]:
        account = self._account
        if account is None or not number:
            return self.before
        return banked_after(account.plan, self.before, account.num_sections, number)

    @property
    def _is_busy(self) -> bool:
        """A section is on its way, and may still arrive."""
        return self._section is not None and self._section.failure is None and not self._standing.is_fenced()

    def _can_move(self) -> bool:
        section, account = self._section, self._account
        assert section is not None
        assert account is not None
        if section.sums is None:
            return account.reducer.is_done()
        return section.commit is None or section.commit.is_done()

    def _awaited(self) -> tuple[Place, ...]:
        section, account = self._section, self._account
        assert section is not None
        assert account is not None
        if section.sums is None:
            return account.reducer.awaited
        return () if section.commit is None else section.commit.others

    @property
    def _poll_s(self) -> float | None:
        section, account = self._section, self._account
        assert account is not None
        return account.reducer.poll_s if section is not None and section.sums is None else None
