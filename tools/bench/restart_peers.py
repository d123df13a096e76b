"""How long a script is away when a rank is killed, or a node: `oobleck run`, beside the peers that restart or go on.

    python -m venv peers
    peers/bin/pip install torch torchft-nightly nvidia-resiliency-ext dlrover kubernetes lm-resiliency setuptools
    python tools/bench/restart_peers.py --python peers/bin/python --runs 3

All rows are of one small model, with two ranks, of which the second gets a SIGKILL, or with two nodes of one rank, of
which all that is the second's gets one at once: launcher, rank and monitors. As in `restart.py`, times count to the end
of the first step of rank 0 after it. Each peer has its own launcher and its defaults, starts again for each kill, and
is left out by name where the interpreter lacks it. torchft's replica, of which each is a node already, and NVRx's rank
are not replaced: the other one goes on alone, and so do a node of torchrun and one of DLRover. LM Resiliency's runs
keep their number of nodes: a third waits as a spare, and finds what the survivor has kept in a folder of both.

DLRover and LM Resiliency save in memory after every step, NVRx's script every five steps to a file, torchrun's every
five by DCP. LM Resiliency's torchrun waits for a manager after each loss: the job has a small one, which answers as
soon as a rank has reported what it kept. DLRover's master is started beside the nodes, for its launcher cannot start
it with torch 2.13. The table is Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.bench.restart import (
    Job,
    NoSuchStep,
    OobleckJob,
    Restart,
    Step,
    kill_all,
    kill_ranks,
    lost_node,
    processes_with,
    row,
    torchrun,
)
from tools.smoke import parse_arguments

_JOB = Path(__file__).with_name("restart_peers_job.py")
_PEERS = {
    "torchrun": ("torch", "torchrun", "DCP"),
    "torchft": ("torchft", "torchft", ""),
    "nvrx": ("nvidia_resiliency_ext.inprocess", "NVRx in the process", "own save"),
    "dlrover": ("dlrover.python.master.local_master", "DLRover", "in memory"),
    "lm-resiliency": ("lm_resiliency.integrations.torchrun", "LM Resiliency", "in memory"),
}
"""The module that a peer needs, its name, and how it saves."""
_SHARED = ("/dev/shm", "/tmp/ckpt_sock")  # noqa: S108  DLRover's places
_LIMIT_S = 90.0


class PeerJob(Job):
    """A peer's nodes, under its launcher."""

    def __init__(self, python: str, peer: str, directory: Path, fault: str) -> None:
        for left in (directory / "dlrover", directory / "tmp"):
            shutil.rmtree(left, ignore_errors=True)
        self._fault = fault
        nodes, ranks = 2, 1
        if peer in ("dlrover", "lm-resiliency"):  # whose launchers start a node's ranks, and know a spare
            nodes, ranks = (1, 2) if fault == "rank" else (2 + (peer == "lm-resiliency"), 1)
        command = [python, str(_JOB), "launch", peer, str(directory), str(nodes), str(ranks)]
        super().__init__(command, directory, script=())

    def end(self) -> None:
        """End it, and remove what it shares."""
        super().end()
        remove_shared(self.directory)

    def kill(self, victim: Step) -> float:
        """Kill the rank, or all that is of its node."""
        if self._fault == "rank":
            return super().kill(victim)
        words = Path(f"/proc/{victim.pid}/environ").read_text(encoding="utf-8").split("\0")
        return kill_all(processes_with(next(word for word in words if word.startswith("TMPDIR="))))


def remove_shared(directory: Path) -> None:
    """Remove the shared memory and the sockets that DLRover has left for jobs of a directory."""
    for place in _SHARED:
        for left in Path(place).glob(f"{directory.name}*"):
            shutil.rmtree(left) if left.is_dir() else left.unlink()


def kill_peer(python: str, peer: str, directory: Path, runs: int, fault: str) -> list[Restart]:
    """One kill in each run."""
    restarts = []
    for _ in range(runs):
        job = PeerJob(python, peer, directory, fault)
        try:
            restarts += kill_ranks(job, 1, limit_s=_LIMIT_S)
        finally:
            job.end()
    return restarts


def _oobleck(directory: Path, runs: int, saves: str) -> str:
    job = OobleckJob(directory, "--nproc-per-node", "2", saves=saves)
    try:
        job.wait_until_warm()
        how = "in memory" if saves == "flash" else "in memory, attempts"
        return row(f"oobleck run, a killed rank of two, {how}", kill_ranks(job, runs))
    finally:
        job.end()


def _row(python: str, directory: Path, runs: int, arm: str, fault: str) -> str:
    """Return the row of an arm, or why it has none."""
    name = arm
    try:
        if arm in ("flash", "attempts"):
            return _oobleck(directory, runs, arm) if fault == "rank" else lost_node(directory, runs, 2, arm)
        if arm == "torchrun" and fault == "rank":
            return torchrun(directory, runs, _LIMIT_S, "dcp")
        module, title, saves = _PEERS[arm]
        what = "replica, which is a node," if arm == "torchft" else fault
        name = ", ".join(filter(None, (title, f"a killed {what} of two", saves)))
        python = sys.executable if arm == "torchrun" else python  # whose script imports Oobleck
        probe = subprocess.run([python, "-c", f"import {module}"], capture_output=True, text=True, check=False)
        if not probe.returncode:
            return row(name, kill_peer(python, arm, directory, runs, fault))
        why = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    except NoSuchStep as error:
        why = " ".join(str(error).split())[-300:]
    return f"| {name} | not run: {why} | | | | | |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--runs", type=int, default=3, help="kills in each row")
    arms = ("flash", "attempts", *_PEERS)
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms, help="the rows")
    parser.add_argument(
        "--faults", nargs="+", choices=("rank", "node"), default=("rank", "node"), help="what is killed"
    )
    given = parse_arguments(parser, runs=1, arms=["torchft", "lm-resiliency"])
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # which ends all that it has started too
    print("| what | kills | median s | max s | steps redone | kept | target |")
    print("|---|---|---|---|---|---|---|")
    directory = Path(tempfile.mkdtemp(prefix="obp"))
    try:
        for fault in given.faults:
            for arm in given.arms:
                if arm != "torchft" or fault == "rank":
                    print(_row(given.python, directory, given.runs, arm, fault), flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
