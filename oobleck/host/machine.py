"""The cores, the memory and the GPUs that a process may use: affinity masks, cgroups and the environment limit them.

A container sees the cores and the memory of the whole machine. Its limits are in the files of its cgroups, of version 2
or 1, and of all parent groups that it can see. Linux only; a file that cannot be read limits nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Final

from oobleck.control.protocol import ResourceLimit

_ROOT: Final = Path("/")
_V2: Final = "cgroup2"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine as one of its processes sees it."""

    identity: str
    """The kernel's name for this boot of the machine, which is the same in every container."""
    container: str
    """Distinguishes containers of one machine, which may see other devices under the same numbers."""
    num_cores: int
    memory_bytes: int
    limits: tuple[ResourceLimit, ...]

    @property
    def usable_cores(self) -> int:
        return min([self.num_cores, *(each.num_cores for each in self.limits if each.num_cores is not None)])

    @property
    def usable_memory_bytes(self) -> int:
        limits = (each.memory_bytes for each in self.limits if each.memory_bytes is not None)
        return min([self.memory_bytes, *limits])


@dataclass(frozen=True, slots=True)
class _Group:
    """A cgroup's directory in one hierarchy."""

    path: Path
    is_v2: bool

    @property
    def name(self) -> str:
        """The device and inode of the directory, which are the same in every container."""
        found = self.path.stat()
        return f"{found.st_dev:x}:{found.st_ino}"

    @property
    def num_cores(self) -> int | None:
        """The cores of its quota, at least 1; None without a quota."""
        if self.is_v2:
            words = self._read("cpu.max").split()
        else:
            words = [self._read("cpu.cfs_quota_us"), self._read("cpu.cfs_period_us")]
        with suppress(ValueError, ZeroDivisionError):  # "max", and files that are not there
            quota_us, period_us = map(int, words)
            return max(1, quota_us // period_us) if quota_us > 0 else None
        return None

    @property
    def memory_bytes(self) -> int | None:
        """The limit, or None without one."""
        with suppress(ValueError):
            return int(self._read("memory.max" if self.is_v2 else "memory.limit_in_bytes"))
        return None

    @property
    def num_oom_kills(self) -> int:
        """How many of its processes the kernel has killed for lack of memory."""
        text = self._read("memory.events" if self.is_v2 else "memory.oom_control")
        counts = (line.split() for line in text.splitlines())
        return sum(int(words[1]) for words in counts if len(words) == 2 and words[0] == "oom_kill")

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            return ""


def this_machine(root: Path = _ROOT, *, affinity: Set[int] | None = None) -> Machine:
    """Describe the machine, and the limits of this process.

    `root` holds /proc and /sys; `affinity` are the cores of the mask, by default the kernel's.
    """
    may_use = os.sched_getaffinity(0) if affinity is None else affinity
    num_cores = max(os.sysconf("SC_NPROCESSORS_ONLN"), len(may_use))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    namespace = root / "proc/self/ns/mnt"
    limits = []
    if len(may_use) < num_cores:
        mask = sum(1 << core for core in may_use)
        limits.append(ResourceLimit(group=f"cores {mask:x}", num_cores=len(may_use)))
    for group in chain.from_iterable(_groups(root)):
        cores, memory = group.num_cores, group.memory_bytes
        cores = cores if cores is not None and cores < num_cores else None
        # Version 1 writes a very large number for no limit.
        memory = memory if memory is not None and memory < memory_bytes else None
        if cores is not None or memory is not None:
            limits.append(ResourceLimit(group=group.name, num_cores=cores, memory_bytes=memory))
    return Machine(
        identity=_text(root / "proc/sys/kernel/random/boot_id"),
        container=os.readlink(namespace) if namespace.is_symlink() else "",
        num_cores=num_cores,
        memory_bytes=memory_bytes,
        limits=tuple(limits),
    )


def num_oom_kills(root: Path = _ROOT) -> int:
    """Return how many processes of this one's cgroup the kernel has killed for lack of memory."""
    # A parent's count may include the kills of its other children.
    return sum(above[0].num_oom_kills for above in _groups(root))


def num_gpus(root: Path = _ROOT) -> int:
    """Return how many NVIDIA GPUs the processes of this one will see."""
    # A library such as torch could create a context on them.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([device for device in visible.split(",") if device.strip() not in ("", "-1")])
    # A container may have files of more devices than the driver shows it; some have nothing but these files.
    shown, files = (root / "proc/driver/nvidia/gpus").glob("*"), (root / "dev").glob("nvidia[0-9]*")
    return len(list(shown)) or len(list(files))


def _groups(root: Path) -> Iterator[list[_Group]]:
    """Yield the group of this process in each hierarchy, followed by its visible parents."""
    mounts = dict(_mounts(root))
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, place = rest.partition(":")
        # A line of version 2 names no controllers.
        kinds = controllers.split(",") if controllers else [_V2]
        mount = next((mounts[kind] for kind in kinds if kind in mounts), None)
        if mount is None or not {_V2, "cpu", "memory"} & {*kinds}:
            continue
        top, shown = mount
        # In a container the mount shows only a part of the hierarchy, below the group `shown`.
        below = place.removeprefix(shown).strip("/") if place.startswith(shown) else ""
        path = top / below
        above = [each for each in (path, *path.parents) if each.is_relative_to(top) and each.is_dir()]
        if above:
            yield [_Group(each, is_v2=not controllers) for each in above]


def _mounts(root: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield each controller, or `cgroup2`, with the mount of its hierarchy and the group that it shows (proc(5))."""
    for line in _text(root / "proc/self/mountinfo").splitlines():
        about, _, kind = line.partition(" - ")
        words, kinds = about.split(), kind.split()
        if len(words) < 5 or len(kinds) < 3 or kinds[0] not in ("cgroup", _V2):
            continue
        shown, point = (word.encode().decode("unicode_escape") for word in words[3:5])  # a space is \040
        place = root / point.lstrip("/"), shown.rstrip("/")
        for name in [_V2] if kinds[0] == _V2 else kinds[2].split(","):
            yield name, place


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
