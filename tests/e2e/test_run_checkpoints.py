"""`oobleck run` with a script that saves by `oobleck.checkpoint`, and with one that hangs: real kills, real memory."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.runtime.files import AgentDir, RunDirectory
from tests.disks import fill, small_disk
from tests.e2e.harness import oobleck
from tests.e2e.ranks import Ranks

SCRIPT = str(Path(__file__).with_name("flash_script.py"))


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    memory = memory_of(made, "node0").parent
    shutil.rmtree(memory, ignore_errors=True)
    made.close()


def memory_of(ranks: Ranks, node: str) -> Path:
    return AgentDir(RunDirectory(base_dir=ranks.base_dir, tag="ranks").run_id, node).memory


def steps_of(ranks: Ranks, rank: int, restarts: int) -> list[int]:
    return [note["step"] for note in ranks.notes(rank) if note["restarts"] == restarts]


def saved_by_all(ranks: Ranks, num_ranks: int, restarts: int) -> int:
    """The last step that all have noted: each does so once it has saved it."""
    return min(steps_of(ranks, rank, restarts)[-1] for rank in range(num_ranks))


def on_disk(ranks: Ranks) -> list[str]:
    directory = ranks.base_dir / "ranks" / "checkpoints"
    return sorted(path.name for path in directory.iterdir()) if directory.exists() else []


def test_a_last_state_that_no_disk_takes_ends_the_run_with_74_and_is_continued_from_memory(
    ranks: Ranks, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", "256k") as disk:
        filler = fill(disk)
        options = ("--nproc-per-node", "2", "--env", f"OOBLECK_CHECKPOINT_DIR={disk}")
        assert ranks.run(*options, command=[SCRIPT, str(ranks.out), "60"]) == 74, ranks.said()
        assert ranks.said().count("is in memory alone: node0: ") == 1
        assert "all ranks have finished, but step 60 is NOT SAVED: node0: " in ranks.said()
        assert "No space left on device" in ranks.said()
        filler.unlink()
        assert ranks.run(*options, command=[SCRIPT, str(ranks.out), "70"]) == 0, ranks.said()
    for rank in (0, 1):
        assert steps_of(ranks, rank, 0) == list(range(1, 71))


def test_a_killed_rank_takes_no_step_again_that_was_saved_and_states_of_any_shape_take_the_memory_of_two(
    ranks: Ranks,
) -> None:
    """With saves to disk on the way, by the agent; the fork server, which is killed before, starts again.

    What was saved last is on disk when the run has ended, and its memory is given back.
    """
    most = 0
    command = [SCRIPT, str(ranks.out), "120"]
    with ranks.started("--nproc-per-node", "2", command=command, environment={"GROW": "1"}) as process:
        ranks.wait_for_step(10)
        (server,) = ranks.fork_servers()
        server.kill()
        victim = ranks.wait_for_step(20, rank=1)
        os.kill(victim["pid"], signal.SIGKILL)
        while process.poll() is None:
            files = [path for path in memory_of(ranks, "node0").glob("rank*.*") if path.suffix != ".taken"]
            most = max(most, len(files))
            time.sleep(0.01)
        assert process.returncode == 0, ranks.said()
    assert 0 < most <= 6, "two of each rank, and a third while it is made"
    saved = saved_by_all(ranks, 2, 0)
    for rank in (0, 1):
        again = steps_of(ranks, rank, 1)
        assert again[0] in (saved + 1, saved + 2), "one step may have been saved and not noted"
        assert again == list(range(again[0], 121))
    assert f"continues after step {steps_of(ranks, 0, 1)[0] - 1}, saved by 2 ranks, from memory" in ranks.said()
    assert any(name.startswith("step-00000100.") for name in on_disk(ranks)), "the hundredth was planned to be"
    assert any(name.startswith("step-00000120.") for name in on_disk(ranks))
    assert not memory_of(ranks, "node0").exists()


@pytest.mark.slow
def test_scripts_of_one_name_in_two_directories_each_continue_from_their_own_states(tmp_path: Path) -> None:
    """With no tag given; the same command again continues."""
    said = []
    for name, steps in (("a", "5"), ("b", "3"), ("a", "5"), ("b", "3")):
        project = tmp_path / name
        project.mkdir(exist_ok=True)
        shutil.copy(SCRIPT, project / "train.py")
        words = ("--directory", str(project), "--base-dir", str(tmp_path / "base"), "train.py", str(project), steps)
        done = oobleck("run", *words)
        assert done.returncode == 0, done.stderr
        said.append(done.stderr.count("continues after step " + steps))
    assert said == [0, 0, 1, 1]
    assert len((tmp_path / "b" / "log.0").read_text().splitlines()) == 3, "no step was taken again, and none left out"


@pytest.mark.slow
def test_a_node_that_is_lost_with_its_memory_costs_no_saved_step_and_one_that_comes_is_given_the_state(
    ranks: Ranks,
) -> None:
    """Then all memory is lost, and the disk has what was in it at the last failure."""
    options = ("--local", "3", "--max-restarts", "0")
    command = [SCRIPT, str(ranks.out), "1000000", "0.05"]
    with ranks.started(*options, command=command) as process:
        ranks.wait_for_step(10)
        assert oobleck("kill", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        shutil.rmtree(memory_of(ranks, "node1"), ignore_errors=True)
        assert ranks.wait_for_step(1, restarts=1)["world"] == 2
        assert steps_of(ranks, 0, 1)[0] > saved_by_all(ranks, 3, 0)
        assert oobleck("add", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        assert ranks.wait_for_step(1, restarts=2, rank=1)["world"] == 3
        assert steps_of(ranks, 1, 2)[0] > saved_by_all(ranks, 2, 1)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, ranks.said()
    last = saved_by_all(ranks, 3, 2)
    shutil.rmtree(memory_of(ranks, "node0").parent, ignore_errors=True)
    for log in ranks.out.glob("log.*"):
        log.unlink()
    with ranks.started(*options, command=command) as process:
        first = ranks.wait_for_step(1)
        assert first["step"] > last, ranks.said()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, ranks.said()
    assert "saved by 3 ranks, from disk" in ranks.said()


@pytest.mark.slow
def test_a_rank_that_waits_for_ever_is_found_and_named_and_all_start_again(ranks: Ranks) -> None:
    """`oobleck events` and `report` say so."""
    options = ("--local", "2", "--hang-timeout", "4")
    command = [SCRIPT, str(ranks.out), "40", "0.01", "hangs"]
    with ranks.started(*options, command=command) as process:
        assert process.wait(90) == 0, ranks.said()
    (hung,) = ranks.entries("RanksHung")
    (culprit,) = hung.culprits
    assert (culprit.node, culprit.rank, hung.num_waiting) == ("node1", 1, 1)
    assert culprit.place.startswith(SCRIPT)
    assert culprit.place.endswith("in load_batch")
    assert [entry.cause.value for entry in ranks.entries("GenerationEnded")] == ["hang", "finished"]
    assert steps_of(ranks, 0, 1) == list(range(10, 41))
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    assert "no rank has printed or saved anything for 4 s; 1 rank waits for rank 1 on node1 at" in told
    assert "in load_batch" in told


@pytest.mark.slow
def test_states_on_disk_that_are_all_damaged_end_the_run_at_once_which_names_one(ranks: Ranks) -> None:
    """Ranks are not started again: they would read the same bytes."""
    command = [SCRIPT, str(ranks.out), "5"]
    assert ranks.run("--nproc-per-node", "2", command=command) == 0, ranks.said()
    parts = sorted((ranks.base_dir / "ranks" / "checkpoints").rglob("*.safetensors"))
    for part in parts:
        content = bytearray(part.read_bytes())
        content[-1] ^= 1
        part.write_bytes(content)
    assert parts
    assert ranks.run("--nproc-per-node", "2", "--max-restarts", "3", command=[*command[:2], "9"]) == 1
    assert "no saved state can be read: " in ranks.said()
    assert "remove what is there to begin again" in ranks.said()
    assert {note["step"] for note in ranks.notes(0)} == set(range(1, 6)), "no step is taken from fresh weights"
    assert len({entry.generation for entry in ranks.entries("RankDown")}) == 1
