"""The report page: well-formed, self-contained, escaped, and true to the journal."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.control.journal import JobEnded, NodeLost, PlanCause, Unreachable, diagnose
from oobleck.control.journal.history import mean_rates, thinned
from oobleck.control.journal.summary import summarize
from oobleck.ui.pictures import report_html
from oobleck.ui.pictures.axes import ticks, time_ticks
from tests.control.journals import (
    adopted,
    committed,
    history_of,
    job_started,
    plan,
    recovered,
    run_with_a_loss,
    script_with_a_failure,
)

VOID = {"meta", "link", "br", "img", "input", "hr"}


class Page(HTMLParser):
    """Checks that every tag is closed in order, and keeps what is needed to look at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open, f"</{tag}> closes nothing"
        assert self.open[-1] == tag, f"</{tag}> closes <{self.open[-1]}>"
        self.open.pop()

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += f"{data} "


def page_of(entries) -> str:
    entries = tuple(entries)
    return report_html(history_of(entries), summarize(entries), diagnose(entries))


def test_a_run_with_a_loss_is_shown_whole():
    page = Page(page_of(run_with_a_loss()))
    for words in (
        "gpt2-demo",
        "120 of 120",
        "Where the time went",
        "useful steps",
        "Node-hours: 0.06",
        "node3: contact was lost",
        "Plans",
    ):
        assert words in page.text
    assert "generation 2" in page.text
    assert sum(tag == "svg" for tag, _ in page.tags) == 5
    assert [attrs.get("class") for tag, attrs in page.tags if tag == "line"].count("mark") == 2


def test_a_run_that_continues_an_earlier_one_counts_the_steps_of_both():
    start = [job_started(("node0",)), adopted(1.0, 1, plan(("node0",)), restored_step=49)]
    entries = [*start, *(committed(step - 40.0, step) for step in range(50, 102))]
    text = Page(page_of(entries)).text
    assert "101 of 120, 52 of them in this run" in text
    assert "52 of 120" not in text


def test_a_script_has_its_name_and_generations_and_nothing_that_only_training_has():
    entries = script_with_a_failure()
    page = Page(page_of(entries))
    assert "<title>Oobleck: my-script</title>" in page_of(entries)
    for words in ("train.py on 2 nodes, started 2026-01-02 03:04:05 UTC", "Generations", "node1: 2-3", "rank failed"):
        assert words in page.text
    for words in ("0 of 0", "steps", "loss", "goodput", "Where the time went", "starting"):
        assert words not in page.text


def test_commands_are_set_as_such_and_stay_escaped():
    error = "see `oobleck events <tag>` or not"
    page = page_of([*run_with_a_loss(), JobEnded(t_s=99.0, exit_code=1, reason=error)])
    assert "see <code>oobleck events &lt;tag&gt;</code> or not" in page
    assert "`" not in Page(page).text


@pytest.mark.parametrize(
    ("exit_code", "last_step", "kind"), [(0, 120, "well"), (0, 52, "on"), (75, 52, "on"), (1, 52, "failed")]
)
def test_a_run_that_was_stopped_is_neither_done_nor_failed(exit_code, last_step, kind):
    entries = [entry for entry in run_with_a_loss() if not isinstance(entry, JobEnded)]
    entries = [entry for entry in entries if getattr(getattr(entry, "record", None), "step", 0) <= last_step]
    text = page_of([*entries, JobEnded(t_s=99.0, exit_code=exit_code, reason="because")])
    assert f'<p class="state {kind}">because</p>' in text


def test_nodes_that_join_are_counted_apart_from_recoveries():
    joined = recovered(80.0, 3, "node3", cause=PlanCause.JOINED)
    text = Page(page_of([*run_with_a_loss(), joined])).text
    assert "1, and 1 planned change of nodes" in text


def test_nothing_is_fetched_from_elsewhere():
    text = page_of(run_with_a_loss())
    assert not re.search(r"https?:|<script|<link|<img|@import|url\(", text)


def test_both_schemes_and_phones_are_provided_for():
    text = page_of(run_with_a_loss())
    assert "prefers-color-scheme:dark" in text
    assert "max-width:520px" in text
    assert 'name="viewport"' in text
    used = set(re.findall(r"var\((--[a-z]+)\)", text))
    light, dark = (set(re.findall(r"(--[a-z]+):#", block)) for block in text.split("@media(prefers", 1))
    assert used <= light
    assert used <= dark


def colours(text: str) -> tuple[dict[str, str], dict[str, str]]:
    """The named colours, light and dark."""
    light, dark = text.split("@media(prefers", 1)
    return tuple(dict(re.findall(r"(--[a-z]+):(#[0-9a-f]+)", block)) for block in (light, dark))  # type: ignore[return-value]


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    linear = []
    for at in (0, 2, 4):
        value = int(digits[at : at + 2], 16) / 255
        linear.append(value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4)
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize(
    ("name", "least"),
    [("--text", 7.0), ("--soft", 4.5), ("--rate", 3.0), ("--nodes", 3.0), ("--loss", 3.0), ("--bad", 3.0)],
)
def test_text_and_lines_stand_out_in_both_schemes(scheme, name, least):
    known = colours(page_of(run_with_a_loss()))[scheme]
    bright, dim = sorted((luminance(known[name]), luminance(known["--card"])), reverse=True)
    assert (bright + 0.05) / (dim + 0.05) >= least


@pytest.mark.parametrize("length", [1, 5, 14, 40])
def test_a_run_that_goes_on_or_was_cut_off_is_shown_too(length):
    Page(page_of(list(run_with_a_loss())[:length]))


def test_an_empty_journal_makes_an_empty_page():
    Page(page_of(()))


def test_what_comes_from_elsewhere_is_escaped():
    evil = "<script>alert('x')</script>&\"'"
    entries = [
        job_started(("a", "b")),
        adopted(1.0, 1, plan(("a",), ("b",)), reason=evil),
        committed(2.0, 1),
        committed(3.0, 2),
        NodeLost(t_s=4.0, node="b", loss=Unreachable(problem=evil)),
        JobEnded(t_s=5.0, exit_code=1, reason=evil),
    ]
    text = page_of(entries)
    Page(text)
    assert "<script" not in text


def test_losses_that_are_no_numbers_and_equal_ones_are_drawn():
    entries = [job_started(("a",)), adopted(1.0, 1, plan(("a",)))]
    entries += [committed(2.0 + step, step, loss=math.nan if step == 3 else 2.0) for step in range(1, 6)]
    text = page_of(entries)
    Page(text)
    assert "NaN" not in text
    assert "nan" not in "".join(re.findall(r' d="([^"]*)"', text))


def test_a_long_run_stays_a_small_page():
    entries = list(run_with_a_loss(steps=20_000, lost_at=700))
    assert len(page_of(entries)) < 200_000


def test_the_shares_of_the_time_sum_to_the_whole():
    widths = [
        float(width) for width in re.findall(r'<i class="\w+" style="width:([\d.]+)%', page_of(run_with_a_loss()))
    ]
    assert sum(widths) == pytest.approx(100.0, abs=0.01)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0, 1e6)), min_size=1, max_size=60), st.integers(2, 20))
def test_thinned_rates_keep_their_integral(pieces, most):
    rates, now_s = [], 0.0
    for length_s, rate in pieces:
        rates.append((now_s, now_s + length_s, rate))
        now_s += length_s
    thin = mean_rates(rates, now_s, most=most)
    assert len(thin) <= most
    total = sum((until - since) * rate for since, until, rate in rates)
    assert sum((until - since) * rate for since, until, rate in thin) == pytest.approx(total, rel=1e-6, abs=1e-6)


def test_the_history_of_a_long_run_is_that_of_a_short_one_with_fewer_points():
    """Ten thousand steps, of which the last thousand are run again: its drawing has the same area and the same ends."""
    steps = [*range(1, 10_001), *range(9_001, 10_001)]
    entries = [job_started(("a", "b"), max_steps=10_000), adopted(0.5, 1, plan(("a",), ("b",)))]
    entries += [committed(1.0 + index, step, loss=10_000.0 - step) for index, step in enumerate(steps)]
    entries += [adopted(12_000.0 + index, 2 + index, plan(("a",), ("b",))) for index in range(100)]
    history = history_of(entries)
    assert len(history.rates) <= 400
    assert sum(rate * (until - since) for since, until, rate in history.rates) == pytest.approx(2048 * len(steps))
    assert history.losses[0] == (1.0, 9_999.0)
    assert history.losses[-1][0] == pytest.approx(10_000, abs=4)
    assert all(y == pytest.approx(10_000 - x) for x, y in history.losses)
    assert [x for x, _ in history.losses] == sorted(x for x, _ in history.losses)
    assert (history.num_plans, len(history.plans), history.plans[-1].generation) == (101, 50, 101)
    assert "the first 51 are left out" in Page(page_of(entries)).text


@given(st.integers(0, 500), st.integers(3, 50))
def test_thinned_points_keep_both_ends_and_the_order(count, most):
    points = [(float(index), float(index % 7)) for index in range(count)]
    thin = thinned(points, most=most)
    assert len(thin) <= max(most, 0) + 1
    assert list(thin) == sorted(thin)
    if points:
        assert (thin[0], thin[-1]) == (points[0], points[-1])
        assert all(0 <= y <= 6 for _, y in thin)


@given(st.floats(1.0, 1e8), st.integers(2, 8))
def test_moments_of_an_axis_are_round_and_not_many(length_s, about):
    found = time_ticks(0.0, length_s, about)
    assert 1 <= len(found) <= 1.25 * about + 1
    if length_s >= about:
        step = found[1] - found[0] if len(found) > 1 else 1.0
        assert 60 % step == 0 or 3600 % step == 0 or 86400 % step == 0 or step % 86400 == 0


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(2, 8))
def test_ticks_lie_within_and_are_not_many(low, length, about):
    found = ticks(low, low + length, about)
    assert len(found) <= 1.25 * about + 1
    assert all(low - 1e-6 * (abs(low) + length) <= tick <= low + length + 1e-6 * (abs(low) + length) for tick in found)
