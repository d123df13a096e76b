"""A command that prints a hostfile: a cloud's tool, a scheduler or a discovery script that lists the current nodes."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

import trio

from oobleck.errors import ConfigError
from oobleck.runtime.shell_command import shell_command

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

    Raises ConfigError if the command cannot be started, fails, does not end in time (it is then killed, with its
    children), or prints something other than text.
    """
    printed, errors = bytearray(), bytearray()
    try:
        with trio.move_on_after(timeout_s) as waiting:
            async with shell_command(command, errors=subprocess.PIPE) as process:
                assert process.stdout is not None
                assert process.stderr is not None
                async with trio.open_nursery() as reading:
                    reading.start_soon(_keep_end, process.stderr, errors)
                    while len(printed) <= _MOST_BYTES and (data := await process.stdout.receive_some(_READ_BYTES)):
                        printed += data
                    # A command that prints without end would never end by itself.
                    if len(printed) > _MOST_BYTES:
                        waiting.cancel()
                status = await process.wait()
    except OSError as error:
        raise ConfigError(f"{named} cannot be started: {error.strerror}") from error
    if len(printed) > _MOST_BYTES:
        raise ConfigError(f"{named} printed more than {_MOST_BYTES >> 20} MiB")
    if waiting.cancelled_caught:
        raise ConfigError(f"{named} did not end within {timeout_s:g} s{_last_line(errors)}")
    if status:
        how = f"status {status}" if status > 0 else f"signal {-status}"
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
