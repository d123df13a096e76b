"""A Kafka broker of a test's own: that of librdkafka's mock cluster, in a process of its own, over real connections.

Each line on its standard input is a message to produce, as JSON: [topic, partition, value in hex, headers]; a number is
answered with its next line once all so far are written. Run as a script it is that process.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

__all__ = ["Broker", "needs_kafka", "serve_kafka"]

needs_kafka = pytest.mark.skipif(
    importlib.util.find_spec("confluent_kafka") is None,
    reason="Kafka's client is not installed: pip install confluent-kafka",
)


class Broker:
    """A running broker, whose topics have four partitions."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = self._answer()

    def produce(self, topic: str, partition: int, values: Sequence[bytes], *, headers: Sequence[str] = ()) -> None:
        """Write messages, and return once they can be read."""
        assert self._process.stdin is not None
        for value in values:
            self._process.stdin.write(json.dumps([topic, partition, value.hex(), list(headers)]) + "\n")
        self._process.stdin.write("0\n")
        self._process.stdin.flush()
        assert self._answer() == "written"

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@contextmanager
def serve_kafka() -> Iterator[Broker]:
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        try:
            yield Broker(process)
        finally:
            process.kill()


def _serve() -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": "mock:1", "test.mock.num.brokers": 1})
    (broker,) = producer.list_topics(timeout=20).brokers.values()
    print(f"{broker.host}:{broker.port}", flush=True)
    for line in sys.stdin:
        match json.loads(line):
            case [topic, partition, value, headers]:
                named = [(name, b"") for name in headers]
                producer.produce(topic, bytes.fromhex(value), partition=partition, headers=named)
            case _:
                print("written" if producer.flush(20) == 0 else "late", flush=True)


if __name__ == "__main__":
    _serve()
