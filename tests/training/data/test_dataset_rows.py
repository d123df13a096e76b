"""Hugging Face datasets on this machine, as `save_to_disk` and others write them; and what is said of those amiss."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oobleck.errors import ConfigError
from oobleck.job import DataSpec
from oobleck.training.data.data import prepare_dataset
from oobleck.training.data.text import read_documents

datasets = pytest.importorskip("datasets", reason="the extra `test` installs it")
Dataset, DatasetDict = datasets.Dataset, datasets.DatasetDict
datasets.disable_progress_bars()
ROWS = Dataset.from_dict({"text": ["one", None, "", "four"], "number": [1, 2, 3, 4], "words": [["a"], [], [], []]})
TEXT = ["one", "four"]


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def read(path: Path, **settings: object) -> list[str]:
    return read_documents(DataSpec(dataset_path=str(path), **settings))


def _save(path: Path) -> None:
    ROWS.save_to_disk(path)


def _save_splits(path: Path) -> None:
    DatasetDict({"train": ROWS, "test": ROWS.select([0])}).save_to_disk(path)


def _write_parquet(path: Path) -> None:
    path.mkdir()
    ROWS.to_parquet(path / "train-00000.parquet")


def _write_json_lines(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("one", None, "", "four")))


def _write_csv(path: Path) -> None:
    path.mkdir()
    with (path / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text", "number"], ["one", 1], ["four", 4]])


def _write_text(path: Path) -> None:
    path.mkdir()
    (path / "a.txt").write_text("one\nfour\n")


@pytest.mark.parametrize(
    "write", [_save, _save_splits, _write_parquet, _write_json_lines, _write_csv, _write_text], ids=lambda w: w.__name__
)
def test_the_text_of_all_rows_that_have_some_is_read(write: Callable[[Path], None], tmp_path: Path) -> None:
    write(tmp_path / "rows")
    assert read(tmp_path / "rows") == TEXT


def test_a_part_of_the_rows_is_taken_where_it_is_asked_for(tmp_path: Path) -> None:
    _save_splits(tmp_path / "saved")
    assert read(tmp_path / "saved", dataset_split="test") == ["one"]
    _write_text(tmp_path / "files")
    assert read(tmp_path / "files", dataset_split="train[1:]") == ["four"]
    Dataset.from_dict({"body": ["other"]}).save_to_disk(tmp_path / "other")
    assert read(tmp_path / "other", text_column="body") == ["other"]


def test_labels_for_each_token_are_refused_and_that_of_a_text_is_not(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["one"], "label": [1]}).save_to_disk(tmp_path / "reviews")
    assert read(tmp_path / "reviews") == ["one"]
    for column in ("labels", "attention_mask", "label"):
        Dataset.from_dict({"text": ["one"], column: [[1, 0]]}).save_to_disk(tmp_path / column)
        with pytest.raises(ConfigError, match=rf"'{column}'"):
            read(tmp_path / column)


def test_no_more_is_read_than_is_asked_for(tmp_path: Path) -> None:
    Dataset.from_dict({"text": ["x" * 100] * 50_000}).save_to_disk(tmp_path / "saved")
    documents = read(tmp_path / "saved", max_bytes=1050)
    assert [len(document) for document in documents] == [100] * 10 + [50]


@pytest.mark.parametrize(
    ("write", "settings", "said"),
    [
        (_save, {"text_column": "body"}, "has no column 'body'; it has text, number, words"),
        (_save, {"text_column": "number"}, "'number' of .* holds int64; name a column that holds text"),
        (_save, {"text_column": "words"}, "'words' of .* holds .*; name a column that holds text"),
        (_save, {"dataset_split": "test"}, "is one dataset without splits; leave 'test' out"),
        (_save_splits, {"dataset_split": "dev"}, "has no split 'dev'; it has train, test, each as a whole"),
        (_write_text, {"dataset_split": "dev"}, 'Unknown split "dev"'),
        (Path.mkdir, {}, "cannot be loaded: EmptyDatasetError"),
        (lambda path: None, {}, "does not exist on this node; give a directory, or a name of the hub"),
    ],
)
def test_what_is_amiss_is_named(
    write: Callable[[Path], None], settings: dict[str, object], said: str, tmp_path: Path
) -> None:
    write(tmp_path / "rows")
    with pytest.raises(ConfigError, match=said):
        read(tmp_path / "rows", **settings)


def test_the_error_behind_a_loaders_own_is_told(tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "a.jsonl").write_text('{"text": "one"\n{{{')
    with pytest.raises(ConfigError, match=r"DatasetGenerationError: .* \(.*JSON parse error"):
        read(tmp_path / "bad")


def test_datasets_that_save_to_disk_wrote_and_files_of_the_same_text_give_the_same_samples(tmp_path: Path) -> None:
    lines = [f"{number} and twice that is {2 * number};" for number in range(500)]
    Dataset.from_dict({"text": lines}).save_to_disk(tmp_path / "saved")
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    sizes = {"sequence_length": 16, "vocab_size": 300}
    saved = prepare_dataset(DataSpec(dataset_path=str(tmp_path / "saved"), **sizes), cache_dir=tmp_path / "a")
    files = prepare_dataset(DataSpec(paths=(str(tmp_path / "text.jsonl"),), **sizes), cache_dir=tmp_path / "b")
    assert saved.digest == files.digest


def test_without_the_package_a_dataset_says_what_to_install(tmp_path: Path) -> None:
    """As in a process whose Python has none: here it is not found, there it is not installed."""
    program = (
        "import sys; sys.modules['datasets'] = None\n"
        "from oobleck.job import DataSpec\n"
        "from oobleck.training.data.text import read_documents\n"
        "read_documents(DataSpec(dataset_path='wikitext', dataset_name='wikitext-2-raw-v1'))\n"
    )
    assert re.search(r"ConfigError: data\.dataset_path: .*datasets", last_words(program))
    assert "pip install datasets" in last_words(program)


def test_a_name_of_the_hub_that_cannot_be_reached_is_told() -> None:
    program = (
        "from oobleck.job import DataSpec\n"
        "from oobleck.training.data.text import read_documents\n"
        "read_documents(DataSpec(dataset_path='wikitext', dataset_name='wikitext-2-raw-v1'))\n"
    )
    assert re.search(r"data\.dataset_path: wikitext .*: ConnectionError", last_words(program, HF_HUB_OFFLINE="1"))


def last_words(program: str, **environment: str) -> str:
    """What a program that fails says at its end."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert ended.returncode == 1
    return ended.stderr.splitlines()[-1]
