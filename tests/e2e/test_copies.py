"""`oobleck run` with a sharded script whose states are copied to other nodes: real kills of whole nodes."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from oobleck.errors import ExitCode
from oobleck.runtime.files import MEMORY_OWNER, AgentDir, ProcessId, RunDirectory
from oobleck.storage import find_slots
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


def wait_for_protection(ranks: Ranks) -> None:
    ranks.wait_for_step(1)
    ranks.wait_until(lambda: any(entry.protected for entry in ranks.entries("StatesProtected")))


def nowhere(ranks: Ranks) -> tuple[str, ...]:
    """Options for a run that writes nothing to disk, as nodes whose disks are lost with them; its end says so."""
    file = ranks.out / "no-directory"
    file.touch()
    return ("--env", f"OOBLECK_CHECKPOINT_DIR={file}/states")


@pytest.mark.slow
def test_a_lost_nodes_pieces_come_back_from_its_peer(ranks: Ranks) -> None:
    options = ("--local", "2", "--max-restarts", "0", "--lease", "60", *nowhere(ranks))
    command = [SCRIPT, str(ranks.out), "60", "0.1"]
    with ranks.started(*options, command=command) as process:
        wait_for_protection(ranks)
        reached = ranks.wait_for_step(30)["step"]
        lose(ranks, "node1")
        first = ranks.wait_for_step(1, restarts=1)
        assert first["step"] > reached - 20, "it goes on from a copy, not from the start"
        assert process.wait(TIMEOUT_S) == ExitCode.NOT_SAVED, ranks.said()
    assert "saved by 2 ranks, from memory" in ranks.said()
    assert losses(ranks) == pytest.approx(undisturbed(60), abs=TOLERANCE)


@pytest.mark.slow
def test_ranks_train_on_without_a_master_and_the_next_one_handles_a_node_that_was_lost_meanwhile(ranks: Ranks) -> None:
    """A copy that was made under the master before is what the next ranks load."""
    options = ("--local", "2", "--max-restarts", "3", "--lease", "60", *nowhere(ranks))
    command = [SCRIPT, str(ranks.out), "100", "0.1"]
    with ranks.started(*options, command=command) as first:
        wait_for_protection(ranks)
        first.kill()
        first.wait()
        before = ranks.notes(0)[-1]["step"]
        reached = ranks.wait_for_step(before + 15)["step"]
        lose(ranks, "node1")
    with ranks.started(*options, command=command) as second:
        went_on = ranks.wait_for_step(1, restarts=1)
        assert second.wait(TIMEOUT_S) == ExitCode.NOT_SAVED, ranks.said()
    assert went_on["step"] > before - 20, (went_on, before, reached)
    assert "saved by 2 ranks, from memory" in ranks.said()
    assert len(ranks.entries("MasterResumed")) == 1
    assert losses(ranks) == pytest.approx(undisturbed(100), abs=TOLERANCE)


@pytest.mark.slow
def test_a_drained_node_hands_its_pieces_on_before_it_leaves(ranks: Ranks) -> None:
    """The node that had their only copy is lost as soon as the drained one is gone."""
    options = ("--local", "3", "--max-restarts", "0", "--lease", "60", *nowhere(ranks))
    with ranks.started(*options, command=[SCRIPT, str(ranks.out), "60", "0.1"]) as process:
        wait_for_protection(ranks)
        ranks.wait_for_step(20)
        assert oobleck("drain", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        ranks.wait_until(lambda: bool(ranks.entries("NodeLeft")))
        lose(ranks, "node2")
        assert process.wait(TIMEOUT_S) == ExitCode.NOT_SAVED, ranks.said()
    assert "saved by 3 ranks, from memory" in ranks.said()
    # A copy of a later step may be on its way to the node that is lost.
    assert [line for line in ranks.said().splitlines() if "is not copied" in line and "to node2" not in line] == []
    assert losses(ranks) == pytest.approx(undisturbed(60), abs=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["both holders", "one holder, and a byte of its copy"])
def test_a_state_that_no_node_has_whole_ends_the_run_which_says_so(ranks: Ranks, loss: str) -> None:
    """Never from fresh weights, never from damaged ones, and no try after the other, with restarts left."""
    options = ("--local", "3", "--max-restarts", "5", "--lease", "60", *nowhere(ranks))
    with ranks.started(*options, command=[SCRIPT, str(ranks.out), "100000", "0.05"]) as process:
        wait_for_protection(ranks)
        ranks.wait_for_step(20)
        lose(ranks, "node1")
        if loss == "both holders":
            lose(ranks, "node2")
        else:
            damage_copies(ranks, rank=1)
        assert process.wait(TIMEOUT_S) == 1, ranks.said()
    assert "no saved state is whole: of step " in ranks.said()
    assert {note["restarts"] for note in ranks.notes(0)} == {0}, "no step is taken after the loss"
    failed = ranks.entries("RankDown")
    assert {entry.generation for entry in failed} == {failed[0].generation}, "it is not tried again and again"


def damage_copies(ranks: Ranks, *, rank: int) -> None:
    """Change a byte in each copy of a rank's parts, which no node sends any more."""
    slots = [slot for node in ("node0", "node2") for slot in find_slots(memory_of(ranks, node), f"rankcopy{rank}-*")]
    assert slots
    for slot in slots:
        slot.data[-1] ^= 1


@pytest.mark.slow
def test_the_loss_of_the_only_holder_while_a_newcomer_is_filled_ends_the_run_and_says_so(ranks: Ranks) -> None:
    """Also with restarts left, and with replicated states: never from fresh weights."""
    options = ("--local", "2", "--max-restarts", "5", "--lease", "60", *nowhere(ranks))
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


@pytest.mark.slow  # tests/control/test_copies.py loses domains of a model
def test_one_copy_survives_the_loss_of_one_of_two_racks_at_once(ranks: Ranks) -> None:
    """By the order of their names, each node's neighbour is in its own rack."""
    racks = {"alpha": "left", "beta": "left", "gamma": "right", "delta": "right"}
    nodes = []
    home = ranks.out / "home"
    home.mkdir()
    (home / ".oobleck").symlink_to(ranks.base_dir)  # logs lie where other runs' are
    where = ("--dial-in", "127.0.0.1:0", "--nodes", "4", "--nnodes", "2:4")
    options = (*where, "--max-restarts", "0", "--lease", "20", *nowhere(ranks))
    with ranks.started(*options, command=[SCRIPT, str(ranks.out), "60", "0.1"]) as process:
        ranks.wait_until(lambda: ": oobleck node " in ranks.said())
        file = shlex.split(ranks.said().split(": oobleck node ")[1])[0]
        try:
            for name, rack in racks.items():
                command = [sys.executable, "-m", "oobleck", "node", file, f"{name} domain={rack}"]
                environment = {**ranks.environment, "HOME": str(home)}
                nodes.append(subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL))
            wait_for_protection(ranks)
            reached = ranks.wait_for_step(30)["step"]
            for number, name in enumerate(("alpha", "beta")):
                nodes[number].kill()
                lose(ranks, name)
            first = ranks.wait_for_step(1, restarts=1)
            assert first["step"] > reached - 20, "it goes on from copies, not from the start"
            assert process.wait(TIMEOUT_S) == ExitCode.NOT_SAVED, ranks.said()
        finally:
            for node in nodes:
                node.kill()
                node.wait()
            for left in ranks.temporary.glob("oobleck-*"):  # of the dead machines
                shutil.rmtree(left)
    assert "saved by 4 ranks, from memory" in ranks.said()
    assert losses(ranks) == pytest.approx(undisturbed(60), abs=TOLERANCE)


@pytest.mark.slow
def test_a_lost_nodes_pieces_follow_from_the_others_and_their_parity(ranks: Ranks) -> None:
    """One node after the other is lost, and comes back empty: each time its pieces are made again."""
    options = ("--local", "4", "--copies", "xor:3", "--max-restarts", "0", "--lease", "60", *nowhere(ranks))
    with ranks.started(*options, command=[SCRIPT, str(ranks.out), "300", "0.1"]) as process:
        ranks.wait_for_step(1)
        for number, node in enumerate(("node1", "node3", "node2")):
            known = len(ranks.entries("StatesProtected"))
            ranks.wait_until(lambda known=known: any(e.protected for e in ranks.entries("StatesProtected")[known:]))
            reached = ranks.wait_for_step(1 + ranks.notes(0)[-1]["step"], restarts=2 * number)["step"]
            if number == 0:
                memories = [memory_of(ranks, f"node{each}") for each in range(4)]
                assert not [path for each in memories for path in each.glob("rankcopy*")]
                assert len({path.name for each in memories for path in each.glob("parity*.1")}) >= 2
            lose(ranks, node)
            first = ranks.wait_for_step(1, restarts=2 * number + 1)
            assert first["step"] > reached - 20, "it goes on from memory, not from the start"
            oobleck("add", node, "--tag", "ranks", "--base-dir", str(ranks.base_dir))  # else it is tried again later
            ranks.wait_for_step(1, restarts=2 * number + 2)
        assert process.wait(TIMEOUT_S) == ExitCode.NOT_SAVED, ranks.said()
    assert "saved by 4 ranks, from memory" in ranks.said()
    assert losses(ranks) == pytest.approx(undisturbed(300), abs=TOLERANCE)
