"""Low-rank adapters in plain PyTorch, from a folder in PEFT's layout that Headroom wrote, read by the formats' descriptions alone.

FOLDER   holds adapter_config.json, adapter_model.safetensors and the base model in base/; writes expected.safetensors: batches, their losses in turn
         with an update after each, and under "gradient." and "end." the first gradients and the last values of the adapters by their names.
"""
import json
import sys

import torch
from torch import nn

import hugging_face


class Lora(nn.Module):
    """y + alpha / r * B A x."""

    def __init__(self, layer, a, b, scale):
        super().__init__()
        self.layer, self.scale = layer, scale
        self.lora_A, self.lora_B = nn.Parameter(a), nn.Parameter(b)

    def forward(self, x):
        return self.layer(x) + (x @ self.lora_A.t()) @ self.lora_B.t() * self.scale


def adapt(model, adapters, config):
    """Puts the adapters into the model; their parameters by name."""
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    start, named = "base_model.model.", {}
    for key in adapters:
        assert key.startswith(start) and key.endswith((".lora_A.weight", ".lora_B.weight")), key
        if not key.endswith(".lora_A.weight"):
            continue
        path = key[len(start):-len(".lora_A.weight")]
        assert any(("." + path).endswith("." + target) for target in config["target_modules"]), path
        a, b = adapters[key], adapters[key.replace("lora_A", "lora_B")]
        parent, _, child = path.rpartition(".")
        layer = Lora(model.get_submodule(path), a, b, config["lora_alpha"] / config["r"])
        assert a.shape[0] == b.shape[1] == config["r"]
        setattr(model.get_submodule(parent), child, layer)
        named[key], named[key.replace("lora_A", "lora_B")] = layer.lora_A, layer.lora_B
    assert sorted(named) == sorted(adapters)
    return named


def make_optimizer(model_type, parameters):
    """AdamW divides each gradient by its size. Of CLIP's, which is a difference between like samples, that leaves the rounding."""
    if model_type == "clip":
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01, eps=1e-6)


def updates(named, optimizer, batch):
    """Three updates with what `batch` gives, tensors by name and a function for their loss: what expected.safetensors holds."""
    expected, losses = {}, []
    for update in range(3):
        tensors, loss_of_batch = batch()
        expected.update(("%d.%s" % (update, name), tensor) for name, tensor in tensors.items())
        optimizer.zero_grad()
        loss = loss_of_batch()
        loss.backward()
        losses.append(loss.detach())
        if update == 0:
            expected.update(("gradient." + name, p.grad.clone()) for name, p in named.items())
        optimizer.step()
    expected["losses"] = torch.stack(losses)
    expected.update(("end." + name, p.detach()) for name, p in named.items())
    return expected


def main(folder):
    torch.manual_seed(5)
    base = json.load(open(folder + "/base/config.json"))
    config = json.load(open(folder + "/adapter_config.json"))
    assert config["peft_type"] == "LORA" and config["bias"] == "none", config
    assert config["fan_in_fan_out"] == (base["model_type"] == "gpt2")
    model = hugging_face.make_model(base)
    model.load_state_dict(hugging_face.read(folder + "/base/model.safetensors"), strict=False)
    named = adapt(model, hugging_face.read(folder + "/adapter_model.safetensors"), config)
    def batch():
        inputs, targets = hugging_face.random_batch(base)
        return {**inputs, **targets}, lambda: model(*inputs.values(), *targets.values())

    expected = updates(named, make_optimizer(base["model_type"], named.values()), batch)
    hugging_face.write(folder + "/expected.safetensors", expected)


if __name__ == "__main__":
    main(sys.argv[1])
