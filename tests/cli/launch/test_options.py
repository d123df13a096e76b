"""The options of `oobleck up` as keyword arguments."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from oobleck.cli.launch.words import environment_of, known_options, option_words
from oobleck.errors import UsageError


def words(**options: object) -> list[str]:
    return list(option_words(options))


def test_each_option_says_what_it_says_on_a_command_line():
    assert words(local=4, hosts_from="./hosts.sh", save_every="5m") == [
        *("--local=4", "--hosts-from=./hosts.sh", "--save-every=5m"),
    ]
    assert words(summary=Path("s.json"), no_check=True, slurm=False, steps=None) == ["--summary=s.json", "--no-check"]


def test_an_option_that_may_be_given_often_takes_several():
    assert words(kill=["node2@20", "node3@40"]) == ["--kill=node2@20", "--kill=node3@40"]
    assert words(kill="node2@20") == ["--kill=node2@20"]
    assert words(set={"optimizer.learning_rate": 3e-4, "data.paths": ["a", "b"], "checkpoint.enabled": False}) == [
        *("--set=optimizer.learning_rate=0.0003", '--set=data.paths=["a", "b"]', "--set=checkpoint.enabled=false"),
    ]


def test_variables_are_values_by_name_or_names_whose_values_are_here():
    assert environment_of({"A": 1, "B": "x y"}) == {"A": "1", "B": "x y"}
    assert environment_of(["A", "B"]) == {"A": None, "B": None}
    for wrong in (["A=1"], 3):
        with pytest.raises(UsageError, match="env: expected a mapping"):
            environment_of(wrong)


def test_a_word_that_begins_with_a_dash_is_a_value():
    assert words(seed=-1) == ["--seed=-1"]


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"stpes": 3}, r"no option 'stpes'; did you mean steps\?"),
        ({"hostfile": "hosts.txt"}, "no option 'hostfile'; known are .*hosts_from, .*local, "),
        ({"plain": True}, "no option 'plain'"),
        ({"json": True}, "no option 'json'"),
        ({"no_check": "yes"}, "no_check: expected True or False, got 'yes'"),
        ({"steps": True}, "steps: expected text, a number or a path, got True"),
        ({"save_every": timedelta(minutes=5)}, "save_every: expected text, a number or a path, got datetime"),
    ],
)
def test_what_is_no_option_is_refused_with_what_may_be_meant(option: dict[str, object], text: str):
    with pytest.raises(UsageError, match=text):
        words(**option)


def test_all_options_are_there_but_those_of_terminals():
    assert {"local", "tag", "tp", "fault_threshold", "resume", "ssh_config", "metrics"} <= known_options().keys()
    assert not {"dry_run", "until_eof", "job", "help", "base_dir"} & known_options().keys()
