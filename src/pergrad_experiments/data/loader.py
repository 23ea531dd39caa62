"""Batches from a data set, by grain: that of a step depends on the seed and the step alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Batch = dict[str, Any]


class Source:
    """Examples by index, for grain: the rows of several arrays (or memory maps), and their index."""

    def __init__(self, arrays: Batch):
        self.arrays = arrays

    def __len__(self):
        return len(next(iter(self.arrays.values())))

    def __getitem__(self, index):
        return {"index": np.int32(index), **{name: x[index] for name, x in self.arrays.items()}}


def batches(
    source: Any,
    batch_size: int,
    seed: int,
    change: Callable[[Batch, np.random.Generator], Batch] | None = None,
) -> Callable[[int, Any], Iterator[Batch]]:
    """Shuffled, anew for each pass, and in batches that may lie across two passes.

    ``change(example, rng)`` is applied to each example, with a generator of its own: augmentation.
    """
    import grain

    dataset = grain.MapDataset.source(source).seed(seed).shuffle().repeat()
    if change is not None:
        dataset = dataset.random_map(change)
    dataset = dataset.batch(batch_size)
    read_ahead = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)

    def from_step(start: int, _: Any) -> Iterator[Batch]:
        # An infinite data set is cut, not moved: the batch of a step stays the same.
        return iter(dataset[start:].to_iter_dataset(read_ahead))

    return from_step
