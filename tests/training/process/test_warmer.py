"""Whatever a package does when it is imported ahead of ranks, they start: warm without it, or cold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import oobleck

DRIVE = """
import contextlib, json, os, signal, socket, sys, time
from pathlib import Path
from oobleck.training.process.import_log import make_log
from oobleck.training.forking.supervisor import REPORT
from oobleck.training.process.warm_process import NUM_SPARES as most
from oobleck.training.process.warmer import Warmer

class Server:
    problems = []
    def tell(self, problem): self.problems.append(problem)
    def leave(self): pass

def work(sock):
    said = {name: name in sys.modules for name in names} | {"mark": os.environ.get("MARK")}
    sock.sendall(json.dumps(said).encode())
    if os.environ.get("STAYS"):
        sock.recv(1)
    os._exit(5)

def until(condition):
    end_s = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end_s, server.problems
        time.sleep(min(0.01, warmer.tick()))
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            warmer.note_end(pid, status)

def forked():
    ours, theirs = socket.socketpair()
    ours.settimeout(60)
    reading, writing = os.pipe()
    if not warmer.fork([theirs.detach(), writing, os.dup(2)]):
        return None
    said = json.loads(ours.recv(4096))
    frames = os.read(reading, REPORT.size), os.read(reading, REPORT.size)
    return said, [REPORT.unpack(frame) for frame in frames]

names = sys.argv[1].split(",")
log, warmth, server = make_log(), Path("warm"), Server()
warmer = Warmer(log, warmth, work, server, import_s=3.0, quiet_s=0.05)
os.write(log, "".join(json.dumps({"name": n, "environment": {"MARK": "x"}}) + "\\n" for n in names).encode())
"""
GIVE = """
until(warmth.exists)
said, (first, last) = forked()
assert (first[0], first[2], last[0], os.waitstatus_to_exitcode(last[2])) == (0, 1, 1, 5), (first, last)
print(json.dumps({"said": said, "problems": server.problems}))
warmer.close()
assert not warmth.exists()
"""
DISTURB = """
until(warmth.exists)
pid = int(Path(f"/proc/self/task/{os.getpid()}/children").read_text())
os.kill(pid, signal.Signals[os.environ["SIGNAL"]])
if os.environ["SIGNAL"] == "SIGKILL":
    until(lambda: server.problems)
else:
    until(lambda: " T " in Path(f"/proc/{pid}/stat").read_text())
assert forked() is None
assert not warmth.exists()
until(warmth.exists)
said, _ = forked()
print(json.dumps({"said": said, "problems": server.problems}))
warmer.close()
"""
SPARES = """
def spares():
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent, group = (path / "stat").read_text().rpartition(")")[2].split()[:3]
            # What the warm process forks itself ends once it has forked a spare.
            if int(group) == warmer._pid not in (int(path.name), int(parent)) and state != "Z":
                found[int(path.name)] = state
    return found

until(lambda: warmth.exists() and len(spares()) == most)
ready = spares()
said, (first, _) = forked()
until(lambda: set(ready) - set(spares()))  # more than one, where one is slow to answer
for pid in spares():
    os.kill(pid, signal.SIGSTOP if pid % 2 else signal.SIGKILL)
until(lambda: set(spares().values()) <= {"T"})
again = [forked() for _ in range(most + 1)]
until(lambda: len(spares()) == most)
print(json.dumps({"said": said, "again": [each[0] for each in again], "problems": server.problems}))
os.kill(min(spares()), signal.SIGSTOP)
warmer.close()
"""
GROW = """
until(warmth.exists)
ours, theirs = socket.socketpair()
reading, writing = os.pipe()
assert warmer.fork([theirs.detach(), writing, os.dup(2)])
said = json.loads(ours.recv(4096))
os.write(log, (json.dumps({"name": "later", "environment": {}}) + "\\n").encode())
until(lambda: not warmth.exists())
until(warmth.exists)
assert REPORT.unpack(os.read(reading, REPORT.size))[0] == 0
ours.close()
assert os.waitstatus_to_exitcode(REPORT.unpack(os.read(reading, REPORT.size))[2]) == 5
print(json.dumps({"said": said, "problems": server.problems}))
warmer.close()
"""
LOSE = """
until(lambda: len(server.problems) == 4)
for _ in range(20):
    warmer.tick()
    time.sleep(0.02)
assert forked() is None
print(json.dumps({"problems": server.problems}))
"""
PACKAGES = {
    "hangs": "import time\ntime.sleep(600)\n",
    "hangs_with_a_child": "import subprocess\nsubprocess.run(['sleep', '600'])\n",
    "exits": "import os\nos._exit(7)\n",
    "leaves": "import sys\nsys.exit(3)\n",
    "raises": "raise ValueError('no')\n",
    "crashes": "import ctypes\nctypes.string_at(0)\n",
    "forks": "import os\nif os.fork() == 0:\n    import time\n    time.sleep(600)\n",
    "forks_and_comes_back": "import os\nos.fork()\n",
    "daemon": "import subprocess\nsubprocess.run(['sh', '-c', 'setsid sleep 600 & exit 0'])\n",
    "threads": "import threading\nthreading.Thread(target=threading.Event().wait, args=(9,), daemon=True).start()\n",
    "asks_cuda": "from pathlib import Path\nuvm = open(Path.home() / 'nvidia-uvm', 'w')\n",
    "seeds": "import random\nrandom.seed(0)\n",
    "closes": "import os\nos.closerange(3, 100)\n",
    "later": "VALUE = 1\n",
    "fine": "VALUE = 1\n",
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A directory of installed packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = tmp_path / "user" / "lib" / version / "site-packages"
    site.mkdir(parents=True)
    for name, text in PACKAGES.items():
        (site / f"{name}.py").write_text(text)
    return site


def driven(
    tmp_path: Path, site: Path, names: str, script: str = GIVE, **environment: str
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(Path(oobleck.__file__).parents[1]), str(site)])
    environment |= {
        "HOME": str(tmp_path),
        "PYTHONPATH": path,
        "PYTHONUSERBASE": str(tmp_path / "user"),
        "OBK": str(tmp_path),
    }
    return subprocess.run(
        [sys.executable, "-c", DRIVE + script, names],
        env={**os.environ, **environment},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def marked(tmp_path: Path) -> list[str]:
    """Processes that are left of a drive."""
    left = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if f"OBK={tmp_path}".encode() in (path / "environ").read_bytes().split(b"\0"):
                left.append((path / "cmdline").read_text())
        except OSError:
            continue
    return left


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("hangs", "importing hangs has not ended within 3 s"),
        ("hangs_with_a_child", "importing hangs_with_a_child has not ended within 3 s"),
        ("exits", "importing exits ended it: exit code 7"),
        ("crashes", "importing crashes ended it: killed by signal 11"),
        ("forks", "forks starts a process"),
        ("forks_and_comes_back", None),
        ("daemon", "daemon starts a process"),
        ("threads", "threads starts a thread"),
        ("asks_cuda", "asks_cuda makes a CUDA context"),
        ("seeds", "seeds sets the random numbers of random"),
        ("closes", "importing closes ended it"),
        ("leaves", None),
        ("raises", None),
    ],
)
def test_a_package_that_does_harm_when_it_is_imported_is_skipped_said_and_leaves_nothing(
    tmp_path: Path, site: Path, name: str, problem: str | None
) -> None:
    done = driven(tmp_path, site, f"{name},fine")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["said"] == {name: False, "fine": True, "mark": None}
    if problem is None:
        assert len(said["problems"]) <= 1
    else:
        (told,) = said["problems"]
        assert problem in told
    assert marked(tmp_path) == []


@pytest.mark.parametrize(("signal", "problem"), [("SIGKILL", "killed by signal 9"), ("SIGSTOP", "it was stopped")])
def test_a_warm_process_that_is_killed_or_stopped_is_not_waited_for_and_another_takes_its_place(
    tmp_path: Path, site: Path, signal: str, problem: str
) -> None:
    done = driven(tmp_path, site, "fine", DISTURB, SIGNAL=signal)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["said"]["fine"]
    (told,) = said["problems"]
    assert problem in told
    assert marked(tmp_path) == []


def test_ranks_are_forked_from_supervisors_that_stand_by_and_may_be_killed_or_stopped(
    tmp_path: Path, site: Path
) -> None:
    done = driven(tmp_path, site, "fine", SPARES)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert all(said["fine"] for said in (answer["said"], *answer["again"]))
    assert answer["problems"] == []
    assert marked(tmp_path) == []


def test_ranks_live_on_while_the_process_that_has_forked_them_imports_more(tmp_path: Path, site: Path) -> None:
    done = driven(tmp_path, site, "fine", GROW, STAYS="1")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["problems"] == []
    assert marked(tmp_path) == []


def test_after_four_packages_that_do_harm_ranks_start_cold_for_good(tmp_path: Path, site: Path) -> None:
    done = driven(tmp_path, site, "exits,threads,seeds,daemon,fine", LOSE)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout)["problems"]
    assert [problem.rpartition("; ")[2] for problem in problems] == ["another one skips that"] * 3 + [
        "there is no other one"
    ]
    assert marked(tmp_path) == []


def test_what_is_not_installed_is_left_to_the_script(tmp_path: Path, site: Path) -> None:
    """It may be edited between two starts, and may do anything when it is imported."""
    (tmp_path / "own.py").write_text("VALUE = 1\n")
    done = driven(tmp_path, site, "own,no_such_module,fine")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["said"] == {"own": False, "no_such_module": False, "fine": True, "mark": None}
