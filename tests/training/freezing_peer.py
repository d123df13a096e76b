"""A member of groups in a process of its own, which forms them on request and can be frozen from outside.

It speaks JSON lines: where it listens, and where others do (`know`), `form` and `let_go` with a generation, and
`count`, which it answers with what it has open.
"""

from __future__ import annotations

import json
import os
import sys
import threading

from oobleck.control.protocol import WorkerAddress
from oobleck.control.steps import GroupKey
from oobleck.planner import WorkerId
from tests.training.table import LinkedTable

A, B, C = (WorkerId(node=node, device=0) for node in "abc")


def keys_of(generation: int) -> dict[str, GroupKey]:
    """What all form in a generation: a group of all, and one of the pipeline (a, c)."""
    return {"all": GroupKey("reduce", generation, (A, B, C)), "lane": GroupKey("pipeline", generation, (A, C))}


def say(**words: object) -> None:
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def main() -> None:
    table = LinkedTable(C)

    def form(generation: int) -> None:
        table.groups.form(keys_of(generation).values(), lambda: False, generation=generation)
        say(formed=generation)

    address = table.links.address
    say(host=address.host, port=address.port, ticket=address.ticket.hex())
    for line in sys.stdin:
        match json.loads(line):
            case {"know": [str(node), int(device), str(host), int(port), str(ticket)]}:
                worker_id = WorkerId(node=node, device=device)
                known = WorkerAddress(worker_id=worker_id, host=host, port=port, ticket=bytes.fromhex(ticket))
                table.links.know([known])
            case {"form": int(generation)}:
                threading.Thread(target=form, args=(generation,)).start()
            case {"let_go": int(generation)}:
                table.groups.keep_only([], generation=generation + 1)
            case {"count": _}:
                say(descriptors=len(os.listdir("/proc/self/fd")), threads=len(os.listdir("/proc/self/task")))


if __name__ == "__main__":
    main()
