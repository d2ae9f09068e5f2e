"""The chain of checkpoint_parity_slow_test.cpp in PyTorch: reads its weights and input, writes loss, gradients and peak bytes."""

import json
import math
import sys

import numpy
import torch
from torch.utils.checkpoint import checkpoint

folder, num_blocks, width, num_heads, batch, length = sys.argv[1], *map(int, sys.argv[2:])
torch.set_num_threads(2)


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = torch.nn.LayerNorm(width)
        self.norm2 = torch.nn.LayerNorm(width)
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.projection = torch.nn.Linear(width, width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x):
        head = width // num_heads
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, num_heads, head).permute(2, 0, 3, 1, 4)
        scores = torch.matmul(qkv[0], qkv[1].transpose(-2, -1)) / math.sqrt(head)
        attention = torch.softmax(scores, -1)
        x = x + self.projection(torch.matmul(attention, qkv[2]).transpose(1, 2).reshape(batch, length, width))
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm2(x))))


def read(name, tensors):
    values = torch.from_numpy(numpy.fromfile(f"{folder}/{name}", dtype=numpy.float32))
    with torch.no_grad():
        for tensor, piece in zip(tensors, values.split([t.numel() for t in tensors])):
            tensor.copy_(piece.view_as(tensor))


blocks = torch.nn.ModuleList(Block() for _ in range(num_blocks))
parameters = list(blocks.parameters())
read("weights.bin", parameters)
x = torch.empty(batch, length, width)
read("input.bin", [x])


def step():
    y = x
    for block in blocks:
        y = checkpoint(block, y, use_reentrant=False)
    loss = y.pow(2).mean()
    loss.backward()
    return loss.item()


loss = step()
numpy.concatenate([p.grad.numpy().ravel() for p in parameters]).tofile(f"{folder}/gradients.bin")
with torch.autograd.profiler.profile(profile_memory=True, use_kineto=True) as profile:
    step()
live = peak = 0
for event in profile.kineto_results.events():
    if event.name() == "[memory]":
        live += event.nbytes()
        peak = max(peak, live)
print(json.dumps({"version": torch.__version__, "loss": loss, "peak_bytes": peak}))
