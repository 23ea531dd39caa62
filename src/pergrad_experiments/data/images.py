"""CIFAR-10, or the sample that comes with the package."""

from __future__ import annotations

from typing import Any

import numpy as np

from . import fetch, samples


def load(sample: bool) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[str, Any]]:
    """Training and test data, of ``image`` (uint8, 32×32×3) and ``label``, and what `data.json` says of them."""
    if sample:
        images, labels, about = samples.images()
        cut = len(images) * 3 // 4
        parts = [{"image": images[s], "label": labels[s]} for s in (slice(cut), slice(cut, None))]
        return parts[0], parts[1], about
    about = {"cifar10": fetch.checked("cifar10")}
    folder = fetch.folder("cifar10")
    train, test = (
        {
            "image": np.load(folder / f"{part}_images.npy", mmap_mode="r", allow_pickle=False),
            "label": np.load(folder / f"{part}_labels.npy", allow_pickle=False).astype(np.int32),
        }
        for part in ("train", "test")
    )
    return train, test, about
