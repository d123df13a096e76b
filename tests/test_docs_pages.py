"""What the pages name is there: files, functions, words; and what README shows works as it stands there."""

from __future__ import annotations

import ast
import json
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest

from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.main import main
from oobleck.control.journal import Action, JournalEntry, LossCause, Phase, PlanCause
from oobleck.control.journal.snapshot import NodeState, RunState
from oobleck.errors import ExitCode
from oobleck.host.script import run_script
from oobleck.job import ScriptSpec
from tests.documented import PAGES

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`([^`]+)`")
FILE = re.compile(r"(?:oobleck/|tests/|tools/|examples/|[a-z_]+/)[\w./]+\.(?:py|json|yaml)")

CLASS = re.compile(r"_?[A-Z][a-z]+[A-Z]\w+(?:\.\w+)?(?:\(\))?|[A-Z][a-z]+\.[a-z_]\w+(?:\(\))?")

FOLDERS = ("", "oobleck", "oobleck/training/comm", "oobleck/training/step", "oobleck/sim/cluster")
"""Where a file may lie that a page names: architecture.md leaves `oobleck/` out, its tables also a folder."""

DROPPED = {
    r"\bgo(es)? on\b": "continues",
    r"\banew\b": "again, from scratch",
    r"\bwhoever\b": "any worker that",
    r"\b(is|are) worth nothing\b": "is discarded",
    r"\bcounts? for nothing\b": "is ignored",
    r"\btakes? .{1,20} for lost\b": "marks as lost",
    r"\bforetell": "predict",
    r"\blets? it back\b": "rejoins",
    r"\b(is|are) met as\b": "is handled as",
    r"\b(was|were) at hand\b": "was available",
    r"\btold\b": "reported",
    r"\btells? of\b": "reports",
    r"\bbank(ed|s|ing)?\b": "partial commit",
    r"\bgears?\b": "mode",
}
"""Idioms that a reader stumbles over, and the common words for them."""


def prose(page: Path) -> str:
    return CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_uses_the_common_word(page: Path):
    found = [
        f"{found[0]}: {instead}" for idiom, instead in DROPPED.items() for found in re.finditer(idiom, prose(page))
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_files_that_a_page_names_are_there(page: Path):
    named = [name for name in CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8"))) if FILE.fullmatch(name)]
    assert [name for name in named if not any((ROOT / folder / name).exists() for folder in FOLDERS)] == []


@pytest.fixture(scope="module")
def names() -> frozenset[str]:
    """Every word of our Python files."""
    files = [path for folder in ("oobleck", "tests", "tools") for path in (ROOT / folder).rglob("*.py")]
    return frozenset(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in files)))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_classes_that_a_page_names_are_in_the_code(page: Path, names: frozenset[str]):
    spans = CODE.findall(FENCE.sub("", page.read_text(encoding="utf-8")))
    named = [name for span in spans if CLASS.fullmatch(span) for name in span.removesuffix("()").split(".")]
    assert [name for name in named if name not in names] == []


def stops() -> list[tuple[str, list[str]]]:
    """The files and functions of architecture.md's walk from a closed connection to the resumed step."""
    section = ARCHITECTURE.split("## A killed node, from the socket to the new plan\n")[1].split("\n## ")[0]
    items = re.findall(r"^\d+\. (.*(?:\n   .*)*)", section, flags=re.MULTILINE)
    heads = [item.replace("\n", " ").split(". ")[0] for item in items]
    return [(names[0], names[1:]) for names in map(CODE.findall, heads)]


def functions(path: Path) -> Iterator[str]:
    """The names of a module's functions, with their classes."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.ClassDef):
            members = (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
            yield from (f"{node.name}.{member.name}" for member in members)


def test_the_walk_from_the_socket_to_the_new_plan_names_what_there_is():
    assert len(stops()) >= 10
    assert all(names for _, names in stops())
    for file, names in stops():
        assert set(names) <= set(functions(ROOT / "oobleck" / file)), file


def test_the_walk_is_short_and_comes_to_no_file_twice():
    files = [file for file, _ in stops()]
    assert len(files) <= 12
    assert len(set(files)) == len(files)


def test_each_stop_of_the_walk_is_named_by_a_file_before_it():
    """By one of its public functions, or, where a message goes to another thread or process, by its file."""
    before = ""
    for file, names in stops():
        public = [name for name in (name.split(".")[-1] for name in names) if name[0] != "_"]
        named = [re.escape(Path(file).name), *(rf"\.{name}" for name in public)]
        assert not before or re.search(rf"({'|'.join(named)})\b", before), file
        before += (ROOT / "oobleck" / file).read_text(encoding="utf-8")


def words(section: str) -> set[str]:
    """The code in the first cell of each row of a section's tables; of the states, in the second."""
    rows = [line.split("|")[1:-1] for line in GLOSSARY.split(f"\n## {section}\n")[1].split("\n## ")[0].splitlines()]
    return {word for row in rows if row for word in CODE.findall(row[1] if section == "States" else row[0])}


def test_the_glossary_has_what_a_run_reports():
    assert words("Entries of the journal") == {kind.__name__ for kind in typing.get_args(JournalEntry)}
    assert words("Actions and causes") == {*Action, *LossCause, *PlanCause}
    assert words("States") == {*RunState, *NodeState}
    assert words("Phases") == {*Phase}


def test_what_the_glossary_names_in_the_code_is_there(names: frozenset[str]):
    rows = [line.split("|")[1:-1] for line in GLOSSARY.split("\n## The code\n")[0].splitlines() if line[:1] == "|"]
    named = [name for row in rows if len(row) == 3 for name in CODE.findall(row[2]) if not (ROOT / name).exists()]
    assert len(named) > 30
    assert [name for name in named if not names.issuperset(re.findall(r"\w+", name))] == []


def shown(language: str) -> str:
    """The one example in this language on the front page."""
    (text,) = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert len([line for line in text.splitlines() if line.strip()]) <= 10
    return text


def test_the_job_and_the_script_of_the_front_page_are_read_as_they_stand():
    job = load_job(shown("yaml"), source="README.md")
    assert (job.tag, job.model.type, job.max_steps) == ("my-llama", "llama", 200)
    script = run_script(ScriptSpec(name="train.py", source=shown("python"), arguments=(), directory="/nowhere"))
    of_script = load_job(json.dumps(dict(script.settings)), source="README.md")
    assert (of_script.tag, of_script.model.type, of_script.optimizer.learning_rate) == ("my-gpt2", "gpt2", 6e-4)


def script_of_the_tutorial() -> str:
    page = (ROOT / "docs" / "own_model.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    return str(text)


def test_the_script_of_the_tutorial_is_read_as_it_stands():
    script = run_script(
        ScriptSpec(name="train.py", source=script_of_the_tutorial(), arguments=(), directory="/nowhere")
    )
    job = load_job(json.dumps(dict(script.settings)), source="own_model.md")
    assert (job.tag, job.max_steps, job.data.sequence_length) == ("own", 20, 32)


@pytest.mark.slow
def test_the_script_of_the_tutorial_trains_and_a_plan_without_a_profile_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / "train.py"
    path.write_text(script_of_the_tutorial(), encoding="utf-8")
    command = ["up", "--local", "2", str(path), "--base-dir", str(tmp_path / "runs")]
    assert main([*command, "--dry-run"]) == ExitCode.CONFIG
    assert "no run has measured it: train some steps first" in capsys.readouterr().err
    assert main([*command, "--plain"]) == ExitCode.DONE
    assert "all 20 steps are committed" in capsys.readouterr().out
    assert main([*command, "--dry-run"]) == ExitCode.DONE


@pytest.mark.slow
@pytest.mark.parametrize(("language", "file"), [("yaml", "job.yaml"), ("python", "train.py")])
def test_the_front_page_has_jobs_that_four_nodes_can_run(
    language: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    path = tmp_path / file
    path.write_text(shown(language), encoding="utf-8")
    named = ["--job", str(path)] if language == "yaml" else [str(path)]
    code = main(["up", "--local", "4", *named, "--dry-run", "--base-dir", str(tmp_path / "runs")])
    said = capsys.readouterr()
    assert code == ExitCode.DONE, said.err
    assert "node0" in said.out
