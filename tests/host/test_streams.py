"""Streams that cannot be written to: real pipes, files and devices."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.host.streams import Output, lasting, settle

OPEN_AND_SAY = """
import os, sys
from oobleck.host.streams import open_standard_streams, settle, as_output
open_standard_streams()
{}
sys.exit(3 if settle(as_output(sys.stdout)) else 0)
"""


@pytest.fixture
def broken() -> Iterator[io.TextIOWrapper]:
    reading, writing = os.pipe()
    os.close(reading)
    stream = open(writing, "w", encoding="utf-8")  # noqa: SIM115  closing it fails
    yield stream
    with contextlib.suppress(BrokenPipeError):
        stream.close()


def test_an_answer_that_cannot_be_written_is_an_error_each_time(broken: io.TextIOWrapper) -> None:
    output = Output(broken)
    output.write("hello")
    for _ in range(2):
        with pytest.raises(BrokenPipeError) as caught:
            output.flush()
        assert caught.value is output.failure


def test_a_lasting_output_remembers_its_first_error_and_raises_none(broken: io.TextIOWrapper) -> None:
    output = lasting(Output(broken))
    for _ in range(3):
        output.write("hello\n" * 10_000)
        output.flush()
    assert isinstance(output.failure, BrokenPipeError)
    assert output.is_lost
    assert settle(output) is output.failure


def test_a_full_disk_is_tried_again() -> None:
    with open("/dev/full", "w", encoding="utf-8", buffering=1) as full, open(os.devnull, "w", encoding="utf-8") as room:
        output = lasting(full)
        output.write("hello\n")
        output.flush()
        assert output.failure is not None
        assert output.failure.errno == errno.ENOSPC
        assert not output.is_lost
        os.dup2(room.fileno(), full.fileno())  # somebody has made room
        output.write("hello\n")
        output.flush()


def run(script: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", OPEN_AND_SAY.format(script)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUNBUFFERED": ""}
    return subprocess.run(command, check=False, timeout=30, env=environment, **streams)


SCRIPT = """\
import os, sys
from oobleck.host.streams import shield_scripts
sys.stdout = open("/dev/full", "w")
shield_scripts()
sys.stdout.reconfigure(line_buffering=True)
print(sys.stdout.name, sys.stdout.line_buffering, file=sys.stderr)
print("into the void")
sys.stdout.flush()
os._exit(0)
"""


def test_what_a_script_prints_never_fails_and_its_streams_have_what_files_have() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "/dev/full True\n")


def test_what_an_encoding_lacks_is_replaced() -> None:
    done = run("print('loss 6.2 → 5.3'); print('…', file=sys.stderr)", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"loss 6.2 ? 5.3\n", b"\\u2026\n")


def test_bytes_that_are_no_text_are_written_as_they_were_read() -> None:
    said = r"'naïve \udcff'"
    script = f"print('before', end=' '); sys.stdout.write_as_read({said}); print(' after')"
    done = run(script, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout) == (0, b"before na\xc3\xafve \xff after\n")


def test_a_pipe_that_does_not_wait_is_waited_for_and_stays_as_it_is_for_others() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with open(reading, "rb") as pipe:
        script = "print('x' * 1_000_000)"
        command = [sys.executable, "-c", OPEN_AND_SAY.format(script)]
        with subprocess.Popen(command, stdout=writing) as process:
            assert not os.get_blocking(writing)
            os.close(writing)
            assert len(pipe.read()) == 1_000_001
            assert process.wait(30) == 0


def test_numbers_of_closed_streams_are_given_to_nothing_else(tmp_path: Path) -> None:
    """A journal that got number 1 would have whatever is printed in it."""
    file = tmp_path / "journal"
    script = (
        f"opened = open({str(file)!r}, 'w'); print('answer'); print('message', file=sys.stderr); "
        "os.system('echo from a child; echo from a child >&2'); opened.write(str(opened.fileno()))"
    )
    code = f"import os\nfor n in (0, 1, 2): os.close(n)\nos.execv({sys.executable!r}, [{sys.executable!r}, '-c', "
    code += f"{OPEN_AND_SAY.format(script)!r}])"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 3
    assert int(file.read_text()) > 2
