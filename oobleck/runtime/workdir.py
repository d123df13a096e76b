"""A directory of the user's that travels to nodes: its files in an archive, and the copy on a node.

A copy is in the run's directory there, under the digest of its contents, so that a node that has it gets nothing again.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shlex
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import trio

from oobleck.errors import NodeUnreachable, UsageError

from .files import path_in_shell
from .ssh import SSHConnection

MOST_BYTES = 256 << 20
_CHUNK_BYTES = 256 << 10
_LOOK_TIMEOUT_S = 30.0
_COPY_TIMEOUT_S = 600.0
VARIABLE = "OOBLECK_WORKDIR"
"""Has the digest of the files in all processes of a run, and so in its job: nodes that join must get the same files."""
_LEFT_OUT = frozenset({".git", "__pycache__"})
_SHOWN_FILES = 3
_ALL_TIMES_S = 1 << 30  # the same files have the same digest; of times near 0, tar warns
_NO_REPOSITORY = "not a git repository (or any"
"""What git says outside of repositories; it says "not a git repository:" of one that is broken."""
_UNREAD = "could not open directory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workdir:
    """A directory of this machine, and the place of its copy on nodes."""

    path: Path
    import_from: tuple[str, ...] = (".",)
    """Directories in it from which Python imports."""
    archive: bytes | None = None
    """Its files; None where nodes share this machine's."""
    digest: str = ""

    def __post_init__(self) -> None:
        places = [*self.import_from, *([str(self.path)] if self.archive is None else [])]
        if wrong := [place for place in places if os.pathsep in place]:
            raise UsageError(f"--workdir: Python cannot import from {wrong[0]!r}, because of the {os.pathsep!r} in it")

    @property
    def variables(self) -> dict[str, str]:
        return {VARIABLE: self.digest} if self.digest else {}

    def enter(self, run: PurePosixPath) -> str:
        """Return a POSIX shell's command that enters the copy in the directory of a run, where a node has it."""
        place = shlex.quote(str(self.path)) if self.archive is None else f"{path_in_shell(run)}/workdir"
        imports = ":".join(f'"$PWD"/{shlex.quote(name)}' if name != "." else '"$PWD"' for name in self.import_from)
        return f'cd {place} && export PYTHONPATH={imports}"${{PYTHONPATH:+:$PYTHONPATH}}"'

    async def send(self, node: str, connection: SSHConnection, run: PurePosixPath) -> None:
        """Copy the files to a node unless it has them. Raises NodeUnreachable."""
        if self.archive is None:
            return
        copies, link = f"{path_in_shell(run)}/.workdir", f"{path_in_shell(run)}/workdir"
        use = f"ln -sfn {shlex.quote(f'.workdir/{self.digest}')} {link}"
        try:
            known = await connection.run(_shell(f"[ -d {copies}/{self.digest} ] && {use}"), timeout_s=_LOOK_TIMEOUT_S)
            if known.exit_status == 0:
                return
            # Nodes of one home directory may unpack at the same time; one name then stands for equal files.
            unpack = (
                f'umask 077; mkdir -p {copies} && t=$(mktemp -d {copies}/.new.XXXXXX) && tar -xzf - -C "$t" && '
                f'{{ mv -T "$t" {copies}/{self.digest} 2>/dev/null || rm -rf "$t"; }} && [ -d {copies}/{self.digest} ] '
                f"&& {use} && for old in {copies}/*; do "
                f'[ "${{old##*/}}" = {self.digest} ] || rm -rf "$old"; done'
            )
            with trio.fail_after(_COPY_TIMEOUT_S):
                await self._stream(node, connection, _shell(unpack))
        except trio.BrokenResourceError as error:
            raise NodeUnreachable(node, f"--workdir cannot be copied there: {error}") from error
        except trio.TooSlowError as error:
            raise NodeUnreachable(node, f"--workdir was not copied there within {_COPY_TIMEOUT_S:g} s") from error

    async def _stream(self, node: str, connection: SSHConnection, command: str) -> None:
        assert self.archive is not None
        stream = await connection.open_command(command)
        async with stream:
            for place in range(0, len(self.archive), _CHUNK_BYTES):
                await stream.send_all(self.archive[place : place + _CHUNK_BYTES])
            await stream.send_eof()
            while await stream.receive_some():
                pass
            if (status := await stream.wait()) != 0:
                why = stream.errors.splitlines()[-1:] or [
                    "the connection was lost" if status is None else f"exit status {status}"
                ]
                raise NodeUnreachable(node, f"--workdir cannot be copied there: {why[0]}")


def _shell(script: str) -> str:
    return f"exec /bin/sh -c {shlex.quote(script)}"


def pack(path: Path, import_from: tuple[str, ...], *, most_bytes: int = MOST_BYTES) -> Workdir:
    """Archive a directory's files, without those that git ignores. Raises UsageError."""
    files = sorted(files_of(path))
    if not files and any(path.iterdir()):
        raise UsageError(f"--workdir: nothing of {path} would be copied, because git ignores all of it")
    sizes = {name: os.lstat(path / name).st_size for name in files}
    if (total := sum(sizes.values())) > most_bytes:
        largest = sorted(sizes, key=lambda name: -sizes[name])[:_SHOWN_FILES]
        shown = ", ".join(f"{name} ({sizes[name] / 1e6:,.1f} MB)" for name in largest)
        raise UsageError(
            f"--workdir: {path} has {total / 1e6:,.0f} MB in {len(files)} files, and at most "
            f"{most_bytes / 1e6:,.0f} MB are copied; name large ones in a .gitignore there (the largest: {shown})"
        )
    archive = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", compresslevel=1, mtime=0, filename="") as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for name in files:
            try:
                tar.add(path / name, arcname=name, recursive=False, filter=_of_nobody)
            except OSError as error:
                raise UsageError(f"--workdir: {path / name} cannot be read: {error.strerror or error}") from error
    digest = hashlib.sha256(archive.getvalue()).hexdigest()[:16]
    return Workdir(path=path, import_from=import_from, archive=archive.getvalue(), digest=digest)


def _of_nobody(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Drop the time, and the owner, to whom root's tar would give the copy."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mtime = _ALL_TIMES_S
    return entry


def files_of(directory: Path) -> Iterator[str]:
    """Yield the names of a directory's files and links: those that git would add or has, or else all.

    Raises UsageError for a directory that cannot be read, and for a repository about which git gives no answer.
    """
    listed = _listed_by_git(directory)
    if listed is None:
        for root, directories, names in os.walk(directory, onerror=_refuse):
            directories[:] = [name for name in directories if name not in _LEFT_OUT]
            # A link to a directory is a file here.
            links = [name for name in directories if os.path.islink(os.path.join(root, name))]
            inside = os.path.relpath(root, directory)
            yield from _kept(directory, [os.path.normpath(os.path.join(inside, name)) for name in names + links])
        return
    for name in listed:
        is_repository = os.path.isdir(directory / name) and not os.path.islink(directory / name)
        if is_repository and os.path.normpath(name) != ".":  # within this one; "." if it is not checked out
            yield from (os.path.join(name, inner) for inner in files_of(directory / name))
        elif not is_repository:
            yield from _kept(directory, [name])


def _refuse(error: OSError) -> None:
    raise UsageError(f"--workdir: {error.filename} cannot be read: {error.strerror}") from error


def _listed_by_git(directory: Path) -> list[str] | None:
    """Return the files of a directory in a repository that git does not ignore; None where there is no repository."""
    asked = ["git", "-C", str(directory), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        answer = subprocess.run(asked, capture_output=True, check=False, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        if not any((above / ".git").exists() for above in (directory, *directory.parents)):
            return None
        why = "git is not installed"
    else:
        why = answer.stderr.decode(errors="replace").strip()
        if answer.returncode and _NO_REPOSITORY in why:
            return None
        if not answer.returncode and _UNREAD not in why:
            return [*dict.fromkeys(filter(None, os.fsdecode(answer.stdout).split("\0")))]
    # To take all files would copy those that the repository ignores, which may be secrets.
    raise UsageError(f"--workdir: git does not say which files of {directory} it ignores: {why}")


def _kept(directory: Path, names: list[str]) -> Iterator[str]:
    for name in names:
        try:
            mode = os.lstat(directory / name).st_mode
        except OSError:  # git knows it, and it was deleted
            continue
        if stat.S_ISREG(mode) or stat.S_ISLNK(mode):
            yield name
