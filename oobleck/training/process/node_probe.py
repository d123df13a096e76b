"""The probe of a node check: `python -m oobleck.training.process.node_probe`, started over SSH, one on each node.

It exchanges frames on its standard streams, measures on request, and ends with its input.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, assert_never

import torch
from torch._C._distributed_c10d import AllgatherOptions, PrefixStore, ProcessGroupGloo

from oobleck import __version__
from oobleck.control import node_check
from oobleck.host.machine import this_machine
from oobleck.training.comm import RendezvousStore, RendezvousTable, open_device
from oobleck.wire import FrameDecoder, encode_frame

from .errors import first_line
from .gpu_probe import measure_gpus

_WINDOW_S = 0.25  # longer than the period of a CPU quota (0.1 s), which would go unseen otherwise
_NUM_WINDOWS = 3
_MATRIX = 512
_COPY_BYTES = 32 << 20
_DISK_BYTES = 16 << 20
_LOOPBACK_BYTES = 16 << 20
_EXCHANGE_BYTES = 8 << 20
_NUM_EXCHANGES = 5
_PACKAGES = ("torch", "transformers", "trio", "numpy")


def main() -> None:
    """Serve requests until the input ends; never returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--node", required=True)
    parser.add_argument("--directory", type=Path, required=True)
    arguments = parser.parse_args()
    output = os.dup(1)
    os.dup2(2, 1)  # libraries that print must not break the frames
    wanted = arguments.directory.expanduser()
    # A run's directory may not exist yet; its nearest parent is on the same disk.
    directory = next(path for path in (wanted, *wanted.parents) if path.is_dir())
    probe = _Probe(arguments.node, directory, output)
    try:
        probe.run()
    except BaseException as error:  # noqa: BLE001  a process main: the checker gets the reason, whatever it was
        probe.answer(node_check.ProbeFailed(reason=str(error) or first_line(error)))
    os._exit(0)  # threads that wait for lost peers cannot be joined


class _Probe:
    def __init__(self, node: str, directory: Path, output: int) -> None:
        self._node = node
        self._directory = directory
        self._output = output
        self._writing = threading.Lock()
        self._rendezvous = RendezvousTable()

    def run(self) -> None:
        """Describe the node, then answer requests until the input ends."""
        with _listening() as path:
            self.answer(_facts(self._directory, path))
            decoder: FrameDecoder[node_check.ProbeRequest] = FrameDecoder(node_check.ProbeRequest)
            while data := os.read(0, 1 << 16):
                for request in decoder.feed(data):
                    self._handle(request)

    def answer(self, message: node_check.ProbeAnswer) -> None:
        """Send a message from any thread."""
        frame = encode_frame(message)
        with self._writing:
            while frame:
                frame = frame[os.write(self._output, frame) :]

    def _handle(self, request: node_check.ProbeRequest) -> None:
        match request:
            case node_check.PairValue(key=key, value=value):
                self._rendezvous.put(key, value, generation=0)
            case node_check.MeasureAlone():
                self._in_background(self._measure_alone)
            case node_check.MeasurePair():
                self._in_background(lambda: self._measure_pair(request))
            case _:
                assert_never(request)

    def _in_background(self, measure: Callable[[], node_check.ProbeAnswer]) -> None:
        # The peer's values arrive during a measurement, and a peer that hangs must hold up nothing else.
        def run() -> None:
            try:
                self.answer(measure())
            except BaseException as error:  # noqa: BLE001  a thread's main: the checker gets the reason, whatever it was
                self.answer(node_check.ProbeFailed(reason=first_line(error)))

        threading.Thread(target=run, daemon=True).start()

    def _measure_alone(self) -> node_check.SoloDone:
        gpus: tuple[node_check.GpuFacts, ...] = ()
        try:
            gpus = measure_gpus()  # first: the answer has them even if another measurement fails
            seconds = {
                "compute": _compute_s(),
                "memory": _memory_s(),
                "loopback": _best_s(_loopback, _NUM_WINDOWS),
                "disk": _best_s(lambda: _write(self._directory), 2),
            }
        except (RuntimeError, OSError) as error:
            return node_check.SoloDone(gpus=gpus, error=f"{type(error).__name__}: {error}")
        return node_check.SoloDone(seconds=seconds, gpus=gpus)

    def _measure_pair(self, request: node_check.MeasurePair) -> node_check.PairDone:
        """Time all-gathers between two nodes: of one byte, and of 8 MiB each way."""

        def send(key: str, value: bytes) -> None:
            self.answer(node_check.PairValue(key=key, value=value, nodes=request.nodes))

        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # not in torch's stubs
        options._timeout = timedelta(seconds=request.timeout_s)
        store = RendezvousStore(self._rendezvous, send, request.timeout_s, group=request.key)
        try:
            options._devices = [open_device(request.address)]
            rank = request.nodes.index(self._node)
            group: Any = ProcessGroupGloo(PrefixStore(request.key, store), rank, 2, options)
            latency_s, seconds = _gather_s(group, 1), _gather_s(group, _EXCHANGE_BYTES)
        except (RuntimeError, OSError) as error:  # a timeout is an OSError
            return node_check.PairDone(key=request.key, error=str(error).splitlines()[0])
        return node_check.PairDone(key=request.key, seconds=seconds, latency_s=latency_s)


def _gather_s(group: Any, num_bytes: int) -> float:
    """Return the seconds of the fastest of several all-gathers. Raises RuntimeError for wrong bytes too."""
    # Both nodes send the same bytes, so each knows what it must receive.
    ours = torch.arange(num_bytes, dtype=torch.int64).to(torch.uint8)
    theirs = [torch.empty_like(ours), torch.empty_like(ours)]

    def gather() -> None:
        group.allgather([theirs], [ours], AllgatherOptions()).wait()

    best_s = _best_s(gather, _NUM_EXCHANGES)
    if not all(torch.equal(ours, received) for received in theirs):
        raise RuntimeError("the data received differ from the data sent")
    return best_s


def _compute_s() -> float:
    """Return the seconds of one matrix product on the slowest device. Raises RuntimeError for a wrong one."""
    if not torch.cuda.is_available():
        return _products_s(torch.device("cpu"), _MATRIX)
    return max(_products_s(torch.device("cuda", index), 8 * _MATRIX) for index in range(torch.cuda.device_count()))


def _products_s(device: torch.device, size: int) -> float:
    # Whole numbers this small are exact in any order of summation, so a product that differs is a fault.
    left = torch.eye(size, device=device) * 2
    right = torch.arange(size * size, device=device, dtype=torch.float32).reshape(size, size).remainder_(97)
    if not torch.equal(left @ right, right * 2):
        raise RuntimeError(f"{device}: a matrix product is wrong")

    def work() -> None:
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return _window_s(work)


def _memory_s() -> float:
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8)
    target = torch.empty_like(source)
    return _window_s(lambda: target.copy_(source))


def _window_s(work: Callable[[], object]) -> float:
    """Return the seconds of a piece of work: the mean over a window, in the best of several windows."""

    def mean_s() -> float:
        began_s, count = time.perf_counter(), 0
        while (elapsed_s := time.perf_counter() - began_s) < _WINDOW_S or not count:
            work()
            count += 1
        return elapsed_s / count

    work()
    # Other work on the machine makes some windows longer, a slow node all of them.
    return min(mean_s() for _ in range(_NUM_WINDOWS))


def _best_s(work: Callable[[], object], times: int) -> float:
    def once_s() -> float:
        began_s = time.perf_counter()
        work()
        return time.perf_counter() - began_s

    return min(once_s() for _ in range(times))


def _write(directory: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".check") as file:
        file.write(b"\xa5" * _DISK_BYTES)
        file.flush()
        # Otherwise the page cache would be timed.
        os.fsync(file.fileno())


def _loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as sender:
        receiver, _ = server.accept()
        with receiver:
            # The socket's buffers hold less than this, so one thread could not both send and receive.
            sending = threading.Thread(target=sender.sendall, args=(bytes(_LOOPBACK_BYTES),))
            sending.start()
            buffer, missing = bytearray(1 << 18), _LOOPBACK_BYTES
            while missing:
                received = receiver.recv_into(buffer)
                if not received:
                    raise OSError("the loopback connection ended early")
                missing -= received
            sending.join()


@contextmanager
def _listening() -> Iterator[str]:
    """Listen at a UNIX socket where agents would; yields its path. Raises OSError."""
    with (
        tempfile.TemporaryDirectory(prefix="oobleck-check-") as directory,
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener,
    ):
        path = f"{directory}/agent.sock"
        try:
            listener.bind(path)
        except OSError as error:
            raise OSError(f"no socket can be made at {path}: {error}; set TMPDIR there to another directory") from error
        listener.listen()
        yield path


def _facts(directory: Path, path: str) -> node_check.NodeFacts:
    machine = this_machine()
    return node_check.NodeFacts(
        pid=os.getpid(),
        hostname=socket.gethostname(),
        machine=machine.identity,
        clock_s=time.time(),
        versions={"oobleck": __version__, "python": platform.python_version()} | _installed(),
        num_cpus=machine.usable_cores,
        socket=path,
        cuda_devices=tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())),
        free_disk_bytes=shutil.disk_usage(directory).free,
        memory_bytes=machine.usable_memory_bytes,
    )


def _installed() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


if __name__ == "__main__":
    main()
