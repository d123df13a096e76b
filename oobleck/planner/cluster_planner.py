"""What runs and simulations ask of a planner, whether their nodes are of one kind or of several."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from oobleck.plan import ExecutionPlan, WorkerId

from .decision import Decision
from .profiles import Profile
from .settings import PlannerSettings


class ClusterPlanner(Protocol):
    """`Planner` for nodes of one kind, `MixedPlanner` for several."""

    @property
    def settings(self) -> PlannerSettings: ...

    def profile_of(self, node: str) -> Profile:
        """Return the profile of a node's devices."""
        ...

    def can_hold(self, nodes: Sequence[str]) -> bool:
        """Return whether these nodes hold the model at least once."""
        ...

    def best_first(self, nodes: Sequence[str]) -> list[str]:
        """Return the nodes in the order in which they are used where not all of them are."""
        ...

    def fewest_nodes(self, nodes: Sequence[str]) -> int:
        """Return how many of the nodes, from the first on, hold the model as often as was asked for.

        Where not even all do, that is all of them. Raises PlanningError where they cannot hold the model once.
        """
        ...

    def step_s(self, nodes: Sequence[str]) -> float:
        """Return the seconds of a step under the best plan for these nodes, none of them slow. Raises PlanningError."""
        ...

    def initial_plan(self, nodes: Sequence[str], *, slow: Mapping[str, float] | None = None) -> Decision:
        """Plan the start of a job; see `Planner.initial_plan`."""
        ...

    def reconfigure(
        self,
        plan: ExecutionPlan,
        *,
        lost: Collection[str] = (),
        joined: Collection[str] = (),
        leaving: Collection[str] = (),
        resting: Collection[str] = (),
        slow: Mapping[str, float] | None = None,
        held: Mapping[WorkerId, frozenset[int]] | None = None,
    ) -> Decision:
        """Decide what follows a plan; see `Planner.reconfigure`."""
        ...

    def rest_s(
        self, plan: ExecutionPlan, rests: Mapping[int, tuple[int, int]], *, slow: Mapping[str, float] | None = None
    ) -> float:
        """Return the seconds in which pipelines finish the step that they are in; see `Planner.rest_s`."""
        ...

    def has_room(self, plan: ExecutionPlan, *, gradient_copies: int) -> bool:
        """Return whether every device under a plan holds so many copies of its gradients beside all else."""
        ...
