"""Low-rank adapters on models of script_models.py in plain PyTorch: script_lora.py FOLDER NAME.

"write" as third argument: writes NAME.pt, without dropout. Otherwise: FOLDER holds what Headroom saved of NAME with adapters, read by the formats' descriptions
alone; writes expected.safetensors as lora.py does.
"""
import json
import sys

import torch
import torch.nn.functional as F

import hugging_face
import lora
import script_models

MODELS = {"adaptable": script_models.Adaptable, "encoder": script_models.Encoder}


def main(folder, name):
    torch.manual_seed(5)
    config = json.load(open(folder + "/adapter_config.json"))
    model = MODELS[name](p=0.0)
    model.load_state_dict(torch.jit.load(folder + "/base_model/model.pt").state_dict())
    model.train()
    named = lora.adapt(model, hugging_face.read(folder + "/adapter_model.safetensors"), config)

    def batch():
        inputs, targets = torch.randn(6, 16), torch.randint(0, 10, (6,))
        return dict(inputs=inputs, targets=targets), lambda: F.cross_entropy(model(inputs), targets)

    expected = lora.updates(named, lora.make_optimizer(name, named.values()), batch)
    hugging_face.write(folder + "/expected.safetensors", expected)


if __name__ == "__main__":
    if sys.argv[3:] == ["write"]:
        torch.manual_seed(4)
        torch.jit.script(MODELS[sys.argv[2]](p=0.0)).save("%s/%s.pt" % (sys.argv[1], sys.argv[2]))
    else:
        main(sys.argv[1], sys.argv[2])
