"""The report page as Chromium shows it: nothing scrolls sideways, lies upon other text, or is complained about."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape

import pytest

from oobleck.control.journal import NodeLost, Unreachable, diagnose
from oobleck.control.journal.summary import summarize
from oobleck.ui.pictures import report_html
from tests.control.journals import adopted, committed, history_of, job_started, plan, recovered, run_with_a_loss

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = [
    *("--headless", "--no-sandbox", "--no-first-run", "--disable-gpu", "--disable-quic", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    *("--allow-file-access-from-files", "--enable-logging=stderr"),
]

# Looks into frames of several widths, and leaves what it finds in the page: for each frame whether it is wider than it
# should be, and the pairs of texts that share more than a pixel in both directions.
FRAMES = """<!DOCTYPE html><body>%s<pre id="found"></pre><script>
function texts(page) {
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const range = page.createRange();
    range.selectNodeContents(walker.currentNode);
    const shown = walker.currentNode.textContent.trim();
    const box = walker.currentNode.parentElement.getBoundingClientRect();
    for (const r of shown ? range.getClientRects() : [])
      found.push({node: walker.currentNode, text: shown, left: Math.max(r.left, box.left),
                  right: Math.min(r.right, box.right), top: r.top, bottom: r.bottom});
  }
  return found;
}
function overlaps(page) {
  const all = texts(page), pairs = [];
  all.forEach((a, i) => all.slice(i + 1).forEach(b => {
    const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
    const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
    if (a.node !== b.node && wide > 1 && high > 3) pairs.push([a.text, b.text]);
  }));
  return pairs;
}
window.onload = () => {
  const found = [...document.querySelectorAll("iframe")].map(frame => {
    const page = frame.contentDocument;
    page.querySelectorAll("details").forEach(one => { one.open = true; });
    return {width: frame.clientWidth, needed: page.documentElement.scrollWidth, texts: texts(page).length,
            scheme: frame.contentWindow.getComputedStyle(page.body).backgroundColor, overlaps: overlaps(page)};
  });
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


def eventful_run():
    """A run with many nodes of long names that goes through losses close to each other and far apart."""
    names = tuple(f"ip-10-0-{i}-17.eu-central-1.compute.internal" for i in range(12))
    rows = [names[0:4], names[4:8], names[8:12]]
    yield job_started(names, max_steps=4000)
    yield adopted(4.0, 1, plan(*rows, microbatches=24))
    for step in range(1, 40):
        yield committed(4.0 + step, step)
    for index, at in enumerate((50.0, 51.0, 400.0, 3000.0, 3590.0)):
        lost = names[index::5][: 1 + index]
        yield NodeLost(t_s=at, node=lost[0], loss=Unreachable(problem="x" * 300))
        yield adopted(at + 0.1, 2 + index, plan(*rows, microbatches=24), reason="borrowed " * 30)
        yield recovered(at + 0.2, 2 + index, *lost, stall_s=123.4)
        yield committed(at + 1.0, 40 + index)
    yield committed(3600.0, 50)


def look(tmp_path, entries, *, dark: bool) -> list[dict]:
    entries = tuple(entries)
    page = report_html(history_of(entries), summarize(entries), diagnose(entries))
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    frames = "".join(f'<iframe src="report.html" width="{width}" height="900"></iframe>' for width in (390, 768, 1280))
    (tmp_path / "frames.html").write_text(FRAMES % frames, encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    command = [str(BROWSER), *QUIET, *scheme, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    done = subprocess.run(
        [*command, (tmp_path / "frames.html").as_uri()], capture_output=True, text=True, timeout=60, check=False
    )
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    assert not complaints
    found = re.search(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    return json.loads(unescape(found[1]))


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
@pytest.mark.parametrize("run", [run_with_a_loss, eventful_run])
def test_a_page_fits_phones_and_desks_without_text_upon_text(tmp_path, run):
    for frame in look(tmp_path, run(), dark=False):
        assert frame["texts"] > 50
        assert frame["needed"] <= frame["width"], frame
        assert frame["overlaps"] == [], frame["width"]


@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_the_page_is_dark_for_readers_who_want_it_so(tmp_path):
    assert {frame["scheme"] for frame in look(tmp_path, run_with_a_loss(), dark=True)} == {"rgb(20, 23, 26)"}
