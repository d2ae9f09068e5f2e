"""Trains TorchScript models at budgets from the floor to plenty, and holds Headroom to its promises.

check_budgets.py HEADROOM FOLDER [NAME ...], FOLDER as export_models.py writes it. For each model: three
updates at six budgets must give one hash, and a predicted peak that is never below the measured one and
at most 2% above. Exits with 1 when a promise is broken."""
import json
import os
import shlex
import subprocess
import sys
import tempfile

NUM_BUDGETS = 6
BATCH = 8


def run(words):
    done = subprocess.run(words, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def check(headroom, folder, name):
    with open(f"{folder}/{name}.flags") as file:
        flags = shlex.split(file.read())
    common = ["--model", f"{folder}/{name}.pt", *flags, "--global_batch_size", str(BATCH), "--trust_model", "--json",
              "--per_device_train_batch_size", str(BATCH), "--max_steps", "3", "--optim", "sgd", "--learning_rate", "0.01"]
    with tempfile.TemporaryDirectory() as output:
        train = [headroom, "train", *common, "--save_model", "false", "--output_dir", output]
        code, out, err = run([headroom, "plan", *common, "--memory_budget", "100GiB"])
        if code != 0:
            return [f"plan: {err.strip()}"]
        plan = json.loads(out)
        ample = plan["predicted_peak_bytes"]
        floor = floor_of(headroom, common, plan["bytes_by_owner"]["other"])
        problems, hashes, rows = [], set(), []
        for i in range(NUM_BUDGETS):
            budget = floor + (ample - floor) * i // (NUM_BUDGETS - 1)
            code, out, err = run([*train, "--memory_budget", str(budget)])
            if code != 0:
                problems.append(f"budget {budget}: {err.strip()}")
                continue
            result = json.loads(out)
            hashes.add(result["weights_sha256"])
            predicted, peak = result["predicted_peak_bytes"], result["peak_memory_bytes"]
            rows.append(predicted / peak - 1)
            if not peak <= predicted <= 1.02 * peak or peak > budget:
                problems.append(f"budget {budget}: peak {peak}, predicted {predicted}")
        if len(hashes) != 1:
            problems.append(f"{len(hashes)} hashes")
        shown = " ".join(f"{100 * row:.2f}" for row in rows)
        print(f"{name:20} floor {floor / 2**20:8.1f} MiB, everything kept {ample / 2**20:8.1f} MiB, "
              f"{len(hashes)} hash, predicted above measured by {shown} %", flush=True)
        return problems


def floor_of(headroom, common, other_bytes):
    """The least budget that a plan is made for: what an estimate says, or a little above."""
    code, out, err = run([headroom, "estimate", *common])
    if code != 0:
        raise SystemExit(f"estimate: {err.strip()}")
    floor = json.loads(out)["policies"][-1]["peak_bytes"] + other_bytes
    while run([headroom, "plan", *common, "--memory_budget", str(floor)])[0] != 0:
        floor += floor // 200 + 1
    return floor


def main():
    headroom, folder = sys.argv[1:3]
    names = sys.argv[3:] or sorted(f[:-6] for f in os.listdir(folder) if f.endswith(".flags"))
    broken = False
    for name in names:
        for problem in check(headroom, folder, name):
            print(f"{name}: {problem}", flush=True)
            broken = True
    return 1 if broken else 0


sys.exit(main())
