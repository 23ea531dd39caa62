"""Timing functions against the first of them, in one process and one run; knows neither JAX nor PyTorch.

The functions are called in turn (A, B, C, B, C, A, …), and a ratio is taken within each round, so that a slow minute
of the machine falls on both sides of it.
"""

import math
import statistics
import time
from collections.abc import Callable


def summary(values) -> dict[str, float]:
    """Median and quartiles."""
    values = sorted(values)
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def ratios(values, base) -> dict[str, float]:
    """Median and quartiles of the ratio round by round."""
    return summary([v / b for v, b in zip(values, base, strict=False)])


def add_ratios(columns: dict[str, dict]) -> None:
    """To each column's record its ratios to the first column's: time, memory, and compile time where there is any."""
    base = next(iter(columns.values()))
    for entry in columns.values():
        if "error" in entry or "error" in base:
            continue
        entry["ratios"] = {
            "time": ratios(entry["raw"]["seconds"], base["raw"]["seconds"]),
            "memory": _over(entry, base, "temporary"),
            "memory_with_results": _over(entry, base, "temporary", "results"),
        }
        if "build" in entry["raw"]:
            entry["ratios"]["compile"] = ratios(entry["raw"]["build"], base["raw"]["build"])


def _over(entry, base, *kinds):
    mine, plain = (sum(e["memory"][kind] for kind in kinds) for e in (entry, base))
    return mine / max(plain, 1)


def timed(fn, *args):
    start = time.perf_counter()
    out = fn(*args)
    return out, time.perf_counter() - start


def rotated(names: list, by: int) -> list:
    """Another starting point in each round, so that no function always follows the same one's leftovers."""
    by = by % len(names) if names else 0
    return names[by:] + names[:by]


def run_all(functions: dict[str, Callable[[], object]], repeats: int, at_least=0.05, at_most=3.0):
    """Seconds per call, a list over the rounds for each function, and the errors of those that fail.

    A function returns when its work is done. In every round each is called as often as fills `at_least` seconds (a
    number fixed before). One that would need more than `at_most` seconds for all rounds takes part in the first
    ones only, in one at least.
    """
    calls, rounds, errors = {}, {}, {}
    for name, function in functions.items():
        try:
            _, once = timed(function)
            if once < at_most / 6:  # the first call warms up; a slow one is not worth two
                _, once = timed(function)
        except Exception as error:
            errors[name] = describe(error)
            continue
        calls[name] = max(1, math.ceil(at_least / once))
        rounds[name] = min(repeats, max(1, int(at_most / (once * calls[name]))))
    seconds = {name: [] for name in calls}
    for r in range(repeats):
        for name in rotated(list(calls), r):
            if r < rounds[name]:
                start = time.perf_counter()
                for _ in range(calls[name]):
                    functions[name]()
                seconds[name].append((time.perf_counter() - start) / calls[name])
    return seconds, errors


def describe(error: Exception) -> str:
    """The error in one line, without the paths of this machine."""
    lines = str(error).strip().splitlines()
    text = " ".join(w for w in (lines[0] if lines else "").split() if not w.startswith(("/", '"/', "'/")))
    return f"{type(error).__name__}: {text}"[:300]
