"""LayerSaver beside training: what is copied is the state of the step, whatever comes after it."""

from __future__ import annotations

import queue
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from oobleck.control.protocol import StateNotSaved, StateSaved
from oobleck.storage import CheckpointDirectory
from oobleck.training.checkpoint.state import FlashSaver, StateReader
from tests.training.fake_cuda import FakeCuda

STEM = "device0"


def make(tmp_path: Path) -> tuple[FlashSaver, queue.SimpleQueue[StateSaved | StateNotSaved]]:
    reports: queue.SimpleQueue[StateSaved | StateNotSaved] = queue.SimpleQueue()
    return FlashSaver(tmp_path / "memory", STEM, metadata={}, report=reports.put), reports


def test_a_step_applied_after_settling_leaves_what_is_saved_alone(tmp_path: Path) -> None:
    saver, reports = make(tmp_path)
    weights = torch.zeros(4 << 20)
    reader = StateReader(tmp_path / "memory", STEM, CheckpointDirectory(tmp_path / "disk"))
    for step in range(1, 6):
        weights += 1
        saver.save({0: {"weight": weights}}, name=f"step{step}", step=step, generation=1)
        saver.settle()
        weights.fill_(-1000.0 + step)
        saved = reports.get(timeout=30)
        assert isinstance(saved, StateSaved)
        assert saved.copy_s > 0
        assert torch.equal(reader.load(f"step{step}", 0)["weight"], torch.full_like(weights, saved_value(step)))


def saved_value(step: int) -> float:
    """1 after the first step, then one more than what the step before was overwritten with."""
    return 1.0 if step == 1 else -1000.0 + step - 1 + 1


def test_a_pause_is_the_time_that_training_itself_waited(tmp_path: Path) -> None:
    reports: queue.SimpleQueue[StateSaved | StateNotSaved] = queue.SimpleQueue()
    may_go_on = threading.Event()

    def report(saved: StateSaved | StateNotSaved) -> None:
        """Keep the thread that copies from the next save."""
        reports.put(saved)
        may_go_on.wait()

    saver = FlashSaver(tmp_path / "memory", STEM, metadata={}, report=report)
    layers = {0: {"weight": torch.ones(8)}}
    began_s = time.monotonic()
    saver.save(layers, name="beside", step=1, generation=1)
    called_s = time.monotonic() - began_s
    assert reports.get(timeout=30).pause_s <= called_s  # the copy is over before anybody waits for it
    saver.settle()
    began_s = time.monotonic()
    saver.save(layers, name="waited for", step=2, generation=1)
    main = threading.get_ident()
    releasing = threading.Thread(target=lambda: (until_settling(main), time.sleep(0.1), may_go_on.set()))
    releasing.start()
    saver.settle()
    assert 0.1 <= reports.get(timeout=30).pause_s <= time.monotonic() - began_s
    releasing.join()


def until_settling(thread: int) -> None:
    """Wait until a thread waits in `settle`."""
    while True:
        frame, names = sys._current_frames()[thread], []
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        if names[0] == "wait" and "settle" in names:
            return
        time.sleep(0.01)


def test_a_copy_that_fails_costs_its_own_save_alone(tmp_path: Path) -> None:
    saver, reports = make(tmp_path)
    saver.save({0: {"weight": torch.ones(8, device="meta")}}, name="step1", step=1, generation=1)
    saver.settle()
    failed = reports.get(timeout=30)
    assert isinstance(failed, StateNotSaved)
    assert "could not be copied" in failed.reason
    saver.save({0: {"weight": torch.ones(8)}}, name="step2", step=2, generation=1)
    saver.settle()
    assert isinstance(reports.get(timeout=30), StateSaved)


def test_settling_without_a_save_waits_for_nothing(tmp_path: Path) -> None:
    make(tmp_path)[0].settle()


def test_no_memory_is_told_and_tried_again(tmp_path: Path) -> None:
    saver, reports = make(tmp_path)
    (tmp_path / "memory").write_text("in the way")
    saver.save({0: {"weight": torch.ones(4)}}, name="first", step=1, generation=1)
    saver.settle()
    assert "shared memory" in reports.get(timeout=30).reason
    (tmp_path / "memory").unlink()
    saver.save({0: {"weight": torch.ones(4)}}, name="second", step=2, generation=1)
    assert isinstance(reports.get(timeout=30), StateSaved)


@pytest.mark.parametrize("count", [1, 3])
def test_layers_that_change_get_memory_of_their_own(tmp_path: Path, count: int) -> None:
    saver, reports = make(tmp_path)
    for layers in (range(count), range(count + 1)):
        saver.save({layer: {"w": torch.ones(8)} for layer in layers}, name="s", step=1, generation=1)
        assert reports.get(timeout=30).layers == tuple(layers)


def test_a_gpus_state_is_copied_beside_what_it_computes_into_pinned_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda, reports = FakeCuda(monkeypatch), queue.SimpleQueue[StateSaved | StateNotSaved]()
    device = torch.device("cuda", 2)
    saver = FlashSaver(tmp_path / "memory", STEM, metadata={}, report=reports.put, device=device)
    reader = StateReader(tmp_path / "memory", STEM, CheckpointDirectory(tmp_path / "disk"))
    for size in (3000, 5000):
        cuda.log.clear()
        weights = torch.full((size,), float(size))
        saver.save({0: {"weight": weights}}, name=f"of {size}", step=size, generation=1)
        saver.settle()
        assert isinstance(reports.get(timeout=30), StateSaved)
        assert torch.equal(reader.load(f"of {size}", 0)["weight"], weights)
        assert cuda.log == [
            "stream 1 waits for an event of computing",
            "copy on stream 1",
            "checkpoint waits for an event of stream 1",
        ], "what computes waits for nothing"
        sizes = [registered // 100 for registered in cuda.registered.values()]
        assert sizes == [4 * size // 100] * 2, "both slots, and none of a share before"
        assert all(address % 4096 == 0 for address in cuda.registered)
    assert cuda.computes_on == {"checkpoint": device}
