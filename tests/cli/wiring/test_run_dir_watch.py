"""What a run does when somebody removes its directory."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import pytest
import trio

from oobleck.cli.wiring.run_dir_watch import watch_run_directory
from oobleck.errors import UsageError
from oobleck.runtime.files.run_dir import RunDirectory
from oobleck.runtime.journals.journal_file import JournalWriter, read_journal
from oobleck.runtime.metrics_output import MetricsOutput
from tests.control.journals import run_with_a_loss


async def test_a_directory_that_is_removed_is_made_again_and_said_to_have_been(tmp_path: Path) -> None:
    directory = RunDirectory(base_dir=tmp_path / "base", tag="t")
    directory.create()
    entries = list(run_with_a_loss(steps=20, lost_at=4))
    said: list[str] = []
    listening: list[bool] = []
    heard = trio.Event()

    def say(text: str) -> None:
        said.append(text)
        heard.set()

    metrics = MetricsOutput(directory.metrics, tensorboard=False)
    with directory.lock(), JournalWriter(directory.journal) as journal:
        for entry in entries[:20]:
            journal.append(entry)
            metrics.apply(entry)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                partial(
                    watch_run_directory,
                    directory,
                    journal,
                    metrics,
                    say=say,
                    listen=lambda: listening.append(True),
                    period_s=0.01,
                )
            )
            await trio.sleep(0.05)
            assert said == []
            shutil.rmtree(directory.path)
            with trio.fail_after(10):
                await heard.wait()
            with pytest.raises(UsageError, match="is active"), directory.lock():
                pass
            nursery.cancel_scope.cancel()
        for entry in entries[20:]:
            journal.append(entry)
            metrics.apply(entry)
    metrics.close()
    assert str(directory.path) in said[0]
    assert listening == [True]
    assert list(read_journal(directory.journal)) == entries
    assert len(directory.metrics.read_text().splitlines()) == 20
