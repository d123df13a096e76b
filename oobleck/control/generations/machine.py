"""The generations of a script's ranks, as a state machine: `step(state, given, now_s, …) -> (state, effects)`.

    Gathering ── enough nodes ──> Running ── all ranks have ended well ──> Over
        ^                            │ a rank fails, a node is lost, comes or is to leave, a stop is asked for
        └──── all ranks are gone ── Ending ── nothing is to follow ──> Over

`TRANSITIONS` has all that can change a state; an input that it does not list changes nothing. A generation ends
everywhere before the next one begins: ranks know each other by one rendezvous, which cannot be joined or left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

from oobleck.control.events import EndRun
from oobleck.control.journal import GenerationCause, NodeRanks
from oobleck.exit_codes import ExitCode

from .states import (
    Begin,
    Candidate,
    Clear,
    Effect,
    Ending,
    Failed,
    Finished,
    Gathering,
    GiveUpSilent,
    Gone,
    Input,
    Leave,
    LetGo,
    Over,
    Past,
    Ready,
    Roster,
    Rules,
    Running,
    State,
    StopAsked,
    TimePassed,
    TooFew,
)


@dataclass(frozen=True, slots=True)
class Transition:
    """In `state`, an input of the kind `given` may lead to any of `targets`; the same state: its values may change."""

    state: type[State]
    given: type[Input]
    targets: tuple[type[State], ...]
    why: str


TRANSITIONS = (
    Transition(Gathering, Ready, (Gathering, Running, Over), "another node is there; they may be enough now"),
    Transition(Gathering, Gone, (Gathering, Running, Over), "nobody may be left to wait for"),
    Transition(Gathering, Leave, (Gathering, Running, Over), "nobody may be left to wait for"),
    Transition(Gathering, TimePassed, (Gathering, Running, Over), "those that are there are enough, or too few"),
    Transition(Gathering, StopAsked, (Over,), "nothing runs"),
    Transition(Running, Ready, (Running, Ending), "a node has come: all start again with it"),
    Transition(Running, Gone, (Running, Ending, Gathering), "a node of the generation is lost"),
    Transition(Running, Leave, (Running, Ending), "a node of the generation is to leave"),
    Transition(Running, Failed, (Running, Ending), "a rank has failed, or all hang"),
    Transition(Running, Finished, (Running, Over), "the last one may have finished"),
    Transition(Running, StopAsked, (Ending, Over), "its ranks are asked to end"),
    Transition(Ending, Ready, (Ending, Gathering, Running, Over), "the last one may be gone"),
    Transition(Ending, Gone, (Ending, Gathering, Running, Over), "the last one may be gone"),
    Transition(Ending, Leave, (Ending,), "it has no ranks: it is let go"),
    Transition(Ending, TimePassed, (Ending,), "an agent says nothing: it is given up"),
    Transition(Ending, StopAsked, (Ending, Over), "nothing is to follow"),
)

Step = tuple[State, tuple[Effect, ...]]

_CONNECTING_S = 10.0
"""At a start, nodes that are still being reached are not missing."""
_TELL_S = 60.0


def start(now_s: float) -> State:
    """The state of a run that begins."""
    return Gathering(past=Past(), cause=GenerationCause.START, since_s=now_s, tells_s=now_s + _CONNECTING_S)


def deadline(state: State, rules: Rules) -> float:
    """When `TimePassed` is due; infinity for never."""
    match state:
        case Gathering(since_s=since_s, cause=GenerationCause.START):
            return min(state.tells_s, since_s + min(rules.waits_for_all_s, rules.waits_for_min_s))
        case Gathering(since_s=since_s):
            return min(state.tells_s, since_s + rules.waits_for_min_s)
        case Ending(due_s=due_s):
            return due_s
        case Running() | Over():
            return math.inf
        case _:
            assert_never(state)


def step(state: State, given: Input, now_s: float, *, roster: Roster, rules: Rules) -> Step:
    """Take an input; O(nodes)."""
    match state:
        case Gathering():
            return _gathering(state, given, now_s, roster, rules)
        case Running():
            return _running(state, given, now_s, roster, rules)
        case Ending():
            return _ending(state, given, now_s, roster, rules)
        case Over():
            return state, ()
        case _:
            assert_never(state)


# --- no rank runs ----------------------------------------------------------------------------------------------------


def _gathering(state: Gathering, given: Input, now_s: float, roster: Roster, rules: Rules) -> Step:
    match given:
        case Leave(node=node):
            following, effects = _form(state, now_s, roster, rules)
            return following, (LetGo(node=node), *effects)
        case Ready() | Gone() | TimePassed():
            return _form(state, now_s, roster, rules)
        case StopAsked(end=end):
            return _over(state, end)
        case Failed() | Finished():
            return state, ()
        case _:
            assert_never(given)


def _form(state: Gathering, now_s: float, roster: Roster, rules: Rules) -> Step:
    """Begin a generation if the nodes that are there are enough, and none is worth waiting for."""
    chosen = roster.candidates[: rules.most_of(len(roster.candidates))]
    waited_s = now_s - state.since_s
    is_start = state.cause is GenerationCause.START
    is_worth_waiting = is_start and roster.num_expected > 0 and waited_s < rules.waits_for_all_s
    are_enough = len(roster.candidates) >= rules.fewest_nodes
    if are_enough and (len(chosen) == rules.most_nodes or not is_worth_waiting):
        return _begin(state, chosen)
    is_hopeless = is_start and not roster.num_expected
    if not are_enough and (is_hopeless or waited_s >= rules.waits_for_min_s):
        return _over(state, EndRun(reason=_too_few(len(roster.candidates), rules, waited_s)))
    if now_s < state.tells_s:
        return state, ()
    told = replace(state, tells_s=now_s + _TELL_S)
    num_missing = rules.fewest_nodes - len(roster.candidates)
    missing = TooFew(num_missing=num_missing, until_s=state.since_s + rules.waits_for_min_s)
    return told, () if are_enough else (missing,)


def _begin(state: Gathering, chosen: tuple[Candidate, ...]) -> Step:
    past = replace(state.past, generation=state.past.generation + 1)
    nodes: list[NodeRanks] = []
    first_rank = 0
    for each in chosen:
        nodes.append(NodeRanks(node=each.node, first_rank=first_rank, num_ranks=each.num_ranks))
        first_rank += each.num_ranks
    begin = Begin(
        generation=past.generation, cause=state.cause, nodes=tuple(nodes), num_failures=state.past.num_failures
    )
    return Running(past=past, nodes=tuple(nodes)), (begin,)


def _too_few(num_nodes: int, rules: Rules, waited_s: float) -> str:
    waited = f", after {waited_s:.0f} s" if waited_s >= 1 else ""
    there = f"{num_nodes} node{' is' if num_nodes == 1 else 's are'} there{waited}"
    if num_nodes >= rules.min_nodes:
        return f"{there}; a multiple of {rules.node_unit} must be (--node-unit), and at least {rules.min_nodes}"
    return f"{there}; at least {rules.min_nodes} must be (--nnodes MIN:MAX allows fewer)"


# --- ranks run -------------------------------------------------------------------------------------------------------


def _running(state: Running, given: Input, now_s: float, roster: Roster, rules: Rules) -> Step:
    generation = state.past.generation
    match given:
        case Ready(node=node):
            others = [each.node for each in roster.candidates if each.node not in state.names]
            num_possible = rules.most_of(len(state.nodes) + len(others))
            if node not in others or num_possible <= len(state.nodes) or state.finished:
                return state, ()
            return _end(state, GenerationCause.NODE_JOINED, now_s, rules, about=(node,))
        case Gone(node=node):
            return _lose(state, node, now_s, rules)
        case Leave(node=node) if node in state.names:
            return _end(state, GenerationCause.NODE_DRAINED, now_s, rules, about=(node,))
        case Leave(node=node):
            return state, (LetGo(node=node),)
        case Failed() if given.generation == generation and given.node in state.names:
            return _fail(state, given, now_s, rules)
        case Finished(node=node) if given.generation == generation and node in state.names:
            finished = state.finished | {node}
            if finished.issuperset(state.names):
                end = EndRun(exit_code=ExitCode.DONE, reason="all ranks have finished")
                return _over(state, end)
            return replace(state, finished=finished), ()
        case StopAsked(end=end, now=now):
            if now:
                return _over(state, end)
            return _end(state, GenerationCause.STOPPED, now_s, rules, then=end)
        case Failed() | Finished() | TimePassed():
            return state, ()
        case _:
            assert_never(given)


def _lose(state: Running, node: str, now_s: float, rules: Rules) -> Step:
    """A node is lost; ranks that had ended well there are not needed any more."""
    if node not in state.names or node in state.finished:
        return state, ()
    ending, effects = _end(state, GenerationCause.NODE_LOST, now_s, rules, about=(node,), without=node)
    if isinstance(ending, Ending) and not ending.waits_for:
        return Gathering(past=state.past, cause=GenerationCause.NODE_LOST, since_s=now_s, tells_s=now_s), effects
    return ending, effects


def _fail(state: Running, given: Failed, now_s: float, rules: Rules) -> Step:
    then = None
    if state.past.num_failures >= rules.max_restarts:
        restarts = f"{rules.max_restarts} restart{'' if rules.max_restarts == 1 else 's'}"
        again = "it hangs again" if given.is_hang else "a rank has failed again"
        then = EndRun(reason=f"{given.reason}\n{restarts} allowed (--max-restarts), and {again}")
        if not rules.max_restarts:
            then = EndRun(reason=f"{given.reason}\nno restart is allowed (--max-restarts)")
    failed = replace(state, past=replace(state.past, num_failures=state.past.num_failures + 1))
    cause = GenerationCause.HANG if given.is_hang else GenerationCause.RANK_FAILED
    return _end(failed, cause, now_s, rules, about=(given.node,), then=then)


def _end(
    state: Running,
    cause: GenerationCause,
    now_s: float,
    rules: Rules,
    *,
    about: tuple[str, ...] = (),
    without: str = "",
    then: EndRun | None = None,
) -> Step:
    """Have all ranks ended, but for those of a node that is lost: at once where one has failed, else they are asked."""
    nodes = tuple(node for node in state.names if node != without)
    grace_s = 0.0 if cause.is_failure else rules.grace_s
    clear = Clear(generation=state.past.generation, cause=cause, nodes=nodes, about=about, grace_s=grace_s)
    due_s = now_s + grace_s + rules.patience_s
    return Ending(past=state.past, cause=cause, waits_for=frozenset(nodes), due_s=due_s, then=then), (clear,)


# --- ranks end -------------------------------------------------------------------------------------------------------


def _ending(state: Ending, given: Input, now_s: float, roster: Roster, rules: Rules) -> Step:
    match given:
        case Ready(node=node, generation=generation) if generation >= state.past.generation:
            return _cleared(state, node, now_s, roster, rules)
        case Gone(node=node):
            return _cleared(state, node, now_s, roster, rules)
        case TimePassed() if now_s >= state.due_s:
            silent = tuple(sorted(state.waits_for))
            return replace(state, due_s=math.inf), (GiveUpSilent(nodes=silent, waited_s=rules.patience_s),)
        case StopAsked(end=end, now=now):
            if now:
                return _over(state, end)
            return replace(state, then=end), ()
        case Leave(node=node) if node not in state.waits_for:
            return state, (LetGo(node=node),)
        case Ready() | Leave() | Failed() | Finished() | TimePassed():
            return state, ()  # one that is to leave is let go once its ranks are gone
        case _:
            assert_never(given)


def _cleared(state: Ending, node: str, now_s: float, roster: Roster, rules: Rules) -> Step:
    waits_for = state.waits_for - {node}
    if waits_for:
        return replace(state, waits_for=waits_for), ()
    if state.then is not None:
        return _over(state, state.then)
    return _form(Gathering(past=state.past, cause=state.cause, since_s=now_s, tells_s=now_s), now_s, roster, rules)


def _over(state: State, end: EndRun) -> Step:
    return Over(past=state.past), (end,)
