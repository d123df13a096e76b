"""Libraries: what is declared is imported and the other way round, and what those that we tried cannot do.

Each test of a library holds the reason why a part of ours is still there; the day it fails, that part can go.
"""

from __future__ import annotations

import ast
import datetime
import math
import socket
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import prometheus_client
import pytest
import ruamel.yaml
from packaging.requirements import Requirement

from oobleck.cli.inputs.yaml_tree import YamlError, parse_yaml
from oobleck.errors import PeerError
from oobleck.planner.reconfiguration.transport import transport
from oobleck.wire import decode_json, encode_frame, encode_json

ROOT = Path(__file__).parents[1]
DISTRIBUTIONS = {
    "confluent_kafka": "confluent-kafka",
    "opentelemetry": "opentelemetry-sdk",
    "opentelemetry.exporter": "opentelemetry-exporter-otlp-proto-http",
    "pynvml": "nvidia-ml-py",
    "trio_asyncio": "trio-asyncio",
    "upath": "universal_pathlib",
    "yaml": "pyyaml",
}
"""Of modules that are called otherwise, or whose parts are installed by themselves."""
TOOLS = ("docs", "test")
"""Extras of those who work on the package; nobody who runs it needs them."""
INDIRECT = ("accelerate", "s3fs")
"""What a library imports for us, and does not ask for itself: transformers' Trainer, and fsspec for s3://."""


def imported() -> set[str]:
    """The packages of others that ours imports anywhere, by the names under which they are installed."""
    found: set[str] = set()
    for path in (ROOT / "oobleck").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {root_of(alias.name) for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(root_of(node.module))
    return {DISTRIBUTIONS.get(name, name) for name in found - sys.stdlib_module_names - {"oobleck"}}


def root_of(module: str) -> str:
    """What is installed by itself: the package, or a part of one that several distributions fill."""
    first, *rest = module.split(".")
    part = ".".join([first, *rest[:1]])
    return part if part in DISTRIBUTIONS else first


def test_what_is_declared_is_imported_and_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    listed = [project["dependencies"], *(names for extra, names in extras.items() if extra not in TOOLS)]
    declared = [Requirement(text).name for names in listed for text in names]
    assert sorted(declared) == sorted({*imported(), *INDIRECT})


class Sample(msgspec.Struct, tag=True, forbid_unknown_fields=True, frozen=True, kw_only=True):
    loss: float
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OurSample:
    loss: float
    note: str = ""


def test_msgspec_writes_a_loss_that_is_no_number_as_one_that_it_cannot_read():
    """A run that diverges must have a journal that can be read."""
    assert msgspec.json.encode(Sample(loss=math.nan)) == b'{"type":"Sample","loss":null,"note":""}'
    assert math.isnan(decode_json(OurSample, encode_json(OurSample(loss=math.nan))).loss)


def test_msgspec_refuses_text_that_is_not_unicode():
    """A traceback may name a file whose name is not; it must reach the master."""
    with pytest.raises(UnicodeEncodeError):
        msgspec.msgpack.encode(Sample(loss=1.0, note="\udc80"))
    assert encode_frame(OurSample(loss=1.0, note="\udc80"))


def test_msgspec_fills_what_a_peer_left_out_and_takes_the_last_of_two():
    """A peer of another version must be refused, not misread."""
    assert msgspec.json.decode(b'{"type":"Sample","loss":1,"loss":2}', type=Sample) == Sample(loss=2.0)
    with pytest.raises(PeerError, match="'note' is missing"):
        decode_json(OurSample, b'{"@type":"OurSample","loss":1}')
    with pytest.raises(PeerError, match="a key twice"):
        decode_json(OurSample, b'{"@type":"OurSample","loss":1,"loss":2,"note":""}')


def test_msgspec_knows_no_union_of_dataclasses():
    """Jobs and plans are dataclasses, replaced and compared as such below any floor that knows of bytes."""

    @dataclass(frozen=True)
    class Other:
        x: int

    with pytest.raises(TypeError, match="more than one dataclass"):
        msgspec.json.Decoder(OurSample | Other)


@pytest.mark.parametrize("text", ["a: !!python/object/apply:os.system [x]", "a: !secret 1", "a: &x [*x]"])
def test_ruamel_overlooks_what_a_job_file_must_not_hold(text):
    assert ruamel.yaml.YAML().load(text)["a"] is not None
    with pytest.raises(YamlError):
        parse_yaml(text)


def test_ruamel_makes_dates_of_words_and_gives_no_line_of_a_single_value():
    loaded = ruamel.yaml.YAML().load("a: 2024-01-01\nb: no\n")
    assert loaded["a"] == datetime.date(2024, 1, 1)
    assert not hasattr(loaded["b"], "lc")


def test_prometheus_own_server_knows_no_unix_sockets():
    """Ours answers on one, in the master's own event loop; the text that it answers with is fifteen lines."""
    with pytest.raises(socket.gaierror):
        prometheus_client.start_http_server(0, addr="unix:/run/metrics.sock")


def test_nodes_by_the_hundred_thousand_are_matched_where_scipy_would_need_a_table_of_80_gigabytes():
    costs = np.array([[0.0, 5.0, 9.0], [4.0, 1.0, 8.0]])
    flows = transport(costs, [60_000, 40_000], [30_000, 50_000, 20_000])
    assert flows.tolist() == [[30_000, 10_000, 20_000], [0, 40_000, 0]]
