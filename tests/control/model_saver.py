"""The saves of the model's workers: a share of a state is whole in memory at once, and has no numbers."""

from __future__ import annotations

from collections.abc import Callable

from oobleck.control.checkpoints import saving_shares
from oobleck.control.protocol import SavedState, StateSaved, checkpoint_name
from oobleck.control.steps import Save, SaveEnd
from oobleck.planner import WorkerId

__all__ = ["Saver"]


class Saver:
    """Knows whether a save is wanted, and reports this worker's share of it."""

    def __init__(self, worker_id: WorkerId, *, run: str, num_layers: int, say: Callable[[StateSaved], None]) -> None:
        """`run` is the digest that names of checkpoints have."""
        self._worker_id = worker_id
        self._run = run
        self._sizes = (1,) * num_layers
        self._say = say
        self._wanted: int | None = None
        self._last_step = 0

    def want(self, step: int) -> None:
        """Raise the wish; one that a save has answered already is ignored."""
        if step > self._last_step:
            self._wanted = step

    def go_back(self) -> None:
        """Note that steps are run again, and saved again."""
        self._last_step = 0

    def is_wanted(self, step: int) -> bool:
        """Whether this worker wants the state saved after `step`."""
        return self._wanted is not None and self._last_step < self._wanted <= step

    def save(self, effect: Save | SaveEnd) -> None:
        """Save this worker's share, if it has one."""
        committee = effect.committee
        at, lost = (effect, committee.lost) if isinstance(effect, Save) else (effect.over, ())
        self._last_step = at.step
        layers = saving_shares(committee.plan, self._sizes, lost=lost).get(self._worker_id, ())
        if layers:
            state = SavedState(
                name=checkpoint_name(self._run, step=at.step, generation=at.generation),
                step=at.step,
                generation=at.generation,
                saved_at=f"{at.step:08d}",
            )
            saved = StateSaved(device=self._worker_id.device, state=state, layers=layers, size_bytes=0, pause_s=0.0)
            self._say(saved)
