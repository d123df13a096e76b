from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from oobleck.cli.inputs.values import duration_s
from oobleck.cli.main import main
from oobleck.sim.trace import Lost, Noticed, trace_from_json

PUBLIC = "0,add,a\n0,add,b\n60000,remove,a\n90000,add,a\n"


def test_a_generated_trace_is_printed_and_the_same_again(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["trace", "generate", "--nodes", "8", "--duration", "1d", "--preset", "spot-p3", "--seed", "3"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    assert capsys.readouterr().out == first
    assert len(trace_from_json(first).nodes) == 8


def test_own_rates_take_the_place_of_published_ones(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    options = ["--mtbf", "10m", "--repair", "1h", "--batches", "2:1", "--notice", "90s", "--weibull-shape", "0.8"]
    assert main(["trace", "generate", "--nodes", "40", "--duration", "2d", *options, "-o", str(path)]) == 0
    trace = trace_from_json(path.read_text())
    losses = [event for event in trace.events if isinstance(event, Lost)]
    assert len(losses) == pytest.approx(2 * 24 * 6, rel=0.3)
    assert any(isinstance(event, Noticed) for event in trace.events)


def test_a_public_trace_is_recognised_and_converted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "p.csv", tmp_path / "t.json"
    source.write_text(PUBLIC)
    assert main(["trace", "convert", str(source), "-o", str(target)]) == 0
    assert main(["trace", "info", str(target), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["num_nodes"], facts["events"]) == (2, {"node_joined": 1, "node_lost": 1})
    assert (facts["mean_nodes"], facts["away_s_median"]) == (pytest.approx(2 - 30 / 90), 30)


def test_info_draws_the_nodes_over_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.json"
    assert main(["trace", "generate", "--nodes", "8", "--duration", "1h", "--mtbf", "10m", "-o", str(path)]) == 0
    assert main(["trace", "info", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "8 nodes" in shown
    assert "1:00:00" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "--nodes", "2", "--duration", "1h"], 2, "give either --preset NAME or --mtbf TIME"),
        (["generate", "--nodes", "2", "--duration", "1h", "--mtbf", "1h", "--preset", "rsc1"], 2, "give either"),
        (["generate", "--nodes", "2", "--duration", "1h", "--preset", "x"], 2, "must be one of llama3"),
        (["generate", "--nodes", "2", "--duration", "0", "--preset", "rsc1"], 2, "--duration is 0; it must be longer"),
        (["generate", "--nodes", "2", "--duration", "1 week", "--preset", "rsc1"], 2, "is not a duration; write 45s"),
        (
            ["generate", "--nodes", "2", "--duration", "1h", "--mtbf", "1h", "--batches", "2"],
            2,
            "'2' is not SIZE:WEIGHT",
        ),
        (
            ["generate", "--nodes", "2", "--duration", "1h", "--mtbf", "1h", "--weibull-shape", "0"],
            2,
            "'--weibull-shape': 0 is not possible",
        ),
        (
            ["generate", "--nodes", "2", "--duration", "1h", "--mtbf", "1h", "--repair", "1h", "--no-repair"],
            2,
            "leave one out",
        ),
        (["convert", "no-such-file"], 2, "no-such-file"),
        (["info", "no-such-file"], 2, "no-such-file"),
    ],
)
def test_bad_usage_says_what_to_change(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", *arguments]) == code
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_file_of_no_known_format_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("hello\n")
    assert main(["trace", "convert", str(path)]) == 2
    assert "--format oobleck|bamboo" in capsys.readouterr().err
    assert main(["trace", "convert", str(path), "--format", "nosuch"]) == 2
    assert "--format" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("45s", 45), ("10m", 600), ("3.1h", 11160), ("54d", 4_665_600), ("250ms", 0.25)]
)
def test_durations_have_units(text: str, seconds: float) -> None:
    assert duration_s(text) == pytest.approx(seconds)


def test_a_duration_without_sense_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="-3h"):
        duration_s("-3h")
