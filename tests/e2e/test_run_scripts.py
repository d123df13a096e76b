"""`oobleck run`: unmodified torchrun scripts on real agents, with real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from oobleck.runtime.files import RunDirectory
from tests.disks import fill, small_disk
from tests.e2e.harness import oobleck, processes_with
from tests.e2e.ranks import TIMEOUT_S, Ranks
from tests.processes import words_of

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path)
    yield made
    made.close()


def losses(ranks: Ranks) -> dict[int, float]:
    """By step, as rank 0 computed it last."""
    return {note["step"]: note["loss"] for note in ranks.notes()}


@pytest.mark.slow
def test_all_ranks_of_all_nodes_start_again_when_one_is_killed(ranks: Ranks) -> None:
    with ranks.started("--local", "2", "--nproc-per-node", "2", command=ranks.count(150)) as process:
        victim = ranks.wait_for_step(5, rank=3)
        os.kill(victim["pid"], signal.SIGKILL)
        assert process.wait(60) == 0, ranks.said()
    for rank in range(4):
        before, after = ({note["pid"] for note in ranks.notes(rank) if note["restarts"] == n} for n in (0, 1))
        assert (len(before), len(after)) == (1, 1)
        assert before != after
        assert [note["step"] for note in ranks.notes(rank) if note["restarts"] == 1] == list(range(1, 151))
    (down,) = ranks.entries("RankDown")
    assert (down.node, down.rank, down.local_rank, down.is_first) == ("node1", 3, 1, True)
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    assert "node1: a process was killed from outside" in told
    assert "generation 2: 4 ranks on node0, node1" in told


@pytest.mark.slow
def test_a_killed_rank_costs_a_moment_and_the_script_ends_as_if_nothing_had_happened(ranks: Ranks) -> None:
    """The second kill finds ranks that were forked warm; its node, agent and fork server are kept."""
    steps = 400  # on a busy machine, half a minute passes before there is a warm fork server
    with ranks.started("--nproc-per-node", "2", command=ranks.train(steps)) as process:
        for restarts in (0, 1):
            after = ranks.wait_for_step(1, restarts=restarts, rank=1)["step"]
            ranks.wait_until(lambda: any((ranks.temporary).rglob("fork.warm")))
            victim = ranks.wait_for_step(after + 5, restarts=restarts, rank=1)
            os.kill(victim["pid"], signal.SIGKILL)
            ranks.wait_for_step(1, restarts=restarts + 1)
        assert process.wait(150) == 0, ranks.said()
    assert len(ranks.entries("RankDown")) == 2
    assert len(ranks.entries("NodeConnected")) == 1
    assert [entry.is_warm for entry in ranks.entries("GenerationRuns")] == [False, True, True]
    assert ranks.stdout.read_text().splitlines()[-1] == f"step {steps}"
    failed = losses(ranks)
    for path in ranks.out.iterdir():
        path.unlink()
    assert ranks.run("--no-warm", command=ranks.train(steps)) == 0
    undisturbed = losses(ranks)
    assert failed.keys() == undisturbed.keys()
    assert all(abs(failed[step] - undisturbed[step]) < 1e-12 for step in failed)
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir))
    assert "nothing has gone wrong" in told.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp.py", "ddp_flash.py"])
def test_the_examples_run_and_survive_a_kill(ranks: Ranks, name: str) -> None:
    """Scripts for torchrun, of which one saves by itself, and one by `oobleck.checkpoint`."""
    saved = ["--saved", str(ranks.out / "saved.pt")] if name == "ddp.py" else []
    command = [str(EXAMPLES / name), "--steps", "3000", *saved]
    with ranks.started("--local", "2", command=command) as process:
        ranks.wait_until(lambda: "step 20:" in ranks.stdout.read_text())
        node = ranks.entries("NodeConnected")[-1]
        os.kill(node.agent_pid, signal.SIGKILL)
        ranks.wait_until(lambda: "continues after step" in ranks.stdout.read_text())
        assert process.poll() is None, ranks.said()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143, ranks.said()


def test_all_ranks_start_again_when_one_is_killed_a_node_is_lost_and_one_comes(ranks: Ranks) -> None:
    options = ("--local", "3", "--nnodes", "2:3", "--nproc-per-node", "2", "--max-restarts", "1")
    with ranks.started(*options, command=ranks.count(1_000_000)) as process:
        assert ranks.wait_for_step(3)["world"] == 6
        victim = ranks.wait_for_step(3, rank=3)
        for rank in range(6):
            ranks.wait_for_step(1, rank=rank)
        os.kill(victim["pid"], signal.SIGKILL)
        assert ranks.wait_for_step(1, restarts=1)["world"] == 6
        for rank in range(6):
            ranks.wait_for_step(1, restarts=1, rank=rank)
            before, after = ({note["pid"] for note in ranks.notes(rank) if note["restarts"] == n} for n in (0, 1))
            assert (len(before), len(after)) == (1, 1)
            assert before != after
        (down,) = ranks.entries("RankDown")
        assert (down.node, down.rank, down.local_rank, down.is_first) == ("node1", 3, 1, True)

        status = oobleck("status", "ranks", "--json", "--base-dir", str(ranks.base_dir))
        shown = json.loads(status.stdout)
        assert (shown["state"], shown["generation"], len(shown["nodes"])) == ("training", 2, 3)
        for command, node, world in (("kill", "node1", 4), ("add", "node1", 6), ("drain", "node2", 4)):
            restarts = ranks.notes()[-1]["restarts"] + 1
            assert oobleck(command, node, "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
            assert ranks.wait_for_step(1, restarts=restarts)["world"] == world
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, ranks.said()
    causes = [entry.cause.value for entry in ranks.entries("GenerationEnded")]
    assert causes == ["rank_failed", "node_lost", "node_joined", "node_drained", "stopped"]
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    assert "node1: a process was killed from outside" in told
    assert "generation 2: 6 ranks on node0, node1, node2" in told
    assert "generation 3: 4 ranks on node0, node2" in told


@pytest.mark.slow
def test_a_lost_node_is_left_out_and_one_that_comes_takes_part(ranks: Ranks) -> None:
    options = ("--local", "3", "--nnodes", "2:3", "--max-restarts", "0")
    with ranks.started(*options, command=ranks.count(1_000_000)) as process:
        assert ranks.wait_for_step(3)["world"] == 3
        status = oobleck("status", "ranks", "--json", "--base-dir", str(ranks.base_dir))
        shown = json.loads(status.stdout)
        assert (shown["state"], shown["generation"], len(shown["nodes"])) == ("training", 1, 3)
        assert oobleck("kill", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        assert ranks.wait_for_step(1, restarts=1)["world"] == 2
        assert oobleck("add", "node1", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        assert ranks.wait_for_step(1, restarts=2)["world"] == 3
        assert oobleck("drain", "node2", "--tag", "ranks", "--base-dir", str(ranks.base_dir)).returncode == 0
        assert ranks.wait_for_step(1, restarts=3)["world"] == 2
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, ranks.said()
    causes = [entry.cause.value for entry in ranks.entries("GenerationEnded")]
    assert causes == ["node_lost", "node_joined", "node_drained", "stopped"]
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    assert "node1" in told
    assert "generation 2: 2 ranks on node0, node2" in told


INTROSPECTIVE = """\
import json, os, signal, subprocess, sys
shown = subprocess.run(["ps", "-o", "args=", "-p", str(os.getpid())], capture_output=True, text=True).stdout.strip()
said = {
    "file": __file__, "argv": sys.argv, "orig_argv": sys.orig_argv, "name": __name__, "package": __package__,
    "loader": type(__loader__).__name__, "spec": __spec__, "shown": shown, "comm": open("/proc/self/comm").read(),
    "streams": [[each.encoding, each.errors] for each in (sys.stdout, sys.stderr)], "path": sys.path[0],
    "globals": sorted(globals()), "main": sys.modules["__main__"].__dict__ is globals(),
}
with open(sys.argv[1], "w") as file:
    json.dump(said, file)
print(os.fsdecode(b"\\xff"))
print("an unrelated warning", file=sys.stderr)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_script_finds_itself_as_if_it_had_been_started_and_a_kill_is_not_put_down_to_its_last_words(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun does: an absolute `__file__`, streams that take any file name, its own command line in `ps`."""
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    monkeypatch.chdir(ranks.out)
    (ranks.out / "introspective.py").write_text(INTROSPECTIVE)
    subprocess.run([sys.executable, "-u", "introspective.py", "said.json", "a b"], check=False, capture_output=True)
    expected = json.loads((ranks.out / "said.json").read_text())
    assert ranks.run("--max-restarts", "0", command=["introspective.py", "said.json", "a b"]) == 1
    assert json.loads((ranks.out / "said.json").read_text()) == expected
    assert ranks.stdout.read_bytes() == b"\xff\n"
    (down,) = ranks.entries("RankDown")
    assert down.error is None
    assert "killed by signal 9: " not in ranks.said()


FAILING = """\
import os, pathlib, time
begun = pathlib.Path(__file__).with_name("begun." + os.environ["TORCHELASTIC_RESTART_COUNT"])
print("rank", os.environ["RANK"], "begins")
if os.environ["RANK"] == "1":
    while not begun.exists():
        time.sleep(0.01)
    raise ValueError("no such column: labels")
begun.touch()
time.sleep(300)
"""


def test_a_script_that_fails_ends_the_run_with_its_traceback(ranks: Ranks) -> None:
    script = ranks.out / "failing.py"
    script.write_text(FAILING)
    logs = ranks.out / "logs"
    options = ("--nproc-per-node=2", "--max-restarts=1", "--log-dir", str(logs), "--tee", "3")
    assert ranks.run(*options, command=[str(script)]) == 1
    said = ranks.said()
    assert "rank 1 on node0 failed: exit code 1: ValueError: no such column: labels" in said
    assert f'File "{script}", line 7, in <module>' in said
    assert "1 restart allowed (--max-restarts), and a rank has failed again" in said
    assert "rank.py" not in said, "no frame of ours"
    assert "[default1]:rank 1 begins" in ranks.stdout.read_text()
    attempts = logs / "ranks" / "node0"
    assert sorted(path.name for path in attempts.iterdir()) == ["attempt_0", "attempt_1"]
    assert (attempts / "attempt_1" / "0" / "stdout.log").read_text() == "rank 0 begins\n"
    error = json.loads((attempts / "attempt_1" / "1" / "error.json").read_text())
    assert error["message"]["message"] == "ValueError: no such column: labels"
    told = oobleck("events", "ranks", "--base-dir", str(ranks.base_dir)).stdout
    assert "an error in the training code" in told


SHOWING = """\
import atexit, json, os, sys, threading, __main__
names = [name for name in os.environ if name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_", "LOCAL_"))]
names += ["RANK", "WORLD_SIZE", "MASTER_ADDR", "OMP_NUM_THREADS"]
here = {
    "environment": sorted(names), "argv": sys.argv[1:], "name": __name__, "file": os.path.basename(__main__.__file__),
    "path": sys.path[0], "cwd": os.getcwd(),
    "values": {name: os.environ[name] for name in names if "LOG" not in name and "ERROR_FILE" not in name
               and "STORE" not in name and "RUN_ID" not in name and "PORT" not in name},
}
open(f"{os.environ['OUT']}/{os.environ['RANK']}.json", "w").write(json.dumps(here))
atexit.register(lambda: open(f"{os.environ['OUT']}/left.{os.environ['RANK']}", "w").write("left"))
threading.Timer(0.2, lambda: open(f"{os.environ['OUT']}/thread.{os.environ['RANK']}", "w").write("ended")).start()
if __name__ == "__main__":
    sys.exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("is_module", [False, True])
def test_a_rank_finds_itself_where_torchruns_rank_does(ranks: Ranks, tmp_path: Path, is_module: bool) -> None:
    """The same script, by both: variables, arguments, `__main__`, search path; threads and exits run to their end."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "showing.py").write_text(SHOWING)
    what = ["-m", "package.showing"] if is_module else ["package/showing.py"]
    found = {}
    for name in ("torchrun", "oobleck"):
        out = tmp_path / name
        out.mkdir()
        options = ["--nproc-per-node=2", "--max-restarts=2", *what, "--lr", "1"]
        environment = {**os.environ, "OUT": str(out), "PYTHONPATH": ""}
        environment.pop("OMP_NUM_THREADS", None)
        if name == "torchrun":
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", *options]
        else:
            command = [sys.executable, "-m", "oobleck", "run", "--base-dir", str(ranks.base_dir), *options]
            environment |= {"TMPDIR": str(ranks.temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        assert {path.name for path in out.iterdir()} == {
            f"{kind}{rank}{end}" for rank in (0, 1) for kind, end in (("", ".json"), ("left.", ""), ("thread.", ""))
        }
        found[name] = [json.loads((out / f"{rank}.json").read_text()) for rank in (0, 1)]
    for ours, theirs in zip(found["oobleck"], found["torchrun"], strict=True):
        values, expected = ours.pop("values"), theirs.pop("values")
        assert values.pop("MASTER_ADDR") == "127.0.0.1"
        expected.pop("MASTER_ADDR")
        signals = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # torchrun's own
        expected.pop(signals, None)
        theirs["environment"] = [each for each in theirs["environment"] if each != signals]
        assert values == expected
        assert ours == theirs


FILLS = """\
import sys
from pathlib import Path
print("begins", flush=True)
with Path(sys.argv[1], "filler").open("wb", buffering=0) as file:
    try:
        while file.write(bytes(4096)):
            pass
    except OSError:
        pass
for _ in range(2000):
    print("x" * 80)
sys.stdout.reconfigure(line_buffering=True)
Path(sys.argv[2]).write_text("ends well")
"""


PRINTS = """\
import sys, time
from pathlib import Path
for number in range(300):
    print("line", number, "x" * 2000)
    if number == 200:
        Path(sys.argv[1]).unlink()
        print("room", file=sys.stderr)
"""


def test_what_a_full_disk_does_not_take_is_shown_and_said_once_and_written_again_when_there_is_room(
    ranks: Ranks, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PRINTS)
    with small_disk(tmp_path / "disk", "256k") as disk:
        filler = fill(disk)
        status = ranks.run("--log-dir", str(disk), "--max-restarts", "0", command=[str(script), str(filler)])
        written = next(disk.rglob("stdout.log"))
        kept = written.read_text()
    lines = [f"line {number} {'x' * 2000}\n" for number in range(300)]
    assert (status, ranks.stdout.read_text()) == (0, "".join(lines)), ranks.said()
    assert kept == "".join(lines[201:])
    assert ranks.said().count(f"{written}: No space left on device: what ranks print is shown") == 1
    assert "room\n" in ranks.said()


@pytest.mark.slow
def test_a_disk_that_runs_full_during_a_run_fails_no_rank(ranks: Ranks, tmp_path: Path) -> None:
    """What ranks print, and the journal, lie there; under torchrun the same script would print to a terminal."""
    script, done = tmp_path / "script.py", tmp_path / "done"
    script.write_text(FILLS)
    with small_disk(ranks.base_dir, "1m"):
        status = ranks.run("--max-restarts", "0", command=[str(script), str(ranks.base_dir), str(done)])
    assert done.read_text() == "ends well", ranks.said()
    assert status in (0, 74), ranks.said()
    assert "Traceback" not in ranks.said()


def test_a_killed_agent_takes_its_ranks_along_and_only_the_same_command_takes_over_what_a_killed_master_has_left(
    ranks: Ranks,
) -> None:
    """Even ranks that have become another program end with their agent: the kernel sees to it."""
    script = ranks.out / "sleep.sh"
    script.write_text(f"#!/bin/sh\necho $$ > {ranks.out}/pid.$RANK\nexec sleep 300\n")
    script.chmod(0o700)
    with ranks.started("--local", "3", "--no-python", command=[str(script)]) as first:
        pids = [ranks.out / f"pid.{rank}" for rank in range(3)]
        ranks.wait_until(lambda: all(path.exists() and path.read_text().strip() for path in pids))
        gone = Path("/proc") / pids[2].read_text().strip()
        agent = next(entry for entry in ranks.entries("NodeConnected") if entry.node == "node2")
        os.kill(agent.agent_pid, signal.SIGKILL)
        ranks.wait_until(lambda: not gone.exists() or "sleep" not in (gone / "cmdline").read_text())
        first.kill()
        first.wait()
    assert left_on(ranks, "node1"), "the agent of another node goes on without a master"
    assert ranks.run("--local", "1", command=ranks.count(3)) == 2
    assert "continues without its master" in ranks.said()
    assert "entry, command, max_nodes" in ranks.said()
    up = [sys.executable, "-m", "oobleck", "up", "--local", "3", "--base-dir", str(ranks.base_dir), "--tag", "ranks"]
    trained = subprocess.run(up, env=ranks.environment, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (trained.returncode, "continues without its master" in trained.stderr) == (2, True), trained.stderr
    assert "--local 3 --no-python" in RunDirectory(base_dir=ranks.base_dir, tag="ranks").command, "resume gives it"
    with ranks.started("--local", "3", "--no-python", command=[str(script)]):
        ranks.wait_until(lambda: bool(ranks.entries("MasterResumed") and ranks.entries("NodeLost")))
    ranks.wait_until(lambda: not left_on(ranks, "node1"))


def left_on(ranks: Ranks, node: str) -> list[psutil.Process]:
    return [each for each in processes_with(f"TMPDIR={ranks.temporary}") if node in " ".join(words_of(each))]
