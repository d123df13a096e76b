"""`oobleck run` with frameworks that write checkpoints of their own: a node is lost with its disk and its memory."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.errors import ExitCode
from tests.e2e.harness import oobleck
from tests.e2e.ranks import TIMEOUT_S, Ranks
from tests.e2e.test_copies import lose, memory_of, nowhere, wait_for_protection

SCRIPT = str(Path(__file__).with_name("files_script.py"))
STEPS = 40


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    shutil.rmtree(memory_of(made, "node0").parent, ignore_errors=True)
    made.close()


def losses(ranks: Ranks) -> dict[int, float]:
    return {note["step"]: note["loss"] for note in ranks.notes(0)}


@pytest.mark.slow  # tests/training/flash/test_files.py lays files out on nodes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("framework", ["trainer", "accelerate", "lightning", "deepspeed"])
def test_a_lost_node_is_given_the_files_that_its_framework_has_written(
    ranks: Ranks, tmp_path: Path, framework: str
) -> None:
    if importlib.util.find_spec({"trainer": "transformers"}.get(framework, framework)) is None:
        pytest.skip(f"{framework} is not installed")
    (tmp_path / "undisturbed").mkdir()
    undisturbed = Ranks(tmp_path / "undisturbed")
    command = [SCRIPT, framework, str(undisturbed.out), str(STEPS), "0"]
    assert undisturbed.run("--local", "2", command=command) == 0, undisturbed.said()
    undisturbed.close()
    options = ("--local", "2", "--nnodes", "2", "--max-restarts", "0", "--lease", "60", *nowhere(ranks))
    command = [SCRIPT, framework, str(ranks.out), str(STEPS), "0.2"]
    with ranks.started(*options, command=command) as process:
        wait_for_protection(ranks)
        reached = ranks.wait_for_step(10)["step"]
        lose(ranks, "node1")
        ranks.wait_until(lambda: bool(ranks.entries("NodeLost")))
        oobleck("add", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir))
        first = ranks.wait_for_step(1, restarts=1, rank=1)
        assert first["step"] > reached - 10, "it goes on from a copy"
        assert process.wait(TIMEOUT_S) == ExitCode.NOT_SAVED, ranks.said()
    assert losses(ranks) == pytest.approx(losses(undisturbed), abs=1e-6)
