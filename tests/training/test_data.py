from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from oobleck.errors import ConfigError
from oobleck.job import DataSpec
from oobleck.training.data import prepare_dataset
from oobleck.training.text import read_documents
from oobleck.training.tokenizer import END_OF_TEXT_ID

TEXT = "It was the best of times, it was the worst of times; naïve 東京 _private 42\n\n    indented\t\n" * 40


@pytest.fixture
def spec(tmp_path: Path) -> DataSpec:
    directory = tmp_path / "text"
    (directory / "b").mkdir(parents=True)
    (directory / "b" / "one.txt").write_text(TEXT)
    (directory / "a.txt").write_text("The first one by name. " * 30)
    (directory / ".hidden").write_text("not this one")
    return DataSpec(paths=(str(directory),), sequence_length=16, vocab_size=400)


def test_samples_hold_the_text_and_nothing_else(spec: DataSpec, tmp_path: Path):
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(dataset.corpus.tokenizer_path))
    tokens = dataset.corpus.samples.reshape(-1).tolist()
    documents, start = [], 0
    for position, token in enumerate(tokens):
        if token == END_OF_TEXT_ID:
            documents.append(tokenizer.decode(tokens[start:position]))
            start = position + 1
    rest = tokenizer.decode(tokens[start:])
    expected = [TEXT, "The first one by name. " * 30]
    assert documents[0] == read_documents(spec)[0]
    assert sorted(read_documents(spec)) == sorted(expected)
    assert read_documents(spec)[-1].startswith(rest)
    assert dataset.vocab_size == tokenizer.get_vocab_size() <= 400


def test_what_is_stored_is_what_the_saved_tokenizer_says(spec: DataSpec, tmp_path: Path):
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    tokenizer = Tokenizer.from_file(str(dataset.corpus.tokenizer_path))
    expected = [i for document in read_documents(spec) for i in [*tokenizer.encode(document).ids, END_OF_TEXT_ID]]
    assert dataset.corpus.samples.reshape(-1).tolist() == expected[: dataset.corpus.samples.size]
    assert len(expected) - dataset.corpus.samples.size < spec.sequence_length


def test_batches_are_the_samples_asked_for(spec: DataSpec, tmp_path: Path):
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    batch = dataset.batch([2, 0])
    assert batch.input_ids.tolist() == [dataset.corpus.samples[2].tolist(), dataset.corpus.samples[0].tolist()]
    assert batch.labels.tolist() == batch.input_ids.tolist()
    assert batch.num_items == 2 * (spec.sequence_length - 1)


def test_a_second_call_reads_the_cache(spec: DataSpec, tmp_path: Path):
    first = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    written = first.corpus.tokenizer_path.stat().st_mtime_ns
    second = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    assert second.corpus.tokenizer_path.stat().st_mtime_ns == written
    assert second.digest == first.digest


def test_any_change_of_what_it_is_made_from_makes_another(spec: DataSpec, tmp_path: Path):
    cache = tmp_path / "cache"
    specs = [spec, replace(spec, sequence_length=17), replace(spec, vocab_size=300), replace(spec, max_bytes=2000)]
    datasets = [prepare_dataset(each, cache_dir=cache) for each in specs]
    Path(spec.paths[0], "a.txt").write_text("The first one by name! " * 30)
    datasets.append(prepare_dataset(spec, cache_dir=cache))
    assert len({dataset.digest for dataset in datasets}) == len(datasets)


def test_damage_is_noticed_and_repaired(spec: DataSpec, tmp_path: Path):
    cache = tmp_path / "cache"
    dataset = prepare_dataset(spec, cache_dir=cache)
    path = dataset.corpus.tokenizer_path.with_name("tokens.npy")
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    assert prepare_dataset(spec, cache_dir=cache).digest == dataset.digest
    path.with_name("manifest.json").unlink()
    assert prepare_dataset(spec, cache_dir=cache).digest == dataset.digest


def _prepare(spec: DataSpec, cache: Path, results: multiprocessing.Queue[tuple[str, int]]) -> None:
    dataset = prepare_dataset(spec, cache_dir=cache)
    results.put((dataset.digest, dataset.corpus.tokenizer_path.stat().st_ino))


def test_of_processes_that_start_at_once_one_does_the_work(spec: DataSpec, tmp_path: Path):
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[tuple[str, int]] = context.Queue()
    processes = [context.Process(target=_prepare, args=(spec, tmp_path / "cache", results)) for _ in range(4)]
    for process in processes:
        process.start()
    outcomes = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(timeout=60)
    assert len(outcomes) == 1
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.is_dir()] == [
        p.stem for p in (tmp_path / "cache").glob("*.lock")
    ]


def test_a_process_without_torch_can_make_it(spec: DataSpec, tmp_path: Path):
    fields = json.dumps({"paths": spec.paths, "sequence_length": 16, "vocab_size": 400})
    code = (
        "import runpy, sys; runpy.run_module('oobleck.training.corpus', run_name='__main__'); "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "cache"), fields], check=True)
    made = {path.name for path in (tmp_path / "cache").iterdir()}
    dataset = prepare_dataset(spec, cache_dir=tmp_path / "cache")
    assert {path.name for path in (tmp_path / "cache").iterdir()} == made
    assert dataset.num_samples > 10


def test_the_last_document_is_cut_at_the_limit(spec: DataSpec):
    documents = read_documents(replace(spec, max_bytes=1000))
    assert sum(len(document.encode()) for document in documents) == pytest.approx(1000, abs=3)


def test_mistakes_are_named(spec: DataSpec, tmp_path: Path):
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        prepare_dataset(replace(spec, paths=("/nowhere",)), cache_dir=tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ConfigError, match="no text"):
        prepare_dataset(replace(spec, paths=(str(empty),)), cache_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"not one sample of 100000"):
        prepare_dataset(replace(spec, sequence_length=100_000), cache_dir=tmp_path)


def test_the_standard_library_is_read_without_tests_and_packages():
    documents = read_documents(DataSpec(max_bytes=2_000_000))
    assert sum(len(document.encode()) for document in documents) >= 1_900_000
    assert not any("import pytest" in document for document in documents)


@pytest.mark.slow
def test_eight_megabytes_take_seconds(tmp_path: Path):
    start = time.process_time()
    dataset = prepare_dataset(DataSpec(), cache_dir=tmp_path)
    elapsed = time.process_time() - start
    assert dataset.vocab_size == 8192
    assert dataset.num_samples > 10_000
    assert elapsed < 20, f"{elapsed:.1f} s of CPU"
    manifest = json.loads(dataset.corpus.tokenizer_path.with_name("manifest.json").read_text())
    assert manifest["digest"] == dataset.digest
    assert int(np.max(dataset.corpus.samples)) < 8192
