"""What keys do: those that end something are asked about once more."""

from __future__ import annotations

import pytest

from oobleck.ui.controls import Controls, Mode, Quit, Wish, keys_in

NODES = ("node0", "node1", "node10")


def pressed(*keys: str, num_events: int = 30) -> tuple[Controls, list[object]]:
    controls, wanted = Controls(), []
    for key in keys:
        result = controls.press(key, NODES, num_events)
        wanted += [] if result is None else [result]
    return controls, wanted


@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (("k", "enter", "y"), [Wish("kill", "node0")]),
        (("k", "down", "enter", "y"), [Wish("kill", "node1")]),
        (("k", "up", "enter", "y"), [Wish("kill", "node10")]),
        (("k", "1", "enter", "y"), [Wish("kill", "node1")]),
        (("k", "1", "0", "enter", "y"), [Wish("kill", "node10")]),
        (("k", "x", "erase", "enter", "y"), [Wish("kill", "node0")]),
        (("d", "down", "enter", "y"), [Wish("drain", "node1")]),
        (("s", "y"), [Wish("stop")]),
        (("s", "n"), []),
        (("s", "enter"), []),
        (("k", "enter", "n"), []),
        (("k", "enter", "escape"), []),
        (("k", "escape", "y"), []),
        (("k", "x", "enter", "y"), []),
        (("k", "y"), []),
        (("?", "s", "y"), []),
    ],
)
def test_a_request_needs_a_node_and_a_yes(keys, wanted):
    assert pressed(*keys)[1] == wanted


def test_quitting_needs_no_confirmation_because_it_ends_nothing():
    (wanted,) = pressed("q")[1]
    assert isinstance(wanted, Quit)


def test_events_scroll_within_what_there_is():
    assert pressed("up", "up", "down")[0].scrolled == 1
    assert pressed("page up", "page up", num_events=15)[0].scrolled == 14
    assert pressed("up", "page down")[0].scrolled == 0
    assert pressed("page up", "end")[0].scrolled == 0


def test_any_key_leaves_the_help():
    assert pressed("?")[0].mode is Mode.HELP
    assert pressed("?", "q")[0].mode is Mode.WATCHING


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("kq", ["k", "q"]),
        ("\x1b", ["escape"]),
        ("\x1b[A\x1bOB", ["up", "down"]),
        ("\x1b[5~k\r", ["page up", "k", "enter"]),
        ("\x1b[15~", []),
        ("\x1b[1;5C", []),
        ("é\x7f", ["é", "erase"]),
    ],
)
def test_what_a_terminal_sends_is_split_into_keys(text, keys):
    assert keys_in(text) == keys
