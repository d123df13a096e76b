"""Rendezvous keys, many to a message."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.events.inputs import PassOn
from oobleck.control.events.key_gathering import KeyGathering, bundle_keys
from oobleck.control.protocol import StoreKeys
from oobleck.wire import MAX_FRAME_BYTES, encode_frame

NODES = ("n0", "n1", "n2")


def test_what_goes_to_one_node_goes_together_and_in_order():
    puts = [
        PassOn(nodes=("n1", "n2"), key="a", value=b"0"),
        PassOn(nodes=("n0", "n2"), key="b", value=b"1"),
        PassOn(nodes=("n2",), key="c", value=b"2"),
    ]
    assert {send.node: send.message for send in bundle_keys(puts)} == {
        "n0": StoreKeys(keys=(("b", b"1"),)),
        "n1": StoreKeys(keys=(("a", b"0"),)),
        "n2": StoreKeys(keys=(("a", b"0"), ("b", b"1"), ("c", b"2"))),
    }


def test_a_group_of_n_takes_as_many_messages_as_nodes():
    names = tuple(f"n{index}" for index in range(64))
    puts = [PassOn(nodes=tuple(set(names) - {name}), key=name, value=bytes(700)) for name in names]
    sends = list(bundle_keys(puts))
    assert sorted(send.node for send in sends) == sorted(names)


@given(st.lists(st.tuples(st.sets(st.sampled_from(NODES), min_size=1), st.integers(0, 1 << 21)), max_size=12))
def test_every_key_comes_to_each_of_its_nodes_once_in_messages_that_frames_can_hold(puts):
    commands = [
        PassOn(nodes=tuple(sorted(nodes)), key=str(index), value=bytes(size_bytes))
        for index, (nodes, size_bytes) in enumerate(puts)
    ]
    heard: dict[str, list[tuple[str, bytes]]] = {node: [] for node in NODES}
    for send in bundle_keys(commands):
        assert isinstance(send.message, StoreKeys)
        assert send.message.keys
        assert len(encode_frame(send.message)) < MAX_FRAME_BYTES
        heard[send.node] += send.message.keys
    for node, keys in heard.items():
        assert keys == [(each.key, each.value) for each in commands if node in each.nodes]


CROWD = tuple(f"n{index}" for index in range(20))


def test_a_key_that_few_nodes_want_goes_at_once():
    gathering = KeyGathering()
    (send,) = gathering.take_in(1.0, [PassOn(nodes=("n1",), key="a", value=b"0")])
    assert send.message == StoreKeys(keys=(("a", b"0"),))
    assert gathering.due_s == math.inf


def test_keys_that_many_nodes_want_wait_a_moment_and_go_together():
    gathering = KeyGathering()
    assert gathering.take_in(1.0, [PassOn(nodes=CROWD, key="a", value=b"0")]) == []
    due_s = gathering.due_s
    assert 1.0 < due_s <= 1.01
    assert gathering.take_in(1.001, [PassOn(nodes=CROWD[1:], key="b", value=b"1")]) == []
    assert gathering.due_s == due_s
    sends = {send.node: send.message for send in gathering.take_in(due_s, [])}
    assert sends.keys() == set(CROWD)
    assert sends["n0"] == StoreKeys(keys=(("a", b"0"),))
    assert sends["n1"] == StoreKeys(keys=(("a", b"0"), ("b", b"1")))
    assert gathering.due_s == math.inf
    assert gathering.take_in(due_s + 1, []) == []
