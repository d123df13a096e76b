"""Notice of termination: clouds announce that a machine is about to be taken away, where it asks.

How, is the job's to say: a command that succeeds, or a URL that answers, once there is such a notice. A question that
fails in any other way is no notice: it is asked again.
"""

from __future__ import annotations

import logging
import re
import urllib.error
import urllib.request
from functools import partial
from http.client import HTTPException
from subprocess import DEVNULL

import trio

from oobleck.job import ControlSpec

_log = logging.getLogger("oobleck.agent")

_QUESTION_S = 5.0
_MAX_ANSWER_BYTES = 64 << 10
_SHOWN_CHARS = 200


async def await_notice(control: ControlSpec) -> str:
    """Ask again and again; return what was said once there is a notice: never where nothing is to be asked."""
    while True:
        for answer in (await _ask_command(control), await _ask_url(control)):
            if answer is not None:
                return answer
        await trio.sleep(control.notice_interval_s)


async def _ask_command(control: ControlSpec) -> str | None:
    """What the command says when it succeeds; None where it does not."""
    if control.notice_command is None:
        return None
    with trio.move_on_after(_QUESTION_S):
        done = await trio.run_process(
            ["/bin/sh", "-c", control.notice_command], stdin=DEVNULL, capture_stdout=True, stderr=DEVNULL, check=False
        )
        if done.returncode == 0:
            return f"notice of termination: {_shown(done.stdout) or control.notice_command}"
    return None


async def _ask_url(control: ControlSpec) -> str | None:
    if control.notice_url is None:
        return None
    answer = await trio.to_thread.run_sync(partial(_fetch, control.notice_url, control), abandon_on_cancel=True)
    if answer is None or not re.search(control.notice_pattern or "", answer.decode(errors="replace")):
        return None
    return f"notice of termination: {_shown(answer) or control.notice_url}"


def _fetch(url: str, control: ControlSpec) -> bytes | None:
    """The body of an answer 200; None for any other. Metadata servers are the machine's own: no proxy is asked."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    headers = {name: str(value) for name, value in control.notice_headers.items()}
    try:
        with opener.open(urllib.request.Request(url, headers=headers), timeout=_QUESTION_S) as response:  # noqa: S310  http or https, as `ControlSpec` has checked
            return bytes(response.read(_MAX_ANSWER_BYTES)) if response.status == 200 else None
    except (urllib.error.URLError, HTTPException, OSError, ValueError) as error:
        _log.debug("%s: %s", url, error)
        return None


def _shown(answer: bytes) -> str:
    return " ".join(answer.decode(errors="replace").split())[:_SHOWN_CHARS]
