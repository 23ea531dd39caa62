"""What is measured of a batch now and then: signal and noise by layer, and the examples that stand out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import pergrad as pg
from pergrad import analysis

OUTLIERS = 4
BINS = 24


def statistics(loss: Callable, stacked: tuple[str, ...], microbatch_size: int | None) -> Callable:
    """``(params, batch, key)`` -> arrays by layer, and one number per example for norms and losses."""
    asked = {**analysis.STATS, "norms": pg.norms(), "losses": pg.losses()}
    step = pg.grad_stats(loss, asked, prng_argnums=2, microbatch_size=microbatch_size)

    def measure(params, batch, key):
        found = step(params, batch, key)
        stats = {name: found[name] for name in analysis.STATS}
        stats = {name: by_layer(x, stacked) if name != "count" else x for name, x in stats.items()}
        mean_square, variance = analysis.moments(stats)
        shares = analysis.preconditioner_shares(stats)
        scale = analysis.noise_scale(stats)
        return {
            "signal": jax.tree.map(jnp.sum, mean_square),
            "noise": jax.tree.map(jnp.sum, variance),
            "snr": analysis.signal_to_noise(stats, per="leaf"),
            "share_mean": shares.mean,
            "share_variance": shares.variance,
            "noise_scale": scale._asdict(),
            "norms": found["norms"],
            "losses": found["losses"],
        }

    return measure


def by_layer(tree: Any, stacked: tuple[str, ...]) -> dict[str, jax.Array]:
    """Leaves by name; those under ``stacked`` have a leading axis of layers, and become one leaf for each of them."""
    leaves = {}
    for path, x in jax.tree.flatten_with_path(tree)[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        top, _, rest = name.partition("/")
        if top in stacked:
            leaves |= {f"{top}/{layer}/{rest}": x[layer] for layer in range(x.shape[0])}
        else:
            leaves[name] = x
    return leaves


def entry(found: dict[str, Any], batch: Any, show: Callable, folder: Path, step: int) -> dict[str, Any]:
    """A line of metrics out of what `statistics` gave; images of outliers go into the run folder."""
    norms, losses = np.asarray(found.pop("norms")), np.asarray(found.pop("losses"))
    finite = norms[np.isfinite(norms)]
    counts, edges = np.histogram(finite, bins=BINS) if finite.size else (np.zeros(BINS, int), np.zeros(BINS + 1))
    outliers = []
    for place in np.argsort(-norms, kind="stable")[:OUTLIERS]:
        index = int(batch["index"][place])
        outlier = {"index": index, "norm": norms[place], "loss": losses[place]}
        shown = show(batch, int(place))
        if isinstance(shown, str):
            outlier["text"] = shown
        else:
            outlier["image"] = f"outliers/{step:08d}-{index}.png"
            save_image(folder / outlier["image"], shown)
        outliers.append(outlier)
    quantiles = np.quantile(finite, [0, 0.25, 0.5, 0.75, 1]) if finite.size else []
    return found | {"norms": {"edges": edges, "counts": counts, "quantiles": quantiles}, "outliers": outliers}


def save_image(path: Path, image: np.ndarray) -> None:
    from PIL import Image

    Image.fromarray(image).save(path)
