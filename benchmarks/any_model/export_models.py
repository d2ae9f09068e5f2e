"""Writes models as TorchScript files, without weights: export_models.py [--side SIDE] FOLDER [NAME ...].

Torchvision's (Debian: python3-torchvision) and those of tests/model/script_models.py, each with the
flags that give it data in FOLDER/NAME.flags."""
import argparse
import os
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision.models as models

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tests/model"))
import script_models as own  # noqa: E402


class Pooled(nn.Module):
    """Class scores of a network that gives one score for each class and pixel."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x).mean(dim=(2, 3))


class PooledOut(Pooled):
    def forward(self, x):
        return self.network(x)["out"].mean(dim=(2, 3))


class Translator(nn.Module):
    """The encoder-decoder with a loss of its own: the second half of a text from the first."""

    def __init__(self):
        super().__init__()
        self.network = own.EncoderDecoder(vocabulary=256, d=64, h=4, layers=3)

    def forward(self, tokens, targets):
        half = tokens.size(1) // 2
        scores = self.network(tokens[:, :half], tokens[:, half:])["logits"]
        return F.cross_entropy(scores.flatten(0, 1), targets[:, half:].flatten())


class Branching(nn.Module):
    """Control flow on values, on images."""

    def __init__(self):
        super().__init__()
        self.first, self.control, self.head = nn.Linear(3 * 16 * 16, 16), own.Control(), nn.Linear(16, 10)

    def forward(self, x):
        y, _ = self.control(self.first(x.flatten(1)))
        return self.head(y)


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(256, 64), nn.LSTM(64, 128, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(128, 256)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", type=int, default=64, help="of images, in pixels")
    parser.add_argument("folder")
    parser.add_argument("names", nargs="*")
    return parser.parse_args()


ARGUMENTS = arguments()


def images(classes=1000, side=ARGUMENTS.side):
    return f"--dataset synthetic --model_config channels=3,rows={side},columns={side},classes={classes}"


TOKENS = "--dataset synthetic --model_config length=64,vocab_size=256"
MODELS = dict(
    resnet50=(lambda: models.resnet50(weights=None), images()),
    resnet101=(lambda: models.resnet101(weights=None), images()),
    densenet121=(lambda: models.densenet121(weights=None), images()),
    vit_b_16=(lambda: models.vit_b_16(weights=None, image_size=ARGUMENTS.side), images()),
    swin_t=(lambda: models.swin_t(weights=None), images()),
    convnext_tiny=(lambda: models.convnext_tiny(weights=None), images()),
    efficientnet_b0=(lambda: models.efficientnet_b0(weights=None), images()),
    mobilenet_v3_large=(lambda: models.mobilenet_v3_large(weights=None), images()),
    fcn_resnet50=(lambda: PooledOut(models.segmentation.fcn_resnet50(weights=None, weights_backbone=None)),
                  images(21)),
    deeplabv3_resnet50=(lambda: PooledOut(models.segmentation.deeplabv3_resnet50(weights=None, weights_backbone=None)),
                        images(21)),
    unet=(lambda: Pooled(own.UNet(width=16, levels=4, inputs=3, classes=10)), images(10)),
    t5=(lambda: Translator(), TOKENS + " --loss model"),
    lstm=(lambda: Tagger(), TOKENS),
    control=(lambda: Branching(), images(10, side=16)),
)


def main():
    for name in ARGUMENTS.names or MODELS:
        torch.manual_seed(0)
        make, flags = MODELS[name]
        model = make().train()
        with torch.no_grad():
            for parameter in model.parameters():  # a head of zeros would stop every gradient
                if parameter.dim() > 1 and not parameter.any():
                    parameter.normal_(0, 0.05)
        torch.jit.script(model).save(f"{ARGUMENTS.folder}/{name}.pt")
        with open(f"{ARGUMENTS.folder}/{name}.flags", "w") as file:
            file.write(flags + "\n")


if __name__ == "__main__":
    main()
