"""Bytes that one call of a function takes at its peak, in PyTorch."""

import torch
from torch.profiler import ProfilerActivity, profile


def measure(run, device: str):
    """The results of a call (not the first one), and its bytes as XLA counts them: results apart from the rest of the peak.

    What a library keeps between calls is in neither.
    """
    if device == "cpu":
        # Only the profiler sees what is allocated on a CPU: a signed number of bytes each time.
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            results = run()
        peak = level = 0
        events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
        for event in sorted(events, key=lambda e: e.start_ns()):
            level += event.nbytes()
            peak = max(peak, level)
    else:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = run()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    _, found = results
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in _tensors(results)}
    return found, {"temporary": peak - sum(kept.values()), "results": sum(kept.values())}


def _tensors(tree):
    if isinstance(tree, torch.Tensor):
        yield tree
    else:
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _tensors(part)
