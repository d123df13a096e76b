"""What the journal says of the states that a script saves: their steps, how safe they are, and which are lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oobleck.control import journal, protocol
from oobleck.control.events import Turn

from .copies import Copies

_SAFETY_S = 10.0
_STEPS_S = 1.0


@dataclass(frozen=True, slots=True)
class _Told:
    """The newest state whose steps are recorded, and from when on the next is."""

    state: protocol.ScriptState | None = None
    progress: protocol.ScriptProgress | None = None
    due_s: float = 0.0


@dataclass(frozen=True, slots=True, order=True)
class SavedStep:
    """A step of this run that all ranks had saved. Greater ones replace others, as later generations may go back."""

    generation: int
    step: int


@dataclass(frozen=True, slots=True)
class _Before:
    """What was saved when a generation began."""

    generation: int
    step: int
    why_lost: str


class SavedSteps:
    """Records what `copies` knows, now and then."""

    def __init__(self, copies: Copies, run_digits: str, recorded: SavedStep | None = None) -> None:
        """`run_digits` are those with which the starts of this run begin; an earlier master has `recorded` a step."""
        self._copies = copies
        self._run_digits = run_digits
        self._told = _Told()
        self._told_safety: journal.StatesProtected | None = None
        self._recorded = recorded
        self._before: _Before | None = None
        """None once it is known what the generation has lost of it."""

    @property
    def due_s(self) -> float:
        """When `tell_steps` has something to record."""
        return self._told.due_s if self._has_untold else math.inf

    @property
    def _has_untold(self) -> bool:
        return self._copies.progress is not None and self._copies.newest != self._told.state

    def begin(self, generation: int) -> None:
        """Note that the ranks of a generation start."""
        newest, recorded = self._newest, self._recorded
        why_lost = ""
        if newest is not None and (recorded is None or newest >= recorded):
            assert self._copies.newest is not None
            recorded, why_lost = newest, self._copies.why_lost(self._copies.newest)
        self._before = None if recorded is None else _Before(generation, recorded.step, why_lost)

    @property
    def _newest(self) -> SavedStep | None:
        state = self._copies.newest
        # An older number is one of a run before, from which this one continues.
        if state is None or not state.start.partition("-")[2].startswith(self._run_digits):
            return None
        return SavedStep(int(state.start.rpartition("-")[2]), state.step)

    def tell_lost(self, turn: Turn) -> None:
        """Warn of the steps that were saved, and that the ranks that run compute again; once a generation."""
        before, step = self._before, self._copies.continued_from
        if before is None or step is None:
            return
        self._before = None
        if step >= before.step:
            return
        are = f"steps {step + 1} to {before.step}, which were saved, are"
        if step + 1 == before.step:
            are = f"step {before.step}, which was saved, is"
        why = f", because {before.why_lost}" if before.why_lost else ""
        goes_on = f"continues after step {step}" if step else "begins with step 1"
        turn.note("warning", f"{are} computed again: generation {before.generation} {goes_on}{why}")

    def tell_last(self, turn: Turn) -> None:
        """Record the steps that are not recorded yet: the run ends."""
        self._told = _Told(self._told.state, self._told.progress)
        self.tell_steps(turn)

    def tell_steps(self, turn: Turn) -> None:
        """Record the steps of the newest state, at most once a second."""
        newest, progress, told = self._copies.newest, self._copies.progress, self._told
        if not self._has_untold or newest is None or progress is None or turn.now_s < told.due_s:
            return
        before = told.progress if told.state is not None and told.state.start == newest.start else None
        if (saved := self._newest) is not None:
            entry = journal.StepsSaved(
                t_s=turn.now_s,
                generation=saved.generation,
                # A script may save the state again that it has loaded.
                first_step=min(newest.step, 1 + (told.state.step if before and told.state else progress.from_step)),
                step=newest.step,
                worked_s=max(0.0, progress.worked_s - (0.0 if before is None else before.worked_s)),
                loss=float(progress.loss) if progress.loss else None,
            )
            turn.record(entry)
        self._told = _Told(newest, progress, turn.now_s + _STEPS_S)

    def tell_safety(self, turn: Turn) -> None:
        """Record which saved state is protected, where that has changed."""
        now, told = self._copies.protection, self._told_safety
        if now.newest is None:
            return
        entry = journal.StatesProtected(
            t_s=turn.now_s, newest=now.newest, protected=now.protected, num_missing=now.num_missing
        )
        # Steps pass quickly, so that alone is recorded now and then.
        if told is not None and turn.now_s < told.t_s + _SAFETY_S:
            if (told.protected is None) == (now.protected is None) and bool(told.num_missing) == bool(now.num_missing):
                return
        elif told is not None and (told.newest, told.protected, told.num_missing) == (
            now.newest,
            now.protected,
            now.num_missing,
        ):
            return
        self._told_safety = entry
        turn.record(entry)
