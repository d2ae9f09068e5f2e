"""Writes small TorchScript models for the tests into a folder: script_models.py FOLDER [graphs SEED COUNT]."""
import random
import sys
from typing import Dict, List, Optional, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F


def conv_block(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True),
                         nn.Conv2d(o, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Skips across everything, in-place ReLU, batch norm, dropout."""

    def __init__(self, width=4, levels=3, inputs=1, classes=2):
        super().__init__()
        c = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList([conv_block(i, o) for i, o in zip([inputs] + c[:-1], c)])
        self.mid = nn.Sequential(conv_block(c[-1], c[-1]), nn.Dropout2d(0.2))
        self.up = nn.ModuleList([conv_block(2 * i, o) for i, o in zip(c[::-1], c[::-1][1:] + [width])])
        self.head = nn.Conv2d(width, classes, 1)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x):
        skips: List[torch.Tensor] = []
        for d in self.down:
            x = d(x)
            skips.append(x)
            x = self.pool(x)
        x = self.mid(x)
        for i, u in enumerate(self.up):
            s = skips[len(skips) - 1 - i]
            x = F.interpolate(x, size=s.shape[-2:], mode="nearest")
            x = u(torch.cat([s, x], 1))
        return self.head(x)


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a, self.b = nn.Conv2d(c, c, 3, padding=1, bias=False), nn.Conv2d(c, c, 3, padding=1, bias=False)
        self.na, self.nb = nn.BatchNorm2d(c), nn.BatchNorm2d(c)

    def forward(self, x):
        y = F.relu(self.na(self.a(x)), inplace=True)
        y = self.nb(self.b(y))
        y += x
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self, width=8, blocks=6, classes=10):
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(blocks)])
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        return self.head(torch.flatten(F.adaptive_avg_pool2d(self.blocks(self.stem(x)), 1), 1))


class Attention(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.q, self.k, self.v, self.o = [nn.Linear(d, d, bias=False) for _ in range(4)]

    def forward(self, x, y, bias: Optional[torch.Tensor]):
        B, T, D = x.shape
        S = y.size(1)
        q = self.q(x).view(B, T, self.h, D // self.h).transpose(1, 2)
        k = self.k(y).view(B, S, self.h, D // self.h).transpose(1, 2)
        v = self.v(y).view(B, S, self.h, D // self.h).transpose(1, 2)
        a = q @ k.transpose(-1, -2)
        if bias is not None:
            a = a + bias
        a = F.dropout(a.softmax(-1), 0.1, self.training)
        return self.o((a @ v).transpose(1, 2).reshape(B, T, D))


class Layer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn, self.cross = Attention(d, h), Attention(d, h)
        self.up, self.down, self.drop = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Dropout(0.1)


class EncoderLayer(Layer):
    def forward(self, x, bias):
        n = self.n1(x)
        x = x + self.drop(self.attn(n, n, bias))
        return x + self.drop(self.down(self.drop(F.relu(self.up(self.n2(x))))))


class DecoderLayer(Layer):
    def forward(self, x, memory, bias, mask):
        n = self.n1(x)
        x = x + self.drop(self.attn(n, n, bias))
        x = x + self.drop(self.cross(self.n3(x), memory, mask))
        return x + self.drop(self.down(self.drop(F.relu(self.up(self.n2(x))))))


class EncoderDecoder(nn.Module):
    """One embedding tied three ways, a bias shared by all layers, a dictionary as output, a bool with a default."""

    def __init__(self, vocabulary=64, d=32, h=2, layers=2):
        super().__init__()
        self.d = d
        self.emb = nn.Embedding(vocabulary, d)
        self.rel = nn.Embedding(16, h)
        self.enc = nn.ModuleList([EncoderLayer(d, h) for _ in range(layers)])
        self.dec = nn.ModuleList([DecoderLayer(d, h) for _ in range(layers)])

    def distance(self, n: int, device: torch.device):
        p = torch.arange(n, device=device)
        return (p[None, :] - p[:, None]).clamp(-8, 7) + 8

    def forward(self, src, tgt, causal: bool = True) -> Dict[str, torch.Tensor]:
        mask = torch.where(src == 0, -1e9, 0.0)[:, None, None, :].to(self.emb.weight.dtype)
        bias = self.rel(self.distance(src.size(1), src.device)).permute(2, 0, 1)[None] + mask
        x = self.emb(src)
        for layer in self.enc:
            x = layer(x, bias)
        T = tgt.size(1)
        later = self.rel(self.distance(T, src.device)).permute(2, 0, 1)[None]
        if causal:
            later = later + torch.full((T, T), -1e9, device=src.device).triu(1)
        y = self.emb(tgt)
        for layer in self.dec:
            y = layer(y, x, later, mask)
        return {"logits": F.linear(y * self.d ** -0.5, self.emb.weight), "memory": x}


class Control(nn.Module):
    """If and While on values, a no_grad region, an attribute that forward replaces, an early return, tuple outputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.bn = nn.BatchNorm1d(16)
        self.register_buffer("seen", torch.ones(1))

    def forward(self, x, steps: int = 4) -> Tuple[torch.Tensor, List[torch.Tensor]]:
        x = torch.tanh(self.a(x))
        shape = x.shape
        if bool(x.sum() > 0):
            x = x * 2 + self.b(x)
        else:
            x = x - self.b(x)
        with torch.no_grad():
            m = x.abs().mean()
            self.seen = self.seen + m
        i = 0
        while bool(x.norm() > 1.0) and i < steps:
            x = torch.relu(self.c(x)) * 0.5
            i += 1
        x = F.dropout(self.bn(x / m), 0.3, self.training) * self.seen
        z = x.view(shape[0], 2, -1)
        if i > 100:
            return x, [z]
        return x, [z.sum(1), z * float(i)]


class PowerIteration(nn.Module):
    """What it computes depends on a buffer that it writes, as spectral norms do."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 10)
        self.register_buffer("u", F.normalize(torch.randn(16), dim=0))

    def forward(self, x):
        with torch.no_grad():
            v = F.normalize(self.a.weight.t() @ self.u, dim=0)
            self.u.copy_(F.normalize(self.a.weight @ v, dim=0))
        sigma = torch.dot(self.u.clone(), self.a.weight @ v)
        h = torch.tanh(F.linear(x, self.a.weight / sigma, self.a.bias))
        h = h * (1 + self.u)
        return self.b(torch.relu(h))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32, 16)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, dropout=0.1)
        self.cell = nn.GRUCell(16, 16)
        self.head = nn.Linear(16, 32)

    def forward(self, tokens):
        x, _ = self.lstm(self.emb(tokens))
        h = torch.zeros_like(x[:, 0])
        out: List[torch.Tensor] = []
        for t in range(x.size(1)):
            h = self.cell(x[:, t], h)
            out.append(h)
        return self.head(torch.stack(out, 1))


class OwnLoss(nn.Module):
    """Returns the mean loss itself, and reads its labels; one weight is used twice."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.head = nn.Linear(16, 10)

    def forward(self, x, labels):
        x = torch.relu(self.a(x)) * self.scale
        x = torch.relu(self.a(x)) * self.scale
        return F.cross_entropy(self.head(x), labels)


class CustomUse(nn.Module):
    """Writes to its input, and hands views on."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(8, 8), nn.Linear(16, 10)

    def forward(self, x):
        x.mul_(0.5)
        left, right = self.a(x).chunk(2, 1)
        y = torch.cat([self.b(left), torch.sigmoid(right)], 1)
        y[:, 0] += 1.0
        y.add_(x)
        return self.c(y)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.bn, self.b = nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 10)

    def forward(self, x):
        return self.b(F.dropout(self.bn(self.a(x)), 0.1, self.training))


class Taps(nn.Module):
    """A dictionary that is filled from the first layer to the last, read on the way, and returned."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({f"l{i}": nn.Linear(16, 16) for i in range(6)})
        self.wanted = {"l1": "low", "l4": "high"}

    def forward(self, x) -> Dict[str, torch.Tensor]:
        out = torch.jit.annotate(Dict[str, torch.Tensor], {})
        for name, layer in self.layers.items():
            x = torch.relu(layer(x))
            if name in self.wanted:
                out[self.wanted[name]] = x
        out["last"] = x + out["low"]
        out["high"] = out["high"] * 2
        return out


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is (in, out)."""

    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(i, o) * 0.2), nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return torch.addmm(self.bias, x, self.weight)


class Projection(nn.Module):
    """A product with a transposed weight."""

    def __init__(self, i, o):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(o, i) * 0.2)

    def forward(self, x):
        return x @ self.weight.t()


class Adaptable(nn.Module):
    """Linear layers of every form, one of them run thrice, and a matrix that is more than a layer's weight."""

    def __init__(self, p=0.2):
        super().__init__()
        self.p = p
        self.first, self.norm, self.conv = nn.Linear(16, 24), nn.BatchNorm1d(24), Conv1D(24, 16)
        self.shared = nn.Linear(16, 16, bias=False)
        self.tied = nn.Parameter(torch.randn(16, 16) * 0.2)
        self.body = nn.Sequential(nn.Linear(16, 20), nn.ReLU(inplace=True), Projection(20, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = F.dropout(torch.relu(self.norm(self.first(x))), self.p, self.training)
        x = torch.tanh(self.conv(x))
        for _ in range(3):
            x = x + torch.tanh(self.shared(x))
        x = F.linear(x, self.tied) + self.tied.mean(0)
        return self.head(x + self.body(x))


class Encoder(nn.Module):
    """PyTorch's own layers, which have another way for evaluation that reads all weights at once."""

    def __init__(self, p=0.2):
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, p, batch_first=True), 2)
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.layers(self.embed(x.view(-1, 4, 4))).mean(1))


class Branches(nn.Module):
    """Branches on shapes alone, of which the inner one depends on the number of samples."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.inner, self.last = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, x):
        x = self.norm(self.first(x))
        if x.dim() == 2:
            if x.size(0) > 4:
                x = torch.tanh(self.inner(x))
            else:
                x = F.gelu(self.inner(F.silu(x)) * 2.0)
        return self.last(x)


class NoGradient(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(16, 10)

    def forward(self, x):
        with torch.no_grad():
            return self.a(x)


def random_graph(seed):
    """A random DAG of operations on (B, 16): skips, writes in place, views, dropout, norms, shared weights."""
    r = random.Random(seed)
    lines, names, modules, written = [], ["x"], [], set()
    for k in range(r.randint(6, 18)):
        a, b = r.choice(names), r.choice(names[-3:])
        y = f"v{k}"
        kind = r.randrange(12)
        if kind <= 2:
            if modules and r.random() < 0.3:
                m = r.choice(modules)
            else:
                m = f"l{len(modules)}"
                modules.append(m)
            lines.append(f"{y} = self.{m}({b})")
        elif kind == 3:
            lines.append(f"{y} = torch.{r.choice(['tanh', 'sigmoid', 'relu'])}({b})")
        elif kind == 4:
            lines.append(f"{y} = {a} + {b}")
        elif kind == 5:
            lines.append(f"{y} = {a} * {b}.sigmoid()")
        elif kind == 6:
            lines.append(f"{y} = F.dropout({b}, 0.2, self.training)")
        elif kind == 7:
            lines.append(f"{y} = self.bn{r.randrange(2)}({b})")
        elif kind == 8:  # written in place, through a view half of the time
            lines.append(f"{y} = {b} * 1.5")
            lines.append(f"{y}{r.choice(['', '[:, :8]'])}.{r.choice(['mul_(0.5)', 'add_(1.0)', 'clamp_(-2.0, 2.0)'])}")
        elif kind == 9:
            lines.append(f"{y} = torch.cat([{a}[:, 8:], {b}[:, :8]], 1)")
        elif kind == 10:
            lines.append(f"{y} = {b}.view({b}.size(0), 4, 4).transpose(1, 2).reshape({b}.size(0), 16)")
        else:
            lines.append(f"{y} = self.norm({b})")
        names.append(y)
    used = names[-4:]
    text = ("class G(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
            "        self.bn0, self.bn1, self.norm = nn.BatchNorm1d(16), nn.BatchNorm1d(16), nn.LayerNorm(16)\n"
            "        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 10)\n"
            + "".join(f"        self.{m} = nn.Linear(16, 16)\n" for m in modules)
            + "    def forward(self, x):\n        x = self.first(x)\n"
            + "".join(f"        {line}\n" for line in lines)
            + f"        return self.head({' + '.join(used)})\n")
    return text


def write_graphs(folder, seed, count):
    import importlib.util
    for i in range(count):
        path = f"{folder}/graph_{i}.py"
        with open(path, "w") as f:
            f.write("import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n\n" + random_graph(seed + i))
        spec = importlib.util.spec_from_file_location(f"graph_{i}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(seed + i)
        torch.jit.script(module.G()).save(f"{folder}/graph_{i}.pt")


def main():
    folder = sys.argv[1]
    if len(sys.argv) > 2 and sys.argv[2] == "graphs":
        return write_graphs(folder, int(sys.argv[3]), int(sys.argv[4]))
    torch.manual_seed(0)
    models = dict(unet=UNet(), resnet=ResNet(), t5=EncoderDecoder(), control=Control(), power=PowerIteration(),
                  lstm=Recurrent(), own_loss=OwnLoss(), custom=CustomUse(), small=Small(), no_gradient=NoGradient(),
                  taps=Taps(), branches=Branches(), adaptable=Adaptable(), encoder=Encoder())
    for name, model in models.items():
        torch.jit.script(model).save(f"{folder}/{name}.pt")
    image = torch.randn(4, 1, 16, 16)
    torch.jit.trace(models["resnet"], image, check_trace=False).save(f"{folder}/resnet_traced.pt")
    for name in ("adaptable", "encoder"):
        torch.jit.trace(models[name], torch.randn(4, 16), check_trace=False).save(f"{folder}/{name}_traced.pt")
    torch.jit.trace(models["small"].eval(), torch.randn(4, 16)).save(f"{folder}/eval_traced.pt")
    torch.jit.freeze(torch.jit.script(models["small"])).save(f"{folder}/frozen.pt")
    torch.save(models["small"].state_dict(), f"{folder}/state_dict.pt")


if __name__ == "__main__":
    main()
