"""A failure trace becomes requests to a run, in order and in time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given

from oobleck.cli.chaos_run.play import Player, name_nodes, not_played
from oobleck.cli.main import main
from oobleck.errors import ConfigError, UsageError
from oobleck.runtime.control_client import (
    AddRequest,
    ControlRequest,
    KillRequest,
    NoActiveRun,
    SignalRequest,
    SlowRequest,
)
from oobleck.sim.trace import (
    AgentCrashed,
    AgentFrozen,
    ForkServerCrashed,
    Frozen,
    Healed,
    Joined,
    Lost,
    MasterCrashed,
    Noticed,
    Partitioned,
    Slowed,
    Thawed,
    Trace,
    TraceEvent,
    WorkerCrashed,
)
from tests.sim.strategies import traces

SPEEDUP = 1e9


class FakeRun:
    """Keeps what it was asked; refuses what is about `refused`, and ends before request number `ends`."""

    def __init__(self, *, refused: str = "", ends: int = 1000) -> None:
        self.asked: list[object] = []
        self._refused = refused
        self._ends = ends

    def ask(self, asked: ControlRequest) -> Mapping[str, object]:
        if len(self.asked) >= self._ends:
            raise NoActiveRun("no run listens")
        self.asked.append(asked)
        if getattr(asked, "node", None) == self._refused:
            raise UsageError(f"{self._refused} is lost, or has left, already")
        return {}

    def freeze_master(self, frozen_s: float) -> None:
        self.asked.append(f"stopped for {frozen_s * SPEEDUP:g} s")

    def crash_master(self, down_s: float) -> None:
        self.asked.append(f"down for {down_s * SPEEDUP:g} s")

    def wait_until(self, at_s: float) -> bool:
        return True


def trace_of(*events: TraceEvent) -> Trace:
    nodes = ("n0", "n1")
    return Trace(duration_s=100, nodes=nodes, start=nodes, events=events)


def play(trace: Trace, run: FakeRun) -> tuple[bool, list[str]]:
    told: list[str] = []
    names = {node: node.replace("n", "node") for node in trace.nodes}
    return Player(run, names, speedup=SPEEDUP, tell=told.append).play(trace), told


def signal(node: str, name: str, processes: str) -> SignalRequest:
    return SignalRequest(node=node, signal=name, processes=processes)


def test_every_event_becomes_what_it_says() -> None:
    run = FakeRun()
    trace = trace_of(
        Frozen(t_s=1, node="n0"),
        Thawed(t_s=2, node="n0"),
        Slowed(t_s=3, node="n1", factor=2.5),
        WorkerCrashed(t_s=4, node="n1", device=1),
        MasterCrashed(t_s=5, down_s=7),
        Noticed(t_s=6, node="n1", grace_s=30),
        Lost(t_s=7, node="n1"),
        Joined(t_s=8, node="n1"),
        ForkServerCrashed(t_s=9, node="n0"),
        AgentCrashed(t_s=10, node="n0"),
    )
    is_over, told = play(trace, run)
    assert is_over
    assert len(told) == len(trace.events)
    assert told[1].startswith("2 s: node0 ")
    assert run.asked == [
        signal("node0", "STOP", "*"),
        signal("node0", "CONT", "*"),
        SlowRequest(node="node1", factor=2.5),
        signal("node1", "KILL", "worker1"),
        "down for 7 s",
        signal("node1", "TERM", "agent"),
        KillRequest(node="node1"),
        AddRequest(node="node1"),
        signal("node0", "KILL", "fork_server"),
        signal("node0", "KILL", "agent"),
    ]


def test_partitions_are_said_not_to_be_played() -> None:
    trace = trace_of(Partitioned(t_s=1, nodes=("n0",)), Healed(t_s=2), Lost(t_s=3, node="n1"))
    run = FakeRun()
    _, told = play(trace, run)
    assert [line.partition(" is ")[0] for line in told[:2]] == ["1 s: partition", "2 s: heal"]
    assert run.asked == [KillRequest(node="node1")]
    assert all(words in str(not_played(trace)) for words in ("1 heal", "1 partition"))
    assert not_played(trace_of(Lost(t_s=3, node="n1"))) is None


def test_what_the_run_refuses_is_told_and_the_trace_goes_on() -> None:
    run = FakeRun(refused="node0")
    is_over, told = play(trace_of(Lost(t_s=1, node="n0"), Lost(t_s=2, node="n1")), run)
    assert is_over
    assert all(words in told[0] for words in ("1 s: ", "node_lost", "node0"))
    assert run.asked[1] == KillRequest(node="node1")


def test_a_run_that_ends_ends_the_trace() -> None:
    is_over, told = play(trace_of(Lost(t_s=1, node="n0"), Lost(t_s=2, node="n1")), FakeRun(ends=1))
    assert not is_over
    assert len(told) == 1


@given(trace=traces())
def test_every_trace_can_be_played(trace: Trace) -> None:
    run = FakeRun()
    names = name_nodes(trace, [f"host{index}" for index in range(6)], [f"spare{index}" for index in range(6)])
    assert len(set(names.values())) == len(trace.nodes)
    assert Player(run, names, speedup=SPEEDUP, tell=lambda _: None).play(trace)
    unplayed = sum(isinstance(event, Partitioned | Healed) for event in trace.events)
    twice = sum(isinstance(event, AgentFrozen) for event in trace.events)  # stopped, and let go on
    assert len(run.asked) == len(trace.events) - unplayed + twice


def test_nodes_are_those_of_the_same_name_or_those_in_the_same_order() -> None:
    trace = Trace(duration_s=1, nodes=("a", "b", "c"), start=("a", "b"))
    assert name_nodes(trace, ["b", "a", "x"]) == {"a": "a", "b": "b", "c": "c"}
    assert name_nodes(trace, ["node0", "node1"], ["node2"]) == {"a": "node0", "b": "node1", "c": "node2"}
    with pytest.raises(ConfigError, match=r"2 nodes.* 1 "):
        name_nodes(trace, ["node0"], ["node2"])
    with pytest.raises(ConfigError, match=r"1 nodes.* 0 "):
        name_nodes(trace, ["node0", "node1"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["no.json"], "no.json"),
        (["t.json", "--speedup", "0"], "--speedup: 0 is not possible"),
        (["t.json", "--steps", "3"], "belong to a new run; add --local N"),
        (["t.json", "--local", "1"], "the trace begins with 2 nodes, and the run has 1"),
        (["t.json"], "no run is active"),
    ],
)
def test_what_cannot_be_played_is_refused_before_anything_starts(
    tmp_path, monkeypatch, capsys, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json.dumps({"version": 1, "duration_s": 9, "nodes": ["a", "b"], "events": []}))
    assert main(["chaos", *arguments, "--base-dir", "base"]) in (2, 78)
    assert words in " ".join(capsys.readouterr().err.split())


SET, OPTION = ("--set", "tag=from-set"), ("--tag", "from-option")


@pytest.mark.parametrize(
    ("tag", "options"),
    [
        pytest.param("chaos", (), marks=pytest.mark.slow),
        ("from-file", ("--job", "job.yaml")),
        pytest.param("from-set", ("--job", "job.yaml", *SET), marks=pytest.mark.slow),
        ("from-option", ("--job", "job.yaml", *SET, *OPTION)),
    ],
)
def test_a_new_runs_tag_is_that_of_its_job(
    tmp_path: Path, capfd, monkeypatch: pytest.MonkeyPatch, tag: str, options: tuple[str, ...]
) -> None:
    """The run itself ends at once, for its tag's directory is a file; which one, it says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.json").write_text(json.dumps({"version": 1, "duration_s": 9, "nodes": ["a"], "events": []}))
    (tmp_path / "job.yaml").write_text("tag: from-file\n")
    (tmp_path / "base").mkdir(mode=0o700)
    (tmp_path / "base" / tag).touch()
    base = ("--base-dir", str(tmp_path / "base"))
    assert main(["chaos", "t.json", "--local", "1", "--plain", *options, *base]) == 78
    assert f"base/{tag}" in capfd.readouterr().err
