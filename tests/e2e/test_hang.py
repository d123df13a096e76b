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
            time.sleep(0.01)  # leaves the machine to others
            return hidden + self.linear(hidden)
        until_s = time.monotonic() + @SECONDS@
        while time.monotonic() < until_s:
            @WORK@
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


COMPUTING = {"python": "pass", "a-call-that-holds-the-interpreter": "sum(range(10**9))"}


def trapped(tmp_path: Path, *, seconds: float, computes: str = "time.sleep(1)") -> tuple[Path, Path]:
    """A trap to be set, and a script of which one worker then sleeps or computes so long."""
    trap, script = tmp_path / "trap", tmp_path / "train.py"
    words = {"TRAP": trap, "STEPS": ENDLESS, "SECONDS": seconds, "WORK": computes}
    source = SCRIPT
    for word, value in words.items():
        source = source.replace(f"@{word}@", str(value))
    script.write_text(source)
    return trap, script


@pytest.mark.slow  # tests/control/steps/test_hangs.py and training/test_hang_watch.py have what is asked and decided
def test_a_hang_is_explained_and_its_culprit_starts_again(runner: Runner, tmp_path: Path) -> None:
    trap, script = trapped(tmp_path, seconds=1e9)
    with runner.up(nodes=(*NODES, str(script), *OPTIONS)) as up:
        up.wait_for_step(5)
        before = worker_pids(runner)
        trap.touch()
        up.wait_for("all wait for")
        (sprung,) = tmp_path.glob("trap.*")
        culprit = next(node for node, pid in before.items() if pid == int(sprung.suffix[1:]))
        up.wait_for(f"{culprit} taken in; worker restarted")
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


@pytest.mark.slow
@pytest.mark.parametrize("way", ["python", "a-call-that-holds-the-interpreter"])
def test_a_worker_that_computes_for_longer_than_any_limit_is_waited_for(
    runner: Runner, tmp_path: Path, way: str
) -> None:
    """As where a step compiles. Of two such looks, the second finds it at work as the first did."""
    trap, script = trapped(tmp_path, seconds=25.0, computes=COMPUTING[way])
    with runner.up(nodes=(*NODES, str(script), *OPTIONS)) as up:
        up.wait_for_step(5)
        before = worker_pids(runner)
        trap.touch()
        up.wait_for("after 10 s: ")
        up.wait_for("after 20 s: ")
        up.wait_for_steps(5)
        outcome = stopped(runner, up)
    assert_nothing_lost(outcome, len(outcome.losses))
    assert outcome.recoveries == []
    (sprung,) = tmp_path.glob("trap.*")
    culprit = next(node for node, pid in before.items() if pid == int(sprung.suffix[1:]))
    long = [entry for entry in runner.journal() if entry["@type"] == "StepRunsLong"]
    assert [[worker_id["node"] for worker_id in entry["computing"]] for entry in long] == [[culprit]] * 2
    assert worker_pids(runner) == before
    assert runner.left_over() == []
