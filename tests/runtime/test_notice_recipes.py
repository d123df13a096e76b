"""The recipes of docs/operations.md for clouds' notices, against servers that answer as those clouds document it."""

from __future__ import annotations

import json
import re
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
import trio

from oobleck.cli.inputs.job_file import load_job
from oobleck.job import ControlSpec
from oobleck.runtime.agent.notice import await_notice
from tests.serving import serving

PAGE = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")

TOKEN = "AQAEAJ4TyaD0"


class Cloud(ThreadingHTTPServer):
    """A metadata service: `body` is what is to be told, None before there is a notice."""

    daemon_threads = True
    body: str | None = None
    asked = 0


class _Handler(BaseHTTPRequestHandler):
    server: Cloud

    def answer(self, status: int, body: str = "") -> None:
        self.server.asked += 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        pass


class Amazon(_Handler):
    """IMDSv2 alone: a token is asked for by PUT with its life time, and 401 is said without it."""

    def do_PUT(self) -> None:
        is_right = self.path == "/latest/api/token" and self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.answer(200 if is_right else 400, TOKEN if is_right else "")

    def do_GET(self) -> None:
        if self.headers["X-aws-ec2-metadata-token"] != TOKEN:
            self.answer(401)
        elif self.path != "/latest/meta-data/spot/instance-action" or self.server.body is None:
            self.answer(404)
        else:
            self.answer(200, self.server.body)


class Google(_Handler):
    """403 without the header; FALSE until the machine is preempted."""

    def do_GET(self) -> None:
        if self.headers["Metadata-Flavor"] != "Google":
            self.answer(403)
        elif self.path != "/computeMetadata/v1/instance/preempted":
            self.answer(404)
        else:
            self.answer(200, self.server.body or "FALSE")


class Azure(_Handler):
    """400 without the header or the version; an empty list until there are events, of any machine of the set."""

    def do_GET(self) -> None:
        parts = urlsplit(self.path)
        query = parse_qs(parts.query)
        if self.headers["Metadata"] != "true" or "api-version" not in query:
            self.answer(400)
        elif parts.path == "/metadata/instance/compute/name":
            self.answer(200 if query.get("format") == ["text"] else 404, "workers_2")
        elif parts.path == "/metadata/scheduledevents":
            self.answer(200, self.server.body or json.dumps({"DocumentIncarnation": 1, "Events": []}))
        else:
            self.answer(404)


def event(kind: str, *resources: str) -> str:
    said = {
        "EventId": "602d9444-d2cd-49c7-8624-8643e7171297",
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": resources,
        "EventStatus": "Scheduled",
        "NotBefore": "Mon, 19 Sep 2016 18:29:47 GMT",
    }
    return json.dumps({"DocumentIncarnation": 2, "Events": [said]})


def cloud(handler: type[_Handler]) -> AbstractContextManager[Cloud]:
    return serving(Cloud(("127.0.0.1", 0), handler))


def recipe(name: str, server: Cloud) -> ControlSpec:
    """What the page says for a cloud, with a local server in place of the cloud's."""
    text = re.search(rf"\*\*{name}\*\*:.*?```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert text is not None
    control = load_job(text[1], source="docs/operations.md").control
    here = f"http://127.0.0.1:{server.server_address[1]}"
    there = re.compile(r"http://(169\.254\.169\.254|metadata\.google\.internal)")
    command, url = control.notice_command, control.notice_url
    assert there.search(command or url or "")
    return replace(
        control,
        notice_command=there.sub(here, command) if command else None,
        notice_url=there.sub(here, url) if url else None,
        notice_interval_s=0.05,
    )


async def notice_of(control: ControlSpec, server: Cloud) -> str | None:
    """What is said once there is a notice; None where there is none although it was asked for, more than once."""
    enough, found = server.asked + 3, None

    async def ask() -> None:
        nonlocal found
        found = await await_notice(control)
        nursery.cancel_scope.cancel()

    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            while server.asked <= enough:  # noqa: ASYNC110  it counts on threads of its own
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
    return found


@needs_curl
async def test_amazon_tells_of_a_spot_instance_with_a_token() -> None:
    with cloud(Amazon) as server:
        control = recipe("AWS", server)
        assert await notice_of(control, server) is None
        server.body = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
        assert await notice_of(control, server) == f"notice of termination: {server.body}"


async def test_google_tells_that_a_machine_is_preempted() -> None:
    with cloud(Google) as server:
        control = recipe("Google Cloud", server)
        assert await notice_of(control, server) is None
        server.body = "TRUE"
        assert await notice_of(control, server) == "notice of termination: TRUE"


@needs_curl
async def test_azure_tells_all_machines_and_only_the_one_concerned_leaves() -> None:
    with cloud(Azure) as server:
        control = recipe("Azure", server)
        assert await notice_of(control, server) is None
        server.body = event("Preempt", "workers_1", "workers_20")
        assert await notice_of(control, server) is None, "that is of other machines"
        server.body = event("Freeze", "workers_2")
        assert await notice_of(control, server) is None, "that is no end"
        server.body = event("Preempt", "workers_1", "workers_2")
        assert await notice_of(control, server) == "notice of termination: Preempt"
