"""What ended a worker is said where the exception is still an object."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oobleck.control.protocol import ErrorKind
from oobleck.control.steps import PeerLost
from oobleck.errors import ConfigError, DataError, ShardUnreadable
from oobleck.training.process.errors import kind_of, raised


def caught(call) -> BaseException:
    try:
        call()
    except Exception as error:  # noqa: BLE001  whatever it is, it is what is looked at
        return error
    raise AssertionError("it raised nothing")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (DataError("data.paths: no text in /data"), ErrorKind.DATA),
        (ConfigError("model.type: 'bert2' is not a language model"), ErrorKind.JOB),
        (MemoryError(), ErrorKind.MEMORY),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), ErrorKind.MEMORY),
        (torch.AcceleratorError("CUDA error: device-side assert triggered"), ErrorKind.DEVICE),
        (PeerLost("node1:0 is gone"), ErrorKind.PEER),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:4711"), ErrorKind.PEER),
        (ConnectionResetError(104, "Connection reset by peer"), ErrorKind.PEER),
        (OSError(12, "Cannot allocate memory"), ErrorKind.MEMORY),
        (ShardUnreadable("no such file"), ErrorKind.CODE),
        (ValueError("out of memory of what data.paths said to gloo"), ErrorKind.CODE),
        (KeyError("gloo"), ErrorKind.CODE),
        (RuntimeError("shapes do not fit"), ErrorKind.CODE),
        (KeyboardInterrupt(), ErrorKind.CODE),
        (None, ErrorKind.CODE),
    ],
)  # fmt: skip
def test_errors_are_told_apart_by_what_they_are(error, kind):
    assert kind_of(error) is kind


def test_memory_that_torch_does_not_get_is_told_from_a_mistake():
    assert kind_of(caught(lambda: torch.empty(1 << 50))) is ErrorKind.MEMORY
    assert kind_of(caught(lambda: nn.Linear(2, 3)(torch.zeros(5, 7)))) is ErrorKind.CODE


def test_the_message_is_the_exceptions_or_what_the_user_must_change():
    error = raised(caught(lambda: int("x")))
    assert error.message == "ValueError: invalid literal for int() with base 10: 'x'"
    assert error.traceback.rstrip().endswith(error.message)
    assert raised(ConfigError("model.type: no")).message == "model.type: no"


def test_the_message_of_an_exception_of_several_lines_is_its_first():
    """As torch words those of a GPU, which end with advice that is the same for all."""
    words = "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.\n"
    assert raised(torch.AcceleratorError(words)).message.endswith("Error: CUDA error: device-side assert triggered")
    misfit = raised(caught(lambda: nn.Linear(2, 3).load_state_dict(nn.Linear(2, 4).state_dict()))).message
    assert misfit.startswith("RuntimeError: Error(s) in loading state_dict for Linear: size mismatch for weight")
    assert raised(KeyError()).message == "KeyError"
