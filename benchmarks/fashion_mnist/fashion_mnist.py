"""PyTorch's side of the fashion_mnist benchmark: the guide's training loop, on the data that is handed over.

usage: fashion_mnist.py DATA_FOLDER usual|lean BATCH STEPS UPDATES THREADS      (THREADS 0: PyTorch's default)
usual: a DataLoader over a dataset that turns one image at a time into a tensor, as torchvision's FashionMNIST with ToTensor does
lean:  all images as one float tensor in memory, batches by slicing: nothing is left but the training itself
Prints samples per second, after a warm-up.
"""
import gzip
import os
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


def main():
    folder, loop, batch, steps, updates, threads = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
    if threads > 0:
        torch.set_num_threads(threads)
    images = read_idx(folder, "train-images-idx3-ubyte")
    labels = read_idx(folder, "train-labels-idx1-ubyte")
    batches = DataLoader(Images(images, labels), batch_size=batch) if loop == "usual" else Slices(images, labels, batch)
    torch.manual_seed(42)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512),
                                torch.nn.ReLU(), torch.nn.Linear(512, 10))
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
    print((done - warm_up) * batch / seconds)


main()
