"""The generations of a script's ranks, as a state machine: `step(state, given, now_s, …) -> (state, effects)`.

    Gathering ── enough nodes ──> Running ── all ranks have ended well ──> Over
        │                         │     ^ │                                 ^
        │    no rank shows any sign     │ │ a rank fails, a node is lost,   │ no generation
        │    of life: ask where they are│ │ joins or leaves, a stop         │ follows
        │                         v     │ v                                 │
        │                        Asking ──── it hangs ──> Ending ───────────┤
        ^                                                   │               │
        └─────────────── all ranks are gone ────────────────┴───────────────┘

`TRANSITIONS` lists everything that can change a state. A generation ends everywhere before the next one begins: its
ranks know each other by one rendezvous, which nothing can join or leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import assert_never

from oobleck.control.events import EndRun
from oobleck.control.journal import GenerationCause, NodeRanks
from oobleck.errors import ExitCode
from oobleck.planner.formatting import counted

from . import states
from .states import Asking, Ending, Gathering, Over, Running, Signal


@dataclass(frozen=True, slots=True)
class Transition:
    """In a state of `before`, an input of `given` may lead to any of `targets`; if it `stays`, to other values too."""

    before: tuple[type[states.State], ...]
    given: tuple[type[states.Input] | Signal, ...]
    targets: tuple[type[states.State], ...]
    why: str
    stays: bool = True


_ALIVE = (Running, Asking)
ALL_FINISHED = "all ranks have finished"

TRANSITIONS = (
    Transition((Gathering,), (states.Ready,), (Running, Over), "another node is present: they may be enough now"),
    Transition((Gathering,), (states.Gone, states.Leave), (Running, Over), "no other node may be worth waiting for"),
    Transition((Gathering,), (Signal.TIME_PASSED,), (Running, Over), "the present nodes are enough, or too few"),
    Transition((Gathering,), (states.StopAsked,), (Over,), "nothing runs", stays=False),
    Transition(_ALIVE, (states.Ready,), (Ending,), "a node has joined: all start again with it"),
    Transition(_ALIVE, (states.Gone,), (Ending, Gathering), "a node of the generation is lost"),
    Transition(_ALIVE, (states.Leave,), (Ending,), "a node of the generation leaves"),
    Transition(_ALIVE, (states.Failed,), (Ending,), "a rank has failed, or all hang"),
    Transition(_ALIVE, (states.Finished,), (Over,), "the last rank may have finished"),
    Transition(_ALIVE, (states.StopAsked,), (Ending, Over), "its ranks are asked to end", stays=False),
    Transition((Running,), (Signal.QUIET,), (Asking,), "ranks may hang: ask where they are", stays=False),
    Transition((Asking,), (Signal.STIRRED,), (Running,), "they do not hang", stays=False),
    Transition((Ending,), (states.Ready, states.Gone), (Gathering, Running, Over), "the last rank may be gone"),
    Transition((Ending,), (states.Leave,), (), "a node without ranks may go"),
    Transition((Ending,), (Signal.TIME_PASSED,), (), "an agent reports nothing: its node is given up"),
    Transition((Ending,), (states.StopAsked,), (Over,), "no generation is to follow"),
)

Step = tuple[states.State, tuple[states.Effect, ...]]

# At a start, nodes that are still being reached do not count as missing.
_CONNECTING_S = 10.0
_TELL_S = 60.0
# The stacks of ranks are awaited this long.
_ANSWERS_S = 5.0
# After this many generations in a row without progress, new processes are started: what the old ones keep may fail.
_MOST_FRUITLESS = 2


def start(now_s: float) -> states.State:
    cause = GenerationCause.START
    return Gathering(past=states.Past(), cause=cause, since_s=now_s, tells_s=now_s + _CONNECTING_S)


def deadline(state: states.State, rules: states.Rules) -> float:
    """When `TIME_PASSED` is due; infinity for never."""
    match state:
        case Gathering(since_s=since_s, cause=GenerationCause.START):
            timeouts_s = sorted((rules.waits_for_all_s, rules.waits_for_min_s))
            return min(state.tells_s, since_s + timeouts_s[state.is_late])
        case Gathering(since_s=since_s):
            return min(state.tells_s, since_s + rules.waits_for_min_s)
        case Ending(due_s=due_s) | Asking(due_s=due_s):
            return due_s
        case Running() | Over():
            return math.inf
        case _:
            assert_never(state)


def step(state: states.State, given: states.Input, now_s: float, *, roster: states.Roster, rules: states.Rules) -> Step:
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


def _gathering(state: Gathering, given: states.Input, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    match given:
        case states.Leave(node=node):
            following, effects = _form(state, now_s, roster, rules)
            return following, (states.LetGo(node=node), *effects)
        case states.Ready() | states.Gone() | Signal.TIME_PASSED:
            return _form(state, now_s, roster, rules)
        case states.StopAsked(end=end):
            return _over(state, end)
        case states.Failed() | states.Finished() | Signal.QUIET | Signal.STIRRED:
            return state, ()
        case _:
            assert_never(given)


def _form(state: Gathering, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    """Begin a generation if enough nodes are present, and none is worth waiting for."""
    chosen = roster.candidates[: rules.most_of(len(roster.candidates))]
    waited_s = now_s - state.since_s
    is_start = state.cause is GenerationCause.START
    # Times are compared as `deadline` adds them: a difference of floats may fall short of a deadline that has come.
    is_after_all, is_after_min = (
        now_s >= state.since_s + timeout_s for timeout_s in (rules.waits_for_all_s, rules.waits_for_min_s)
    )
    is_worth_waiting = is_start and roster.num_expected > 0 and not is_after_all
    are_enough = len(roster.candidates) >= rules.fewest_nodes
    # Only the first generation waits for more nodes than it needs: later ones grow when a node joins.
    if are_enough and (len(chosen) == rules.most_nodes or not is_worth_waiting):
        return _begin(state, chosen)
    is_hopeless = is_start and not roster.num_expected
    if not are_enough and (is_hopeless or is_after_min):
        return _over(state, EndRun(reason=_too_few(len(roster.candidates), rules, waited_s)))
    if is_start and (is_after_all or is_after_min):
        state = replace(state, is_late=True)  # else the deadline that has passed would be due again and again
    if now_s < state.tells_s:
        return state, ()
    num_missing = rules.fewest_nodes - len(roster.candidates)
    missing = states.TooFew(num_missing=num_missing, until_s=state.since_s + rules.waits_for_min_s)
    return replace(state, tells_s=now_s + _TELL_S), () if are_enough else (missing,)


def _begin(state: Gathering, chosen: tuple[states.Candidate, ...]) -> Step:
    past = replace(state.past, generation=state.past.generation + 1)
    nodes: list[NodeRanks] = []
    first_rank = 0
    for each in chosen:
        nodes.append(NodeRanks(node=each.node, first_rank=first_rank, num_ranks=each.num_ranks))
        first_rank += each.num_ranks
    begin = states.Begin(
        generation=past.generation, cause=state.cause, nodes=tuple(nodes), num_failures=state.past.num_failures
    )
    return Running(past=past, nodes=tuple(nodes)), (begin,)


def _too_few(num_nodes: int, rules: states.Rules, waited_s: float) -> str:
    """Say what is missing, and which option would change that."""
    waited = f", after {waited_s:.0f} s (--join-timeout)" if waited_s >= rules.waits_for_min_s else ""
    if not num_nodes:
        least = f"; at least {rules.fewest_nodes} must be" if rules.fewest_nodes > 1 else ""
        return f"no node is there to run on{waited}{least}"
    there = f"{num_nodes} node{' is' if num_nodes == 1 else 's are'} there{waited}"
    if num_nodes >= rules.min_nodes:
        return f"{there}; a multiple of {rules.node_unit} must be (--node-unit), and at least {rules.min_nodes}"
    return f"{there}; at least {rules.min_nodes} must be (--nnodes {num_nodes}:{rules.most_nodes} would do with fewer)"


# --- ranks run -------------------------------------------------------------------------------------------------------


def _running(state: Running, given: states.Input, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    generation = state.past.generation
    match given:
        case states.Ready(node=node):
            others = [each.node for each in roster.candidates if each.node not in state.names]
            num_possible = rules.most_of(len(state.nodes) + len(others))
            # A restart must make the generation larger, and never repeats what ranks have finished.
            if node not in others or num_possible <= len(state.nodes) or state.finished:
                return state, ()
            return _end(state, GenerationCause.NODE_JOINED, now_s, roster, rules, about=(node,))
        case states.Gone(node=node):
            return _lose(state, node, now_s, roster, rules)
        case states.Leave(node=node) if node in state.finished:
            return _without(state, node), (states.LetGo(node=node),)
        case states.Leave(node=node) if node in state.names:
            return _end(state, GenerationCause.NODE_DRAINED, now_s, roster, rules, about=(node,))
        case states.Leave(node=node):
            return state, (states.LetGo(node=node),)
        case states.Failed() if given.generation == generation and given.node in state.names:
            return _fail(state, given, now_s, roster, rules)
        case states.Finished(node=node) if given.generation == generation and node in state.names:
            finished = state.finished | {node}
            if finished.issuperset(state.names):
                return _over(state, EndRun(exit_code=ExitCode.DONE, reason=ALL_FINISHED))
            return replace(state, finished=finished), ()
        case states.StopAsked(end=end, now=now):
            if now:
                return _over(state, end)
            return _end(state, GenerationCause.STOPPED, now_s, roster, rules, then=end)
        case Signal.QUIET if not isinstance(state, Asking):
            asking = Asking(past=state.past, nodes=state.nodes, finished=state.finished, due_s=now_s + _ANSWERS_S)
            return asking, (states.Ask(generation=generation, nodes=state.unfinished),)
        case Signal.STIRRED if isinstance(state, Asking):
            return Running(past=state.past, nodes=state.nodes, finished=state.finished), ()
        case states.Failed() | states.Finished() | Signal():
            return state, ()
        case _:
            assert_never(given)


def _lose(state: Running, node: str, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    if node not in state.names:
        return state, ()
    if node in state.finished:
        return _without(state, node), ()
    ending, effects = _end(state, GenerationCause.NODE_LOST, now_s, roster, rules, about=(node,), without=node)
    # The lost node was the only one, so no agent will report that ranks are gone.
    if not ending.waits_for:
        return Gathering(past=ending.past, cause=GenerationCause.NODE_LOST, since_s=now_s, tells_s=now_s), effects
    return ending, effects


def _without(state: Running, node: str) -> Running:
    """Forget a node whose ranks have finished: no end of the generation may wait for it."""
    return replace(state, nodes=tuple(each for each in state.nodes if each.node != node))


def _fail(state: Running, given: states.Failed, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    then = None
    if state.past.num_failures >= rules.max_restarts:
        then = too_many_failures(given.reason, is_hang=given.is_hang, rules=rules)
    if given.is_final:
        then = EndRun(reason=given.reason)
    # Only failures count as restarts: nodes that are lost or join cost none.
    failed = replace(state, past=replace(state.past, num_failures=state.past.num_failures + 1))
    cause = GenerationCause.HANG if given.is_hang else GenerationCause.RANK_FAILED
    ending, effects = _end(failed, cause, now_s, roster, rules, about=(given.node,), then=then)
    is_unexplained = not given.is_hang and not given.is_final
    return replace(ending, is_unexplained=is_unexplained), effects


def too_many_failures(reason: str, *, is_hang: bool, rules: states.Rules) -> EndRun:
    """Return the end of a run after a failure for `reason`, when no more restart is allowed."""
    if not rules.max_restarts:
        return EndRun(reason=f"{reason}\nno restart is allowed (--max-restarts)")
    restarts = counted(rules.max_restarts, "restart")
    again = "it hangs again" if is_hang else "a rank has failed again"
    return EndRun(reason=f"{reason}\n{restarts} allowed (--max-restarts), and {again}")


def _end(
    state: Running,
    cause: GenerationCause,
    now_s: float,
    roster: states.Roster,
    rules: states.Rules,
    *,
    about: tuple[str, ...] = (),
    without: str = "",
    then: EndRun | None = None,
) -> tuple[Ending, tuple[states.Effect, ...]]:
    """End all ranks but those of a lost node (`without`)."""
    nodes = tuple(node for node in state.names if node != without)
    # After a failure the others could only wait for the rank that failed.
    grace_s = 0.0 if cause.is_failure else rules.grace_s
    num_fruitless = state.past.num_fruitless + 1 if cause.is_failure and not roster.has_saved else 0
    # Ranks that hang may do so because of what their processes keep, too.
    keeps = then is None and cause is not GenerationCause.HANG and num_fruitless <= _MOST_FRUITLESS
    past = replace(state.past, num_fruitless=num_fruitless if keeps else 0)
    clear = states.Clear(
        generation=past.generation, cause=cause, nodes=nodes, about=about, grace_s=grace_s, keeps=keeps
    )
    due_s = now_s + grace_s + rules.patience_s
    waits_for = frozenset(nodes)
    return Ending(past=past, cause=cause, waits_for=waits_for, due_s=due_s, then=then, keeps=keeps), (clear,)


# --- ranks end -------------------------------------------------------------------------------------------------------


def _ending(state: Ending, given: states.Input, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    match given:
        case states.Ready(node=node, generation=generation) if generation >= state.past.generation:
            return _cleared(state, node, now_s, roster, rules)
        case states.Gone(node=node):
            return _cleared(_explained(state, node), node, now_s, roster, rules)
        case Signal.TIME_PASSED if now_s >= state.due_s:
            # Once is enough: each node that is given up comes back as `Gone`.
            silent = tuple(sorted(state.waits_for))
            return replace(state, due_s=math.inf), (states.GiveUpSilent(nodes=silent, waited_s=rules.patience_s),)
        case states.StopAsked(end=end, now=now):
            if now:
                return _over(state, end)
            return replace(state, then=end, is_unexplained=False), ()
        case states.Leave(node=node) if node not in state.waits_for:
            return state, (states.LetGo(node=node),)
        case states.Ready() | states.Leave() | states.Failed() | states.Finished() | Signal():
            return state, ()  # a node that leaves may go once its ranks are gone
        case _:
            assert_never(given)


def _explained(state: Ending, node: str) -> Ending:
    """Take a failure back that a lost node explains: others' collectives fail before its loss is known."""
    if not state.is_unexplained or node not in state.waits_for:
        return state
    past = replace(state.past, num_failures=state.past.num_failures - 1)
    return replace(state, past=past, cause=GenerationCause.NODE_LOST, then=None, is_unexplained=False)


def _cleared(state: Ending, node: str, now_s: float, roster: states.Roster, rules: states.Rules) -> Step:
    waits_for = state.waits_for - {node}
    if waits_for:
        return replace(state, waits_for=waits_for), ()
    if state.then is not None:
        return _over(state, state.then)
    gathering = Gathering(past=state.past, cause=state.cause, since_s=now_s, tells_s=now_s)
    return _form(gathering, now_s, roster, rules)


def _over(state: states.State, end: EndRun) -> Step:
    return Over(past=state.past), (end,)
