"""What per-example gradients say about training: signal and noise, where to put the sign, what is in a preconditioner.

Nothing here looks at a model. The input is what `pg.value_and_stats(loss, analysis.STATS)` returns, from one batch or
averaged over many (`average_stats`), and every function works on trees and under jit.
"""

from .estimators import EstimatorErrors, estimator_errors, simulate_estimator_errors
from .moments import STATS, Moments, average_stats, moments
from .noise import NoiseScale, batch_size_schedule, noise_scale, track_noise_scale
from .preconditioner import PreconditionerShares, preconditioner_shares, track_preconditioner
from .signal import signal_to_noise
from .signs import Placements, measured_alignment, predicted_alignment, recommend, sign_placements

__all__ = [
    # the input
    "STATS",
    "average_stats",
    "moments",
    "Moments",
    # signal and noise
    "signal_to_noise",
    "noise_scale",
    "NoiseScale",
    "track_noise_scale",
    "batch_size_schedule",
    # where to put the sign
    "predicted_alignment",
    "recommend",
    "sign_placements",
    "measured_alignment",
    "Placements",
    # what is in a preconditioner
    "preconditioner_shares",
    "track_preconditioner",
    "PreconditionerShares",
    "estimator_errors",
    "simulate_estimator_errors",
    "EstimatorErrors",
]
