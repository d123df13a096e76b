"""What a node's processes use, measured on real ones; GPUs by a stand-in for the driver's library, which none has."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import trio

from oobleck.control.protocol import DeviceUse
from oobleck.host.machine import this_machine
from oobleck.runtime.agent.use_meter import UseMeter

BUSY = """
held = bytearray(200_000_000)
print("ready", flush=True)
while True: pass
"""


async def test_a_busy_process_and_its_memory_are_measured() -> None:
    meter = UseMeter(this_machine())
    command = [sys.executable, "-c", BUSY]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:  # noqa: ASYNC220  it starts at once
        try:
            assert process.stdout is not None
            process.stdout.readline()
            idle = await meter.measure([], [])
            await meter.measure([process.pid], [])
            await trio.sleep(1.0)
            busy = await meter.measure([process.pid], [])
        finally:
            process.kill()
    gone = await meter.measure([process.pid], [])
    assert busy.cores > 0.05 + idle.cores
    assert busy.num_cores == this_machine().usable_cores
    assert 200_000_000 < busy.used_bytes - idle.used_bytes < 300_000_000
    assert busy.used_bytes < busy.memory_bytes == this_machine().usable_memory_bytes
    assert busy.devices == ()
    assert gone.cores >= 0.0


class NVMLError(Exception):
    pass


def driver(busy: dict[str, int]) -> SimpleNamespace:
    def handle(gpu_id: str) -> str:
        if gpu_id not in busy:
            raise NVMLError
        return gpu_id

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetHandleByUUID=handle,
        nvmlDeviceGetMemoryInfo=lambda _: SimpleNamespace(used=7, total=80),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=busy[handle]),
    )


async def test_gpus_are_read_by_their_ids_as_far_as_the_driver_answers() -> None:
    meter = UseMeter(this_machine(), load_nvml=lambda: driver({"GPU-a": 93}))
    assert (await meter.measure([], ["GPU-a", "GPU-lost"])).devices == (
        DeviceUse(busy=0.93, used_bytes=7, memory_bytes=80),
    )


async def test_a_driver_that_no_longer_answers_holds_up_no_end() -> None:
    answers = threading.Event()
    lost = SimpleNamespace(NVMLError=NVMLError, nvmlDeviceGetHandleByUUID=lambda _: answers.wait(60))
    began_s = time.monotonic()
    with trio.move_on_after(0.1) as scope:
        await UseMeter(this_machine(), load_nvml=lambda: lost).measure([], ["GPU-lost"])
    took_s = time.monotonic() - began_s
    answers.set()
    assert scope.cancelled_caught
    assert took_s < 20


async def test_without_the_driver_s_library_there_are_no_devices() -> None:
    assert (await UseMeter(this_machine(), load_nvml=lambda: None).measure([], ["GPU-a"])).devices == ()


async def test_on_a_machine_without_a_gpu_the_real_library_is_asked_in_vain() -> None:
    assert (await UseMeter(this_machine()).measure([], ["GPU-a"])).devices == ()
