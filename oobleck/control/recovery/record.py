"""What a recovery cost, once it is over."""

from __future__ import annotations

from collections.abc import Mapping

from oobleck.control.journal import Action, RecoveryDone
from oobleck.control.nodes import Membership
from oobleck.control.protocol import Resumed
from oobleck.control.steps import uncovered
from oobleck.planner import WorkerId

from .states import Recovery, RecoveryEnded


def recovery_done(ended: RecoveryEnded, now_s: float, members: Membership) -> RecoveryDone:
    """Return a recovery's record, as far as it got before another event overtook it."""
    recovery, adopting = ended.recovery, ended.adopting
    ordered = adopting.ordered if adopting is not None else None
    resumed = adopting.resumed.copied() if adopting is not None else {}
    return RecoveryDone(
        t_s=now_s,
        began_s=recovery.began_s,
        generation=recovery.generation,
        nodes=recovery.nodes,
        cause=recovery.cause,
        loss=recovery.loss,
        action=ordered.action if ordered is not None else Action.REINSTANTIATE,
        detect_s=recovery.detect_s,
        decide_s=adopting.ordered_s - recovery.began_s if adopting is not None else 0.0,
        transfer_s=max([message.transfer_s for message in resumed.values()], default=0.0),
        stall_s=_stall_s(recovery, resumed, members),
        bytes_moved=sum([message.received_bytes for message in resumed.values()]),
        layers_moved=ordered.layers_moved if ordered is not None else 0,
        microbatches_redone=ordered.microbatches_redone if ordered is not None else 0,
        steps_lost=ordered.steps_lost if ordered is not None else 0,
        unfinished=ended.overtaken_by,
    )


def _stall_s(recovery: Recovery, resumed: Mapping[WorkerId, Resumed], members: Membership) -> float:
    """Seconds without useful computation, from the loss to the new plan's first computation."""
    if not resumed:
        return 0.0
    # In a simulation thousands share one report: each message counts once for each clock.
    offsets_s = members.clock_offsets_s
    reports = {(offsets_s[worker_id.node], id(message)): message for worker_id, message in resumed.items()}
    ended_s = min(message.resumed_s + ahead_s for (ahead_s, _), message in reports.items())
    busy_s = sorted(
        {
            (start_s + ahead_s, stop_s + ahead_s)
            for (ahead_s, _), message in reports.items()
            for start_s, stop_s in message.busy_s
        }
    )
    return uncovered(recovery.began_s - recovery.detect_s, ended_s, busy_s)
