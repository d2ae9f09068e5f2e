"""The usual eager Llama in PyTorch, with Hugging Face's names and config: what ours is compared with, in numbers and in time and memory.

parity FOLDER   reads config.json (Hugging Face's keys, and length, batch, num_updates), index.txt (a line per parameter of ours: its names
                here), weights.bin and tokens.bin from the folder; writes gradients.bin, trained.bin, losses.txt.
serve CONFIG    (JSON, with length, batch and threads) prints the resident bytes at the start, then for each line on standard input runs one
                update and prints its seconds; at the end, the peak bytes above the start.
"""
import json
import math
import sys

import torch
from torch import nn
from torch.nn import functional as F

from pytorch_gpt import answer, compare


class RmsNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def frequencies(config, size):
    rates = 1.0 / (config["rope_theta"] ** (torch.arange(0, size, 2).float() / size))
    scaling = config.get("rope_scaling")
    if not scaling:
        return rates
    low, high, old = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / rates
    smooth = (old / wavelengths - low) / (high - low)
    scaled = torch.where(wavelengths > old / low, rates / scaling["factor"], rates)
    between = (wavelengths <= old / low) & (wavelengths >= old / high)
    return torch.where(between, (1 - smooth) * rates / scaling["factor"] + smooth * rates, scaled)


def turned(x, cosines, sines):
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat((-high, low), dim=-1) * sines


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, bias = config["hidden_size"], config.get("attention_bias", False)
        self.num_heads, self.num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self.size = config.get("head_dim") or width // self.num_heads
        self.q_proj = nn.Linear(width, self.num_heads * self.size, bias=bias)
        self.k_proj = nn.Linear(width, self.num_kv_heads * self.size, bias=bias)
        self.v_proj = nn.Linear(width, self.num_kv_heads * self.size, bias=bias)
        self.o_proj = nn.Linear(self.num_heads * self.size, width, bias=config.get("attention_output_bias", False))

    def forward(self, x, cosines, sines, mask):
        B, T, _ = x.size()
        q, k, v = (layer(x).view(B, T, -1, self.size).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q, k = turned(q, cosines, sines), turned(k, cosines, sines)
        k, v = (t.repeat_interleave(self.num_heads // self.num_kv_heads, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(self.size)) + mask
        return self.o_proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(B, T, -1))


class Mlp(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.input_layernorm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RmsNorm(config["hidden_size"], config["rms_norm_eps"])
        self.mlp = Mlp(config)

    def forward(self, x, cosines, sines, mask):
        x = x + self.self_attn(self.input_layernorm(x), cosines, sines, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, self.config = config["hidden_size"], config
        self.model = nn.ModuleDict(dict(
            embed_tokens=nn.Embedding(config["vocab_size"], width),
            layers=nn.ModuleList([Layer(config) for _ in range(config["num_hidden_layers"])]),
            norm=RmsNorm(width, config["rms_norm_eps"]),
        ))
        self.lm_head = nn.Linear(width, config["vocab_size"], bias=False)
        if config["tie_word_embeddings"]:
            self.lm_head.weight = self.model.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, tokens):
        length, x = tokens.size(1), self.model.embed_tokens(tokens)
        size = self.model.layers[0].self_attn.size
        angles = torch.outer(torch.arange(length).float(), frequencies(self.config, size)).repeat(1, 2)
        mask = torch.full((length, length), float("-inf")).triu(1)
        for layer in self.model.layers:
            x = layer(x, angles.cos(), angles.sin(), mask)
        return self.lm_head(self.model.norm(x))

    def forward(self, tokens, targets):
        logits = self.logits(tokens)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


if __name__ == "__main__":
    if sys.argv[1] == "parity":
        config = json.load(open(sys.argv[2] + "/config.json"))
        compare(sys.argv[2], Llama(config), config["length"], config["batch"], config["num_updates"])
    else:
        config = json.loads(sys.argv[2])
        answer(lambda: Llama(config), config["length"], config["vocab_size"], config["batch"], config["threads"])
