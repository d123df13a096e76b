"""`oobleck.checkpoint.save_files` and `load_files`: the files of any framework, on one node and on several."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.disks import small_disk

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
import os, sys, threading
from pathlib import Path
import torch.distributed as dist
import oobleck.checkpoint
what = os.environ["WHAT"]
if what != "alone":
    dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
out = Path(os.environ["OUT"]) / str(rank)
out.mkdir(parents=True)
def deep():
    os.chdir(out)
    for _ in range(20):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    open("lost", "w").close()
def grow():
    with (out / "log").open("a") as file:
        while True:
            file.write("line")
            file.flush()
if what == "link":
    (out / "last").symlink_to("model.bin")
if what == "differs":
    (out / "model.bin").write_text(f"{rank}")
if rank == 0:
    if what == "pipe":
        os.mkfifo(out / "fifo")
    if what == "name":
        Path(os.fsdecode(bytes(out) + b"/\\xff")).touch()
    if what == "deep":
        deep()
    if what == "grows":
        threading.Thread(target=grow, daemon=True).start()
        while not (out / "log").exists():
            pass
    if what == "within":
        (out / "model").mkdir()
        (out / "model" / "weights").touch()
if what == "within" and rank == 1:
    (out / "model").touch()
try:
    if what == "foreign":
        (out / "mine.txt").touch()
        oobleck.checkpoint.load_files(out)
    if what == "theirs":
        if rank == 1:
            (out / "mine.txt").touch()
        oobleck.checkpoint.load_files(out)
    oobleck.checkpoint.save_files(-1 if what == "step" else 1, out)
finally:
    sys.stderr.flush()
    if what == "grows":
        import traceback
        traceback.print_exc()
        os._exit(1)
"""


@pytest.mark.parametrize(
    ("what", "error"),
    [
        ("link", "/last is a link; save the directory with the files themselves"),
        ("differs", "model.bin is one file where rank 0 runs and another one where rank 1 runs; give them names"),
        ("foreign", " is there, and is none of its own; name another directory"),
        ("nothing", "there is no file in "),
        ("theirs", "/1 is there, and is none of its own; name another directory"),
        ("pipe", "/0/fifo is neither a file nor a directory"),
        ("name", r"/0/\udcff' has a name that is not UTF-8"),
        ("deep", "File name too long"),
        ("grows", "/0/log was changed while it was read"),
        ("within", "model is a file where one rank runs and a directory where another runs"),
        ("alone", "oobleck.checkpoint.save_files: call it after torch.distributed.init_process_group()"),
        ("step", "oobleck.checkpoint.save_files: step -1 is not a whole number from 0"),
    ],
)
@pytest.mark.timeout(120)
def test_what_cannot_be_saved_or_replaced_is_refused_by_name_on_all_ranks(
    tmp_path: Path, what: str, error: str
) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OUT": str(tmp_path / "out"), "WHAT": what}
    for said in run(REFUSED, 2, fails=True, **where):
        assert error in said


SAVED_BY = {
    "save": "oobleck.checkpoint.save(1, {'step': 1})",
    "save_files": "Path(out, 'a').write_text('a'); oobleck.checkpoint.save_files(1, out)",
    "Writer": "dcp.save({'w': torch.ones(2)}, storage_writer=oobleck.dcp.Writer(1))",
}
SAVERS = {
    "save": "oobleck.checkpoint.save",
    "save_files": "oobleck.checkpoint.save_files",
    "Writer": "oobleck.dcp.Writer",
}
LOADED_BY = {
    "save": "oobleck.checkpoint.load",
    "save_files": "oobleck.checkpoint.load_files",
    "Writer": "oobleck.dcp.Reader",
}
CALLS = {
    "save": "oobleck.checkpoint.load()",
    "save_files": "oobleck.checkpoint.load_files(os.environ['OUT'] + '/again')",
    "Writer": "oobleck.dcp.Reader()",
}
ANY = """\
import os
from pathlib import Path
import torch, torch.distributed as dist
import torch.distributed.checkpoint as dcp
import oobleck.checkpoint, oobleck.dcp
dist.init_process_group("gloo")
out = os.environ["OUT"]
os.makedirs(out, exist_ok=True)
{call}
"""


@pytest.mark.parametrize("saved", list(SAVED_BY))
def test_a_state_is_loaded_by_its_own_call_alone_and_the_error_names_it(tmp_path: Path, saved: str) -> None:
    where = {
        "OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"),
        "OUT": str(tmp_path / "out"),
        "OOBLECK_CHECKPOINT_SCRIPT": "x",
    }
    run(ANY.format(call=SAVED_BY[saved]), 2, **where)
    for loaded in LOADED_BY:
        if loaded == saved:
            continue
        for said in run(ANY.format(call=CALLS[loaded]), 3, fails=True, **where):  # also a rank that reads no part
            assert (
                f"{LOADED_BY[loaded]}: the newest state is one of {SAVERS[saved]}; load it by {LOADED_BY[saved]}"
                in said
            )


FULL = """\
import os
from pathlib import Path
import torch.distributed as dist
import oobleck.checkpoint
dist.init_process_group("gloo")
rank = dist.get_rank()
out = Path(os.environ["OUT"].format(rank=rank))
if os.environ["WHAT"] == "save":
    (out / "old" / "empty").mkdir(parents=True)
    if rank == 0:
        (out / "old" / "model.bin").write_bytes(bytes(500_000))
    oobleck.checkpoint.save_files(7, out / "old")
else:
    again = out / "again"
    try:
        oobleck.checkpoint.load_files(again)
    finally:
        print([path.name for path in out.iterdir() if "again" in path.name], flush=True)
"""


def test_a_disk_that_files_do_not_fit_on_ends_the_load_on_all_ranks_and_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    with small_disk(tmp_path / "1", "100k"):
        where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OUT": f"{tmp_path}/{{rank}}"}
        run(FULL, 2, **where, WHAT="save")
        for said in run(FULL, 2, fails=True, **where, WHAT="load"):
            assert "No space left on device" in said
            assert "/1/.again.new/model.bin" in said
        assert not any("again" in path.name for path in (tmp_path / "1").iterdir()), "what was written is removed"


def test_empty_directories_and_a_directory_that_is_linked_to_are_laid_out_as_well(tmp_path: Path) -> None:
    where = {"OOBLECK_CHECKPOINT_DIR": str(tmp_path / "disk"), "OUT": str(tmp_path / "{rank}")}
    run(FULL, 2, **where, WHAT="save")
    (tmp_path / "scratch").mkdir()
    (tmp_path / "1" / "again").symlink_to(tmp_path / "scratch")
    for _ in range(2):
        run(FULL, 2, **where, WHAT="load")
        for place in (tmp_path / "0" / "again", tmp_path / "scratch"):
            assert (place / "empty").is_dir()
            assert (place / "model.bin").stat().st_size == 500_000
    assert (tmp_path / "1" / "again").is_symlink()
