"""What a recovery costs, while it is under way and once it is over."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from oobleck.control.commit import uncovered
from oobleck.control.journal import Action, LossCause, PlanCause, RecoveryDone
from oobleck.control.protocol import Resumed, Status
from oobleck.planner import WorkerId

__all__ = ["RecoveryRecord"]


@dataclass(slots=True)
class RecoveryRecord:
    """One recovery, from the loss that began it; losses that come before its orders belong to it."""

    began_s: float
    detect_s: float
    cause: PlanCause
    loss: LossCause | None = None
    """Of the newest loss, where there was one."""
    nodes: list[str] = field(default_factory=list)
    settles_s: float = 0.0
    """Until then, answers may be complete and are waited with: losses that belong together come together."""
    awaited: set[WorkerId] = field(default_factory=set)
    """Workers that have still to answer the fence; then, those that have still to compute under the new plan."""
    statuses: dict[WorkerId, Status] = field(default_factory=dict)
    returns_by_s: float = math.inf
    """Until then, workers that are started again are waited for, because those who are here cannot go on."""
    ordered_s: float = 0.0
    """0 until there are orders."""
    action: Action = Action.REINSTANTIATE
    layers_moved: int = 0
    microbatches_redone: int = 0
    steps_lost: int = 0
    resumed: dict[WorkerId, Resumed] = field(default_factory=dict)

    def close(
        self, now_s: float, generation: int, offsets_s: Mapping[str, float], *, overtaken_by: str
    ) -> RecoveryDone:
        """Tell what it cost; of one that was `overtaken_by` something, what is known.

        `offsets_s`, by node, are what is added to what a worker's clock says to have what ours does.
        """
        resumed = self.resumed.values()
        return RecoveryDone(
            t_s=now_s,
            began_s=self.began_s,
            generation=generation,
            nodes=tuple(self.nodes),
            cause=self.cause,
            loss=self.loss,
            action=self.action,
            detect_s=self.detect_s,
            decide_s=max(0.0, self.ordered_s - self.began_s),
            transfer_s=max((said.transfer_s for said in resumed), default=0.0),
            stall_s=self._stall_s(offsets_s),
            bytes_moved=sum(said.received_bytes for said in resumed),
            layers_moved=self.layers_moved,
            microbatches_redone=self.microbatches_redone,
            steps_lost=self.steps_lost,
            unfinished=overtaken_by if not self.ordered_s or self.awaited else "",
        )

    def _stall_s(self, offsets_s: Mapping[str, float]) -> float:
        """How long nobody computed for a step that was committed, from the loss to the new plan's first computation."""
        if not self.resumed:
            return 0.0
        # In a simulation thousands say the same: each message counts once for each clock.
        said = {(offsets_s[worker_id.node], id(said)): said for worker_id, said in self.resumed.items()}
        ended_s = min(said.resumed_s + ahead_s for (ahead_s, _), said in said.items())
        busy_s = sorted(
            {
                (start_s + ahead_s, stop_s + ahead_s)
                for (ahead_s, _), said in said.items()
                for start_s, stop_s in said.busy_s
            }
        )
        return uncovered(self.began_s - self.detect_s, ended_s, busy_s)
