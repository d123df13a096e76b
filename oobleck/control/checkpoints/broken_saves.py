"""Which saves can never be whole in memory: one that has a share of them was lost before it had saved it.

All save after the same step, each its own share. So a save is broken by the loss of a worker of its plan, and where a
worker missed the commit of that step and caught up with it later. What was broken before any share of it was heard of
is still broken then.
"""

from __future__ import annotations

from collections.abc import Iterable


class BrokenSaves:
    """Knows saves by the generation and the step after which all were to save. What is whole already is not asked."""

    def __init__(self) -> None:
        self._trained: dict[str, int] = {}
        """By node: the newest generation in whose plan it had a part."""
        self._generation, self._boundary = 0, 0
        """The newest plan's, and the step with which it begins."""
        self._broken_generation = 0
        """The newest one in which a worker was lost, or missed a save."""
        self._broken_finish = 0
        """The newest one under whose order a step was finished by workers of which one was lost."""

    def plan_adopted(self, nodes: Iterable[str], *, generation: int, boundary: int) -> None:
        """A plan is ordered for these nodes; its steps are those after `boundary`."""
        self._generation, self._boundary = generation, boundary
        self._trained |= dict.fromkeys(nodes, generation)

    def worker_gone(self, node: str) -> None:
        """A worker of a node is gone, whatever it had still to save."""
        if node not in self._trained:
            return  # it has a share of nothing
        if self._trained[node] < self._generation:
            self._broken_finish = self._generation  # the step that was finished under the order of the newest plan
        self.missed(self._trained[node])

    def missed(self, generation: int) -> None:
        """A worker has not saved what all others did, in this generation or before."""
        self._broken_generation = max(self._broken_generation, generation)

    def has(self, generation: int, step: int) -> bool:
        """Whether a save of this generation, after this step, is broken."""
        is_finish = generation == self._broken_finish == self._generation and step <= self._boundary
        return is_finish or generation <= self._broken_generation
