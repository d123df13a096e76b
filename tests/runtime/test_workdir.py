"""A working directory: which files of it travel, and how many bytes at most."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from oobleck.errors import UsageError
from oobleck.runtime.workdir import files_of, pack

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
    assert pack(directory, (".",)).digest == packed.digest
    (directory / "train.py").write_text("changed")
    assert pack(directory, (".",)).digest != packed.digest


def test_a_directory_that_is_too_large_is_refused_with_its_largest_files(directory: Path) -> None:
    (directory / "data/big.bin").write_bytes(bytes(3_000_000))
    with pytest.raises(UsageError, match=r"has 3 MB in 5 files, and at most 1 MB .* data/big.bin \(3.0 MB"):
        pack(directory, (".",), most_bytes=1_000_000)
