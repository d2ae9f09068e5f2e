"""TorchScript files for the tests of the command line: script_files.py write FOLDER | hash MODEL.pt | changed MODEL.pt OTHER.pt."""
import hashlib
import sys

import torch
import torch.nn as nn


class Classifier(nn.Module):
    """Images of 1 x 12 x 12, 10 classes; a batch norm and dropout, so that buffers and random state count."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(8, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = self.drop(torch.relu(self.conv2(x))).mean(dim=(2, 3))
        return self.head(x)


class NoGradient(Classifier):
    def forward(self, x):
        with torch.no_grad():
            return self.head(self.conv(x).mean(dim=(2, 3)))


class NoDerivative(Classifier):
    """igamma has no derivative by its first argument."""

    def forward(self, x):
        x = torch.relu(self.conv(x)) + 1
        return self.head(torch.igamma(x, torch.ones_like(x)).mean(dim=(2, 3)))


class LanguageModel(nn.Module):
    """Tokens in, scores of the next token out."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.lstm = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens):
        x, _ = self.lstm(self.embed(tokens))
        return self.head(x)


class OwnLoss(LanguageModel):
    """Reads the targets and returns the mean loss."""

    def forward(self, tokens, targets):
        x, _ = self.lstm(self.embed(tokens))
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def write(folder):
    torch.manual_seed(0)
    models = dict(classifier=Classifier(), no_gradient=NoGradient(), no_derivative=NoDerivative(),
                  language_model=LanguageModel(), own_loss=OwnLoss())
    models["own_loss"].load_state_dict(models["language_model"].state_dict())
    for name, model in models.items():
        torch.jit.script(model).save(f"{folder}/{name}.pt")
    images = torch.randn(4, 1, 12, 12)
    torch.jit.trace(models["classifier"].eval(), images).save(f"{folder}/eval_trace.pt")
    torch.jit.freeze(torch.jit.script(models["classifier"].eval())).save(f"{folder}/frozen.pt")
    torch.save(models["classifier"].state_dict(), f"{folder}/state_dict.pt")
    with open(f"{folder}/classifier.pt", "rb") as whole, open(f"{folder}/truncated.pt", "wb") as part:
        part.write(whole.read()[:5000])


def print_hash(path):
    model = torch.jit.load(path)
    sha256 = hashlib.sha256()
    for _, tensor in [*model.named_parameters(), *sorted(model.named_buffers())]:  # as forward meets them
        sha256.update(tensor.detach().contiguous().numpy().tobytes())
    print(sha256.hexdigest())


def print_changed(path, other):
    """Names of the parameters that differ."""
    theirs = dict(torch.jit.load(other).named_parameters())
    print(*[name for name, p in torch.jit.load(path).named_parameters() if not torch.equal(p, theirs[name])])


dict(write=write, hash=print_hash, changed=print_changed)[sys.argv[1]](*sys.argv[2:])
