"""A step of torchvision's ResNet-101 in PyTorch: pytorch_resnet101.py SEGMENTS BATCH SIDE STEPS.

SEGMENTS 0: everything kept; otherwise torch.utils.checkpoint.checkpoint_sequential over the blocks in so
many segments. Prints the best step's seconds and the most resident memory above what was there before."""
import resource
import sys
import time

import torch
import torchvision
from torch.utils.checkpoint import checkpoint_sequential

segments, batch, side, steps = map(int, sys.argv[1:5])
torch.manual_seed(0)
net = torchvision.models.resnet101(weights=None).train()
blocks = torch.nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, *net.layer1, *net.layer2, *net.layer3,
                             *net.layer4, net.avgpool, torch.nn.Flatten(1), net.fc)
images, classes = torch.randn(batch, 3, side, side), torch.randint(0, 1000, (batch,))
for parameter in net.parameters():
    parameter.grad = torch.zeros_like(parameter)


def resident():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


before, best = resident(), float("inf")
for _ in range(steps):
    start = time.time()
    images.requires_grad_(segments > 0)  # or the first segment would get no gradients
    scores = checkpoint_sequential(blocks, segments, images) if segments else blocks(images)
    torch.nn.functional.cross_entropy(scores, classes).backward()
    best = min(best, time.time() - start)
print(f"segments {segments}: {best:.2f} s, {(resident() - before) / 2**20:.0f} MiB")
