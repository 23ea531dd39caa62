"""Statistics of per-example gradients of any JAX loss, at close to the cost of the mini-batch gradient."""

from .api import grad_stats, value_and_stats
from .check import check
from .explain import explain
from .statistics import (
    abs_mean,
    elementwise,
    losses,
    mean,
    mean_square,
    moment,
    norms,
    per_example,
    second_moment,
    sign_mean,
    snr,
    std,
    variance,
)

__version__ = "0.1.0"

__all__ = [
    "abs_mean",
    "check",
    "elementwise",
    "explain",
    "grad_stats",
    "losses",
    "mean",
    "mean_square",
    "moment",
    "norms",
    "per_example",
    "second_moment",
    "sign_mean",
    "snr",
    "std",
    "value_and_stats",
    "variance",
]
