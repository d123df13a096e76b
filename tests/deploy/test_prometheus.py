"""A real Prometheus loads the alert rules, scrapes what a run serves, and answers each query of the dashboard."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import quote
from urllib.request import urlopen

import pytest
import trio
import yaml

from oobleck.runtime.metrics_output import MetricsAddress, serve_metrics
from tests.monitoring import DEPLOY, dashboard, rules, whole_text

UNPACKED = str(DEPLOY.parent / ".prometheus" / "usr" / "bin")
PROMTOOL, PROMETHEUS = (shutil.which(name) or shutil.which(name, path=UNPACKED) for name in ("promtool", "prometheus"))
RULES = DEPLOY / "prometheus" / "alerts.yaml"

pytestmark = pytest.mark.skipif(PROMTOOL is None or PROMETHEUS is None, reason="Prometheus is not installed")

STEPS = 'oobleck_step_total{run="a"}'
# In promtool's notation, a value a minute: `+` is how much it grows, `x` how often, `_` is no value.
GROWS = "0+1x120"


def alerts(directory: Path, series: dict[str, str], *, at_minute: int) -> set[str]:
    """Return the alerts that fire at a minute."""
    none = [{"eval_time": f"{at_minute}m", "alertname": rule["alert"], "exp_alerts": []} for rule in rules()]
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": inputs, "alert_rule_test": none}],
    }
    (directory / "test.yaml").write_text(yaml.safe_dump(test))
    command = [str(PROMTOOL), "test", "rules", str(directory / "test.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = done.stdout + done.stderr
    fired = set(re.findall(r"alertname: ?(\w+)", said))
    assert (done.returncode == 0) == (fired == set()), said
    return fired


@pytest.mark.parametrize(
    ("series", "at_minute", "fired"),
    [
        ({STEPS: GROWS}, 90, set()),
        ({STEPS: "7x120"}, 60, {"OobleckNoStep"}),
        ({STEPS: "0+1x50 50x8 stale"}, 72, set()),
        ({STEPS: "0+1x50 stale"}, 54, {"OobleckMasterGone"}),
        ({f'{STEPS[:-1]},pod="x"}}': "0+1x50 stale", f'{STEPS[:-1]},pod="y"}}': "_x51 51+1x50"}, 54, set()),
        ({STEPS: GROWS, 'oobleck_recoveries_total{run="a"}': "0+0.2x120"}, 90, {"OobleckManyRecoveries"}),
        ({STEPS: GROWS, 'oobleck_recoveries_total{run="a"}': "0x60 2x60"}, 90, set()),
        ({STEPS: "200+1x120", 'oobleck_goodput{run="a"}': "0.5x120"}, 90, {"OobleckLowGoodput"}),
        ({STEPS: "0+1x90", 'oobleck_goodput{run="a"}': "0.5x90"}, 80, set()),
        ({STEPS: GROWS, 'oobleck_steps_lost_total{run="a"}': "0x60 5x60"}, 90, {"OobleckStepsLost"}),
    ],
    ids=[
        "all is well",
        "no step",
        "a run that has ended after a long step",
        "no master",
        "the next master in another pod",
        "twelve recoveries an hour",
        "two recoveries an hour",
        "low goodput",
        "low goodput of a run that begins",
        "steps lost",
    ],
)
def test_an_alert_fires_when_it_says_and_not_otherwise(
    tmp_path: Path, series: dict[str, str], at_minute: int, fired: set[str]
) -> None:
    assert alerts(tmp_path, series, at_minute=at_minute) == fired


@contextmanager
def prometheus(directory: Path, target: int) -> Iterator[str]:
    """Run a Prometheus that scrapes a port of the loopback interface, and return its address."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(RULES)],
        "scrape_configs": [{"job_name": "oobleck", "static_configs": [{"targets": [f"127.0.0.1:{target}"]}]}],
    }
    (directory / "prometheus.yml").write_text(yaml.safe_dump(config))
    with socket.create_server(("127.0.0.1", 0)) as free:
        place = f"127.0.0.1:{free.getsockname()[1]}"
    files = [f"--config.file={directory / 'prometheus.yml'}", f"--storage.tsdb.path={directory / 'data'}"]
    command = [str(PROMETHEUS), *files, f"--web.listen-address={place}"]
    with (directory / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            yield f"http://{place}"
        finally:
            process.terminate()


def ask(address: str, path: str) -> Any:
    """Return the data of an answer, and wait for a server that is not there yet."""
    deadline_s = time.monotonic() + 30
    while True:
        try:
            with urlopen(f"{address}/api/v1/{path}", timeout=10) as answer:
                return json.load(answer)["data"]
        except URLError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.2)


def results(address: str, query: str) -> list[Any]:
    """Return what a query gives, once there is something."""
    deadline_s = time.monotonic() + 30
    while not (found := ask(address, f"query?query={quote(query)}")["result"]) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return list(found)


async def test_each_query_of_the_dashboard_has_an_answer_and_each_rule_is_evaluated(tmp_path: Path) -> None:
    queries = {
        target["expr"].replace("$run", ".*").replace("$__rate_interval", "1m")
        for panel in dashboard()["panels"]
        for target in panel["targets"]
    }
    async with trio.open_nursery() as nursery:
        (listener,) = await nursery.start(serve_metrics, MetricsAddress(port=0), whole_text)
        port = listener.socket.getsockname()[1]

        def look() -> None:
            with prometheus(tmp_path, port) as address:
                assert len(queries) > 10
                assert [query for query in sorted(queries) if not results(address, query)] == []
                (group,) = ask(address, "rules")["groups"]
                assert len(group["rules"]) == len(rules())
                assert {rule["health"] for rule in group["rules"]} == {"ok"}

        await trio.to_thread.run_sync(look)
        nursery.cancel_scope.cancel()
