"""One rank of a small training job under the PyTorch profiler, on CPUs with gloo.

Documents of uneven length are packed into sequences of one length, and attention stays within a
document. So the compute is uneven, but the shapes are the same. Needs the extra `torch`.
"""

import contextlib
import pathlib
import time
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional


# Steps before those that are recorded: memory is allocated, and connections are made.
WARM_UP = 4


class OwnJob(NamedTuple):
    """What is trained.

    **Attributes:**

    - `kind`: `ddp`, `pp` (1F1B) or `fsdp`, of so many `ranks`, each a process.
    - `slow`: whether one rank sleeps in each forward.
    - `uneven`: whether documents are shorter than sequences.
    - `steps`: that are recorded.
    - `late`: whether `ddp` reduces gradients after the backward; else in buckets of `bucket_mb`.
    - `stalls`: in how many steps a rank sleeps for `stall_s`, which are drawn with `seed`.
    """

    kind: str
    ranks: int
    slow: bool
    uneven: bool
    steps: int
    microbatches: int
    tokens: int = 256
    width: int = 64
    layers: int = 1  # Of each stage of a pipeline, or of the model.
    sleep_s: float = 0.01
    late: bool = False
    bucket_mb: float = 25.0
    stalls: int = 0
    stall_s: float = 0.5
    seed: int = 0


def documents(job: OwnJob, step: int, rank: int, microbatch: int) -> list[int]:
    """Lengths of the documents of a sequence; the same on all stages of a pipeline."""
    if not job.uneven:
        return [job.tokens]
    data = 0 if job.kind == "pp" else rank
    rng = np.random.default_rng((step, data, microbatch))
    lengths: list[int] = []
    while sum(lengths) < job.tokens:
        drawn = int(48 * rng.uniform() ** (-1 / 1.2))
        lengths.append(min(drawn, job.tokens - sum(lengths)))
    return lengths


class _Layer(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x, lengths, sleep_s):
        q, k, v = self.qkv(functional.layer_norm(x, x.shape[-1:])).chunk(3, -1)
        parts = zip(*(y.split(lengths, 1) for y in (q, k, v)), strict=True)
        mixed = torch.cat([(a @ b.transpose(1, 2)).softmax(-1) @ c for a, b, c in parts], 1)
        if sleep_s:
            time.sleep(sleep_s)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(functional.layer_norm(x, x.shape[-1:]))))


class _Model(nn.Module):
    def __init__(self, job: OwnJob, sleep_s: float):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(job.width) for _ in range(job.layers))
        self.lengths, self.sleep_s = [job.tokens], sleep_s

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = layer(x, self.lengths, self.sleep_s if i == 0 else 0.0)
        return x


def run_ranks(rank: int, jobs: list[tuple[OwnJob, str]]) -> None:
    """A rank of some jobs of equally many ranks, one after the other: trains, and writes the rank's
    trace and when its steps started and ended."""
    for job, folder in jobs:
        _run_rank(rank, job, folder)


def _run_rank(rank: int, job: OwnJob, folder: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{pathlib.Path(folder).resolve()}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=job.ranks)
    model = _Model(job, job.sleep_s if job.slow and rank == 1 else 0.0)
    step = {"ddp": _ddp, "fsdp": _fsdp, "pp": _pipeline}[job.kind](job, rank, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    times, drawn = [], np.random.default_rng(job.seed)
    stalled = WARM_UP + drawn.choice(job.steps, job.stalls, replace=False)
    sleeping = stalled[drawn.integers(job.ranks, size=job.stalls) == rank]
    activities = [torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=0, warmup=WARM_UP, active=job.steps, repeat=1)
    with torch.profiler.profile(activities=activities, schedule=schedule) as profiler:
        for number in range(WARM_UP + job.steps):
            dist.barrier()  # Steps are measured one by one.
            start = time.perf_counter()
            with torch.profiler.record_function(f"step {number}"):
                time.sleep(job.stall_s * (number in sleeping))
                step(number)
                optimizer.step()
            times.append((start, time.perf_counter()))
            optimizer.zero_grad()
            if number < WARM_UP + job.steps - 1:
                profiler.step()
    profiler.export_chrome_trace(f"{folder}/rank{rank}.json")
    np.save(f"{folder}/times{rank}.npy", np.array(times[WARM_UP:]))
    dist.destroy_process_group()


def _ddp(job: OwnJob, rank: int, model: _Model):
    replica = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=job.bucket_mb)

    def step(number: int) -> None:
        for m in range(job.microbatches):
            model.lengths = documents(job, number, rank, m)
            last = m == job.microbatches - 1 and not job.late
            with contextlib.nullcontext() if last else replica.no_sync():
                loss = replica(torch.ones(1, job.tokens, job.width)).square().mean()
                loss.backward()
        for parameter in model.parameters() if job.late else ():
            dist.all_reduce(parameter.grad)

    return step


def _fsdp(job: OwnJob, rank: int, model: _Model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (job.ranks,))
    for module in (*model.layers, model):
        fully_shard(module, mesh=mesh)

    def step(number: int) -> None:
        for m in range(job.microbatches):
            model.lengths = documents(job, number, rank, m)
            with torch.profiler.record_function("forward"):
                loss = model(torch.ones(1, job.tokens, job.width)).square().mean()
            loss.backward()

    return step


def _pipeline(job: OwnJob, rank: int, model: _Model):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    stage = PipelineStage(model, rank, job.ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, job.microbatches, loss_fn=lambda x, y: (x - y).square().mean())
    forward, backward, now = stage.forward_one_chunk, stage.backward_one_chunk, [0]

    # Named as the runtime of PyTorch's other schedules names them.
    def named_forward(m, *args, **kwargs):
        model.lengths = documents(job, now[0], rank, m)
        with torch.profiler.record_function(f"PP:{rank}F{m}"):
            return forward(m, *args, **kwargs)

    def named_backward(m, *args, **kwargs):
        with torch.profiler.record_function(f"PP:{rank}B{m}"):
            return backward(m, *args, **kwargs)

    stage.forward_one_chunk, stage.backward_one_chunk = named_forward, named_backward
    batch = torch.ones(job.microbatches, job.tokens, job.width)
    first, last = [batch] * (rank == 0), {"target": batch} if rank == job.ranks - 1 else {}

    def step(number: int) -> None:
        now[0] = number
        schedule.step(*first, **last)

    return step
