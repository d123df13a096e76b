"""Kills a process at every line of a save, and of the summing of its data, and checks what is left in memory.

`torn_saves.py DIRECTORY` prints how many kills left the state before, and how many the new one.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

os.environ |= {"OOBLECK_CHECKPOINT_MEMORY": sys.argv[1], "OOBLECK_CHECKPOINT_DIR": f"{sys.argv[1]}/disk"}

import torch

import oobleck.checkpoint
from oobleck.storage import find_slots
from oobleck.storage.scripts import find_parts

MEMORY = Path(sys.argv[1])
TEMPLATE = MEMORY.with_name("template")
BEFORE, LAST = 3, 4
WATCHED = ("storage/memory.py", "flash/saver.py")


def save(step: int) -> None:
    tensors = {name: torch.full((40,), float(step)) for name in "abc"}
    oobleck.checkpoint.save(step, {"step": step, **tensors}, disk_every=10**9)


def killed_at(line: int, act: Callable[[], object]) -> bool:
    """Act in a fork that is killed before its `line`-th line; return whether it came so far."""
    if pid := os.fork():
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])
    left = line

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(WATCHED):
            return None
        if event == "line":
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    act()
    os._exit(0)


def newest() -> int:
    parts = sorted(find_parts(MEMORY, MEMORY / "disk"), key=lambda part: part.note.step)
    for part in parts:
        values = torch.frombuffer(bytearray(part.read()["1:b"][1]), dtype=torch.float32)
        assert values.eq(part.note.step).all(), f"a state that is torn is taken for step {part.note.step}"
    return parts[-1].note.step


def begin() -> None:
    """Bring back the memory as it was before the last save."""
    shutil.rmtree(MEMORY)
    shutil.copytree(TEMPLATE, MEMORY)


def main() -> None:
    MEMORY.mkdir()
    if not (pid := os.fork()):
        for step in range(1, BEFORE + 1):
            save(step)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    shutil.copytree(MEMORY, TEMPLATE)
    found: Counter[int] = Counter()
    line = 1
    while killed_at(line, lambda: save(LAST)):
        found[newest()] += 1
        line += 1
        begin()
    assert newest() == LAST
    line = 1
    while killed_at(line, lambda: find_slots(MEMORY, "rank0")[0].sum()):
        slot = find_slots(MEMORY, "rank0")[0]
        slot.verify()
        found[0] += slot.sums is None
        slot.store_sums(0, b"")
        line += 1
    assert find_slots(MEMORY, "rank0")[0].sums is not None
    print(found[BEFORE], found[LAST], found[0])
    os._exit(0)


main()
