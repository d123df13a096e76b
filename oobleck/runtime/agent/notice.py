"""Notice of termination: a cloud tells a machine that asks whether it is about to be taken away.

The job names a command that succeeds, or a URL that answers, once there is a notice. Any other result means that there
is none yet.
"""

from __future__ import annotations

import logging
import re
import urllib.error
import urllib.request
from functools import partial
from http.client import HTTPException

import trio

from oobleck.job import ControlSpec
from oobleck.job.secrets import public_url
from oobleck.runtime.shell_command import shell_command

_log = logging.getLogger("oobleck.agent")

_QUESTION_S = 5.0
_MAX_ANSWER_BYTES = 64 << 10
_SHOWN_CHARS = 200


async def await_notice(control: ControlSpec) -> str:
    """Poll until there is a notice, and return its text; never returns if the job names nothing to ask."""
    while True:
        for answer in (await _ask_command(control), await _ask_url(control)):
            if answer is not None:
                return answer
        await trio.sleep(control.notice_interval_s)


async def _ask_command(control: ControlSpec) -> str | None:
    if control.notice_command is None:
        return None
    # A command that hangs is killed and asked again, so that it hides neither a later notice nor the URL's.
    try:
        with trio.move_on_after(_QUESTION_S):
            async with shell_command(control.notice_command) as process:
                assert process.stdout is not None
                printed = b"".join([bytes(data) async for data in process.stdout])
                if await process.wait() == 0:
                    return f"notice of termination: {_shown(printed) or 'notice_command succeeds'}"
    except OSError as error:
        _log.debug("notice_command: %s", error)
    return None


async def _ask_url(control: ControlSpec) -> str | None:
    if control.notice_url is None:
        return None
    answer = await trio.to_thread.run_sync(partial(_fetch, control.notice_url, control), abandon_on_cancel=True)
    if answer is None or not re.search(control.notice_pattern or "", answer.decode(errors="replace")):
        return None
    return f"notice of termination: {_shown(answer) or public_url(control.notice_url)}"


def _fetch(url: str, control: ControlSpec) -> bytes | None:
    """Return the body of an answer with status 200, else None."""
    # A metadata server is local to the machine, so no proxy applies.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {name: str(value) for name, value in control.notice_headers.items()}
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_QUESTION_S) as response:  # noqa: S310  http or https, as `ControlSpec` has checked
            return bytes(response.read(_MAX_ANSWER_BYTES)) if response.status == 200 else None
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        _log.debug("%s: %s", public_url(url), error)
        return None


def _shown(answer: bytes) -> str:
    return " ".join(answer.decode(errors="replace").split())[:_SHOWN_CHARS]
