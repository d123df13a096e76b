"""The site of the documentation: it builds without a warning, needs no network, and has the whole public API."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from html import unescape
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

import oobleck.planner
import oobleck.schedule
import oobleck.sim
import oobleck.sim.cluster
import oobleck.sim.costs
import oobleck.sim.sweep
import oobleck.sim.trace

DOCS = Path(__file__).parents[1] / "docs"
PUBLIC = (oobleck.planner, oobleck.schedule, oobleck.sim, oobleck.sim.costs, oobleck.sim.trace, oobleck.sim.sweep)

# What a page loads by itself: scripts, styles, fonts, pictures. Links that a reader may follow are none of these.
LOADED = re.compile(
    r"""(?:<(?:script|img|iframe|source)\b[^>]*\bsrc=|<link\b[^>]*\bhref=|url\()["']?(https?:)?//[^"')>]*"""
)


def build(source: Path, site: Path) -> subprocess.CompletedProcess[str]:
    options = ["--builder", "html", "--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", str(DOCS)]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(site)]
    return subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    site = tmp_path_factory.mktemp("site")
    done = build(DOCS, site)
    assert done.returncode == 0, done.stdout + done.stderr
    return site


@pytest.mark.slow
def test_every_page_is_on_the_site(site: Path):
    assert len(list(DOCS.glob("*.md"))) > 12
    assert [page.name for page in DOCS.glob("*.md") if not (site / f"{page.stem}.html").is_file()] == []


@pytest.mark.slow
def test_no_page_loads_anything_from_a_network(site: Path):
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css", ".svg")]
    assert len(files) > 15
    loaded = {
        f"{path.name}: {found[0]}" for path in files for found in LOADED.finditer(path.read_text(encoding="utf-8"))
    }
    assert sorted(loaded) == []


@pytest.mark.slow
def test_code_has_a_button_that_copies_it(site: Path):
    assert "copybutton.js" in (site / "install.html").read_text(encoding="utf-8")
    assert list(site.rglob("copybutton.js"))
    assert list(site.rglob("clipboard.min.js"))


@pytest.mark.slow
def test_examples_of_the_api_are_code_and_no_quotations(site: Path):
    page = (site / "api.html").read_text(encoding="utf-8")
    assert 'run = oobleck.launch({"model"' in unescape(re.sub(r"<[^>]*>", "", page))
    assert "<blockquote>" not in page


def documented(site: Path) -> set[str]:
    """The anchors of the API's page, which are the full names of what it documents."""
    return set(re.findall(r'id="(oobleck\.[\w.]+)"', (site / "api.html").read_text(encoding="utf-8")))


@pytest.mark.slow
@pytest.mark.parametrize("module", PUBLIC, ids=lambda module: module.__name__)
def test_what_a_library_offers_is_on_the_api_page(site: Path, module: ModuleType):
    offered = [name for name in module.__all__ if isinstance(getattr(module, name), type | FunctionType)]
    assert len(offered) > 1
    assert {f"{module.__name__}.{name}" for name in offered} - documented(site) == set()


@pytest.mark.slow
def test_jobs_and_runs_are_on_the_api_page(site: Path):
    own = {f"oobleck.{name}" for name in oobleck.__all__ if not name.startswith("__")}
    assert {"oobleck.Job", "oobleck.Run", "oobleck.launch"} <= own
    assert own | {"oobleck.Run.wait", "oobleck.Run.kill", "oobleck.sim.cluster.run_cluster"} <= documented(site)


@pytest.mark.slow
def test_links_that_lead_nowhere_fail_the_build(tmp_path: Path):
    wrong = ("other.md", "#nothing", "page.md#nothing", "../examples/nothing.yaml")
    (tmp_path / "page.md").write_text("# A page\n")
    (tmp_path / "index.md").write_text("# Links\n\n" + "".join(f"- [it]({link})\n" for link in wrong))
    done = build(tmp_path, tmp_path / "site")
    assert done.returncode != 0
    assert [link for link in wrong if link.lstrip("#").split("#")[-1] not in done.stderr] == []


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
QUIET = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--allow-file-access-from-files",
)
FRAMES = """<!DOCTYPE html><body>%s<pre id="found"></pre><script>
window.onload = () => {
  const hides = box => box.scrollWidth > box.clientWidth;
  const wide = [...document.querySelectorAll("iframe")].filter(
    frame => frame.contentDocument.documentElement.scrollWidth > frame.clientWidth
      || (frame.clientWidth > 1000 && [...frame.contentDocument.querySelectorAll("pre")].some(hides)));
  document.getElementById("found").textContent = JSON.stringify(wide.map(frame => frame.src + " " + frame.clientWidth));
};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")
def test_no_page_scrolls_sideways_on_a_phone_or_a_desk_and_no_code_is_cut_off_on_a_desk(site: Path, tmp_path: Path):
    pages = sorted(site.glob("*.html"))
    frames = "".join(
        f'<iframe src="{page.as_uri()}" width="{w}" height="900"></iframe>' for page in pages for w in (390, 1280)
    )
    (tmp_path / "frames.html").write_text(FRAMES % frames, encoding="utf-8")
    command = [
        str(BROWSER),
        *QUIET,
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        (tmp_path / "frames.html").as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False).stdout
    found = re.search(r'<pre id="found">(.*?)</pre>', shown, re.DOTALL)
    assert found, shown[-2000:]
    assert json.loads(unescape(found[1])) == []
