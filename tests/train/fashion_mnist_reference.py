"""The guide's experiment in plain PyTorch: the reference of fashion_mnist_parity_slow_test.cpp.

usage: fashion_mnist_reference.py DATA_FOLDER OUTPUT_FOLDER
Writes weights.bin (initial parameters in order, float32) and losses.txt (one loss per update of batch 64, one epoch, sequential order).
"""
import gzip
import os
import struct
import sys

import numpy
import torch


def read_idx(folder, name):
    path = os.path.join(folder, name)
    opener = open if os.path.exists(path) else gzip.open
    with opener(path if opener is open else path + ".gz", "rb") as file:
        num_dimensions = struct.unpack(">I", file.read(4))[0] & 0xFF
        shape = struct.unpack(">" + "I" * num_dimensions, file.read(4 * num_dimensions))
        return numpy.frombuffer(file.read(), dtype=numpy.uint8).reshape(shape)


def main():
    data_folder, output_folder = sys.argv[1:]
    images = torch.from_numpy(read_idx(data_folder, "train-images-idx3-ubyte").copy()).unsqueeze(1).float().div(255)
    labels = torch.from_numpy(read_idx(data_folder, "train-labels-idx1-ubyte").copy()).long()

    torch.manual_seed(2023)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512),
                                torch.nn.ReLU(), torch.nn.Linear(512, 10))
    with open(os.path.join(output_folder, "weights.bin"), "wb") as file:
        for parameter in model.parameters():
            file.write(parameter.detach().numpy().tobytes())

    loss_of = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with open(os.path.join(output_folder, "losses.txt"), "w") as file:
        for first in range(0, len(images), 64):
            loss = loss_of(model(images[first:first + 64]), labels[first:first + 64])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            file.write("%.17g\n" % loss.item())


main()
