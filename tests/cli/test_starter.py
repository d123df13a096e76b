"""A job file to start from, and the schema of job files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from oobleck.cli.inputs import job_schema
from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.main import main
from oobleck.job import JobSpec

ROOT = Path(__file__).parents[2]
TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def faults(value: Any, schema: Any, place: str = "job") -> list[str]:
    """What a validator would find, by the keywords that the schema uses."""
    if "anyOf" in schema:
        found = [faults(value, each, place) for each in schema["anyOf"]]
        return [] if [] in found else found[-1]
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{place}: {value!r} is none of {schema['enum']}"]
    named = schema.get("type", list(TYPES))
    allowed = [named] if isinstance(named, str) else named
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not any(isinstance(value, TYPES[each]) and (each == "boolean") == isinstance(value, bool) for each in allowed):
        return [f"{place}: {value!r} is not {allowed}"]
    wrong = [place] if is_number and not schema.get("minimum", value) <= value <= schema.get("maximum", value) else []
    if isinstance(value, list) and "items" in schema:
        wrong += [fault for item in value for fault in faults(item, schema["items"], f"{place}[]")]
    if isinstance(value, dict):
        properties, others = schema.get("properties", {}), schema.get("additionalProperties", {})
        for key, item in value.items():
            if key not in properties and others is False:
                wrong.append(f"{place}: unknown key {key}")
            else:
                wrong += faults(item, properties.get(key, others), f"{place}.{key}")
    return wrong


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_the_examples_meet_the_schema(path: Path) -> None:
    assert faults(yaml.safe_load(path.read_text()), job_schema()) == []


@pytest.mark.parametrize(
    "text",
    [
        "learning_rate: 1e-4\nbf16: true\nsave_steps: 50\nmodel: llama\n",
        "model: {type: gpt2, n_embd: 32}\nenv: {A: 1}\nreductions_per_step: auto\nnum_pipelines: null\ndata:\n",
        "dist: {node_ips: [a]}\nmodel: {model_name: gpt2}\njob: {steps: 3}\n",
    ],
)
def test_what_a_job_file_may_say_meets_the_schema(text: str) -> None:
    load_job(text, source="job.yaml")
    assert faults(yaml.safe_load(text), job_schema()) == []


@pytest.mark.parametrize(
    "text", ["max_stps: 3", "max_steps: 0", "dtype: int8", "data: {packing: 3}", "optimizer: {lr: 3}", "data: [1]"]
)
def test_what_no_job_file_may_say_does_not(text: str) -> None:
    assert len(faults(yaml.safe_load(text), job_schema())) == 1


def test_a_new_job_file_is_a_job_and_names_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", "my model.yaml"]) == 0
    text = Path("my model.yaml").read_text()
    job = load_job(text, source="job.yaml")
    assert (job.tag, job.model.type, job.data.paths) == ("my-model", "llama", ())
    assert job != JobSpec()
    schema = json.loads(Path("job.schema.json").read_text())
    assert text.splitlines()[0] == "# yaml-language-server: $schema=./job.schema.json"
    assert faults(yaml.safe_load(text), schema) == []
    assert main(["init", "my model.yaml"]) == 2
    said = capsys.readouterr()
    assert "exists already" in said.err
    assert "--job 'my model.yaml'" in said.out
    assert text.splitlines()[1].endswith(" --job 'my model.yaml'")
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == schema


@pytest.mark.parametrize("name", ["", ".", "/", "..", "two\nlines.yaml"])
def test_what_no_job_file_can_be_called_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["init", name]) == 2
    assert "name another file" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
