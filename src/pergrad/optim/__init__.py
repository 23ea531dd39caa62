"""Optimizers on statistics of per-example gradients; all of them optax transformations."""

from .accumulate import MultiSteps
from .adaptive import micro_adadelta, micro_adagrad, micro_rmsprop
from .asking import Optimizer, ask, required_stats
from .moments import adam, eve, micro_adam, micro_adam_msq, micro_adam_var, scale_by_moments
from .schedules import scale_learning_rate
from .signs import micro_sign_sgd, sign_ema, sign_sgd
from .train import train_step

__all__ = [
    "Optimizer",
    "ask",
    "required_stats",
    "scale_by_moments",
    "adam",
    "micro_adam",
    "micro_adam_var",
    "micro_adam_msq",
    "eve",
    "micro_rmsprop",
    "micro_adadelta",
    "micro_adagrad",
    "sign_sgd",
    "sign_ema",
    "micro_sign_sgd",
    "MultiSteps",
    "scale_learning_rate",
    "train_step",
]
