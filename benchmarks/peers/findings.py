"""Cases in which a library gives wrong numbers without a word, each tried again in every run.

A finding compares what a library says with the gradients of one example after the other, in a model as small as the case
allows. `run()` gives a list of records; what could not be tried says why.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..timing import describe
from . import columns

FINDINGS: dict[str, tuple[str, Callable]] = {}


def finding(what, statistic):
    def register(case):
        FINDINGS[what] = statistic, case
        return case

    return register


def run() -> list[dict]:
    out = []
    for what, (statistic, case) in FINDINGS.items():
        torch.manual_seed(0)
        try:
            found, truth = case()
            error = float((found - truth).abs().max() / truth.abs().max())
            out.append({"what": what, "statistic": statistic, "relative_error": error, "wrong": not error < 1e-3})
        except Exception as error:
            out.append({"what": what, "statistic": statistic, "error": describe(error)})
    return out


class Tied(nn.Module):
    """One matrix in two layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight

    def forward(self, batch):
        return self.second(torch.tanh(self.first(batch["x"]))).square().mean(-1)


class Places(nn.Module):
    """Positions looked up once, as [1, T], for all examples."""

    def __init__(self):
        super().__init__()
        self.positions, self.out = nn.Embedding(3, 4), nn.Linear(4, 2)

    def forward(self, batch):
        h = batch["x"] + self.positions(torch.arange(3)[None])
        return self.out(torch.tanh(h)).square().mean((1, 2))


class Started(nn.Module):
    """An LSTM that goes on from the state of another's, as decoders do."""

    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2)

    def forward(self, batch):
        h, _ = self.lstm(batch["x"], (batch["h"][None], batch["c"][None]))
        return self.out(h).square().mean((1, 2))


class Scores(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 5)

    def forward(self, batch):
        return F.cross_entropy(self.out(batch["x"]), batch["label"], reduction="none")


def _compared(column, model, batch, name, kind="g2"):
    truth, _ = columns.one_by_one(model, batch)
    _, out = columns.COLUMNS[column](model, batch)()
    return out[kind][name], truth[kind][name]


@finding("BackPACK SumGradSquared: a weight in two layers", "second moment")
def tied_sum_grad_squared():
    return _compared("BackPACK SumGradSquared", Tied(), {"x": torch.randn(6, 4)}, "first.weight")


@finding("BackPACK BatchGrad: a weight in two layers", "second moment")
def tied_batch_grad():
    return _compared("BackPACK BatchGrad", Tied(), {"x": torch.randn(6, 4)}, "first.weight")


@finding("Opacus: a weight in two layers", "second moment")
def tied_opacus():
    return _compared("Opacus", Tied(), {"x": torch.randn(6, 4)}, "first.weight")


@finding("Opacus: positions looked up as [1, T]", "second moment")
def places_opacus():
    return _compared("Opacus", Places(), {"x": torch.randn(6, 3, 4)}, "positions.weight")


@finding("Opacus ghost clipping: positions looked up as [1, T]", "clipped mean")
def places_ghost():
    return _compared("Opacus ghost", Places(), {"x": torch.randn(6, 3, 4)}, "positions.weight", "clipped")


@finding("BackPACK SumGradSquared: positions looked up as [1, T]", "second moment")
def places_sum_grad_squared():
    return _compared("BackPACK SumGradSquared", Places(), {"x": torch.randn(6, 3, 4)}, "positions.weight")


@finding("BackPACK SumGradSquared: an LSTM that goes on from a given state", "second moment")
def started_sum_grad_squared():
    batch = {"x": torch.randn(6, 3, 4), "h": torch.randn(6, 4), "c": torch.randn(6, 4)}
    return _compared("BackPACK SumGradSquared", Started(), batch, "lstm.weight_hh_l0")


def _padded():
    """Six examples, two of which only fill the batch up: the loss leaves them out, as `ignore_index` does."""
    label = torch.tensor([0, 1, 2, 3, -100, -100])
    return Scores(), {"x": torch.randn(6, 4), "label": label}, label >= 0


@finding("Opacus: examples that only fill the batch up, mean loss over the others", "second moment")
def padded_opacus():
    model, batch, counts = _padded()
    truth, _ = columns.one_by_one(model, {name: x[counts] for name, x in batch.items()})

    class Mean(nn.Module):  # the loss of PyTorch's users: the mean over the examples that count
        def __init__(self):
            super().__init__()
            self.out = model.out

        def forward(self, batch):
            return F.cross_entropy(self.out(batch["x"]), batch["label"])

    _, out = columns.COLUMNS["Opacus"](Mean(), batch)()
    return out["g2"]["out.weight"], truth["g2"]["out.weight"]
