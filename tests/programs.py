"""Random programs: losses of small random models, drawn by hypothesis as the text of a Python script.

`programs()` draws a `Program`. It *is* its text: what a failing test prints can be pasted into a file and run. A
program consists of steps on one activation `h`, some of which hold bodies with steps of their own (scan, cond,
checkpoint, …), and of weights: expressions over a pool of parameters that is reused all the time, since shared
parameters are where per-example statistics are hard. Everything is tiny, smooth and of order one.

To add a step or a way to write a weight, write one method with its decorator; it returns False (a weight: None)
where it does not apply. Draw the simpler alternative first: that is where hypothesis shrinks to.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import textwrap
from typing import Any

from hypothesis import strategies as st

# What the text of a program may use besides the imports: the ones it mentions are printed with it.
HELPERS = {
    "custom_dense": """
        @jax.custom_vjp
        def custom_dense(h, w):
            return h @ w
        def forward(h, w):
            return h @ w, (h, w)
        def backward(saved, d):
            h, w = saved
            return d @ w.T, 0.5 * jnp.tensordot(h, d, ([*range(h.ndim - 1)],) * 2)
        custom_dense.defvjp(forward, backward)""",
    "half_gradient": """
        @jax.custom_vjp
        def half_gradient(h):
            return h
        half_gradient.defvjp(lambda h: (h, None), lambda _, d: (0.5 * d,))""",
    "custom_tanh": """
        @jax.custom_jvp
        def custom_tanh(h):
            return jnp.tanh(h)
        @custom_tanh.defjvp
        def tangent(h, dh):
            y = custom_tanh(*h)
            return y, (1 - y * y) * dh[0]""",
}

FAMILIES = ("dense", "weights", "indexing", "conv", "control", "loops", "calculus", "anything")


@dataclasses.dataclass(frozen=True)
class Program:
    """A loss with its parameters and batch. `low`: it computes in bfloat16 somewhere, so compare loosely."""

    text: str
    keep_batch_dim: bool
    has_aux: bool
    wide: bool  # float64
    low: bool

    def __repr__(self):
        return f"a program, run with keep_batch_dim={self.keep_batch_dim}, has_aux={self.has_aux}:\n\n{self.text}\n"

    def _repr_pretty_(self, printer, cycle):  # what hypothesis prints
        printer.text(repr(self))

    def build(self):
        """(loss, params, batch), in the float type that the program wants; run it under `jax.enable_x64(wide)`."""
        space: dict[str, Any] = {}
        exec(compile(self.text, "<program>", "exec"), space)
        return space["loss"], space["p"], space["batch"]


# ---------------------------------------------------------------------------------------- drawing

STEPS: dict[str, list[str]] = {family: [] for family in FAMILIES}
WEIGHTS: list[str] = []


def step(*families: str):
    def register(method):
        for family in dict.fromkeys((*families, "anything")):
            STEPS[family].append(method.__name__)
        return method

    return register


def way(method):
    WEIGHTS.append(method.__name__)
    return method


def size_of(shape) -> int:
    return math.prod(shape)


@dataclasses.dataclass
class Frame:
    """One function body that is being written."""

    shape: tuple[int, ...]  # of h
    lines: list[str] = dataclasses.field(default_factory=list)
    sources: list[tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=list)  # weights by name
    stacked: int = 0  # steps of the loop whose xs may hold this body's weights
    xs: list[str] = dataclasses.field(default_factory=list)  # these, written for the enclosing body
    names: list[str] = dataclasses.field(default_factory=list)
    indices: list[str] = dataclasses.field(default_factory=list)  # traced integers


class Author:
    """Writes one program."""

    def __init__(self, random, family: str):
        self.random, self.family = random, family
        self.params: dict[str, tuple[int, ...]] = {}
        self.frames: list[Frame] = []
        self.steps_left = 7
        self.weights_left = 14
        self.low = False
        self.order = 0  # of the derivatives around what is being written: compile time doubles or triples with each
        self.tokens: tuple[int, ...] = ()
        self._names = iter(f"{c}{n or ''}" for n in range(99) for c in "abcdefg")
        self._counter = iter(range(1, 999))

    # Choices, which shrink to the first: ----------------------------------------------------

    def pick(self, options):
        return self.random.choice(list(options))

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def chance(self, one_in: int) -> bool:
        return self.number(1, one_in) == one_in

    def dim(self) -> int:
        return self.pick([2, 3, 1, 4])

    # Writing: -------------------------------------------------------------------------------

    @property
    def frame(self) -> Frame:
        return self.frames[-1]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.frame.shape

    def name(self, letter: str) -> str:
        return f"{letter}{next(self._counter)}"

    def line(self, text: str):
        self.frame.lines.append(text)

    def set(self, text: str, shape):
        """h = text, of this shape."""
        self.frame.shape = tuple(shape)
        self.line(f"h = {text}  # {list(shape)}")

    def define(self, head: str, frame: Frame, returned: str, before=()):
        self.line(head)
        for text in (*before, *frame.lines, f"return {returned}"):
            self.line("    " + text)

    def body(self, shape, keep: bool, steps: int = 2, order: int = 0, **options) -> Frame:
        """Steps of a function of h that is differentiated `order` times; `keep`: its result has h's shape."""
        frame = Frame(tuple(shape), **options)
        self.frames.append(frame)
        self.order += order
        self.steps(steps)
        self.order -= order
        if keep and frame.shape != tuple(shape):
            self.coerce(shape)
        self.frames.pop()
        return frame

    def steps(self, most: int):
        for n in range(most):
            if self.steps_left <= 0 or (n > 0 and self.number(0, 3) == 0):
                return
            self.steps_left -= 1
            self.one_step()

    def one_step(self):
        names = STEPS[self.family if self.chance(2) else "anything"] if self.frames[1:] else STEPS[self.family]
        if not getattr(self, self.pick(names))():
            self.nonlinearity()

    def coerce(self, shape):
        """Whatever h is, bring it to this shape."""
        before, after = size_of(self.shape), size_of(shape)
        if self.shape == tuple(shape):
            return
        if before * after < 100:
            self.set(f"jnp.tanh(h.reshape({before}) @ {self.weight((before, after))}).reshape({tuple(shape)})", shape)
        else:
            self.set(f"jnp.mean(h) + jnp.zeros({tuple(shape)})", shape)

    # Weights: -------------------------------------------------------------------------------

    def visible(self):
        yield from ((f'p["{k}"]', s) for k, s in self.params.items())
        for frame in self.frames:
            yield from frame.sources

    def weight(self, shape, depth: int = 0) -> str:
        """An expression of this shape over the parameters."""
        shape = tuple(shape)
        self.weights_left -= 1
        again = self.reuses(shape)
        if again and self.chance(2):
            return self.pick(again)
        plain = self.number(0, 2 if self.family == "weights" else 3) < 1 + depth
        if not plain and depth < 2 and self.weights_left > 0:
            made = getattr(self, self.pick(WEIGHTS))(shape, functools.partial(self.weight, depth=depth + 1))
            if made is not None:
                return self.named(made, shape)
        return self.fresh(shape)

    def named(self, text: str, shape):
        """Sometimes under a name, for others to use again."""
        if not self.chance(3):
            return text
        name = self.name("w")
        self.line(f"{name} = {text}")
        self.frame.sources.append((name, shape))
        return name

    def fresh(self, shape) -> str:
        frame = self.frame
        if frame.stacked and not self.chance(3):
            # A weight of the loop's own: one of its xs, written where the loop is called.
            inside, self.frames = self.frames, self.frames[:-1]
            outer = self.weight((frame.stacked, *shape), depth=1)
            self.frames = inside
            name = self.name("q")
            frame.xs.append(outer)
            frame.names.append(name)
            frame.sources.append((name, shape))
            return name
        name = next(self._names)
        self.params[name] = shape
        return f'p["{name}"]'

    def reuses(self, shape) -> list[str]:
        """Ways to make this shape out of what there is."""
        out = []
        for text, s in self.visible():
            if s == shape:
                out += [text]
            elif s == shape[::-1]:
                out += [f"{text}.T"]
            elif size_of(s) == size_of(shape):
                out += [f"{text}.reshape({shape})"]
            elif len(s) == len(shape) and shape and all(a >= b for a, b in zip(s, shape)):
                starts = [self.number(0, a - b) for a, b in zip(s, shape)] if self.family == "weights" else [0] * len(s)
                out += [f"{text}[{', '.join(f'{i}:{i + n}' for i, n in zip(starts, shape))}]"]
            elif s[1:] == shape and s[0] > 0:
                out += [f"{text}[{self.number(0, s[0] - 1)}]", f"{text}[{self.index()}]"]
            elif s == shape[1:]:
                out += [f"jnp.broadcast_to({text}, {shape})"]
        return out

    def index(self) -> str:
        """A traced integer: of the example, or of a loop."""
        return self.pick(["k", *(n for f in self.frames for n in f.indices)])

    def flags(self, shape) -> str:
        """A constant mask."""
        n = size_of(shape)
        bits = [self.number(0, 1) for _ in range(n)] if n <= 8 else [(j * 7 % 5) % 2 for j in range(n)]
        return f"np.array({bits}).reshape({tuple(shape)})"

    @way
    def transposed(self, shape, w):
        return f"{w(shape[::-1])}.T"

    @way
    def permuted(self, shape, w):
        if len(shape) >= 2:
            return f"jnp.swapaxes({w((*shape[:-2], shape[-1], shape[-2]))}, -1, -2)"

    @way
    def reshaped(self, shape, w):
        return f"{w((size_of(shape),))}.reshape({shape})"

    @way
    def sliced(self, shape, w):
        if shape:
            low, high = self.number(0, 1), self.number(0, 1)
            whole = w((shape[0] + low + high, *shape[1:]))
            return f"{whole}[{low}:{low + shape[0]}]"

    @way
    def strided(self, shape, w):
        if shape:
            return f"{w((*shape[:-1], 2 * shape[-1]))}[..., ::2]"

    @way
    def concatenated(self, shape, w):
        if shape and shape[0] >= 2:
            first = self.number(1, shape[0] - 1)
            return f"jnp.concatenate([{w((first, *shape[1:]))}, {w((shape[0] - first, *shape[1:]))}])"

    @way
    def stacked(self, shape, w):
        if shape and 0 < shape[0] <= 3:
            return f"jnp.stack([{', '.join(w(shape[1:]) for _ in range(shape[0]))}])"

    @way
    def padded(self, shape, w):
        if shape and shape[-1] >= 2:
            low = self.number(0, 1)
            pads = [(0, 0)] * (len(shape) - 1) + [(low, 1 - low)]
            return f"jnp.pad({w((*shape[:-1], shape[-1] - 1))}, {pads})"

    @way
    def flipped(self, shape, w):
        if shape:
            return f"{w(shape)}[::-1]"

    @way
    def rolled(self, shape, w):
        if shape:
            return f"jnp.roll({w(shape)}, 1, {self.number(0, len(shape) - 1)})"

    @way
    def added(self, shape, w):
        return f"({w(shape)} + {w(shape)})"

    @way
    def subtracted(self, shape, w):
        return f"({w(shape)} - {w(shape)})"

    @way
    def multiplied(self, shape, w):
        return f"({w(shape)} * {w(shape)})"

    @way
    def times_constant(self, shape, w):
        return self.pick(["(0.5 * {})", "(-{})", "({} / 3.0)"]).format(w(shape))

    @way
    def times_scalar(self, shape, w):
        return self.pick(["({} * {})", "({1} / (2 + {0} ** 2))"]).format(w(()), w(shape))

    @way
    def masked(self, shape, w):
        return f"({w(shape)} * {self.flags(shape)})"

    @way
    def selected(self, shape, w):
        condition = self.pick([self.flags(shape), "k % 2 == 0"])
        return f"jnp.where({condition}, {w(shape)}, {w(shape)})"

    @way
    def rounded(self, shape, w):
        self.low = True
        return f"{w(shape)}.astype(jnp.bfloat16).astype(F)"

    @way
    def product_of_two(self, shape, w):
        if len(shape) == 2:
            rank = self.number(1, 2)
            return f"({w((shape[0], rank))} @ {w((rank, shape[1]))})"

    @way
    def outer_product(self, shape, w):
        if len(shape) == 2:
            return f"({w((shape[0], 1))} * {w((shape[1],))})"

    @way
    def broadcast(self, shape, w):
        if len(shape) >= 2:
            return f"jnp.broadcast_to({w((shape[0],) + (1,) * (len(shape) - 1))}, {shape})"

    @way
    def tiled(self, shape, w):
        if shape and shape[0] % 2 == 0:
            half = (shape[0] // 2, *shape[1:])
            return f"jnp.concatenate([{w(half)}] * 2)"

    @way
    def gathered(self, shape, w):
        if shape:
            height = self.number(1, 4)
            rows = [self.number(-height, height - 1) for _ in range(shape[0])]
            return f"{w((height, *shape[1:]))}[np.array({rows})]"

    @way
    def chosen_by_index(self, shape, w):
        how = self.pick(["{}[{}]", "lax.dynamic_index_in_dim({}, {}, 0, False)"])
        return how.format(w((self.number(1, 3), *shape)), self.index())

    @way
    def window_by_index(self, shape, w):
        if shape:
            whole = w((*shape[:-1], shape[-1] + self.number(0, 2)))
            return f"lax.dynamic_slice_in_dim({whole}, {self.index()}, {shape[-1]}, {len(shape) - 1})"

    @way
    def updated(self, shape, w):
        if shape and shape[0] >= 2:
            how = self.pick(["add", "set", "multiply"])
            return f"{w(shape)}.at[{self.number(0, shape[0] - 1)}].{how}({w(shape[1:])})"

    @way
    def written_by_index(self, shape, w):
        if shape:
            return f"lax.dynamic_update_index_in_dim({w(shape)}, {w(shape[1:])}, {self.index()}, 0)"

    @way
    def squashed(self, shape, w):
        return f"{self.pick(['jnp.tanh', 'jnp.sin', 'jax.nn.softplus'])}({w(shape)})"

    @way
    def normalised(self, shape, w):
        text = w(shape)
        return f"({text} / jnp.sqrt(1 + jnp.sum({text} ** 2)))"

    @way
    def stopped(self, shape, w):
        return self.pick(["({} + lax.stop_gradient({}))", "({} * lax.stop_gradient({}))"]).format(w(shape), w(shape))

    @way
    def summed_along(self, shape, w):
        if shape:
            return f"jnp.cumsum({w(shape)}, {self.number(0, len(shape) - 1)})"

    @way
    def triangular(self, shape, w):
        if len(shape) == 2:
            return f"jnp.{self.pick(['tril', 'triu'])}({w(shape)})"

    @way
    def symmetric(self, shape, w):
        if len(shape) == 2 and shape[0] == shape[1]:
            text = w(shape)
            return f"({text} + {text}.T)"

    @way
    def averaged(self, shape, w):
        return f"{w((self.number(1, 3), *shape))}.{self.pick(['sum', 'mean'])}(0)"

    @way
    def scaled_by_example(self, shape, w):
        return f"({w(shape)} * jnp.tanh(1 + jnp.mean(h)))"

    @way
    def rematerialised(self, shape, w):
        return f"jax.checkpoint(lambda w: jnp.sin(w) + w)({w(shape)})"

    # Steps: ---------------------------------------------------------------------------------

    @step(*FAMILIES)
    def nonlinearity(self):
        how = self.pick(
            ["jnp.tanh(h)", "jnp.sin(h)", "jax.nn.gelu(h)", "jax.nn.sigmoid(h)", "custom_tanh(h)", "half_gradient(h)"]
        )
        self.set(how, self.shape)
        return True

    @step(*FAMILIES)
    def dense(self):
        if not self.shape:
            return False
        *rest, m = self.shape
        n = self.dim()
        how = self.pick(["plain", "transposed", "einsum", "left", "custom", "vectorised"])
        if how == "plain":
            text = f"h @ {self.weight((m, n))}"
        elif how == "transposed":
            text = f"h @ {self.weight((n, m))}.T"
        elif how == "einsum":
            text = f'jnp.einsum("...m,mn->...n", h, {self.weight((m, n))})'
        elif how == "left":
            text = f"jnp.tensordot({self.weight((n, m))}, h, (1, {len(rest)}))"
            rest, n = [n, *rest[:-1]] if rest else [], rest[-1] if rest else n
        elif how == "custom":
            text = f"custom_dense(h, {self.weight((m, n))})"
        else:
            text = f"jnp.sum(h[..., None] * {self.weight((m, n))}, -2)"
        shape = (*rest, n)
        self.set(f"jnp.tanh({text})" if not self.chance(3) else text, shape)
        return True

    @step("dense", "weights")
    def einsum(self):
        if len(self.shape) not in (2, 3):
            return False
        sizes = dict(zip("abc", self.shape)) | {"m": self.dim(), "n": self.number(1, 2)}
        specs = {
            2: [
                "ab,abm->m",
                "ab,abm->am",
                "ab,bmn->amn",
                "ab,am->mb",
                "ab,amb->bm",
                "ab,ab->ba",
                "ab,b->a",
                "ab,ma->bm",
            ],
            3: ["abc,bcm->am", "abc,acm->abm", "abc,bm->amc", "abc,abc->ac", "abc,mca->bm", "abc,cm->mab"],
        }
        spec = self.pick(specs[len(self.shape)])
        operands, out = spec.split("->")
        kernel = operands.split(",")[1]
        text = f'jnp.einsum("{spec}", h, {self.weight([sizes[c] for c in kernel])})'
        self.set(f"jnp.tanh({text})", [sizes[c] for c in out])
        return True

    def beside(self) -> tuple[int, ...]:
        """A shape that broadcasts against h."""
        s = self.shape
        return self.pick([s[-1:], s, (), (*s[:-1], 1) if s else (), s[1:]])

    @step("dense", "weights", "control")
    def bias(self):
        self.set(f"h + {self.weight(self.beside())}", self.shape)
        return True

    @step("dense", "weights")
    def scale(self):
        self.set(f"h * {self.weight(self.beside())}", self.shape)
        return True

    @step("dense")
    def layer_norm(self):
        if not self.shape:
            return False
        gain = self.weight(self.shape[-1:])
        centre = self.pick(["h - h.mean(-1, keepdims=True)", "h"])
        self.line(f"h = {centre}")
        self.set(f"h / jnp.sqrt(0.3 + (h * h).mean(-1, keepdims=True)) * (1 + {gain})", self.shape)
        return True

    @step("dense")
    def gated(self):
        if not self.shape:
            return False
        m = self.shape[-1]
        self.set(f"jax.nn.sigmoid(h @ {self.weight((m, m))}) * jnp.tanh(h @ {self.weight((m, m))})", self.shape)
        return True

    @step("dense", "loops")
    def attention(self):
        if len(self.shape) != 2:
            return False
        t, m = self.shape
        n = self.number(1, 3)
        q, k, v = (f"h @ {self.weight((m, n))}" for _ in range(3))
        self.line(f"query, key, value = {q}, {k}, {v}")
        mask = self.pick(["", f" + jnp.triu(-9.0 * jnp.ones(({t}, {t})), 1)"])
        self.set(f"jax.nn.softmax(query @ key.T{mask}) @ value", (t, n))
        return True

    @step("dense", "control")
    def residual(self):
        self.line("kept = h")
        before = self.shape
        self.one_step_inside(before)
        self.set("jnp.tanh(kept + h)", before)
        return True

    def one_step_inside(self, before):
        if self.steps_left > 0:
            self.steps_left -= 1
            frame = self.body(before, keep=True, steps=1)
            name = self.name("f")
            self.define(f"def {name}(h):", frame, "h")
            self.line(f"h = {name}(h)")

    @step("dense", "weights")
    def two_branches(self):
        if not self.shape:
            return False
        *rest, m = self.shape
        n = self.dim()
        parts = f"[jnp.tanh(h @ {self.weight((m, n))}), h]"
        self.set(f"jnp.concatenate({parts}, -1)", (*rest, m + n))
        return size_of(self.shape) < 40 or self.reduction()

    @step("dense", "loops", "indexing")
    def reduction(self):
        if not self.shape:
            return False
        axis = self.number(0, len(self.shape) - 1)
        shape = self.shape[:axis] + self.shape[axis + 1 :]
        how = self.pick(
            ["h.mean({})", "h.sum({})", "jax.nn.logsumexp(h, {})", "jnp.sqrt(1 + (h * h).sum({}))", "h.prod({})"]
        )
        self.set(how.format(axis), shape)
        return True

    @step("dense", "indexing")
    def moved(self):
        if not self.shape:
            return False
        s = self.shape
        how = self.pick(["transpose", "reverse", "flatten", "drop", "cumsum", "softmax", "sort", "pad", "new axis"])
        if how == "transpose":
            self.set("h.T", s[::-1])
        elif how == "reverse":
            self.set("h[::-1]", s)
        elif how == "flatten":
            self.set(f"h.reshape({size_of(s)})", (size_of(s),))
        elif how == "drop" and s[0] > 1:
            self.set("h[1:]", (s[0] - 1, *s[1:]))
        elif how == "cumsum":
            self.set("jnp.tanh(jnp.cumsum(h, -1))", s)
        elif how == "softmax":
            self.set("jax.nn.softmax(h)", s)
        elif how == "sort":
            self.set("jnp.sort(h, -1)", s)
        elif how == "pad" and size_of(s) < 20:
            self.set(f"jnp.pad(h, {[(1, 0)] + [(0, 0)] * (len(s) - 1)})", (s[0] + 1, *s[1:]))
        elif how == "new axis" and len(s) < 3:
            self.set("h[:, None]", (s[0], 1, *s[1:]))
        else:
            return False
        return True

    @step("conv")
    def conv(self):
        if len(self.shape) not in (2, 3):
            return False
        *space, c = self.shape
        n = len(space)
        groups = self.pick([g for g in (1, 2, 3, 4) if c % g == 0])
        out = groups * self.number(1, 2)
        kernel = [self.number(1, 3) for _ in space]
        strides = [self.number(1, 2) for _ in space]
        inner = [self.number(1, 2) for _ in space]  # dilation of the input: a transposed convolution
        outer = [self.number(1, 2) for _ in space]
        reach = [(k - 1) * d + 1 for k, d in zip(kernel, outer)]
        padding = [(self.number(0, 2), self.number(0, 2)) for _ in space]
        if self.chance(5):
            padding = [(low, high - 1) for low, high in padding]
        after = [((s - 1) * d + 1 + low + high - r) // stride + 1
                 for s, d, (low, high), r, stride in zip(space, inner, padding, reach, strides)]  # fmt: skip
        if (
            min(after) < 1
            or size_of(after) * out > 60
            or any((s - 1) * d + 1 + min(p) < 1 for s, d, p in zip(space, inner, padding))
        ):
            return False
        layout = {1: [("NWC", "WIO", "NWC")], 2: [("NHWC", "HWIO", "NHWC"), ("NHWC", "OIHW", "NHWC")]}[n]
        numbers = self.pick(layout)
        sizes = {"I": c // groups, "O": out} | dict(zip("HW"[-n:], kernel))
        w = self.weight([sizes[a] for a in numbers[1]])
        self.set(
            f"jnp.tanh(lax.conv_general_dilated(h[None], {w}, {strides}, {padding}, {inner}, {outer}, {numbers}, {groups})[0])",
            (*after, out),
        )
        return True

    @step("conv")
    def to_image(self):
        """More axes, for a convolution to act on."""
        n = size_of(self.shape)
        shape = next(((a, n // a // b, b) for a in (2, 3) for b in (2, 1) if n % (a * b) == 0), (n, 1))
        self.set(f"h.reshape({shape})", shape)
        return True

    @step("conv")
    def batched_conv(self):
        if len(self.shape) != 3:
            return False
        t, s, c = self.shape
        out = self.number(1, 3)
        w = self.weight((2, c, out))
        self.set(
            f'jnp.tanh(lax.conv_general_dilated(h, {w}, [1], "SAME", dimension_numbers=("NWC", "WIO", "NWC")))',
            (t, s, out),
        )
        return True

    @step("indexing", "control", "loops", "weights")
    def embedding(self):
        rows, width = self.number(1, 4), self.number(1, 3)
        table = self.weight((rows, width))
        tokens = self.pick(["i", f"i % {rows}"])
        how = self.pick(
            [
                "{t}[{i}]",
                "jnp.take({t}, {i}, 0, mode='clip')",
                "jnp.take({t}, {i}, 0, mode='wrap')",
                "{t}.at[{i}].get(mode='fill', fill_value=0.5)",
                "jax.nn.one_hot({i}, {n}) @ {t}",
                "{t}.at[{i} % {n}].get(mode='promise_in_bounds')",
                "{t}.T[:, {i}].T",
                "jnp.take_along_axis({t}, (i % {n}).reshape(-1, 1), 0).reshape(*i.shape, 1)"
                if width == 1
                else "{t}[{i}]",
            ]
        )
        text = how.format(t=table, i=tokens, n=rows)
        shape = (*(self.tokens if ".T" not in how else self.tokens[::-1]), width)
        self.combine(text, shape)
        return True

    def combine(self, text, shape):
        """Something new beside h: in its place, or together with it."""
        if shape == self.shape:
            self.set(f"jnp.tanh(h + {text})", shape)
        elif shape[:-1] == self.shape[:-1] and self.shape:
            self.set(f"jnp.concatenate([h, {text}], -1)", (*shape[:-1], shape[-1] + self.shape[-1]))
        else:
            self.set(f"jnp.tanh(jnp.mean(h) + {text})", shape)

    @step("indexing")
    def table_entry(self):
        """Indices, scalars and arrays, on one or two axes."""
        table = self.weight((self.number(1, 3), self.number(1, 3), *self.pick([(), (2,)])))
        entry = f"{table}[{self.pick(['k, 0', 'k, i', 'i, k', 'i, i % 2', 'k'])}]"
        self.set(f"jnp.tanh(jnp.mean(h) + jnp.sum(jnp.sin({entry}) ** 2))", ())
        return True

    @step("indexing")
    def gather_positions(self):
        if not self.shape:
            return False
        how = self.pick(["h[k]", "h[k % 2]", "lax.dynamic_index_in_dim(h, k, 0, False)", "h[jnp.array([0, 0])]"])
        self.set(how, self.shape[1:] if "array" not in how else (2, *self.shape[1:]))
        return True

    @step("indexing")
    def segments(self):
        if not self.shape or not self.tokens or len(self.tokens) != 1 or self.tokens[0] != self.shape[0]:
            return False
        n = self.number(1, 3)
        self.set(f"jnp.tanh(jax.ops.segment_sum(h, i % {n}, {n}) + {self.weight((n,) + (1,) * (len(self.shape) - 1))})",
                 (n, *self.shape[1:]))  # fmt: skip
        return True

    @step("control", "weights")
    def where(self):
        condition = self.pick([self.flags(self.shape[-1:]), "k % 2 == 0", "h > 0"])
        other = self.weight(self.beside())
        how = self.pick(["jnp.where({}, h, {})", "jnp.where({}, h, h * {})"])
        self.set(how.format(condition, other), self.shape)
        return True

    # Steps with bodies: ---------------------------------------------------------------------

    def deep(self) -> bool:
        return len(self.frames) > 3

    @step("control")
    def jit(self):
        return self._wrapped(["jax.jit({})", "jax.jit(jax.jit({}))", "jax.named_call({}, name='inner')"])

    @step("control", "loops")
    def checkpoint(self):
        policy = "jax.checkpoint_policies."
        return self._wrapped(
            [
                "jax.checkpoint({})",
                "jax.checkpoint({}, policy=" + policy + "dots_saveable)",
                "jax.checkpoint({}, policy=" + policy + "everything_saveable)",
                "jax.checkpoint({}, policy=" + policy + "nothing_saveable, prevent_cse=False)",
                "jax.jit(jax.checkpoint({}))",
            ]
        )

    def _wrapped(self, wrappers):
        if self.deep():
            return False
        shape, wrapper = self.shape, self.pick(wrappers)
        frame, name = self.body(shape, keep=False), self.name("f")
        explicit = self.chance(2)  # parameters as an argument, or closed over
        self.define(f"def {name}(h, p):" if explicit else f"def {name}(h):", frame, "h")
        self.set(f"{wrapper.format(name)}(h{', p' * explicit})", frame.shape)
        return True

    @step("control", "loops")
    def vmap(self):
        if not self.shape or self.deep():
            return False
        n, *rest = self.shape
        stacked = n if self.chance(2) else 0  # weights of each position's own
        frame, name = self.body(rest, keep=False, stacked=stacked), self.name("f")
        self.define(f"def {name}({', '.join(['h', *frame.names])}):", frame, "h")
        self.set(f"jax.vmap({name})({', '.join(['h', *frame.xs])})", (n, *frame.shape))
        return True

    @step("loops", "weights")
    def layers(self):
        """A scan whose xs are weights: layers."""
        if self.deep():
            return False
        length, shape = self.number(1, 3), self.shape
        frame, name = self.body(shape, keep=True, stacked=length), self.name("f")
        emit = self.pick(["None", "jnp.mean(h)", "h"])
        names = ", ".join(frame.names) + "," * (len(frame.names) == 1)
        self.define(f"def {name}(h, xs):", frame, f"h, {emit}", [f"{names} = xs"] if names else [])
        body = self.pick([name, f"jax.checkpoint({name})"])
        extra = self.pick(["", ", reverse=True", ", unroll=2"])
        xs = f"({', '.join(frame.xs)},)" if frame.xs else "None"
        self.set(f"lax.scan({body}, h, {xs}, length={length}{extra})", shape)
        if emit == "None":
            self.line("h = h[0]")
        elif emit == "h":
            self.set("jnp.tanh(h[1]) + h[0]", (length, *shape))
        else:
            self.line("h = h[0] + jnp.sin(h[1]).sum()")
        return size_of(self.shape) < 40 or self.reduction()

    @step("loops")
    def recurrence(self):
        """A scan over the first axis, with weights that all steps share."""
        if len(self.shape) != 2 or self.deep():
            return False
        t, m = self.shape
        n = self.number(1, 3)
        cell = Frame((n,))
        self.frames.append(cell)
        w, u, b = self.weight((m, n)), self.weight((n, n)), self.weight((n,))
        self.line(f"h = jnp.tanh(x @ {w} + h @ {u} + {b})")
        self.steps(1)
        self.coerce((n,))
        self.frames.pop()
        name = self.name("f")
        self.define(f"def {name}(h, x):", cell, "h, h")
        last = self.number(0, 1)
        start = self.pick([f"jnp.zeros({n}, F)", self.weight((n,))])
        body = self.pick([name, f"jax.checkpoint({name})"])
        self.set(f"lax.scan({body}, {start}, h{self.pick(['', ', reverse=True'])})[{last}]", (t, n) if last else (n,))
        return True

    @step("loops", "control")
    def fori(self):
        if self.deep():
            return False
        shape, index = self.shape, self.name("n")
        frame, name = self.body(shape, keep=True, indices=[index]), self.name("f")
        self.define(f"def {name}({index}, h):", frame, "h")
        self.set(f"lax.fori_loop(0, {self.number(1, 3)}, {name}, h)", shape)
        return True

    @step("loops")
    def mapped(self):
        if not self.shape or self.deep():
            return False
        n, *rest = self.shape
        frame, name = self.body(rest, keep=False), self.name("f")
        self.define(f"def {name}(h):", frame, "h")
        self.set(f"lax.map({name}, h)", (n, *frame.shape))
        return True

    @step("loops")
    def associative(self):
        if not self.shape:
            return False
        gate = self.weight(self.shape[-1:])
        self.set(
            f"lax.associative_scan(lambda l, r: (l[0] * r[0], r[0] * l[1] + r[1]), (jax.nn.sigmoid(h * {gate}), h))[1]",
            self.shape,
        )
        return True

    @step("control", "indexing")
    def cond(self):
        if self.deep():
            return False
        shape, names = self.shape, []
        count = self.number(2, 3)
        for _ in range(count):
            frame, name = self.body(shape, keep=True, steps=1), self.name("f")
            self.define(f"def {name}(h):", frame, "h")
            names.append(name)
        if count == 2:
            predicates = ["k % 2 == 0", "h.mean() > 0.1", "True", *(f"{n} > 0" for f in self.frames for n in f.indices)]
            if self.params:
                predicates.append(f'jnp.sum(p["{next(iter(self.params))}"]) > 0')
            self.set(f"lax.cond({self.pick(predicates)}, {', '.join(names)}, h)", shape)
        else:
            self.set(
                f"lax.switch({self.pick(['k', '1', *(n for f in self.frames for n in f.indices)])}, [{', '.join(names)}], h)",
                shape,
            )
        return True

    @step("calculus")
    def inner_step(self):
        """A step of gradient descent inside the loss."""
        if not self.shape or self.order > 1:
            return False
        m, n = self.shape[-1], self.number(1, 3)
        w, name = self.weight((m, n)), self.name("f")
        self.line(f"{name} = lambda w: jnp.mean(jnp.sin(h @ w) ** 2)")
        adapted = self.name("w")
        self.line(f"{adapted} = {w} - 0.5 * jax.grad({name})({w})")
        self.set(f"jnp.tanh(h @ {adapted})", (*self.shape[:-1], n))
        return True

    @step("calculus")
    def gradient(self):
        """The gradient by the input, as in physics-informed losses."""
        if self.deep() or self.order > 0:
            return False
        frame, name = self.body(self.shape, keep=False, order=1), self.name("f")
        self.define(f"def {name}(h):", frame, "jnp.sum(jnp.sin(h))")
        how = self.pick([f"jax.grad({name})(h)", f"jax.jvp({name}, (h,), (jnp.cos(h),))[1] + h"])
        self.set(f"jnp.tanh({how})", self.shape)
        return True

    @step("calculus")
    def curvature(self):
        if self.deep() or self.order > 0 or size_of(self.shape) > 12:
            return False
        frame, name = self.body(self.shape, keep=False, steps=1, order=2), self.name("f")
        self.define(f"def {name}(h):", frame, "jnp.sum(jnp.sin(h))")
        self.set(f"jnp.tanh(jax.jvp(jax.grad({name}), (h,), (jnp.cos(h),))[1])", self.shape)
        return True

    @step("calculus")
    def stop(self):
        self.set(self.pick(["h + lax.stop_gradient(h)", "h * lax.stop_gradient(jnp.tanh(h))"]), self.shape)
        return True

    @step("calculus")
    def solve(self):
        if not self.shape:
            return False
        n = self.shape[-1]
        matrix = f"(3 * jnp.eye({n}) + jnp.tanh({self.weight((n, n))}))"
        how = self.pick(["h @ jnp.linalg.inv({})", "jnp.linalg.solve({}, h[..., None])[..., 0]"])
        self.set(how.format(matrix), self.shape)
        return True

    @step("calculus")
    def spectrum(self):
        if not self.shape:
            return False
        w = self.weight(self.shape[-1:])
        self.set(f"jnp.tanh(jnp.real(jnp.fft.ifft(jnp.fft.fft(h) * jnp.fft.fft({w}))))", self.shape)
        return True

    # The whole: -----------------------------------------------------------------------------

    def program(self) -> Program:
        draw_shape = lambda most: tuple(self.dim() for _ in range(self.number(1, most)))
        example = draw_shape(3 if self.family == "conv" else 2)
        self.tokens = self.pick([(3,), (), (2, 2), (1,), example[:1]])
        seed, wide = self.number(0, 99), not self.chance(3)
        batched = self.pick(["bare", "leading axis", "vmap"])
        top = Frame((1, *example) if batched == "leading axis" else example)
        self.frames.append(top)
        self.steps(7)
        if not self.params:
            self.dense() or self.bias()
        value = self.head()
        has_aux = self.chance(5)
        shapes = dict(self.params)
        if self.chance(6):
            shapes["unused"] = self.pick([(2,), (), (0, 3)])
        return Program(
            self.text(top, shapes, example, seed, wide, batched, value + ", {'h': h}" * has_aux),
            batched != "bare",
            has_aux,
            wide,
            self.low,
        )

    def head(self) -> str:
        if len(self.shape) and self.chance(3):
            self.line(f"h = jax.nn.log_softmax(h.reshape(-1, {self.shape[-1]}))")
            return f"-jnp.mean(h[:, k % {self.shape[-1]}])"
        return self.pick(["jnp.mean(h * jnp.sin(h + 0.5))", "jnp.mean((h - jnp.mean(x)) ** 2)", "jnp.sum(jnp.cos(h))"])

    def text(self, top, shapes, example, seed, wide, batched, value) -> str:
        """The script."""
        one = {"bare": "loss", "leading axis": "loss", "vmap": "one"}[batched]
        at = "[0]" if batched == "leading axis" else ""  # there, the integers do without the axis
        body = ["h = x", *top.lines, f"return {value}"]
        reads = ["x = batch['x']", *(f"{v} = batch['{v}']{at}" for v in "ik" if _mentions(v, body))]
        helpers = [textwrap.dedent(text).strip() for name, text in HELPERS.items() if _mentions(name, body)]
        lines = [
            "import jax, jax.numpy as jnp, numpy as np",
            "from jax import lax",
            f"F = np.float{64 if wide else 32}",
            *helpers,
            f"def {one}(p, batch):",
            *("    " + text for text in (*reads, *body)),
        ]
        if batched == "vmap":
            lines += ["def loss(p, batch):"]
            if value.endswith("}"):
                lines += [
                    "    value, aux = jax.vmap(one, (None, 0))(p, batch)",
                    "    return value.mean(), aux",
                ]
            else:
                lines += ["    return jax.vmap(one, (None, 0))(p, batch).mean()"]
        lines += [
            f"r = np.random.default_rng({seed})",
            f"p = {{k: (0.7 * r.standard_normal(s)).astype(F) for k, s in {shapes}.items()}}",
            f"batch = {{'x': r.standard_normal((5, {', '.join(map(str, example))})).astype(F),",
            f"         'i': r.integers(-5, 6, {(5, *self.tokens)}), 'k': r.integers(0, 4, 5)}}",
        ]
        return "\n".join(lines)


def _mentions(name: str, lines) -> bool:
    return any(re.search(rf"\b{name}\b", line) for line in lines)


@st.composite
def programs(draw, family: str = "anything") -> Program:
    # Not `draw` for every choice: of what has been drawn hypothesis makes five variants before it draws anew, and they
    # are near copies. It leaves what comes from its `randoms` alone, and still shrinks it.
    return Author(draw(st.randoms(use_true_random=False)), family).program()
