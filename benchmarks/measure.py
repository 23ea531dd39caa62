"""What is measured of a set of functions, always against the first of them, in one process and one run.

* `compile_all`: seconds to trace, lower and compile, from empty caches, the functions in turn, several times.
* `memory`: what XLA says a compiled function takes besides its arguments.
* `run_all`: seconds per call, the functions in turn (A, B, C, B, C, A, …). A ratio is taken within each
  round, so that a slow minute of the machine falls on both sides of it.
"""

import math
import statistics
import time
from collections.abc import Callable

import jax


def summary(values) -> dict[str, float]:
    """Median and quartiles."""
    values = sorted(values)
    if len(values) < 2:
        return {"median": values[0], "q1": values[0], "q3": values[0]}
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "q1": q1, "q3": q3}


def _timed(fn, *args):
    start = time.perf_counter()
    out = fn(*args)
    return out, time.perf_counter() - start


def _rotate(names, by):
    """Another starting point in each round, so that no function always follows the same one's leftovers."""
    by = by % len(names) if names else 0
    return names[by:] + names[:by]


def compile_all(makers: dict[str, Callable[[], Callable]], args, repeats: int):
    """For each maker of a function: the compiled function, and the seconds of every repeat.

    A maker returns a *new* function each time, and the caches are cleared before each: nothing carries over.
    What fails once is left out; its error is returned instead.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x @ x).lower(jax.numpy.ones((8, 8))).compile()  # the compiler's own start
    compiled, seconds, errors = {}, {name: [] for name in makers}, {}
    names = list(makers)
    # One round more, not counted: first uses import modules and fill caches that cannot be cleared.
    for repeat in range(repeats + 1):
        for name in _rotate(names, repeat):
            if name in errors:
                continue
            try:
                jax.clear_caches()
                function = jax.jit(makers[name]())
                traced, trace = _timed(lambda: function.trace(*args))
                lowered, lower = _timed(traced.lower)
                executable, build = _timed(lowered.compile)
            except Exception as error:
                errors[name] = describe(error)
                continue
            compiled[name] = executable
            if repeat:
                seconds[name].append({"trace": trace, "lower": lower, "compile": build})
    return compiled, {name: s for name, s in seconds.items() if s}, errors


def memory(compiled) -> dict[str, int]:
    """Bytes of a compiled function: temporaries at their peak, and results."""
    analysis = compiled.memory_analysis()
    return {
        "temporary": int(analysis.temp_size_in_bytes),
        "results": int(analysis.output_size_in_bytes),
        "arguments": int(analysis.argument_size_in_bytes),
    }


def run_all(functions: dict[str, Callable], args, repeats: int, at_least=0.05, at_most=12.0):
    """Seconds per call, a list over the rounds for each function.

    In every round each function is called as often as fills `at_least` seconds (a number fixed before). A
    function that would need more than `at_most` seconds for all rounds takes part in the first ones only, in
    three at least.
    """
    calls, rounds, errors = {}, {}, {}
    for name, function in functions.items():
        try:
            jax.block_until_ready(function(*args))
            _, once = _timed(lambda: jax.block_until_ready(function(*args)))
        except Exception as error:
            errors[name] = describe(error)
            continue
        calls[name] = max(1, math.ceil(at_least / once))
        rounds[name] = min(repeats, max(3, int(at_most / (once * calls[name]))))
    seconds = {name: [] for name in calls}
    names = list(calls)
    for r in range(repeats):
        for name in _rotate(names, r):
            if r >= rounds[name]:
                continue
            start = time.perf_counter()
            for _ in range(calls[name]):
                jax.block_until_ready(functions[name](*args))
            seconds[name].append((time.perf_counter() - start) / calls[name])
    return seconds, errors


def ratios(values, base) -> dict[str, float]:
    """Median and quartiles of the ratio round by round."""
    return summary([v / b for v, b in zip(values, base, strict=False)])


def describe(error: Exception) -> str:
    """The error in one line, without the paths of this machine."""
    lines = str(error).strip().splitlines()
    text = " ".join(w for w in (lines[0] if lines else "").split() if not w.startswith(("/", '"/', "'/")))
    return f"{type(error).__name__}: {text}"[:300]
