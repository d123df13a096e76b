"""A worker that hangs in its user's code: no process is dead, no connection lost, and no step is committed."""

from __future__ import annotations

from pathlib import Path

import pytest

from .elastic import ENDLESS, assert_nothing_lost, stopped
from .harness import TAG, Runner, incidents, worker_pids

NODES = ("--local", "4")
OPTIONS = ("--tag", TAG, "--set", "torch_threads=1", "--set", "num_pipelines=2")
SCRIPT = """
import os, time
from pathlib import Path
import torch
from torch import nn
from oobleck import Job

TRAP = Path("@TRAP@")

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, hidden):
        try:
            TRAP.rename(TRAP.with_suffix(f".{os.getpid()}"))  # one of them alone falls into it
        except FileNotFoundError:
            return hidden + self.linear(hidden)
        until_s = time.monotonic() + @SECONDS@
        while time.monotonic() < until_s:
            time.sleep(1)
        return hidden + self.linear(hidden)

def layers():
    return [nn.Embedding(300, 16), *(Block() for _ in range(4)), nn.Linear(16, 300)]

class Counting(torch.utils.data.Dataset):
    def __len__(self):
        return 512

    def __getitem__(self, index):
        return (torch.arange(8) + index) % 300

def job():
    return Job(
        run_name="hang",
        model=layers,
        data=Counting,
        sequence_length=8,
        vocab_size=300,
        max_steps=@STEPS@,
        global_batch_size=16,
        per_device_train_batch_size=2,
    )
"""


def trapped(tmp_path: Path, *, seconds: float) -> tuple[Path, Path]:
    """A trap to be set, and a script of which one worker then sleeps so long."""
    trap, script = tmp_path / "trap", tmp_path / "train.py"
    script.write_text(
        SCRIPT.replace("@TRAP@", str(trap)).replace("@STEPS@", str(ENDLESS)).replace("@SECONDS@", str(seconds))
    )
    return trap, script


def test_a_hang_is_explained_and_its_culprit_starts_again(runner: Runner, tmp_path: Path) -> None:
    trap, script = trapped(tmp_path, seconds=1e9)
    with runner.up(nodes=(*NODES, str(script), *OPTIONS)) as up:
        up.wait_for_step(5)
        before = worker_pids(runner)
        trap.touch()
        up.wait_for("all wait for")
        (sprung,) = tmp_path.glob("trap.*")
        culprit = next(node for node, pid in before.items() if pid == int(sprung.suffix[1:]))
        up.wait_for(f"{culprit} taken in; restart_worker")
        up.wait_for_steps(5)
        outcome = stopped(runner, up)
    assert_nothing_lost(outcome, len(outcome.losses))
    (explained,) = (entry for entry in runner.journal() if entry["@type"] == "HangExplained")
    assert [worker_id["node"] for worker_id in explained["stuck"]] == [culprit]
    (stack,) = (text for worker_id, text in explained["stacks"] if worker_id["node"] == culprit)
    assert "time.sleep(1)" in stack
    (incident,) = incidents(runner)
    assert (incident["root"]["failure"], incident["root"]["node"]) == ("stuck", culprit)
    assert "time.sleep(1)" in incident["root"]["evidence"]
    after = worker_pids(runner)
    assert {node for node in after if after[node] != before[node]} == {culprit}
    assert runner.left_over() == []


@pytest.mark.slow
def test_a_worker_that_is_slow_alone_is_not_taken_for_stuck(runner: Runner, tmp_path: Path) -> None:
    """The others wait until it is a hang; asked, it comes on within half a lease."""
    trap, script = trapped(tmp_path, seconds=14.0)
    with runner.up(nodes=(*NODES, str(script), *OPTIONS, "--set", "control.lease_s=20")) as up:
        up.wait_for_step(5)
        before = worker_pids(runner)
        trap.touch()
        up.wait_for("no worker is stuck")
        up.wait_for_steps(5)
        outcome = stopped(runner, up)
    assert_nothing_lost(outcome, len(outcome.losses))
    (explained,) = (entry for entry in runner.journal() if entry["@type"] == "HangExplained")
    assert (explained["stuck"], explained["cut_off"]) == ([], [])
    assert worker_pids(runner) == before
    assert runner.left_over() == []
