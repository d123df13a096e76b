"""What docs/jobs.md says is what the code does."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

from oobleck.cli.inputs.hostfile import parse_hostfile
from oobleck.cli.inputs.job_file import apply_overrides, load_job
from oobleck.cli.main import main
from oobleck.errors import ExitCode
from oobleck.job import JobSpec
from oobleck.job.bounds import bounds_of
from oobleck.runtime.files import run_dir

PAGE = (Path(__file__).parents[2] / "docs" / "jobs.md").read_text(encoding="utf-8")


def fences(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def table(section: str) -> dict[str, list[str]]:
    """Rows of the tables of a section, by the code in their first cell."""
    text = PAGE.split(f"\n{section}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line[:1] == "|"]
    return {row[0].removeprefix("`").removesuffix("`"): row[1:] for row in rows if set(row[0]) != {"-"}}


def keys(spec: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    """The dotted keys of a job and their values."""
    for field in fields(spec):  # type: ignore[arg-type]  # specs are dataclasses all
        value = getattr(spec, field.name)
        if field.name == "script":  # no key of a file
            continue
        if is_dataclass(value):
            yield from keys(value, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name, value


def as_documented(value: object) -> str:
    if value is None or value in ((), {}):
        return "none"
    if isinstance(value, dict):
        return "`" + ", ".join(f"{key}: {item}" for key, item in value.items()) + "`"
    return f"`{value}`"


def test_the_table_of_keys_has_every_key_with_its_default():
    documented = {key: row[0] for key, row in table("## Job files").items() if key != "key"}
    assert documented == {key: as_documented(value) for key, value in keys(JobSpec())}


def bounds(cls: type, prefix: str = "") -> Iterator[tuple[str, str]]:
    """The bounds of a job's numbers, by dotted key."""
    yield from ((prefix + name, str(found)) for name, found in bounds_of(cls).items())
    for name, hint in typing.get_type_hints(cls).items():
        if isinstance(hint, type) and is_dataclass(hint):
            yield from bounds(hint, f"{prefix}{name}.")


def test_the_table_of_bounds_has_every_number_with_its_own():
    documented = {key: row[0] for key, row in table("## Bounds").items() if key != "key"}
    assert documented == dict(bounds(JobSpec))


def test_keys_whose_names_have_a_unit_are_documented_with_it():
    units = {key: row[1] for key, row in table("## Job files").items() if key != "key"}
    for suffix, unit in (("_s", "seconds"), ("_bytes", "bytes"), ("_steps", "steps"), ("_samples", "samples")):
        assert {units[key] for key in units if key.endswith(suffix)} == {unit}


def documented_files() -> set[str]:
    """The first part of each path below `<tag>` that the page names."""
    return {name.rstrip("/") for name in re.findall(r"`<tag>/([\w.<>-]+/?)", PAGE)}


def test_the_files_of_a_run_are_documented():
    assert run_dir.__doc__ is not None
    kept = {
        line.split()[0].rstrip("/") for line in run_dir.__doc__.splitlines() if re.match(r"[a-z][\w.<>-]*/?   ", line)
    }
    assert {"journal.jsonl", "command", "profile"} <= kept
    assert kept - documented_files() == set()


def test_the_job_of_the_page_is_read_as_it_stands():
    (text,) = fences("yaml")
    job = load_job(text, source="docs/jobs.md")
    assert (job.tag, job.model.type, job.model.config["hidden_size"]) == ("my-llama", "llama", 512)
    assert job.data.paths == ("corpus/", "more.txt")
    assert (job.num_microbatches, job.optimizer.warmup_steps, job.control.lease_s) == (16, 100, 5.0)


def test_the_overrides_of_the_page_are_read_as_they_stand():
    words = re.findall(r"--set ([a-z_.]+=\S+?)(?=[\s`])", PAGE)
    assert len(words) >= 4
    job = apply_overrides(JobSpec(), [word.replace("'", "") for word in words])
    assert job.optimizer.learning_rate == 3e-4
    assert job.data.paths == ("corpus/",)
    assert job.model.type == "llama"


def test_the_hostfile_of_the_page_names_the_nodes_that_it_says():
    (text,) = fences("hostfile")
    nodes = {node.name: node for node in parse_hostfile(text, source="docs/jobs.md")}
    assert list(nodes) == [
        *("node1", "node2", "node3", "rack08", "rack09", "rack10", "rack20", "30.207.99.20", "30.207.99.20#2"),
        *("node4", "node5", "rack21", "rack22", "rack23", "rack24"),
        *("rack25", "rack26", "rack27", "rack28", "node6", "2001:db8::7"),
    ]
    assert nodes["node3"].port == 2222
    assert nodes["rack20"].user == "trainer"
    assert nodes["30.207.99.20#2"].devices == (1,)
    assert nodes["rack21"].kind == "A100×8"
    assert [nodes[f"rack{number}"].domain for number in range(24, 29)] == ["", "row1", "row1", "row2", "row2"]
    assert (nodes["node5"].address, nodes["node6"].address) == ("10.0.0.5", "ib0")


def test_the_node_that_the_page_adds_is_one_node():
    (line,) = re.findall(r"oobleck add\s+'([^']+)'", PAGE)
    (node,) = parse_hostfile(line, source="docs/jobs.md")
    assert (node.name, node.port) == ("node7", 2222)


def test_every_option_of_up_is_in_the_table(capsys):
    assert main(["up", "--help"]) == ExitCode.DONE
    offered = set(re.findall(r"^\s+(?:-\w, )?(--[\w-]+)", capsys.readouterr().out, flags=re.MULTILINE)) - {"--help"}
    named = set(re.findall(r"--[\w-]+", " ".join(table("## Options of `oobleck up`"))))
    assert offered == named
    assert len(offered) > 10


def test_every_exit_code_is_in_the_table():
    documented = {int(code) for code in table("## Exit codes") if code.isdecimal()}
    assert documented == {code.value for code in ExitCode}


@pytest.mark.parametrize("key", ["dtype", "schedule", "lr_scheduler_type"])
def test_choices_are_listed(key):
    owners = [cls for cls in (JobSpec, type(JobSpec().optimizer)) if key in {field.name for field in fields(cls)}]
    choices = typing.get_args(typing.get_type_hints(owners[0])[key])
    (row,) = [row for name, row in table("## Job files").items() if name.rpartition(".")[2] == key]
    assert all(f"`{choice}`" in row[2] for choice in choices)
