"""PyTorch's side of the fashion_mnist benchmark: the guide's training loop, on the data that is handed over.

usage: fashion_mnist.py DATA_FOLDER MODEL usual|lean BATCH STEPS UPDATES THREADS      (THREADS 0: PyTorch's default)
MODEL: mlp, nin or resnet, as src/model has them
usual: a DataLoader over a dataset that turns one image at a time into a tensor, as torchvision's FashionMNIST with ToTensor does
lean:  all images as one float tensor in memory, batches by slicing: nothing is left but the training itself
Prints samples per second after a warm-up, and the most resident bytes of the process.
"""
import gzip
import os
import resource
import struct
import sys
import time

import numpy
import torch
from torch.utils.data import DataLoader, Dataset


def read_idx(folder, name):
    path = os.path.join(folder, name)
    opener = open if os.path.exists(path) else gzip.open
    with opener(path if opener is open else path + ".gz", "rb") as file:
        num_dimensions = struct.unpack(">I", file.read(4))[0] & 0xFF
        shape = struct.unpack(">" + "I" * num_dimensions, file.read(4 * num_dimensions))
        return numpy.frombuffer(file.read(), dtype=numpy.uint8).reshape(shape).copy()


class Images(Dataset):
    def __init__(self, images, labels):
        self.images = torch.from_numpy(images)
        self.labels = torch.from_numpy(labels).long()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index].unsqueeze(0).float().div(255), int(self.labels[index])


class Slices:
    def __init__(self, images, labels, batch):
        self.images = torch.from_numpy(images).unsqueeze(1).float().div(255)
        self.labels = torch.from_numpy(labels).long()
        self.batch = batch

    def __iter__(self):
        for first in range(0, len(self.images), self.batch):
            yield self.images[first:first + self.batch], self.labels[first:first + self.batch]


def convolution(into, out, kernel, stride, bias):
    return torch.nn.Conv2d(into, out, kernel, stride=stride, padding=kernel // 2, bias=bias)


def with_norm(into, out, kernel, stride):
    return convolution(into, out, kernel, stride, False), torch.nn.BatchNorm2d(out), torch.nn.ReLU()


class Residual(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first = torch.nn.Sequential(*with_norm(width, width, 3, 1))
        self.second = torch.nn.Sequential(convolution(width, width, 3, 1, False), torch.nn.BatchNorm2d(width))

    def forward(self, x):
        return torch.relu(x + self.second(self.first(x)))


def classifier(width):
    return torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(width, 10)


def make_model(name):
    if name == "mlp":
        layers = [torch.nn.Flatten(), torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU(),
                  torch.nn.Linear(512, 10)]
    elif name == "nin":
        blocks = [(1, 32, 1), (32, 64, 2), (64, 128, 2)]
        layers = [layer for into, out, stride in blocks for layer in (*with_norm(into, out, 3, stride), *with_norm(out, out, 1, 1))]
        layers += classifier(128)
    else:
        layers = [convolution(1, 16, 3, 2, True), *[Residual(16) for _ in range(8)], *classifier(16)]
    return torch.nn.Sequential(*layers)


def main():
    folder, name, loop = sys.argv[1:4]
    batch, steps, updates, threads = map(int, sys.argv[4:])
    if threads > 0:
        torch.set_num_threads(threads)
    images = read_idx(folder, "train-images-idx3-ubyte")
    labels = read_idx(folder, "train-labels-idx1-ubyte")
    batches = DataLoader(Images(images, labels), batch_size=batch) if loop == "usual" else Slices(images, labels, batch)
    torch.manual_seed(42)
    model = make_model(name)
    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    warm_up = 20 * steps
    done = 0
    total = 0.0
    for x, y in batches:
        if done == warm_up:
            start = time.perf_counter()
        loss = loss_of(model(x), y) / steps
        loss.backward()
        total += loss.item()
        done += 1
        if done % steps == 0:
            optimizer.step()
            optimizer.zero_grad()
        if done == warm_up + updates * steps:
            break
    seconds = time.perf_counter() - start
    print((done - warm_up) * batch / seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


main()
