"""`prism-jax predict`: a job's step without variability, and its parts."""

import argparse

from .._summary import Column, Table, plain
from . import _load
from ._command import Output, command
from ._options import ALLOW_OOM, NO_PROFILE, SET


@command(
    "print the step time without variability, and its parts, within seconds",
    "gpt3-175b-h100-4096 --set training.dtype=fp8",
    NO_PROFILE,
    SET,
    ALLOW_OOM,
    csv=True,
)
def run(arguments: argparse.Namespace) -> Output:
    from ..data import load_job
    from ..prediction import check_memory, predict, throughput

    job = load_job(arguments.job, arguments.overrides)
    if not arguments.allow_oom:
        check_memory(job)
    found = predict(job)
    _load.tell_notes([job])
    per_gpu = throughput(job)
    assert per_gpu is not None  # `predict` raises where a job has no model.
    result = {"job": job.name, "world_size": job.layout.world_size, **plain(found)}
    result["step_time_s"] = {"mean": result.pop("mean")}
    result["throughput"] = plain(per_gpu)
    head = (
        f"{job.name}: {found.mean:.5g} s a step on {job.layout.world_size:,} GPUs, without "
        "variability"
    )
    columns = (
        Column("part"),
        Column("time", "seconds", ".4g", "s"),
        Column("share", "seconds", ".1f", "%", scale=100 / found.mean),
    )
    parts = [{"part": name, "seconds": seconds} for name, seconds in found.breakdown.items()]
    table = Table(columns, sorted(parts, key=lambda row: -row["seconds"]), most=None)
    sends = f"{found.exposed_send_recv:.3g} s for send_recvs"
    pipeline = f"pipeline: waiting for other stages, of which {sends}" * (job.layout.pp > 1)
    return Output(result, ["\n".join([head, *per_gpu.lines()]), table, pipeline])
