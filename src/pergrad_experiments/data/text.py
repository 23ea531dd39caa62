"""Text as tokens: byte-pair encodings, made from the training data itself, and kept in the cache."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import BadInput
from . import fetch, samples

PAD, START, END = 0, 1, 2
SPECIAL = ["<pad>", "<s>", "</s>"]


def tokenizer(lines: Iterable[str], vocabulary: int):
    """A byte-level BPE of this many tokens, trained on ``lines``: any text can be written in it, and read back as it was."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocabulary < 256 + len(SPECIAL):
        raise BadInput(
            f"vocabulary is {vocabulary}: expected at least {256 + len(SPECIAL)}, the bytes and three special tokens."
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(lines, trainer)
    return made


def cached(name: str, checksums: Any, make: Callable[[Path], None]) -> Path:
    """A folder in the cache that ``make`` has filled, for these inputs: as a whole, or not at all."""
    digest = hashlib.sha256(repr((name, checksums)).encode()).hexdigest()[:16]
    folder = fetch.cache() / "prepared" / f"{name}-{digest}"
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            inner = Path(scratch) / "made"
            inner.mkdir()
            make(inner)
            try:
                os.replace(inner, folder)
            except OSError:
                if not folder.is_dir():  # else another process was faster
                    raise
    return folder


def read_tokenizer(path: Path):
    from tokenizers import Tokenizer

    return Tokenizer.from_str(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[str]:
    """Without `splitlines`, which takes more for the end of a line than there is one here."""
    return path.read_text(encoding="utf-8").removesuffix("\n").split("\n")


def encode(made, lines: list[str]) -> np.ndarray:
    """All lines one after another, each with its end."""
    ids = [np.asarray([*encoding.ids, END], np.int32) for encoding in made.encode_batch_fast(lines)]
    return np.concatenate(ids)


# ------------------------------------------------------------------------------------- one long text


def corpus(name: str, vocabulary: int) -> tuple[np.ndarray, np.ndarray, Any, dict[str, Any]]:
    """Tokens to train on, tokens to validate on, the tokenizer, and what `data.json` says of them."""
    if name == "sample":
        text, about = samples.text()
        paragraphs = text.split("\n\n")
        cut = len(paragraphs) * 9 // 10
        read = {"train": lambda: paragraphs[:cut], "valid": lambda: paragraphs[cut:]}
    else:
        about = {name: fetch.checked(name)}
        folder = fetch.folder(name)
        read = {part: (lambda part=part: read_lines(folder / f"{part}.txt")) for part in ("train", "valid")}

    def make(inner: Path):
        lines = {part: of() for part, of in read.items()}
        made = tokenizer(lines["train"], vocabulary)
        (inner / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")
        for part in lines:
            np.save(inner / f"{part}.npy", encode(made, lines[part]))

    folder = cached(f"{name}-{vocabulary}", about, make)
    train, valid = (np.load(folder / f"{part}.npy", mmap_mode="r", allow_pickle=False) for part in ("train", "valid"))
    tokens = {part: fetch.sha256(folder / f"{part}.npy") for part in ("train", "valid")}
    about[f"{name}, {vocabulary} tokens"] = {"source": "tokenizers", "files": tokens}
    return train, valid, read_tokenizer(folder / "tokenizer.json"), about


class Windows:
    """Every ``length`` tokens of a text and the one after them, for grain: an example's ``tokens``."""

    def __init__(self, tokens: np.ndarray, length: int):
        self.tokens, self.length = tokens, length
        if len(self) < 1:
            raise BadInput(f"length is {length}, and the text has {len(tokens)} tokens only. Write a smaller length.")

    def __len__(self):
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index):
        start = index * self.length
        return {"index": np.int32(index), "tokens": np.asarray(self.tokens[start : start + self.length + 1])}


# ------------------------------------------------------------------------------------- pairs of sentences


def pairs(sample: bool, vocabulary: int, length: int) -> tuple[dict, dict, list[tuple[str, str]], Any, dict[str, Any]]:
    """English and French: training data, held-out data and its sentences, the tokenizer that both languages share, about.

    Sentences are padded to ``length`` tokens, their end included; pairs that are longer are left out.
    """
    if sample:
        lines, about = samples.pairs()
        cut = len(lines) * 9 // 10
        read = {"train": lambda: lines[:cut], "valid": lambda: lines[cut:]}
    else:
        about = {"translation": fetch.checked("translation")}
        folder = fetch.folder("translation")
        read = {part: (lambda part=part: read_lines(folder / f"{part}.tsv")) for part in ("train", "valid")}

    def make(inner: Path):
        made: Any = None
        for part, of in read.items():
            both = [line.split("\t")[:2] for line in of()]
            made = made or tokenizer((sentence for pair in both for sentence in pair), vocabulary)
            ids = [[e.ids for e in made.encode_batch_fast(list(side))] for side in zip(*both)]
            keep = [k for k, (a, b) in enumerate(zip(*ids)) if max(len(a), len(b)) < length]
            if not keep:
                raise BadInput(f"length is {length}: no pair of sentences is that short. Write a larger length.")
            for side, sentences in zip(("english", "french"), ids):
                padded = np.full((len(keep), length), PAD, np.int32)
                for row, k in enumerate(keep):
                    padded[row, : len(sentences[k]) + 1] = [*sentences[k], END]
                np.save(inner / f"{part}_{side}.npy", padded)
            (inner / f"{part}.tsv").write_text("".join("\t".join(both[k]) + "\n" for k in keep), encoding="utf-8")
        (inner / "tokenizer.json").write_text(made.to_str(), encoding="utf-8")

    folder = cached(f"pairs-{vocabulary}-{length}", about, make)
    parts = {
        part: {
            side: np.load(folder / f"{part}_{side}.npy", mmap_mode="r", allow_pickle=False)
            for side in ("english", "french")
        }
        for part in ("train", "valid")
    }
    rows = read_lines(folder / "valid.tsv")
    sentences = [(english, french) for english, french in (row.split("\t") for row in rows)]
    about["pairs, in tokens"] = {
        "source": "tokenizers",
        "files": {p.name: fetch.sha256(p) for p in sorted(folder.iterdir())},
    }
    return parts["train"], parts["valid"], sentences, read_tokenizer(folder / "tokenizer.json"), about
