"""Do the columns of a row compute the same? A fast wrong number is worth nothing."""

import jax
import numpy as np

from .columns import JUDGED, MICROBATCHES, PLAIN, TWIN
from .timing import describe

LIMITS = {"float32": 1e-4, "bfloat16": 5e-2}  # orders of summation differ; so do roundings in between


def relative_error(tree, expected) -> float:
    """The largest error of any leaf, relative to the largest entry of that leaf."""
    if jax.tree.structure(tree) != jax.tree.structure(expected):
        raise ValueError(f"{jax.tree.structure(tree)} is not {jax.tree.structure(expected)}")

    def error(a, b):
        a, b = (np.asarray(v).astype(np.float64) for v in (a, b))
        if a.shape != b.shape:
            raise ValueError(f"shape {a.shape} is not {b.shape}")
        gap, scale = float(np.max(np.abs(a - b), initial=0)), float(np.max(np.abs(b), initial=0))
        return gap if scale == 0 else gap / scale

    # np.max keeps a NaN; the built-in max might drop it.
    return float(np.max([error(a, b) for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(expected))]))


def compare(compiled, args, dtype) -> dict:
    """Relative errors of one row: mean and second moment against the twin's, and what follows from them."""
    if JUDGED not in compiled or TWIN not in compiled:
        return {"error": f"needs the columns {JUDGED!r} and {TWIN!r}"}
    try:
        (value, ours), (twin_value, twin) = (jax.device_get(compiled[n](*args)) for n in (JUDGED, TWIN))
        out = {
            "value": relative_error(value, twin_value),
            "mean": relative_error(ours["g"], twin["g"]),
            "second moment": relative_error(ours["g2"], twin["g2"]),
        }
        if PLAIN in compiled:  # the mean of the per-example gradients is the plain gradient
            out["mean, plain"] = relative_error(ours["g"], jax.device_get(compiled[PLAIN](*args))[1]["g"])
        if MICROBATCHES in compiled:
            theirs = jax.device_get(compiled[MICROBATCHES](*args)[1])
            out["optax"] = max(relative_error(theirs[k], twin[k]) for k in ("g", "g2"))
        if "norms" in compiled:  # the mean of ‖g_b‖² is the sum of E g² over all coordinates
            squares = np.mean(np.square(np.asarray(compiled["norms"](*args)[1]["norms"], np.float64)))
            total = sum(np.sum(np.asarray(v, np.float64)) for v in jax.tree.leaves(twin["g2"]))
            out["norms"] = relative_error(squares, total)
        # A NaN is not below any limit.
        return {
            "errors": out,
            "limit": LIMITS[dtype],
            "agrees": all(e <= LIMITS[dtype] for e in out.values()),
        }
    except Exception as error:
        return {"error": describe(error)}
