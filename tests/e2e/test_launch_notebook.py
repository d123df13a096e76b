"""A run in a notebook: a real kernel, whose cells define the model, show the run, and are interrupted."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jupyter_client.blocking import BlockingKernelClient
from jupyter_client.manager import KernelManager

from .harness import RUN_TIMEOUT_S, TAG, Runner

MODEL = """
import torch
from torch import nn
import oobleck

VOCAB_SIZE, LENGTH, SIZE = 300, 16, 16

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, hidden):
        return hidden + torch.tanh(self.linear(hidden))

def layers():
    return [nn.Embedding(VOCAB_SIZE, SIZE), *(Block() for _ in range(2)), nn.Linear(SIZE, VOCAB_SIZE)]

def samples():
    return list(torch.arange(64 * LENGTH).remainder(VOCAB_SIZE).view(64, LENGTH))
"""
LAUNCH = f"""
job = oobleck.Job(
    model=layers, data=samples, sequence_length=LENGTH, vocab_size=VOCAB_SIZE, max_steps=100_000, torch_threads=1,
    global_batch_size=16, per_device_train_batch_size=2,
)
run = oobleck.launch(job, local=2, tag="{TAG}")
run
"""
WATCH = "for event in run: print(event)"
END = "summary = run.wait(); print(summary.reason, summary.saved_step == summary.last_step)"

Message = tuple[str, dict[str, Any]]


class Notebook:
    """Runs cells, and returns what each of them shows."""

    def __init__(self, manager: KernelManager, client: BlockingKernelClient) -> None:
        self._manager = manager
        self._client = client

    def run(self, cell: str, *, interrupt_at: str = "") -> list[Message]:
        """Run a cell; with `interrupt_at`, press the stop button once it has shown that."""
        asked = self._client.execute(cell)
        shown: list[Message] = []
        deadline_s = time.monotonic() + RUN_TIMEOUT_S
        while ("status", {"execution_state": "idle"}) not in shown[-1:]:
            assert time.monotonic() < deadline_s, shown
            try:
                message = self._client.get_iopub_msg(timeout=1.0)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != asked:
                continue
            shown.append((message["msg_type"], message["content"]))
            if interrupt_at and interrupt_at in message["content"].get("text", ""):
                self._manager.interrupt_kernel()
                interrupt_at = ""
        return shown


@pytest.fixture
def notebook(runner: Runner) -> Iterator[Notebook]:
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env={**runner.environment, "OOBLECK_BASE_DIR": str(runner.base_dir)})
    client = manager.client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield Notebook(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert runner.left_over(timeout_s=30.0) == []


def of_kind(shown: list[Message], kind: str) -> list[dict[str, Any]]:
    return [content for each, content in shown if each == kind]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the client's libraries
def test_a_notebook_shows_its_run_and_its_stop_button_ends_it(notebook: Notebook) -> None:
    assert of_kind(notebook.run(MODEL), "error") == []
    (result,) = of_kind(notebook.run(LAUNCH), "execute_result")
    assert f"<oobleck run {TAG}: " in result["data"]["text/plain"]
    assert "<pre" in result["data"]["text/html"]
    watched = notebook.run(WATCH, interrupt_at="step 3 committed")
    assert [error["ename"] for error in of_kind(watched, "error")] == ["KeyboardInterrupt"]
    assert len(of_kind(watched, "display_data")) == 1
    updates = [content["data"]["text/html"] for content in of_kind(watched, "update_display_data")]
    assert len(updates) >= 2
    assert ("stopped" in updates[-1], "stopped" in updates[0]) == (True, False)
    said = "".join(content["text"] for content in of_kind(watched, "stream"))
    assert "ended by Ctrl-C" in said.splitlines()[-1]
    (last,) = of_kind(notebook.run(END), "stream")
    assert last["text"].startswith("ended by Ctrl-C")
    assert last["text"].endswith("True\n")
