"""What a container may use is read from its cgroups, of both versions, and of a real one where one may be made."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from oobleck.control.protocol import ResourceLimit
from oobleck.host.machine import Machine, num_gpus, num_oom_kills, this_machine

GIB = 1 << 30
V1_NONE = 9223372036854771712
"""What version 1 says where there is no limit."""
CORES = max(os.sysconf("SC_NPROCESSORS_ONLN"), len(os.sched_getaffinity(0)))
MEMORY = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class Tree:
    """The files of /proc and /sys, as a container would find them."""

    def __init__(self, root: Path, *, mounts: str, group: str) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/mountinfo").write_text(mounts)
        (root / "proc/self/cgroup").write_text(group)

    def group(self, path: str, **files: str) -> str:
        """Make a group's directory with these files, whose names have _ for their first dot; returns its name."""
        directory = self.root / "sys/fs/cgroup" / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("_", ".", 1)).write_text(f"{text}\n")
        told = directory.stat()
        return f"{told.st_dev:x}:{told.st_ino}"

    def machine(self) -> Machine:
        return this_machine(self.root, affinity=frozenset(range(CORES)))


V2_MOUNT = "25 20 0:22 {shown} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1_MOUNTS = (
    "30 25 0:26 {shown} /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "31 25 0:27 {shown} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
    "32 25 0:28 / /sys/fs/cgroup/systemd rw,relatime - cgroup cgroup rw,name=systemd\n"
)


def test_a_limit_of_version_2_counts_wherever_it_is_above_the_process(tmp_path: Path):
    tree = Tree(tmp_path, mounts=V2_MOUNT.format(shown="/"), group="0::/kubepods/pod1/main\n")
    tree.group("", cpu_stat="usage_usec 1")
    tree.group("kubepods", cpu_max="max 100000", memory_max="max")
    pod = tree.group("kubepods/pod1", memory_max=str(GIB))
    main = tree.group("kubepods/pod1/main", cpu_max="100000 100000", memory_max="max")
    tree.group("kubepods/pod2", cpu_max="1000 100000", memory_max="4096")
    machine = tree.machine()
    assert machine.limits == (
        *([ResourceLimit(group=main, num_cores=1)] if CORES > 1 else []),
        ResourceLimit(group=pod, memory_bytes=GIB),
    )
    assert (machine.usable_cores, machine.usable_memory_bytes) == (1, GIB)
    assert (machine.num_cores, machine.memory_bytes) == (CORES, MEMORY)


def test_a_namespace_of_cgroups_shows_the_containers_own_group_as_the_top(tmp_path: Path):
    tree = Tree(tmp_path, mounts=V2_MOUNT.format(shown="/"), group="0::/\n")
    tree.group("", memory_max=str(GIB))
    assert tree.machine().usable_memory_bytes == GIB


def test_a_limit_of_version_1_counts_where_the_mount_shows_the_containers_group(tmp_path: Path):
    """As in a container without a namespace of cgroups: its path is that of the host, the mount begins at it."""
    group = "4:memory:/docker/abc\n2:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc\n"
    tree = Tree(tmp_path, mounts=V1_MOUNTS.format(shown="/docker/abc"), group=group)
    tree.group("cpu,cpuacct", cpu_cfs_quota_us="50000", cpu_cfs_period_us="100000")
    tree.group("memory", memory_limit_in_bytes=str(2 * GIB))
    machine = tree.machine()
    assert (machine.usable_cores, machine.usable_memory_bytes) == (1, 2 * GIB)


def test_a_limit_of_version_1_counts_wherever_it_is_above_the_process(tmp_path: Path):
    tree = Tree(tmp_path, mounts=V1_MOUNTS.format(shown="/"), group="4:memory:/job/task\n2:cpu,cpuacct:/job/task\n")
    tree.group("cpu,cpuacct/job/task", cpu_cfs_quota_us="-1", cpu_cfs_period_us="100000")
    tree.group("memory", memory_limit_in_bytes=str(V1_NONE))
    tree.group("memory/job", memory_limit_in_bytes=str(GIB))
    tree.group("memory/job/task", memory_limit_in_bytes=str(V1_NONE))
    machine = tree.machine()
    assert (machine.usable_cores, machine.usable_memory_bytes) == (CORES, GIB)


@pytest.mark.parametrize("group", ["", "nonsense\n", "0::/gone\n", "0::/../elsewhere\n", "7:rdma:/\n"])
@pytest.mark.parametrize("limit", ["max", "", "many", "-1 0", "0 0"])
def test_what_cannot_be_understood_limits_nothing(tmp_path: Path, group: str, limit: str):
    tree = Tree(tmp_path, mounts=V2_MOUNT.format(shown="/") + "short line\n- - -\n", group=group)
    tree.group("", cpu_max=limit, memory_max="much")
    assert tree.machine().limits == ()
    assert this_machine(tmp_path / "nothing", affinity=frozenset(range(CORES))).limits == ()


def test_a_mask_of_cores_is_a_limit_that_equal_masks_share(tmp_path: Path):
    cores = CORES
    machine = this_machine(tmp_path, affinity=frozenset({0, 2}) if cores > 2 else frozenset({0}))
    if cores == 1:
        assert machine.limits == ()
        pytest.skip("there is one core")
    (limit,) = machine.limits
    assert limit == ResourceLimit(group="cores 5" if cores > 2 else "cores 1", num_cores=2 if cores > 2 else 1)


def test_processes_of_a_machine_give_it_the_same_identity_and_another_mount_namespace_is_a_container():
    here = this_machine()
    assert here.identity == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert here.container == os.readlink("/proc/self/ns/mnt")


@pytest.mark.parametrize("version", [1, 2])
def test_processes_that_were_killed_for_lack_of_memory_are_counted_in_the_group_itself(tmp_path: Path, version: int):
    if version == 2:
        tree = Tree(tmp_path, mounts=V2_MOUNT.format(shown="/"), group="0::/pod\n")
        tree.group("pod", memory_events="low 0\nhigh 1\nmax 9\noom 3\noom_kill 2\noom_group_kill 0")
        tree.group("", memory_events="oom_kill 7")
    else:
        tree = Tree(tmp_path, mounts=V1_MOUNTS.format(shown="/"), group="4:memory:/pod\n")
        tree.group("memory/pod", memory_oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 2")
    assert num_oom_kills(tree.root) == 2


REPORTING = "from oobleck.host.machine import *; m = this_machine(); print(m.usable_memory_bytes, num_oom_kills())"
EATING = "x = [bytearray(1 << 20) for _ in range(1000)]"


@pytest.fixture
def real_group() -> Iterator[Path]:
    """A memory cgroup of 256 MiB on this machine."""
    mine = next(
        (line.split(":")[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line), ""
    )
    path = Path(f"/sys/fs/cgroup/memory{mine}/oobleck-test-{os.getpid()}")
    try:
        path.mkdir()
        (path / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError as error:
        with suppress(OSError):
            path.rmdir()
        pytest.skip(f"no memory cgroup of version 1 may be made here: {error.strerror}")
    yield path
    path.rmdir()


def in_group(group: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a group; it moves there itself."""
    enter = f"import os; open({str(group / 'cgroup.procs')!r}, 'w').write(str(os.getpid())); "
    return subprocess.run([sys.executable, "-c", enter + code], capture_output=True, text=True, check=False)


def test_a_real_group_limits_a_real_process_and_counts_those_that_it_ended(real_group: Path):
    assert in_group(real_group, REPORTING).stdout.split() == [str(256 << 20), "0"]
    if in_group(real_group, EATING).returncode != -9:
        pytest.skip("this kernel does not enforce the limit")
    assert in_group(real_group, REPORTING).stdout.split() == [str(256 << 20), "1"]


@pytest.mark.parametrize("place", ["proc/driver/nvidia/gpus/0000:01:00.{}", "dev/nvidia{}"])
def test_gpus_are_those_that_the_driver_names_unless_the_environment_shows_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
):
    for number in range(4):
        (tmp_path / place.format(number)).mkdir(parents=True)
    (tmp_path / "dev/nvidiactl").mkdir(parents=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert num_gpus(tmp_path) == 4
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,2")
    assert num_gpus(tmp_path) == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert num_gpus(tmp_path) == 0


def test_files_of_devices_that_the_driver_does_not_show_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    for number in range(4):
        (tmp_path / f"dev/nvidia{number}").mkdir(parents=True)
    assert num_gpus(tmp_path) == 1
