"""Files that are written: errors that name the file, and no write that passes by the places that see to it."""

from __future__ import annotations

import ast
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.errors import ConfigError, WorkersUnavailable
from oobleck.host.writing import naming, write_in_place, write_whole
from oobleck.runtime.files import AgentDir, RunDirectory
from oobleck.runtime.launchers import make_key_files
from oobleck.runtime.profile_files import ProfileFiles
from tests.disks import fill, small_disk

PACKAGE = Path(__file__).parents[2] / "oobleck"

OWN_PROTOCOL = {
    "storage/layer_file.py": "forces what it writes to the disk; raises OSError, which saves survive",
    "storage/remote.py": "an object of a store, tried again; raises OSError, which saves survive",
    "storage/memory.py": "makes memory; raises OSError, which saves survive",
    "storage/scripts/part.py": "a mark in memory that has its room from the start",
    "runtime/agent/agent_process.py": "the log of an agent; ConfigError",
    "runtime/agent/checkpoint_store.py": "a mark in memory; without it, memory is given back a few days earlier",
    "runtime/agent/fork_client.py": "an empty file, as a lock; tried again",
    "runtime/agent/ranks.py": "empty files for the output of ranks; ConfigError",
    "cli/up/detached.py": "the log of a process; ConfigError",
    "runtime/ssh/known_hosts.py": "adds a line, as ssh does; SSH's own error",
    "runtime/workdir.py": "an archive in memory",
    "runtime/files/line_file.py": "lines; what is refused is kept and written later",
    "runtime/files/run_dir.py": "the lock; ConfigError",
    "runtime/journals/journal_file.py": "room for a line on a full disk; goes on without it",
    "runtime/journals/journal_image.py": "forces what it writes to the disk; OSError, without which the run goes on",
    "runtime/launchers/ray.py": "the log of a process; reported, and tried again",
    "runtime/launchers/slurm.py": "the log of a process; reported, and tried again",
    "runtime/processes/script_process.py": "the log of a process; without it there are no callbacks, as is said",
    "runtime/processes/master_process.py": "a pipe",
    "runtime/tensorboard_file.py": "events; OSError, without which the run goes on",
    "host/streams.py": "standard streams",
    "training/data/corpus.py": "an empty file, as a lock",
    "training/flash/files.py": "a checkpoint's files, beside where they belong until all are there; the rank fails",
    "cli/verify/both_ways.py": "the logs of two processes; the comparison ends",
    "training/forking/process_names.py": "the name of a process; without it, another is shown",
    "training/process/warmer.py": "an empty file, as a mark",
    "training/process/import_log.py": "names of imports; the script's imports go on",
    "training/process/node_probe.py": "measures a disk",
    "training/process/rank.py": "stacks, else thrown away; an error, else read from what the rank has printed; "
    "its output, handed to its agent where a disk takes none",
    "training/process/trainer_host.py": "the log of a process",
    "host/writing.py": "the others",
}
"""Modules that write by themselves, and what becomes of an error."""


def writes(tree: ast.Module) -> Iterator[str]:
    """The calls of a module that write a file's content, or make a file."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        text = ast.unparse(node)
        modes = {each.value for each in [*node.args, *(word.value for word in node.keywords)] if is_mode(each)}
        is_open = name == "open" and bool(modes or "O_WRONLY" in text or "O_CREAT" in text)
        if is_open or name in ("write_text", "write_bytes", "touch", "NamedTemporaryFile", "mkstemp"):
            yield f"{node.lineno}: {text[:100]}"


def is_mode(node: ast.expr) -> bool:
    """Whether it is how a file is opened for writing."""
    return isinstance(node, ast.Constant) and node.value in ("w", "wb", "a", "ab", "x", "xb", "r+", "r+b")


def test_no_module_writes_by_itself_but_those_that_say_what_becomes_of_an_error() -> None:
    found = {
        str(path.relative_to(PACKAGE)): list(writes(ast.parse(path.read_text())))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    writing = {module for module, calls in found.items() if calls}
    assert {module: found[module] for module in writing - OWN_PROTOCOL.keys()} == {}, "use oobleck.host.writing"
    assert OWN_PROTOCOL.keys() - writing == set(), "these write no more"


@pytest.mark.parametrize("write", [write_whole, write_in_place])
def test_an_error_of_a_write_names_the_file_and_leaves_nothing_half_written(tmp_path, write) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        write(disk / "kept", "before")
        fill(disk)
        with pytest.raises(OSError, match="No space left") as raised:
            write(disk / "new", "x" * 10_000)
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(disk / "new"))
        if write is write_whole:
            with pytest.raises(OSError, match="No space left"):
                write(disk / "kept", "x" * 10_000)
            assert sorted(path.name for path in disk.iterdir()) == ["filler", "kept"]
            assert (disk / "kept").read_text() == "before"


def test_a_file_is_for_its_user_alone(tmp_path) -> None:
    write_whole(tmp_path / "keys", b"secret")
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o600


def test_an_error_that_names_another_file_keeps_it(tmp_path) -> None:
    with pytest.raises(OSError, match="other") as raised, naming(tmp_path / "this"):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "other")
    assert raised.value.filename == "other"


# --- a run on a full disk ----------------------------------------------------------------------------------------


def test_a_run_that_cannot_take_its_lock_says_which_file_the_disk_refuses(tmp_path) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        run = RunDirectory(base_dir=disk, tag="t")
        run.create()
        fill(disk)
        with pytest.raises(ConfigError, match=r"t/lock: No space left"), run.lock():
            pass


def test_keys_that_the_disk_refuses_are_an_error_that_names_the_file(tmp_path, capsys) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "keys").mkdir(mode=0o700)
        fill(disk)
        with pytest.raises(ConfigError, match=r"keys/master\.json: No space left"):
            make_key_files(disk / "keys", master="host:1")
        assert main(["keys", str(disk / "keys"), "--master", "host:1"]) == 78
        assert "keys/master.json: No space left" in capsys.readouterr().err


def test_a_profile_that_the_disk_refuses_ends_nothing(tmp_path, caplog) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        files = ProfileFiles(disk)
        files.store("key", "{}" * 5000)
        assert files.load("key") is None
    assert "key.json: No space left" in caplog.text


def test_a_process_that_cannot_be_noted_is_not_begun_with(tmp_path, monkeypatch) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        monkeypatch.setenv("TMPDIR", str(disk))
        directory = AgentDir("run", "node0")
        directory.create()
        fill(disk)
        with pytest.raises(WorkersUnavailable, match=r"worker0\.pid: No space left"):
            directory.note_process("worker0", os.getpid())


def test_a_run_that_begins_on_a_full_disk_ends_with_an_error_that_names_a_file(tmp_path, capsys) -> None:
    """And with no traceback, and nothing started."""
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    with small_disk(tmp_path / "disk", "64k") as disk:
        (disk / "t").mkdir(mode=0o700)
        fill(disk)
        assert main(["run", "--base-dir", str(disk), "--tag", "t", str(script)]) == 78
    said = capsys.readouterr().err
    assert "t/lock: No space left" in said
    assert "Traceback" not in said
