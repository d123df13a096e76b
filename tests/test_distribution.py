"""The distribution: its name and its index page, and a wheel that trains where nothing else is installed.

The wheel is tried with this interpreter, and with those that a variable names: `OOBLECK_TRY_PYTHONS="python3.12
python3.13"`. For each whose torch it finds for CUDA alone, pip fetches 2.8 GB.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from urllib.parse import urlsplit

import markdown_it
import pytest
import yaml
from packaging.specifiers import SpecifierSet
from packaging.version import Version

import oobleck

ROOT = Path(__file__).parents[1]
NAME = "oobleck-train"
PYTHONS = [sys.executable, *os.environ.get("OOBLECK_TRY_PYTHONS", "").split()]


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_nothing_tells_anyone_to_install_the_other_project():
    install = re.compile(r"install\s+(?:-\S+\s+)*['\"]?oobleck(?!-train)\b|\boobleck\\?\[[a-z]+\\?\]")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in tracked()
        if path.suffix in (".py", ".md", ".yaml", ".toml", ".txt", "")
        for match in install.finditer(path.read_text(encoding="utf-8"))
        if path != Path(__file__)
    ]
    assert found == []


def test_every_extra_that_a_page_names_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "examples").iterdir()]
    named = {name for page in pages for name in re.findall(rf"{NAME}\[(\w+)\]", page.read_text(encoding="utf-8"))}
    assert len(named) >= 5
    assert named <= set(extras)


def test_the_page_about_installation_has_every_extra():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = (ROOT / "docs" / "install.md").read_text(encoding="utf-8").split("| extra |")[1].split("\n\n")[0]
    rows = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == extras.keys() - {"docs", "test"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("*.whl"))


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.mark.slow
def test_the_wheel_has_a_name_of_its_own_types_and_links(wheel: Path):
    said = metadata(wheel)
    assert said["Name"] == NAME
    assert Version(said["Version"]) == Version(oobleck.__version__) > Version("0.1.1")
    assert {text.split(",")[0] for text in said.get_all("Project-URL", [])} >= {"Documentation", "Repository"}
    with zipfile.ZipFile(wheel) as archive:
        assert "oobleck/py.typed" in archive.namelist()


@pytest.mark.slow
def test_the_index_page_has_every_picture_and_link_of_the_readme_in_full(wheel: Path):
    page = metadata(wheel).get_payload()
    assert isinstance(page, str)
    places = []
    for token in markdown_it.MarkdownIt().enable("table").parse(page):
        for part in token.children or ():
            places += [str(part.attrs[key]) for key in ("src", "href") if key in part.attrs]
    pictures = [place for place in places if place.endswith(".svg")]
    assert pictures
    assert [place for place in places if not place.startswith(("https://", "#"))] == []
    ours = [urlsplit(place).path.split("/main/", 1)[1] for place in places if "/oobleck-train/oobleck/" in place]
    assert len(ours) > 20
    assert [path for path in ours if not (ROOT / path).exists()] == []
    assert all("raw.githubusercontent.com" in place for place in pictures)  # the other address shows a page about it


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("python", PYTHONS)
def test_a_wheel_in_an_empty_environment_trains(wheel: Path, tmp_path: Path, python: str):
    assert shutil.which(python), f"OOBLECK_TRY_PYTHONS: there is no {python}"
    subprocess.run([python, "-m", "venv", str(tmp_path / "venv")], check=True)
    binaries = tmp_path / "venv" / "bin"
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    install = [str(binaries / "python"), "-m", "pip", "install", "--quiet", "--no-compile", *constraints, str(wheel)]
    subprocess.run(install, check=True, cwd=tmp_path, timeout=1500)
    # Without variables that would lead to this checkout; in a folder that has no `oobleck` of its own.
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    train = [str(binaries / "oobleck"), "up", "--local", "2", "--steps", "3", "--base-dir", str(tmp_path / "base")]
    done = subprocess.run(
        [*train, "--json"], cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["steps_committed"] == 3


def test_the_workflow_tests_the_versions_of_python_that_can_be_installed_on():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "test.yaml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["test"]
    allowed = SpecifierSet(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"])
    assert job["strategy"]["matrix"]["python"] == list(allowed.filter(f"3.{minor}" for minor in range(8, 30)))
    assert any(".ci/run" in step.get("run", "") for step in job["steps"])


def test_commits_are_checked_as_make_lint_checks():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"][0]["hooks"]
    lint = (ROOT / "Makefile").read_text(encoding="utf-8").split("\nlint:")[1].split("\n\n")[0]
    assert [hook["entry"] for hook in hooks] == [
        line.replace("$(BIN)", ".venv/bin").strip().removesuffix(" .") for line in lint.splitlines()[1:]
    ]
