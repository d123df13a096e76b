"""The stub is what the other tests take it for."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tools.gpu.stub import device as stub

from . import roles
from .members import Members, wait_until


def test_torch_sees_devices_and_copies_to_them(members: Members) -> None:
    member = members.start(roles.sees_devices)
    assert len(set(member.hear())) == 4
    assert member.hear() == (True, 3, [*map(float, range(8))])
    assert members.control.get(3, "copies_in") == 1


def test_visible_devices_keep_their_ids(members: Members) -> None:
    everyone = members.start(roles.sees_devices).hear()
    assert members.start(roles.sees_devices, CUDA_VISIBLE_DEVICES="2,0").hear() == [everyone[2], everyone[0]]


def test_a_model_trains_with_the_losses_of_the_cpu(members: Members) -> None:
    on_cpu, on_stub = members.start(roles.trains, "cpu"), members.start(roles.trains, "cuda")
    losses = [[member.hear() for _ in range(10)] for member in (on_cpu, on_stub)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)
    assert losses[0][-1] < losses[0][0]


def test_a_kernel_is_refused(members: Members) -> None:
    assert members.start(roles.launches_a_kernel).hear() == "AcceleratorError"


def test_a_device_in_use_is_none_after_a_fork(members: Members) -> None:
    assert members.start(roles.forks_after_use).hear() == 3  # cudaErrorInitializationError


def test_sums_of_processes_with_two_devices_each_carry_bytes(members: Members) -> None:
    ranks = ([0, 1], [2, 3])
    for member in [members.start(roles.sums, each, 4) for each in ranks]:
        assert [member.hear()[1], member.hear()[1]] == [True, True]


def test_messages_carry_bytes_in_their_order(members: Members) -> None:
    members.start(roles.sends, 0, 5)
    receiver = members.start(roles.sends, 1, 5)
    assert [receiver.hear() for _ in range(5)] == [True] * 5


def test_who_waits_for_a_peer_takes_no_processor(members: Members) -> None:
    """A worker that does counts as one that computes, and nobody would give up the peer that it waits for."""
    waiting, _ = (members.start(roles.waits_for_a_peer, rank) for rank in range(2))
    assert waiting.hear() < 0.03


def test_a_killed_peer_is_an_asynchronous_error(members: Members) -> None:
    survivor, lost = (members.start(roles.waits_in_a_sum, rank) for rank in range(2))
    assert [survivor.hear(), lost.hear()] == ["connected"] * 2
    survivor.say("wait")
    assert survivor.is_silent(0.3)
    lost.signal(signal.SIGKILL)
    said, _ = survivor.hear()
    assert said == "DistBackendError"


def test_a_frozen_peer_is_waited_for_until_an_abort_which_poisons(members: Members) -> None:
    survivor, frozen = (members.start(roles.waits_in_a_sum, rank) for rank in range(2))
    assert [survivor.hear(), frozen.hear()] == ["connected"] * 2
    frozen.signal(signal.SIGSTOP)
    survivor.say("wait")
    assert survivor.is_silent(0.5)
    survivor.say("abort")
    said, interrupted_s = survivor.hear()
    ended_s, first, last = survivor.hear()
    assert said == "Interrupted"
    assert all(map(math.isnan, [*first, *last]))
    assert ended_s - interrupted_s < 1.0


def test_a_device_that_fails_poisons_what_it_was_to_write(members: Members) -> None:
    member = members.start(roles.has_its_device_fail)
    assert member.hear() == "waits"
    members.control.set(0, "device_error", 719)  # cudaErrorLaunchFailure
    member.say()
    said, values = member.hear()
    assert said == "AcceleratorError"
    assert all(map(math.isnan, values))


def test_a_member_does_what_it_is_armed_for_at_the_moment(members: Members) -> None:
    control = members.control
    control.arm(1, "kill", "sums", after=2)
    survivor, lost = (members.start(roles.waits_in_a_sum, rank) for rank in range(2))
    assert [survivor.hear(), lost.hear()] == ["connected"] * 2
    lost.say("wait")
    wait_until(lambda: not lost.process.is_alive())
    assert lost.process.exitcode == -signal.SIGKILL
    assert control.armed == []
    assert control.get(1, "sums") == 2


def test_no_two_threads_race_in_the_stub(tmp_path: Path) -> None:
    program = tmp_path / "races"
    sources = [Path(stub.__file__).parent / source for source in stub.SOURCES]
    command = ["gcc", "-std=gnu11", "-g", "-O1", "-fsanitize=thread", *stub.headers(), *map(str, sources)]
    built = subprocess.run(
        [*command, str(Path(__file__).with_name("races.c")), "-o", str(program), "-lpthread", "-ldl"],
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot find" in built.stderr:
        pytest.skip("gcc has no thread sanitizer here")
    assert built.returncode == 0, built.stderr
    variables = {**os.environ, "CUDA_STUB_DIR": str(tmp_path), "CUDA_STUB_DEVICES": "2"}
    done = subprocess.run([str(program)], capture_output=True, text=True, env=variables, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
