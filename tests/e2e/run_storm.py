"""A seeded storm of faults on `oobleck run`: any process of it is killed, stopped or slowed.

`python -m tests.e2e.run_storm SEED [SEED …]` runs storms one after the other, and says what broke.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from oobleck.control.journal import RankDown
from oobleck.control.protocol import Unseen
from oobleck.runtime.files import AgentDir, RunDirectory
from oobleck.runtime.journals import read_journal
from tests.e2e.harness import processes_with

__all__ = ["RunStorm", "result_of"]

SCRIPT = Path(__file__).with_name("storm_script.py")
_TIMEOUT_S = 300.0
_LEASE_S = 3.0
_STOPS_S = (0.2, 1.0, 5.0)
"""Shorter than a lease, and longer."""


def result_of(steps: int) -> int:
    """What the script comes to, with any number of ranks."""
    chain = 1
    for step in range(1, steps + 1):
        chain = (chain * 31 + step) % 1_000_003
    return chain


class RunStorm:
    """One run, its faults, drawn from a seed, and what must hold in the end."""

    def __init__(
        self,
        directory: Path,
        seed: int,
        *,
        steps: int = 150,
        num_faults: int = 6,
        faults: Sequence[tuple[str, str]] | None = None,
    ) -> None:
        """`faults` are what happens to what, in place of what the seed draws."""
        self.random = random.Random(seed)
        self.steps = steps
        self.faults = list(faults) if faults is not None else [self.draw() for _ in range(num_faults)]
        self.nodes = self.random.choice((1, 2, 3))
        self.ranks_per_node = self.random.choice((1, 2))
        self.out = directory / "out"
        self.out.mkdir()
        self.base_dir = directory / "base"
        self.temporary = Path(tempfile.mkdtemp(prefix="obs"))
        self.said = directory / "said"
        self.done: list[str] = []
        self.stopped: list[psutil.Process] = []
        self.num_runs = 0

    # --- the run -----------------------------------------------------------------------------------------------------

    def start(self) -> subprocess.Popen[bytes]:
        """Start the command, as a user does again once its master was killed."""
        self.num_runs += 1
        options = ["--local", str(self.nodes), "--nnodes", f"1:{self.nodes}"]
        options += ["--nproc-per-node", str(self.ranks_per_node), "--max-restarts", "100", "--lease", str(_LEASE_S)]
        options += ["--base-dir", str(self.base_dir), "--tag", "storm"]
        with self.said.open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "oobleck", "run", *options, str(SCRIPT), str(self.out), str(self.steps), "0.05"],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
                env={**os.environ, "TMPDIR": str(self.temporary), "STORM_RUN": str(self.num_runs)},
            )

    def ride(self) -> list[str]:
        """Run the storm; returns what does not hold."""
        master = self.start()
        deadline_s = time.monotonic() + _TIMEOUT_S
        try:
            for how, kind in self.faults:
                self.await_step(master, self.saved() + self.random.randint(1, 12), deadline_s)
                if master.poll() is not None:
                    break
                self.strike(master, how, kind)
                if master.poll() is not None and master.returncode == -signal.SIGKILL:
                    master = self.start()
            while master.poll() is None and time.monotonic() < deadline_s:
                time.sleep(0.05)
            problems = [] if master.returncode == 0 else [f"exit status {master.returncode}"]
        finally:
            if master.poll() is None:
                master.kill()
        return [*problems, *self.wrong_steps(), *self.unseen_ends(), *self.left_behind()]

    def saved(self) -> int:
        """The last step that any rank has noted."""
        return max((note["saved"] for notes in self.notes().values() for note in notes if "saved" in note), default=0)

    def await_step(self, master: subprocess.Popen[bytes], step: int, deadline_s: float) -> None:
        """Wait until a step was saved, or the run is over."""
        while self.saved() < min(step, self.steps) and master.poll() is None and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def notes(self) -> dict[int, list[dict[str, Any]]]:
        """What each rank has noted."""
        found = {}
        for path in self.out.glob("log.*"):
            lines = path.read_text().splitlines()
            found[int(path.suffix[1:])] = [json.loads(line) for line in lines]
        return found

    # --- faults ------------------------------------------------------------------------------------------------------

    def draw(self) -> tuple[str, str]:
        """What is to happen to which kind of process."""
        kinds = ("rank", "rank", "agent", "server", "warm", "waits", "waits", "master")
        return self.random.choice(("kill", "kill", "stop", "slow")), self.random.choice(kinds)

    def strike(self, master: subprocess.Popen[bytes], how: str, kind: str) -> None:
        """Do something to some process; nothing where there is none of its kind."""
        found = [psutil.Process(master.pid)] if kind == "master" else self.processes(kind)
        if not found:
            return
        victim = self.random.choice(sorted(found, key=lambda process: process.pid))
        self.done.append(f"{how} {kind}")
        with suppress(psutil.NoSuchProcess):
            if how == "kill":
                victim.kill()
                if kind == "master":
                    master.wait()
            elif how == "stop":
                self.stop(victim, kind)
            else:
                self.slow(victim)

    def stop(self, victim: psutil.Process, kind: str) -> None:
        """Stop it for a while; a fork server or its warm process for good: nothing may wait for them."""
        victim.suspend()
        if kind in ("server", "warm"):
            self.stopped.append(victim)
            return
        time.sleep(self.random.choice(_STOPS_S))
        victim.resume()

    def slow(self, victim: psutil.Process) -> None:
        """Have it run for a fifth of the time."""
        for _ in range(20):
            victim.suspend()
            time.sleep(0.08)
            victim.resume()
            time.sleep(0.02)

    def processes(self, kind: str) -> list[psutil.Process]:
        """Those of a kind that live."""
        found = []
        for process in processes_with(f"TMPDIR={self.temporary}"):
            with suppress(psutil.Error, OSError):
                name, line = process.name(), " ".join(process.cmdline())
                is_rank = SCRIPT.name in line and "oobleck" not in line.split()[:4]
                kinds = {
                    "rank": is_rank,
                    "warm": name == "oobleck-warm",
                    "waits": name == "oobleck-waits",
                    "server": "rank_server" in line and not name.startswith("oobleck-"),
                    "agent": "agent_process" in line,
                }
                if kinds[kind]:
                    found.append(process)
        return found

    # --- what must hold ----------------------------------------------------------------------------------------------

    def wrong_steps(self) -> list[str]:
        """What is wrong with the result, and steps that were saved by all and lost."""
        notes, problems = self.notes(), []
        results = [each["result"] for every in notes.values() for each in every if "result" in each]
        if not results or any(value != result_of(self.steps) for result in results for value in result):
            problems.append(f"results {[result[:1] for result in results]}, expected {result_of(self.steps)}")
        starts: dict[tuple[int, int], dict[int, list[dict[str, Any]]]] = defaultdict(dict)
        for rank, every in notes.items():
            for each in every:
                starts[int(each["run"]), each["attempt"]].setdefault(rank, []).append(each)
        saved = 0
        for start, ranks in sorted(starts.items()):
            begun = {each["begins"] for every in ranks.values() for each in every if "begins" in each}
            if len(begun) > 1 or min(begun) < saved:
                problems.append(f"start {start} begins at {sorted(begun)}, and {saved} was saved by all")
            world = next(iter(ranks.values()))[0]["world"]
            if len(ranks) == world:
                saved = max(saved, min(max((e.get("saved", 0) for e in every), default=0) for every in ranks.values()))
        return problems

    def unseen_ends(self) -> list[str]:
        """Ends of ranks that nobody knows: a supervisor's and its fork server's together may be, and no other."""
        if any(kind == "server" for _, kind in self.faults):
            return []
        entries = read_journal(self.base_dir / "storm" / "journal.jsonl")
        return [entry.sentence for entry in entries if isinstance(entry, RankDown) and isinstance(entry.end, Unseen)]

    def left_behind(self) -> list[str]:
        """What is left once the run is over; it is removed."""
        memory = AgentDir(RunDirectory(base_dir=self.base_dir, tag="storm").run_id, "any").memory.parent
        deadline_s = time.monotonic() + 30
        while True:
            left = processes_with(f"TMPDIR={self.temporary}")
            files = [path for path in self.temporary.rglob("*") if "torchinductor" not in str(path)]
            files = [*files, *([memory, *memory.rglob("*")] if memory.exists() else [])]
            if not (left or files) or time.monotonic() > deadline_s:
                break
            time.sleep(0.1)
        problems = [f"left: {process.pid} {' '.join(process.cmdline())[:120]} ({process.status()})" for process in left]
        problems += [f"left: {path}" for path in files]
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        shutil.rmtree(memory, ignore_errors=True)
        shutil.rmtree(self.temporary, ignore_errors=True)
        return problems


def main() -> None:
    """Run storms; ends with status 1 where one has broken something."""
    broken = 0
    for seed in map(int, sys.argv[1:]):
        with tempfile.TemporaryDirectory() as directory:
            storm = RunStorm(Path(directory), seed)
            begun_s = time.monotonic()
            problems = storm.ride()
            shape = f"{storm.nodes} x {storm.ranks_per_node}"
            text = f"seed {seed} ({shape}, {time.monotonic() - begun_s:.0f} s): {', '.join(storm.done)}"
            sys.stdout.write(f"{text}: {problems or 'holds'}\n")
            if problems:
                broken += 1
                sys.stdout.write(storm.said.read_text())
            sys.stdout.flush()
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
