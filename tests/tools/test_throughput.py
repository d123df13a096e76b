from __future__ import annotations

import pytest

from tools.bench.throughput import main


@pytest.mark.slow
def test_all_ways_train_to_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """The script compares the losses itself, and raises where they differ."""
    main(["--rounds", "1", "--steps", "6", "--hidden", "64", "--blocks", "2", "--length", "16", "--microbatches", "4"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:6]] == ["torch", "same cut", "bubbles", "own plan", "alone"]
    assert lines[6].startswith("same cut: layers 0-1 | 2-3; bubble")
