"""Jobs as Python scripts: what they may return, and what is said of those that fail."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from oobleck import Job
from oobleck.cli.inputs.job_file import load_job
from oobleck.cli.main import main
from oobleck.errors import ConfigError, ExitCode, OobleckError, UsageError
from oobleck.host.script import SCRIPT_STREAM, has_job, run_script
from oobleck.job import JobSpec, ScriptSpec
from oobleck.runtime.processes.script_process import describe_script


def script(source: str, *arguments: str, directory: str = "/nowhere") -> ScriptSpec:
    return ScriptSpec(name="train.py", source=source, arguments=arguments, directory=directory)


def test_settings_and_what_is_made_are_told_apart():
    source = """
from oobleck import Job

def layers(): ...

def job():
    return Job(model=layers, data={"sequence_length": 8}, optimizer=lambda groups: None, learning_rate=0.1,
               callbacks=[object()])
"""
    job = run_script(script(source))
    assert job.provides == ("model", "optimizer", "callbacks")
    assert job.made.keys() == {"model", "optimizer"}
    assert job.settings == {"learning_rate": 0.1, "data": {"sequence_length": 8}, "model": {"type": "script"}}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"data": [1, 2]}, r"Job\(data=…\): it must be settings, or a function that returns it, not \[1, 2\]"),
        ({"data": [1, 2], "sequence_length": 8}, r"Job\(data=…\)"),
        ({"eval_data": {}}, r"Job\(eval_data=…\): it must be a function that returns it, not \{\}"),
        ({"model": 5}, r"Job\(model=…\): it must be settings"),
        ({"lr_lambda": 0.1}, r"Job\(lr_lambda=…\): it must be a function, not 0\.1"),
    ],
)
def test_an_argument_that_is_neither_settings_nor_a_function_is_refused_by_name(given: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        Job(**given)


def test_arguments_are_in_argv_and_modules_lie_beside(tmp_path: Path):
    (tmp_path / "my_settings_module.py").write_text("STEPS = 7\n")
    source = """
import argparse
from oobleck import Job
from my_settings_module import STEPS

def job():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float)
    return Job(learning_rate=parser.parse_args().lr, max_steps=STEPS)
"""
    before = sys.argv
    job = run_script(script(source, "--lr", "0.25", directory=str(tmp_path)))
    assert job.settings == {"learning_rate": 0.25, "max_steps": 7}
    assert sys.argv is before


@pytest.mark.parametrize(
    ("source", "kind", "message"),
    [
        ("x = 1", ConfigError, r"train\.py has reached its end without .*train\(\).*no function job\(\)"),
        ("job = 3", ConfigError, r"train\.py: it has no function job\(\) that returns an oobleck\.Job"),
        ("def job():\n    return 5", ConfigError, r"job\(\) returns int, not an oobleck\.Job"),
        ("def job():\n\n    return undefined", ConfigError, r"train\.py:3: NameError: name 'undefined' is not defined"),
        ("import no_such_module", ConfigError, r"train\.py:1: ModuleNotFoundError"),
        ("def job(:", ConfigError, r"train\.py:1: SyntaxError"),
        ("import sys\ndef job():\n    sys.exit(2)", UsageError, r"train\.py exits with 2 for the arguments --what"),
        ("from oobleck import Job\ndef job():\n    return Job(modle=3)", None, ""),
    ],
)
def test_scripts_that_fail_say_where(source: str, kind: type[OobleckError] | None, message: str):
    if kind is None:  # a wrong setting is a setting still, for the reader of job files to name
        assert run_script(script(source)).settings == {"modle": 3}
        return
    with pytest.raises(kind, match=message):
        run_script(script(source, "--what"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def job(): ...", True),
        ("if True:\n    from jobs import mine as job", True),
        ("job = 3", True),
        ("def (:", True),
        ("def main():\n    job = 3", False),
        ("class Mine:\n    def job(self): ...", False),
        ("import jobs\njobs.job()", False),
    ],
)
def test_a_script_has_a_job_if_it_binds_that_name_at_its_top(source: str, expected: bool):
    assert has_job(script(source)) is expected


STAND_IN = """
import sys
from oobleck import Job
from oobleck.host.handover import take_over

class Trainer:
    def __init__(self, steps): self.steps = steps
    def train(self): return take_over(self)
    def job(self): return Job(max_steps=self.steps)
"""
"""A trainer that takes no time to import."""


def test_a_script_that_trains_runs_as_main_and_ends_in_train():
    source = f"{STAND_IN}\nif __name__ == '__main__':\n    Trainer(int(sys.argv[1])).train()\n    sys.exit('too far')"
    assert run_script(script(source, "7")).settings == {"max_steps": 7}


@pytest.mark.parametrize("handler", ["except Exception: x = 1", "except BaseException: x = 1", "finally: x = 1"])
def test_handlers_of_a_script_do_not_hide_that_it_trains(handler: str):
    source = f"{STAND_IN}\ntry:\n    Trainer(7).train()\n{handler}"
    assert run_script(script(source)).settings == {"max_steps": 7}


def test_a_script_is_described_in_a_process_of_its_own(tmp_path: Path):
    path = tmp_path / "train.py"
    path.write_text(
        "import sys\nfrom oobleck import Job\nprint('words of its own')\n"
        "def job():\n    return Job(max_steps=int(sys.argv[1]), seed=3, bf16=True, data=list)\n"
    )
    described = describe_script(path, ("9",))
    assert described.spec == ScriptSpec(
        name="train.py", source=path.read_text(), arguments=("9",), directory=str(tmp_path), provides=("data",)
    )
    job = load_job(described.settings, source="train.py", base=JobSpec(tag="base"), has_lines=False)
    assert (job.tag, job.max_steps, job.seed, job.dtype) == ("base", 9, 3, "bfloat16")
    with pytest.raises(ConfigError, match=r"train\.py:5: ValueError"):
        describe_script(path, ("many",))
    with pytest.raises(UsageError, match="No such file"):
        describe_script(tmp_path / "none.py", ())
    path.write_text("import os\nos._exit(3)")
    with pytest.raises(ConfigError, match=r"exit code 3\b"):
        describe_script(path, ())


def test_wrong_settings_of_a_script_are_named_without_a_line():
    with pytest.raises(ConfigError, match=r"^train\.py: .*'modle'.*model"):
        load_job('{"modle": 3}', source="train.py", has_lines=False)
    with pytest.raises(ConfigError, match=r"^train\.py: max_steps: 0 "):
        load_job('{"max_steps": 0}', source="train.py", has_lines=False)


def test_a_job_needs_no_torch():
    assert Job().provides == ()
    assert Job(model="llama").settings == {"model": "llama"}


def test_words_that_are_neither_hostfile_nor_script_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["up", "hosts.txt", "train"]) == ExitCode.USAGE
    assert re.search(r"train: .*\.py\b", capsys.readouterr().err)
    assert main(["up", "--local", "2", str(tmp_path / "none.py")]) == ExitCode.USAGE
    assert "none.py: " in capsys.readouterr().err
    assert main(["up", "train.py", "hosts.txt"]) == ExitCode.USAGE, "the hostfile comes first"


def test_what_the_page_says_is_read_as_it_stands():
    docs = Path(__file__).parents[2] / "docs"
    page = (docs / "training.md").read_text(encoding="utf-8")
    endless, _, stream, source = re.findall(r"^```python\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    exec(stream.replace('"pulsar"', '"of-the-page"'), {"__name__": "script"})  # other tests count on no reader of it
    described = run_script(script(source))
    job = load_job(json.dumps(described.settings), source="train.py", has_lines=False)
    assert (job.model.type, job.optimizer.warmup_steps, job.num_microbatches) == ("llama", 100, 16)
    settings = run_script(script(endless)).settings
    data = load_job(json.dumps(settings), source="train.py", has_lines=False).data
    assert (data.shards, data.epochs, data.vocab_size) == ((SCRIPT_STREAM,), 2, 50257)
    text, tuning, adapters, shards = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert load_job(text, source="page").model.config["intermediate_size"] == 1376
    data = load_job(tuning, source="page").data
    assert (data.paths, data.format, data.packing) == (("chat.jsonl",), "messages", True)
    assert load_job(adapters, source="page").model.lora.r == 16
    assert load_job(shards, source="page").data.shards == ("/data/part-*.bin",)
    examples = {
        path.name for path in (Path(__file__).parents[2] / "examples").iterdir() if path.suffix in (".py", ".yaml")
    }
    pages = page + "".join((docs / name).read_text(encoding="utf-8") for name in ("python.md", "scripts.md"))
    assert set(re.findall(r"\]\(\.\./examples/([\w.]+)\)", pages)) == examples
