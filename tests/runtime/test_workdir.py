"""A working directory: which files of it travel, and how many bytes at most."""

from __future__ import annotations

import io
import os
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from oobleck.errors import UsageError
from oobleck.runtime.workdir import Workdir, files_of, pack

FILES = ("train.py", "pkg/__init__.py", "data/big.bin", ".gitignore", "pkg/__pycache__/x.pyc")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name in FILES:
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "project" / ".gitignore").write_text("data/\n__pycache__/\n")
    (tmp_path / "project" / "link").symlink_to("train.py")
    return tmp_path / "project"


def in_git(directory: Path) -> None:
    subprocess.run(["git", "init", "-q", str(directory)], check=True)


def test_what_git_ignores_stays_here(directory: Path) -> None:
    in_git(directory)
    assert sorted(files_of(directory)) == [".gitignore", "link", "pkg/__init__.py", "train.py"]


def test_a_subdirectory_of_a_repository_obeys_the_rules_above_it(directory: Path) -> None:
    in_git(directory)
    assert sorted(files_of(directory / "pkg")) == ["__init__.py"]


def test_a_repository_in_a_repository_travels_too_and_a_deleted_file_does_not(directory: Path) -> None:
    in_git(directory)
    inner = directory / "inner"
    inner.mkdir()
    in_git(inner)
    (inner / "module.py").touch()
    (directory / "gone.py").touch()
    subprocess.run(["git", "-C", str(directory), "add", "gone.py"], check=True)
    (directory / "gone.py").unlink()
    assert {"inner/module.py"} == set(files_of(directory)) - {".gitignore", "link", "pkg/__init__.py", "train.py"}


def test_without_a_repository_all_but_byte_code_travels(directory: Path) -> None:
    assert sorted(files_of(directory)) == [".gitignore", "data/big.bin", "link", "pkg/__init__.py", "train.py"]


def test_an_archive_has_the_files_and_a_digest_of_them(directory: Path) -> None:
    packed = pack(directory, (".",))
    assert packed.archive is not None
    with tarfile.open(fileobj=io.BytesIO(packed.archive)) as tar:
        assert tar.getmember("link").issym()
        assert tar.extractfile("train.py").read() == b"train.py"  # type: ignore[union-attr]
    os.utime(directory / "train.py", (1, 1))
    assert pack(directory, (".",)).digest == packed.digest, "the files are the same"
    (directory / "train.py").write_text("changed")
    assert pack(directory, (".",)).digest != packed.digest


def test_a_directory_that_is_too_large_is_refused_with_its_largest_files(directory: Path) -> None:
    (directory / "data/big.bin").write_bytes(bytes(3_000_000))
    with pytest.raises(UsageError, match=r"has 3 MB in 5 files, and at most 1 MB .* data/big.bin \(3.0 MB"):
        pack(directory, (".",), most_bytes=1_000_000)


def break_index(directory: Path) -> None:
    (directory / ".git/index").write_text("no index")


def break_link(directory: Path) -> None:
    (directory / ".git").rename(directory.parent / "moved")
    (directory / ".git").write_text("gitdir: /nowhere\n")


def give_away(directory: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a repository to another user")
    for path in (directory, directory / ".git"):
        os.chown(path, 65534, 65534)


def hide_git(directory: Path) -> None:
    os.environ["PATH"] = str(directory)


@pytest.mark.parametrize("spoil", [break_index, break_link, give_away, hide_git])
def test_a_repository_that_git_cannot_read_is_refused_since_ignored_files_would_travel(
    directory: Path, spoil: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_git(directory)
    monkeypatch.setenv("PATH", os.environ["PATH"])  # put back afterwards
    spoil(directory)
    with pytest.raises(UsageError, match=r"git does not say which files of .*project it ignores"):
        pack(directory, (".",))


def test_a_directory_that_git_ignores_is_refused_since_nothing_would_travel(directory: Path) -> None:
    in_git(directory)
    with pytest.raises(UsageError, match=r"nothing of .*/data would be copied, because git ignores all of it"):
        pack(directory / "data", (".",))


def test_a_submodule_that_is_not_checked_out_has_no_files(directory: Path) -> None:
    in_git(directory)
    (directory / "sub").mkdir()
    entry = f"160000,{'1' * 40},sub"
    subprocess.run(["git", "-C", str(directory), "update-index", "--add", "--cacheinfo", entry], check=True)
    assert sorted(files_of(directory)) == [".gitignore", "link", "pkg/__init__.py", "train.py"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user who may not read a directory")
@pytest.mark.parametrize("in_repository", [False, True])
def test_a_directory_that_cannot_be_read_is_named(
    directory: Path, monkeypatch: pytest.MonkeyPatch, *, in_repository: bool
) -> None:
    monkeypatch.setenv("HOME", str(directory))  # git reads its settings there
    if in_repository:
        in_git(directory)
    (directory / "closed").mkdir(mode=0)
    for above in directory.parents[:3]:
        above.chmod(0o755)
    for path in (directory, directory / ".git"):
        if path.exists():
            os.chown(path, 65534, 65534)
    os.seteuid(65534)
    try:
        with pytest.raises(UsageError, match=r"(cannot be read|could not open directory).*"):
            list(files_of(directory))
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("name", ["plain", "with space", '"', "$HOME", "`false`", "'"])
def test_a_shell_enters_the_copy_and_imports_from_folders_of_any_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    enter = Workdir(path=tmp_path, import_from=(".", name)).enter(PurePosixPath("~/.oobleck/run"))
    command = ["/bin/sh", "-c", f"{enter} && printenv PYTHONPATH"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONPATH": "before"})
    assert answer.stdout == f"{tmp_path}:{tmp_path}/{name}:before\n"


def test_a_folder_that_no_python_path_can_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot import from 'a:b', because of the ':' in it"):
        pack(tmp_path, (".", "a:b"))
    with pytest.raises(UsageError, match="cannot import from '/data/a:b'"):
        Workdir(path=Path("/data/a:b"))


def test_the_copy_belongs_to_its_node_s_user(directory: Path) -> None:
    packed = pack(directory, (".",))
    assert packed.archive is not None
    with tarfile.open(fileobj=io.BytesIO(packed.archive)) as tar:
        assert {(entry.uid, entry.uname, entry.gid, entry.gname) for entry in tar} == {(0, "", 0, "")}
