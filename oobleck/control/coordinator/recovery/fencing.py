"""The part of the recovery's machine that asks: from the fence to complete answers, and what to do with them.

`machine.py` has the table of all transitions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import assert_never

from oobleck.control.commit import cut_off_nodes, is_network_down, stuck_workers
from oobleck.control.events import EndRun, Record, Send, SendAll, notice
from oobleck.control.journal import CutOff, HangExplained, LossCause, PlanCause, RecoveryStarted, Silent
from oobleck.control.membership import are_most, patience_s
from oobleck.control.protocol import KillWorker, Status
from oobleck.planner import WorkerId

from . import states
from .gathered import Gathered

_Asking = states.Fencing | states.Overdue | states.Settling
_Answering = _Asking | states.Accusing | states.AwaitingWorkers | states.LocatingCheckpoint

_MAX_REGROUPS = 3
"""Regroupings without a loss and without a committed step between them, before the run is given up."""
_LOOK_SHARE = 0.1
"""While the network is waited for, all are asked again after this share of the time so far."""
_LONGEST_LOOK_S = 30.0


def begin(state: states.State, begun: states.RecoveryBegun, now_s: float) -> states.Step:
    closed: tuple[states.RecoveryEffect, ...] = ()
    match state:
        case states.Preparing() | states.Ended():
            return state, ()
        case states.Suspecting():
            return begin(state.training, begun, now_s)
        case states.Training():
            recovery = _recovery(begun, now_s)
        case states.Adopting():
            recovery = _recovery(begun, now_s)
            closed = (
                states.RecoveryEnded(recovery=state.recovery, adopting=state, overtaken_by="the next one began before"),
            )
        case (
            states.Fencing()
            | states.Overdue()
            | states.Settling()
            | states.Accusing()
            | states.AwaitingNetwork()
            | states.Deciding()
            | states.AwaitingWorkers()
            | states.LocatingCheckpoint()
        ):
            recovery = _again(state.recovery, _recovery(begun, now_s, is_cut=state.recovery.awaits_network))
        case _:
            assert_never(state)
    started = Record(
        entry=RecoveryStarted(
            t_s=now_s, generation=recovery.generation, nodes=recovery.nodes, cause=recovery.cause, loss=recovery.loss
        )
    )
    fencing = states.Fencing(
        recovery=recovery,
        statuses=Gathered(),
        until_s=max(now_s, begun.heard_s) + begun.control.lease_s,
    )
    if begun.num_regroups > _MAX_REGROUPS:
        return fencing, (*closed, started, EndRun(reason=f"no step was committed through {_MAX_REGROUPS} regroupings"))
    if not begun.asked:
        deciding, effects = to_deciding(fencing)
        return deciding, (*closed, started, *effects)
    return fencing, (*closed, started, SendAll(worker_ids=begun.asked, message=recovery.fence))


def _recovery(begun: states.RecoveryBegun, now_s: float, *, is_cut: bool = False) -> states.Recovery:
    is_hang = begun.cause in (PlanCause.HANG, PlanCause.NETWORK)
    explains = is_cut or is_hang or (begun.cause is PlanCause.PEER_FAILED and begun.num_regroups > 1)
    return states.Recovery(
        began_s=now_s,
        detect_s=begun.detect_s,
        cause=begun.cause,
        loss=begun.loss,
        nodes=tuple(dict.fromkeys(begun.nodes)),
        control=begun.control,
        fault_threshold=begun.fault_threshold,
        fence=begun.fence if explains else replace(begun.fence, probe_addresses=(), patience_s=0.0),
        fenced_s=now_s,
        lost_s=now_s,
        asked=begun.asked,
        explains=explains,
        busy=begun.busy,
    )


def _again(known: states.Recovery, begun: states.Recovery) -> states.Recovery:
    """A loss during a recovery belongs to it. If a hang led to the finding of a cut network, the cut is the cause."""
    is_cut = begun.loss is LossCause.CUT_OFF or begun.cause is PlanCause.NETWORK
    cause, loss = (begun if is_cut else known).why
    return replace(
        begun,
        began_s=known.began_s,
        detect_s=known.detect_s,
        cause=cause,
        loss=loss,
        nodes=tuple(dict.fromkeys((*known.nodes, *begun.nodes))),
        returns_by_s=known.returns_by_s,
        cut_off=known.cut_off,
        cut_since_s=known.cut_since_s,
    )


def lose_more(state: states.State, lost: states.MoreLost, now_s: float) -> states.Step:
    """Continue without these nodes; if a hang was unexplained, they are now its explanation."""
    if not isinstance(state, states.Fencing | states.Overdue | states.Settling):
        return state, ()
    recovery = replace(
        _without(state.recovery, lost.nodes),
        nodes=tuple(dict.fromkeys((*state.recovery.nodes, *lost.nodes))),
        fence=replace(state.recovery.fence, lost=lost.fence.lost),
        lost_s=now_s,
        explains=state.recovery.awaits_network,
    )
    if isinstance(state, states.Settling):
        state = replace(state, until_s=recovery.settles_s)
    return _go_on(replace(state, recovery=recovery), now_s)


def answered(state: states.State, answer: states.Answered, now_s: float) -> states.Step:
    if (
        not isinstance(state, states.Fencing | states.Overdue | states.Settling)
        or answer.status.generation != state.recovery.generation
    ):
        return state, ()  # for an older fence, or a second time: its first answer is still true
    statuses = state.statuses.adding(answer.worker_ids, answer.status)
    match state:
        case states.Fencing() | states.Settling():
            asking: states.Fencing | states.Overdue | states.Settling = replace(state, statuses=statuses)
        case states.Overdue():  # the others are about to answer, too
            asking = replace(state, statuses=statuses, until_s=now_s + state.recovery.control.lease_s)
        case _:
            assert_never(state)
    return _go_on(asking, now_s)


def _go_on(state: states.Fencing | states.Overdue | states.Settling, now_s: float) -> states.Step:
    """Wait for answers, then for losses that belong together, and then use the answers."""
    recovery = state.recovery
    if not recovery.asked:
        return to_deciding(state)
    if not state.statuses.has_all(recovery.asked):
        return state, ()
    if now_s >= recovery.settles_s:
        return use_answers(state, now_s)
    if isinstance(state, states.Settling):
        return state, ()
    return states.Settling(recovery=recovery, statuses=state.statuses, until_s=recovery.settles_s), ()


def use_answers(state: _Asking, now_s: float) -> states.Step:
    """Decide; if no node is lost and nothing moves, first find out which workers others wait for or cannot reach."""
    recovery = state.recovery
    if not recovery.explains:
        return to_deciding(state)
    statuses = _of_asked(state)
    cut_off = cut_off_nodes(statuses)
    stuck = () if cut_off else stuck_workers(statuses, recovery.busy)
    explained = Record(
        entry=HangExplained(
            t_s=now_s,
            generation=recovery.generation,
            cut_off=cut_off,
            stuck=stuck,
            stacks=tuple((worker_id, status.stack) for worker_id, status in sorted(statuses.items()) if status.stack),
        )
    )
    if 0 < len(cut_off) < len(recovery.cut_off) or is_network_down(statuses, cut_off, recovery.fault_threshold):
        return _await_network(recovery, cut_off, explained, now_s)
    if not cut_off and not stuck:
        deciding, effects = to_deciding(state, is_unexplained=True)
        back = (notice(now_s, "info", f"the network is back after {now_s - recovery.cut_since_s:.1f} s"),)
        return deciding, (*(back if recovery.awaits_network else (explained,)), *effects)
    until_s = now_s + recovery.control.lease_s
    accusing = states.Accusing(recovery=recovery, statuses=statuses, stuck=stuck, until_s=until_s)
    if stuck:
        return accusing, (explained, *end_again(stuck))
    return accusing, (explained, states.GiveUp(nodes=cut_off, loss=CutOff()))


def _await_network(recovery: states.Recovery, cut_off: tuple[str, ...], explained: Record, now_s: float) -> states.Step:
    """Give no node up: this many do not fail at once, and what they hold lives. Say so when it begins or changes."""
    control, since_s = recovery.control, min(recovery.cut_since_s, now_s)
    gives_up_s = since_s + control.network_timeout_s
    look_s = min(max(control.lease_s, _LOOK_SHARE * (now_s - since_s)), _LONGEST_LOOK_S)
    effects: list[states.RecoveryEffect] = []
    if cut_off != recovery.cut_off:
        effects.append(explained)
    if not recovery.awaits_network:
        text = (
            "more nodes are cut off than the run can lose: the network is waited for, for up to"
            f" {control.network_timeout_s:g} s"
        )
        effects.append(notice(now_s, "warning", text))
    if now_s >= gives_up_s:
        effects.append(states.NetworkDown(nodes=cut_off, waited_s=now_s - since_s))
    recovery = replace(recovery, cut_off=cut_off, cut_since_s=since_s)
    until_s = max(now_s, min(now_s + look_s, gives_up_s))
    return states.AwaitingNetwork(recovery=recovery, until_s=until_s), tuple(effects)


def look_again(state: states.AwaitingNetwork, passed: states.TimePassed, now_s: float) -> states.Step:
    """Ask all again whom they reach, under a newer generation."""
    if passed.is_suspicious:  # it may be this master that nobody reaches
        return replace(state, until_s=now_s + state.recovery.control.lease_s), ()
    return state, (states.BeginRecovery(cause=PlanCause.NETWORK),)


def end_again(stuck: tuple[WorkerId, ...]) -> tuple[states.RecoveryEffect, ...]:
    """A worker that ends is started again in its place."""
    return tuple(Send(node=worker_id.node, message=KillWorker(device=worker_id.device)) for worker_id in stuck)


def overdue(state: states.Overdue, passed: states.TimePassed, now_s: float) -> states.Step:
    """Workers answer at once, whatever they compute: one that does not is frozen, if its agent is not.

    But if most do not answer, one cause may hold them all up, and pass.
    """
    recovery, control = state.recovery, state.recovery.control
    silent = tuple(sorted({worker_id.node for worker_id in state.awaited}))
    num_asked = len({worker_id.node for worker_id in recovery.asked})
    limit_s = patience_s(
        lease_s=control.lease_s,
        orphan_timeout_s=control.orphan_timeout_s,
        has_others=len(silent) < num_asked,
    )
    has_time = are_most(len(silent), num_asked) and now_s < recovery.fenced_s + limit_s
    if passed.is_suspicious or has_time:
        return replace(state, until_s=now_s + control.lease_s), ()
    return state, (states.GiveUp(nodes=silent, loss=Silent(silent_s=now_s - recovery.fenced_s, is_worker=True)),)


def left(state: states.State, node: str, now_s: float) -> states.Step:
    match state:
        case (
            states.Preparing()
            | states.Training()
            | states.Adopting()
            | states.Suspecting()
            | states.Deciding()
            | states.Ended()
        ):
            return state, ()
        case states.Fencing() | states.Overdue() | states.Settling():
            return _go_on(replace(state, recovery=_without(state.recovery, (node,))), now_s)
        case states.AwaitingNetwork():
            return replace(state, recovery=_without(state.recovery, (node,)), until_s=now_s), ()
        case states.Accusing() | states.AwaitingWorkers() | states.LocatingCheckpoint():
            return to_deciding(replace(state, recovery=_without(state.recovery, (node,))))
        case _:
            assert_never(state)


def _without(recovery: states.Recovery, nodes: Collection[str]) -> states.Recovery:
    return replace(recovery, asked=tuple(worker_id for worker_id in recovery.asked if worker_id.node not in nodes))


def to_deciding(state: _Answering, *, is_unexplained: bool = False) -> states.Step:
    if isinstance(state, states.AwaitingWorkers | states.LocatingCheckpoint):
        is_unexplained = state.is_unexplained
    deciding = states.Deciding(recovery=state.recovery, statuses=_of_asked(state), is_unexplained=is_unexplained)
    return deciding, (states.Decide(deciding=deciding),)


def _of_asked(state: _Answering) -> dict[WorkerId, Status]:
    """The answers of those who are still asked, in their order."""
    asked, statuses = state.recovery.asked, state.statuses
    known = statuses.copied() if isinstance(statuses, Gathered) else statuses
    return dict(zip(asked, map(known.__getitem__, asked), strict=True))
