"""Storms of kills over `attempts_script.py`: ranks and whole nodes at random times, one after the other, from a seed.

    python -m tests.e2e.attempts_storm KIND KILLS SEED [COPIES]

KIND is `ddp`, `fsdp`, `hsdp` or `tp`, COPIES as in `oobleck run --copies`. Each line tells of a kill: the seconds until
all ranks had taken a step again, and how many of the others kept their processes. At the end, losses are compared with
those of one process that nothing disturbs. A quarter of the kills are of nodes, whose memory goes with them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from oobleck.runtime.files import MEMORY_OWNER, AgentDir, ProcessId, RunDirectory
from tests.e2e.harness import oobleck
from tests.e2e.ranks import Ranks
from tests.e2e.test_copies import undisturbed

SCRIPT = Path(__file__).with_name("attempts_script.py")
NUM_NODES = 4
TOLERANCE = 1e-9
_ALL = 10**6
_STEPS_BETWEEN = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill: what was killed, how long all were away, and how many of the `others` kept their processes."""

    what: str
    away_s: float
    others: int
    kept: int


class Storm:
    """A run that is disturbed until it has taken its last kill, and is stopped then."""

    def __init__(self, directory: Path, kind: str, *, seed: int, copies: str = "1") -> None:
        self.ranks = Ranks(directory)
        self._copies = copies
        self._random = random.Random(seed)
        self._kind = kind

    def ride(self, kills: int, *, nodes: int = 0) -> list[Kill]:
        """Take `kills` kills, of which `nodes` are of whole nodes; returns what came of them."""
        # Meshes of two dimensions need all nodes; else the others go on until the lost one is back.
        fewest = NUM_NODES if self._kind in ("hsdp", "tp") else 1
        options = [
            "--lease",
            "20",
            "--local",
            str(NUM_NODES),
            "--nnodes",
            f"{fewest}:{NUM_NODES}",
            "--max-restarts",
            str(_ALL),
            "--copies",
            self._copies,
        ]
        command = [str(SCRIPT), self._kind, str(self.ranks.out), str(_ALL), "0.02"]
        order = ["node"] * nodes + ["rank"] * (kills - nodes)
        self._random.shuffle(order)
        with self.ranks.started(*options, command=command) as process:
            taken = [self._kill(what) for what in order]
            self._await_steps(self._newest(), NUM_NODES)
            process.send_signal(signal.SIGINT)
            process.wait(60)
        return taken

    def _kill(self, what: str) -> Kill:
        before = self._newest()
        self._await_steps(before, NUM_NODES)
        if what == "node":
            self.ranks.wait_until(self._is_protected)
        time.sleep(self._random.random() * 0.1)
        place = self._random.randrange(NUM_NODES)
        pids = self._pids()
        number = self._newest()
        at_s = time.time()
        if what == "rank":
            os.kill(pids.pop(place), signal.SIGKILL)
        else:
            node = f"node{place}"
            lost = self._num_lost(node)
            gone = self._lose(node)
            pids = {rank: pid for rank, pid in pids.items() if pid not in gone}
            if self._kind in ("hsdp", "tp"):
                self._add(node, lost=lost)
        count = len(pids) + 1 if what == "rank" or self._kind in ("hsdp", "tp") else len(pids)
        self.ranks.wait_until(lambda: self._has_stepped(number + 1, count, after_s=at_s))
        again = self._notes_of(self._newest())
        away_s = max(min(note["t"] for note in notes if note["t"] > at_s) for notes in again.values() if notes) - at_s
        kept = len({note["pid"] for notes in again.values() for note in notes} & set(pids.values()))
        if what == "node" and self._kind not in ("hsdp", "tp"):
            self._add(node, lost=lost)
            self.ranks.wait_until(lambda: self._has_stepped(number + 2, NUM_NODES, after_s=at_s))
        return Kill(what=what, away_s=away_s, others=len(pids), kept=kept)

    def _lose(self, node: str) -> set[int]:
        """Kill a node's agent, and with it its ranks; its memory is gone. Returns its processes."""
        directory = AgentDir(RunDirectory(base_dir=self.ranks.base_dir, tag="ranks").run_id, node)
        owner = ProcessId.read(directory.memory / MEMORY_OWNER)
        assert owner is not None
        noted = [path for path in self.ranks.temporary.rglob("*.pid") if path.parent.name == directory.path.name]
        pids = {int(path.read_text().split()[0]) for path in noted}
        os.kill(owner.pid, signal.SIGKILL)
        shutil.rmtree(directory.memory)
        return pids

    def _num_lost(self, node: str) -> int:
        return sum(entry.node == node for entry in self.ranks.entries("NodeLost"))

    def _add(self, node: str, *, lost: int) -> None:
        """Add a node that had been lost `lost` times before its last kill."""
        # It may be back already: the run tries it again after ten seconds, which a busy machine needs for a generation.
        self.ranks.wait_until(lambda: self._num_lost(node) > lost)
        oobleck("add", node, "--tag", "ranks", "--base-dir", str(self.ranks.base_dir))

    def _notes_of(self, number: int) -> dict[int, list[dict[str, Any]]]:
        return {
            rank: [note for note in self.ranks.notes(rank) if note["restarts"] == number] for rank in range(NUM_NODES)
        }

    def _newest(self) -> int:
        notes = [self.ranks.notes(rank)[-1:] for rank in range(NUM_NODES)]
        return max((note["restarts"] for last in notes for note in last), default=0)

    def _pids(self) -> dict[int, int]:
        return {rank: notes[-1]["pid"] for rank, notes in self._notes_of(self._newest()).items() if notes}

    def _has_stepped(self, number: int, count: int, *, after_s: float) -> bool:
        newest = self._newest()
        notes = self._notes_of(newest)
        return newest >= number and sum(any(n["t"] > after_s for n in each) for each in notes.values()) >= count

    def _await_steps(self, number: int, count: int) -> None:
        self.ranks.wait_until(
            lambda: sum(len(notes) > _STEPS_BETWEEN for notes in self._notes_of(self._newest()).values()) >= count
        )

    def _is_protected(self) -> bool:
        first = min((notes[0]["step"] for notes in self._notes_of(self._newest()).values() if notes), default=_ALL)
        entries = self.ranks.entries("StatesProtected")
        return self._kind == "ddp" or (bool(entries) and (entries[-1].protected or 0) >= first)

    def _last_steps(self, rank: int) -> list[int]:
        notes = self.ranks.notes(rank)
        return [note["step"] for note, after in pairwise(notes) if note["restarts"] != after["restarts"]]

    # --- what must hold ----------------------------------------------------------------------------------------------

    def problems(self) -> list[str]:
        """What is wrong with the losses, or with what a collective has given."""
        notes = [note for rank in range(NUM_NODES) for note in self.ranks.notes(rank)]
        expected = undisturbed(max(note["step"] for note in notes))
        wrong = [note for note in notes if abs(note["loss"] - expected[note["step"]]) > TOLERANCE]
        inexact = [note for note in notes if not note["is_exact"]]
        steps = {note["step"] for note in notes}
        # Ranks may leave once they have saved a step, before they note it.
        unnoted = {step + 1 for rank in range(NUM_NODES) for step in self._last_steps(rank)}
        missing = sorted(set(range(1, max(steps) + 1)) - steps - unnoted)
        named = {"wrong losses": wrong[:3], "numbers of aborted collectives": inexact[:3], "missing": missing[:3]}
        return [f"{name}: {found}" for name, found in named.items() if found]


def main() -> None:
    """Ride a storm, and end with status 1 where something does not hold."""
    kind, kills, seed, copies = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), (sys.argv[4:] or ["1"])[0]
    with tempfile.TemporaryDirectory() as directory:
        storm = Storm(Path(directory), kind, seed=seed, copies=copies)
        taken: list[Kill] = []
        try:
            taken = storm.ride(kills, nodes=kills // 4)
        finally:
            sys.stdout.write(storm.ranks.said()[-4000:])
            for each in taken:
                sys.stdout.write(f"{kind}: {each}\n")
        problems = storm.problems()
        for what in ("rank", "node"):
            times = [each.away_s for each in taken if each.what == what]
            if times:
                sys.stdout.write(
                    f"{kind}: {what}: median {statistics.median(times):.2f} s, longest {max(times):.2f} s\n"
                )
        kept, others = sum(each.kept for each in taken), sum(each.others for each in taken)
        sys.stdout.write(f"{kind}: {kept} of {others} survivors kept their processes; {problems or 'losses hold'}\n")
        storm.ranks.close()
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
