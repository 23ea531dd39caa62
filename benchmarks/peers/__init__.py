"""The same models in PyTorch, under what its users have for per-example gradients; in a process of its own.

This file knows neither PyTorch nor JAX: it starts `python -m benchmarks.peers` and hands back what that finds.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(python: str | None, rows: list[dict], device: str, repeats: int) -> dict:
    """The record of the peers, or why there is none. `python` has PyTorch; without it, this Python, if it has."""
    if python is None and importlib.util.find_spec("torch") is None:
        return {"skipped": "PyTorch is not installed here: see benchmarks/README.md"}
    order = json.dumps({"rows": rows, "device": device, "repeats": repeats})
    command = (python or sys.executable, "-m", "benchmarks.peers")
    # PyTorch's profiler, which sees the memory, is talkative.
    environment = os.environ | {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, input=order, stdout=subprocess.PIPE, text=True, check=True, env=environment
        )
    except (OSError, subprocess.CalledProcessError) as error:
        status = getattr(error, "returncode", None)
        return {"skipped": f"the process of the peers failed: {type(error).__name__}, exit status {status}"}
    return json.loads(done.stdout.splitlines()[-1])
