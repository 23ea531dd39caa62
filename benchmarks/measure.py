"""What is measured of a set of JAX functions, always against the first of them, in one process and one run.

* `compile_all`: seconds to trace, lower and compile, from empty caches, the functions in turn, several times.
* `memory`: what XLA says a compiled function takes besides its arguments.
* `measure`: these two, and seconds per call (see `timing`).
"""

import re
from collections.abc import Callable

import jax

from . import timing


def compile_all(makers: dict[str, Callable[[], Callable]], args, repeats: int, donate=(), uncounted=True):
    """For each maker of a function: the compiled function, the seconds of every repeat, and the errors.

    A maker returns a *new* function each time, and the caches are cleared before each: nothing carries over.
    `uncounted` adds a round before the others. What fails once is left out; its error is returned instead.
    """
    jax.config.update("jax_enable_compilation_cache", False)
    jax.jit(lambda x: x @ x).lower(jax.numpy.ones((8, 8))).compile()  # the compiler's own start
    compiled, seconds, errors = {}, {name: [] for name in makers}, {}
    # One round that is not counted: first uses import modules and fill caches that cannot be cleared.
    for repeat in range(0 if uncounted else 1, repeats + 1):
        for name in timing.rotated(list(makers), repeat):
            if name in errors:
                continue
            try:
                jax.clear_caches()
                function = jax.jit(makers[name](), donate_argnums=donate)
                traced, trace = timing.timed(lambda: function.trace(*args[name]))
                lowered, lower = timing.timed(traced.lower)
                compiled[name], build = timing.timed(lowered.compile)
            except Exception as error:
                errors[name] = timing.describe(error)
                continue
            if repeat:
                seconds[name].append({"trace": trace, "lower": lower, "compile": build})
    return compiled, {name: s for name, s in seconds.items() if s}, errors


def memory(compiled) -> dict[str, int]:
    """Bytes of a compiled function: temporaries at their peak, and results that are not in the place of arguments."""
    analysis = compiled.memory_analysis()
    return {
        "temporary": int(analysis.temp_size_in_bytes),
        "results": int(analysis.output_size_in_bytes - analysis.alias_size_in_bytes),
        "arguments": int(analysis.argument_size_in_bytes),
    }


def kernels(compiled) -> int:
    """How many operations the compiler left, fused ones counted once: its time on a CPU grows with them."""
    return len(re.findall(r" (?:fusion|dot|convolution|custom-call|while|sort|scatter)\(", compiled.as_text()))


def waiting(function, args, donate):
    """The function as it is timed: called, and waited for. What it gives in the place of donated arguments, it gets next."""

    def call():
        nonlocal args
        out = jax.block_until_ready(function(*args))
        if donate:
            args = (out[0], *args[1:])

    return call


def measure(makers, args, repeats: int, compile_repeats: int = 1, donate=(), uncounted=True):
    """Of every function its times, memory and compile times, and ratios to the first; what is compiled; by name.

    With `donate=(0,)` a function's first result takes the place of its first argument, as in a training loop.
    """
    compiled, builds, errors = compile_all(makers, args, compile_repeats, donate, uncounted)
    calls = {name: waiting(function, args[name], donate) for name, function in compiled.items()}
    seconds, run_errors = timing.run_all(calls, repeats)
    errors |= run_errors
    out = {}
    for name in makers:
        if name in errors:
            out[name] = {"error": errors[name]}
            continue
        total = [sum(b.values()) for b in builds[name]]
        out[name] = {
            "seconds": timing.summary(seconds[name]),
            "build_seconds": timing.summary(total),
            "memory": memory(compiled[name]),
            "kernels": kernels(compiled[name]),
            "raw": {"seconds": seconds[name], "build": total, "build_parts": builds[name]},
        }
    timing.add_ratios(out)
    return out, {name: f for name, f in compiled.items() if name not in errors}
