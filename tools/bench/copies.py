"""How fast a part of a state goes to another node's memory, against a plain connection and a file.

    python tools/bench/copies.py --mib 256 --turns 5

In turns: `sendfile` from shared memory into a buffer, over the same loopback and without checks; a copy, with its
proofs, its checksums and a slot of the receiver's memory; two parts that are mixed to their parity there (`--copies
xor:2`); one of these two that is made again from the parity and the other; and the part read from a file in
`--directory`, of which the system's cache has nothing. The receiver is a process of its own. A node that has lost its
part gets it back by a copy in the other direction.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from io import RawIOBase
from pathlib import Path

import trio

sys.path.insert(0, str(Path(__file__).parents[2]))  # run as a script, it finds its neighbours

from oobleck.control.protocol import CopyDoor, Mix
from oobleck.runtime.agent.copies import CopyPort, Pace, send_part
from oobleck.storage import FlashMemory, Layout, MappedFiles, Slot, TensorSpec
from oobleck.storage.scripts import PartNote, state_name
from oobleck.wire import encode_json
from tools.bench.checkpoint import forget_pages
from tools.smoke import parse_arguments


def main() -> None:
    """Measure in turns, and print the medians."""
    options = _parse()
    directory = Path(tempfile.mkdtemp(prefix="copies-bench", dir="/dev/shm"))
    plain = socket.create_server(("127.0.0.1", 0))
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        _receive_all(directory / "target", plain, writes, options.mib << 20)
    try:
        line = json.loads(os.read(reads, 1 << 12))
        door = CopyDoor(node="target", host="127.0.0.1", port=line["port"], ticket=bytes.fromhex(line["ticket"]))
        size = options.mib << 20
        layout = Layout.of({0: [TensorSpec(name="weight", dtype="U8", shape=(size,))]}, metadata={})
        memories = [FlashMemory.create(directory / f"rank{rank}.1", layout) for rank in (0, 1)]
        parity, pace = Mix(ranks=(0, 1), num_bytes=layout.size_bytes), Pace(1e13)
        plain_s, copies_s, mixed_s, made_s, read_s = [], [], [], [], []
        for turn in range(options.turns):
            slots = [_saved(memory, rank, step=turn + 1) for rank, memory in enumerate(memories)]
            plain_s.append(_timed(_send_plain, slots[0], plain.getsockname()))
            copies_s.append(_timed(send_part, slots[0], door, pace))
            mixed_s.append(sum(_timed(send_part, slot, door, pace, parity) for slot in slots) / 2)
            made_s.append(_timed(send_part, slots[0], door, pace, replace(parity, missing=1)))
            read_s.append(_read_from_disk(slots[0], options.directory))
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        shutil.rmtree(directory)
    first, *rates = (
        options.mib / 1024 / statistics.median(times_s) for times_s in (plain_s, copies_s, mixed_s, made_s, read_s)
    )
    print(f"part of {options.mib} MiB, {options.turns} turns: plain {first:.2f} GiB/s, copy {rates[0]:.2f} GiB/s")
    for what, rate in zip(("copy", "parity", "lost part"), rates, strict=False):
        print(f"{what} against plain: {rate / first:.2f}")
    print(f"copy against a file that is not in the cache ({rates[3]:.2f} GiB/s): {rates[0] / rates[3]:.1f}")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--mib", type=int, default=256, help="size of the part")
    parser.add_argument("--turns", type=int, default=5, help="how often each is sent")
    parser.add_argument("--directory", type=Path, default=tempfile.gettempdir(), help="where the file is")
    return parse_arguments(parser, mib=1, turns=1)


def _receive_all(directory: Path, plain: socket.socket, writes: int, size: int) -> None:
    directory.mkdir()
    threading.Thread(target=_receive_plain, args=(plain, size), daemon=True).start()

    async def receive() -> None:
        port = CopyPort(MappedFiles(directory), frozenset)
        door = await port.listen("target", "127.0.0.1")
        os.write(writes, json.dumps({"port": door.port, "ticket": door.ticket.hex()}).encode())
        await port.run()

    trio.run(receive)


def _receive_plain(plain: socket.socket, size: int) -> None:
    buffer = memoryview(bytearray(size))
    while True:
        sock, _ = plain.accept()
        with sock:
            received = 0
            while received < size:
                received += sock.recv_into(buffer[received:])
            sock.sendall(b"1")


def _saved(memory: FlashMemory, rank: int, *, step: int) -> Slot:
    slot = memory.next_slot()
    slot.begin()
    slot.data[:] = os.urandom(1 << 20) * (len(slot.data) >> 20)
    note = PartNote(
        name=state_name(step, "s1-bench"), step=step, start="s1-bench", rank=rank, world_size=2, number=step,
        saved_at="", is_planned=False, shardings=(),
    )  # fmt: skip
    slot.seal(encode_json(note))
    slot.sum()
    return slot


def _send_plain(slot: Slot, address: tuple[str, int]) -> None:
    with slot.memory.path.open("rb") as file, socket.create_connection(address) as sock:
        sock.sendfile(file, slot.offset, len(slot.data))
        sock.recv(1)


def _read_from_disk(slot: Slot, directory: Path) -> float:
    """Return the seconds in which a part is read from a file, into memory that was written before."""
    buffer = bytearray(slot.data)
    with tempfile.NamedTemporaryFile(dir=directory) as file:
        file.write(buffer)
        file.flush()
        os.fsync(file.fileno())
        forget_pages(Path(file.name))
        with open(file.name, "rb", buffering=0) as again:
            return _timed(_read_all, again, memoryview(buffer))


def _read_all(file: RawIOBase, buffer: memoryview) -> None:
    while len(buffer):
        buffer = buffer[file.readinto(buffer) or len(buffer) :]


def _timed(act: Callable[..., object], *arguments: object) -> float:
    began_s = time.perf_counter()
    act(*arguments)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main()
