"""The usual BERT, ViT and CLIP in PyTorch, with Hugging Face's names: what ours are compared with, in numbers (parity) and in time and memory (serve).

parity FOLDER   reads config.json, index.txt (a line per parameter of ours: its names here), weights.bin, inputs.bin, targets.bin and, for a
                BERT, positions.bin and mask.bin, for a CLIP tokens.bin and ends.bin; writes gradients.bin, trained.bin and losses.txt.
serve CONFIG    (JSON) prints the resident bytes at the start, then for each line on standard input runs one update and prints its seconds; at
                the end, the peak bytes above the start. "way" is "layers" (nn.TransformerEncoder) or "written" (as in parity); "head" of a
                BERT is "all" (logits of every token, as usual) or "chosen" (of those to be guessed).
"""
import json
import math
import sys
import time

import numpy
import torch
from torch import nn
from torch.nn import functional as F


def box(**parts):
    module = nn.Module()
    for name, part in parts.items():
        module.add_module(name, part)
    return module


class Layer(nn.Module):
    """A block of an encoder: post-norm as BERT's, or pre-norm as ViT's."""

    def __init__(self, config, post_norm, eps):
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.post_norm, self.num_heads = post_norm, config["num_attention_heads"]
        self.dropout, self.attention_dropout = nn.Dropout(config.get("dropout", 0.0)), nn.Dropout(config.get("dropout", 0.0))
        scores = box(query=nn.Linear(width, width), key=nn.Linear(width, width), value=nn.Linear(width, width))
        self.scores = [scores]  # registered once, under the name of the model
        norms = [nn.LayerNorm(width, eps=eps), nn.LayerNorm(width, eps=eps)]
        self.norms = [norms]
        self.intermediate = box(dense=nn.Linear(width, hidden))
        if post_norm:
            self.attention = box(**{"self": scores, "output": box(dense=nn.Linear(width, width), LayerNorm=norms[0])})
            self.output = box(dense=nn.Linear(hidden, width), LayerNorm=norms[1])
        else:
            self.attention = box(attention=scores, output=box(dense=nn.Linear(width, width)))
            self.output = box(dense=nn.Linear(hidden, width))
            self.layernorm_before, self.layernorm_after = norms

    def attend(self, x, mask):
        B, T, C = x.size()
        parts = self.scores[0]
        q, k, v = (part(x).view(B, T, self.num_heads, C // self.num_heads).transpose(1, 2) for part in (parts.query, parts.key, parts.value))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
        y = self.attention_dropout(F.softmax(scores, dim=-1)) @ v
        return self.dropout(self.attention.output.dense(y.transpose(1, 2).reshape(B, T, C)))

    def mlp(self, x):
        return self.dropout(self.output.dense(F.gelu(self.intermediate.dense(x))))

    def forward(self, x, mask=None):
        first, second = self.norms[0]
        if self.post_norm:
            x = first(x + self.attend(x, mask))
            return second(x + self.mlp(x))
        x = x + self.attend(first(x), mask)
        return x + self.mlp(second(x))


class Encoder(nn.Module):
    def __init__(self, config, post_norm, eps):
        super().__init__()
        if config.get("way") == "layers":
            layer = nn.TransformerEncoderLayer(config["hidden_size"], config["num_attention_heads"], config["intermediate_size"],
                                               config.get("dropout", 0.0), "gelu", eps, batch_first=True, norm_first=not post_norm)
            self.layer = nn.TransformerEncoder(layer, config["num_hidden_layers"])
        else:
            self.layer = nn.ModuleList([Layer(config, post_norm, eps) for _ in range(config["num_hidden_layers"])])

    def forward(self, x, mask=None):
        if not isinstance(self.layer, nn.ModuleList):
            return self.layer(x)
        for layer in self.layer:
            x = layer(x, mask)
        return x


class Bert(nn.Module):
    """BertForMaskedLM."""

    def __init__(self, config):
        super().__init__()
        width, vocabulary = config["hidden_size"], config["vocab_size"]
        self.all_logits = config.get("head") != "chosen"
        norm = lambda: nn.LayerNorm(width, eps=1e-12)
        self.bert = box(
            embeddings=box(word_embeddings=nn.Embedding(vocabulary, width), LayerNorm=norm(),
                           position_embeddings=nn.Embedding(config["max_position_embeddings"], width),
                           token_type_embeddings=nn.Embedding(config["type_vocab_size"], width)),
            encoder=Encoder(config, post_norm=True, eps=1e-12))
        self.cls = box(predictions=box(transform=box(dense=nn.Linear(width, width), LayerNorm=norm())))
        self.cls.predictions.bias = nn.Parameter(torch.zeros(vocabulary))
        self.dropout = nn.Dropout(config.get("dropout", 0.0))

    def encode(self, tokens, mask=None):
        parts = self.bert.embeddings
        x = parts.word_embeddings(tokens) + parts.position_embeddings(torch.arange(tokens.size(1)))
        x = x + parts.token_type_embeddings(torch.zeros_like(tokens))
        return self.bert.encoder(self.dropout(parts.LayerNorm(x)), mask)

    def logits(self, x):
        head = self.cls.predictions
        h = head.transform.LayerNorm(F.gelu(head.transform.dense(x)))
        return F.linear(h, self.bert.embeddings.word_embeddings.weight, head.bias)

    def forward(self, tokens, targets, positions, mask=None):
        x = self.encode(tokens, mask)
        if self.all_logits:
            targets = torch.full_like(tokens, -100).scatter(1, positions, targets)
        else:
            x = x.gather(1, positions.unsqueeze(2).expand(-1, -1, x.size(2)))
        logits = self.logits(x)
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.reshape(-1))


class Vit(nn.Module):
    """ViTForImageClassification."""

    def __init__(self, config):
        super().__init__()
        width, patch, eps = config["hidden_size"], config["patch_size"], config.get("layer_norm_eps", 1e-6)
        num_patches = (config["rows"] // patch) * (config["columns"] // patch)
        embeddings = box(patch_embeddings=box(projection=nn.Conv2d(config["channels"], width, patch, patch)))
        embeddings.cls_token = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        embeddings.position_embeddings = nn.Parameter(torch.randn(1, num_patches + 1, width) * 0.02)
        self.vit = box(embeddings=embeddings, encoder=Encoder(config, post_norm=False, eps=eps), layernorm=nn.LayerNorm(width, eps=eps))
        self.classifier = nn.Linear(width, config["classes"])
        self.dropout = nn.Dropout(config.get("dropout", 0.0))

    def logits(self, images):
        parts = self.vit.embeddings
        x = parts.patch_embeddings.projection(images).flatten(2).transpose(1, 2)
        x = torch.cat([parts.cls_token.expand(x.size(0), -1, -1), x], dim=1) + parts.position_embeddings
        x = self.vit.layernorm(self.vit.encoder(self.dropout(x)))
        return self.classifier(x[:, 0])

    def forward(self, images, targets):
        return F.cross_entropy(self.logits(images), targets)


class ClipLayer(nn.Module):
    """The same block as Layer, with the names that CLIP's has."""

    def __init__(self, config, causal):
        super().__init__()
        width, hidden = config["hidden_size"], config["intermediate_size"]
        self.num_heads, self.causal, self.quick = config["num_attention_heads"], causal, config.get("hidden_act") == "quick_gelu"
        self.self_attn = box(**{name: nn.Linear(width, width) for name in ("q_proj", "k_proj", "v_proj", "out_proj")})
        self.layer_norm1, self.layer_norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = box(fc1=nn.Linear(width, hidden), fc2=nn.Linear(hidden, width))

    def forward(self, x):
        B, T, C = x.size()
        parts, h = self.self_attn, self.layer_norm1(x)
        q, k, v = (part(h).view(B, T, self.num_heads, -1).transpose(1, 2) for part in (parts.q_proj, parts.k_proj, parts.v_proj))
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(q.size(-1))
        if self.causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), float("-inf"))
        x = x + parts.out_proj((F.softmax(scores, dim=-1) @ v).transpose(1, 2).reshape(B, T, C))
        h = self.mlp.fc1(self.layer_norm2(x))
        return x + self.mlp.fc2(h * torch.sigmoid(1.702 * h) if self.quick else F.gelu(h))


class Clip(nn.Module):
    """CLIPModel, with exact GELU unless the towers' "hidden_act" is "quick_gelu"."""

    def __init__(self, config):
        super().__init__()
        vision, text = config["vision"], config["text"]
        layers = lambda part, causal: box(layers=nn.ModuleList([ClipLayer(part, causal) for _ in range(part["num_hidden_layers"])]))
        patch, width, text_width = config["patch_size"], vision["hidden_size"], text["hidden_size"]
        num_patches = (config["rows"] // patch) * (config["columns"] // patch)
        embeddings = box(patch_embedding=nn.Conv2d(config["channels"], width, patch, patch, bias=False),
                         position_embedding=nn.Embedding(num_patches + 1, width))
        embeddings.class_embedding = nn.Parameter(torch.zeros(width))
        self.vision_model = box(embeddings=embeddings, pre_layrnorm=nn.LayerNorm(width), encoder=layers(vision, False),
                                post_layernorm=nn.LayerNorm(width))
        self.text_model = box(embeddings=box(token_embedding=nn.Embedding(config["vocab_size"], text_width),
                                             position_embedding=nn.Embedding(config["length"], text_width)),
                              encoder=layers(text, True), final_layer_norm=nn.LayerNorm(text_width))
        self.visual_projection = nn.Linear(width, config["projection_dim"], bias=False)
        self.text_projection = nn.Linear(text_width, config["projection_dim"], bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def logits(self, images, tokens, ends):
        part = self.vision_model
        x = part.embeddings.patch_embedding(images).flatten(2).transpose(1, 2)
        x = torch.cat([part.embeddings.class_embedding.expand(x.size(0), 1, -1), x], dim=1) + part.embeddings.position_embedding.weight
        x = part.pre_layrnorm(x)
        for layer in part.encoder.layers:
            x = layer(x)
        image = self.visual_projection(part.post_layernorm(x[:, 0]))
        part = self.text_model
        x = part.embeddings.token_embedding(tokens) + part.embeddings.position_embedding.weight
        for layer in part.encoder.layers:
            x = layer(x)
        text = self.text_projection(part.final_layer_norm(x)[torch.arange(x.size(0)), ends])
        image, text = (part / part.norm(dim=-1, keepdim=True) for part in (image, text))
        return image @ text.t() * self.logit_scale.exp()

    def forward(self, images, tokens, ends):
        logits = self.logits(images, tokens, ends)
        matches = torch.arange(logits.size(0))
        return (F.cross_entropy(logits, matches) + F.cross_entropy(logits.t(), matches)) / 2


def make(config):
    return {"bert": Bert, "vit": Vit, "clip": Clip}[config["model"]](config)


def parity(folder):
    config = json.load(open(folder + "/config.json"))
    model = make(config)
    lines = [line.split() for line in open(folder + "/index.txt")]
    by_name = dict(model.named_parameters())
    names = [name for line in lines for name in line]
    assert sorted(names) == sorted(by_name), sorted(set(names) ^ set(by_name))
    parameters = [by_name[name] for name in names]
    values = numpy.fromfile(folder + "/weights.bin", dtype=numpy.float32)
    assert values.size == sum(p.numel() for p in parameters)
    at = 0
    with torch.no_grad():
        for p in parameters:
            p.copy_(torch.from_numpy(values[at:at + p.numel()]).view(p.shape))
            at += p.numel()
    num_updates, batch = config["num_updates"], config["batch"]
    read = lambda name, kind, *shape: torch.from_numpy(numpy.fromfile(folder + "/" + name, dtype=kind)).view(num_updates, batch, *shape)
    if config["model"] == "bert":
        tokens, mask = read("inputs.bin", numpy.int64, -1), read("mask.bin", numpy.bool_, -1)
        batches = list(zip(tokens, read("targets.bin", numpy.int64, -1), read("positions.bin", numpy.int64, -1), mask))
    else:
        images = read("inputs.bin", numpy.float32, config["channels"], config["rows"], config["columns"])
        others = [read("targets.bin", numpy.int64)] if config["model"] == "vit" else [read("tokens.bin", numpy.int64, -1),
                                                                                      read("ends.bin", numpy.int64)]
        batches = list(zip(images, *others))
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.01)
    write = lambda name, tensors: numpy.concatenate([t.detach().numpy().ravel() for t in tensors]).tofile(folder + "/" + name)
    losses = []
    for update, tensors in enumerate(batches):
        optimizer.zero_grad(set_to_none=True)
        loss = model(*tensors)
        loss.backward()
        losses.append(loss.item())
        if update == 0:
            write("gradients.bin", [p.grad for p in parameters])
        optimizer.step()
    write("trained.bin", parameters)
    open(folder + "/losses.txt", "w").write("\n".join(repr(value) for value in losses))


def memory(key):
    for line in open("/proc/self/status"):
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024


def random_batch(config):
    if config["model"] != "bert":
        images = torch.randn(config["batch"], config["channels"], config["rows"], config["columns"])
        return images, torch.randint(0, config["classes"], (config["batch"],))
    tokens = torch.randint(0, config["vocab_size"], (config["batch"], config["length"]))
    positions = torch.rand(tokens.shape).topk(config["num_masked"], dim=1).indices
    return tokens, torch.randint(0, config["vocab_size"], positions.shape), positions


def serve(text):
    config = json.loads(text)
    torch.set_num_threads(config["threads"])
    torch.manual_seed(0)
    torch.ones(256, 256) @ torch.ones(256, 256)  # what the libraries take for themselves is not the model's
    start = memory("VmRSS")
    print(start, flush=True)
    model = make(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tensors = random_batch(config)
    for _ in sys.stdin:
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model(*tensors)
        loss.backward()
        optimizer.step()
        print(time.perf_counter() - begin, flush=True)
    print(memory("VmHWM") - start, flush=True)


if __name__ == "__main__":
    {"parity": parity, "serve": serve}[sys.argv[1]](sys.argv[2])
