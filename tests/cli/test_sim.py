from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ElementTree
from io import StringIO
from pathlib import Path

import pytest

from oobleck.cli.main import main
from oobleck.planner import profile_to_json
from oobleck.sim.policies import POLICIES
from oobleck.sim.trace import Joined, Lost, Trace, trace_to_json
from oobleck.ui.run_panels import ACTIVITIES
from tests.planner.drawing import uniform_profile

SCHEMA = {
    "steps_committed", "samples_committed", "steps_lost", "samples_repeated", "samples_missing", "losses",
    "tokens_per_s", "step_time_s", "goodput", "downtime_s", "elapsed_s", "generations", "recoveries", "seed", "plan",
    "node_hours",
}  # fmt: skip
NODES = ("node0", "node1", "node2", "node3")


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    trace = Trace(
        duration_s=3600,
        nodes=NODES,
        start=NODES,
        events=(Lost(t_s=600, node="node1"), Joined(t_s=1200, node="node1")),
    )
    (tmp_path / "t.json").write_text(trace_to_json(trace))
    (tmp_path / "p.json").write_text(profile_to_json(uniform_profile(4, memory_bytes=80, seconds=0.5)))
    return [
        "sim", "--failures", str(tmp_path / "t.json"), "--profile", str(tmp_path / "p.json"), "--global-batch", "8",
    ]  # fmt: skip


def test_a_run_ends_with_the_summary_that_real_runs_have(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--summary", str(tmp_path / "s.json")]) == 0
    shown = capsys.readouterr().out
    assert "goodput" in shown
    assert "samples/s" in shown
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary.keys() >= SCHEMA
    assert [recovery["cause"] for recovery in summary["recoveries"]] == ["connection_lost", "joined"]
    assert (summary["elapsed_s"], summary["steps_lost"]) == (3600, 0)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("kind", "is_shown"), [(Terminal, True), (StringIO, False)])
def test_progress_is_shown_on_a_terminal_alone(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, *, kind: type[StringIO], is_shown: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", kind())
    assert main(arguments) == 0
    assert isinstance(sys.stderr, StringIO)
    assert ("simulating oobleck" in sys.stderr.getvalue()) is is_shown


def test_several_policies_are_compared_in_one_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--policy", ",".join(POLICIES), "--json"]) == 0
    summaries = json.loads(capsys.readouterr().out)
    assert list(summaries) == list(POLICIES)
    assert all(summary.keys() >= SCHEMA for summary in summaries.values())
    assert summaries["oobleck"]["samples_committed"] > summaries["restart"]["samples_committed"]


def test_the_same_command_gives_the_same_summary(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    first = capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    assert capsys.readouterr().out == first


def test_the_picture_has_a_panel_for_each_policy_and_units(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.svg"
    assert main([*arguments, "--policy", "oobleck,varuna", "--plot", str(path)]) == 0
    texts = [element.text for element in ElementTree.fromstring(path.read_text()).iter() if element.text]
    assert [text for text in texts if text in ("oobleck", "varuna")] == ["oobleck", "varuna"]
    assert texts.count("samples/s") == 2
    assert texts.count("nodes") == 2
    assert any(text.endswith(" min") for text in texts)


def test_the_chrome_trace_covers_the_whole_run(arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "r.trace.json"
    assert main([*arguments, "--chrome-trace", str(path)]) == 0
    slices = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(event["dur"] for event in slices) == pytest.approx(3600e6)
    assert {event["name"] for event in slices} <= {words for words, _ in ACTIVITIES.values()}


@pytest.mark.slow
def test_the_modes_agree(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    swept = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--mode", "cluster", "--json"]) == 0
    played = json.loads(capsys.readouterr().out)
    assert played["steps_committed"] == pytest.approx(swept["steps_committed"], rel=0.02)
    assert [r["action"] for r in played["recoveries"]] == [r["action"] for r in swept["recoveries"]]
    assert [r["nodes"] for r in played["recoveries"]] == [r["nodes"] for r in swept["recoveries"]]


def test_a_schedule_without_bubbles_trains_more(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    profile = uniform_profile(4, memory_bytes=40, seconds=0.5)  # two nodes hold the model: pipelines of two stages
    Path(arguments[4]).write_text(profile_to_json(profile))
    samples = {}
    for schedule in ("1f1b", "zero-bubble", "auto"):
        assert main([*arguments, "--schedule", schedule, "--json"]) == 0
        samples[schedule] = json.loads(capsys.readouterr().out)["samples_committed"]
    assert samples["zero-bubble"] > 1.05 * samples["1f1b"]
    # Schedules are chosen for a plan, and the plan was chosen for 1F1B.
    assert samples["auto"] == pytest.approx(samples["zero-bubble"], rel=0.01)


def test_spares_and_nodes_change_the_cluster(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--json"]) == 0
    without = json.loads(capsys.readouterr().out)["samples_committed"]
    assert main([*arguments, "--spares", "1", "--spare-start", "45s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_committed"] > without
    assert main([*arguments, "--spares", "1", "--json"]) == 0
    usual = capsys.readouterr().out
    assert main([*arguments, "--spares", "1", "--spare-start", "1m", "--json"]) == 0
    assert capsys.readouterr().out == usual
    assert main([*arguments, "--nodes", "6", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples_committed"] > without


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--policy", "magic"], 2, "names 'magic'; it must be one of oobleck, restart"),
        (["--policy", ","], 2, "--policy is empty"),
        (["--schedule", "dualpipe"], 2, "must be one of 1f1b, gpipe, interleaved, zero-bubble, auto"),
        (["--mode", "third"], 2, "must be sweep or cluster"),
        (["--plot", "r.pdf"], 2, "must be .svg or .png"),
        (["--checkpoint-interval", "0"], 2, "--checkpoint-interval is 0"),
        (["--policy", "torchft", "--scaling", "efficient"], 2, "--scaling: only policy oobleck follows it"),
        (["--policy", "torchft,varuna", "--schedule", "gpipe"], 2, "--schedule: only policy oobleck"),
        (["--policy", "restart", "--mode", "cluster"], 2, "--mode cluster: only policy oobleck"),
        (["--policy", "oobleck,restart", "--steps", "3"], 2, "--steps: only policy oobleck ends then"),
        (["--spare-start", "45s"], 2, "--spare-start is 45s, and --spares is 0; leave it out, or add spares"),
        (["--spare-start", "1m", "--spares", "0"], 2, "--spare-start is 60s, and --spares is 0"),
        (["--chunks", "3"], 2, "--chunks is 3, and --schedule is 1f1b; leave --chunks out, or choose interleaved"),
        (["--recompute", "all"], 2, "--recompute and --profile were both given"),
        (["--activation-checkpointing"], 2, "--activation-checkpointing and --profile were both given"),
        (["--nodes", "1"], 78, "the model needs at least 2 nodes"),
        (["--summary", "/nowhere/s.json"], 2, "/nowhere/s.json"),
    ],
)
def test_bad_usage_says_what_to_change(
    arguments: list[str], options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if options[0] == "--nodes":
        profile = uniform_profile(4, memory_bytes=40, seconds=0.5)
        Path(arguments[4]).write_text(profile_to_json(profile))
    assert main([*arguments, *options]) == code
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_bad_trace_names_its_event(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    path.write_text(path.read_text().replace('"node_joined"', '"node_frozen"'))
    assert main(arguments) == 78
    assert "event 1" in capsys.readouterr().err


def test_costs_can_be_set_one_by_one_and_by_a_file(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stall_s(*options: str) -> float:
        assert main([*arguments, "--json", *options]) == 0
        return float(json.loads(capsys.readouterr().out)["recoveries"][0]["stall_s"])

    file = tmp_path / "costs.json"
    file.write_text('{"form_s": 5, "decide_s": 1}')
    assert stall_s() < 1
    assert 5 <= stall_s("--cost", "form_s=5") < stall_s("--costs", str(file), "--cost", "form_s=7")
    assert stall_s("--costs", str(file)) >= 5
    file.write_text('{"form_s": 5, "varuna.form_s": 9}')
    assert stall_s("--costs", str(file), "--cost", "oobleck.form_s=7") == stall_s("--cost", "form_s=7")


def test_a_cost_is_one_policys_or_that_of_a_kind(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def stalls_s(*options: str) -> list[float]:
        assert main([*arguments, "--policy", "restart,varuna", "--json", *options]) == 0
        summaries = json.loads(capsys.readouterr().out)
        return [summaries[name]["recoveries"][0]["stall_s"] for name in ("restart", "varuna")]

    usual_s = stalls_s()
    assert usual_s[0] == usual_s[1]  # the same mechanism costs the same
    assert stalls_s("--cost", "checkpoint_read_s=20") == [pytest.approx(each + 10) for each in usual_s]
    assert stalls_s("--cost", "varuna.checkpoint_read_s=30") == [usual_s[0], pytest.approx(usual_s[1] + 20)]
    file = tmp_path / "costs.json"
    file.write_text('{"checkpoint_read_s": 20, "varuna.checkpoint_read_s": 30}')
    assert stalls_s("--costs", str(file)) == [pytest.approx(usual_s[0] + 10), pytest.approx(usual_s[1] + 20)]


def test_repeats_have_means_with_intervals(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--policy", "oobleck,restart", "--json"]) == 0
    single = json.loads(capsys.readouterr().out)
    assert main([*arguments, "--policy", "oobleck,restart", "--repeat", "3", "--json"]) == 0
    means = json.loads(capsys.readouterr().out)
    for policy in ("oobleck", "restart"):
        values = means[policy]["samples_per_s"]["values"]
        assert len(values) == 3
        assert values[0] == single[policy]["samples_committed"] / 3600  # the first is the trace as it is
        assert means[policy]["samples_per_s"]["mean"] == pytest.approx(sum(values) / 3)
        assert means[policy]["samples_per_s"]["half_width"] > 0
    assert main([*arguments, "--repeat", "2"]) == 0
    assert "2 traces: means and 95 % confidence intervals" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--cost", "varuna.form=5"], "--cost names 'form'; did you mean 'form_s'?"),
        (["--cost", "varuna.form_s=5"], "--cost varuna.form_s is a cost of varuna, and --policy is oobleck; leave it"),
        (["--policy", "restart,bamboo", "--cost", "oobleck.form_s=5"], "and --policy is restart,bamboo; leave it out"),
        (["--cost", "varuna2.form_s=5"], "names policy 'varuna2'; it must be one of oobleck, restart"),
        (["--cost", "num_learners=1.5"], "--cost num_learners is 1.5; it must be a whole number"),
        (["--repeat", "0"], "a whole number from 1 to 1,000"),
        (["--cost", "form=5"], "--cost names 'form'; did you mean 'form_s'?"),
        (["--cost", "form_s"], "--cost form_s has no value; write a number, such as form_s=5"),
        (["--cost", "form_s=5s"], "--cost form_s is '5s'; write a number, such as form_s=5"),
        (["--cost", "form_s=-1"], "--cost form_s is -1.0; it must be a number of at least 0"),
        (["--cost", "form_s=nan"], "--cost form_s is nan"),
        (["--costs", "nowhere.json"], "costs nowhere.json: No such file or directory"),
    ],
)
def test_a_cost_that_cannot_be_is_named(
    arguments: list[str], options: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, *options]) == 2
    assert problem in " ".join(capsys.readouterr().err.split())


def test_a_bad_file_of_costs_is_named_with_the_cost(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "costs.json"
    file.write_text('{"forms_s": 5}')
    assert main([*arguments, "--costs", str(file)]) == 78
    assert f"{file}: the file: unknown key 'forms_s'; did you mean 'form_s'?" in "".join(capsys.readouterr().err)


def test_nodes_may_be_of_several_kinds(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for index, word in enumerate(arguments) if "--profile" not in (word, arguments[index - 1])]
    slow = uniform_profile(4, memory_bytes=80, seconds=1.0)
    (tmp_path / "slow.json").write_text(profile_to_json(slow))
    kinds = ["--nodes", "fast:2,slow:2x2", "--profiles", f"fast:{tmp_path / 'p.json'},slow:{tmp_path / 'slow.json'}"]
    assert main([*given, *kinds, "--json"]) == 0
    swept = json.loads(capsys.readouterr().out)
    assert [recovery["cause"] for recovery in swept["recoveries"]] == ["connection_lost", "joined"]
    assert main([*given, *kinds, "--schedule", "interleaved"]) == 78
    assert "schedule is interleaved, and nodes are of 2 kinds" in " ".join(capsys.readouterr().err.split())
    assert main([*given, *kinds, "--policy", "oobleck,restart"]) == 2
    assert "models of other systems know one kind of nodes" in capsys.readouterr().err
    assert main([*arguments, "--profiles", "a:b"]) == 2
    assert "--profiles is for nodes of several kinds" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["oobleck", "restart", "hotswap", "recycle", "torchft", "decoupled-diloco"])
def test_a_trace_without_a_node_is_no_fault_of_the_program(
    policy: str, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.json").write_text('{"version": 1, "duration_s": 100, "nodes": [], "events": []}')
    assert main([*arguments, "--policy", policy]) == 78
    assert "nodes is empty" in capsys.readouterr().err
