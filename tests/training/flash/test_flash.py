"""`oobleck.checkpoint.load` and `save`, in processes of their own, as a launcher would start them."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from oobleck.errors import UsageError
from oobleck.storage import FlashMemory, memory_files
from oobleck.training.flash import save
from tests.disks import small_disk
from tests.warm import ROOT, started

SHARDED = Path(__file__).with_name("sharded_script.py")


@contextmanager
def kept_port() -> Iterator[int]:
    """A port that is given to nobody else by chance, and that whoever is told of it can listen at.

    Ranks take long to start on a busy machine; until then a port that was let go could be another connection's.
    """
    with socket.socket() as keeper:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        keeper.bind(("127.0.0.1", 0))
        yield int(keeper.getsockname()[1])


def run(
    script: str | Path, ranks: int, *, fails: bool = False, arguments: Sequence[str] = (), **environment: str
) -> list[str]:
    """Run a script as so many ranks; returns what each has printed, or what a single one that fails has said of it."""
    with kept_port() as port, tempfile.TemporaryDirectory() as directory:
        files = [(Path(directory, f"output{rank}"), Path(directory, f"errors{rank}")) for rank in range(ranks)]
        processes = [
            started(
                script,
                arguments,
                environment={
                    **os.environ,
                    **environment,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "WORLD_SIZE": str(ranks),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(ROOT),
                },
                search_path=[str(ROOT)],
                output=output,
                errors=errors,
            )
            for rank, (output, errors) in enumerate(files)
        ]
        for process in processes:
            process.join(200)
            process.kill()  # as long as it takes no longer, it has ended
            process.join()
        said = [(output.read_text(), errors.read_text()) for output, errors in files]
    assert all(bool(process.exitcode) == fails for process in processes), said
    return [error if fails else output for output, error in said]


ONE = """\
import os, sys, torch, oobleck.checkpoint
state = oobleck.checkpoint.load()
print(None if state is None else (state["step"], state["none"], state["pair"], state["w"].tolist(), state["b"].dtype))
step = 0 if state is None else state["step"]
for step in (step + 1, step + 2, step + 3):
    tensors = {"w": torch.full((2, 3), float(step)), "b": torch.ones(2, dtype=torch.bfloat16), "z": torch.empty(0, 3)}
    oobleck.checkpoint.save(step, {"step": step, "none": None, "pair": (step, 0.5), **tensors})
os._exit(0)
"""


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_later_process_continues_from_the_newest_state(tmp_path: Path, is_in_memory: bool) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk")}
    if is_in_memory:
        where["OOBLECK_CHECKPOINT_MEMORY"] = str(tmp_path)
    starts = [run(ONE, 1, **where, OOBLECK_CHECKPOINT_START=f"{number}" if is_in_memory else "") for number in (1, 2)]
    (first,), (second,) = starts
    assert first == "None\n"
    assert second == "(3, None, (3, 0.5), [[3.0, 3.0, 3.0], [3.0, 3.0, 3.0]], torch.bfloat16)\n"
    assert (tmp_path / "disk").exists() != is_in_memory, "no agent writes it here"


AGAIN = """\
import os, sys, torch, oobleck.checkpoint
from oobleck.errors import UsageError
state = oobleck.checkpoint.load()
print(None if state is None else (state["step"], state["w"].tolist()))
if state is None:
    for step in (8, 9, 10):
        oobleck.checkpoint.save(step, {"step": step, "w": torch.zeros(2)})
    oobleck.checkpoint.save(10, {"step": 10, "w": torch.ones(int(sys.argv[1]))})
    try:
        oobleck.checkpoint.save(9, {"step": 9})
    except UsageError as error:
        print(error)
else:
    oobleck.checkpoint.save(1, {"step": 1})
os._exit(0)
"""


@pytest.mark.parametrize("is_in_memory", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_a_step_may_be_saved_again_where_an_older_one_is_refused(
    tmp_path: Path, size: int, *, is_in_memory: bool
) -> None:
    """As where the end of an epoch comes with a step that is saved anyway."""
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk")}
    if is_in_memory:
        where["OOBLECK_CHECKPOINT_MEMORY"] = str(tmp_path)
    starts = [
        run(AGAIN, 1, arguments=[str(size)], **where, OOBLECK_CHECKPOINT_START=f"{number}" if is_in_memory else "")
        for number in (1, 2)
    ]
    (first,), (second,) = starts
    refused = "oobleck.checkpoint.save: step 9 follows step 10, which is saved already; steps must grow"
    assert first == f"None\n{refused}\n"
    assert second == f"(10, {[1.0] * size})\n", "and a new start may begin with any step"


@pytest.mark.parametrize("size", [2, 3])
def test_the_step_before_stays_where_a_step_is_saved_again(tmp_path: Path, size: int) -> None:
    """Another rank may have saved only that one."""
    where = {"OOBLECK_CHECKPOINT_MEMORY": str(tmp_path), "OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk")}
    run(AGAIN, 1, arguments=[str(size)], **where, OOBLECK_CHECKPOINT_START="1")
    notes = [slot.note for path in memory_files(tmp_path, "rank0") for slot in FlashMemory.open(path).valid_slots()]
    saves = {(note["step"], note["number"]) for note in map(json.loads, notes)}
    assert saves >= {(9, 2), (10, 4)}


CLOCK = """\
import sys, time
from datetime import datetime, timedelta
import oobleck.training.flash.interface as interface

class Clock(datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + timedelta(hours=int(sys.argv[1]))

interface.datetime = Clock
state = interface.load()
first = 0 if state is None else state["step"]
for step in range(first + 1, first + 4):
    interface.save(step, {"step": step})
print(first)
"""


HALF = """\
import os, sys
os.environ["WORLD_SIZE"] = sys.argv[1]
sys.stderr = sys.stdout
import oobleck.checkpoint
if sys.argv[1] == "2":
    oobleck.checkpoint.save(7, {"step": 7})
else:
    oobleck.checkpoint.load()
os._exit(0)
"""


def test_the_ranks_that_saved_a_state_are_counted_though_only_one_part_is_left(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_MEMORY": str(tmp_path), "OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk")}
    for number, size in enumerate(("2", "1")):
        (said,) = run(HALF, 1, arguments=[size], **where, OOBLECK_CHECKPOINT_START=str(number))
    assert said == "oobleck: continues after step 7, saved by 2 ranks, from memory\n"


def test_a_clock_that_is_set_back_takes_no_state_back(tmp_path: Path) -> None:
    """Three starts: the first one's clock is an hour ahead."""
    begun = []
    for hours in (1, 0, 0):
        script = tmp_path / "script.py"
        script.write_text(CLOCK.replace("sys.argv[1]", str(hours)))
        begun += run(script, 1, OOBLECK_CHECKPOINT_DIR=str(tmp_path / "disk"))
    assert begun == ["0\n", "3\n", "6\n"]


UNEVEN = """\
import os, time, torch, torch.distributed as dist, oobleck.checkpoint
dist.init_process_group("gloo")
state = oobleck.checkpoint.load()
print(None if state is None else state["step"], flush=True)
last = 12 if dist.get_rank() == 0 else 2
for step in range(1, last + 1):
    oobleck.checkpoint.save(step, {"step": step})
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_a_rank_that_runs_ahead_leaves_a_state_that_all_can_load(tmp_path: Path) -> None:
    """Ranks that save without waiting for each other: one is twelve steps on when the other one is at its second."""
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path)}
    first, second = run(UNEVEN, 2, **where), run(UNEVEN, 2, **where)
    assert first == ["None\n"] * 2
    assert second in (["1\n"] * 2, ["2\n"] * 2)


def test_a_damaged_note_is_named_and_never_a_beginning_from_nothing(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path)}
    run(ONE, 1, **where)
    newest = max(tmp_path.rglob("*.json"))
    newest.write_text(newest.read_text().replace('"world_size":1', '"world_size":0'))
    assert run(ONE, 1, **where)[0].startswith("(2, "), "the one before is whole"
    for note in tmp_path.rglob("*.json"):
        note.write_text("{")
    (said,) = run(ONE, 1, fails=True, **where)
    found = r"StatesLost: no saved state can be read: /.*/rank-00000\.json: not the note of a part: a line that is not"
    assert re.search(found, said)


LOAD = "import oobleck.checkpoint; print((oobleck.checkpoint.load() or {}).get('step'))"
FIND = "from oobleck.training.flash import find_newest; print((found := find_newest()) and found.chosen.note.step)"
SAY_ALL = "import sys; sys.stderr = sys.stdout\n"


@pytest.mark.parametrize("how", [LOAD, FIND], ids=["load", "find"])
def test_damaged_bytes_are_named_and_never_a_beginning_from_nothing(how: str, tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OOBLECK_CHECKPOINT_SCRIPT": "x"}
    run(ONE, 1, **where)
    parts = sorted(tmp_path.rglob("*.safetensors"))
    for number, path in enumerate(reversed(parts)):
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        if number == 0:
            (said,) = run(SAY_ALL + how, 1, **where)
            assert f"oobleck: not used: {path}: changed: its SHA-256 is not" in said
            assert said.endswith("2\n"), "the one before is whole"
    (said,) = run(how, 1, fails=True, **where)
    assert f"StatesLost: no saved state can be read: {parts[0]}: changed" in said


def test_the_states_of_another_script_are_refused(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path)}
    run(ONE, 1, **where, OOBLECK_CHECKPOINT_SCRIPT="/a/train.py")
    (said,) = run(ONE, 1, fails=True, **where, OOBLECK_CHECKPOINT_SCRIPT="/b/train.py")
    assert f"the states in {tmp_path} were saved by /a/train.py, and this is /b/train.py; name another --tag" in said


GROWING = """\
import glob, os, torch, oobleck.checkpoint
files = os.environ["OOBLECK_CHECKPOINT_MEMORY"] + "/*[0-9]"
state = oobleck.checkpoint.load()
step = 0 if state is None else state["step"]
assert state is None or state["losses"].tolist() == [float(each) for each in range(step)], state
most = 0
for step in range(step + 1, step + 21):
    losses = torch.arange(step, dtype=torch.float32)
    oobleck.checkpoint.save(step, {"step": step, "losses": losses}, disk_every=1000)
    most = max(most, len(glob.glob(files)))
print(step, most, len(glob.glob(files)))
os._exit(0)
"""


def test_memory_is_bounded_where_every_save_has_another_shape(tmp_path: Path) -> None:
    """And the newest state is still found."""
    memory = tmp_path / "memory"
    memory.mkdir()
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OOBLECK_CHECKPOINT_MEMORY": str(memory)}
    assert run(GROWING, 1, **where) == ["20 2 2\n"]
    assert run(GROWING, 1, **where) == ["40 2 2\n"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sizes", [(2, 3, 1)])
def test_shards_are_laid_out_again_on_another_number_of_ranks(tmp_path: Path, sizes: Sequence[int]) -> None:
    """FSDP2: parameters and the optimizer's state, each start with another number of ranks."""
    last = ""
    for ranks in sizes:
        said = run(SHARDED, ranks, OOBLECK_CHECKPOINT_DIR=str(tmp_path))
        before, after = zip(*(text.splitlines() for text in said), strict=True)
        assert len(set(before)) == len(set(after)) == 1, said
        assert before[0] == last
        assert after[0] != before[0]
        last = after[0]


ROOM = """\
import os, sys, torch, torch.distributed as dist, oobleck.checkpoint
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo")
weights = distribute_tensor(torch.zeros(1 << 18), dist.init_device_mesh("cpu", (1,)), [Shard(0)])
for step in range(1, 7):
    oobleck.checkpoint.save(step, {"step": step, "weights": weights}, disk_every=1000)
dist.destroy_process_group()
sys.stdout.write(sys.stderr.said)
"""
HEARD = """\
import sys
class Stderr:
    said = ""
    def write(self, text): self.said += text
    def flush(self): pass
sys.stderr = Stderr()
"""


@pytest.mark.parametrize(("size", "slots"), [("7m", 4), ("4m", 2)])
def test_slots_for_copies_give_way_where_memory_is_short_which_is_said_once(
    tmp_path: Path, size: str, slots: int
) -> None:
    """A state of 1 MiB, and two more of another node's."""
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OOBLECK_CHECKPOINT_MEMORY": str(tmp_path / "memory")}
    with small_disk(tmp_path / "memory", size) as memory:
        for begun in (1, 2):
            (said,) = run(HEARD + ROOM, 1, **where, OOBLECK_CHECKPOINT_COPIES="1", OOBLECK_CHECKPOINT_START=str(begun))
            assert said.count(f"{memory} has no room for 4 states of 1.0 MiB") == (slots < 4), said
        (path,) = memory_files(memory, "rank0")
        assert len(FlashMemory.open(path).slots()) == slots
    with small_disk(tmp_path / "memory", "1m"):
        (said,) = run(ROOM, 1, fails=True, **where, OOBLECK_CHECKPOINT_COPIES="1")
        assert "are needed, for 2 copies" in said


def test_ranks_that_see_one_device_each_share_no_slots(tmp_path: Path) -> None:
    """With --virtual-local-rank, LOCAL_RANK is 0 for all."""
    for rank in ("0", "1"):
        where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OOBLECK_CHECKPOINT_MEMORY": str(tmp_path)}
        run(ONE, 1, **where, OOBLECK_CHECKPOINT_LOCAL_RANK=rank, OOBLECK_CHECKPOINT_START="1")
    assert {path.name for path in memory_files(tmp_path, "rank*")} == {"rank0.1", "rank1.1"}


class Odd:
    pass


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"model": {"a": [Odd()]}}, r"model\.a\.0 is a .*\.Odd, which cannot be stored"),
        ({"w": torch.zeros(2, dtype=torch.complex64)}, r"w is of torch\.complex64, which cannot be stored"),
        ({"w": torch.zeros(2, device="meta")}, "w is on the meta device, so it has no values"),
        ({"w": torch.zeros(2, 2).to_sparse()}, "w is a Tensor that is not dense and plain"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        save(1, value)


@pytest.mark.parametrize("step", [-1, 1.5, True, 10**12 + 1, 2**70])
def test_a_step_is_a_whole_number(step: int) -> None:
    with pytest.raises(UsageError, match=f"step {step} is not a whole number from 0 to 1,000,000,000,000$"):
        save(step, {})


@pytest.mark.parametrize("disk_every", [0, 1.5, 2**70])
def test_a_number_of_steps_between_states_on_disk_is_a_whole_number(disk_every: int) -> None:
    with pytest.raises(UsageError, match=f"disk_every={disk_every}; it must be .* from 1 to 1,000,000,000,000$"):
        save(1, {}, disk_every=disk_every)


DISK_EVERY = """\
import os, pathlib, oobleck.checkpoint
from oobleck.storage import find_slots, scripts
for step in (1, 3, 4, 7, 8, 13, 14):
    oobleck.checkpoint.save(step, {}, disk_every=4)
    slots = find_slots(pathlib.Path(os.environ["OOBLECK_CHECKPOINT_MEMORY"]), "rank*")
    newest = max(slots, key=lambda slot: slot.sequence)
    scripts.note_taken(newest)  # as an agent does
    if scripts.note_of(newest).is_planned:
        print(step)
os._exit(0)
"""


def test_the_first_save_at_or_after_each_multiple_goes_to_disk(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_MEMORY": str(tmp_path), "OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk")}
    (said,) = run(DISK_EVERY, 1, **where, OOBLECK_CHECKPOINT_START="1")
    assert said.split() == ["4", "8", "13"]


def test_another_script_is_refused_by_name_under_any_launcher(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk")}
    first, second = tmp_path / "train.py", tmp_path / "other.py"
    first.write_text(ONE)
    second.write_text(ONE)
    run(first, 1, **where)
    assert run(first, 1, **where)[0].startswith("(3, ")
    (said,) = run(second, 1, fails=True, **where)
    assert f"saved by {first}, and this is {second}" in said
    assert run(second, 1, **where, OOBLECK_CHECKPOINT_SCRIPT=str(first))[0].startswith("(6, ")


@pytest.mark.slow
def test_a_save_that_a_kill_cuts_short_at_any_line_is_never_loaded(tmp_path: Path) -> None:
    (said,) = run(Path(__file__).with_name("torn_saves.py"), 1, arguments=(str(tmp_path / "memory"),))
    before, after, unsummed = map(int, said.split())
    assert before > 50, "kills met the save at many lines"
    assert after > 0, "and after it was whole"
    assert unsummed > 5
