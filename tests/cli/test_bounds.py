"""Every number that a user gives has bounds, and every file is read within some: an error in words, and at once."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Union, get_args, get_origin, get_type_hints

import pytest

from oobleck.cli.inputs.hostfile import parse_hostfile
from oobleck.cli.inputs.job_file import apply_overrides, load_job
from oobleck.cli.main import main
from oobleck.errors import ConfigError, ExitCode, UsageError
from oobleck.job import JobSpec
from oobleck.job.bounds import Bounds, bounds_of
from oobleck.runtime.files.input_file import read_input

# --- the numbers of a job ------------------------------------------------------------------------------------------


def numbers_of(cls: type, prefix: str = "") -> Iterator[tuple[str, type, Bounds | None]]:
    """(key, int or float, bounds) of everything in a job that may be a number."""
    bounds = bounds_of(cls)
    for name, hint in get_type_hints(cls).items():
        kinds = get_args(hint) if get_origin(hint) is Union or type(hint).__name__ == "UnionType" else (hint,)
        if isinstance(hint, type) and is_dataclass(hint):
            yield from numbers_of(hint, f"{prefix}{name}.")
        for kind in kinds:
            if kind in (int, float):
                yield prefix + name, kind, bounds.get(name)


NUMBERS = list(numbers_of(JobSpec))


def test_every_number_of_a_job_has_bounds() -> None:
    assert len(NUMBERS) > 35
    assert [key for key, _, bounds in NUMBERS if bounds is None] == []


def written(key: str, value: object) -> str:
    for word in reversed(key.split(".")):
        value = f"{{{word}: {value}}}"
    return str(value)


@pytest.mark.parametrize(("key", "kind", "bounds"), NUMBERS, ids=lambda value: value if isinstance(value, str) else "")
def test_a_number_beyond_its_bounds_is_refused_by_its_key_with_the_bounds(key: str, kind: type, bounds: Bounds) -> None:
    below = bounds.least - 1 if kind is int else bounds.least - max(1e-9, abs(bounds.least) / 2)
    above = bounds.most + 1 if kind is int else bounds.most * 2
    for value in (below, above, *bounds.excluded):
        text = f"{value:.12f}" if isinstance(value, float) and 1e-9 <= abs(value) < 1e15 else f"{value}"
        with pytest.raises(ConfigError, match=rf"^job\.yaml:1: {key}: ") as error:
            load_job(written(key, text), source="job.yaml")
        assert str(bounds) in str(error.value) or "64 bits" in str(error.value)


@pytest.mark.parametrize(
    "value", [".inf", "-.inf", ".nan", "1e400", "9" * 99, "9" * 5000, "-1", "٣", "0x7fffffffffffffff"]
)
@pytest.mark.parametrize("key", [key for key, _, _ in NUMBERS])
def test_no_number_of_any_spelling_breaks_the_reader(key: str, value: str) -> None:
    for read in (
        lambda: load_job(written(key, value), source="job.yaml"),
        lambda: apply_overrides(JobSpec(), [f"{key}={value}"]),
    ):
        try:
            job = read()
        except (ConfigError, UsageError) as error:
            said = str(error)
        else:
            section, _, name = key.rpartition(".")
            spec = getattr(job, section) if section else job
            assert bounds_of(spec)[name].hold(getattr(spec, name))
            continue
        # What is no number of YAML at all is told by its line.
        assert key.rpartition(".")[2] in said or "does not fit its tag" in said
        assert len(said) < 6000


@pytest.mark.parametrize("key", ["n_layer", "num_hidden_layers", "num_layers"])
@pytest.mark.parametrize("value", [0, -3, 1_000_000])
def test_a_number_of_layers_that_no_model_has_is_refused_by_its_key(key: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"model\.config\.{key}: {value} .*from 1 to 1,000"):
        load_job(f"model: {{type: gpt2, {key}: {value}}}", source="job.yaml")


@pytest.mark.parametrize(
    ("job", "words"),
    [
        (
            "global_batch_size: 1000000000000",
            "global_batch_size: 1000000000000 is not possible; it must be from 1 to 1,",
        ),
        ("global_batch_size: 100000", "at most 65,536 microbatches of 1; raise microbatch_size"),
        ("tensor_parallel: 3", "tensor_parallel: 3 is not possible; it must be a power of two"),
        ("sharding: optimizer", "sharding_devices: 1 is not possible; it must be the number of a node's devices, 2 or"),
        ("sharding_devices: 2", "sharding_devices: 2 is not possible; it must be 1 with sharding: none"),
        ("expert_parallel: true", "expert_parallel: True is not possible; it must be false without sharding"),
        ("context_parallel: 2", "context_parallel: 2 is not possible; it must be 1 without sharding"),
        (
            "{sharding: all, sharding_devices: 4, context_parallel: 3}",
            r"context_parallel: 3 is not possible; it must be a divisor of sharding_devices \(4\)",
        ),
        (
            "{sharding: all, sharding_devices: 2, context_parallel: 2, attn_implementation: eager}",
            "attn_implementation: 'eager' is not possible; it must be sdpa with context_parallel",
        ),
        ("{sharding: optimizer, sharding_devices: 3}", "global_batch_size: 8 .* a multiple of microbatch_size × shar"),
        (
            "{sharding: optimizer, sharding_devices: 2, tensor_parallel: 2}",
            "tensor_parallel: 2 is not possible; it must be 1 with sharding: optimizer",
        ),
        ("data: {epochs: 3}", "data.epochs: 3 is not possible; it must be 1 unless the data is in shards; other data"),
        ("data: {follow: true}", "data.follow: True is not possible; it must be false unless the data is in shards"),
        ("data: {paths: [a], shards_at_once: 4}", "data.shards_at_once: 4 .* left out unless the data is in shards"),
        ("data: {dataset_name: wikitext-2}", "data.dataset_name: 'wikitext-2' .* left out unless dataset_path is set"),
        ("data: {paths: [a], dataset_split: test}", "data.dataset_split: 'test' .* unless dataset_path is set"),
        ("control: {notice_headers: {A: b}}", "control.notice_headers: .* left out unless notice_url is set"),
        ('control: {notice_command: "true", notice_pattern: "x"}', "control.notice_pattern: 'x' .* unless notice_url"),
        ("compile_mode: max-autotune", "compile_mode: 'max-autotune' .* it must be default unless compile is true"),
        ("num_chunks: 4", "num_chunks: 4 .* it must be 2 unless the schedule is interleaved or auto"),
        ("max_eval_samples: 5", "max_eval_samples: 5 .* it must be left out unless eval_steps is set"),
        ("torch_threads: 100000", "torch_threads: 100000 is not possible; it must be from 1 to 1,024"),
        ('checkpoint: {directory: "\\0"}', "checkpoint.directory: '.x00' is not possible; .* null characters"),
        ('data: {paths: [a, "b\\ud800"]}', r"data.paths: 'b.ud800' is not possible; .* whole characters"),
        ('control: {notice_headers: {"A\\r\\nB": c}}', "control.notice_headers: .* names of letters"),
        ('control: {notice_headers: {A: "b\\r\\nC: d"}}', "control.notice_headers.A: .* one line"),
        ('control: {notice_url: "http://a/\\r\\nb"}', "control.notice_url: .* without spaces"),
        ("model: {type: gpt2, num_experts: 1000000000}", "model.config.num_experts: 1000000000 is not possible"),
        ("model: {type: gpt2, anything: 9223372036854775807}", "model.config.anything: 92.* is not possible"),
    ],
)
def test_what_cannot_be_names_its_key(job: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_job(job, source="job.yaml")


# --- options -------------------------------------------------------------------------------------------------------

PLAN = ("plan", "--model", "gpt2", "--device", "A100", "--microbatch", "1", "--nodes", "2", "--global-batch", "8")
DRAW = ("trace", "generate", "--nodes", "2", "--duration", "1h", "--mtbf", "1h")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            (*PLAN, "--nodes", "99999999"),
            "'--nodes': 99999999 is not possible; it must be a whole number from 1 to 16,384",
        ),
        (
            (*PLAN, "--global-batch", "1000000000000"),
            "'--global-batch': 1000000000000 is not possible; it must be a whole number from",
        ),
        ((*PLAN, "--global-batch", "1000000"), "--global-batch is 1000000; it must be at most 65,536 microbatches"),
        ((*PLAN, "--microbatch", "0"), "'--microbatch': 0 is not possible; it must be a whole number from"),
        (
            (*PLAN, "--gpus-per-node", "100000"),
            "'--gpus-per-node': 100000 is not possible; it must be a whole number from",
        ),
        (
            (*PLAN, "--sequence-length", "1000000000"),
            "'--sequence-length': 1000000000 is not possible; it must be a whole number from",
        ),
        ((*PLAN, "--pipelines", "0"), "'--pipelines': 0 is not possible; it must be a whole number from"),
        ((*PLAN, "-f", "-1"), "'-f' / '--fault-threshold': -1 is not possible; it must be a whole number from"),
        (
            (*DRAW, "--nodes", "10000000"),
            "'--nodes': 10000000 is not possible; it must be a whole number from 1 to 16,384",
        ),
        ((*DRAW, "--duration", "1" + "0" * 300), "is too long; it must be at most 5,787 days"),
        ((*DRAW, "--duration", "١h"), "is not a duration"),
        ((*DRAW, "--mtbf", "1s", "--repair", "1s", "--duration", "5000d"), "more than 1,000,000 events until"),
        ((*DRAW, "--fail-slow", "nan"), "'--fail-slow': nan is not possible; it must be a number from 0 to 1e+06"),
        ((*DRAW, "--fail-slow", "inf"), "'--fail-slow': inf is not"),
        ((*DRAW, "--weibull-shape", "nan"), "'--weibull-shape': nan is not"),
        ((*DRAW, "--batches", "1:inf"), "batches is {1: inf}"),
        ((*DRAW, "--batches", "9" * 30 + ":1"), "batches is {9999"),
        ((*DRAW, "--seed", "9" * 30), "'--seed': 9999"),
        (
            ("chaos", "t.json", "--local", "9" * 12),
            "'--local': 999999999999 is not possible; it must be a whole number from",
        ),
        (
            ("chaos", "t.json", "--local", "2", "--steps", "0"),
            "'--steps': 0 is not possible; it must be a whole number from",
        ),
        (("chaos", "t.json", "--speedup", "nan"), "--speedup: nan is not possible"),
        (("check", "--local", "9" * 12), "--local: 999999999999 nodes"),
        (("check", "hosts", "--slow-factor", "nan"), "--slow-factor: nan is not possible"),
        (("profile", "--workers", "99999999"), "'--workers': 99999999 is not possible; it must be a whole number from"),
    ],
    ids=lambda value: " ".join(value)[-60:] if isinstance(value, tuple) else "",
)
def test_an_option_beyond_its_bounds_is_wrong_usage(
    arguments: tuple[str, ...],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    began_s = time.process_time()
    assert main(arguments) == 2
    assert words in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert time.process_time() - began_s < 30  # of this process alone; what has no bounds takes hours


# --- files ---------------------------------------------------------------------------------------------------------


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(10 << 30)


MADE: dict[str, Callable[[Path], None]] = {
    "a directory": Path.mkdir,
    "a sparse file of 10 GB": _sparse,
    "bytes": lambda path: path.write_bytes(bytes(range(256))) and None,
    "UTF-16": lambda path: path.write_bytes("max_steps: 3\n".encode("utf-16")) and None,
    "a file that may not be read": lambda path: path.symlink_to("/proc/self/mem"),
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a device of chance": lambda path: path.symlink_to("/dev/urandom"),
    "itself": lambda path: path.symlink_to(path),
}
TAKEN: dict[str, tuple[str, ...]] = {
    "hostfile": ("up", "FILE", "--dry-run"),
    "job file": ("up", "--local", "2", "--job", "FILE", "--dry-run"),
    "script": ("up", "--local", "2", "FILE.py", "--dry-run"),
    "trace": ("trace", "info", "FILE"),
    "trace ": ("trace", "convert", "FILE"),
    "trace  ": ("chaos", "FILE", "--local", "2"),
    "profile": ("plan", "--profile", "FILE", "--nodes", "2", "--global-batch", "4"),
    "configuration": (*PLAN[:2], "FILE.json", *PLAN[3:]),
    "data sheet": (*PLAN[:4], "FILE.json", *PLAN[5:]),
    "ssh config": ("check", "HOSTS", "--ssh-config", "FILE"),
}


@pytest.mark.parametrize("what", TAKEN, ids=str.strip)
def test_a_file_that_is_none_is_told_wherever_one_is_named(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOBLECK_BASE_DIR", str(tmp_path / "base"))
    hosts = tmp_path / "hosts"
    hosts.write_text("node1\n")
    words = TAKEN[what]
    shutdown = next((word.removeprefix("FILE") for word in words if word.startswith("FILE")), "")
    for kind, make in MADE.items():
        path = tmp_path / f"{kind.replace(' ', '-')}{shutdown}"
        make(path)
        names = {f"FILE{shutdown}": str(path), "HOSTS": str(hosts)}
        assert main([names.get(word, word) for word in words]) == 78, kind
        said = capsys.readouterr().err
        assert said.startswith(f"oobleck: {what.strip()} {path}: "), said
        assert said.count("\n") == 1


def test_a_pipe_is_read_to_its_end_and_no_longer_than_patience_lasts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "silent")
    with pytest.raises(ConfigError, match=r"hostfile .*/silent"):
        read_input(tmp_path / "silent", "hostfile", patience_s=0.1)
    read_end, write_end = os.pipe()
    os.write(write_end, b"\xef\xbb\xbfone\r\ntwo\r")
    with pytest.raises(ConfigError, match="in time"):
        read_input(Path(f"/dev/fd/{read_end}"), "hostfile", patience_s=0.2)
    os.write(write_end, b"\xef\xbb\xbfone\r\ntwo\r")
    os.close(write_end)
    assert read_input(Path(f"/dev/fd/{read_end}"), "hostfile", patience_s=60) == "one\ntwo\n"
    os.close(read_end)


def test_line_ends_and_byte_order_marks_of_other_systems_are_no_concern(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfnode1 slots=2\r\nnode2\r\n")
    assert [node.host for node in parse_hostfile(read_input(path, "hostfile"), source="hosts")] == ["node1", "node2"]
    path.write_bytes(b"\xef\xbb\xbfmax_steps: 7\r\n")
    assert load_job(read_input(path, "job file"), source="job").max_steps == 7


def test_a_name_without_a_file_is_wrong_usage_and_one_that_cannot_be_is_told() -> None:
    with pytest.raises(UsageError, match="job file nowhere: "):
        read_input(Path("nowhere"), "job file")
    for name, words in (("a\0b", "null byte"), ("~nobody-of-this-name/x", "no home"), ("x" * 5000, "too long")):
        with pytest.raises(ConfigError, match=words):
            read_input(Path(name), "job file")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["ui", "--port", "99999"], "99999 is not possible; it must be a whole number from 0 to 65,535"),
        (["verify", "--steps", "0"], "0 is not possible; it must be a whole number from 1 to "),
        (["verify", "--local", "99"], "99 is not possible; it must be a whole number from 2 to 16"),
        (["up", "--local", "2", "--verify", "0"], "0 is not possible; it must be a whole number from 1 to "),
    ],
)
def test_a_number_beyond_an_options_bounds_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(words) == ExitCode.USAGE
    error = " ".join(capsys.readouterr().err.split())
    assert words[-2] in error
    assert said in error
