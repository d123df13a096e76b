"""Saves the files of a checkpoint that any framework has written, and lays them out again, on every node.

The ranks of a node see one directory, those of several nodes one each, or all a shared one. So ranks compare what they
see: each file is saved by one of the ranks that see it, and laid out by one rank of each directory.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch

from oobleck.errors import CorruptCheckpoint, PeerError, UsageError
from oobleck.storage import scripts
from oobleck.training import attempts
from oobleck.training.tensor_bytes import as_tensor
from oobleck.wire import decode_json, encode_json

from . import interface
from .loader import Found, Peers
from .tensors import Flat

_ENTRY = "files"
_MARK = ".oobleck-files"
"""Is in each directory that `load_files` has laid out."""
_CHUNK_BYTES = 1 << 26
_LEAST_ROOM = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    path: str
    """Within the directory."""
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _PartFiles:
    saver: int
    files: tuple[_File, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Served:
    parts: tuple[_PartFiles, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    path: str
    identity: tuple[int, int, int]
    """Its number in its file system, size, and time of change: ranks that see equal ones see one file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listing:
    files: tuple[_Seen, ...]
    problem: str = ""


def save_files(step: int, directory: str | os.PathLike[str], *, disk_every: int = 100) -> None:
    """Save all files of a directory, which this rank has written its own into. All ranks call this, for the same steps.

    The files may be on each node's own disk or in its memory, or on a shared disk. When this returns, they are saved as
    `save` saves a state, with copies on other nodes, and may be removed. O(size).

    Raises UsageError for links, and for a file that is another one on another node, and OSError.
    """
    root = Path(directory)
    attempts.check_attempt()
    rank, world_size = interface.place()
    peers = Peers(rank, world_size)
    peers.gather(b"")  # only now have all ranks written theirs
    mine = _own_files(peers, root)
    peers.close()
    flat, files, offset = Flat(), [], 0
    data = bytearray(_room_for(sum(size for _, size in mine)))
    for path, size in mine:
        with (root / path).open("rb") as file:
            num_read = file.readinto(memoryview(data)[offset : offset + size])
        if num_read != size:
            raise UsageError(f"oobleck.checkpoint.save_files: {root / path} was changed while it was read")
        files.append(_File(path=path, offset=offset, size=size))
        offset += size
    # Each rank's part is a piece that no other rank has.
    flat.shardings = (scripts.Sharding(device="cpu", mesh=(world_size,), names=(), cut=(0,)),)
    flat.tensors[_ENTRY] = torch.frombuffer(data, dtype=torch.uint8)
    flat.tree = encode_json(_PartFiles(saver=rank, files=tuple(files))).decode()
    interface.save_flat(step, flat, disk_every=disk_every)


def load_files(directory: str | os.PathLike[str]) -> int | None:
    """Lay the files of the newest state that all ranks have saved out in a directory; return its step, or None.

    All ranks call this, as `load`, with a directory that does not exist, or that this function has made before. The
    files are in it on every node. O(size).

    Raises UsageError if anything else is there, or the newest state has no files, and as `load` does.
    """
    root = Path(directory)
    if root.exists() and not (root / _MARK).exists() and (not root.is_dir() or any(root.iterdir())):
        raise UsageError(
            f"oobleck.checkpoint.load_files: {root} is there, and is none of its own; name another directory"
        )
    found = interface.find_newest()
    if found is None:
        return None
    parts = _listed(found)
    writers = _writers(found.peers, root)
    new = root.with_name(f".{root.name}.new")
    is_writer = found.peers.rank in writers
    if is_writer:
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir(parents=True)
    for saver, files in sorted(parts.items()):
        for file in files:
            _exchange(found, saver, file, writers, new)
    if is_writer:
        (new / _MARK).touch()
        shutil.rmtree(root, ignore_errors=True)
        os.replace(new, root)
    found.close()
    return found.chosen.note.step


# --- which files a rank saves ----------------------------------------------------------------------------------------


def _own_files(peers: Peers, root: Path) -> list[tuple[str, int]]:
    """Return the files that this rank saves, with their sizes. Raises UsageError, on all ranks alike."""
    try:
        mine = _Listing(files=tuple(sorted(_seen(root), key=lambda file: file.path)))
    except (UsageError, OSError) as error:
        mine = _Listing(files=(), problem=str(error))
    listings = [decode_json(_Listing, text) for text in peers.gather(encode_json(mine))]
    if problem := next((each.problem for each in listings if each.problem), ""):
        raise UsageError(f"oobleck.checkpoint.save_files: {problem}")
    viewers: dict[str, dict[tuple[int, int, int], list[int]]] = {}
    for rank, listing in enumerate(listings):
        for file in listing.files:
            viewers.setdefault(file.path, {}).setdefault(file.identity, []).append(rank)
    if not viewers:
        raise UsageError(f"oobleck.checkpoint.save_files: there is no file in {root}, on any rank")
    _compare(peers, root, {path: each for path, each in viewers.items() if len(each) > 1})
    owned = []
    for index, (path, each) in enumerate(sorted(viewers.items())):
        (_, size, _), ranks = next(iter(each.items()))
        if ranks[index % len(ranks)] == peers.rank:
            owned.append((path, size))
    return owned


def _seen(root: Path) -> Iterator[_Seen]:
    if not root.is_dir():
        return  # another node's ranks may have written all
    for place, directories, names in os.walk(root):
        for name in (*directories, *names):
            path = Path(place, name)
            if path.is_symlink():
                raise UsageError(f"{path} is a link; save the directory with the files themselves")
        for name in names:
            path = Path(place, name)
            stat = path.stat()
            relative = path.relative_to(root).as_posix()
            if relative != _MARK:
                yield _Seen(path=relative, identity=(stat.st_ino, stat.st_size, stat.st_mtime_ns))


def _compare(peers: Peers, root: Path, several: Mapping[str, Mapping[tuple[int, int, int], Sequence[int]]]) -> None:
    """See that files of one name are the same on all nodes. Raises UsageError, on all ranks alike."""
    if not several:
        return
    sums = {
        path: _crc32(root / path)
        for path, identities in several.items()
        if any(ranks[0] == peers.rank for ranks in identities.values())
    }
    all_sums = [json.loads(text) for text in peers.gather(json.dumps(sums).encode())]
    for path, identities in sorted(several.items()):
        first, *others = (ranks[0] for ranks in identities.values())
        for other in others:
            if all_sums[other][path] != all_sums[first][path]:
                raise UsageError(
                    f"oobleck.checkpoint.save_files: {path} is one file where rank {first} runs and another one where "
                    f"rank {other} runs; give them names of their own"
                )


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
    """Return the lowest rank of those that see each directory."""
    token = peers.gather(secrets.token_hex(8).encode())[0].decode()
    root.parent.mkdir(parents=True, exist_ok=True)
    probe = root.with_name(f".{root.name}.{token}.{peers.rank}")
    probe.touch()
    peers.gather(b"")
    seen = [int(path.name.rpartition(".")[2]) for path in root.parent.glob(f".{root.name}.{token}.*")]
    leaders = [int(text) for text in peers.gather(str(min(seen)).encode())]
    with suppress(OSError):
        probe.unlink()
    return sorted(set(leaders))


def _listed(found: Found) -> dict[int, tuple[_File, ...]]:
    """Return the files of each rank's part. Raises UsageError and CorruptCheckpoint."""
    served = _Served(parts=tuple(_files_of(saver, found.parts[saver].read()) for saver in found.served))
    parts = {}
    for text in found.peers.gather(encode_json(served)):
        for part in decode_json(_Served, text).parts:
            parts[part.saver] = part.files
    return parts


def _files_of(saver: int, tensors: scripts.Tensors) -> _PartFiles:
    try:
        part = decode_json(_PartFiles, json.loads(bytes(tensors[scripts.TREE][1])))
    except (KeyError, TypeError, ValueError, PeerError) as error:
        raise UsageError(
            f"oobleck.checkpoint.load_files: rank {saver}'s part of the newest state was not saved by save_files: "
            "load it as it was saved"
        ) from error
    for file in part.files:
        if PurePosixPath(file.path).is_absolute() or ".." in PurePosixPath(file.path).parts:
            raise CorruptCheckpoint(f"a saved file with the path {file.path!r}")
    return part


def _exchange(found: Found, saver: int, file: _File, writers: Sequence[int], new: Path) -> None:
    """Have all writers write a file of a part. All ranks call this, in the same order."""
    rank, server = found.peers.rank, found.servers[saver]
    if rank != server and rank not in writers:
        return
    target = new / file.path
    data = torch.empty(0, dtype=torch.uint8)
    if rank == server:
        data = as_tensor(*found.parts[saver].read()[_ENTRY])[file.offset : file.offset + file.size]
    if rank in writers:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    for start in range(0, file.size, _CHUNK_BYTES):
        num_bytes = min(_CHUNK_BYTES, file.size - start)
        requests = []
        if rank == server:
            chunk = data[start : start + num_bytes]
            requests = [found.peers.send(chunk, writer) for writer in writers if writer != server]
        else:
            chunk = torch.empty(num_bytes, dtype=torch.uint8)
            found.peers.receive(chunk, server)
        if rank in writers:
            with target.open("ab") as to:
                to.write(chunk.numpy().data)
        for request in requests:
            request.wait()
