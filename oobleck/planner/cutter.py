"""What the planner asks of a schedule that wants several chunks a stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from oobleck.plan import PipelineTemplate


class Cutter(Protocol):
    """Cuts a pipeline's layers into several chunks a stage, for a schedule that the planner does not know."""

    def cut(self, template: PipelineTemplate, num_microbatches: int) -> PipelineTemplate:
        """Return the template cut for steps of so many microbatches, or itself; the same object for the same pair."""

    def step_s(self, template: PipelineTemplate, num_microbatches: int, speeds: Sequence[float] | None = None) -> float:
        """Return the event-exact seconds of a step, without the reduction, of a template cut or not.

        `speeds` are those of its nodes, 0.5 for one that takes twice as long; by default, none is slow.
        """
