"""Every benchmark runs as a script does, with `--smoke`, which does everything once, as small as it can be."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.e2e.harness import processes_with
from tests.warm import ROOT, started

BENCHES = ROOT / "tools" / "bench"
TIMEOUT_S = 280

PARTS = {
    "control_agents.py": "control_processes.py",
    "control_master.py": "control_processes.py",
    "control_processes.py": "control_plane.py",
    "control_servers.py": "control_processes.py",
    "kinds_job.py": "kinds.py",
    "local_workers.py": "throughput.py",
    "paper_objective.py": "planner.py",
    "pause_peers_job.py": "pause_peers.py",
    "pipelining_job.py": "throughput.py",
    "restart_job.py": "restart.py",
    "restart_peers_job.py": "restart_peers.py",
    "sailor_plans.py": "sailor.py",
    "scale_control.py": "scale.py",
    "scale_groups.py": "scale.py",
    "scale_workers.py": "scale.py",
    "torchrun_job.py": "recovery.py",
}
"""What a benchmark consists of beside its own script, and who uses it."""

SMOKES: dict[str, tuple[str, ...]] = {
    "checkpoint.py": ("flash ", "torch.save", "pause against dcp.async_save"),
    "choices.py": (
        "| gpt3-medium | 1 × 8 | recomputation | none: ",
        "| gpt3-medium | 1 × 8 | devices of a stage | 1: ",
    ),
    "cluster_mode.py": ("recoveries, goodput",),
    "commit.py": ("| 2 | 2 | ", "| 5 | "),
    "control_plane.py": ("| none | steps", "| none | takeover", "| embedded | loss", "| embedded | takeover"),
    "copies.py": ("part of 1 MiB, 1 turns: plain ", "copy against plain: ", "lost part against plain: "),
    "fastest_plan.py": ("random N=64: ", "3 random profiles: chosen plans take 0.", "; 0 of them over 1 %"),
    "fit_costs.py": ("| encode_byte_s | ", "64: "),
    "in_turns.py": (" s (",),
    "journal.py": ("160 nodes, a step every 60 s", "| 0.5 | 719 | 7 |"),
    "kinds.py": ("| two kinds | ", "| one kind | ", "| gain | | "),
    "mixed.py": (
        "| gpt3-2.7b | 4 + 4 | 1 | ",
        "| gpt3-2.7b | 4 + 4 | 8 | ",
        "| 50 layers, 1 H100 + 1 A100 + 1 A40 | ",
        "| 50 layers, 16 A100, one 2 times slower | ",
    ),
    "pause_peers.py": (
        "| oobleck.checkpoint.save | ",
        "| DCP save | ",
        "| LM Resiliency, in memory and in its peer's | ",
    ),
    "planner.py": ("gpt-like", "g=8", "64 nodes lost at once"),
    "published_plans.py": ("| Llama-3 8B | 4 × 8 | none | all | ", "| Llama-3 8B | 4 × 8 | all | auto | "),
    "recovery.py": ("| killed worker | 1 |",),
    "relays.py": ("| 6 | none |", "| 6 | 2 |", "| 16 | none |", "| 16 | 2 |"),
    "restart.py": (
        "| oobleck run, a killed rank of two, in memory, attempts | 1 |",
        "| all | median < 0.25 |",
    ),
    "restart_peers.py": (
        "| torchft, a killed replica, which is a node, of two | ",
        "| LM Resiliency, a killed node of two, in memory | ",
    ),
    "sailor.py": (
        "| 8 A100-40 | Oobleck | ",
        "| 4 A100-40 + 4 V100-16 | Oobleck | ",
        "| 4 A100-40 + 4 V100-16 | Oobleck, A100-40 alone | ",
    ),
    "save_pause.py": ("save: ", "save, with checksums: "),
    "scale.py": (
        "one group of all",
        "| 2 to 4 | ",
        "| 16 to 64 | ",
        "8 of 64 nodes at once",
        "| 32 to 64 | ",
    ),
    "sections.py": ("1 sections: step", "4 sections: step", "throughput of 4 sections, of one's: "),
    "sharding.py": ("of torch", "torch", "none", "stages", "optimizer", "gradients", "all"),
    "simulator.py": ("64 nodes, 2 days", "goodput"),
    "slow_nodes.py": ("| 4 | 1 | 1.1 | ", "| 4 | 1 | 3 | "),
    "throughput.py": (
        "torch",
        "same cut: layers 0-2 | 3-5; bubble",
        "torch chunks",
        "chunks: layers 0-1 | 2-2 | 3-3 | 4-5; bubble",
        "own plan",
        "alone",
        "auto takes",
    ),
}
"""What each says, at least. Those that train compare losses themselves, and fail where they differ."""


COLD = {"control_plane.py"}
"""Benchmarks that start by themselves: forked, this one waits for processes of its own without an end."""


def run(name: str, *options: str) -> str:
    """What a benchmark prints."""
    if name in COLD:
        command = [sys.executable, "-u", "-X", "faulthandler", str(BENCHES / name), "--smoke", *options]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as cold:
            hung = threading.Timer(TIMEOUT_S, cold.send_signal, (signal.SIGABRT,))  # it says where it waits
            hung.start()
            said, _ = cold.communicate()
            hung.cancel()
        assert cold.returncode == 0, said
        return said
    with tempfile.NamedTemporaryFile("r") as output:
        file, environment = Path(output.name), {**os.environ}
        environment.pop("PYTHONPATH", None)
        benchmark = started(BENCHES / name, ("--smoke", *options), environment=environment, output=file, errors=file)
        benchmark.join(TIMEOUT_S)
        benchmark.kill()  # as long as it takes no longer, it has ended
        benchmark.join()
        said = output.read()
    assert benchmark.exitcode == 0, said
    return said


def test_every_benchmark_has_a_smoke_test_or_is_part_of_one_that_has():
    assert {path.name for path in BENCHES.glob("*.py")} == PARTS.keys() | SMOKES.keys()
    for part, user in PARTS.items():
        assert Path(part).stem in (BENCHES / user).read_text(encoding="utf-8"), f"{user} does not use {part}"


@pytest.mark.parametrize("name", sorted(SMOKES.keys() - {"scale.py"}))
def test_it_runs(name: str):
    said = run(name)
    assert [words for words in SMOKES[name] if words not in said] == [], said


def test_what_scale_measures_is_kept_drawn_and_shown_beside_what_is_measured_later(tmp_path: Path):
    kept, picture = tmp_path / "kept.json", tmp_path / "scale.svg"
    said = run("scale.py", "--sections", "groups", "control", "simulator", "--output", str(kept))
    assert [words for words in SMOKES["scale.py"] if words not in said] == [], said
    (small, large) = json.loads(kept.read_text())["control"]
    assert (small["nodes"], large["nodes"]) == (16, 64)
    assert (large["fences"]["number"], large["updates"]["number"]) == (63, 63)
    said = run("scale.py", "--sections", "control", "--beside", str(kept), "--svg", str(picture))
    rows = [line for line in said.splitlines() if line.startswith("| 64 | 1 (1) | 63 (63) | ")]
    assert len(rows) == 2, "one lost node, and eight at once"
    drawn = ElementTree.fromstring(picture.read_text())
    names = {"".join(words.itertext()) for words in drawn.iter("{http://www.w3.org/2000/svg}text")}
    assert {"control plane alone: cpu", "control plane alone: cpu, earlier", "as log2 N"} <= names


@pytest.mark.slow
def test_scale_measures_real_workers_too():
    said = run("scale.py", "--sections", "workers")
    assert [words for words in ("Real workers, one killed node", "| 2 | ") if words not in said] == [], said


@pytest.mark.slow
def test_llama_is_trained_beside_torch_too():
    said = run("throughput.py", "--model", "llama")
    assert [words for words in SMOKES["throughput.py"] if words not in said] == [], said


@pytest.mark.slow
def test_each_fault_of_the_recovery_benchmark_is_recovered_from_and_torchrun_restarts():
    faults = ("killed node", "frozen node", "killed master", "join", "drain")
    said = run("recovery.py", "--nodes", "4", "--torchrun", "--faults", *faults)
    assert [fault for fault in (*faults, "torchrun, killed worker") if f"| {fault} | 1 |" not in said] == [], said


@pytest.mark.slow
def test_scripts_restart_after_a_lost_node_and_under_torchrun():
    said = run("restart.py", "--nodes", "2", "--torchrun-limit", "60")
    wanted = (
        "oobleck run, a lost node of 2, in memory, attempts",
        "torchrun, a killed rank of two, own save (inf: not within 60 s)",
        "torchrun, a killed rank of two, DCP (inf: not within 60 s)",
    )
    assert [what for what in wanted if f"| {what} | 1 |" not in said] == [], said


@pytest.mark.slow
def test_a_node_is_killed_under_another_launcher():
    said = run("restart_peers.py", "--arms", "torchrun", "--faults", "node")
    assert "| torchrun, a killed node of two, DCP | 1 | " in said, said


@pytest.mark.slow
def test_the_control_plane_is_measured_in_every_way():
    said = run("control_plane.py", "--tunnels", "none", "embedded", "--work", "heartbeats", "steps", "--dashboard")
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines() if line[:2] == "| "]
    assert {(row[0], row[1]) for row in rows[1:]} >= {
        (tunnels, what) for tunnels in ("none", "embedded") for what in ("heartbeats", "steps", "start", "loss")
    }
    # A heartbeat, and two commits of its pipeline's, of each of four nodes; hello, worker started, ready, resumed.
    assert all(int(row[5]) >= 8 for row in rows if row[1] in ("steps", "start"))


@pytest.mark.slow
def test_a_run_ends_with_the_benchmark_that_is_terminated():
    with tempfile.TemporaryDirectory(prefix="ob") as directory:  # short, for sockets' paths are
        mark, deadline_s = f"TMPDIR={directory}", time.monotonic() + TIMEOUT_S
        benchmark = subprocess.Popen(
            [sys.executable, str(BENCHES / "recovery.py"), "--smoke"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": directory},
        )
        try:
            while len(processes_with(mark)) < 3:  # itself, the master and an agent
                assert benchmark.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
            benchmark.terminate()
            assert benchmark.wait(TIMEOUT_S) != 0
            while left := processes_with(mark):  # the fork server ends after its last client
                assert time.monotonic() < deadline_s, left
                time.sleep(0.1)
        finally:
            for process in processes_with(mark):
                process.kill()
            benchmark.wait()
