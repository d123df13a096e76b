"""A script that trains twice is found before it has trained once, where that is sure."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from oobleck.transformers.repeats import second_train


class Fake:
    """Notes what is seen where its `train()` is called, and goes no further."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def train(self, *_args: Any, **_named: Any) -> None:
        self.seen.append(second_train(sys._getframe(1)))


def seen(directory: Path, text: str) -> Any:
    script = directory / "script.py"
    script.write_text(textwrap.dedent(text))
    trainer, other = Fake(), Fake()
    names = {"__name__": "__main__", "trainer": trainer, "other": other, "model": Fake(), "again": False}
    exec(compile(script.read_text(), str(script), "exec"), names)
    return trainer.seen[0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("trainer.train()\ntrainer.train()", (2, False)),
        ("trainer.train(\n    1,\n    2,\n)\nx = 3\nresult = trainer.train()", (6, False)),
        ("def main():\n    trainer.train()\n    trainer.train()\nmain()", (3, False)),
        ("def first():\n    trainer.train()\nfirst()\ntrainer.train()", None),
        ("if again:\n    trainer.train(1)\nelse:\n    trainer.train()", None),
        ("if not again:\n    trainer.train(1)\ntrainer.train()", (3, False)),
        ("trainer.train()\nif again:\n    trainer.train()", None),
        ("trainer.train()\nmodel.train()", None),
        ("trainer.train()\ndef more():\n    trainer.train()", None),
        ("for rate in (1, 2):\n    trainer.train()", (1, True)),
        ("for attempt in range(3):\n    trainer.train()\n    break", None),
        ("try:\n    trainer.train()\nexcept ValueError:\n    trainer.train()", None),
    ],
)
def test_what_would_train_again_is_seen_at_the_first_train(tmp_path: Path, text: str, expected: Any):
    assert seen(tmp_path, text) == expected


def test_a_script_without_a_file_is_left_alone():
    trainer = Fake()
    exec(compile("trainer.train()\ntrainer.train()", "<nowhere>", "exec"), {"__name__": "__main__", "trainer": trainer})
    assert trainer.seen == [None, None]
