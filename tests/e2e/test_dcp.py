"""`oobleck run` with a script that saves by torch's DCP into memory, and a node that is lost with its memory."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.runtime.files import AgentDir, RunDirectory
from tests.e2e.harness import oobleck
from tests.e2e.ranks import Ranks

SCRIPT = str(Path(__file__).with_name("dcp_script.py"))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_node_of_a_two_dimensional_mesh_is_lost_and_another_mesh_continues_from_its_copies(ranks: Ranks) -> None:
    """Two rows of two become one of three; nothing was written to disk."""
    with ranks.started("--local", "4", "--lease", "30", command=[SCRIPT, str(ranks.out), "1000000"]) as process:
        ranks.wait_for_step(5)
        ranks.wait_until(lambda: any((each.protected or 0) > 0 for each in ranks.entries("StatesProtected")))
        memory = AgentDir(RunDirectory(base_dir=ranks.base_dir, tag="ranks").run_id, "node1").memory
        assert oobleck("kill", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        shutil.rmtree(memory, ignore_errors=True)
        first = ranks.wait_for_step(1, restarts=1)
        assert (first["world"], first["step"] > 5) == (3, True)
        ranks.wait_for_step(first["step"] + 10, restarts=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130, ranks.said()
    assert "saved by 4 ranks, from memory" in ranks.said()
    losses = {note["step"]: note["loss"] for note in ranks.notes()}
    for path in ranks.out.iterdir():
        path.unlink()
    shutil.rmtree(ranks.base_dir)
    assert ranks.run("--nproc-per-node", "1", command=[SCRIPT, str(ranks.out), str(max(losses))]) == 0, ranks.said()
    alone = {note["step"]: note["loss"] for note in ranks.notes()}
    assert losses.keys() == alone.keys()
    assert all(abs(losses[step] - alone[step]) < 1e-5 for step in losses)
