"""Who decides what happens next in the model's world: at random, by shifting priorities, or in turn.

Priorities follow Burckhardt et al., "A randomized scheduler with probabilistic guarantees of finding bugs"
(ASPLOS 2010): always let the most important actor move, and change priorities at a few random points, so that
one actor can fall far behind all others. Moves chosen uniformly hardly ever do that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from oobleck.sim.cluster.fabric import Violation

from .model import Shape, World

__all__ = ["KINDS", "Fault", "Scenario", "finish", "play", "replay", "strike"]

Choose = Callable[[list[str]], str]

KINDS = ("kill", "cut", "crash", "freeze", "hang", "stick", "blip", "join", "drain", "stop", "master")
"""Everything that may go wrong, or be asked for."""
_LIMIT = 20_000
"""Moves in which any run has to end."""
_PATIENCE = 600
"""Moves of time alone, each a heartbeat's interval or less, in which something has to happen."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong, and after how many moves since the fault before."""

    after: int
    kind: str
    target: int
    """Index of the node or worker, modulo their number."""
    last_words: int = 0
    """How many of a killed node's undelivered messages still arrive."""
    in_commit: bool = False
    """Those moves are counted from when a worker tells another of its part in a commit."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One run: the world, what goes wrong in it, and the seed of every choice in between."""

    shape: Shape
    faults: tuple[Fault, ...]
    seed: int
    calm: int = 200
    """Moves after the last fault that are still chosen unkindly."""
    is_timely: bool = False
    """Nothing that can happen waits so long that the coordinator takes anybody for dead."""


def uniform(rng: random.Random) -> Choose:
    def choose(moves: list[str]) -> str:
        likely = [move for move in moves if not move.startswith(("fail", "time"))]
        return rng.choice(likely if likely and rng.random() < 0.95 else moves)

    return choose


def by_priority(rng: random.Random, changes: float) -> Choose:
    priorities: dict[str, float] = {}

    def choose(moves: list[str]) -> str:
        for move in moves:
            if move not in priorities:
                priorities[move] = rng.random() * (0.3 if move.startswith(("fail", "time")) else 1.0)
        chosen = max(moves, key=priorities.__getitem__)
        if rng.random() < changes:
            priorities[chosen] = rng.random() * (0.3 if chosen.startswith(("fail", "time")) else 1.0)
        return chosen

    return choose


def in_turn() -> Choose:
    """Fair: the move that was made longest ago; errors and time wait until nothing else can happen."""
    last: dict[str, int] = {}
    count = 0

    def choose(moves: list[str]) -> str:
        nonlocal count
        count += 1
        likely = [move for move in moves if move != "time"]
        chosen = min(likely or moves, key=lambda move: last.get(move, -1))
        last[chosen] = count
        return chosen

    return choose


def play(scenario: Scenario) -> World:
    """Play a scenario to its end. Raises Violation, with the moves made so far as its second argument."""
    rng = random.Random(scenario.seed)
    world = World(scenario.shape)
    choose = uniform(rng) if rng.random() < 0.3 else by_priority(rng, rng.choice((0.01, 0.05, 0.2)))
    try:
        for fault in scenario.faults:
            if fault.in_commit:
                _run(world, choose, _LIMIT, is_timely=scenario.is_timely, until=lambda: bool(world.ways))
            _run(world, choose, fault.after, is_timely=scenario.is_timely)
            if world.ended is None:
                strike(world, fault)
        _run(world, choose, scenario.calm, is_timely=scenario.is_timely)
        finish(world)
    except Violation as violation:
        raise Violation(str(violation), tuple(world.made)) from violation
    except AssertionError as error:
        raise Violation(f"an assertion failed: {error!r}", tuple(world.made)) from error
    return world


def replay(shape: Shape, moves: tuple[str, ...] | list[str]) -> World:
    """Make these moves, leaving out those that are not possible, and then let everybody move in turn."""
    world = World(shape)
    for move in moves:
        if world.ended is not None:
            break
        if move in world.moves() or _is_possible_fault(world, move):
            world.make(move)
    finish(world)
    return world


def _run(
    world: World, choose: Choose, limit: int, *, is_timely: bool, until: Callable[[], bool] = lambda: False
) -> None:
    for _ in range(limit):
        moves = world.moves()
        if not moves or until():
            break
        if is_timely and len(moves) > 1:
            moves.remove("time")
        world.make(choose(moves))


def finish(world: World) -> None:
    for name, node in world.nodes.items():
        if node.is_frozen and not node.is_hung and world.ended is None:
            world.make(f"thaw {name}")
    if world.ended is None:
        world.make("release")
        world.make("complete")
    choose, idle = in_turn(), 0
    for _ in range(_LIMIT):
        moves = world.moves()
        if not moves or idle > _PATIENCE:
            break
        idle = idle + 1 if moves == ["time"] else 0
        world.make(choose(moves))
    if world.ended is None:
        raise Violation(f"the run stands still: {world.standing_still()}")
    world.check_end()


def strike(world: World, fault: Fault) -> None:
    move = _name(world, fault)
    if move is None:
        return
    node = world.nodes.get(move.split(" ")[-1])
    if fault.kind == "kill" and node is not None:
        while len(node.up) > fault.last_words:
            world.make(f"lose {node.spec.name}")
    world.make(move)


def _name(world: World, fault: Fault) -> str | None:
    counted = [name for name, node in world.nodes.items() if node.is_counted]
    worker_ids = [worker_id for name in counted for worker_id in world.nodes[name].worker_ids]
    match fault.kind:
        case "stop" | "join" | "master" | "release":
            return fault.kind
        case "hold":
            ways = world.ways
            return f"hold {ways[fault.target % len(ways)]}" if ways else None
        case "grow" if not world.shape.follow:
            return None  # its end may have been told already
        case "grow" | "spoil":
            shard, number = fault.target % len(world.shape.shards), fault.target // len(world.shape.shards)
            return f"{fault.kind} {shard}:{number}"
        case "crash" | "stick":
            worker_id = worker_ids[fault.target % len(worker_ids)] if worker_ids else None
            return f"{fault.kind} {worker_id}" if worker_id else None
        case "blip":
            able = [worker_id for worker_id in worker_ids if world.can_blip(worker_id)]
            return f"blip {able[fault.target % len(able)]}" if able else None
        case _:
            name = counted[fault.target % len(counted)] if counted else None
            return f"{fault.kind} {name}" if name else None


def _is_possible_fault(world: World, move: str) -> bool:
    kind, _, subject = move.partition(" ")
    match kind:
        case "kill" | "cut" | "freeze" | "hang" | "lose" | "drain":
            return (
                subject in world.nodes
                and world.nodes[subject].is_counted
                and (kind != "lose" or bool(world.nodes[subject].up))
            )
        case "crash" | "stick":
            return any(str(worker_id) == subject for node in world.nodes.values() for worker_id in node.worker_ids)
        case "blip":
            return any(
                str(worker_id) == subject and world.can_blip(worker_id)
                for node in world.nodes.values()
                for worker_id in node.worker_ids
            )
        case "thaw":
            return subject in world.nodes and world.nodes[subject].is_frozen
        case _:
            return kind in ("stop", "join", "master", "hold", "release")
