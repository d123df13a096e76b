"""`oobleck run` with a sharded script whose states are copied to other nodes: real kills of whole nodes."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oobleck.runtime.files import MEMORY_OWNER, AgentDir, ProcessId, RunDirectory
from tests.e2e.harness import oobleck
from tests.e2e.ranks import TIMEOUT_S, Ranks

SCRIPT = str(Path(__file__).with_name("fsdp_script.py"))
TOLERANCE = 1e-9


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    shutil.rmtree(memory_of(made, "node0").parent, ignore_errors=True)
    made.close()


def agent_dir(ranks: Ranks, node: str) -> AgentDir:
    return AgentDir(RunDirectory(base_dir=ranks.base_dir, tag="ranks").run_id, node)


def memory_of(ranks: Ranks, node: str) -> Path:
    return agent_dir(ranks, node).memory


def lose(ranks: Ranks, node: str) -> None:
    """Kill a node: its agent, and with it its ranks; its memory is gone."""
    owner = ProcessId.read(memory_of(ranks, node) / MEMORY_OWNER)
    assert owner is not None
    os.kill(owner.pid, signal.SIGKILL)
    shutil.rmtree(memory_of(ranks, node))


def losses(ranks: Ranks) -> dict[int, float]:
    """The loss of each step; one that was taken again has the same one."""
    found: dict[int, float] = {}
    for note in ranks.notes(0):
        assert found.setdefault(note["step"], note["loss"]) == pytest.approx(note["loss"], abs=TOLERANCE)
    return found


def undisturbed(steps: int) -> dict[int, float]:
    """The losses of the script's model on one process, without FSDP."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(20, 48), torch.nn.Tanh(), torch.nn.Linear(48, 20)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = {}
    for step in range(steps):
        inputs = torch.randn(24, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        loss = (model(inputs) - inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[step + 1] = loss.item()
    return found


def test_a_lost_nodes_pieces_come_back_from_its_peer(ranks: Ranks) -> None:
    options = ("--local", "2", "--max-restarts", "0", "--lease", "60")
    command = [SCRIPT, str(ranks.out), "80", "0.1"]
    with ranks.started(*options, command=command) as process:
        ranks.wait_for_step(1)
        ranks.wait_until(lambda: any(entry.protected for entry in ranks.entries("StatesProtected")))
        reached = ranks.wait_for_step(40)["step"]
        lose(ranks, "node1")
        first = ranks.wait_for_step(1, restarts=1)
        assert first["step"] > reached - 20, "it goes on from a copy, not from the start"
        assert process.wait(TIMEOUT_S) == 0, ranks.said()
    assert "saved by 2 ranks, from memory" in ranks.said()
    assert losses(ranks) == pytest.approx(undisturbed(80), abs=TOLERANCE)


def test_the_loss_of_the_only_holder_while_a_newcomer_is_filled_ends_the_run_and_says_so(ranks: Ranks) -> None:
    """Also with restarts left, and with replicated states: never from fresh weights."""
    options = ("--local", "2", "--max-restarts", "5", "--lease", "60")
    flash = str(Path(SCRIPT).with_name("flash_script.py"))
    command = [flash, str(ranks.out), "100000", "0.02"]
    with ranks.started(*options, command=command, environment={"LOAD_PAUSE_S": "3"}) as process:
        ranks.wait_for_step(5)
        lose(ranks, "node1")
        ranks.wait_for_step(1, restarts=1)
        assert oobleck("add", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        ranks.wait_until(lambda: len(ranks.entries("GenerationRuns")) >= 3)
        last = ranks.notes(0)[-1]["step"]
        lose(ranks, "node0")
        assert process.wait(TIMEOUT_S) == 1, ranks.said()
    assert "was saved, and no part of it is left in memory or in" in ranks.said()
    assert all(note["step"] > 1 for note in ranks.notes(0) if note["restarts"] > 0), f"after step {last}"
    assert len(ranks.entries("RankDown")) == 1, "it is not tried again and again"
