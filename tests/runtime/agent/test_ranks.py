"""Ranks of a script, forked by a real server: what keeps them from starting is known before, and how they end."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from oobleck.control.node_ranks import RankSetup
from oobleck.control.protocol import Exited, Killed, StartRanks
from oobleck.errors import ConfigError
from oobleck.job.ranks import RanksSpec
from oobleck.runtime.agent.checkpoint_store import NodeCheckpoints
from oobleck.runtime.agent.rank_states import RankStates
from oobleck.runtime.agent.ranks import Rank, RankProcesses
from oobleck.runtime.files.agent_dir import AgentDir
from tests.disks import fill, small_disk
from tests.runtime.ssh_servers import until


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AgentDir:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    directory = AgentDir("run", "node0")
    directory.create()
    return directory


class _Node:
    def __init__(self, directory: AgentDir, run: RanksSpec, logs: Path) -> None:
        states = RankStates(NodeCheckpoints(directory, default_directory=logs / "checkpoints"))
        self.host = RankProcesses(directory, logs=logs, states=states)
        self.logs = logs / directory.node
        self.run = run
        self.ranks: list[Rank] = []

    async def start(self, num_ranks: int) -> Sequence[Rank]:
        order = StartRanks(
            generation=1,
            group_rank=0,
            num_groups=1,
            first_rank=0,
            num_ranks=num_ranks,
            world_size=num_ranks,
            master_address="localhost",
            master_port=1,
            start="1",
        )
        devices = tuple(range(num_ranks))
        setups = [RankSetup(run=self.run, order=order, local_rank=each, devices=devices) for each in devices]
        self.ranks = [await self.host.start(setup) for setup in setups]
        return self.ranks

    def printed(self, rank: int) -> str:
        return (self.logs / "attempt_0" / str(rank) / "stdout.log").read_text()


@asynccontextmanager
async def node(directory: AgentDir, tmp_path: Path, script: str, **options: Any) -> AsyncIterator[_Node]:
    """A node that is ready to start ranks; nothing of it is left."""
    (tmp_path / "script.py").write_text(script)
    run = RanksSpec(tag="t", entry="script", command=("script.py",), directory=str(tmp_path), **options)
    made = _Node(directory, run, tmp_path / "logs")
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(made.host.run)
            try:
                await made.host.prepare(run, (0,))
                yield made
            finally:
                for rank in made.ranks:
                    rank.kill()
                await made.host.leave()
                nursery.cancel_scope.cancel()


async def test_ranks_that_are_forked_from_one_process_draw_other_numbers(directory: AgentDir, tmp_path: Path) -> None:
    async with node(directory, tmp_path, "import random\nprint(random.random())\n") as made:
        for rank in await made.start(3):
            assert await rank.wait() == Exited(exit_code=0)
        assert len({made.printed(each) for each in range(3)}) == 3


async def test_ranks_and_copies_reach_a_node_by_the_address_of_its_network_interface(
    directory: AgentDir, tmp_path: Path
) -> None:
    async with node(directory, tmp_path, "", copies=1) as made:
        assert [made.host.address_of(name) for name in ("lo", "node1", "")] == ["127.0.0.1", "node1", ""]
        door = await made.host.open_door(made.run, made.host.address_of("lo"))
        assert door is not None
        assert door.host == "127.0.0.1"


LEAVES_FILES_OPEN = """
import os

class Closing:
    def __del__(self):
        print("closed", os.getpid() > 0)

closing = Closing()
table = open("table.csv", "w")
table.write("step,loss\\n")
held = {"again": [open("held.bin", "wb")]}
held["again"][0].write(b"x" * 10)

def use():
    return table, closing
"""


async def test_files_that_a_script_leaves_open_are_written_when_it_ends(directory: AgentDir, tmp_path: Path) -> None:
    async with node(directory, tmp_path, LEAVES_FILES_OPEN) as made:
        (rank,) = await made.start(1)
        assert await rank.wait() == Exited(exit_code=0)
        assert made.printed(0) == "closed True\n"
    assert (tmp_path / "table.csv").read_text() == "step,loss\n"
    assert (tmp_path / "held.bin").read_bytes() == b"x" * 10


async def test_output_is_shown_in_the_order_of_writing_when_a_full_disk_has_room_again(
    directory: AgentDir, tmp_path: Path
) -> None:
    script = """
import pathlib, sys, time
here = pathlib.Path(__file__).parent
print("first")
(here / "printed").touch()
while not (here / "go").exists():
    time.sleep(0.01)
print("second")
(here / "logs" / "filler").unlink()
print("third")
"""
    with small_disk(tmp_path / "logs", "256k") as disk:
        async with node(directory, tmp_path, script) as started:
            fill(disk)
            (rank,) = await started.start(1)
            await until((tmp_path / "printed").exists)
            assert rank.new_problem() is not None
            (tmp_path / "go").touch()
            await until(lambda: started.printed(0))
            # The agent does not know of the second line yet, which is not in the file.
            assert rank.new_output(is_error=False, is_last=False) == "first\n"
            rank.note_shown(is_error=False)
            assert rank.new_problem() is not None
            assert rank.new_output(is_error=False, is_last=False) == "second\nthird\n"
            await rank.wait()


async def test_logs_of_an_earlier_run_go_and_what_else_lies_beside_them_stays(
    directory: AgentDir, tmp_path: Path
) -> None:
    logs = tmp_path / "own" / "t" / "node0"
    (logs / "attempt_3" / "0").mkdir(parents=True)
    (logs / "notes.txt").write_text("mine")
    async with node(directory, tmp_path, "", log_dir=str(tmp_path / "own")):
        assert sorted(path.name for path in logs.iterdir()) == ["attempt_0", "notes.txt"]


async def test_a_rank_that_is_asked_to_end_before_it_has_begun_ends(directory: AgentDir, tmp_path: Path) -> None:
    async with node(directory, tmp_path, "import time\ntime.sleep(300)\n") as made:
        for _ in range(5):
            (rank,) = await made.start(1)
            rank.ask_to_end()
            with trio.fail_after(5):
                assert await rank.wait() == Killed(signal=signal.SIGTERM)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"log_dir": "script.py"}, ["--log-dir", "script.py", "Not a directory"]),
        ({"environment": {"PYTHONHOME": "/nonexistent"}}, ["--env PYTHONHOME", "exit code 1"]),
    ],
    ids=["logs", "python"],
)
async def test_what_keeps_every_rank_from_starting_is_found_before_any_is_to_start(
    directory: AgentDir, tmp_path: Path, options: dict[str, Any], words: list[str]
) -> None:
    """So a run that cannot begin ends at once, and does not wait for other nodes."""
    with pytest.raises(ExceptionGroup) as caught:
        async with node(directory, tmp_path, "", **options):
            raise AssertionError("it was found ready")
    (error,) = caught.value.exceptions
    assert isinstance(error, ConfigError)
    assert all(word in str(error) for word in words), error
