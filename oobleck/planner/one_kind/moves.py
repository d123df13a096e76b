"""The moves that make a plan whole again: the sizes that the new pipelines could have.

A move decides the sizes, and which old pipeline each new one continues; nodes are matched to positions afterwards. Any
move may be impossible, but a rebuild is possible whenever a plan is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

from oobleck.planner.formatting import counted, listed
from oobleck.planner.kinds import Form
from oobleck.planner.reconfiguration import UNCHANGED, LivingNodes, Move, pipelines_named

from .catalog import OneKindCatalog

Choose = Callable[[int, int], tuple[int, ...]]

# Pipelines of slow nodes are tried with at most this many other nodes.
_MOST_COMPANY = 2
# Up to this many nodes, all numbers of pipelines are tried where a node is slow.
_FEW_NODES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """The nodes of the old pipelines, and the sizes that have a template, increasing."""

    before: tuple[int, ...]
    alive: tuple[int, ...]
    """How many nodes of each old pipeline may continue in it."""
    num_free: int
    """Spares and joined nodes."""
    sizes: tuple[int, ...]

    @property
    def num_nodes(self) -> int:
        return sum(self.alive) + self.num_free

    @property
    def broken(self) -> tuple[int, ...]:
        return tuple(index for index, count in enumerate(self.before) if self.alive[index] < count)

    def fit(self, num_nodes: int) -> int:
        """Return the largest size up to `num_nodes` that has a template, 0 for none."""
        position = bisect_right(self.sizes, num_nodes)
        return self.sizes[position - 1] if position else 0


def propose_moves(
    catalog: OneKindCatalog, living: LivingNodes, continued: Mapping[int, Form], set_aside: frozenset[str]
) -> Iterator[Move]:
    """Yield the possible moves that leave some nodes out, the gentlest first."""
    alive = Counter(living.origins.values())
    alive.subtract(living.origins[node] for node in set_aside if node in living.origins)
    num_free = sum(node not in set_aside for node in living.free)
    situation = Situation(
        before=tuple(len(pipeline.nodes) for pipeline in living.plan.pipelines),
        alive=tuple(alive[index] for index in range(len(living.plan.pipelines))),
        num_free=num_free,
        sizes=tuple(catalog.options(alive.total() + num_free)),
    )
    if catalog.can_hold((situation.num_nodes,)):
        yield from all_moves(situation, partial(_choose, catalog, situation))
        if living.slow - set_aside:
            yield from _other_numbers(catalog, situation)
            yield from _separate(catalog, living, situation, set_aside)


def all_moves(situation: Situation, choose: Choose) -> list[Move]:
    """Return the possible moves, the gentlest first.

    `choose(nodes, kept)` returns the best sizes for `nodes` nodes while `kept` other pipelines stay, or no sizes.
    """
    # The gentlest first: of moves to equal pipelines the first one gives the name.
    moves = [
        _reinstantiate(situation),
        _borrow(situation),
        _merge(situation),
        _absorb(situation),
        _regroup(situation, choose),
        _rebuild(situation, choose),
    ]
    distinct: dict[object, Move] = {}
    for move in moves:
        if move is not None and move.pipelines:
            distinct.setdefault(move.pipelines, move)
    return list(distinct.values())


def _of_sizes(action: str, pipelines: Sequence[tuple[int | None, int]], detail: str) -> Move:
    counted_by_kind = tuple((origin, (size,)) for origin, size in pipelines)
    return Move(action=action, pipelines=counted_by_kind, detail=detail)


def _refill(situation: Situation) -> tuple[list[int], int]:
    """Return the nodes of each pipeline after free nodes have replaced lost ones, and the number of free nodes left."""
    counts, free = list(situation.alive), situation.num_free
    for index in situation.broken:
        taken = min(free, situation.before[index] - counts[index])
        counts[index] += taken
        free -= taken
    return counts, free


def _move(action: str, counts: Sequence[int], situation: Situation, detail: str) -> Move | None:
    """Return the move to these counts of nodes, 0 for a dissolved pipeline; None where a count has no template."""
    sizes = [(index, situation.fit(count)) for index, count in enumerate(counts) if count]
    if not sizes or not all(size for _, size in sizes):
        return None
    return _of_sizes(action, sizes, detail)


def _reinstantiate(situation: Situation) -> Move | None:
    counts, _ = _refill(situation)
    shrunk = [index for index in situation.broken if counts[index] < situation.before[index]]
    if any(counts[index] for index in shrunk):
        detail = listed(
            f"pipeline {index} continues with {counted(situation.fit(counts[index]), 'node')}"
            for index in shrunk
            if counts[index]
        )
    elif shrunk:
        detail = "the other pipelines take its microbatches"
    elif situation.broken:
        detail = "spares take the empty places"
    else:
        detail = UNCHANGED
    return _move("reinstantiate", counts, situation, detail)


def _borrow(situation: Situation) -> Move | None:
    """Fill every undersized pipeline up to the smallest size with nodes of the largest pipelines."""
    counts, _ = _refill(situation)
    smallest = situation.sizes[0]
    borrowers = [index for index, count in enumerate(counts) if 0 < count < smallest]
    donors: Counter[int] = Counter()
    for index in borrowers:
        while counts[index] < smallest:
            donor = max(range(len(counts)), key=lambda i: (counts[i], -i))
            # A donor must not become undersized itself.
            if counts[donor] <= smallest:
                return None
            counts[donor] -= 1
            counts[index] += 1
            donors[donor] += 1
    if not borrowers:
        return None
    detail = (
        f"{pipelines_named(borrowers)} borrow{'s' if len(borrowers) == 1 else ''} "
        f"{counted(sum(donors.values()), 'node')} from {pipelines_named(sorted(donors))}"
    )
    return _move("borrow", counts, situation, detail)


def _merge(situation: Situation) -> Move | None:
    """Merge undersized pipelines with each other, and a last one into the smallest of the others."""
    counts, _ = _refill(situation)
    smallest = situation.sizes[0]
    merged: list[str] = []
    while any(0 < count < smallest for count in counts):
        alive = sorted((i for i, count in enumerate(counts) if count), key=lambda i: (counts[i], i))
        if len(alive) < 2:
            return None
        source, target = alive[:2]
        counts[target] += counts[source]
        counts[source] = 0
        merged.append(f"{source} merged into pipeline {target}")
    return _move("merge", counts, situation, f"pipeline {listed(merged)}") if merged else None


def _absorb(situation: Situation) -> Move | None:
    """Give free nodes one by one to the smallest pipelines that have a template for them."""
    counts, free = _refill(situation)
    grown: Counter[int] = Counter()
    largest = situation.sizes[-1]
    while free:
        growing = [i for i, count in enumerate(counts) if count and count < largest]
        if not growing:
            break
        index = min(growing, key=lambda i: (counts[i], i))
        counts[index] += 1
        free -= 1
        grown[index] += 1
    if not grown:
        return None
    return _move("absorb", counts, situation, f"{pipelines_named(sorted(grown))} grow{'s' if len(grown) == 1 else ''}")


def _regroup(situation: Situation, choose: Choose) -> Move | None:
    """Keep whole pipelines and form the best pipelines of all other nodes."""
    whole = [(i, count) for i, count in enumerate(situation.alive) if count == situation.before[i]]
    pool = situation.num_nodes - sum(count for _, count in whole)
    if not whole or not pool or not all(count in situation.sizes for _, count in whole):
        return None
    sizes = choose(pool, len(whole))
    if not sizes:
        return None
    placed = _continue_pipelines(sizes, situation, among=situation.broken)
    return _of_sizes(
        "rebuild" if situation.broken else "absorb",
        sorted([*whole, *placed], key=_by_origin),
        f"the other nodes form {_described(sizes)}",
    )


def _rebuild(situation: Situation, choose: Choose) -> Move | None:
    sizes = choose(situation.num_nodes, 0)
    if not sizes:
        return None
    placed = _continue_pipelines(sizes, situation, among=range(len(situation.before)))
    return _of_sizes("rebuild", placed, f"all nodes are planned again: {_described(sizes)}")


def _continue_pipelines(
    sizes: Sequence[int], situation: Situation, *, among: Sequence[int]
) -> tuple[tuple[int | None, int], ...]:
    """Assign each new size the old pipeline that it continues: whole ones of that size first, then by survivors."""
    alive = situation.alive
    placed: list[tuple[int | None, int]] = []
    others: list[int] = []
    available = Counter(sizes)
    for index in sorted(among, key=lambda i: (-alive[i], i)):
        if alive[index] == situation.before[index] and available[alive[index]]:
            available[alive[index]] -= 1
            placed.append((index, alive[index]))
        elif alive[index]:
            others.append(index)
    rest = sorted(available.elements(), reverse=True)
    placed += zip_longest(others[: len(rest)], rest)
    return tuple(sorted(placed, key=_by_origin))


def _by_origin(pipeline: tuple[int | None, int]) -> tuple[bool, int, int]:
    origin, size = pipeline
    return origin is None, origin or 0, -size


def _described(sizes: Sequence[int]) -> str:
    return listed(
        f"{counted(times, 'pipeline')} of {counted(size, 'node')}"
        for size, times in sorted(Counter(sizes).items(), reverse=True)
    )


def _other_numbers(catalog: OneKindCatalog, situation: Situation) -> Iterator[Move]:
    """Yield rebuilds to every possible number of pipelines, on few nodes: a slow one may suit another than the best."""
    if situation.num_nodes > _FEW_NODES:
        return
    fewest, most = catalog.num_pipelines((situation.num_nodes,))
    for number in range(fewest, most + 1):
        sizes = catalog.choose(situation.num_nodes, catalog.settings.num_microbatches, number, number).sizes
        if sizes:
            placed = _continue_pipelines(sizes, situation, among=range(len(situation.before)))
            yield _of_sizes("rebuild", placed, f"all nodes are planned again: {_described(sizes)}")


def _separate(
    catalog: OneKindCatalog, living: LivingNodes, situation: Situation, set_aside: frozenset[str]
) -> Iterator[Move]:
    """Yield moves that give slow nodes separate pipelines, with none or a few of the other nodes."""
    slow = [living.speeds[node] for node in sorted(living.slow - set_aside)]
    fewest, most = catalog.num_pipelines((situation.num_nodes,))
    total, smallest = catalog.settings.num_microbatches, situation.sizes[0]
    least = max(len(slow), smallest)
    for number in range(least, min(least + _MOST_COMPANY, situation.num_nodes - smallest) + 1):
        rest = situation.num_nodes - number
        # The other nodes of these pipelines wait for the slowest, and count as equally slow.
        share = max(1, round(total * number * min(slow) / (number * min(slow) + rest)))
        most_apart = min(most - 1, number // smallest, share)
        # Both sides need room for a pipeline, and a microbatch.
        if most_apart < 1 or share == total:
            continue
        apart = catalog.choose(number, share, 1, most_apart).sizes
        most_others = min(most - len(apart), rest // smallest, total - share)
        fewest_others = max(1, min(fewest - len(apart), most_others))
        others = catalog.choose(rest, total - share, fewest_others, most_others).sizes
        # Some have no memory for their share.
        if apart and others:
            placed = _continue_pipelines((*others, *apart), situation, among=range(len(situation.before)))
            yield _of_sizes("rebuild", placed, f"slow nodes form {_described(apart)}")


def _choose(catalog: OneKindCatalog, situation: Situation, num_nodes: int, num_kept: int) -> tuple[int, ...]:
    wanted = catalog.settings.num_pipelines
    num_microbatches = catalog.settings.num_microbatches
    fewest, most = catalog.num_pipelines((situation.num_nodes,))
    if num_kept:
        num_microbatches = max(1, round(num_microbatches * num_nodes / situation.num_nodes))
        most = min(most - num_kept, num_nodes // situation.sizes[0], num_microbatches)
        fewest = most if wanted is not None else max(1, min(fewest - num_kept, most))
    return catalog.choose(num_nodes, num_microbatches, fewest, most).sizes if most >= 1 else ()
