"""Variables of a run: where they come from, which one counts, and that no journal has a value."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oobleck.cli.inputs import JobSource, read_job, read_variables
from oobleck.control.journal import JobStarted
from oobleck.errors import ConfigError, UsageError
from oobleck.job.secrets import Hiding
from oobleck.wire import encode_json
from tests.examples import examples


@pytest.fixture(autouse=True)
def _here() -> Iterator[None]:
    """Each test has the environment to itself."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


def job_file(directory: Path, text: str) -> Path:
    path = directory / "job.yaml"
    path.write_text(text)
    return path


def test_a_job_s_variables_are_texts_as_written_and_are_set_here_too(tmp_path: Path) -> None:
    path = job_file(tmp_path, "env: {A1: 1, B1: 1.10, C1: true, D1: 'two words'}\n")
    job = read_job(JobSource(file=path), num_nodes=1)
    assert {name: os.environ[name] for name in job.env} == {"A1": "1", "B1": "1.10", "C1": "true", "D1": "two words"}
    assert all(digest.startswith("sha256:") for digest in job.env.values())


def test_options_count_more_than_settings_and_those_more_than_the_file(tmp_path: Path) -> None:
    path = job_file(tmp_path, "env: {A1: file, B1: file, C1: file}\n")
    source = JobSource(file=path, settings=("env.B1=set", "env.C1=set"), environment={"C1": "option"})
    job = read_job(source, num_nodes=1)
    assert [os.environ[name] for name in sorted(job.env)] == ["file", "set", "option"]


def test_a_script_reads_the_variables_of_the_command_and_adds_its_own(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import os\nfrom oobleck import Job\n\n"
        "def job():\n    return Job(run_name=os.environ['NAME_OF_RUN'], env={'ADDED': 2})\n"
    )
    job = read_job(JobSource(script=script, environment={"NAME_OF_RUN": "mine"}), num_nodes=1)
    assert job.tag == "mine"
    assert (sorted(job.env), os.environ["ADDED"]) == (["ADDED", "NAME_OF_RUN"], "2")


def test_lines_of_a_file_are_values_or_names_and_options_win(tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.write_text("# a comment\n\nA=1\nexport B='two words'\nHERE\nC=a=b#c\nD=\nE=a\x0cF=\u2028G\nH='a # b'\r\n")
    found = read_variables(["A=2"], [file], {"HERE": "x"})
    kept = {"C": "a=b#c", "D": "", "E": "a\x0cF=\u2028G", "H": "a # b"}
    assert found == {"A": "2", "B": "two words", "HERE": "x", **kept}


@pytest.mark.parametrize(
    ("settings", "text", "words"),
    [
        (["1A=s3cret"], "", "--env: '1A' is no name"),
        (["MISSING"], "", "--env: MISSING is not set here; give its value, as in MISSING=1"),
        ([], "A=1\nB C=s3cret\n", ":2: 'B C' is no name"),
        (["A=s3cret\0"], "", "the value of A has a zero byte"),
        ([], "A=s3cret # why", ":1: the value of A has a # after a space"),
        ([], "A='s3cret\nline'", ":1: the value of A begins with a quote; the same must end it"),
        ([], "\nA='s3cret' # why", ":2: the value of A begins with a quote"),
        ([], 'A="s3cret" and "another"', "and not be within it"),
        ([], "A='", "the value of A begins with a quote"),
    ],
)
def test_what_is_no_variable_is_refused_without_its_value(
    settings: list[str], text: str, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "variables"
    file.write_text(text)
    with pytest.raises(UsageError) as raised:
        read_variables(settings, [file], {})
    assert words in str(raised.value)
    assert "s3cret" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("TMPDIR", "found by it"),
        ("HOME", "found by it"),
        ("RANK", "the run places"),
        ("OMPI_COMM_WORLD_RANK", "the run places"),
        ("OOBLECK_BASE_DIR", "--base-dir"),
        ("no name", "no name of a variable"),
    ],
)
def test_what_a_run_sets_itself_is_refused(name: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"env\.{name}: .*{words}"):
        read_job(JobSource(file=job_file(tmp_path, f"env: {{{name}: x}}\n")), num_nodes=1)


# A word that no journal has by chance.
_SECRETS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=40).map("s3cret{}".format)


@examples(50)
@given(secrets=st.dictionaries(st.from_regex(r"\ASECRET_[A-Z0-9_]{1,8}\Z"), _SECRETS, min_size=1, max_size=4))
def test_no_journal_has_a_value(secrets: dict[str, str]) -> None:
    job = read_job(JobSource(environment=secrets), num_nodes=2)
    entry = JobStarted(t_s=0.0, version="1", job=job, nodes=(), started_at="2026-01-01T00:00:00")
    text = encode_json(entry).decode()
    assert set(secrets) <= set(job.env)
    assert secrets.items() <= os.environ.items()
    assert "s3cret" not in text


def test_paths_in_variables_that_are_named_like_secrets_are_shown() -> None:
    hide = Hiding(None, {"PWD": "/home/me/runs", "SSH_AUTH_SOCK": "/tmp/ssh-1/agent.2", "DB_PWD": "hunter22"})
    text = "try `ssh -F /home/me/runs/config n1`, and see /tmp/ssh-1/agent.2"
    assert hide(f"{text}: hunter22") == f"{text}: …"
