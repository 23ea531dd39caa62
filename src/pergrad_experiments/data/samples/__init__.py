"""Small pieces of public data that come with the package, for the preset `smoke` and for tests; README.md says from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent


def _about(file: str) -> dict[str, Any]:
    from ..fetch import sha256

    return {f"sample {file}": {"source": "pergrad_experiments", "files": {file: sha256(HERE / file)}}}


def images() -> tuple[np.ndarray, np.ndarray, dict[str, Any]]:
    """Fashion-MNIST, with a margin of 2 and three equal channels to have the shape of CIFAR-10."""
    with np.load(HERE / "images.npz", allow_pickle=False) as stored:
        grey, labels = stored["images"], stored["labels"].astype(np.int32)
    return np.repeat(np.pad(grey, ((0, 0), (2, 2), (2, 2)))[..., None], 3, axis=-1), labels, _about("images.npz")


def text() -> tuple[str, dict[str, Any]]:
    return (HERE / "text.txt").read_text(encoding="utf-8"), _about("text.txt")


def pairs() -> tuple[list[str], dict[str, Any]]:
    return (HERE / "pairs.tsv").read_text(encoding="utf-8").strip().split("\n"), _about("pairs.tsv")
