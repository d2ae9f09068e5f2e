"""PyTorch's DistributedDataParallel on the GPT of pytorch_gpt.py: prints samples per second over all ranks.

pytorch_ranks.py RANKS THREADS n_layer n_head n_embd length vocab_size micro_batch steps updates
"""
import os
import socket
import sys
import time

import torch
import torch.distributed
import torch.multiprocessing

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "gpt"))
from pytorch_gpt import Gpt  # noqa: E402


def run(rank, ranks, port, threads, sizes, micro_batch, steps, updates):
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    model = torch.nn.parallel.DistributedDataParallel(Gpt(*sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    length, vocab_size = sizes[3], sizes[4]
    torch.manual_seed(rank)

    def update():
        optimizer.zero_grad(set_to_none=True)
        for step in range(steps):
            text = torch.randint(vocab_size, (micro_batch, length + 1))
            tokens, targets = text[:, :-1], text[:, 1:].contiguous()
            if step + 1 < steps:
                with model.no_sync():  # gradients are summed once per update
                    (model(tokens, targets) / steps).backward()
            else:
                (model(tokens, targets) / steps).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    update()
    torch.distributed.barrier()
    start = time.perf_counter()
    for _ in range(updates):
        update()
    torch.distributed.barrier()
    if rank == 0:
        print(ranks * micro_batch * steps * updates / (time.perf_counter() - start), flush=True)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    torch.multiprocessing.spawn(run, (numbers[0], free_port, numbers[1], numbers[2:7], *numbers[7:]), nprocs=numbers[0])
