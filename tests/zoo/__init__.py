"""The zoo: small losses on which the engine is compared with its slow twin.

Every case is one function that draws arrays and returns a loss, its arguments and the options of
`pg.value_and_stats`; axes are odd, mostly different and sometimes of size one, so that a transposition or a
forgotten factor shows. The zoo does not know the library.

Tags that tests act on:

    no64            cannot run in float64
    nonsmooth       has kinks; the arrays stay clear of them
    fragile-sign    has gradient entries, or whole leaves, that are zero but for rounding: compare on the
                    scale of the largest gradient of the tree, and no signs
    bf16, f16       computes in low precision: compare loosely
    couples         the loss of a batch is not the mean of the losses of its examples
    prng            draws random numbers (which differ between float32 and float64)
"""

from . import (  # noqa: F401  (importing registers)
    algebra,
    control_flow,
    conv,
    dense,
    derivatives,
    embedding,
    interface,
    libraries,
    loops,
    reductions,
    shared,
)
from .case import CASES, Built, Case, Draw, cast

__all__ = ["CASES", "Built", "Case", "Draw", "cast"]
