from __future__ import annotations

import pytest

from tools.bench.sections import main


@pytest.mark.slow
def test_one_section_and_several_train_to_the_same_losses(capsys: pytest.CaptureFixture[str]) -> None:
    """The script compares the losses itself, and raises where they differ."""
    main(["--rounds", "1", "--steps", "4", "--hidden", "64", "--blocks", "2", "--length", "16", "--microbatches", "8"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": step ")[0] for line in lines[2:4]] == ["1 sections", "4 sections"]
    assert lines[4].startswith("throughput of 4 sections, of one's: ")
