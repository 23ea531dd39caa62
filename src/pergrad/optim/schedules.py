"""Learning rates for another batch size."""

from __future__ import annotations

import math
import numbers

import optax

from .arguments import check_rate


def scale_learning_rate(
    base: optax.ScalarOrSchedule, base_batch: float, batch: float, rule: str = "sqrt"
) -> optax.ScalarOrSchedule:
    """The learning rate for batches of ``batch``, from one that was found for batches of ``base_batch``.

    ``rule="sqrt"``: η = η₀ √(B/B₀), for rules that divide by the size of the mean gradient: Adam, Eve, the sign of a mean.
    ``rule="linear"``: η = η₀ B/B₀, for rules that do not, or divide by the size of a single gradient: SGD, MicroAdam,
    MicroAdamVar, MicroSignSGD. Both are for the regime of small batches, where noise outweighs signal, σ² ≫ B μ².

    Args:
      base: the learning rate at ``base_batch``: a number, or a schedule over steps, which is scaled in height only.
      base_batch, batch: numbers of examples in a step.

    >>> import optax, pergrad as pg
    >>> pg.optim.scale_learning_rate(1e-3, 32, 128)
    0.002
    >>> pg.optim.scale_learning_rate(1e-3, 32, 128, rule="linear")
    0.004
    >>> schedule = pg.optim.scale_learning_rate(optax.linear_schedule(1.0, 0.0, 10), 32, 128)
    >>> print(schedule(5))
    1.0
    """
    # After as many *examples*, training should be in the same place, and shaken as much on its way. One step moves a
    # parameter by −η u, with u of mean d and variance r; N examples are N/B steps, so that
    #
    #     drift = N η d/B    and    diffusion = N η² r/B
    #
    # are not to depend on B. With gradients of mean μ and variance σ² ≫ B μ² a batch's mean has mean μ and variance σ²/B:
    #
    # * u = ḡ:                   d = μ, r = σ²/B.                 drift ∝ η/B, diffusion ∝ (η/B)².  So η ∝ B.
    # * u = ḡ/√ν, ν = σ²:        d = μ/σ, r = 1/B.                as before, η ∝ B. (MicroAdam, MicroAdamVar)
    # * u = ḡ/√ν, ν = σ²/B:      d = √B μ/σ, r = 1.               drift ∝ η/√B, diffusion ∝ η²/B.   So η ∝ √B. (Adam, Eve)
    # * u = sign ḡ:              d = √(2B/π) μ/σ, r = 1.          as before, η ∝ √B. (Gaussian noise)
    # * u = E sign g:            d = √(2/π) μ/σ, r = 1/B.         η ∝ B.
    #
    # One power of B serves drift and diffusion at once. The decays b1 and b2 would have to follow as well, since
    # their memory is counted in steps: 1 − b ∝ B. That is left to the caller, as most practice leaves it alone.
    check_rate("base", base, "1e-3")
    for name, size in (("base_batch", base_batch), ("batch", batch)):
        if not isinstance(size, numbers.Real) or isinstance(size, bool) or not 0 < size < math.inf:
            raise ValueError(f"{name} was given {size!r}; expected a positive number of examples. Write `{name}=256`.")
    if rule not in ("sqrt", "linear"):
        raise ValueError(f'unknown rule {rule!r}: expected one of "sqrt", "linear". Write `rule="sqrt"`.')
    factor = math.sqrt(batch / base_batch) if rule == "sqrt" else batch / base_batch
    if callable(base):
        return lambda count: factor * base(count)
    return factor * base
