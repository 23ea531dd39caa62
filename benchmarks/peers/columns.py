"""The columns of PyTorch's side: what its users have for statistics of per-example gradients.

A column makes a function `() -> (value, results)` out of a model and a batch; `results` holds under "g", "g2" and
"clipped" a tensor for each parameter's name. Every column gets a copy of the model, since libraries attach hooks to it.
"""

import copy
import functools
from collections.abc import Callable

import torch
from torch.func import functional_call, grad_and_value, vmap

COLUMNS: dict[str, Callable] = {}
PLAIN = "plain"


def column(name):
    def register(make):
        COLUMNS[name] = lambda model, batch: make(copy.deepcopy(model), batch)
        return make

    return register


def named(model, attribute, reduce=lambda x: x) -> dict[str, torch.Tensor]:
    """`reduce` of an attribute of every parameter, under the parameter's name in the model as it was written."""
    lacking = {
        type(module).__name__
        for module in model.modules()
        for p in module.parameters(recurse=False)
        if getattr(p, attribute, None) is None
    }
    if lacking:
        raise NotImplementedError(f"no {attribute} for the parameters of {', '.join(sorted(lacking))}")
    parameters = model.named_parameters()
    return {name.removeprefix("_module."): reduce(getattr(p, attribute)) for name, p in parameters}


def forget(model, *attributes):
    """Lets go of what a library left on the parameters, and of it alone: results still refer to it."""
    for p in model.parameters():
        for name in attributes:
            if hasattr(p, name):
                setattr(p, name, None)


@column(PLAIN)
def plain(model, batch):
    names, params = zip(*model.named_parameters())

    def run():
        value = model(batch).mean()
        return value.detach(), {"g": dict(zip(names, torch.autograd.grad(value, params)))}

    return run


@column("torch.func")
def stacked(model, batch):
    params = {name: p.detach() for name, p in model.named_parameters()}

    def loss(params, example):
        return functional_call(model, params, ({name: x[None] for name, x in example.items()},)).sum()

    each = vmap(grad_and_value(loss), in_dims=(None, 0))

    def run():
        g, losses = each(params, batch)
        out = {"g": {n: a.mean(0) for n, a in g.items()}, "g2": {n: a.square().mean(0) for n, a in g.items()}}
        return losses.mean(), out

    return run


def prepared_for_opacus(model):
    """What Opacus tells its users to do first: exchange the layers that it has a version of its own for."""
    from opacus.validators import ModuleValidator

    return model if ModuleValidator.is_valid(model) else ModuleValidator.fix(model)


@column("Opacus")
def opacus(model, batch):
    from opacus import GradSampleModule

    model = GradSampleModule(prepared_for_opacus(model))

    def run():
        value = model(batch).mean()
        value.backward()
        out = {"g": named(model, "grad"), "g2": named(model, "grad_sample", lambda g: g.square().mean(0))}
        forget(model, "grad", "grad_sample")
        return value.detach(), out

    return run


@column("Opacus ghost")
def ghost(model, batch):
    """Gradients clipped to a norm of 1 and averaged, with norms that need no gradients, by two backward passes."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    size = len(next(iter(batch.values())))
    model = GradSampleModuleFastGradientClipping(prepared_for_opacus(model), max_grad_norm=1.0)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(model.parameters(), lr=0.0), noise_multiplier=0.0, max_grad_norm=1.0, expected_batch_size=size
    )
    # It calls this with what one would give to a loss function, and expects a loss per example.
    criterion = DPLossFastGradientClipping(model, optimizer, _PerExample())

    def run():
        model.enable_hooks()
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(batch), None)
        loss.backward()
        value, out = loss.detach(), {"clipped": named(model, "grad", lambda g: g / size)}
        return value, out

    return run


class _PerExample(torch.nn.Module):
    reduction = "mean"

    def forward(self, losses, target):
        return losses


def backpack_column(extension, attribute, reduce):
    def make(model, batch):
        import backpack
        from backpack import extensions

        model = backpack.extend(model)
        size = len(next(iter(batch.values())))

        def run():
            with backpack.backpack(getattr(extensions, extension)()):
                value = model(batch).mean()
                value.backward()
            out = {"g": named(model, "grad"), "g2": named(model, attribute, functools.partial(reduce, size))}
            forget(model, "grad", attribute)
            return value.detach(), out

        return run

    return make


# Both are of the summands of the loss, g/B.
column("BackPACK SumGradSquared")(backpack_column("SumGradSquared", "sum_grad_squared", lambda size, s: s * size))
column("BackPACK BatchGrad")(backpack_column("BatchGrad", "grad_batch", lambda size, g: g.square().sum(0) * size))


def one_by_one(model, batch):
    """The obviously correct twin: the gradients of one example after the other."""
    names, params = zip(*model.named_parameters())
    size = len(next(iter(batch.values())))
    out = {kind: {n: torch.zeros_like(p) for n, p in zip(names, params)} for kind in ("g", "g2", "clipped")}
    norms = []
    for i in range(size):
        value = model({name: x[i : i + 1] for name, x in batch.items()}).sum()
        gradients = torch.autograd.grad(value, params)
        norms.append(torch.sqrt(sum(g.square().sum() for g in gradients)))
        for name, g in zip(names, gradients):
            out["g"][name] += g / size
            out["g2"][name] += g.square() / size
            out["clipped"][name] += g / size / norms[-1].clamp(min=1)
    return out, torch.stack(norms)
