"""A command that prints a hostfile: a cloud's tool, a scheduler or a discovery script that lists the current nodes."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass

import trio

from oobleck.errors import ConfigError

_READ_BYTES = 1 << 16
_MOST_BYTES = 4 << 20
_ERRORS_BYTES = 4096
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class HostsCommand:
    command: str
    interval_s: float = 10.0
    timeout_s: float = 30.0
    name: str = "--hosts-from"

    @property
    def source(self) -> str:
        return f"--hosts-from {self.command!r}"

    async def read(self) -> str:
        """Raises ConfigError."""
        return await printed_by(self.command, named=self.source, timeout_s=self.timeout_s)


async def printed_by(command: str, *, named: str, timeout_s: float) -> str:
    """Run a shell command, called `named` in errors; return its output.

    Raises ConfigError if the command fails, does not end in time (it is then killed, with its children), or prints
    something other than text.
    """
    process = await trio.lowlevel.open_process(
        ["/bin/sh", "-c", command],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,  # a process group that can be killed as a whole
    )
    assert process.stdout is not None
    assert process.stderr is not None
    printed, errors = bytearray(), bytearray()
    try:
        with trio.move_on_after(timeout_s) as waiting:
            async with trio.open_nursery() as reading:
                reading.start_soon(_keep_end, process.stderr, errors)
                while len(printed) <= _MOST_BYTES and (data := await process.stdout.receive_some(_READ_BYTES)):
                    printed += data
                # A command that prints without end would never end by itself.
                if len(printed) > _MOST_BYTES:
                    waiting.cancel()
            await process.wait()
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            # The process has been killed, so this wait is short, and no zombie is left.
            with trio.CancelScope(shield=True):
                await process.wait()
        for stream in (process.stdout, process.stderr):
            await trio.aclose_forcefully(stream)
    if len(printed) > _MOST_BYTES:
        raise ConfigError(f"{named} printed more than {_MOST_BYTES >> 20} MiB")
    if waiting.cancelled_caught:
        raise ConfigError(f"{named} did not end within {timeout_s:g} s{_last_line(errors)}")
    if process.returncode:
        how = f"status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        raise ConfigError(f"{named} failed with exit {how}{_last_line(errors)}")
    try:
        return printed.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} printed something that is not UTF-8 text ({error.reason})") from error


async def _keep_end(stream: trio.abc.ReceiveStream, kept: bytearray) -> None:
    while data := await stream.receive_some(_READ_BYTES):
        kept += data
        del kept[:-_ERRORS_BYTES]


def _last_line(errors: bytearray) -> str:
    lines = errors.decode(errors="replace").strip().splitlines()
    return f": {lines[-1][:_SHOWN_CHARS]}" if lines else ""
