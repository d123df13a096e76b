from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oobleck.cli.inputs import (
    KindCount,
    NodeOptions,
    VirtualOnes,
    parse_nodes,
    parse_prices,
    parse_profiles,
    read_source,
)
from oobleck.cli.inputs.kinds_option import parse_local
from oobleck.errors import UsageError


def test_nodes_are_a_number_or_kinds_with_theirs():
    assert parse_nodes("16") == 16
    assert parse_nodes("A100:16,A40:8x4") == (
        KindCount(kind="A100", num_nodes=16, devices_per_node=None),
        KindCount(kind="A40", num_nodes=8, devices_per_node=4),
    )
    assert KindCount(kind="A40", num_nodes=2, devices_per_node=None).names == ("A40-0", "A40-1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "Invalid value for '--nodes': 0 is not possible; it must be a whole number from 1 to 16,384"),
        ("-3", "it must be a whole number from 1"),
        ("A100", "--nodes 'A100' is not KIND:VALUE"),
        ("A100:", "is not KIND:VALUE"),
        ("a b:4", "is not KIND:VALUE"),
        ("A100:x4", "write KIND:NODES or KIND:NODESxDEVICES"),
        ("A100:4x", "write KIND:NODES or KIND:NODESxDEVICES"),
        ("A100:0", "--nodes A100:0 is not possible; a kind has 1 to 16,384 nodes"),
        ("A100:4x0", "--nodes A100:4x0 is not possible"),
        ("A100:4,A100:2", "--nodes names A100 twice"),
        ("a:1,b:1,c:1,d:1,e:1", "--nodes names 5 kinds; there may be 4"),
    ],
)
def test_nodes_that_are_neither_are_named(text: str, message: str):
    with pytest.raises(UsageError) as error:
        parse_nodes(text)
    assert message in str(error.value)


def test_prices_and_profiles_name_each_kind_once():
    kinds = ("A100", "A40")
    assert parse_prices("A40:0.9, A100:3.2", kinds) == {"A40": 0.9, "A100": 3.2}
    assert parse_profiles("A40:a.json,A100:dir/b.json", kinds) == {"A40": Path("a.json"), "A100": Path("dir/b.json")}
    for text, message in (
        ("A100:3", "--prices leaves A40 out; name each kind of --nodes"),
        ("A100:3,A40:0", "--prices A40:0 is not possible; it must be a number above 0"),
        ("A100:3,A40:nan", "--prices A40:nan is not possible"),
        ("A100:3,A40:cheap", "--prices A40:cheap is not possible"),
        ("A100:3,A40:1,H100:9", "--prices names H100, which --nodes does not; did you mean A100?"),
    ):
        with pytest.raises(UsageError) as error:
            parse_prices(text, kinds)
        assert message in str(error.value)


def test_virtual_nodes_may_be_of_kinds():
    assert parse_local("4") == 4
    assert parse_local("-1") == -1, "the limits are the machine's"
    local = parse_local("fast:2,slow:1x2")
    assert isinstance(local, tuple)
    source = read_source(None, NodeOptions(local=local))
    assert isinstance(source, VirtualOnes)
    assert source.names == ("node0", "node1", "node2")
    assert source.shapes(num_spare=3, num_devices=1) == (
        *(("fast", 1), ("fast", 1), ("slow", 2)),
        *(("fast", 1), ("slow", 2), ("fast", 1)),
    )
    with pytest.raises(UsageError, match="--local: 30000 nodes are not possible here"):
        read_source(None, NodeOptions(local=(replace(local[0], num_nodes=29_999), local[1])))
    with pytest.raises(UsageError, match="--local 'fast' is not KIND:VALUE"):
        parse_local("fast")


def test_how_often_a_command_is_asked_is_refused_without_the_command() -> None:
    with pytest.raises(UsageError, match=r"--hosts-every: .*--hosts-from"):
        read_source(None, NodeOptions(local=1, hosts_every=5.0))
