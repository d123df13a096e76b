"""How long a script is away when a rank is killed: `oobleck run`, beside the peers that restart or go on.

    python -m venv peers
    peers/bin/pip install torch torchft-nightly nvidia-resiliency-ext dlrover lm-resiliency setuptools
    python tools/bench/restart_peers.py --python peers/bin/python --runs 3

All rows are of one run and one small model, with two ranks, of which the second gets a SIGKILL; as in `restart.py`,
times count to the end of the first step after it. Each peer has its own launcher and its defaults, starts again for
each kill, and is left out by name where the interpreter lacks it. torchft's replica and NVRx's rank are not replaced:
the other one goes on alone. DLRover and LM Resiliency save in memory after every step, NVRx's script every five steps
to a file. LM Resiliency's torchrun waits for a manager after each loss: the job has a small one, which answers as soon
as a rank has reported what it kept. The table is Markdown.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from tools.bench.restart import Job, NoSuchStep, OobleckJob, Restart, kill_ranks, row, torchrun
from tools.smoke import parse_arguments

_JOB = Path(__file__).with_name("restart_peers_job.py")
_PEERS = {
    "torchft": ("torchft", "torchft, a killed replica of two"),
    "nvrx": ("nvidia_resiliency_ext.inprocess", "NVRx in the process, a killed rank of two, own save"),
    "dlrover": ("dlrover.trainer.torch.flash_checkpoint.ddp", "DLRover, a killed rank of two, in memory"),
    "lm-resiliency": ("lm_resiliency.integrations.torchrun", "LM Resiliency, a killed rank of two, in memory"),
}
"""The module that a peer needs, and its row."""
_LIMIT_S = 90.0


class PeerJob(Job):
    """A peer's ranks, under its launcher."""

    def __init__(self, python: str, peer: str, directory: Path) -> None:
        for left in (directory / "dlrover", directory / "tmp"):
            shutil.rmtree(left, ignore_errors=True)
        command = [python, str(_JOB), "launch", peer, str(directory), "2"]
        if peer == "dlrover":
            launcher = [python, "-m", "dlrover.trainer.torch.main", "--standalone", "--nnodes=1", "--nproc_per_node=2"]
            command = [*launcher, "--max_restarts=100", str(_JOB), peer, str(directory)]
        super().__init__(command, directory, script=())


def kill_peer(python: str, peer: str, directory: Path, runs: int) -> list[Restart]:
    """One kill in each run."""
    restarts = []
    for _ in range(runs):
        job = PeerJob(python, peer, directory)
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


def _row(python: str, directory: Path, runs: int, arm: str) -> str:
    """Return the row of an arm, or why it has none."""
    name = _PEERS[arm][1] if arm in _PEERS else arm
    try:
        if arm in ("flash", "attempts"):
            return _oobleck(directory, runs, arm)
        if arm == "torchrun":
            return torchrun(directory, runs, _LIMIT_S, "dcp")
        probe = subprocess.run([python, "-c", f"import {_PEERS[arm][0]}"], capture_output=True, text=True, check=False)
        if not probe.returncode:
            return row(name, kill_peer(python, arm, directory, runs))
        why = (probe.stderr.strip().splitlines() or [f"exit code {probe.returncode}"])[-1]
    except NoSuchStep as error:
        why = " ".join(str(error).split())[-300:]
    return f"| {name} | not run: {why} | | | | | |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the interpreter that has the peers")
    parser.add_argument("--runs", type=int, default=3, help="kills in each row")
    arms = ("flash", "attempts", "torchrun", *_PEERS)
    parser.add_argument("--arms", nargs="+", choices=arms, default=arms, help="the rows")
    given = parse_arguments(parser, runs=1, arms=["torchft"])
    print("| what | kills | median s | max s | steps redone | kept | target |")
    print("|---|---|---|---|---|---|---|")
    directory = Path(tempfile.mkdtemp(prefix="obp"))
    try:
        for arm in given.arms:
            print(_row(given.python, directory, given.runs, arm), flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
