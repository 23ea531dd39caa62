"""`python -m benchmarks.peers`: reads which rows to measure from its input, and writes one line of JSON."""

import contextlib
import importlib.metadata
import json
import platform
import sys
import warnings

import torch

from .. import timing
from . import columns, findings, memory, models

LIMITS = {"float32": 1e-3, "bfloat16": 5e-2}


def measure_row(row, device, repeats):
    model, batch = models.build(row["family"], row["settings"], device)
    made, out = {}, {}
    for name, make in columns.COLUMNS.items():
        try:
            made[name] = make(model, batch)
        except Exception as error:
            out[name] = {"error": timing.describe(error)}
    finish = torch.cuda.synchronize if device == "cuda" else lambda: None
    seconds, errors = timing.run_all({n: lambda f=f: (f(), finish()) for n, f in made.items()}, repeats)
    for name, error in errors.items():
        out[name] = {"error": error}
    truth, _ = columns.one_by_one(model, batch)
    agreement = {}
    for name in seconds:
        found, taken = memory.measure(made[name], device)
        out[name] = {"seconds": timing.summary(seconds[name]), "memory": taken, "raw": {"seconds": seconds[name]}}
        agreement[name] = compare(found, truth, LIMITS[row["settings"]["dtype"]])
    out = {name: out[name] for name in columns.COLUMNS}
    timing.add_ratios(out)
    return {
        "row": row["row"],
        "batch_size": row["settings"]["batch"],
        "settings": row["settings"],
        "parameters": sum(p.numel() for p in model.parameters()),
        "columns": out,
        "agreement": agreement,
    }


def compare(results, truth, limit):
    """The largest error of any parameter, relative to its largest entry, against one example after the other."""
    errors = {
        kind: max(
            float((a - truth[kind][name]).abs().max() / truth[kind][name].abs().max().clamp(min=1e-30))
            for name, a in tensors.items()
        )
        for kind, tensors in results.items()
    }
    return {"errors": errors, "limit": limit, "agrees": all(e <= limit for e in errors.values())}


def main():
    order = json.load(sys.stdin)
    device = {"cpu": "cpu", "gpu": "cuda"}[order["device"]]
    warnings.filterwarnings("ignore")
    rows = []
    with contextlib.redirect_stdout(sys.stderr):  # what libraries print is no part of the record
        for i, row in enumerate(order["rows"]):
            print(f"[{i + 1}/{len(order['rows'])}] {row['row']} in PyTorch …", flush=True)
            try:
                rows.append(measure_row(row, device, order["repeats"]))
            except Exception as error:
                rows.append({"row": row["row"], "error": timing.describe(error)})
        found = findings.run()
    versions = {"python": platform.python_version()}
    for name in ("torch", "opacus", "backpack-for-pytorch"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    record = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": versions,
        "rows": rows,
        "findings": found,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
