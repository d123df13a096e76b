"""Whatever is written on a command line or into a file: an exit code that the documentation knows, and no traceback.

Everything here starts nothing: dry runs, plans, traces, and questions to runs that are not there.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oobleck.cli.inputs.hostfile import parse_hostfile
from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.main import COMMANDS, CliCommand, main
from oobleck.errors import ExitCode, UserError
from oobleck.planner import profile_from_json, profile_to_json
from oobleck.planner.profiles.devices import device_sheet
from oobleck.planner.profiles.estimate import estimate_profile
from oobleck.planner.profiles.shapes import model_shape
from oobleck.sim.trace import Lost, Trace, trace_from_json, trace_to_json
from oobleck.sim.trace.convert import FORMATS, convert, detect_format
from tests.examples import examples

ENDS = {int(code) for code in ExitCode}

_NUMBERS = "0 -1 1 2 3 8 -0.0 nan inf -inf 1e300 1e-300 1e400 0x10 1_000 0.5 1.5"
NUMBERS = st.sampled_from(
    [*_NUMBERS.split(), "٣", "9" * 23, "9" * 400, "9" * 5000, "1" + "0" * 9, str(2**63), str(2**31), "", " "]
)
DURATIONS = st.sampled_from(["1h", "0s", "1ms", "9999999d", "1e300", "-1h", "h", "1 h", "٣h", "9" * 400 + "d", "0.1s"])
_WORDS = """
a node0 node9@3 node0@5 @ ../x ~ ~nobody-here ~nobody-here/x / - -- a,b 1:2 1:inf auto never
all efficient deadline=1h deadline=9999-12-31T23:59 deadline=x unix:x 8.8.8.8:1 127.0.0.1:99999
[ {} gpt2 A100 zero-bubble 1f1b float16 x.svg x.png [a] oobleck,restart bamboo llama3 spot-p3
hf cpu cuda
"""
WORDS = st.sampled_from([*_WORDS.split(), "", "\udcff", "a\nb", "ä" * 50, "x" * 5000])
_KEYS = """
max_steps global_batch_size microbatch_size model.n_layer model.n_head model.type data.paths
tag data.sequence_length data.vocab_size optimizer.learning_rate checkpoint.directory
control.lease_s nonsense dtype
"""
KEYS = st.sampled_from(_KEYS.split())
SETTINGS = st.tuples(KEYS, NUMBERS | WORDS).map("=".join)
BROKEN = st.sampled_from(["\x00", "\ud800"])
"""No system passes them on a command line; a file may spell them."""
_FILES = "hosts job.yaml profile.json trace.json bytes nowhere directory empty"
FILES = st.sampled_from([f"FILES/{name}" for name in _FILES.split()])
VALUES = NUMBERS | DURATIONS | WORDS | SETTINGS | FILES

NEVER = ("up", "run", "verify", "check", "profile", "chaos")
"""Commands that may start something: tried by themselves, as far as they do not."""


def flat(commands: Sequence[CliCommand], before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CliCommand]]:
    for command in commands:
        if command.subcommands:
            yield from flat(command.subcommands, (*before, command.name))
        else:
            yield (*before, command.name), command


QUIET = sorted(names for names, _ in flat(COMMANDS) if names[0] not in NEVER and names != ("checkpoint", "import"))


@cache
def options_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """All options of a command, as its help writes them."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found), contextlib.redirect_stderr(io.StringIO()):
        main([*names, "--help"])
    words = (word.strip(",") for word in found.getvalue().split())
    found_words = {word for word in words if word.startswith("-") and word[-1].isalpha()}
    return tuple(sorted(found_words - ({"-f", "--follow"} if names == ("events",) else set())))  # it waits for ever


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """A command with some of its options, their values, and some words: mostly wrong, at times right."""
    names = draw(st.sampled_from(QUIET))
    options = st.tuples(st.sampled_from(options_of(names)), VALUES)
    words = draw(st.lists(options | st.tuples(VALUES), max_size=4))
    base = BASES.get(names[0], ()) if draw(st.booleans()) else ()
    return [*names, *base, *(word for group in words for word in group)]


PROFILE = json.loads(
    profile_to_json(
        estimate_profile(
            model_shape("gpt2"),
            device_sheet("A100"),
            microbatch_size=1,
            sequence_length=64,
            precision="float32",
            recompute="none",
        )
    )
)
MODEL = ("--model", "gpt2", "--device", "A100", "--microbatch", "1", "--global-batch", "8")
BASES: Mapping[str, tuple[str, ...]] = {
    "plan": ("--nodes", "3", *MODEL),
    "sim": ("--failures", "FILES/trace.json", *MODEL),
    "trace": ("--nodes", "3", "--duration", "1h", "--mtbf", "1h"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where good and bad files are, and nothing runs."""
    directory = tmp_path_factory.mktemp("fuzz")
    (directory / "directory").mkdir()
    (directory / "work").mkdir()
    for names in QUIET:
        options_of(names)  # now: what is drawn must not depend on what is imported first
    return directory


def write_files(directory: Path) -> None:
    """Write them again: a command may have been told to write there."""
    trace = Trace(duration_s=600, nodes=("a", "b", "c"), start=("a", "b", "c"), events=(Lost(t_s=60, node="b"),))
    (directory / "hosts").write_text("node1\nnode2 slots=1\n")
    (directory / "job.yaml").write_text("max_steps: 10\nmodel: {type: gpt2, n_layer: 2}\n")
    (directory / "profile.json").write_text(json.dumps(PROFILE))
    (directory / "trace.json").write_text(trace_to_json(trace))
    (directory / "bytes").write_bytes(bytes(range(256)))
    (directory / "empty").write_bytes(b"")
    (directory / "nowhere").unlink(missing_ok=True)


def ends_well(arguments: Sequence[str], files: Path) -> tuple[int, str]:
    """Run a command line in this process, in a directory of its own; returns the exit code and what it said."""
    write_files(files)
    words = [word.replace("FILES", str(files)) for word in arguments]
    if words[0] not in ("plan", "sim", "trace"):
        words += ["--base-dir", str(files / "base")]
    out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    err = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
    with contextlib.chdir(files / "work"), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said = ""
    for stream in (out, err):
        stream.seek(0)
        said += stream.read()
    assert code in ENDS, (arguments, code)
    assert "Traceback" not in said
    return code, said


@examples(100)
@given(arguments=command_lines())
@example(
    arguments=[
        "plan",
        "--nodes",
        "2",
        "--profile",
        "FILES/profile.json",
        "--global-batch",
        "8",
        "--after-losing",
        "node9",
    ]
)
def test_no_command_line_ends_in_a_traceback(arguments: list[str], files: Path) -> None:
    code, said = ends_well(arguments, files)
    assert code == 0 or said.strip(), arguments


UP_OPTIONS = st.sampled_from(
    [
        "--steps",
        "--seed",
        "-f",
        "--pipelines",
        "--tp",
        "--keep",
        "--local",
        "--tag",
        "--dtype",
        "--kill",
        "--save-every",
        "--scaling",
        "--metrics",
        "--python",
        "--job",
        "--summary",
        "--ssh-config",
        "--set",
        "--resume",
    ]
)


@examples(40)
@given(
    options=st.lists(st.tuples(UP_OPTIONS, VALUES), min_size=1, max_size=3), last=st.sampled_from(["--set=nonsense=1"])
)
def test_no_option_of_a_run_ends_in_a_traceback(options: list[tuple[str, str]], last: str, files: Path) -> None:
    """The last word is wrong for sure, so that nothing is ever begun."""
    words = [word for option, value in options for word in (option, value)]
    code, said = ends_well(["up", "FILES/hosts", *words, last, "--dry-run"], files)
    assert code in (ExitCode.USAGE, ExitCode.CONFIG), said


# --- files ---------------------------------------------------------------------------------------------------------

ODD: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, 0, -1, 1, 2**63, 10**400, 1e300, 5e-324, float("nan"), float("inf"), -0.0]),
    st.sampled_from(["", "1", "\x00", "\ud800", "node0", "x" * 300, "a\r\nb"]),
    st.sampled_from([[], {}, [[]], {"1": 1}, {"": 0}, {"3": 1.0}, {"9" * 5000: 1.0}, [None]]),
).map(deepcopy)


@st.composite
def changed(draw: st.DrawFn, document: Any) -> Any:
    """A document in which one to three values, or keys, are others."""
    document = json.loads(json.dumps(document))
    for _ in range(draw(st.integers(1, 3))):
        worker_id = document
        while True:
            keys = list(worker_id) if isinstance(worker_id, dict) else list(range(len(worker_id)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            if isinstance(worker_id[key], dict | list) and worker_id[key] and draw(st.integers(0, 3)):
                worker_id = worker_id[key]
                continue
            match draw(st.integers(0, 3)):
                case 0:
                    del worker_id[key]
                case 1 if isinstance(worker_id, dict):
                    worker_id[draw(st.sampled_from(["", "nonsense", "\ud800", "node"]))] = draw(ODD)
                case _:
                    worker_id[key] = draw(ODD)
            break
    return document


def refuses_in_words(read: Any, text: str) -> None:
    said = ""
    try:
        read(text)
    except UserError as error:
        said = str(error)
    assert len(said.encode(errors="surrogatepass")) < 20_000


TRACE = {
    "version": 1,
    "duration_s": 9.0,
    "nodes": ["a", "b"],
    "events": [
        {"t_s": 1, "kind": "node_lost", "node": "a"},
        {"t_s": 2, "kind": "node_joined", "node": "a"},
        {"t_s": 3, "kind": "node_slow", "node": "b", "factor": 2},
        {"t_s": 3, "kind": "worker_crashed", "node": "b", "device": 0},
        {"t_s": 4, "kind": "master_crashed", "down_s": 1},
        {"t_s": 5, "kind": "partition", "nodes": ["a"]},
        {"t_s": 6, "kind": "heal"},
        {"t_s": 7, "kind": "notice", "node": "b", "grace_s": 1},
    ],
}


@examples(100)
@given(document=changed(PROFILE))
def test_no_profile_breaks_its_reader(document: Any) -> None:
    refuses_in_words(lambda text: profile_from_json(text, source="p"), json.dumps(document))


@examples(150)
@given(document=changed(TRACE))
def test_no_trace_breaks_its_reader(document: Any) -> None:
    refuses_in_words(lambda text: trace_to_json(trace_from_json(text, source="t")), json.dumps(document))


JOB = """\
tag: a
model: {type: llama, hidden_size: 64, num_hidden_layers: 2}
data: {paths: [a, b], sequence_length: 16, validation_split: 0.1}
optimizer: {learning_rate: 3e-4, optim_args: {momentum: 0.9}}
control: {lease_s: 3, notice_url: "http://a", notice_headers: {A: b}, notice_pattern: "x+"}
checkpoint: {save_steps: 5, directory: /tmp}
scaling: {policy: deadline, deadline_s: 60}
max_steps: 10
global_batch_size: 8
"""
PIECES = st.sampled_from(
    [
        "{",
        "}",
        "[",
        "]",
        ":",
        "\n",
        "- ",
        "&a ",
        "*a",
        "!!int ",
        "\t",
        "'",
        '"',
        "\x00",
        "\ufeff",
        "\ud800",
        "é",
        "|",
        "%",
        "@",
    ]
)


@examples(150)
@given(data=st.data())
def test_no_job_file_breaks_its_reader(data: st.DataObject) -> None:
    text = JOB
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 9)))
        text = text[:start] + data.draw(PIECES | NUMBERS | WORDS | BROKEN) + text[stop:]
    refuses_in_words(lambda each: load_job(each, source="job"), text)


HOSTS = "node1 slots=2\nuser@node[2-3] port=2222\n10.0.0.1 devices=0-3 address=ib0\n2001:db8::7 port=22\n"


@examples(150)
@given(data=st.data())
def test_no_hostfile_breaks_its_reader(data: st.DataObject) -> None:
    text = HOSTS
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 9)))
        text = (
            text[:start]
            + data.draw(
                st.sampled_from(["[", "]", "-", "@", ":", "=", "[0-99999999]", "%", "#", "\r"]) | NUMBERS | WORDS
            )
            + text[stop:]
        )
    refuses_in_words(lambda each: parse_hostfile(each, source="hosts"), text)


PUBLIC = {
    "oobleck": "0,add,a\n0,add,b\n5,remove,a\n9,add,a\n",
    "bamboo": "0,3\n10,2\n20,3\n",
    "infinitehbd": json.dumps(
        [
            {"event_type": kind, "event_time": t, "node_id": "a", "fault_type": "x"}
            for t, kind in ((1, "fault_start"), (2, "fault_end"))
        ]
    ),
    "parcae": '[0, "add", {"nodes": ["a", "b"]}]\n[5, "remove", {"nodes": ["a"]}]\n[9, "no-op", {}]\n',
    "skypilot": '{"metadata": {"gap_seconds": 5}, "data": [3, 2, 3]}',
    "lanl": "nodenumz,Prob Started,Prob Fixed\n1,07/31/2003 14:05,07/31/2003 15:05\n2,08/31/2003 14:05,\n",
}


@examples(150)
@given(name=st.sampled_from(sorted(FORMATS)), data=st.data())
def test_no_public_trace_breaks_its_reader(name: str, data: st.DataObject) -> None:
    text = PUBLIC[name]
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(text)))
        stop = data.draw(st.integers(start, min(len(text), start + 6)))
        text = (
            text[:start] + data.draw(st.sampled_from(["[", "]", "{", "}", ",", '"', "\n", "a"]) | NUMBERS) + text[stop:]
        )
    detect_format(text)
    refuses_in_words(lambda each: convert(each, format_name=name, name="public", num_nodes=None), text)
