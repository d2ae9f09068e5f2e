"""Writes torchvision's models as TorchScript files, without weights: export_models.py FOLDER [NAME ...]."""
import sys

import torch
import torchvision.models as models

MODELS = dict(
    resnet50=lambda: models.resnet50(weights=None),
    resnet101=lambda: models.resnet101(weights=None),
    densenet121=lambda: models.densenet121(weights=None),
    vit_b_16=lambda: models.vit_b_16(weights=None, image_size=64),
    swin_t=lambda: models.swin_t(weights=None),
    convnext_tiny=lambda: models.convnext_tiny(weights=None),
    efficientnet_b0=lambda: models.efficientnet_b0(weights=None),
    mobilenet_v3_large=lambda: models.mobilenet_v3_large(weights=None),
)

torch.manual_seed(0)
for name in sys.argv[2:] or MODELS:
    model = MODELS[name]().train()
    with torch.no_grad():
        for parameter in model.parameters():  # a head of zeros would stop every gradient
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(0, 0.05)
    torch.jit.script(model).save(f"{sys.argv[1]}/{name}.pt")
