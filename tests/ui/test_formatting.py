from __future__ import annotations

import pytest

from oobleck.ui import formatting


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0, "0:00:00"), (83.4, "0:01:23"), (90000, "1 day, 1:00:00"), (-1, "0:00:00")]
)
def test_durations(seconds, text):
    assert formatting.duration_text(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "–"), (0.0123, "0.012 s"), (3.214, "3.21 s"), (42.06, "42.1 s"), (1234.5, "1234 s")]
)
def test_seconds(seconds, text):
    assert formatting.seconds_text(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (28_311_552, "28.3 MB"), (5e12, "5.0 TB"), (5e15, "5000.0 TB")]
)
def test_bytes(size, text):
    assert formatting.bytes_text(size) == text


def test_layers():
    assert (formatting.layers_text(3, 4), formatting.layers_text(0, 4)) == ("3", "0-3")


def test_one_line():
    assert formatting.one_line(" a\nb\t\x1b[1m ") == "a b �[1m"
