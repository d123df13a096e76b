"""Builds the stub device, starts processes on it, and steers it: `python tools/gpu/stub/device.py COMMAND ...`.

    .venv-cuda-stub/bin/python tools/gpu/stub/device.py -m pytest tests/cuda_stub     # builds it if need be

runs Python on the stub, with two devices unless CUDA_STUB_DEVICES says otherwise.
"""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

_HERE = Path(__file__).parent
_BUILT = _HERE / "build"
SOURCES = ("control.c", "devices.c", "memory.c", "nccl.c", "streams.c")
"""Those of the library that is preloaded."""

# As in `stub.h`.
MOMENTS = ("connects", "sums", "sends", "receives", "copies_out", "copies_in", "computes", "has_summed", "aborts")
ACTS = ("nothing", "kill", "freeze", "break_links", "break_device")
_FIELDS = ("pid", "act", "moment", "at", "delay_us", "links_broken", "device_error", "slow_us", *MOMENTS)
_MAX_DEVICES = 16


def why_not() -> str | None:
    """Return why this interpreter cannot run torch on the stub; None when it can."""
    if sys.platform != "linux":
        return "the stub device is preloaded into processes as Linux does it"
    if missing := [tool for tool in ("gcc", "g++") if shutil.which(tool) is None]:
        return f"the stub device is built with {' and '.join(missing)}, which is not here"
    spec = find_spec("torch")
    if spec is None or spec.origin is None or not (Path(spec.origin).parent / "lib" / "libtorch_cuda.so").exists():
        return "torch is not here as a build with CUDA"
    return None


def build() -> Path:
    """Build what is older than its sources; return where it lies. Raises CalledProcessError."""
    torch, cuda = _site() / "torch", headers()
    c = ["gcc", "-std=gnu11", "-O1", "-g", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden"]
    cpp = ["g++", "-std=c++20", "-O1", "-fPIC", "-shared", "-Wall"]
    of_torch = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", *cuda]
    libraries = [f"-L{torch / 'lib'}", "-lc10_cuda", "-ltorch_cpu", "-lc10"]
    _compile("libcuda.so.1", ["driver.c"], c)
    _compile("libcudastub.so", SOURCES, [*c, *cuda], ["-lpthread", "-ldl"])
    _compile("libonhost.so", ["on_host.cpp"], [*cpp, *of_torch], libraries)
    return _BUILT


def headers() -> list[str]:
    """Return the compiler's options for the headers of CUDA and NCCL that came with torch."""
    # The runtime's own come first. Triton has those that they include.
    folders = ("nvidia/cu13/include", "triton/backends/nvidia/include", "nvidia/nccl/include")
    return [f"-I{_site() / folder}" for folder in folders]


def _site() -> Path:
    return Path(sysconfig.get_path("purelib"))


def _compile(name: str, sources: Sequence[str], command: Sequence[str], libraries: Sequence[str] = ()) -> None:
    target, paths = _BUILT / name, [_HERE / source for source in sources]
    newest = max(path.stat().st_mtime for path in (*paths, *_HERE.glob("*.h")))
    if target.exists() and target.stat().st_mtime > newest:
        return
    _BUILT.mkdir(exist_ok=True)
    # Under a name of its own until it is whole: another process may be loading the old one.
    part = target.with_suffix(f".{os.getpid()}")
    subprocess.run([*command, *map(str, paths), "-o", str(part), *libraries], check=True)
    part.rename(target)


def environment(directory: Path, *, devices: int, **settings: str) -> Mapping[str, str]:
    """Return the variables of processes on the stub: those that meet over NCCL share a `directory`.

    `settings` are the stub's other variables, without their CUDA_STUB_ (README.md).
    """
    built = build()
    return {
        "LD_PRELOAD": str(built / "libcudastub.so"),
        "LD_LIBRARY_PATH": str(built),
        "CUDA_STUB_DIR": str(directory),
        "CUDA_STUB_DEVICES": str(devices),
        **{f"CUDA_STUB_{name.upper()}": value for name, value in settings.items()},
    }


class Control:
    """What the stub's devices do, and have done: a table that their processes share."""

    def __init__(self, directory: Path) -> None:
        path = directory / "control"
        size = _MAX_DEVICES * len(_FIELDS) * 8
        with path.open("a+b") as file:
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        self._words = memoryview(self._map).cast("q")

    def get(self, device: int, field: str) -> int:
        """Return a row's field: `pid` of its last user, how often it came to a moment, and so on (`stub.h`)."""
        return self._words[device * len(_FIELDS) + _FIELDS.index(field)]

    def set(self, device: int, field: str, value: int) -> None:
        self._words[device * len(_FIELDS) + _FIELDS.index(field)] = value

    def arm(self, device: int, act: str, moment: str, *, after: int = 1, delay_us: int = 0) -> None:
        """Have the device's process do an act, once, when it comes to a moment the next time but `after` - 1."""
        self.set(device, "moment", MOMENTS.index(moment))
        self.set(device, "at", self.get(device, moment) + after)
        self.set(device, "delay_us", delay_us)
        self.set(device, "act", ACTS.index(act))

    @property
    def armed(self) -> list[int]:
        """The devices whose act is still to come."""
        return [device for device in range(_MAX_DEVICES) if self.get(device, "act")]


def main() -> None:
    if (reason := why_not()) is not None:
        raise SystemExit(f"skipped: {reason}")
    with tempfile.TemporaryDirectory(prefix="cuda-stub-") as directory:
        devices = int(os.environ.get("CUDA_STUB_DEVICES", "2"))
        variables = {**os.environ, **environment(Path(directory), devices=devices)}
        raise SystemExit(subprocess.run([sys.executable, *sys.argv[1:]], env=variables, check=False).returncode)


if __name__ == "__main__":
    main()
