"""Saves the files of a checkpoint that any framework has written, and lays them out again, on every node.

The ranks of a node see one directory, those of several nodes one each, or all a shared one. So ranks compare what they
see: each file is saved by one of the ranks that see it, and laid out by one rank of each directory.
"""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from oobleck.errors import CorruptCheckpoint, UsageError
from oobleck.host.writing import naming
from oobleck.storage import scripts
from oobleck.training.tensor_bytes import as_tensor
from oobleck.wire import decode_json, encode_json

from . import interface
from .loader import Found, Peers
from .tensors import Flat

_SAVE, _LOAD = "oobleck.checkpoint.save_files", "oobleck.checkpoint.load_files"
_ENTRY = "files"
_MARK = ".oobleck-files"
"""Is in each directory that `load_files` has laid out."""
_CHUNK_BYTES = 1 << 26
_LEAST_ROOM = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: str
    """Within the directory; that of an empty directory ends with a slash."""
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFiles:
    """What a rank's part says of its files."""

    saver: int
    files: tuple[_File, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    path: str
    identity: tuple[int, int, int]
    """Its number in its file system, size, and time of change: ranks that see equal ones see one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    files: tuple[_Seen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    message: str
    errno: int
    """0 unless the system has raised it."""


def save_files(step: int, directory: str | os.PathLike[str], *, disk_every: int = 100) -> None:
    """Save all files of a directory, which this rank has written its own into. All ranks call this, for the same steps.

    The files may be on each node's own disk or in its memory, or on a shared disk. When this returns, they are saved as
    `save` saves a state, with copies on other nodes, and may be removed. O(size).

    Raises UsageError for what it cannot save (links, pipes), a file that changes meanwhile, and one that is another one
    on another node, and OSError: on all ranks alike.
    """
    interface.check_step(_SAVE, step, disk_every)
    root = Path(directory)
    peers = interface.all_ranks(_SAVE)
    peers.gather(b"")  # only now have all ranks written theirs
    with _agreed(peers, _SAVE):
        listing = _Listing(files=tuple(sorted(_seen(root), key=lambda file: file.path)))
    mine = _own_files(peers, root, listing)
    with _agreed(peers, _SAVE):
        files, data = _read(root, mine)
    peers.close()
    # Each rank's part is a piece that no other rank has.
    flat = Flat(shardings=(scripts.Sharding(device="cpu", mesh=(peers.world_size,), names=(), cut=(0,)),))
    flat.tensors[_ENTRY] = torch.frombuffer(data, dtype=torch.uint8)
    flat.tree = encode_json(PartFiles(saver=peers.rank, files=files)).decode()
    interface.save_flat(step, flat, disk_every=disk_every)


def load_files(directory: str | os.PathLike[str]) -> int | None:
    """Lay the files of the newest state that all ranks have saved out in a directory; return its step, or None.

    All ranks call this, as `load`, with a directory that does not exist, or that this function has made before. The
    files are in it on every node. O(size).

    Raises UsageError if anything else is there, or the newest state has no files, and as `load` does.
    """
    peers = interface.all_ranks(_LOAD)
    with _agreed(peers, _LOAD):
        root = Path(directory).resolve()
        if root.exists() and not (root / _MARK).exists() and (not root.is_dir() or any(root.iterdir())):
            raise UsageError(f"{root} is there, and is none of its own; name another directory")
    peers.close()
    found = interface.find_newest()
    if found is None:
        return None
    parts = sorted((_part_of(text) for text in found.texts(_LOAD)), key=lambda part: part.saver)
    new = root.with_name(f".{root.name}.new")
    writers = _writers(found.peers, root)
    problem: OSError | None = None
    with _agreed(found.peers, _LOAD):
        if found.peers.rank in writers:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
    for part in parts:
        for file in part.files:
            # A rank whose disk is full goes on to receive, so that no other one waits for it.
            problem = _exchange(found, part.saver, file, writers, None if problem else new) or problem
    with _agreed(found.peers, _LOAD):
        if found.peers.rank in writers:
            _take_place(new, root, problem)
    found.close()
    return found.chosen.note.step


@contextmanager
def _agreed(peers: Peers, call: str) -> Iterator[None]:
    """Raise on all ranks, which leave this together and close their peers, what any of them raises in here."""
    mine: _Problem | None = None
    try:
        yield
    except (UsageError, OSError) as error:
        mine = _Problem(
            message=str(error).encode(errors="backslashreplace").decode(), errno=getattr(error, "errno", None) or 0
        )
    answers = peers.gather(encode_json(mine) if mine else b"")
    problem = next((decode_json(_Problem, answer) for answer in answers if answer), None)
    if problem is None:
        return
    peers.close()
    if problem.errno:
        raise OSError(problem.errno, f"{call}: {problem.message}")
    raise UsageError(f"{call}: {problem.message}")


# --- which files a rank saves ----------------------------------------------------------------------------------------


def _own_files(peers: Peers, root: Path, listing: _Listing) -> list[_Seen]:
    """Return the files that this rank saves. Raises UsageError and OSError, on all ranks alike."""
    listings = [decode_json(_Listing, text) for text in peers.gather(encode_json(listing))]
    viewers: dict[str, dict[tuple[int, int, int], list[int]]] = {}
    for rank, seen in enumerate(listings):
        for file in seen.files:
            viewers.setdefault(file.path, {}).setdefault(file.identity, []).append(rank)
    several = {path: each for path, each in viewers.items() if len(each) > 1}
    with _agreed(peers, _SAVE):
        if not viewers:
            raise UsageError(f"there is no file in {root}, on any rank")
        _check_parents(viewers)
        sums = {
            path: _crc32(root / path)
            for path, identities in several.items()
            if any(ranks[0] == peers.rank for ranks in identities.values())
        }
    with _agreed(peers, _SAVE):
        _compare([json.loads(text) for text in peers.gather(json.dumps(sums).encode())], several)
    owned = []
    for index, (path, each) in enumerate(sorted(viewers.items())):
        identity, ranks = next(iter(each.items()))
        if ranks[index % len(ranks)] == peers.rank:
            owned.append(_Seen(path=path, identity=identity))
    return owned


def _seen(root: Path) -> Iterator[_Seen]:
    if not root.is_dir():
        return  # another node's ranks may have written all
    for place, directories, names in os.walk(root, onerror=_raise):
        for name in (*directories, *names):
            path = Path(place, name)
            if path.is_symlink():
                raise UsageError(f"{path} is a link; save the directory with the files themselves")
            if not path.is_dir() and not path.is_file():
                raise UsageError(f"{path} is neither a file nor a directory; remove it, or save another directory")
        if not directories and not names and Path(place) != root:
            yield _Seen(path=_within(Path(place), root) + "/", identity=(0, 0, 0))
        for name in names:
            path = Path(place, name)
            if (relative := _within(path, root)) != _MARK:
                yield _Seen(path=relative, identity=_identity(path.stat()))


def _raise(error: OSError) -> None:
    raise error


def _within(path: Path, root: Path) -> str:
    relative = path.relative_to(root).as_posix()
    try:
        relative.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"{str(path)!a} has a name that is not UTF-8; rename it") from error
    return relative


def _identity(stat: os.stat_result) -> tuple[int, int, int]:
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _check_parents(paths: Iterable[str]) -> None:
    """Raise UsageError where a path lies below one that is a file elsewhere."""
    files = {path for path in paths if not path.endswith("/")}
    for path in sorted(paths):
        above = {path.rstrip("/")} - {path} | {each.as_posix() for each in PurePosixPath(path).parents}
        for file in sorted(above & files):
            raise UsageError(
                f"{file} is a file where one rank runs and a directory where another runs; give them names of their own"
            )


def _compare(
    sums: Sequence[Mapping[str, list[int]]], several: Mapping[str, Mapping[tuple[int, int, int], Sequence[int]]]
) -> None:
    """See that files of one name are the same on all nodes. Raises UsageError, on all ranks alike."""
    for path, identities in sorted(several.items()):
        first, *others = (ranks[0] for ranks in identities.values())
        for other in others:
            if sums[other][path] != sums[first][path]:
                raise UsageError(
                    f"{path} is one file where rank {first} runs and another one where rank {other} runs; give them "
                    "names of their own"
                )


def _read(root: Path, seen: Sequence[_Seen]) -> tuple[tuple[_File, ...], bytearray]:
    """Read these files, one after the other. Raises UsageError for one that is changed meanwhile, and OSError."""
    files, offset = [], 0
    data = bytearray(_room_for(sum(file.identity[1] for file in seen)))
    for file in seen:
        path, size = root / file.path, file.identity[1]
        if not file.path.endswith("/"):
            with path.open("rb") as opened:
                num_read = opened.readinto(memoryview(data)[offset : offset + size])
                if num_read != size or _identity(os.fstat(opened.fileno())) != file.identity:
                    raise UsageError(f"{path} was changed while it was read; save once all ranks have written theirs")
        files.append(_File(path=file.path, offset=offset, size=size))
        offset += size
    return tuple(files), data


def _crc32(path: Path) -> list[int]:
    total, size = 0, 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            total, size = zlib.crc32(chunk, total), size + len(chunk)
    return [total, size]


def _room_for(num_bytes: int) -> int:
    """Return a size that stays the same while files grow a little: another one would need another memory file."""
    step = max(_LEAST_ROOM, 1 << max(0, num_bytes.bit_length() - 4))
    return -(-max(1, num_bytes) // step) * step


# --- which rank lays them out ----------------------------------------------------------------------------------------


def _writers(peers: Peers, root: Path) -> list[int]:
    """Return the lowest rank of those that see each directory. Raises OSError, on all ranks alike."""
    token = peers.gather(secrets.token_hex(8).encode())[0].decode()
    probe = root.with_name(f".{root.name}.{token}.{peers.rank}")
    with _agreed(peers, _LOAD):
        root.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
    with _agreed(peers, _LOAD):
        seen = [int(path.name.rpartition(".")[2]) for path in root.parent.glob(f".{glob.escape(root.name)}.{token}.*")]
    leaders = [int(text) for text in peers.gather(str(min(seen)).encode())]
    with suppress(OSError):
        probe.unlink()
    return sorted(set(leaders))


def _part_of(text: str) -> PartFiles:
    part = decode_json(PartFiles, text)
    for file in part.files:
        if PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts:
            raise CorruptCheckpoint(f"a saved file with the path {file.path!r}")
    return part


def _exchange(found: Found, saver: int, file: _File, writers: Sequence[int], new: Path | None) -> OSError | None:
    """Have all writers write a file of a part below `new`; return what went wrong. All ranks call this, in order."""
    rank, server = found.peers.rank, found.servers[saver]
    if rank != server and rank not in writers:
        return None
    data = torch.empty(0, dtype=torch.uint8)
    if rank == server:
        data = as_tensor(*found.parts[saver].read()[_ENTRY])[file.offset : file.offset + file.size]
    target = _Target(new / file.path if new is not None and rank in writers else None, file)
    for start in range(0, file.size, _CHUNK_BYTES):
        num_bytes = min(_CHUNK_BYTES, file.size - start)
        requests = []
        if rank == server:
            chunk = data[start : start + num_bytes]
            requests = [found.peers.send(chunk, writer) for writer in writers if writer != server]
        else:
            chunk = torch.empty(num_bytes, dtype=torch.uint8)
            found.peers.receive(chunk, server)
        target.add(chunk.numpy().data)
        for request in requests:
            request.wait()
    return target.problem


class _Target:
    """A file as it is written, until something goes wrong."""

    def __init__(self, path: Path | None, file: _File) -> None:
        """Write nothing without a path."""
        self._path = path
        self.problem: OSError | None = None
        with self._kept():
            if path is not None and file.path.endswith("/"):
                path.mkdir(parents=True, exist_ok=True)
            elif path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.touch()

    def add(self, data: memoryview) -> None:
        with self._kept():
            if self._path is not None and self.problem is None:
                with naming(self._path), self._path.open("ab") as to:
                    to.write(data)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.problem = error


def _take_place(new: Path, root: Path, problem: OSError | None) -> None:
    """Give a directory its name, in which all went well. Raises OSError, and removes it, if something did not."""
    try:
        if problem is not None:
            raise problem
        (new / _MARK).touch()
        shutil.rmtree(root, ignore_errors=True)
        new.replace(root)
    except OSError:
        shutil.rmtree(new, ignore_errors=True)
        raise
