"""The rows of `benchmarks/models.py` in PyTorch, from the same settings.

Each is an ordinary module that maps a batch to the losses of its examples, made of layers that the peers know: position
tables are embeddings looked up by every example, tied weights are one parameter in two layers. Weights are cast by
autocast where the row computes in bfloat16.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import weight_norm


def build(family: str, settings: dict, device: str):
    """The model and a batch; random numbers are those of a fixed seed, on the CPU."""
    torch.manual_seed(0)
    settings = dict(settings)
    batch, dtype = settings.pop("batch"), getattr(torch, settings.pop("dtype"))
    for name in ("attention", "remat"):  # PyTorch chooses by itself; activations are kept
        settings.pop(name, None)
    model = FAMILIES[family](**settings)
    data = {name: tensor.to(device) for name, tensor in model.data(batch).items()}
    return Cast(model, dtype).to(device), data


class Cast(nn.Module):
    """Runs the model in `dtype` where that is worth while; parameters stay float32."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, batch):
        device = next(iter(batch.values())).device.type
        with torch.autocast(device, self.dtype, enabled=self.dtype != torch.float32):
            return self.model(batch)


FAMILIES: dict[str, type[nn.Module]] = {}


def family(model):
    FAMILIES[model.__name__.lower()] = model
    return model


def cross_entropy(logits, labels):
    """One loss per example: the mean over its positions."""
    losses = F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction="none")
    return losses.view(len(labels), -1).mean(1)


class Embedded(nn.Module):
    """Tokens and positions. Every example looks its positions up, as some peers need it."""

    def __init__(self, vocab, length, width):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(length, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)

    def forward(self, tokens):
        return self.tokens(tokens) + self.positions(places(tokens))


def places(tokens):
    return torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape[:2]).contiguous()


class Block(nn.Module):
    def __init__(self, width, heads, causal=False, cross=False):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        if cross:
            self.norm3, self.query = nn.LayerNorm(width), nn.Linear(width, width)
            self.key_value, self.mix = nn.Linear(width, 2 * width), nn.Linear(width, width)

    def attend(self, q, k, v, causal):
        q, k, v = (a.unflatten(-1, (self.heads, -1)).transpose(1, 2) for a in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).flatten(2)

    def forward(self, h, memory=None):
        h = h + self.out(self.attend(*self.qkv(self.norm1(h)).chunk(3, -1), self.causal))
        if memory is not None:
            k, v = self.key_value(memory).chunk(2, -1)
            h = h + self.mix(self.attend(self.query(self.norm3(h)), k, v, False))
        return h + self.down(F.gelu(self.up(self.norm2(h)), approximate="tanh"))


@family
class GPT(nn.Module):
    def __init__(self, vocab, width, layers, heads, length):
        super().__init__()
        self.vocab, self.length = vocab, length
        self.embedded = Embedded(vocab, length, width)
        self.blocks = nn.ModuleList(Block(width, heads, causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)

    def data(self, batch):
        return {name: torch.randint(self.vocab, (batch, self.length)) for name in ("tokens", "target")}

    def forward(self, batch):
        h = self.embedded(batch["tokens"])
        for block in self.blocks:
            h = block(h)
        return cross_entropy(self.head(self.norm(h)), batch["target"])


@family
class Translation(nn.Module):
    def __init__(self, vocab, width, layers, heads, length):
        super().__init__()
        self.vocab, self.length = vocab, length
        self.embedded = Embedded(vocab, length, width)
        self.encoder = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(Block(width, heads, causal=True, cross=True) for _ in range(layers))
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embedded.tokens.weight

    def data(self, batch):
        return {name: torch.randint(self.vocab, (batch, self.length)) for name in ("source", "target", "labels")}

    def forward(self, batch):
        memory = self.embedded(batch["source"])
        for block in self.encoder:
            memory = block(memory)
        memory, h = self.norm1(memory), self.embedded(batch["target"])
        for block in self.decoder:
            h = block(h, memory)
        return cross_entropy(self.head(self.norm2(h)), batch["labels"])


@family
class ViT(nn.Module):
    def __init__(self, image, patch, width, layers, heads, classes):
        super().__init__()
        self.image, self.patch, self.count = image, patch, classes
        self.patches = nn.Linear(3 * patch**2, width)
        self.positions = nn.Embedding((image // patch) ** 2, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.classes = nn.LayerNorm(width), nn.Linear(width, classes)

    def data(self, batch):
        return {"image": torch.randn(batch, 3, self.image, self.image), "label": torch.randint(self.count, (batch,))}

    def forward(self, batch):
        patches = F.unfold(batch["image"], self.patch, stride=self.patch).transpose(1, 2)
        h = self.patches(patches) + self.positions(places(patches))
        for block in self.blocks:
            h = block(h)
        return cross_entropy(self.classes(self.norm(h).mean(1)), batch["label"])


@family
class CNN(nn.Module):
    def __init__(self, image, channels, hidden, classes):
        super().__init__()
        self.image, self.count = image, classes
        self.convolutions = nn.ModuleList(
            nn.Conv2d(m, n, 3, padding=1) for m, n in itertools.pairwise((image[2], *channels))
        )
        flat = (image[0] // 2 ** len(channels)) ** 2 * channels[-1]
        self.hidden, self.classes = nn.Linear(flat, hidden), nn.Linear(hidden, classes)

    def data(self, batch):
        side, _, channels = self.image
        return {"image": torch.randn(batch, channels, side, side), "label": torch.randint(self.count, (batch,))}

    def forward(self, batch):
        h = batch["image"]
        for convolution in self.convolutions:
            h = F.max_pool2d(F.relu(convolution(h)), 2)
        return cross_entropy(self.classes(F.relu(self.hidden(h.flatten(1)))), batch["label"])


class Unit(nn.Module):
    def __init__(self, m, n, size, stride, groups):
        super().__init__()
        self.convolution = nn.Conv2d(m, n, size, stride, size // 2, bias=False)
        self.norm = nn.GroupNorm(groups, n)

    def forward(self, h):
        return self.norm(self.convolution(h))


class Residual(nn.Module):
    def __init__(self, m, n, groups):
        super().__init__()
        stride = 1 if m == n else 2
        self.first, self.second = Unit(m, n, 3, stride, groups), Unit(n, n, 3, 1, groups)
        self.shortcut = nn.Identity() if m == n else Unit(m, n, 1, stride, groups)

    def forward(self, h):
        return F.relu(self.shortcut(h) + self.second(F.relu(self.first(h))))


@family
class ResNet(nn.Module):
    def __init__(self, image, width, depths, groups, classes):
        super().__init__()
        self.image, self.count = image, classes
        widths = [width, *(width * 2**k for k, depth in enumerate(depths) for _ in range(depth))]
        self.stem = Unit(3, width, 7, 2, groups)
        self.blocks = nn.ModuleList(Residual(m, n, groups) for m, n in itertools.pairwise(widths))
        self.classes = nn.Linear(widths[-1], classes)

    def data(self, batch):
        return {"image": torch.randn(batch, 3, self.image, self.image), "label": torch.randint(self.count, (batch,))}

    def forward(self, batch):
        h = F.max_pool2d(F.relu(self.stem(batch["image"])), 3, 2, 1)
        for block in self.blocks:
            h = block(h)
        return cross_entropy(self.classes(h.mean((2, 3))), batch["label"])


class Causal(nn.Module):
    """A weight-normalised convolution that sees no row below; of even width, no column to the right."""

    def __init__(self, size, m, n, stride=1):
        super().__init__()
        rows, columns = size
        sides = (columns // 2, columns // 2) if columns % 2 else (columns - 1, 0)
        self.padding = (*sides, rows - 1, 0)
        self.convolution = weight_norm(nn.Conv2d(m, n, size, stride))

    def forward(self, h):
        return self.convolution(F.pad(h, self.padding))


class Doubled(nn.Module):
    """The transpose of one: twice the resolution."""

    def __init__(self, size, n):
        super().__init__()
        self.left = (size[1] - 1) // 2
        self.convolution = weight_norm(nn.ConvTranspose2d(n, n, size, 2), dim=1)

    def forward(self, h):
        _, _, height, width = h.shape
        return self.convolution(h)[:, :, : 2 * height, self.left : self.left + 2 * width]


def elu(h):
    return F.elu(torch.cat([h, -h], 1))


class Gated(nn.Module):
    def __init__(self, size, n, extra):
        super().__init__()
        self.first, self.second = Causal(size, 2 * n, n), Causal(size, 2 * n, 2 * n)
        self.extra = Causal((1, 1), 2 * extra * n, n) if extra else None

    def forward(self, h, extra=None):
        c = self.first(elu(h))
        c = c if self.extra is None else c + self.extra(elu(extra))
        a, gate = self.second(elu(c)).chunk(2, 1)
        return h + a * torch.sigmoid(gate)


@family
class PixelCNN(nn.Module):
    def __init__(self, image, width, scales, resnets, mixtures):
        super().__init__()
        self.image, self.mixtures = image, mixtures
        above, left = (2, 3), (2, 2)
        self.u, self.ul_above, self.ul_left = (Causal(size, 4, width) for size in (above, (1, 3), (2, 1)))

        def layers(n, u, ul):
            return nn.ModuleList(nn.ModuleList([Gated(above, width, u), Gated(left, width, ul)]) for _ in range(n))

        self.up = nn.ModuleList(layers(resnets, 0, 1) for _ in range(scales))
        self.down = nn.ModuleList(layers(n, 1, 2) for n in (resnets, *[resnets + 1] * (scales - 1)))
        self.halved = nn.ModuleList(
            nn.ModuleList(Causal(size, width, width, 2) for size in (above, left)) for _ in range(scales - 1)
        )
        self.doubled = nn.ModuleList(
            nn.ModuleList(Doubled(size, width) for size in (above, left)) for _ in range(scales - 1)
        )
        self.out = Causal((1, 1), width, 10 * mixtures)

    def data(self, batch):
        return {"image": torch.randint(256, (batch, 3, self.image, self.image)) / 127.5 - 1}

    def forward(self, batch):
        x = torch.cat([batch["image"], torch.ones_like(batch["image"][:, :1])], 1)
        down, right = (lambda h: F.pad(h, (0, 0, 1, 0))[:, :, :-1]), (lambda h: F.pad(h, (1, 0))[:, :, :, :-1])
        u, ul, seen = down(self.u(x)), down(self.ul_above(x)) + right(self.ul_left(x)), []
        for k, layers in enumerate(self.up):
            seen.append((u, ul))
            for of_u, of_ul in layers:
                u = of_u(u)
                ul = of_ul(ul, u)
                seen.append((u, ul))
            if k < len(self.halved):
                u, ul = self.halved[k][0](u), self.halved[k][1](ul)
        seen.pop()
        for k, layers in enumerate(self.down):
            for of_u, of_ul in layers:
                u_seen, ul_seen = seen.pop()
                u = of_u(u, u_seen)
                ul = of_ul(ul, torch.cat([u, ul_seen], 1))
            if k < len(self.doubled):
                u, ul = self.doubled[k][0](u), self.doubled[k][1](ul)
        return self.logistic_mixture(batch["image"], self.out(F.elu(ul)).float())

    def logistic_mixture(self, x, out):
        weights = F.log_softmax(out[:, : self.mixtures], 1)
        mean, log_scale, c = out[:, self.mixtures :].unflatten(1, (3, 3, self.mixtures)).unbind(2)
        log_scale, c = log_scale.clamp(min=-7), torch.tanh(c)
        x = x[:, :, None]
        red, green = x[:, 0], x[:, 1]
        mean = mean + torch.stack([torch.zeros_like(c[:, 0]), c[:, 0] * red, c[:, 1] * red + c[:, 2] * green], 1)
        steep, gap = torch.exp(-log_scale), x - mean
        high, low, middle = steep * (gap + 1 / 255), steep * (gap - 1 / 255), steep * gap
        inside = torch.sigmoid(high) - torch.sigmoid(low)
        density = middle - log_scale - 2 * F.softplus(middle) - math.log(127.5)
        inside = torch.where(inside > 1e-5, torch.log(inside.clamp(min=1e-12)), density)
        edges = torch.where(x < -0.999, F.logsigmoid(high), torch.where(x > 0.999, -F.softplus(low), inside))
        return -torch.logsumexp(edges.sum(1) + weights, 1).mean((1, 2)) / 3


@family
class LSTM(nn.Module):
    def __init__(self, vocab, width, length):
        super().__init__()
        self.vocab, self.length = vocab, length
        self.source, self.target = nn.Embedding(vocab, width), nn.Embedding(vocab, width)
        self.encoder, self.decoder = (nn.LSTM(width, width, batch_first=True) for _ in range(2))
        self.head = nn.Linear(width, vocab)

    def data(self, batch):
        return {name: torch.randint(self.vocab, (batch, self.length)) for name in ("source", "target", "labels")}

    def forward(self, batch):
        _, state = self.encoder(self.source(batch["source"]))
        h, _ = self.decoder(self.target(batch["target"]), state)
        return cross_entropy(self.head(h), batch["labels"])


@family
class MLP(nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in itertools.pairwise(sizes))

    def data(self, batch):
        return {"x": torch.randn(batch, self.sizes[0]), "label": torch.randint(self.sizes[-1], (batch,))}

    def forward(self, batch):
        h = batch["x"]
        for i, layer in enumerate(self.layers):
            h = layer(F.relu(h) if i else h)
        return cross_entropy(h, batch["label"])
