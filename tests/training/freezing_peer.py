"""A member of groups in a process of its own, which forms them on request and can be frozen from outside.

It speaks JSON lines: rendezvous keys both ways, `form` and `let_go` with a generation, and `count`, which
it answers with what it has open.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from oobleck.planner import WorkerId
from oobleck.training.comm.groups import GroupKey, GroupTable
from oobleck.training.comm.rendezvous import RendezvousTable
from oobleck.training.comm.waiter import Waiter

A, B, C = (WorkerId(node=node, device=0) for node in "abc")


def keys_of(generation: int) -> dict[str, GroupKey]:
    """What all form in a generation: a group of all, and one of the pipeline (a, c)."""
    return {"all": GroupKey("reduce", generation, (A, B, C)), "lane": GroupKey("pipeline", generation, (A, C))}


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    board = RendezvousTable(lambda key, value, _nodes: say(key=key, value=value.hex()))
    table = GroupTable(C, "127.0.0.1", board, Waiter())

    def form(generation: int) -> None:
        table.form(keys_of(generation).values(), lambda: False)
        say(formed=generation)

    say(ready=True)
    for line in sys.stdin:
        match json.loads(line):
            case {"key": str(key), "value": str(value)}:
                board.put(key, bytes.fromhex(value))
            case {"form": int(generation)}:
                threading.Thread(target=form, args=(generation,)).start()
            case {"let_go": int(generation)}:
                table.keep_only([], generation=generation + 1)
            case {"count": _}:
                say(descriptors=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")))


if __name__ == "__main__":
    main()
