"""The usual eager GPT in PyTorch: what ours is compared with, in numbers (parity) and in time and memory (serve).

parity FOLDER   reads config.txt, index.txt, weights.bin and tokens.bin from the folder; writes gradients.bin, trained.bin, losses.txt.
serve           reads "n_layer n_head n_embd length vocab_size batch threads checkpoint" from its arguments, prints the resident bytes at
                the start, then for each line on standard input runs one update and prints its seconds; at the end, the peak bytes above the start.
                Attention and AdamW are PyTorch's fused ones where it has them; HEADROOM_AUTOCAST=1 computes in bf16.
"""
import inspect
import math
import os
import sys
import time

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    is_fused = False  # only in time and memory: the numbers are compared with the formula itself

    def __init__(self, width, num_heads, length):
        super().__init__()
        self.num_heads = num_heads
        self.c_attn = nn.Linear(width, 3 * width)
        self.c_proj = nn.Linear(width, width)
        self.register_buffer("mask", torch.tril(torch.ones(length, length)).view(1, 1, length, length), persistent=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (t.view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2) for t in (q, k, v))
        if self.is_fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.mask[:, :, :T, :T] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc = nn.Linear(width, 4 * width)
        self.c_proj = nn.Linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, width, num_heads, length):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = Attention(width, num_heads, length)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Gpt(nn.Module):
    def __init__(self, n_layer, n_head, n_embd, length, vocab_size, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.transformer = nn.ModuleDict(dict(
            wte=nn.Embedding(vocab_size, n_embd),
            wpe=nn.Embedding(length, n_embd),
            h=nn.ModuleList([Block(n_embd, n_head, length) for _ in range(n_layer)]),
            ln_f=nn.LayerNorm(n_embd),
        ))
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.lm_head.weight = self.transformer.wte.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(tokens.size(1)))
        for block in self.transformer.h:
            x = checkpoint(block, x) if self.checkpointed else block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def compare(folder, model, length, batch, num_updates):
    """The updates of a language model from the weights and tokens of the folder; leaves gradients, trained weights and losses there."""
    names = [name for line in open(folder + "/index.txt") for name in line.split()]
    by_name = dict(model.named_parameters())
    assert sorted(names) == sorted(by_name), sorted(set(names) ^ set(by_name))
    parameters = [by_name[name] for name in names]
    values = numpy.fromfile(folder + "/weights.bin", dtype=numpy.float32)
    assert values.size == sum(p.numel() for p in parameters)
    at = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.from_numpy(values[at:at + p.numel()]).view(p.shape))
            at += p.numel()
    text = torch.from_numpy(numpy.fromfile(folder + "/tokens.bin", dtype=numpy.int64)).view(num_updates, batch, length + 1)
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    write = lambda name, tensors: numpy.concatenate([t.detach().numpy().ravel() for t in tensors]).tofile(folder + "/" + name)
    losses = []
    for update in range(num_updates):
        optimizer.zero_grad(set_to_none=True)
        loss = model(text[update, :, :-1].contiguous(), text[update, :, 1:].contiguous())
        loss.backward()
        losses.append(loss.item())
        if update == 0:
            write("gradients.bin", [p.grad for p in parameters])
        optimizer.step()
    write("trained.bin", parameters)
    open(folder + "/losses.txt", "w").write("\n".join(repr(value) for value in losses))


def parity(folder):
    n_layer, n_head, n_embd, length, vocab_size, batch, num_updates = map(int, open(folder + "/config.txt").read().split())
    compare(folder, Gpt(n_layer, n_head, n_embd, length, vocab_size), length, batch, num_updates)


def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024


def make_adamw(model):
    if "fused" in inspect.signature(torch.optim.AdamW).parameters:
        try:
            return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        except RuntimeError:  # not on the CPU
            pass
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def answer(make_model, length, vocab_size, batch, threads):
    """Runs an update of a language model for each line on standard input, as `serve` says."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    torch.ones(256, 256) @ torch.ones(256, 256)  # what the libraries take for themselves is not the model's
    start = memory("VmRSS")
    print(start, flush=True)
    model = make_model()
    optimizer = make_adamw(model)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled="HEADROOM_AUTOCAST" in os.environ)
    text = torch.randint(0, vocab_size, (batch, length + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    for _ in sys.stdin:
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        with autocast:
            loss = model(tokens, targets)
        loss.backward()
        optimizer.step()
        print(time.perf_counter() - begin, flush=True)
    print(memory("VmHWM") - start, flush=True)


def serve(n_layer, n_head, n_embd, length, vocab_size, batch, threads, checkpointed):
    Attention.is_fused = hasattr(F, "scaled_dot_product_attention")
    answer(lambda: Gpt(n_layer, n_head, n_embd, length, vocab_size, checkpointed), length, vocab_size, batch, threads)


if __name__ == "__main__":
    if sys.argv[1] == "parity":
        parity(sys.argv[2])
    else:
        serve(*(int(word) for word in sys.argv[2:]))
