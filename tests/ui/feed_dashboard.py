"""Feeds a run's journal to the dashboard, or to plain lines, at a multiple of its speed: for a terminal to look at."""

from __future__ import annotations

import argparse
import signal
import sys
from functools import partial
from pathlib import Path

import trio

from oobleck.control.journal.view import RunView
from oobleck.errors import UsageError
from oobleck.host.streams import lasting
from oobleck.ui.controls import Wish
from oobleck.ui.live import LineLog, console_on, run_dashboard, run_lines, wants_dashboard
from oobleck.ui.terminal import KeyReader
from tests.control.journals import run_with_a_loss


async def feed(arguments: argparse.Namespace) -> int:
    output, view, log = lasting(sys.stdout), RunView(), LineLog()
    started = trio.current_time()
    late_s = 0.0

    def now_s() -> float:
        return (trio.current_time() - started) * arguments.speed

    async def watch_signals(scope: trio.CancelScope) -> None:
        nonlocal number
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as received:
            async for number in received:  # noqa: B007 - it is read outside
                scope.cancel()

    async def act(wish: Wish) -> None:
        asked.append(f"{wish.what} {wish.node}")
        if wish.node == "node0":
            raise UsageError("node0 stays")

    async def draw() -> None:
        keys = KeyReader(0) if arguments.keys else None
        if await run_dashboard(lambda: view.at(now_s()), output=output, act=act, keys=keys):
            nursery.cancel_scope.cancel()

    number, asked = 0, list[str]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(watch_signals, nursery.cancel_scope)
        if wants_dashboard(console_on(output), plain=arguments.plain):
            nursery.start_soon(draw)
        else:
            nursery.start_soon(partial(run_lines, log, output=output))
        for entry in run_with_a_loss(arguments.nodes // 2, 2):
            await trio.sleep_until(started + entry.t_s / arguments.speed)
            late_s = max(late_s, trio.current_time() - started - entry.t_s / arguments.speed)
            view.apply(entry)
            log.apply(entry)
        nursery.cancel_scope.cancel()
    if arguments.report:
        arguments.report.write_text(f"{late_s:.3f}")
    sys.stderr.write("".join(f"asked: {each}\n" for each in asked))
    return 128 + number if number else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speed", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--keys", action="store_true")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--report", type=Path, help="file for the seconds by which the slowest entry was late")
    sys.exit(trio.run(feed, parser.parse_args()))
