"""What the recovery's machine does from a fence to complete answers, and what these lead to.

`machine.py` has the table of all transitions, with their guards.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from oobleck.control.events import EndRun, Record, Send, SendAll, notice
from oobleck.control.journal import CutOff, HangExplained, LossCause, PlanCause, RecoveryStarted, Silent
from oobleck.control.nodes import are_most, patience_s, reading_s
from oobleck.control.protocol import KillWorker, Status
from oobleck.control.steps import cut_off_nodes, is_network_down, stuck_workers
from oobleck.planner import WorkerId

from . import states
from .gathered import Gathered

MAX_REGROUPS = 3
"""How often all may regroup without a loss and without a committed step, before the run ends."""
# It takes this long to read the answers that still wait unread when their time is over.
_LOOK_S = 0.1
# While the network is down, all are asked again after this share of the time so far: often at first, then rarely.
_LOOK_SHARE = 0.1
_LONGEST_LOOK_S = 30.0

_Begun = states.Training | states.Adopting | states.Suspecting | states.AwaitingNetwork | states.Deciding


# --- a fence ---------------------------------------------------------------------------------------------------------


def begin(state: _Begun, begun: states.RecoveryBegun, now_s: float) -> states.Step:
    fencing, effects = _begin(state, begun, now_s)
    return fencing, (*effects, SendAll(worker_ids=begun.asked, message=fencing.recovery.fence))


def give_in(state: _Begun, begun: states.RecoveryBegun, now_s: float) -> states.Step:
    fencing, effects = _begin(state, begun, now_s)
    return fencing, (*effects, EndRun(reason=f"no step was committed through {MAX_REGROUPS} regroupings"))


def begin_alone(state: _Begun, begun: states.RecoveryBegun, now_s: float) -> states.Step:
    fencing, effects = _begin(state, begun, now_s)
    deciding, asked = decide(fencing, begun, now_s)
    return deciding, (*effects, *asked)


def _begin(
    state: _Begun, begun: states.RecoveryBegun, now_s: float
) -> tuple[states.Fencing, tuple[states.RecoveryEffect, ...]]:
    closed: tuple[states.RecoveryEffect, ...] = ()
    if isinstance(state, states.Suspecting):
        state = state.training
    if isinstance(state, states.Training | states.Adopting):
        recovery = _recovery(begun, now_s)
    else:
        recovery = _again(state.recovery, _recovery(begun, now_s, is_cut=state.recovery.awaits_network))
    if isinstance(state, states.Adopting):
        overtaken = "the next one began before"
        closed = (states.RecoveryEnded(recovery=state.recovery, adopting=state, overtaken_by=overtaken),)
    started = RecoveryStarted(
        t_s=now_s, generation=recovery.generation, nodes=recovery.nodes, cause=recovery.cause, loss=recovery.loss
    )
    # A new master has to reach the workers first: until then `heard_s` lies in the future.
    until_s = max(now_s, begun.heard_s) + begun.control.lease_s
    fencing = states.Fencing(recovery=recovery, statuses=Gathered(), until_s=until_s)
    return fencing, (*closed, Record(entry=started))


def _recovery(begun: states.RecoveryBegun, now_s: float, *, is_cut: bool = False) -> states.Recovery:
    wanted = begun.wanted
    is_hang = wanted.cause in (PlanCause.HANG, PlanCause.NETWORK)
    # One failed collective is no hang. All have to say what they wait for only if regrouping did not help.
    explains = is_cut or is_hang or (wanted.cause is PlanCause.PEER_FAILED and begun.num_regroups > 1)
    return states.Recovery(
        began_s=now_s,
        detect_s=wanted.detect_s,
        cause=wanted.cause,
        loss=wanted.loss,
        nodes=tuple(dict.fromkeys(wanted.nodes)),
        control=begun.control,
        fault_threshold=begun.fault_threshold,
        fence=begun.fence if explains else replace(begun.fence, probe_addresses=(), patience_s=0.0),
        fenced_s=now_s,
        lost_s=now_s,
        asked=begun.asked,
        explains=explains,
        busy=wanted.busy,
    )


def _again(known: states.Recovery, begun: states.Recovery) -> states.Recovery:
    """Begin a recovery again: a loss during a recovery belongs to it."""
    # A hang may have led to the discovery of a cut network: then the cut is the cause.
    is_cut = begun.loss is LossCause.CUT_OFF or begun.cause is PlanCause.NETWORK
    first = begun if is_cut else known
    return replace(
        begun,
        began_s=known.began_s,
        detect_s=known.detect_s,
        cause=first.cause,
        loss=first.loss,
        nodes=tuple(dict.fromkeys((*known.nodes, *begun.nodes))),
        # No later fence extends the wait for workers: some may end again and again.
        returns_by_s=known.returns_by_s,
        cut_off=known.cut_off,
        cut_since_s=known.cut_since_s,
    )


def ask_again(state: states.Fencing, reached: states.NodeReached, _now_s: float) -> states.Step:
    awaited = tuple(sorted(worker_id for worker_id in state.awaited if worker_id.node == reached.node))
    return state, (SendAll(worker_ids=awaited, message=state.recovery.fence),)


# --- answers ---------------------------------------------------------------------------------------------------------


def learn(
    state: states.Fencing,
    given: states.Answered | states.MoreLost | states.NodeDrained | states.TimePassed,
    now_s: float,
) -> states.Fencing | None:
    """Return the state with an answer, or without workers that send none; None for an answer to an older fence."""
    was_complete, until_s = state.is_complete, state.until_s
    match given:
        case states.Answered():
            if given.status.generation != state.recovery.generation:
                return None
            if state.is_overdue:  # What delayed this answer is over, so the others are about to arrive, too.
                until_s = now_s + state.recovery.control.lease_s
            state = replace(state, statuses=state.statuses.adding(given.worker_ids, given.status))
        case states.MoreLost():
            state = replace(state, recovery=_with_more_lost(state.recovery, given, now_s))
        case states.NodeDrained(node=node):
            state = replace(state, recovery=without(state.recovery, (node,)))
        case states.TimePassed():
            pass
    recovery = state.recovery
    if not state.is_complete:
        return replace(state, until_s=until_s)
    # The last answer starts the time in which losses settle. When that is over, the answers are read together, once.
    if not was_complete or isinstance(given, states.MoreLost):
        until_s = recovery.settles_s
    elif isinstance(given, states.Answered):
        # An answer that is repeated extends nothing: none is awaited any more.
        until_s = state.until_s
    reads = recovery.explains and (isinstance(given, states.TimePassed) or now_s >= recovery.settles_s)
    return replace(state, until_s=until_s, finding=_finding(state) if reads else None)


def _with_more_lost(recovery: states.Recovery, lost: states.MoreLost, now_s: float) -> states.Recovery:
    return replace(
        without(recovery, lost.nodes),
        nodes=tuple(dict.fromkeys((*recovery.nodes, *lost.nodes))),
        # Workers that are asked again get this fence; the others learn of these nodes by their orders.
        fence=replace(recovery.fence, lost=lost.fence.lost),
        lost_s=now_s,
        # If a hang was unexplained, these nodes are now its explanation.
        explains=recovery.awaits_network,
    )


def without(recovery: states.Recovery, nodes: Collection[str]) -> states.Recovery:
    """Return a recovery that asks these nodes nothing."""
    return replace(recovery, asked=tuple(worker_id for worker_id in recovery.asked if worker_id.node not in nodes))


def become_overdue(state: states.Fencing, _passed: states.TimePassed, now_s: float) -> states.Step:
    # Answers may wait unread while this master is busy: no node is given up before it has read them.
    until_s = now_s + reading_s(_LOOK_S, len(state.recovery.asked))
    return replace(state, is_overdue=True, until_s=until_s), ()


def overdue(state: states.Fencing, passed: states.TimePassed, now_s: float) -> states.Step:
    # Workers answer at once, whatever they compute: one that does not is frozen, unless its agent is, too. But if most
    # do not answer, one cause may hold them all up, and it may pass.
    recovery, control = state.recovery, state.recovery.control
    silent = tuple(sorted({worker_id.node for worker_id in state.awaited}))
    num_asked = len({worker_id.node for worker_id in recovery.asked})
    limit_s = patience_s(
        lease_s=control.lease_s, orphan_timeout_s=control.orphan_timeout_s, has_others=len(silent) < num_asked
    )
    has_time = are_most(len(silent), num_asked) and now_s < recovery.fenced_s + limit_s
    if passed.is_suspicious or has_time:
        return replace(state, until_s=now_s + control.lease_s), ()
    return state, (states.GiveUp(nodes=silent, loss=Silent(silent_s=now_s - recovery.fenced_s, is_worker=True)),)


# --- what the answers lead to ----------------------------------------------------------------------------------------


def _finding(state: states.Fencing) -> states.Finding:
    recovery, statuses = state.recovery, _of_asked(state)
    cut_off = cut_off_nodes(statuses)
    return states.Finding(
        cut_off=cut_off,
        # Workers that do not reach each other wait for each other, and none of them is stuck.
        stuck=() if cut_off else stuck_workers(statuses, recovery.busy),
        # While fewer nodes are cut off than before, the network is coming back, and the rest is not given up either.
        is_network_down=0 < len(cut_off) < len(recovery.cut_off)
        or is_network_down(statuses, cut_off, recovery.fault_threshold),
    )


def decide(state: states.Deciding, _given: states.Input, now_s: float) -> states.Step:
    decision = states.Decide(answers=answers_in(state))
    if not isinstance(state, states.Fencing) or state.finding is None:
        return state, (decision,)
    if state.recovery.awaits_network:
        text = f"the network is back after {now_s - state.recovery.cut_since_s:.1f} s"
        return state, (notice(now_s, "info", text), decision)
    return state, (_explained(state, state.finding, now_s), decision)


def answers_in(state: states.Deciding) -> states.Answers:
    """Return what a decision is made from; all that are asked have answered."""
    if isinstance(state, states.Answers):
        is_unexplained = state.is_unexplained
    else:
        # Had the finding explained the hang, it would have led to another state.
        is_unexplained = isinstance(state, states.Fencing) and state.finding is not None
    return states.Answers(recovery=state.recovery, statuses=_of_asked(state), is_unexplained=is_unexplained)


def accuse(state: states.Fencing, _given: states.Input, now_s: float) -> states.Step:
    recovery, finding = state.recovery, state.finding
    assert finding is not None
    accusing = states.Accusing(
        recovery=recovery, statuses=_of_asked(state), stuck=finding.stuck, until_s=now_s + recovery.control.lease_s
    )
    accused = _end_again(finding.stuck) or (states.GiveUp(nodes=finding.cut_off, loss=CutOff()),)
    return accusing, (_explained(state, finding, now_s), *accused)


def decide_and_end_again(state: states.Accusing, passed: states.TimePassed, now_s: float) -> states.Step:
    _, effects = decide(state, passed, now_s)
    return state, (*effects, *_end_again(state.stuck))


def _end_again(stuck: tuple[WorkerId, ...]) -> tuple[states.RecoveryEffect, ...]:
    # The agent of a worker that ends starts another one in its place.
    return tuple(Send(node=worker_id.node, message=KillWorker(device=worker_id.device)) for worker_id in stuck)


def _explained(state: states.Fencing, finding: states.Finding, now_s: float) -> Record:
    return Record(
        entry=HangExplained(
            t_s=now_s,
            generation=state.recovery.generation,
            cut_off=finding.cut_off,
            stuck=finding.stuck,
            stacks=tuple((worker_id, said.stack) for worker_id, said in sorted(_of_asked(state).items()) if said.stack),
        )
    )


def _of_asked(state: states.Deciding) -> dict[WorkerId, Status]:
    # In the order in which they were asked, so that the order of arrival changes no decision.
    asked, statuses = state.recovery.asked, state.statuses
    if isinstance(statuses, Gathered):
        return statuses.in_order(asked)
    return {worker_id: statuses[worker_id] for worker_id in asked}


# --- the network -----------------------------------------------------------------------------------------------------


def await_network(state: states.Fencing, _given: states.Input, now_s: float) -> states.Step:
    # No node is given up: this many do not fail at once, and what they hold is alive.
    recovery, control, finding = state.recovery, state.recovery.control, state.finding
    assert finding is not None
    since_s = min(recovery.cut_since_s, now_s)
    gives_up_s = since_s + control.network_timeout_s
    look_s = min(max(control.lease_s, _LOOK_SHARE * (now_s - since_s)), _LONGEST_LOOK_S)
    effects: list[states.RecoveryEffect] = []
    if finding.cut_off != recovery.cut_off:
        effects.append(_explained(state, finding, now_s))
    if not recovery.awaits_network:
        text = "more nodes are cut off than the run can lose: the network is waited for, for up to"
        effects.append(notice(now_s, "warning", f"{text} {control.network_timeout_s:g} s"))
    if now_s >= gives_up_s:
        effects.append(states.NetworkDown(nodes=finding.cut_off, waited_s=now_s - since_s))
    recovery = replace(recovery, cut_off=finding.cut_off, cut_since_s=since_s)
    until_s = max(now_s, min(now_s + look_s, gives_up_s))
    return states.AwaitingNetwork(recovery=recovery, until_s=until_s), tuple(effects)


def look_again(state: states.AwaitingNetwork, _passed: states.TimePassed, _now_s: float) -> states.Step:
    return state, (states.BeginRecovery(cause=PlanCause.NETWORK),)


def look_later(state: states.AwaitingNetwork, _passed: states.TimePassed, now_s: float) -> states.Step:
    return replace(state, until_s=now_s + state.recovery.control.lease_s), ()


def look_at_once(state: states.AwaitingNetwork, _drained: states.NodeDrained, now_s: float) -> states.Step:
    return replace(state, until_s=now_s), ()
