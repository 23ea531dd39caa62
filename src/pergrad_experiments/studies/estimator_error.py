"""Is Adam's estimate of the gradient noise √B times as far off as Eve's?

Appendix A of Kunze et al.: with examples' gradients, the noise of the mean gradient is known from B samples a step, not
one, which lowers the standard error by √B. Here by simulation on Gaussian gradients, with EMAs of equal length (decays
0.95) for both, over batch sizes and signal-to-noise ratios r, beside the formula of
`pergrad.analysis.estimator_errors`. The "noise" is σ²/B; the "relative deviation" σ/(√B |μ|) is what decides a step,
and shares the error of the mean between Adam and Eve.
"""

from __future__ import annotations

import math
from typing import Any

import jax

from pergrad import analysis

from ..report.charts import Lines, Series
from ..report.panels import mean_interval
from .common import EVE, Claim, Findings, Measure, Results, means, with_interval

DECAY = 0.95
QUANTITIES = ("noise", "relative_deviation")
GRIDS = {  # batch sizes, signal-to-noise ratios, steps, trials
    "smoke": ((4, 16), (3.0,), 40, 60),
    "cpu": ((4, 16, 64, 256), (0.3, 1.0, 3.0, 10.0), 200, 1000),
    "gpu": ((4, 16, 64, 256, 1024), (0.1, 0.3, 1.0, 3.0, 10.0), 400, 4000),
    "paper": ((4, 16, 64, 256, 1024), (0.1, 0.3, 1.0, 3.0, 10.0), 400, 4000),
}


def tasks(preset: str) -> tuple[str, ...]:
    return ("gaussian",)


def jobs(preset: str, seeds: int, tasks: tuple[str, ...]) -> list[Measure]:
    batch_sizes, ratios, steps, trials = GRIDS[preset]
    out = []
    for quantity in QUANTITIES:
        for b in batch_sizes:
            for r in ratios:
                for seed in range(seeds):
                    place = {"quantity": quantity, "batch_size": b, "snr": r, "seed": seed}

                    def call(quantity=quantity, b=b, r=r, seed=seed):
                        options: Any = {
                            "snr": r,
                            "batch_size": b,
                            "b1": DECAY,
                            "b2": DECAY,
                            "quantity": quantity,
                            "steps": steps,
                        }
                        simulated = analysis.simulate_estimator_errors(jax.random.key(seed), trials=trials, **options)
                        formula = analysis.estimator_errors(**options)
                        return {
                            "adam": float(simulated.adam),
                            "eve": float(simulated.eve),
                            "ratio": float(simulated.ratio),
                            "formula": float(formula.ratio),
                        }

                    out.append(Measure(place, call))
    return out


def findings(results: Results) -> Findings:
    claims, blocks = [], []
    for quantity in QUANTITIES:
        of = results.at(quantity=quantity)
        if not of.items:
            continue
        batch_sizes = sorted(of.each("batch_size"))
        series = [Series("√B", batch_sizes, [math.sqrt(b) for b in batch_sizes], colour=6)]
        for colour, r in enumerate(of.each("snr")):
            values = [[v.values["ratio"] for v in of.at(snr=r, batch_size=b).items if v.values] for b in batch_sizes]
            series.append(means(f"r = {r:g}", batch_sizes, values, colour))
        formula = [abs(math.log(v.values["ratio"] / v.values["formula"])) for v in of.items if v.values]
        title = {"noise": "Noise σ²/B", "relative_deviation": "Relative deviation σ/(√B |μ|)"}[quantity]
        blocks.append(
            Lines(
                f"{title}: standard error of Adam's estimate over Eve's",
                "batch size B",
                "ratio",
                series,
                f"The formula is off by at most {100 * (math.exp(max(formula, default=0)) - 1):.0f} %.",
                log_x=True,
                log_y=True,
                x_ticks=tuple(batch_sizes),
            )
        )
        # The exponent p of ratio = B^p, from the ends of the range of B. The noise does not depend on r.
        least, most = batch_sizes[0], batch_sizes[-1]
        ratios = sorted(of.each("snr"))
        for chosen in [ratios] if quantity == "noise" else [[r] for r in ratios]:
            slopes: dict[int, list[float]] = {}
            for r in chosen:
                ends = [
                    of.at(snr=r, batch_size=b).by_seed(lambda v: v.values["ratio"] if v.values else math.nan)
                    for b in (least, most)
                ]
                for seed in ends[0].keys() & ends[1].keys():
                    slopes.setdefault(seed, []).append(math.log(ends[1][seed] / ends[0][seed]) / math.log(most / least))
            found = mean_interval([sum(each) / len(each) for each in slopes.values()])
            _, low, high, n = found
            if n < 2 or (low <= 0.55 and high >= 0.45 and not (low >= 0.45 and high <= 0.55)):
                verdict = "undecided"
            else:
                verdict = "agrees" if low >= 0.45 and high <= 0.55 else "disagrees"
            at = f"r = {chosen[0]:g}" if len(chosen) == 1 else f"r from {chosen[0]:g} to {chosen[-1]:g}"
            claims.append(
                Claim(
                    EVE,
                    f"The error of Adam's estimate is √B times Eve's ({quantity.replace('_', ' ')}, {at})",
                    "B^0.5 (appendix A)",
                    f"B^p with p = {with_interval(found)}, B from {least} to {most}",
                    verdict,
                    f"simulated Gaussian gradients, decays {DECAY}",
                    "the interval of p lies in 0.45 … 0.55; it disagrees if it lies outside",
                )
            )
    return Findings(claims, blocks, [])
