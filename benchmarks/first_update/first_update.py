#!/usr/bin/env python3
"""How long planning keeps the first update waiting, in steps of the planned run.

    first_update.py PROGRAM [ROUNDS]

Of each model: a run with a budget in a new folder, a second one in the same folder, which starts
from the profile of the first, and one without a budget, which plans nothing. What the first two
take longer than the third until their first update is made is printed in steps, the median of the
rounds.
"""
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

GPT = "dropout=0,block_size=256,vocab_size=8192,n_layer=6,n_head=6,n_embd=384"
IMAGES = "channels=3,rows=64,columns=64"
CASES = {
    "gpt 6 x 384, 8 x 256": ["--model", "gpt", "--model_config", GPT, "--global_batch_size", "8"],
    "the same, one micro-batch": ["--model", "gpt", "--model_config", GPT, "--global_batch_size",
                                  "8", "--per_device_train_batch_size", "8"],
    "bert 4 x 256, 32 x 128": ["--model", "bert", "--model_config", "dropout=0,length=128",
                               "--global_batch_size", "32"],
    "vit, 32 images": ["--model", "vit", "--model_config", IMAGES, "--global_batch_size", "32"],
    "resnet, 256 images": ["--model", "resnet", "--model_config", IMAGES, "--global_batch_size",
                           "256"],
}


def run(program, flags, folder):
    """Seconds of the process without its update, and of the update."""
    start = time.monotonic()
    subprocess.run([program, "train", "--dataset", "synthetic", "--max_steps", "1", "--output_dir",
                    folder, *flags], check=True, capture_output=True)
    seconds = time.monotonic() - start
    results = json.loads((pathlib.Path(folder) / "train_results.json").read_text())
    return seconds - results["train_runtime"], results["train_runtime"]


def measure(program, flags):
    with tempfile.TemporaryDirectory() as folder:
        plain, _ = run(program, flags, folder + "/plain")
        with_budget = [*flags, "--memory_budget", "4GiB"]
        first, step = run(program, with_budget, folder + "/planned")
        second, second_step = run(program, with_budget, folder + "/planned")
    return (first - plain) / step, (second - plain) / second_step, step


def main():
    program = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    print(f"{'':28}{'first run':>10}{'second':>10}{'step':>10}")
    for name, flags in CASES.items():
        parts = [statistics.median(part)
                 for part in zip(*(measure(program, flags) for _ in range(rounds)))]
        print(f"{name:28}{parts[0]:10.2f}{parts[1]:10.2f}{parts[2]:8.2f} s")


if __name__ == "__main__":
    main()
