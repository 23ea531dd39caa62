"""Every way to the fused contraction, on the device at hand: is it right, and how long does it take?

    python -m benchmarks.kernels --out benchmarks/results/kernels-h200.json
    python -m benchmarks.kernels --only 64x256x1024x4096 --statistics 2 --kernels xla,mosaic

For each shape (B, K, M, N) and each number of statistics, each kernel with each of its candidate block sizes is built,
checked and timed beside XLA's plain contraction of the same operands, Σ_b x_bᵀδ_b, which is the floor: the ratio to it is
the number to read. *Checked*: on inputs drawn anew for each variant, against sums in float64 computed on the host for some
rows and columns; before each checked run the memory that results may land in is filled with NaN, so that an entry
nobody wrote shows. Printed is ‖out − ref‖ / ‖ref‖ of the worst statistic. *Timed*: all variants in turn, in rounds, each
round over several sets of inputs; medians and quartiles. Without a GPU only XLA's way runs, on smaller shapes:
`--kernels` can ask for more, which says what is in the way.

A run that finds a kernel right and faster on a kind of device is what an entry of `pergrad.kernels.contraction.MEASURED`
rests on. The record has the machine, the versions, every raw number.
"""

import argparse
import functools
import importlib
import json
import statistics
import time
from pathlib import Path

SHAPES = {"gpu": [(16, 1024, 1024, 4096), (64, 256, 1024, 4096), (256, 64, 1024, 4096)], "cpu": [(16, 64, 128, 256)]}


def arguments():
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", help="shapes, as in 16x1024x1024x4096,64x256x1024x4096", metavar="SHAPE,…")
    parser.add_argument("--statistics", default="1,2,3", help="how many at a time (default 1,2,3)", metavar="COUNT,…")
    parser.add_argument("--kernels", help="default: all that the device has", metavar="KERNEL,…")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--sets", type=int, default=3, help="sets of inputs to go round, larger than the cache together"
    )
    parser.add_argument("--first", action="store_true", help="of each kernel only the block sizes that it would choose")
    parser.add_argument("--out", type=Path, help="default: print only")
    return parser.parse_args()


def candidates(kernel, dims, dtype, outputs):
    """Block sizes to try: the kernel's own choice first."""
    module = importlib.import_module(f"pergrad.kernels.{kernel}")
    _, t, m, n = dims
    if kernel == "triton":
        own = module.blocks_for(t, m, n, dtype, outputs)
        others = [
            (own.m, own.n, own.t, 8, 4),
            (64, 128, own.t, 8, 3),
            (64, 128, own.t, 4, 3),
            (128, 64, own.t, 4, 3),
            (64, 256, own.t, 8, 3),
        ]
    else:
        own = module.blocks_for(outputs)
        others = [(128, 128, 64, 3), (128, 64, 64, 4), (128, 64, 64, 6), (128, 64, 128, 3)]
    fits = lambda cut: (1 + outputs) * cut[0] * cut[1] <= 49152  # sums in registers, for two warpgroups
    return list(dict.fromkeys([own, *(module.Blocks(*cut) for cut in others if fits(cut))]))


def variants(dims, dtype, outputs, kernels):
    """Name -> function of x and δ that returns one array for each statistic."""
    import jax.numpy as jnp

    from pergrad.kernels import batched_contraction
    from pergrad.reductions import ABS, IDENTITY, SIGN, SQUARE

    phis = (IDENTITY, SQUARE, SIGN, ABS)[:outputs] if outputs > 1 else (SQUARE,)

    def plain(x, delta):
        return [jnp.einsum("bstm,bstn->smn", x, delta, preferred_element_type=jnp.float32)]

    out = {"plain": (plain, (IDENTITY,))}
    for kernel in kernels:
        if kernel == "xla":
            out["xla, 8 at a time"] = (functools.partial(batched_contraction, phis=phis), phis)
            out["xla, at once"] = (functools.partial(batched_contraction, phis=phis, chunk=dims[0]), phis)
            continue
        contraction = importlib.import_module(f"pergrad.kernels.{kernel}").contraction
        for cut in candidates(kernel, dims, dtype, outputs):
            sizes = ", ".join(f"{k} {v}" for k, v in vars(cut).items())
            out[f"{kernel}: {sizes}"] = (functools.partial(contraction, phis=phis, blocks=cut), phis)
    return out


def inputs(dims, dtype, seed):
    import jax
    import numpy as np

    b, t, m, n = dims
    random = np.random.default_rng(seed)
    draw = lambda side: jax.numpy.asarray(random.standard_normal((b, 1, t, side), np.float32) / t**0.25, dtype)
    return draw(m), draw(n)


def poison(results):
    """Fill as much memory as the results take with NaN, and free it: what allocates next gets it."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready([jnp.full(r.shape, jnp.nan, r.dtype) for r in jax.tree.leaves(results)])


def worst_error(fn, phis, dims, dtype, seed):
    """‖out − ref‖ / ‖ref‖ of the worst statistic, over all of some rows and all of some columns; NaN never passes."""
    import jax
    import numpy as np

    x, delta = inputs(dims, dtype, seed)
    poison(fn.out_info)
    got = [np.asarray(r, np.float64)[0] for r in fn(x, delta)]
    _, _, m, n = dims
    random = np.random.default_rng(seed)
    rows, columns = (np.unique([0, size - 1, *random.integers(0, size, 14)]) for size in (m, n))
    x, delta = (np.asarray(a[:, 0].astype("float32"), np.float64) for a in (x, delta))
    errors = [0.0 if all(np.isfinite(r).all() for r in got) else float("nan")]
    for here, a, d in (((rows, slice(None)), x[:, :, rows], delta), ((slice(None), columns), x, delta[:, :, columns])):
        sums = [0.0] * len(phis)
        for one, other in zip(a, d, strict=True):  # example by example: the host need not hold them all
            g = one.T @ other
            with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
                sums = [total + np.asarray(phi(jax.numpy.asarray(g))) for total, phi in zip(sums, phis, strict=True)]
        errors += [float(np.linalg.norm(r[here] - w) / np.linalg.norm(w)) for r, w in zip(got, sums, strict=True)]
    return float(np.max(errors))


def measure(dims, dtype, outputs, kernels, rounds, sets, first):
    """One entry per variant; what fails says how."""
    import jax

    built, entries, seen = {}, {}, set()
    for seed, (name, (fn, phis)) in enumerate(variants(dims, dtype, outputs, kernels).items()):
        kernel = name.split(":")[0]
        if first and kernel in seen:
            continue
        seen.add(kernel)
        entry = entries[name] = {"kernel": kernel}
        try:
            x, delta = inputs(dims, dtype, seed)
            start = time.perf_counter()
            compiled = jax.jit(fn).lower(x, delta).compile()
            entry["compile_seconds"] = time.perf_counter() - start
            entry["temporary_bytes"] = int(compiled.memory_analysis().temp_size_in_bytes)
            entry["error"] = worst_error(compiled, phis, dims, dtype, 1000 * outputs + seed)
        except Exception as error:
            entry["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
            continue
        built[name] = compiled
    if "plain" not in built:
        return entries

    given = [inputs(dims, dtype, 10_000 + k) for k in range(sets)]
    seconds = {name: [] for name in built}
    for fn in built.values():
        jax.block_until_ready([fn(*args) for args in given])
    names = list(built)
    for r in range(rounds):
        for name in names[r % len(names) :] + names[: r % len(names)]:
            start = time.perf_counter()
            jax.block_until_ready([built[name](*args) for args in given])
            seconds[name].append((time.perf_counter() - start) / sets)
    for name, values in seconds.items():
        ratios = [v / p for v, p in zip(values, seconds["plain"], strict=True)]
        quartiles = lambda a: dict(zip(("q1", "median", "q3"), statistics.quantiles(a, n=4, method="inclusive")))
        entries[name] |= {"seconds": quartiles(values), "ratio": quartiles(ratios), "raw_seconds": values}
    return entries


def show(dims, dtype, outputs, entries):
    b, t, m, n = dims
    print(f"\nB {b}, K {t}, M {m}, N {n}, {dtype}, {outputs} statistic{'s' * (outputs > 1)}")
    for name, e in entries.items():
        if "failed" in e:
            print(f"  {name:<48} failed: {e['failed']}")
            continue
        time, ratio = 1e3 * e["seconds"]["median"], e["ratio"]
        rate = 2 * b * t * m * n / e["seconds"]["median"] / 1e12
        spread = f"{ratio['q1']:.2f}–{ratio['q3']:.2f}"
        print(
            f"  {name:<48} {time:9.3f} ms  {rate:7.1f} TFLOP/s  {ratio['median']:6.2f} × ({spread})  error {e['error']:.1e}"
        )


def main():
    options = arguments()
    import jax

    platform = jax.default_backend()
    shapes = SHAPES.get(platform, SHAPES["cpu"])
    if options.only:
        shapes = [tuple(map(int, s.split("x"))) for s in options.only.split(",")]
    kernels = ["xla"]
    if platform == "gpu":
        kernels += ["triton"] + ["mosaic"] * (getattr(jax.devices()[0], "compute_capability", "") == "9.0")
    if options.kernels:
        kernels = options.kernels.split(",")
    device = jax.devices()[0]
    print(f"{device.device_kind}, JAX {jax.__version__}")
    results = []
    for dims in shapes:
        for outputs in map(int, options.statistics.split(",")):
            entries = measure(dims, options.dtype, outputs, kernels, options.rounds, options.sets, options.first)
            show(dims, options.dtype, outputs, entries)
            results.append({"dims": dims, "dtype": options.dtype, "statistics": outputs, "variants": entries})
    if options.out:
        record = {
            "device": device.device_kind,
            "jax": jax.__version__,
            "settings": {k: v for k, v in vars(options).items() if k != "out"},
            "results": results,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"\nwritten: {options.out}")
    # Sums are in float32, products of 16-bit operands exact; float32 operands may be rounded to 10 bits of mantissa.
    most = 3e-3 if options.dtype == "float32" else 1e-3
    wrong = [n for r in results for n, e in r["variants"].items() if "error" in e and not e["error"] < most]
    if wrong:
        raise SystemExit(f"WRONG NUMBERS: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
