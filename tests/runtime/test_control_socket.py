"""Server and client of the control socket together, over real sockets."""

from __future__ import annotations

import json
import re
import socket
import stat
from functools import partial

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from oobleck.errors import ConfigError, OobleckError, PeerError, UsageError, UserError
from oobleck.runtime.control_client import (
    KillRequest,
    ListLogsRequest,
    NoActiveRun,
    ReadLogRequest,
    SignalRequest,
    SlowRequest,
    StatusRequest,
    StopRequest,
    active_runs,
    decode_request,
    encode_error,
    find_run,
    request,
)
from oobleck.runtime.control_socket import serve_control
from oobleck.runtime.files.run_dir import RunDirectory
from oobleck.wire import encode_json

REQUESTS = [
    StatusRequest(),
    KillRequest(node="node2"),
    SignalRequest(node="node2", signal="STOP", processes="*"),
    SlowRequest(node="node2", factor=1.5),
    ListLogsRequest(node="node2"),
    ReadLogRequest(node="node2", name="agent-node2.log", offset=7),
    StopRequest(),
    StopRequest(now=True),
]


async def echo(asked):
    match asked:
        case KillRequest(node="node9"):
            raise UsageError("there is no node9")
        case KillRequest(node="late"):
            await trio.sleep_forever()
        case StopRequest(now=True):
            raise ConfigError("not now")
    return {"asked": repr(asked)}


async def ask(path, asked, timeout_s=5.0):
    return await trio.to_thread.run_sync(partial(request, path, asked, timeout_s))


def raw(path, said: bytes, *, shut: bool = False) -> bytes:
    """Say anything to the server, and return all that it answers."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(str(path))
        connection.sendall(said)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
async def path(nursery, tmp_path):
    path = tmp_path / "control.sock"
    await nursery.start(serve_control, path, echo)
    return path


@pytest.mark.parametrize("asked", REQUESTS[:-1])
async def test_a_request_arrives_as_it_was_made(path, asked):
    assert await ask(path, asked) == {"asked": repr(asked)}


@pytest.mark.parametrize(
    ("asked", "error"), [(KillRequest(node="node9"), UsageError), (StopRequest(now=True), ConfigError)]
)
async def test_an_error_comes_back_as_what_it_was(path, asked, error):
    with pytest.raises(error, match=r"node9|not now"):
        await ask(path, asked)


async def test_the_socket_is_its_users_alone(path):
    assert stat.S_IMODE((await trio.Path(path).stat()).st_mode) == 0o600


async def test_a_late_answer_is_an_error_and_others_are_still_answered(path):
    with pytest.raises(PeerError, match=r"0\.2 s"):
        await ask(path, KillRequest(node="late"), 0.2)
    assert await ask(path, StatusRequest())


NONSENSE = [
    b"\n",
    b"{}\n",
    b"[1]\n",
    b"\xff\n",
    b"[" * 4000 + b"\n",
    b'{"@type":"KillRequest"}\n',
    b'{"@type":"KillRequest","node":3}\n',
    b'{"@type":"StatusRequest","more":1}\n',
    b'{"@type":"StopRequest","now":1}\n',
    b'{"@type":"StopRequest","now":true,"now":true}\n',
    b'{"@type":"SlowRequest","node":"node2","factor":NaN}\n',
]


@pytest.mark.parametrize("said", NONSENSE)
async def test_nonsense_is_answered_with_an_error(path, said):
    answer = json.loads(await trio.to_thread.run_sync(raw, path, said))
    assert answer["error"] == "peer"


async def test_a_request_without_end_is_refused_when_it_is_too_long_or_cut_off(path):
    too_long = await trio.to_thread.run_sync(raw, path, b"x" * 5000)
    assert "4096 bytes" in json.loads(too_long)["message"]
    cut = await trio.to_thread.run_sync(partial(raw, path, b'{"@type"', shut=True))
    assert "end of line" in json.loads(cut)["message"]


async def test_clients_that_hang_up_hurt_nobody(path):
    def hang_up() -> None:
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(encode_json(StatusRequest()))

    await trio.to_thread.run_sync(hang_up)
    assert await ask(path, StatusRequest())


async def test_a_long_answer_arrives_whole(nursery, tmp_path):
    async def long(_asked):
        return {"text": "x" * 3_000_000}

    await nursery.start(serve_control, tmp_path / "s", long)
    assert len((await ask(tmp_path / "s", StatusRequest()))["text"]) == 3_000_000


async def test_the_socket_is_removed_at_the_end_and_a_stale_one_replaced(tmp_path):
    path = tmp_path / "control.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with pytest.raises(NoActiveRun):
        request(path, StatusRequest())
    async with trio.open_nursery() as nursery:
        await nursery.start(serve_control, path, echo)
        assert await ask(path, StatusRequest())
        nursery.cancel_scope.cancel()
    assert not await trio.Path(path).exists()


async def test_a_living_socket_is_not_taken_over(path):
    with pytest.raises(UsageError, match=re.escape(str(path))):
        await serve_control(path, echo)
    assert await ask(path, StatusRequest())


async def test_a_path_too_long_for_a_socket_is_said_so(tmp_path):
    with pytest.raises(UsageError, match="100 bytes"):
        await serve_control(tmp_path / ("x" * 100), echo)


async def test_runs_are_found_by_their_sockets(nursery, tmp_path):
    find = partial(trio.to_thread.run_sync, find_run, tmp_path)
    runs = [RunDirectory(base_dir=tmp_path, tag=tag) for tag in ("a", "b", "dead")]
    with pytest.raises(NoActiveRun, match=re.escape(str(tmp_path))):
        await find(None)
    for run in runs:
        run.create()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(runs[2].control_socket))
    await nursery.start(serve_control, runs[0].control_socket, echo)
    assert await find(None) == runs[0]
    with pytest.raises(NoActiveRun, match=r"dead .*: a\)"):
        await find("dead")
    runs[2].journal.touch()
    with pytest.raises(NoActiveRun, match=r"dead is not active any more \(active: a\); `oobleck events dead`"):
        await find("dead")
    await nursery.start(serve_control, runs[1].control_socket, echo)
    with pytest.raises(UsageError, match=r"2 runs .*a, b"):
        await find(None)
    assert await find("b") == runs[1]
    assert await trio.to_thread.run_sync(active_runs, tmp_path) == (runs[0], runs[1])


def test_no_base_directory_is_no_active_run(tmp_path):
    assert active_runs(tmp_path / "none") == ()


@pytest.mark.parametrize("asked", REQUESTS)
def test_requests_survive_the_wire(asked):
    assert decode_request(encode_json(asked)) == asked


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.sampled_from(("StatusRequest", "KillRequest", "StopRequest", "node2")),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("@type", "node", "now", "more")), inner, max_size=4)
    ),
)


@given(st.binary(max_size=200) | json_values.map(lambda value: json.dumps(value).encode()))
def test_any_line_is_a_request_or_a_peer_error(line):
    try:
        asked = decode_request(line)
    except PeerError:
        return
    assert decode_request(encode_json(asked)) == asked


@pytest.mark.parametrize(
    "answer", [b"", b"{", b"[]\n", b'{"ok": 3}\n', b'{"error": "odd", "message": "x"}\n', b'{"error": "usage"}\n']
)
async def test_a_broken_answer_is_a_peer_error(tmp_path, answer):
    assert isinstance(await error_after(tmp_path, answer), PeerError)


async def error_after(tmp_path, answer: bytes) -> OobleckError:
    """What a client raises when it asks a server that gives this answer."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def answer_one() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.to_thread.run_sync, answer_one)
            with pytest.raises(OobleckError) as raised:
                await ask(tmp_path / "s", StatusRequest())
    return raised.value


@pytest.mark.parametrize("kind", [UsageError, ConfigError, UserError, PeerError, OobleckError])
async def test_errors_of_ours_arrive_as_what_they_are(tmp_path, kind: type[OobleckError]):
    error = await error_after(tmp_path, encode_error(kind("x")))
    assert (type(error), str(error)) == (kind, "x")
