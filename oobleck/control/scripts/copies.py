"""Which saved states of a script are copied to other nodes, and which state a lost node costs nothing of. Pure.

Agents report what their nodes hold (`StatesHeld`), and are told what to keep (`KeepStates`) and to send (`CopyParts`).

A *protected* state is whole, has each part on `copies` more nodes, and all nodes know that it is to be kept: until a
newer one is protected. In place of copies there may be parities: then each part follows from those of other nodes. A
lost part is made again while no rank runs.
Ranks may save faster than an order reaches them. So the next state to copy is chosen ahead: the first one that is saved
from a step on, which is as far ahead as was too near before. Without shards, every node has the whole state, and
nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from oobleck.control import protocol
from oobleck.control.protocol import HeldParity, HeldPart, KeepStates, PartCopies, ScriptProgress, ScriptState

from .parity import BySource, Mixings
from .placement import place
from .spread import Spread

Order = tuple[str, KeepStates | protocol.CopyParts]
"""A node, and what it is told."""

_MOST_AHEAD = 1 << 16
_NODES_PER_S = 2000
"""With more nodes, their reports are taken together."""
_REFUSED_S = 30.0  # after this time a node that could not take a copy is asked again


@dataclass(frozen=True, slots=True, kw_only=True)
class Protection:
    """How safe the newest states are."""

    newest: int | None = None
    """The newest step that all ranks have saved."""
    protected: int | None = None
    """The newest step that survives the loss of a node."""
    num_missing: int = 0
    """How many parts of the state that is kept lack a copy, as after a loss."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """The state to copy next: the first one of this generation from a step on, or what it has loaded."""

    from_step: int | None
    state: ScriptState | None


class Copies:
    """Follows what nodes hold; `orders` takes the consequences."""

    def __init__(self, num_copies: int, parity_nodes: int = 0) -> None:
        """Parities of up to `parity_nodes` nodes take the place of one copy, unless it is 0."""
        self._num_copies = num_copies
        self._parity_nodes = parity_nodes
        self._mixings = Mixings()
        self._domains: Mapping[str, str] = {}
        self._doors: dict[str, protocol.CopyDoor] = {}
        """Of the nodes that can hold copies."""
        self._leaving: set[str] = set()
        self._held: dict[str, dict[tuple[ScriptState, int], HeldPart]] = {}
        """Keyed by node, then by state and rank, for a node may hold a part twice."""
        self._parities: dict[str, frozenset[HeldParity]] = {}
        """Keyed by node."""
        self._spreads: dict[ScriptState, Spread] = {}
        self._places: dict[str, tuple[str, ...]] = {}
        self._unique = ""
        self._part: frozenset[str] = frozenset()
        """The nodes of the generation that runs; only these hold copies, for spares may leave any time."""
        self._protected: ScriptState | None = None
        self._wanted: _Wanted | None = None
        self._num_ahead = 0
        """How many saves ahead the next state is chosen."""
        self._asked: dict[tuple[ScriptState, int, str], str] = {}
        """The sources of copies under way, keyed by state, rank and target."""
        self._refused_s: dict[tuple[str, str], float] = {}
        """Until when a source does not ask a target, keyed by both."""
        self._keep = KeepStates(number=0, states=(), from_step=None)
        self._told: dict[str, int] = {}
        """The number of the newest order to keep states that each node was sent."""
        self._heeded: dict[str, int] = {}
        """The number of the one that it reports."""
        self._kept_since: dict[ScriptState, int] = {}
        self._awaited: dict[str, bool] = {}
        """Nodes of an earlier master that have not reported yet what they hold, and whether what they keep is known."""
        self._is_changed = False
        self._next_s = 0.0
        self.protection = Protection()
        """As of the last orders."""
        self.newest: ScriptState | None = None
        """The newest state of the run that was whole once."""
        self.progress: ScriptProgress | None = None
        """How its rank 0 came to it."""
        self.continued_from: int | None = None
        """The step that the ranks that run have continued from; None until one of them has saved."""

    # --- what happens ------------------------------------------------------------------------------------------------

    def take_over(self, nodes: Iterable[str]) -> None:
        """Follow an earlier master: nothing is ordered before these nodes have reported what they keep and hold."""
        self._awaited = dict.fromkeys(nodes, False)

    def recall(self, node: str, order: KeepStates | None) -> None:
        """Note the newest order that a node has to keep states, which may be an earlier master's."""
        if node in self._awaited:
            self._awaited[node] = True
        if order is not None and order.number > self._keep.number:
            self._keep, self._kept_since = order, dict.fromkeys(order.states, order.number)
            self._protected = next(iter(order.states), None)

    def meet(self, node: str, door: protocol.CopyDoor | None) -> None:
        """Take in a node, which holds what it will report."""
        if door is not None and self._doors.get(node) != door:
            self._doors[node] = door
            self.remind(node)

    def remind(self, node: str) -> None:
        """Note that a node may have missed what it was told."""
        self._is_changed = True
        self._told.pop(node, None)
        self._asked = {key: source for key, source in self._asked.items() if source != node}
        self._mixings.forget_asked(node)

    def hold(self, node: str, parts: Iterable[HeldPart], *, kept: int, parities: Collection[HeldParity] = ()) -> None:
        """Note all that a node holds while it heeds the order with the number `kept`."""
        self._is_changed = True
        if self._awaited.get(node):  # what came before may be a report of long ago
            del self._awaited[node]
        self._heeded[node] = kept
        # Of a step that was saved twice, the later save counts.
        held = {(part.state, part.rank): part for part in sorted(parts, key=_worked_s)}
        before = self._held.get(node, {})
        self._hold_parities(node, frozenset(parities))
        for state, rank in [key for key in before if key not in held]:
            self._spreads[state].holders[rank].discard(node)
            self._forget_empty(state, rank)
        for part in [part for key, part in held.items() if before.get(key) != part]:
            spread = self._spreads.setdefault(part.state, Spread(part.world_size, part.is_sharded))
            spread.holders.setdefault(part.rank, set()).add(node)
            spread.can_stay &= part.can_stay
            spread.num_bytes[part.rank] = part.num_bytes
            self._asked.pop((part.state, part.rank, node), None)
            self._mixings.arrive(part.state, node, missing=part.rank)
            if part.rank == 0:
                spread.progress = part.progress
            if part.progress is not None and self.continued_from is None and self._is_current(part.state):
                self.continued_from = part.progress.from_step
            if spread.is_whole and self._is_newer(part.state):
                self.newest, self.progress = part.state, spread.progress
        self._held[node] = held

    def _hold_parities(self, node: str, held: frozenset[HeldParity]) -> None:
        before = self._parities.get(node, frozenset())
        for each in held - before:
            spread = self._spreads.setdefault(each.state, Spread(each.world_size, True))
            spread.parities.add(each.ranks, node)
            self._mixings.arrive(each.state, node, group=each.ranks)
        for each in before - held:
            self._spreads[each.state].parities.remove(each.ranks, node)
            self._forget_if_empty(each.state)
        self._parities[node] = held

    def begin(self, unique: str, nodes: Iterable[str]) -> None:
        """Note that a generation begins on these nodes, whose saves are told by the end of their start's name."""
        self._is_changed = True
        self._unique, self._part, self._wanted, self._num_ahead = unique, frozenset(nodes), None, 0
        self.continued_from = None

    def end(self) -> None:
        """Note that no rank saves any more."""
        self._is_changed = True
        self._unique, self._part, self._wanted = "", frozenset(), None

    def leave(self, node: str) -> None:
        """Note that a node is to leave: it gives copies, and is given none."""
        self._is_changed = True
        self._leaving.add(node)

    def drop(self, node: str) -> None:
        """Forget a node that is gone, with all that it held."""
        self.hold(node, (), kept=0)
        self._awaited.pop(node, None)
        self._doors.pop(node, None)
        self._heeded.pop(node, None)
        self._leaving.discard(node)
        self._told.pop(node, None)
        self._asked = {key: source for key, source in self._asked.items() if node not in (key[2], source)}
        self._mixings.drop(node)

    def fail(self, node: str, failed: protocol.PartNotCopied, now_s: float) -> None:
        """Note that a node could not copy a part."""
        self._is_changed = True
        self._asked.pop((failed.state, failed.rank, failed.target), None)
        if self._mixings.fail(failed) and not self._unique:
            return  # while ranks wait for a lost part, it is tried again at once
        if failed.is_gone:
            if self._wanted is not None and self._wanted.state == failed.state:
                self._aim_further()
        elif failed.state in self._keep.states:  # else an earlier master has asked for it, and it is not wanted now
            self._refused_s[node, failed.target] = now_s + _REFUSED_S

    def _forget_empty(self, state: ScriptState, rank: int) -> None:
        spread = self._spreads[state]
        if not spread.holders[rank]:
            del spread.holders[rank]
        self._forget_if_empty(state)

    def _forget_if_empty(self, state: ScriptState) -> None:
        if not self._spreads[state].holders and not self._spreads[state].parities:
            del self._spreads[state]

    # --- what follows ------------------------------------------------------------------------------------------------

    @property
    def due_s(self) -> float:
        """When `orders` is to be called; infinity for never."""
        return self._next_s if self._is_changed and not self._awaited else math.inf

    @property
    def has_saved(self) -> bool:
        """Whether all ranks that run have saved a state, as far as they can be told apart from earlier ones."""
        return self.newest is not None and self._is_current(self.newest)

    def why_lost(self, state: ScriptState) -> str:
        """Return why the next ranks cannot load a state that was whole; empty if they can, as far as is known."""
        if state not in self._spreads:
            return f"the state of step {state.step} was on lost nodes alone"
        if not self._is_recoverable(state):
            return f"parts of the state of step {state.step} were on lost nodes alone"
        return ""

    def is_needed(self, node: str) -> bool:
        """Whether the newest whole state would not be whole without a node that others could relieve of it."""
        newest = self._newest_whole()
        if newest is None or not set(self._staying) - {node}:
            return False
        spread = self._spreads[newest]
        return spread.is_sharded and any(not holders - self._leaving - {node} for holders in spread.holders.values())

    @property
    def is_rebuilding(self) -> bool:
        """Whether the next ranks are to wait, as lost parts of the state that they would load are made again."""
        if not self._parity_nodes or self._unique:
            return False
        newest = self._newest_recoverable()
        return bool(self._awaited) or (newest is not None and not self._spreads[newest].is_whole)

    def orders(self, now_s: float, domains: Mapping[str, str]) -> list[Order]:
        """Return what to tell nodes that they have not been told; nothing before `due_s`."""
        if now_s < self.due_s:
            return []
        self._is_changed, self._next_s = False, now_s + len(self._doors) / _NODES_PER_S
        self._domains = domains
        staying = self._staying
        # Where there are more nodes, there may be better places; copies that exist count wherever they are.
        before = self._places if self._places.keys() >= set(staying) else {}
        self._places = place(staying, self._num_copies, domains=domains, before=before)
        self._advance()
        self.protection = self._assess()
        targets = [each for each in dict.fromkeys((self._protected, self._to_copy())) if each is not None]
        targets = [each for each in targets if self._spreads[each].is_sharded]
        self._mixings.keep_only(targets)
        if not targets and self._wanted is None:
            return []
        self._renew(tuple(targets), self._wanted.from_step if self._wanted is not None else None)
        orders: list[Order] = []
        for node in self._able:
            if self._told.get(node) != self._keep.number:
                self._told[node] = self._keep.number
                orders.append((node, self._keep))
        for state in targets:
            orders += self._copy(state, now_s) if self._spreads[state].is_whole else self._rebuild(state)
        return orders

    def _assess(self) -> Protection:
        newest, kept = self._newest_whole(), self._protected
        lacking = [] if kept not in self._spreads else self._lacking(kept)
        is_safe = kept in self._spreads and self._is_kept(kept) and not lacking and self._num_needed > 1
        return Protection(
            newest=None if newest is None else newest.step,
            protected=kept.step if kept is not None and is_safe else None,
            num_missing=len(lacking),
        )

    def _renew(self, states: tuple[ScriptState, ...], from_step: int | None) -> None:
        """Have nodes keep these states."""
        keep = self._keep
        # A node without others keeps its newest state anyway, and needs to be told only which starts are past:
        # unless it is to take parts that only a draining node of the generation before has.
        is_alone = self._is_alone and {each.start for each in states} == {each.start for each in keep.states}
        knows_all = is_alone and not any(map(self._lacking, states))
        if knows_all or (states, from_step, self._unique) == (keep.states, keep.from_step, keep.start):
            return
        self._keep = KeepStates(number=keep.number + 1, states=states, from_step=from_step, start=self._unique)
        self._kept_since = {state: self._kept_since.get(state, self._keep.number) for state in states}

    def _is_kept(self, state: ScriptState) -> bool:
        """Whether what nodes have reported of a state still holds."""
        if not self._spreads[state].can_stay:
            return False
        if not self._spreads[state].is_sharded:
            return True  # if nodes have overwritten it, they have newer ones, which are as whole
        since = self._kept_since.get(state)
        return since is not None and all(self._heeded.get(node, 0) >= since for node in self._able)

    @property
    def _able(self) -> list[str]:
        """The nodes that can hold copies, or give them."""
        return [node for node in sorted(self._doors) if not self._part or node in self._part]

    @property
    def _is_alone(self) -> bool:
        """Whether ranks run on one node. One that is to leave is not alone, for others take its parts."""
        return len(self._able) < 2

    @property
    def _staying(self) -> list[str]:
        return [node for node in self._able if node not in self._leaving]

    @property
    def _num_needed(self) -> int:
        """How many nodes must hold each part."""
        return 1 + max(0, min(self._num_copies, len(self._staying) - 1))

    def _newest_whole(self) -> ScriptState | None:
        return max((state for state, spread in self._spreads.items() if spread.is_whole), default=None)

    def _newest_recoverable(self) -> ScriptState | None:
        return max(filter(self._is_recoverable, self._spreads), default=None)

    def _is_recoverable(self, state: ScriptState) -> bool:
        """Whether all parts are there, or follow from others."""
        spread = self._spreads[state]
        if spread.is_whole or not spread.parities:
            return spread.is_whole
        return all(
            spread.parities.source_of(rank, spread.holders) is not None and not self._mixings.is_hopeless(state, rank)
            for rank in spread.missing
        )

    def _lacking(self, state: ScriptState) -> list[int]:
        """Return the ranks whose parts a lost node would take along."""
        spread = self._spreads[state]
        if not spread.is_sharded:
            holders = set[str]().union(*spread.holders.values())
            return [] if len(holders - self._leaving) >= self._num_needed else sorted(spread.holders)
        if self._parity_nodes and self._num_needed > 1:
            covers, ranks = spread.parities.covers, range(spread.world_size)
            return [rank for rank in ranks if not covers(rank, spread.holders, self._leaving)]
        return [rank for rank, on in sorted(spread.holders.items()) if len(on - self._leaving) < self._num_needed]

    def _advance(self) -> None:
        """Settle which state is protected, and which is to be copied next."""
        if self._protected not in self._spreads or not self._is_recoverable(self._protected):
            self._protected = None
        whole = [state for state, spread in self._spreads.items() if spread.is_whole]
        recent = [state for state in whole if self._protected is None or state >= self._protected]
        safe = max((state for state in recent if self._is_kept(state) and not self._lacking(state)), default=None)
        if safe is not None:
            self._protected = safe
            if self._wanted is not None and self._wanted.state is not None and safe >= self._wanted.state:
                self._wanted = None
                self._num_ahead -= self._num_ahead // 8
        elif self._protected is None:
            # Nothing is safe: what ranks have loaded, or would load, must not be lost while its copies are made.
            others = [state for state in self._spreads if not self._is_current(state)]
            self._protected = max(filter(self._is_recoverable, others), default=None)
        if self._unique:
            self._aim()

    def _is_current(self, state: ScriptState) -> bool:
        """Whether the ranks that run have saved it, who overwrite it soon."""
        return bool(self._unique) and state.start.endswith(self._unique)

    def _is_newer(self, state: ScriptState) -> bool:
        """Whether a state follows all that were whole."""
        # Ranks that went back cannot see the starts whose states are lost, and may give theirs the same number.
        newest = self.newest
        return newest is None or (self._is_current(state), state) > (self._is_current(newest), newest)

    def _aim(self) -> None:
        current = [state for state, spread in self._spreads.items() if self._is_current(state) and spread.is_sharded]
        wanted = self._wanted
        if wanted is None or wanted.from_step is None:
            self._wanted = self._next_wanted(current)
        elif wanted.state is not None:
            if wanted.state not in self._spreads or not self._spreads[wanted.state].is_whole:
                self._aim_further()
        else:
            firsts: dict[int, ScriptState] = {}
            for state in sorted(current, reverse=True):
                if state.step >= wanted.from_step:
                    firsts |= dict.fromkeys(self._spreads[state].holders, state)
            if firsts and len(firsts) == self._spreads[next(iter(firsts.values()))].world_size:
                if len(set(firsts.values())) == 1:
                    self._wanted = replace(wanted, state=next(iter(firsts.values())))
                else:
                    self._aim_further()

    def _next_wanted(self, current: list[ScriptState]) -> _Wanted | None:
        newest = self._newest_whole()
        if newest is None or not self._spreads[newest].can_stay:
            return None
        if self._protected is not None and newest <= self._protected:
            return None
        # What ranks have loaded is copied until they have saved. A node without others copies nothing.
        if newest not in current or self._is_alone:
            return _Wanted(None, newest)
        if not self._num_ahead:
            return _Wanted(newest.step, newest)
        steps = sorted({state.step for state in current})
        interval = min((after - before for before, after in pairwise(steps)), default=1)
        return _Wanted(steps[-1] + self._num_ahead * interval, None)

    def _aim_further(self) -> None:
        # Some rank has overwritten the state before it heard that it was wanted.
        self._wanted, self._num_ahead = None, min(max(1, 2 * self._num_ahead), _MOST_AHEAD)

    def _to_copy(self) -> ScriptState | None:
        # While no rank saves, the newest state stays as it is.
        if not self._unique:
            return self._newest_recoverable()
        return self._wanted.state if self._wanted is not None else None

    def _copy(self, state: ScriptState, now_s: float) -> list[Order]:
        """Ask for the copies that a state lacks."""
        by_source: BySource = {}
        spread = self._spreads[state]
        if not spread.is_sharded:
            return []
        lacking = self._lacking(state)
        if self._parity_nodes and self._num_needed > 1:
            lacking = self._mix(state, lacking, by_source, now_s)
        for rank in lacking:
            holders = spread.holders[rank]
            asked = {target for of, number, target in self._asked if (of, number) == (state, rank)}
            num_lacking = self._num_needed - len(holders - self._leaving) - len(asked)
            # One that stays knows where its copies belong.
            source = min(holders & self._doors.keys(), key=lambda node: (node in self._leaving, node), default=None)
            if source is None or num_lacking <= 0:
                continue
            others = [
                node
                for node in self._ranked(source)
                if node not in holders | asked and now_s >= self._refused_s.get((source, node), now_s)
            ]
            # A node receives one state of a start's rank at a time, and this one once it has the other.
            busy = {
                target
                for of, number, target in self._asked
                if (of.start, number) == (state.start, rank) and of != state
            }
            # A node has room for a state once it knows which other one it may lose for it.
            ready = {node for node in others if self._heeded.get(node, 0) >= self._kept_since[state]} - busy
            doors = tuple(self._doors[node] for node in others[:num_lacking] if node in ready)
            self._asked |= {(state, rank, door.node): source for door in doors}
            if doors:
                by_source.setdefault(source, []).append(PartCopies(rank=rank, doors=doors))
        return _orders(state, by_source)

    def _mix(self, state: ScriptState, lacking: list[int], by_source: BySource, now_s: float) -> list[int]:
        """Ask for the parities that a state lacks; return the ranks whose parts are to be copied."""
        spread, staying = self._spreads[state], self._staying
        copied = self._mixings.plan(
            state, spread, lacking, nodes=staying, most=self._parity_nodes, domains=self._domains
        )
        # A node has room for a parity once it knows which other state it may lose for it.
        ready = {node for node in staying if self._heeded.get(node, 0) >= self._kept_since[state]}

        def may_send(source: str, target: str) -> bool:
            is_refused = now_s < self._refused_s.get((source, target), now_s)
            return source in self._doors and target in ready and not is_refused

        self._mixings.ask(state, spread, self._doors, may_send, by_source)
        return copied

    def _rebuild(self, state: ScriptState) -> list[Order]:
        """Ask for what makes lost parts again."""
        by_source: BySource = {}
        if not self._unique and state == self._newest_recoverable():
            spread = self._spreads[state]
            self._mixings.plan_missing(state, spread)
            self._mixings.ask(state, spread, self._doors, lambda source, target: target in self._doors, by_source)
        return _orders(state, by_source)

    def _ranked(self, source: str) -> list[str]:
        """Return the nodes that may take a source's copies, its own places first."""
        places = self._places.get(source, ())
        others = [node for node in self._places if node != source and node not in places]
        domain = self._domains.get(source, source)
        return [*places, *sorted(others, key=lambda node: (self._domains.get(node, node) == domain, node))]


def _worked_s(part: HeldPart) -> float:
    return part.progress.worked_s if part.progress is not None else 0.0


def _orders(state: ScriptState, by_source: BySource) -> list[Order]:
    return [
        (source, protocol.CopyParts(state=state, parts=tuple(parts))) for source, parts in sorted(by_source.items())
    ]
