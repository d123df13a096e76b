"""`oobleck.checkpoint.save_files` and `load_files`: the files of any framework, on one node and on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .test_flash import run

SAVE = """\
import os, sys
from pathlib import Path
import torch.distributed as dist
import oobleck.checkpoint
dist.init_process_group("gloo")
rank = dist.get_rank()
out = Path(os.environ["OUT"].format(rank=rank)) / "checkpoint-7"
(out / "global").mkdir(parents=True, exist_ok=True)
(out / "global" / f"rng_{rank}.bin").write_bytes(bytes([rank]) * (100_000 * rank))
if rank == 0:
    (out / "model.bin").write_bytes(b"weights")
oobleck.checkpoint.save_files(7, out)
os._exit(0)
"""
LOAD = """\
import json, os
from pathlib import Path
import torch.distributed as dist
import oobleck.checkpoint
dist.init_process_group("gloo")
out = Path(os.environ["OUT"].format(rank=dist.get_rank())) / "again"
out.parent.mkdir(exist_ok=True)
step = oobleck.checkpoint.load_files(out)
found = {path.relative_to(out).as_posix(): path.stat().st_size for path in sorted(out.rglob("*")) if path.is_file()}
assert not found or set((out / "global" / "rng_1.bin").read_bytes()) == {1}
print(json.dumps([step, found, sorted(path.name for path in out.parent.iterdir())]))
os._exit(0)
"""
FILES = {".oobleck-files": 0, "global/rng_0.bin": 0, "global/rng_1.bin": 100_000, "model.bin": 7}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("out", ["node{rank}", "shared"])
def test_files_that_ranks_have_written_on_their_nodes_are_laid_out_on_every_node(
    tmp_path: Path, out: str, ranks: int
) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OUT": str(tmp_path / out)}
    if ranks == 2:
        for said in run(LOAD, 2, **where):
            assert json.loads(said)[:2] == [None, {}]
    run(SAVE, 2, **where)
    if out == "shared" and ranks == 2:
        memory = sum(path.stat().st_size for path in (tmp_path / "disk").rglob("*.safetensors"))
        assert memory < 400_000, "each file is saved once"
    for _ in range(3 - ranks + 1):  # also over what was laid out before
        for rank, said in enumerate(run(LOAD, ranks, **where)):
            step, found, beside = json.loads(said)
            assert (step, found) == (7, FILES)
            saved = {"checkpoint-7"} if rank < 2 or out == "shared" else set()
            assert set(beside) == {"again"} | saved, "nothing else is left"


REFUSED = """\
import os, sys
from pathlib import Path
import torch.distributed as dist
import oobleck.checkpoint
dist.init_process_group("gloo")
out = Path(os.environ["OUT"]) / str(dist.get_rank())
out.mkdir(parents=True)
what = os.environ["WHAT"]
if what == "link":
    (out / "last").symlink_to("model.bin")
if what == "differs":
    (out / "model.bin").write_text(f"{dist.get_rank()}")
if what == "foreign":
    (out / "mine.txt").touch()
    oobleck.checkpoint.load_files(out)
oobleck.checkpoint.save_files(1, out)
"""


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("link", "/last is a link; save the directory with the files themselves"),
        ("differs", "model.bin is one file where rank 0 runs and another one where rank 1 runs; give them names"),
        ("foreign", " is there, and is none of its own; name another directory"),
        ("nothing", "there is no file in "),
    ],
)
def test_what_cannot_be_saved_or_replaced_is_refused_by_name_on_all_ranks(
    tmp_path: Path, what: str, error: str
) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OUT": str(tmp_path / "out"), "WHAT": what}
    for said in run(REFUSED, 2, fails=True, **where):
        assert error in said


def test_a_state_of_another_kind_is_refused_by_either_way_of_loading(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OUT": str(tmp_path / "out")}
    state = "import oobleck.checkpoint; oobleck.checkpoint.save(1, {'step': 1})"
    identity = {"OOBLECK_CHECKPOINT_SCRIPT": "x"}
    run(state, 1, **where, **identity)
    (said,) = run(LOAD, 1, fails=True, **where, **identity)
    assert "rank 0's part of the newest state was not saved by save_files" in said
