"""Plain PyTorch models with Hugging Face's names, and safetensors written and read from the format's description alone: what the folders that
Headroom writes and reads are checked with.

logits FOLDER        reads config.json and model.safetensors there; writes expected.safetensors: inputs, and the logits of the model for them.
make FAMILY FOLDER   writes a model in two shards with tensors of fp32, fp16 and bf16, and expected.safetensors: batches, their losses in turn with an
                     AdamW update after each, and under "start." and "end." the weights before and after.
equal FOLDER PREFIX  asserts that model.safetensors there holds what expected.safetensors, in the folder above, has under the prefix.
"""
import json
import os
import struct
import sys

import numpy
import torch
from torch import nn
from torch.nn import functional as F

for folder in ("encoders", "gpt"):
    sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "..", "benchmarks", folder))
import pytorch_encoders
import pytorch_llama

TYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "I32": torch.int32,
         "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}


def read(path):
    data = open(path, "rb").read()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8:8 + length].decode())
    header.pop("__metadata__", None)
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        assert begin == end, (name, begin, end)
        end = stop
        raw = bytearray(data[8 + length + begin:8 + length + stop])
        values = torch.frombuffer(raw, dtype=TYPES[entry["dtype"]]) if raw else torch.empty(0, dtype=TYPES[entry["dtype"]])
        tensors[name] = values.reshape(entry["shape"])
    assert 8 + length + end == len(data)
    return tensors


def write(path, tensors):
    names = {kind: name for name, kind in TYPES.items()}
    header, at, pieces = {"__metadata__": {"format": "pt"}}, 0, []
    for name, tensor in tensors.items():
        tensor = tensor.detach().contiguous()
        view = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
        pieces.append(view.numpy().tobytes())
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [at, at + len(pieces[-1])]}
        at += len(pieces[-1])
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(pieces))


class Conv1D(nn.Module):
    """A linear layer with its weight as (in, out)."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs) * 0.02), nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return x @ self.weight + self.bias


class Gpt2(nn.Module):
    """GPT2LMHeadModel."""

    def __init__(self, config):
        super().__init__()
        box, width = pytorch_encoders.box, config["n_embd"]
        self.num_heads, self.approximate = config["n_head"], "tanh" if config["activation_function"] == "gelu_new" else "none"
        self.transformer = box(
            wte=nn.Embedding(config["vocab_size"], width), wpe=nn.Embedding(config["n_positions"], width), ln_f=nn.LayerNorm(width),
            h=nn.ModuleList([box(ln_1=nn.LayerNorm(width), ln_2=nn.LayerNorm(width),
                                 attn=box(c_attn=Conv1D(width, 3 * width), c_proj=Conv1D(width, width)),
                                 mlp=box(c_fc=Conv1D(width, 4 * width), c_proj=Conv1D(4 * width, width))) for _ in range(config["n_layer"])]))

    def logits(self, tokens):
        B, T = tokens.shape
        x = self.transformer.wte(tokens) + self.transformer.wpe(torch.arange(T))
        mask = torch.ones(T, T, dtype=torch.bool).triu(1)
        for block in self.transformer.h:
            q, k, v = (t.view(B, T, self.num_heads, -1).transpose(1, 2) for t in block.attn.c_attn(block.ln_1(x)).chunk(3, dim=2))
            scores = (q @ k.transpose(-2, -1) / q.size(-1) ** 0.5).masked_fill(mask, float("-inf"))
            x = x + block.attn.c_proj((scores.softmax(-1) @ v).transpose(1, 2).reshape(B, T, -1))
            x = x + block.mlp.c_proj(F.gelu(block.mlp.c_fc(block.ln_2(x)), approximate=self.approximate))
        return F.linear(self.transformer.ln_f(x), self.transformer.wte.weight)

    def forward(self, tokens, targets):
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def make_model(config):
    """From config.json."""
    family = config["model_type"]
    if family == "gpt2":
        return Gpt2(config)
    if family in ("llama", "qwen2"):
        return pytorch_llama.Llama(dict(config, length=config["max_position_embeddings"], attention_bias=family == "qwen2"))
    if family == "bert":
        return pytorch_encoders.Bert(config)
    sizes = lambda image: image if isinstance(image, list) else [image, image]
    if family == "vit":
        rows, columns = sizes(config["image_size"])
        return pytorch_encoders.Vit(dict(config, rows=rows, columns=columns, channels=config["num_channels"], classes=len(config["id2label"])))
    vision, text = config["vision_config"], config["text_config"]
    rows, columns = sizes(vision["image_size"])
    return pytorch_encoders.Clip({"vision": vision, "text": text, "patch_size": vision["patch_size"], "rows": rows, "columns": columns,
                                  "channels": vision["num_channels"], "vocab_size": text["vocab_size"],
                                  "length": text["max_position_embeddings"], "projection_dim": config["projection_dim"]})


def random_batch(config, batch=3):
    """What the model reads, and for a loss its targets."""
    family = config["model_type"]
    if family in ("gpt2", "llama", "qwen2"):
        text = torch.randint(0, config["vocab_size"], (batch, config.get("n_positions", config.get("max_position_embeddings")) + 1))
        return {"tokens": text[:, :-1].contiguous()}, {"targets": text[:, 1:].contiguous()}
    if family == "bert":
        tokens = torch.randint(0, config["vocab_size"], (batch, config["max_position_embeddings"]))
        positions = torch.rand(tokens.shape).topk(3, dim=1).indices
        return {"tokens": tokens}, {"targets": torch.randint(0, config["vocab_size"], positions.shape), "positions": positions}
    part = config if family == "vit" else config["vision_config"]
    size = part["image_size"]
    rows, columns = size if isinstance(size, list) else (size, size)
    images = torch.randn(batch, part["num_channels"], rows, columns)
    if family == "vit":
        return {"images": images}, {"targets": torch.randint(0, len(config["id2label"]), (batch,))}
    text = config["text_config"]
    length = text["max_position_embeddings"]
    return {"images": images, "tokens": torch.randint(0, text["vocab_size"], (batch, length)), "ends": torch.randint(0, length, (batch,))}, {}


def logits_of(model, config, inputs):
    if config["model_type"] == "bert":
        return model.logits(model.encode(inputs["tokens"]))
    return model.logits(*inputs.values())


def logits(folder):
    torch.manual_seed(3)
    config = json.load(open(folder + "/config.json"))
    model = make_model(config)
    missing, unexpected = model.load_state_dict(read(folder + "/model.safetensors"), strict=False)
    tied = ["lm_head.weight"] if config.get("tie_word_embeddings") and config["model_type"] in ("llama", "qwen2") else []
    assert missing == tied and not unexpected, (missing, unexpected)
    inputs, _ = random_batch(config)
    with torch.no_grad():
        write(folder + "/expected.safetensors", dict(inputs, logits=logits_of(model, config, inputs)))


CONFIGS = {
    "gpt2": {"n_layer": 2, "n_head": 3, "n_embd": 24, "n_positions": 17, "vocab_size": 61, "activation_function": "gelu_new",
             "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 60},
    "llama": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 40,
              "vocab_size": 61, "max_position_embeddings": 17, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False},
    "qwen2": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
              "vocab_size": 61, "max_position_embeddings": 17, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    "bert": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "vocab_size": 61,
             "max_position_embeddings": 19, "type_vocab_size": 2, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "vit": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "image_size": [12, 8], "patch_size": 4,
            "num_channels": 2, "layer_norm_eps": 1e-12, "id2label": {"0": "cat", "1": "dog", "2": "bird"}},
    "clip": {"projection_dim": 12,
             "vision_config": {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40, "image_size": 12,
                               "patch_size": 4, "num_channels": 2, "hidden_act": "quick_gelu"},
             "text_config": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 61,
                             "max_position_embeddings": 11, "hidden_act": "gelu"}},
}


def make(family, folder):
    torch.manual_seed(4)
    config = dict(CONFIGS[family], model_type=family)
    model = make_model(config)
    kinds = [torch.float32, torch.float16, torch.bfloat16]
    weights = {}
    with torch.no_grad():
        for index, (name, parameter) in enumerate(model.named_parameters()):
            parameter.add_(torch.randn_like(parameter) * 0.05)
            weights[name] = parameter.detach().to(kinds[index % 3])
            parameter.copy_(weights[name])
    names = list(weights)
    shards = [names[:len(names) // 2], names[len(names) // 2:]]
    index = {}
    for number, part in enumerate(shards, 1):
        file = "model-%05d-of-00002.safetensors" % number
        write(folder + "/" + file, {name: weights[name] for name in part})
        index.update((name, file) for name in part)
    json.dump({"metadata": {"total_size": 0}, "weight_map": index}, open(folder + "/model.safetensors.index.json", "w"))
    json.dump(config, open(folder + "/config.json", "w"))
    expected = {"start." + name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for update in range(3):
        inputs, targets = random_batch(config)
        expected.update(("%d.%s" % (update, name), tensor) for name, tensor in list(inputs.items()) + list(targets.items()))
        optimizer.zero_grad()
        loss = model(*inputs.values(), *targets.values())
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
    expected["losses"] = torch.stack(losses)
    expected.update(("end." + name, p.detach()) for name, p in model.named_parameters())
    write(folder + "/expected.safetensors", expected)


def equal(folder, prefix):
    expected = {name[len(prefix):]: t for name, t in read(folder + "/../expected.safetensors").items() if name.startswith(prefix)}
    found = read(folder + "/model.safetensors")
    assert sorted(found) == sorted(expected), sorted(set(found) ^ set(expected))
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32 and tensor.shape == expected[name].shape, name
        assert torch.equal(tensor, expected[name]), name


if __name__ == "__main__":
    {"logits": logits, "make": make, "equal": equal}[sys.argv[1]](*sys.argv[2:])
