"""Gathering of slow nodes: several pipelines with one slow node each wait more than one pipeline with all of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from oobleck.planner.inventory import Holding, missing_bytes

# More slow nodes than these stay where they are, since each one is compared with all places.
_MOST_GATHERED = 32
# Up to this many nodes, slow ones are tried in pipelines of every size; beyond that their place hardly matters.
_FEW_NODES = 64

# A spot is a pipeline, and a node's position in it.
_Spot = tuple[int, int]


def gather_slow_nodes(
    pipelines: Sequence[Sequence[str]],
    needed: Sequence[Sequence[Holding]],
    slow: Collection[str],
    holdings: Mapping[str, Holding],
    layer_bytes: Sequence[int],
) -> Iterator[list[tuple[str, ...]]]:
    """Yield proposals: the pipelines with all slow nodes swapped into as few of them as possible.

    Each slow node takes the place whose swap moves the fewest bytes; `needed` is what each position has to hold. The
    caller weighs the bytes. O(slow · host nodes).
    """
    if not slow:
        return
    numbers = [sum(node in slow for node in nodes) for nodes in pipelines]
    # Pipelines with the most slow nodes need the fewest swaps, the smallest ones slow down the fewest others.
    by_number = sorted(range(len(pipelines)), key=lambda i: (-numbers[i], len(pipelines[i]), i))
    by_size = sorted(range(len(pipelines)), key=lambda i: (len(pipelines[i]), -numbers[i], i))
    orders = [by_number, by_size]
    if sum(map(len, pipelines)) <= _FEW_NODES:
        # A larger pipeline has more places, one of which may suit a slow node.
        orders += [sorted(by_size, key=lambda i: len(pipelines[i]) != size) for size in sorted({*map(len, pipelines)})]
    every: list[set[int]] = []
    for order in orders:
        if (hosts := _hosts(order, pipelines, sum(numbers))) not in every:
            every.append(hosts)

    def swapped_bytes(a: _Spot, b: _Spot, gathered: Sequence[Sequence[str]]) -> float:
        there, here = holdings[gathered[b[0]][b[1]]], holdings[gathered[a[0]][a[1]]]
        return missing_bytes(needed[a[0]][a[1]], there, layer_bytes) + missing_bytes(
            needed[b[0]][b[1]], here, layer_bytes
        )

    spots = [(index, position) for index, nodes in enumerate(pipelines) for position in range(len(nodes))]
    for hosts in every:
        outside = [spot for spot in spots if spot[0] not in hosts and pipelines[spot[0]][spot[1]] in slow]
        inside = [spot for spot in spots if spot[0] in hosts and pipelines[spot[0]][spot[1]] not in slow]
        if not 0 < len(outside) <= _MOST_GATHERED:
            continue
        gathered = [list(nodes) for nodes in pipelines]
        for a in outside:
            # The spot itself breaks ties, so that equal situations lead to equal plans.
            b = min(inside, key=lambda spot: (swapped_bytes(a, spot, gathered), spot))
            inside.remove(b)
            gathered[a[0]][a[1]], gathered[b[0]][b[1]] = gathered[b[0]][b[1]], gathered[a[0]][a[1]]
        yield [tuple(nodes) for nodes in gathered]


def _hosts(order: Sequence[int], pipelines: Sequence[Sequence[str]], num_slow: int) -> set[int]:
    """Return the first pipelines that together have room for all slow nodes."""
    hosts: set[int] = set()
    for index in order:
        if num_slow <= 0:
            break
        hosts.add(index)
        num_slow -= len(pipelines[index])
    return hosts
