from __future__ import annotations

import fcntl
import os
import shutil
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.files.agent_dir import AgentDir
from oobleck.runtime.files.private_paths import private_directory
from oobleck.runtime.files.process_id import ProcessId
from oobleck.runtime.files.run_dir import BASE_DIR_VARIABLE, RunDirectory, default_base_dir, default_tag

HOLD_THE_LOCK = """
import sys
from pathlib import Path
from oobleck.runtime.files.run_dir import RunDirectory
run = RunDirectory(base_dir=Path(sys.argv[1]), tag="t")
with run.lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def run_in(base_dir: Path, tag: str = "t") -> RunDirectory:
    return RunDirectory(base_dir=base_dir, tag=tag)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_the_base_directory_is_in_the_home_directory_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    monkeypatch.delenv(BASE_DIR_VARIABLE, raising=False)
    assert default_base_dir() == Path.home() / ".oobleck"
    monkeypatch.setenv(BASE_DIR_VARIABLE, str(tmp_path))
    assert default_base_dir() == tmp_path


def test_paths_are_below_the_base_directory_and_the_tag(tmp_path):
    run = run_in(tmp_path, "demo")
    assert run.path == tmp_path / "demo"
    assert run.journal == tmp_path / "demo" / "journal.jsonl"
    assert run.profile == tmp_path / "demo" / "profile"


def test_create_makes_private_directories_even_under_a_loose_umask(tmp_path):
    run = run_in(tmp_path / "deep" / "base")
    before = os.umask(0)
    try:
        run.create()
    finally:
        os.umask(before)
    assert [mode_of(path) for path in (run.base_dir, run.path, run.profile)] == [0o700] * 3
    run.create()


def test_create_makes_an_open_directory_private(tmp_path):
    run = run_in(tmp_path)
    run.path.mkdir(mode=0o755)
    run.create()
    assert mode_of(run.path) == 0o700


def test_a_base_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file/base: Not a directory"):
        run_in(tmp_path / "file" / "base").create()


def test_a_link_in_place_of_a_directory_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="a link"):
        private_directory(tmp_path / "link")


def test_a_deep_base_directory_gets_a_short_socket_path(tmp_path_factory, tmp_path, monkeypatch):
    runtime = tmp_path_factory.mktemp("r")  # its name is shorter than this test's
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    shallow, deep, other = run_in(Path("/b")), run_in(tmp_path / ("x" * 90)), run_in(tmp_path / ("y" * 90))
    assert shallow.control_socket == Path("/b/t/control.sock")
    assert deep.control_socket.parent == runtime / "oobleck"
    assert deep.control_socket != other.control_socket
    assert max(len(os.fsencode(run.control_socket)) for run in (deep, other)) <= 100


@pytest.mark.parametrize("variable", ["", "/" + "r" * 95])
def test_without_a_usable_runtime_directory_the_temporary_one_serves(tmp_path, monkeypatch, variable):
    monkeypatch.setenv("XDG_RUNTIME_DIR", variable)
    long = tmp_path / ("z" * 60)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    path = run_in(tmp_path / ("x" * 90)).control_socket
    assert path.parent == Path(f"/tmp/oobleck-{os.getuid()}")


def test_the_longest_tag_in_the_longest_base_directory_still_fits(tmp_path, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    for length in range(1, 200):
        run = RunDirectory(base_dir=Path("/" + "b" * length), tag="t" * 40)
        assert len(os.fsencode(run.control_socket)) <= 100


def test_a_second_run_with_the_same_tag_is_told_who_holds_it(tmp_path):
    run = run_in(tmp_path)
    run.create()
    command = [sys.executable, "-c", HOLD_THE_LOCK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with (
            pytest.raises(UsageError, match=rf"tag t .*{holder.pid}.*oobleck stop t"),
            run.lock(),
        ):
            pass
        holder.kill()
    with run.lock():  # the system has released it
        pass


def test_the_lock_can_be_taken_again_after_it_was_given_back(tmp_path):
    run = run_in(tmp_path)
    run.create()
    for _ in range(2):
        with run.lock():
            assert run.master == ProcessId.of(os.getpid())


def test_the_lock_of_a_run_that_is_removed_meanwhile_is_not_taken(tmp_path, monkeypatch):
    """Else a run of this lock and one of a new directory's would have the same tag."""
    run = run_in(tmp_path)
    run.create()
    take = fcntl.flock

    def removed_before(descriptor, operation):
        shutil.rmtree(run.path)
        run.create()
        (run.path / "lock").touch()
        take(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with pytest.raises(UsageError, match="just removed"), run.lock():
        pass
    monkeypatch.undo()
    with run.lock():
        pass


def test_an_existing_base_directory_keeps_its_mode(tmp_path):
    base = tmp_path / "shared"
    base.mkdir()
    base.chmod(0o1777)
    run_in(base).create()
    assert mode_of(base) == 0o1777
    assert mode_of(base / "t") == 0o700


def test_a_run_is_the_same_by_every_name_of_its_base_directory(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    (tmp_path / "link").symlink_to(scratch)
    monkeypatch.chdir(tmp_path)
    names = [scratch, tmp_path / "link", Path("link"), Path("scratch/../link/"), tmp_path / "link" / "." / ""]
    runs = [run_in(name) for name in names]
    runs[1].create()
    assert {run.path for run in runs} == {scratch / "t"}
    assert len({run.run_id for run in runs}) == len({run.control_socket for run in runs}) == 1


def test_a_master_on_another_machine_with_the_same_directory_takes_up_the_same_run(tmp_path, monkeypatch):
    (tmp_path / "other").mkdir()
    run = run_in(tmp_path)
    run.create()
    name, others = run.run_id, run_in(tmp_path / "other").run_id
    assert name != others
    monkeypatch.setattr(socket, "gethostname", lambda: "another-pod")
    run_in(tmp_path).create()
    assert run_in(tmp_path).run_id == name
    assert run_in(tmp_path / "other").run_id != others, "a directory of its own belongs to the machine"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be two users")
def test_tokenised_text_is_kept_apart_where_the_shared_one_is_of_another_user(tmp_path):
    run = run_in(tmp_path)
    assert run.cache == tmp_path / "cache"
    run.cache.mkdir()
    assert run.cache == tmp_path / "cache"
    os.chown(run.cache, 54_321, 54_321)
    assert run.cache == tmp_path / "t" / "cache"


def test_a_link_that_points_nowhere_yet_is_followed(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "scratch")
    run_in(tmp_path / "link").create()
    assert mode_of(tmp_path / "scratch" / "t") == 0o700


def test_a_base_directory_that_ssh_cannot_name_is_refused(tmp_path):
    name = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    with pytest.raises(ConfigError, match="UTF-8"):
        run_in(name).create()
    assert not name.exists()


def test_a_run_is_reached_from_terminals_with_another_runtime_directory(tmp_path, monkeypatch):
    base = tmp_path / ("x" * 90)
    for name in ("one", "other"):
        (tmp_path / name).mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "one"))
    run_in(base).create()
    before = run_in(base).control_socket
    assert before.parent == tmp_path / "one" / "oobleck"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "other"))
    assert run_in(base).control_socket == before
    run_in(base).create()  # the next master's
    assert run_in(base).control_socket.parent == tmp_path / "other" / "oobleck"


def test_agents_that_a_master_left_are_looked_for_where_they_are(tmp_path, monkeypatch):
    run = run_in(tmp_path / "base")
    run.create()
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "one"))
    assert run.pin_temporary_directory() == tmp_path / "one"
    AgentDir(run.run_id, "node0").create()
    left = AgentDir(run.run_id, "any").job_path
    monkeypatch.setenv("TMPDIR", str(tmp_path / "other"))
    assert run.pin_temporary_directory() == tmp_path / "one"
    shutil.rmtree(left)
    assert run.pin_temporary_directory() == tmp_path / "other"


def test_scripts_of_one_name_in_two_directories_have_two_tags_and_keep_them(tmp_path):
    """The first one keeps the name. The other one keeps its own, even when the first one's directory is gone."""
    first, second = "/a/train.py", "/b/train.py"
    for owner in (first, second, first, second):
        run = run_in(tmp_path, default_tag(tmp_path, "train", owner))
        run.create()
        run.note_owner(owner)
    assert default_tag(tmp_path, "train", first) == "train"
    apart = default_tag(tmp_path, "train", second)
    assert apart.startswith("train-")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", apart]
    shutil.rmtree(tmp_path / "train")
    assert default_tag(tmp_path, "train", second) == apart


def test_the_owner_of_a_tag_stays_its_owner(tmp_path):
    """A run of another script that names the tag does not become its owner."""
    run = run_in(tmp_path, "train")
    run.create()
    assert run.owner is None
    run.note_owner("/a/train.py")
    run.note_owner("/b/train.py")
    assert run.owner == "/a/train.py"


def test_a_long_name_leaves_room_for_what_tells_it_apart(tmp_path):
    run = run_in(tmp_path, "n" * 40)
    run.create()
    run.note_owner("/a")
    assert len(default_tag(tmp_path, "n" * 40, "/b")) == 40


def test_a_directory_where_all_users_write_is_not_made_private(tmp_path: Path) -> None:
    """Root owns /tmp and /dev/shm too, and all other users would lose them."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o1777)
    with pytest.raises(ConfigError, match="shared is where all users write"):
        private_directory(tmp_path / "shared")
    assert (tmp_path / "shared").stat().st_mode & 0o7777 == 0o1777
