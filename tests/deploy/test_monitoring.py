"""The Grafana dashboard and the alert rules name metrics that a run has, and labels that they have."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.monitoring import dashboard, rules, whole_text

METRIC = re.compile(r"\boobleck_\w+")


def samples() -> dict[str, set[str]]:
    """The labels of each metric."""
    families = text_string_to_metric_families(whole_text())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def texts(value: Any) -> Iterator[str]:
    match value:
        case str():
            yield value
        case dict() | list():
            for item in value.values() if isinstance(value, dict) else value:
                yield from texts(item)


@pytest.mark.parametrize("source", [dashboard, rules])
def test_each_metric_that_is_named_exists(source: Any) -> None:
    named = {name for text in texts(source()) for name in METRIC.findall(text)}
    assert len(named) >= 4
    assert named <= samples().keys()


def test_the_dashboard_shows_all_metrics_but_counters_of_tokens_and_generations() -> None:
    shown = {name for text in texts(dashboard()) for name in METRIC.findall(text)}
    assert samples().keys() - shown == {"oobleck_tokens_total", "oobleck_generation"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    places = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(x for x, _ in places) < 24


def test_alerts_name_the_run_and_what_to_do_by_labels_that_exist() -> None:
    for rule in rules():
        used = set(re.findall(r"\$labels\.(\w+)", " ".join(texts(rule["annotations"]))))
        assert used == {"run"}
        assert all(used <= samples()[name] for name in METRIC.findall(rule["expr"]))
        assert set(rule["annotations"]) == {"summary", "action"}
