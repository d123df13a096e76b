"""Frames and JSON lines: what is written is read back, and nothing else is ever accepted."""

from __future__ import annotations

import copy
import json
import math
import os
import struct
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import JobStarted, JournalEntry, NodeLost, PlanAdopted, StepDone
from oobleck.control.node_check import PairValue
from oobleck.control.plans import orders_of
from oobleck.control.protocol import (
    AgentMessage,
    CommitRecord,
    Configure,
    ErrorKind,
    GroupValue,
    Heartbeat,
    LinkMessage,
    MasterMessage,
    PlanUpdate,
    Raised,
    Segment,
    Status,
    WorkerBound,
    WorkerExited,
    WorkerFailed,
    WorkerMessage,
)
from oobleck.errors import PeerError
from oobleck.job import JobSpec, ModelSpec, NodeSpec
from oobleck.planner import ExecutionPlan, Pipeline, PipelineTemplate, StageTemplate, WorkerId
from oobleck.schedule import ScheduleKind
from oobleck.wire import (
    MAX_FRAME_BYTES,
    FrameDecoder,
    decode_json,
    encode_frame,
    encode_json,
    from_builtins,
    to_builtins,
)
from tests.examples import examples
from tests.wire.strategies import values_of

UNIONS = (AgentMessage, MasterMessage, WorkerMessage, WorkerBound, LinkMessage)
MESSAGES = tuple(dict.fromkeys(cls for union in UNIONS for cls in get_args(union)))
ENTRIES = get_args(JournalEntry)

RECORD = CommitRecord(
    step=7,
    generation=2,
    loss=3.5,
    grad_norm=1.0,
    learning_rate=1e-3,
    num_samples=16,
    samples_repeated=0,
    samples_missing=0,
    duration_s=0.1,
)
STATUS = Status(
    device=0,
    generation=3,
    applied=7,
    last_record=RECORD,
    reduced=None,
    adopted=2,
    layers=(0, 1),
    microbatches_done=4,
    broken=False,
)
PLAN = ExecutionPlan(
    pipelines=(
        Pipeline(
            template=PipelineTemplate(stages=(StageTemplate(first_layer=0, stop_layer=4, node_index=0),)),
            nodes=("node0",),
            num_microbatches=8,
        ),
    ),
    spares=("node1",),
)
UPDATE = PlanUpdate(
    generation=2,
    catch_up=RECORD,
    segments=(Segment(segment=1, pipeline=0, microbatches=(3, 4)),),
    plan=PLAN,
    pipeline_generations=(1,),
    schedules=(ScheduleKind.ZERO_BUBBLE,),
    boundary=7,
)
((_, ORDER),) = orders_of(UPDATE, [WorkerId(node="node0", device=0)], bases={}, known={}, in_force=PLAN)
CONFIGURE = Configure(
    protocol=1,
    oobleck_version="1",
    job=JobSpec(model=ModelSpec(config={"n_layer": 4, "tied": True, "scale": 0.5, "act": "gelu", "pad": None})),
    node="node0",
    devices=(0, 1),
    address="127.0.0.1",
    torch_threads=1,
    device_memory_bytes=2**33,
    run="0123abcd",
)


def frame(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def frame_of(raw: object) -> bytes:
    if isinstance(raw, dict) and isinstance(raw.get("common"), dict):
        raw = raw | {"common": zlib.compress(msgpack.packb(raw["common"]))}
    return frame(msgpack.packb(raw))


def raw_of(message: object) -> dict[str, Any]:
    """What a message is written as; what is encoded once for all is unpacked."""
    raw: dict[str, Any] = msgpack.unpackb(encode_frame(message)[4:])
    if "common" in raw:
        raw["common"] = msgpack.unpackb(zlib.decompress(raw["common"]))
    return raw


def decode(accepts: Any, data: bytes) -> list[Any]:
    decoder: FrameDecoder[Any] = FrameDecoder(accepts)
    messages = decoder.feed(data)
    decoder.end()
    return messages


# --- what is written is read back --------------------------------------------------------------------------


@pytest.mark.parametrize("cls", MESSAGES)
@examples(20)
@given(data=st.data())
def test_every_message_survives_its_frame(cls, data):
    message = data.draw(values_of(cls))
    for accepts in (cls, (cls,), *(union for union in UNIONS if cls in get_args(union))):
        assert decode(accepts, encode_frame(message)) == [message]


@pytest.mark.parametrize("cls", ENTRIES)
@examples(20)
@given(data=st.data())
def test_every_journal_entry_survives_its_line(cls, data):
    entry = data.draw(values_of(cls))
    line = encode_json(entry)
    assert line.count(b"\n") == 1
    assert line.endswith(b"\n")
    assert decode_json(JournalEntry, line) == entry
    assert decode_json((cls,), line.decode()) == entry


@pytest.mark.parametrize("cls", [JobSpec, NodeSpec, ExecutionPlan, GroupValue])
@examples(30)
@given(data=st.data())
def test_values_survive_builtins_that_json_can_carry(cls, data):
    value = data.draw(values_of(cls))
    assert from_builtins(cls, json.loads(json.dumps(to_builtins(value), allow_nan=False))) == value


@given(
    messages=st.lists(st.one_of(*map(values_of, MESSAGES[:6])), max_size=4),
    cuts=st.lists(st.integers(min_value=0), max_size=6),
)
def test_messages_do_not_depend_on_how_the_bytes_arrive(messages, cuts):
    stream = b"".join(map(encode_frame, messages))
    ends = sorted(cut % (len(stream) + 1) for cut in cuts)
    decoder: FrameDecoder[Any] = FrameDecoder(MESSAGES)
    pieces = [stream[start:stop] for start, stop in zip([0, *ends], [*ends, len(stream)], strict=True)]
    assert [message for piece in pieces for message in decoder.feed(piece)] == messages
    decoder.end()


def test_a_message_comes_out_with_its_last_byte():
    decoder = FrameDecoder(MasterMessage)
    stream = encode_frame(ORDER) + encode_frame(Heartbeat(sequence=1))
    came_out = {index: decoder.feed(bytes([byte])) for index, byte in enumerate(stream)}
    last = len(encode_frame(ORDER)) - 1
    assert {index: messages for index, messages in came_out.items() if messages} == {
        last: [ORDER],
        len(stream) - 1: [Heartbeat(sequence=1)],
    }


def test_ints_are_taken_for_floats():
    raw = raw_of(STATUS)
    raw["last_record"]["loss"] = 3
    (message,) = decode(AgentMessage, frame_of(raw))
    assert message == replace(STATUS, last_record=replace(RECORD, loss=3.0))
    assert type(message.last_record.loss) is float


@pytest.mark.parametrize("loss", [math.inf, -math.inf])
def test_infinite_losses_survive(loss):
    record = replace(RECORD, loss=loss)
    assert decode(AgentMessage, encode_frame(replace(STATUS, last_record=record)))[0].last_record == record
    entry = StepDone(t_s=1.0, record=record, tokens=1)
    assert decode_json(JournalEntry, encode_json(entry)) == entry


def test_a_loss_that_is_not_a_number_survives():
    record = replace(RECORD, loss=math.nan)
    assert math.isnan(decode(AgentMessage, encode_frame(replace(STATUS, last_record=record)))[0].last_record.loss)
    line = encode_json(StepDone(t_s=1.0, record=record, tokens=1))
    assert b"NaN" not in line
    read = decode_json(JournalEntry, line)
    assert isinstance(read, StepDone)
    assert math.isnan(read.record.loss)


def test_broken_text_of_a_traceback_survives():
    error = Raised(kind=ErrorKind.CODE, message="", traceback="File '\udcff.py'")
    message = WorkerFailed(end=error)
    assert decode(WorkerMessage, encode_frame(message)) == [message]
    exited = WorkerExited(device=0, pid=1, end=error)
    assert from_builtins(WorkerExited, to_builtins(exited)) == exited


def test_scalars_keep_their_kinds():
    (message,) = decode(MasterMessage, encode_frame(CONFIGURE))
    config = message.job.model.config
    assert {key: type(value) for key, value in config.items()} == {
        "n_layer": int,
        "tied": bool,
        "scale": float,
        "act": str,
        "pad": type(None),
    }


def test_msgpack_without_its_c_extension_reads_the_same():
    code = (
        "import sys, msgpack\n"
        "from oobleck.control.protocol import MasterMessage\n"
        "from oobleck.wire import FrameDecoder, encode_frame\n"
        "assert msgpack.Packer.__module__ == 'msgpack.fallback'\n"
        "data = sys.stdin.buffer.read()\n"
        "sys.stdout.buffer.write(b''.join(map(encode_frame, FrameDecoder(MasterMessage).feed(data))))\n"
    )
    stream = encode_frame(ORDER) + encode_frame(CONFIGURE)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=stream,
        capture_output=True,
        env={**os.environ, "MSGPACK_PUREPYTHON": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    assert done.stdout == stream, done.stderr.decode()


def test_what_all_are_told_is_encoded_once():
    """The bytes are taken from the first message; only what is each worker's own is written again."""
    first, second = (replace(ORDER, device=device, common=replace(ORDER.common, lost=("once",))) for device in (0, 1))
    alike = replace(second, common=first.common)
    assert encode_frame(alike) == encode_frame(second)
    assert decode(MasterMessage, encode_frame(first) + encode_frame(alike)) == [first, second]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"no zlib",
        zlib.compress(b"\xc1"),
        zlib.compress(msgpack.packb({})) + b"more",
        zlib.compress(msgpack.packb({}))[:-1],
        zlib.compress(bytes(MAX_FRAME_BYTES + 1)),
        "text",
        {},
    ],
)
def test_what_is_no_deflated_value_is_rejected(raw):
    with pytest.raises(PeerError, match=r"^PlanOrder\.common: "):
        decode(MasterMessage, frame(msgpack.packb(raw_of(ORDER) | {"common": raw})))


# --- nothing else is accepted ------------------------------------------------------------------------------


def parts_of(raw: object, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """Every value within a value, with the way to it."""
    yield path, raw
    if isinstance(raw, dict):
        for key, part in raw.items():
            yield from parts_of(part, (*path, key))
    elif isinstance(raw, list):
        for index, part in enumerate(raw):
            yield from parts_of(part, (*path, index))


def at(raw: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        raw = raw[step]
    return raw


FREE_MAPPINGS = (("config",), ("optim_args",), ("lr_scheduler_kwargs",), ("notice_headers",))
"""Their keys are the user's."""

RECORDS_WITHIN = [
    pytest.param(message, path, id=".".join(map(str, (type(message).__name__, *path))))
    for message in (ORDER, CONFIGURE, replace(STATUS, reduced=8))
    for path, part in parts_of(raw_of(message))
    if isinstance(part, dict) and path[-1:] not in FREE_MAPPINGS
]


def test_records_are_looked_for_at_every_depth():
    assert (
        max(len(path) for _, path in (param.values for param in RECORDS_WITHIN)) == 7
    )  # common.delta.change.templates.0.stages.0


@pytest.mark.parametrize(("message", "path"), RECORDS_WITHIN)
def test_an_extra_field_is_rejected_at_every_depth(message, path):
    raw = raw_of(message)
    at(raw, path)["surplus"] = 0
    with pytest.raises(PeerError, match="'surplus'"):
        decode(MESSAGES, frame_of(raw))


@pytest.mark.parametrize(("message", "path"), RECORDS_WITHIN)
def test_a_missing_field_is_rejected_at_every_depth(message, path):
    for name in at(raw_of(message), path):
        raw = raw_of(message)
        del at(raw, path)[name]
        expected = "unknown type None" if name == "@type" else f"field '{name}' is missing"
        with pytest.raises(PeerError, match=expected):
            decode(MESSAGES, frame_of(raw))


def is_same(accepted: object, raw: object) -> bool:
    """Whether what was accepted says what was sent; only an int may have become a float."""
    if isinstance(accepted, dict) and isinstance(raw, dict):
        return accepted.keys() == raw.keys() and all(is_same(accepted[key], raw[key]) for key in raw)
    if isinstance(accepted, list) and isinstance(raw, list):
        return len(accepted) == len(raw) and all(map(is_same, accepted, raw))
    if type(accepted) is float and type(raw) is int:
        return accepted == float(raw)
    return type(accepted) is type(raw) and accepted == raw


RAW = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5)
    | st.binary(max_size=5) | st.sampled_from([cls.__name__ for cls in MESSAGES]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)  # fmt: skip


@examples(300)
@given(
    message=st.sampled_from([ORDER, CONFIGURE, STATUS, GroupValue(generation=1, key="k", value=b"v")]), data=st.data()
)
def test_a_changed_message_is_rejected_or_read_as_it_says(message, data):
    raw = raw_of(message)
    paths = [path for path, _ in parts_of(raw) if path]
    path = data.draw(st.sampled_from(paths))
    at(raw, path[:-1])[path[-1]] = data.draw(RAW)
    sent = copy.deepcopy(raw)
    try:
        (accepted,) = decode(MESSAGES, frame_of(raw))
    except PeerError:
        return
    assert is_same(raw_of(accepted), sent)


@examples(300)
@given(data=st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_peer_errors(data):
    for stream in (data, frame(data)):
        decoder: FrameDecoder[Any] = FrameDecoder(MESSAGES)
        with suppress(PeerError):
            decoder.feed(stream)
            decoder.end()


@examples(300)
@given(
    message=st.sampled_from([ORDER, CONFIGURE, STATUS]),
    position=st.integers(min_value=0),
    removed=st.integers(0, 3),
    inserted=st.binary(max_size=3),
    is_length_right=st.booleans(),
)
def test_damaged_frames_raise_nothing_but_peer_errors(message, position, removed, inserted, is_length_right):
    whole = encode_frame(message)[4:] if is_length_right else encode_frame(message)
    position %= len(whole)
    damaged = whole[:position] + inserted + whole[position + removed :]
    with suppress(PeerError):
        accepted = decode(MESSAGES, frame(damaged) if is_length_right else damaged)
        assert all(type(message) in MESSAGES for message in accepted)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        (b"", "not msgpack"),
        (b"\xc0", "message: expected a map, got None"),
        (b"\xc0\xc0", "extra data"),
        (b"\xc1", "not msgpack: FormatError"),
        (b"\x91" * 3000, "not msgpack: StackError"),
        (b"\x80", "unknown type None; expected one of .*Heartbeat, Hello"),
        (msgpack.packb({"@type": 5}), "unknown type 5"),
        (msgpack.packb({"@type": "Nonsense"}), "unknown type 'Nonsense'"),
        (msgpack.packb({"@type": "Fence"}), "unknown type 'Fence'"),
        (b"\x82\xa1a\x01\xa1a\x02", "a map has a key twice"),
        (b"\x81\x01\x01", "not msgpack"),
        (b"\xa1\xff", "not msgpack"),
        (msgpack.packb({"@type": "Heartbeat", "sequence": True}), r"sequence: expected int or null, got True$"),
        (msgpack.packb({"@type": "Heartbeat", "sequence": "1" * 999}), r"got '1{199}…$"),
        (msgpack.packb({"@type": "Heartbeat", "sequence": [1]}), "got a list of 1"),
        (msgpack.packb({"@type": "Heartbeat"}), "^Heartbeat: field 'sequence' is missing in Heartbeat$"),
        (msgpack.packb({"@type": "Heartbeat", "sequence": 1, b"x": 1}), "there is no field b'x' in Heartbeat"),
        (
            msgpack.packb({"@type": "Heartbeat", "sequence": 1} | dict.fromkeys("abcdefgh", 0)),
            "there is no field 'e' and 3 more in Heartbeat$",
        ),
    ],
)
def test_errors_name_what_is_wrong(body, problem):
    with pytest.raises(PeerError, match=problem):
        FrameDecoder(AgentMessage).feed(frame(body))


def test_errors_name_the_place_within():
    with pytest.raises(PeerError, match=r"^PairValue\.nodes\[1\]: "):
        FrameDecoder(PairValue).feed(frame_of({"@type": "PairValue", "key": "k", "value": b"", "nodes": ["a", 5]}))
    raw = raw_of(ORDER)
    raw["common"]["delta"]["change"]["templates"][0]["stages"][0]["first_layer"] = 4
    with pytest.raises(PeerError, match=r"^PlanOrder\.common\.delta\.change\.templates\[0\]\.stages\[0\]: .*0 layers"):
        FrameDecoder(MasterMessage).feed(frame_of(raw))
    raw = raw_of(CONFIGURE)
    raw["job"]["model"]["config"]["n_layer"] = [1]
    with pytest.raises(PeerError, match=r"^Configure\.job\.model\.config\['n_layer'\]: expected "):
        FrameDecoder(MasterMessage).feed(frame_of(raw))


def test_values_that_a_class_refuses_are_the_peers_fault():
    raw = raw_of(CONFIGURE)
    raw["job"]["max_steps"] = 0
    with pytest.raises(PeerError, match=r"^Configure\.job: max_steps: 0 "):
        FrameDecoder(MasterMessage).feed(frame_of(raw))


def test_a_frame_of_the_greatest_length_is_accepted_and_one_byte_more_is_not():
    message = GroupValue(generation=1, key="k", value=b"x" * 100)
    length = len(encode_frame(message)) - 4
    assert FrameDecoder(GroupValue, max_frame_bytes=length).feed(encode_frame(message)) == [message]
    with pytest.raises(PeerError, match=rf"{length} bytes.*\b{length - 1}\b"):
        FrameDecoder(GroupValue, max_frame_bytes=length - 1).feed(encode_frame(message)[:4])


def test_the_default_limit_rejects_a_frame_before_its_body_arrives():
    with pytest.raises(PeerError, match=rf"\b{MAX_FRAME_BYTES}\b"):
        FrameDecoder(AgentMessage).feed(struct.pack(">I", MAX_FRAME_BYTES + 1))


@pytest.mark.parametrize("length", range(1, len(encode_frame(Heartbeat(sequence=1)))))
def test_an_end_within_a_frame_is_an_error(length):
    decoder = FrameDecoder(AgentMessage)
    assert decoder.feed(encode_frame(Heartbeat(sequence=1))[:length]) == []
    with pytest.raises(PeerError, match=f"{length} bytes"):
        decoder.end()


def test_a_decoder_that_has_raised_raises_the_same_for_ever():
    decoder = FrameDecoder(AgentMessage)
    with pytest.raises(PeerError) as first:
        decoder.feed(frame(b"\xc0"))
    for again in (lambda: decoder.feed(encode_frame(Heartbeat(sequence=1))), decoder.end):
        with pytest.raises(PeerError) as raised:
            again()
        assert raised.value is first.value


@dataclass(frozen=True)
class Unknown:
    """A message of a future version."""

    number: int


def test_a_message_outside_the_union_is_rejected_by_name():
    with pytest.raises(PeerError, match="unknown type 'Unknown'"):
        decode(AgentMessage, encode_frame(Unknown(number=1)))


def ended_at(t_s: bytes) -> bytes:
    return b'{"@type": "JobEnded", "t_s": ' + t_s + b', "exit_code": 0, "reason": "", "error": null}'


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"1" * 5000, "not JSON"),
        (b"NaN", "NaN is not a number in JSON"),
        (b'{"@type": "A", "@type": "B"}', "a map has a key twice"),
        (b"[]", "message: expected a map, got a list of 0"),
        (ended_at(b"1e999"), r"JobEnded\.t_s: expected float, got inf"),
        (ended_at(b"1" + b"0" * 400), "expected float, got 1000"),
        (ended_at(b'{"@float": 1}'), "expected float, got a map of 1"),
        (ended_at(b'{"@float": "1"}'), "expected float, got a map of 1"),
        (ended_at(b'{"@float": "nan", "x": 1}'), "expected float, got a map of 2"),
        (
            (
                b'{"@type": "NodeLost", "t_s": 1, "node": "n", "loss": {"@type": "Boredom"}, '
                b'"is_requested": false, "is_tried_again": false}'
            ),
            r"NodeLost\.loss: unknown type 'Boredom'; expected one of AgentLeft, ",
        ),
    ],
)  # fmt: skip
def test_lines_that_are_no_entries_are_rejected(line, problem):
    with pytest.raises(PeerError, match=problem):
        decode_json(JournalEntry, line)


@examples(300)
@given(line=st.binary(max_size=100) | st.text(max_size=100))
def test_arbitrary_lines_raise_nothing_but_peer_errors(line):
    with pytest.raises(PeerError):
        decode_json(JournalEntry, line)


@given(cls=st.sampled_from([JobStarted, NodeLost, PlanAdopted, StepDone]), data=st.data())
def test_damaged_lines_raise_nothing_but_peer_errors(cls, data):
    line = encode_json(data.draw(values_of(cls)))
    position = data.draw(st.integers(0, len(line) - 1))
    damaged = line[:position] + data.draw(st.binary(max_size=2)) + line[position + data.draw(st.integers(0, 2)) :]
    try:
        entry = decode_json(JournalEntry, damaged)
    except PeerError:
        return
    assert decode_json(JournalEntry, encode_json(entry)) == entry


@pytest.mark.parametrize("written", ["AAA", "?", "ü", 5, None, ["AA=="]])
def test_bytes_within_builtins_must_be_base64(written):
    raw = to_builtins(GroupValue(generation=1, key="k", value=b"\x00"))
    assert isinstance(raw, dict)
    assert from_builtins(GroupValue, raw | {"value": {"@bytes": "AA=="}}).value == b"\x00"
    with pytest.raises(PeerError, match=r"^value: expected ba?(se64|ytes)"):
        from_builtins(GroupValue, raw | {"value": {"@bytes": written}})


def test_builtins_of_a_union_carry_their_name():
    raw = {"@type": "Heartbeat", "sequence": 1}
    assert from_builtins(AgentMessage, raw) == Heartbeat(sequence=1)
    assert from_builtins((Heartbeat, Status), raw) == Heartbeat(sequence=1)
    with pytest.raises(PeerError, match="'@type'"):
        from_builtins(Heartbeat, raw)
