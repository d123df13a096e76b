"""A process's standard streams, which may be closed, full, broken, or limited to ASCII.

A command whose answer cannot be written fails. A run of days continues without its output.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import BinaryIO, TextIO

from oobleck.errors import ExitCode, UserError

_PASSING = (errno.ENOSPC, errno.EDQUOT)  # there may be room again later


class Output(io.TextIOBase):
    """A text stream that remembers its first failure, and, if it is `lasting`, does not raise it."""

    # It has no `buffer`, because typer would write past this class to that.
    def __init__(self, stream: TextIO, *, lasting: bool = False) -> None:
        self.lasting = lasting
        self.failure: OSError | None = None
        self.is_lost = False
        """Whether no write can succeed any more."""
        self._stream = stream

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"a text stream takes str, not {type(text).__name__}")
        self._attempt(lambda: self._stream.write(text))
        return len(text)

    def write_as_read(self, text: str) -> None:
        """Write the bytes that a text was decoded from, including its surrogates, whatever the stream's encoding."""
        content = text.encode("utf-8", errors="surrogateescape")
        if isinstance(self._stream, io.TextIOWrapper):
            buffer = self._stream.buffer
            self.flush()
            self._attempt(lambda: buffer.write(content))
        else:
            self.write(content.decode(errors="replace"))

    def flush(self) -> None:
        self._attempt(self._stream.flush)

    def _attempt(self, act: Callable[[], object]) -> None:
        if self.is_lost and self.lasting:
            return
        try:
            act()
        except OSError as error:
            self.failure = self.failure or error
            self.is_lost = error.errno not in _PASSING
            if not self.lasting:
                raise self.failure from None  # always the same one, which `main` recognises

    @property
    def encoding(self) -> str:  # type: ignore[override]  # a property, as in every writable text stream
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]  # the same
        return self._stream.errors

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def writable(self) -> bool:
        return True


class ScriptOutput(Output):
    """The output of a user's code, which may write bytes or reconfigure the stream; only bytes can fail."""

    @property
    def buffer(self) -> BinaryIO:
        return self._stream.buffer

    def __getattr__(self, name: str) -> object:
        """Return what only files have: `reconfigure`, `name`, `line_buffering`."""
        return getattr(self._stream, name)


def shield_scripts() -> None:
    """Let a script's prints never fail."""
    # A log's full disk is no fault of the script.
    sys.stdout = ScriptOutput(sys.stdout, lasting=True)
    sys.stderr = ScriptOutput(sys.stderr, lasting=True)


def answer_with(make: Callable[[], str]) -> int:
    """Write only the result of `make` to stdout, or a UserError to stderr as its last line; return the exit code."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # a script may print
    try:
        answer = make()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.CONFIG
    with answers:
        answers.write(answer)
    return ExitCode.DONE


def open_standard_streams() -> None:
    """Make this process's streams usable, whatever it was started with.

    Characters that the encoding lacks are replaced, and a non-blocking pipe becomes a blocking one. Streams that a test
    or a notebook has replaced stay.
    """
    # A closed stream is opened, because a file or socket would take its number. Then reading finds the end, output
    # still fails, because its descriptor is for reading, and messages vanish.
    for number, flags in ((0, os.O_RDONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        if _is_closed(number):
            _open_null(number, flags)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115  for the life of the process
    if sys.stdout is None or sys.stdout is sys.__stdout__:
        _make_blocking(1)
        sys.stdout = Output(_text_stream(sys.__stdout__, 1, errors="replace"))
    if sys.stderr is None or sys.stderr is sys.__stderr__:
        _make_blocking(2)
        sys.stderr = Output(_text_stream(sys.__stderr__, 2, errors="backslashreplace"), lasting=True)


def as_output(stream: TextIO | Output) -> Output:
    """Return the stream itself, if `open_standard_streams` has replaced it already, or an Output on it."""
    return stream if isinstance(stream, Output) else Output(stream)


def lasting(stream: TextIO | Output) -> Output:
    """Return the stream as an Output that breaks without an error from now on."""
    output = as_output(stream)
    output.lasting = True
    return output


def settle(output: Output) -> OSError | None:
    """Flush an output at the end of a process; return the error if not all of it was written."""
    with suppress(OSError):
        output.flush()
    if output.failure is not None:
        with suppress(OSError, ValueError):
            # The interpreter flushes once more at its end, and would report the failure a second time.
            if output.fileno() == 1:
                _open_null(1, os.O_WRONLY)
    return output.failure


def _is_closed(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return True
    return False


def _open_null(number: int, flags: int) -> None:
    descriptor = os.open(os.devnull, flags)
    # Children inherit their standard streams; `dup2` makes its copy inheritable, `open` does not.
    if descriptor == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(descriptor, number)
        os.close(descriptor)


def _text_stream(stream: TextIO | None, number: int, *, errors: str) -> TextIO:
    if stream is None:
        return open(number, "w", closefd=False, encoding="utf-8", errors=errors)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors=errors)
    return stream


def _make_blocking(number: int) -> None:
    # Our parent may share a non-blocking pipe with us; its own end stays as it is.
    try:
        if os.get_blocking(number) or stat.S_ISREG(os.fstat(number).st_mode):
            return
        try:
            own = os.open(f"/proc/self/fd/{number}", os.O_WRONLY | os.O_NOCTTY)
        except OSError:  # a socket
            os.set_blocking(number, True)
        else:
            os.dup2(own, number)
            os.close(own)
    except OSError:
        return
