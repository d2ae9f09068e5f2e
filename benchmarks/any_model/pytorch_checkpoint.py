"""Steps of a model in PyTorch, plain and with hand-placed checkpoints: pytorch_checkpoint.py MODEL BATCH SIDE STEPS [SEGMENTS ...].

resnet101: torch.utils.checkpoint.checkpoint_sequential over the blocks, in each number of SEGMENTS.
densenet121: torchvision's own, memory_efficient=True. unet: the convolutions of every level.
Prints the median step's seconds and, of one step in a process that gives freed memory back at once,
the most resident memory above what was there before."""
import os
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
import torchvision
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/model"))
import script_models as own  # noqa: E402

torch.set_num_threads(len(os.sched_getaffinity(0)))  # the default is half of them


class Checkpointed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x)


def resnet101(segments):
    net = torchvision.models.resnet101(weights=None)
    blocks = torch.nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool, *net.layer1, *net.layer2, *net.layer3,
                                 *net.layer4, net.avgpool, torch.nn.Flatten(1), net.fc)
    return blocks, (lambda x: checkpoint_sequential(blocks, segments, x)) if segments else blocks


def densenet121(segments):
    net = torchvision.models.densenet121(weights=None, memory_efficient=segments > 0)
    return net, net


def unet(segments):
    net = own.UNet(width=16, levels=4, inputs=3, classes=10)
    if segments:
        net.down, net.up = [torch.nn.ModuleList(map(Checkpointed, part)) for part in (net.down, net.up)]
        net.mid = Checkpointed(net.mid)
    return net, lambda x: net(x).mean(dim=(2, 3))


def status_bytes(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def forget_peak():
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def steps_of(name, segments, batch, side, steps):
    """Seconds of each step, and the resident bytes that they added at most."""
    torch.manual_seed(0)
    net, forward = dict(resnet101=resnet101, densenet121=densenet121, unet=unet)[name](segments)
    net.train()
    images, classes = torch.randn(batch, 3, side, side), torch.randint(0, 10, (batch,))
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    images.requires_grad_(segments > 0)  # or the first segment would get no gradients
    F.cross_entropy(forward(images[:2]), classes[:2]).backward()  # loads code, which is no part of a step
    forget_peak()
    before, seconds = status_bytes("VmRSS"), []
    for _ in range(steps):
        start = time.time()
        F.cross_entropy(forward(images), classes).backward()
        seconds.append(time.time() - start)
    return seconds, status_bytes("VmHWM") - before


def resident_bytes(words):
    done = subprocess.run([sys.executable, *words, "--bytes"], capture_output=True, text=True, check=True,
                          env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"})
    return int(done.stdout)


def main():
    name, (batch, side, steps) = sys.argv[1], map(int, sys.argv[2:5])
    if sys.argv[-1] == "--bytes":
        print(steps_of(name, int(sys.argv[5]), batch, side, 1)[1])
        return
    for segments in [0, *map(int, sys.argv[5:] or ["1"])]:
        seconds = statistics.median(steps_of(name, segments, batch, side, steps + 1)[0][1:])
        peak = resident_bytes([sys.argv[0], name, str(batch), str(side), "1", str(segments)])
        what = f"checkpoints, segments {segments}" if segments else "plain"
        print(f"{name} {what}: {seconds:.3f} s, {peak / 2**20:.0f} MiB", flush=True)


main()
