"""How long an unmodified DDP script is away when a rank is killed, or a node: `oobleck run`, beside torchrun.

    python tools/bench/restart.py --runs 5

The script (`restart_job.py`) is the same for both: DDP on Gloo, a checkpoint of its own every five steps. Times count
from the SIGKILL to the end of the first step of the next generation, by the machine's clock. Ranks are killed one
after the other in one run; a lost node of four is added again before the next is killed, and the memory in which it
kept states goes with it. `redone` are steps that all ranks had come to the end of, and that were taken again, for
they had not been saved. With flash checkpoints, the script saves after every step by `oobleck.checkpoint`; with
attempts, it does so too, and ranks that are not killed keep their processes. With DCP, torchrun's script saves every
five steps by torch's distributed checkpoints. `kept` says whether all other nodes kept their agents, and with
attempts, all other ranks their processes. The last rows compare the time of a step with and without attempts. Each
row of `oobleck run` begins once later ranks are forked warm, some seconds after the first step. The table is
Markdown.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.runtime.files import AgentDir, RunDirectory
from oobleck.runtime.journals import read_journal
from tools.smoke import parse_arguments

_TAG = "bench-restart"
_JOB = Path(__file__).with_name("restart_job.py")
_TIMEOUT_S = 300.0
_SAVES = ("itself", "flash", "attempts")
_AGAIN_AFTER = 8
"""Steps between two kills."""
_REHEARSAL_S = 4.0
"""How long a spare may take to run up to its attempts, on a busy machine."""
_PAUSE_S = 0.05
"""The job's sleep in each step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A line that a rank has written."""

    step: int
    restart: int
    pid: int
    world: int
    t: float


class NoSuchStep(Exception):
    """A run has ended, or takes too long."""


class Job:
    """The script, under either launcher."""

    def __init__(
        self, command: Sequence[str], directory: Path, *, saves: str = "itself", script: Sequence[str] | None = None
    ) -> None:
        """`script` is what the command runs, with its arguments; None for this one's."""
        self.directory = directory
        self.saves = saves
        for left in (*directory.glob("rank*.jsonl"), directory / "checkpoint.pt", directory / "dcp"):
            left.unlink(missing_ok=True)
        environment = {**os.environ, "TMPDIR": str(directory / "tmp"), "OMP_NUM_THREADS": "1"}
        (directory / "tmp").mkdir(exist_ok=True)
        self._log = directory / "launcher.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [*command, *([str(_JOB), str(directory), saves] if script is None else script)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,  # a Ctrl-C reaches it once, by `end`
            )

    def steps(self, rank: int) -> list[Step]:
        """All that a rank has written."""
        path = self.directory / f"rank{rank}.jsonl"
        if not path.exists():
            return []
        lines = path.read_bytes().splitlines(keepends=True)
        return [Step(**json.loads(line)) for line in lines if line.endswith(b"\n")]

    def wait_for(self, rank: int, wanted: Callable[[Step], bool], *, limit_s: float = _TIMEOUT_S) -> Step:
        """Wait until a rank has written a line that is wanted. Raises NoSuchStep."""
        deadline_s = time.monotonic() + limit_s
        while time.monotonic() < deadline_s and self._process.poll() is None:
            for step in self.steps(rank):
                if wanted(step):
                    return step
            time.sleep(0.005)
        raise NoSuchStep(f"the run ended, or took no such step within {limit_s:g} s: {self._log.read_text()}")

    def wait_for_more(self, rank: int, restart: int) -> Step:
        """Wait until a rank has taken some steps in a generation; returns the last of them."""
        self.wait_for(rank, lambda step: step.restart == restart)
        first = next(step for step in self.steps(rank) if step.restart == restart)
        return self.wait_for(rank, lambda step: step.restart == restart and step.step >= first.step + _AGAIN_AFTER)

    def world_before(self, restart: int) -> int:
        """How many ranks the last generation before this one had."""
        return [step.world for step in self.steps(0) if step.restart < restart][-1]

    def furthest(self, rank: int, restart: int) -> int:
        """The last step of a rank before this generation."""
        return max((step.step for step in self.steps(rank) if step.restart < restart), default=0)

    def kill(self, victim: Step) -> float:
        """Kill the rank that has written a line; returns when that was."""
        return kill_all([victim.pid])

    def end(self) -> None:
        """End it, whatever happens, and all that it has left, in sessions of their own too."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(60)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        kill_all(processes_with(f"TMPDIR={self.directory}/"))


def processes_with(words: str) -> list[int]:
    """All processes with these words in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # it has ended, or is not ours
            if words.encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def kill_all(pids: Sequence[int]) -> float:
    """Kill processes at once, as far as they still are; returns when that was."""
    at_s = time.time()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """One kill: seconds until the first step after it, and how many steps were taken again."""

    seconds: float
    redone: int


def kill_ranks(job: Job, runs: int, *, limit_s: float = _TIMEOUT_S) -> list[Restart]:
    """Kill rank 1, again and again."""
    restarts = []
    for number in range(runs):
        victim = job.wait_for_more(1, number)
        if job.saves == "attempts":
            time.sleep(_REHEARSAL_S)
        at_s = job.kill(victim)
        try:
            restarts.append(_restarted(job, at_s, number + 1, limit_s=limit_s))
        except NoSuchStep:
            if limit_s == _TIMEOUT_S:
                raise
            restarts.append(Restart(seconds=math.inf, redone=0))
    return restarts


def _restarted(job: Job, at_s: float, restart: int, *, limit_s: float = _TIMEOUT_S) -> Restart:
    first = job.wait_for(0, lambda step: step.t > at_s and step.restart >= restart, limit_s=limit_s)
    furthest = min(job.furthest(rank, first.restart) for rank in range(job.world_before(first.restart)))
    return Restart(seconds=first.t - at_s, redone=max(0, furthest - first.step + 1))


class OobleckJob(Job):
    """The script under `oobleck run`."""

    def __init__(self, directory: Path, *options: str, saves: str) -> None:
        self._base_dir = directory / "base"
        shutil.rmtree(self._base_dir, ignore_errors=True)
        command = [sys.executable, "-m", "oobleck", "run", *options, "--tag", _TAG, "--base-dir", str(self._base_dir)]
        super().__init__([*command, "--max-restarts", "1000"], directory, saves=saves)

    def wait_until_warm(self) -> None:
        """Wait until later ranks are forked from what the first ones have imported."""
        self.wait_for_more(0, 0)
        deadline_s = time.monotonic() + _TIMEOUT_S
        while not any((self.directory / "tmp").rglob("fork.warm")) and time.monotonic() < deadline_s:
            time.sleep(0.05)

    def kill_node(self, node: str) -> float:
        """Kill all that is of a node, at once; returns when that was."""
        run_id = RunDirectory(base_dir=self._base_dir, tag=_TAG).run_id
        places = list((self.directory / "tmp").rglob(AgentDir(run_id, node).path.name))
        noted = [path for place in places if place.parent.name == run_id for path in place.glob("*.pid")]
        at_s = kill_all([int(path.read_text().split()[0]) for path in noted])
        shutil.rmtree(AgentDir(run_id, node).memory, ignore_errors=True)  # as it would be with the machine
        return at_s

    def add(self, node: str) -> None:
        """Take a lost node back. On a busy machine it may have joined again by itself, and adding it is refused."""
        words = ["add", node, "--tag", _TAG, "--base-dir", str(self._base_dir)]
        command = [sys.executable, "-m", "oobleck", *words]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def lost(self) -> list[str]:
        """Nodes that were ever lost."""
        entries = read_journal(self._base_dir / _TAG / "journal.jsonl")
        return [getattr(entry, "node", "") for entry in entries if type(entry).__name__ == "NodeLost"]


def lose_nodes(job: OobleckJob, runs: int, nodes: int) -> list[Restart]:
    """Kill a node, again and again; it is added before it is killed once more."""
    restarts = []
    for _ in range(runs):
        if job.saves == "attempts":
            time.sleep(_REHEARSAL_S)
        before = job.wait_for(0, lambda step: step.world == nodes and step.t > time.time() - 1)
        at_s = job.kill_node("node1")
        restarts.append(_restarted(job, at_s, before.restart + 1))
        job.add("node1")
        came = time.time()
        again = job.wait_for(0, lambda step, came=came: step.world == nodes and step.t > came)  # type: ignore[misc]
        job.wait_for_more(0, again.restart)
    return restarts


def row(name: str, restarts: Sequence[Restart], kept: str = "", target: str = "") -> str:
    """A row of the table."""
    times = [restart.seconds for restart in restarts]
    redone = max(restart.redone for restart in restarts)
    cells = (name, len(times), f"{statistics.median(times):.2f}", f"{max(times):.2f}", redone, kept, target)
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="kills in each row")
    parser.add_argument("--nodes", type=int, default=4, help="of which one is lost; 0: leave that out")
    parser.add_argument("--saves", nargs="+", choices=_SAVES, default=_SAVES, help="how the script saves its state")
    parser.add_argument(
        "--torchrun-limit", type=float, default=60.0, help="seconds after which torchrun is given up; 0: leave it out"
    )
    given = parse_arguments(parser, runs=1, nodes=0, saves=["attempts"], torchrun_limit=0.0)
    print("| what | kills | median s | max s | steps redone | kept | target |")
    print("|---|---|---|---|---|---|---|")
    directory = Path(tempfile.mkdtemp(prefix="obr"))
    try:
        step_s = {}
        for saves in given.saves:
            text, step_s[saves] = _one_node(directory, given.runs, saves)
            print(text, flush=True)
            if given.nodes:
                print(lost_node(directory, given.runs, given.nodes, saves), flush=True)
        if given.torchrun_limit:
            for saves in ("itself", "dcp"):
                print(torchrun(directory, given.runs, given.torchrun_limit, saves), flush=True)
        for saves, seconds in step_s.items():
            print(f"a step that saves {_how(saves)}: {1e3 * seconds:.2f} ms", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _one_node(directory: Path, runs: int, saves: str) -> tuple[str, float]:
    """Return the row, and how long a step takes besides its sleep."""
    job = OobleckJob(directory, "--nproc-per-node", "2", saves=saves)
    try:
        job.wait_until_warm()
        restarts = kill_ranks(job, runs)
        steps = job.steps(0)
        kept = "all" if not job.lost() and _kept_processes(job, 0) else "NOT ALL"
    finally:
        job.end()
    pairs = [after.t - before.t for before, after in pairwise(steps) if after.restart == before.restart]
    target = "median < 0.25" if saves == "attempts" else "median < 0.5"
    text = row(f"oobleck run, a killed rank of two, {_how(saves)}", restarts, kept, target)
    return text, statistics.median(pairs) - _PAUSE_S


def _kept_processes(job: Job, rank: int) -> bool:
    """Whether a rank that was never killed was one process all the time, as far as that is promised."""
    return job.saves != "attempts" or len({step.pid for step in job.steps(rank)}) == 1


def lost_node(directory: Path, runs: int, nodes: int, saves: str) -> str:
    """Return the row of a node that is lost again and again."""
    job = OobleckJob(directory, "--local", str(nodes), saves=saves)
    try:
        job.wait_until_warm()
        restarts = lose_nodes(job, runs, nodes)
        kept = "all" if set(job.lost()) == {"node1"} and _kept_processes(job, 0) else "NOT ALL"
    finally:
        job.end()
    return row(f"oobleck run, a lost node of {nodes}, {_how(saves)}", restarts, kept, "median < 2")


def _how(saves: str) -> str:
    return {"itself": "own save", "flash": "in memory", "attempts": "in memory, attempts", "dcp": "DCP"}[saves]


def torchrun(directory: Path, runs: int, limit_s: float, saves: str) -> str:
    """One kill in each run: torchrun does not always come back."""
    restarts = []
    for _ in range(runs):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        job = Job([*launcher, "--max-restarts=1000"], directory, saves=saves)
        try:
            restarts += kill_ranks(job, 1, limit_s=limit_s)
        finally:
            job.end()
    return row(f"torchrun, a killed rank of two, {_how(saves)} (inf: not within {limit_s:g} s)", restarts)


if __name__ == "__main__":
    main()
