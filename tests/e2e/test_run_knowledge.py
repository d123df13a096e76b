"""What a script under `oobleck run` can know, and say: notices, its steps, bad ones."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.harness import oobleck
from tests.e2e.ranks import Ranks

SAVING = str(Path(__file__).with_name("flash_script.py"))
BAD = str(Path(__file__).with_name("bad_script.py"))
LOST = str(Path(__file__).with_name("lost_script.py"))
NOTICING = str(Path(__file__).with_name("noticing_script.py"))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


@pytest.mark.slow
def test_a_script_learns_how_long_it_has_when_its_node_or_another_is_taken_away(ranks: Ranks) -> None:
    """SIGTERM alone would end it at once; it saves, and ends by itself."""
    with ranks.started("--local", "2", "--shutdown-timeout", "20", command=[NOTICING, str(ranks.out)]) as process:
        for rank in (0, 1):
            ranks.wait_for_step(3, rank=rank)
        assert oobleck("drain", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        ranks.wait_for_step(3, restarts=1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, ranks.said()
    for rank, num_told in ((0, 2), (1, 1)):
        notes = ranks.notes(rank)
        told = [note for note in notes if note["left_s"] is not None]
        assert [note.get("has_saved", False) for note in told] == [False, True] * num_told
        for first, second in zip(told[::2], told[1::2], strict=True):
            assert 15 < second["left_s"] < first["left_s"] <= 20
            assert 0.5 <= first["left_s"] - second["left_s"] < 5
    assert not ranks.entries("RankDown")


@pytest.mark.slow
def test_the_steps_that_a_script_saves_are_in_status_and_report_with_its_loss_and_goodput(ranks: Ranks) -> None:
    """A rank is killed on the way, and all steps are counted once."""
    with ranks.started("--nproc-per-node", "2", command=[SAVING, str(ranks.out), "1000000", "0.1"]) as process:
        victim = ranks.wait_for_step(20, rank=1)
        os.kill(victim["pid"], signal.SIGKILL)
        ranks.wait_for_step(40, restarts=1)
        shown = json.loads(oobleck("status", "ranks", "--json", "--base-dir", str(ranks.base_dir)).stdout)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, ranks.said()
    assert 1 <= shown["step"] <= 1_000_000
    assert shown["loss"] == 1 / shown["step"]
    assert shown["step_time_s"] > 0.09
    assert 0 < shown["goodput"] < 1
    saved = ranks.entries("StepsSaved")
    assert {entry.generation for entry in saved} == {1, 2}
    steps = saved[-1].step
    assert 0 <= steps - min(ranks.notes(rank)[-1]["step"] for rank in (0, 1)) <= 1, "the last one may not be noted"
    counted = [step for entry in saved for step in range(entry.first_step, entry.step + 1)]
    assert counted == list(range(1, steps + 1))
    assert sum(entry.worked_s for entry in saved) > 0.09 * (steps - 2)
    assert oobleck("report", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
    page = (ranks.base_dir / "ranks" / "report.html").read_text()
    for words in ("<title>Oobleck: ranks</title>", f"<dt>steps</dt><dd>{steps}</dd>", "<dt>goodput</dt>", "loss over"):
        assert words in page
    assert f"<dt>loss</dt><dd>{1 / steps:.4f}</dd>" in page


@pytest.mark.slow
@pytest.mark.parametrize("why", ["flash", "node", "data"])
def test_a_step_with_a_bad_loss_is_computed_on_other_nodes_and_whoever_is_at_fault_named(
    ranks: Ranks, why: str
) -> None:
    """A node that computes it wrongly once, one that always does, which is left out, and data that is bad anywhere."""
    with ranks.started("--local", "3", "--lease", "60", command=[BAD, str(ranks.out), "20", why]) as process:
        code = process.wait(400)
    said = ranks.said()
    assert code == (1 if why == "data" else 0), said
    ends = [entry.cause.value for entry in ranks.entries("GenerationEnded")]
    assert ends[:1] == ["rank_failed"], said
    blamed = [(entry.step, entry.nodes, entry.is_sure) for entry in ranks.entries("StepRecomputed")]
    assert blamed == ([] if why == "data" else [(12, ("node1",), True)])
    assert ("its data is at fault" in said) == (why == "data")
    assert [entry.node for entry in ranks.entries("NodeLost")] == (["node1"] if why == "node" else [])
    steps = {note["step"] for note in ranks.notes()}
    assert steps == set(range(1, 12 if why == "data" else 21))
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    # By the title of an incident, or by what followed from another.
    assert ("computed it wrongly" in told) == (why != "data")
    assert "the loss is not a number" in told


@pytest.mark.slow
def test_a_hang_in_which_all_ranks_wait_is_explained_by_their_flight_recorders(ranks: Ranks) -> None:
    """Of their stacks none stands out."""
    options = ("--nproc-per-node", "3", "--hang-timeout", "6", "--env", "TORCH_FR_BUFFER_SIZE=100")
    assert ranks.run(*options, command=[LOST, str(ranks.out)]) == 0, ranks.said()
    (hung,) = ranks.entries("RanksHung")
    assert [culprit.rank for culprit in hung.culprits] == [2]
    assert hung.not_joined == "collective 1 (gloo:all_reduce) of group 1"
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    assert "1 rank waits for rank 2 on node0, not in collective 1 (gloo:all_reduce) of group 1" in told
