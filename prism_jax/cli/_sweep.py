"""`prism-jax sweep`: the law of a job's step time over a grid of values."""

import argparse
import functools as ft
import hashlib
import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any

from .._summary import Column, Table, plain
from . import _load
from ._command import Output, argument, command
from ._options import SIMULATED, over
from ._over import choices_of
from ._values import check_out_folder, shard
from ._workers import RAY, ray_executor


_FIGURES = ("mean_s", "std_s", "p50_s", "p95_s", "p99_s")


@command(
    "simulate a job over a grid of values",
    "gpt3-175b-h100-4096 --over layout.dp=64,128 --samples 10000 --csv",
    *SIMULATED,
    over(required=True),
    argument(
        "--out",
        "DIR",
        "a folder for the rows (Parquet); rows that are already there are not simulated again",
    ),
    argument(
        "--shard",
        "I/N",
        "simulate only share I of N of the rows; others simulate the rest into the same --out",
        shard,
        (1, 1),
    ),
    *RAY,
    csv=True,
)
def run(arguments: argparse.Namespace) -> Output:
    from ..data import load_job

    check_out_folder(arguments.out)
    choices = choices_of(arguments.over)
    if arguments.shard != (1, 1) and arguments.out is None:
        raise ValueError("`--shard` simulates a share of the rows; give the `--out` of all shares.")
    points = [dict(zip(choices, row, strict=True)) for row in it.product(*choices.values())]
    jobs = [  # Bad input fails before JAX starts.
        load_job(arguments.job, [*arguments.overrides, *(f"{k}={v}" for k, v in point.items())])
        for point in points
    ]

    import msgspec

    from ..prediction import check_memory

    if not arguments.allow_oom:
        # Laws and latencies of kernels do not change the memory of a job.
        shapes = (msgspec.structs.replace(job, kernels=jobs[0].kernels) for job in jobs)
        for job in {msgspec.json.encode(job): job for job in shapes}.values():
            check_memory(job)
    try:
        frame = _simulated(arguments, points, jobs)
    except (KeyboardInterrupt, RuntimeError, OSError) as error:
        if arguments.out is None:
            raise
        what = str(error).strip(".") or "interrupted"
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError
        raise kind(
            f"{what}; `{arguments.out}` keeps the rows that are done, and the same command "
            "simulates the others."
        ) from None
    _load.tell_notes(jobs)
    rows = _with_throughput(plain(frame.to_dicts()), jobs)
    sizes = {f"row {i}": job.layout.world_size for i, job in enumerate(jobs)}
    notes = _load.other_sizes(sizes, jobs[0].layout.world_size)
    figures = [Column(name, error=_half_width(name)) for name in _FIGURES]
    columns = (*choices, *figures, Column("world_size", form="d"), "tokens_per_s_per_gpu")
    table = Table(columns, rows, most=None)
    return Output({"job": arguments.job, "rows": rows}, [table, *notes])


def _simulated(arguments: argparse.Namespace, points: Sequence[Any], jobs: Sequence[Any]) -> Any:
    """The rows of a sweep."""
    import jax
    import msgspec

    from ..analysis import Points, sweep_points
    from ..program import compile_job

    many = Points(
        points,
        jobs,
        compile_job,
        hashlib.sha256(msgspec.json.encode(jobs)).hexdigest(),
        [msgspec.json.encode((job.schedule, job.layout.pp, job.model)) for job in jobs],
    )
    with ray_executor(arguments) as executor:
        if executor is None:
            _load.use_all_cores()
        what = f"compiling and simulating {len(jobs):,} rows of {arguments.samples:,} steps"
        _load.say(arguments, what)
        return sweep_points(
            many,
            num_samples=arguments.samples,
            key=jax.random.key(arguments.seed),
            out=arguments.out,
            executor=executor,
            shard=arguments.shard,
            progress=_load.wants_progress(arguments),
        )


def _with_throughput(rows: list[dict[str, Any]], jobs: Sequence[Any]) -> list[dict[str, Any]]:
    """The rows with GPUs, tokens/s per GPU and MFU."""
    import msgspec

    from ..prediction import throughput

    @ft.cache
    def per_gpu(shape: bytes) -> Any:
        return throughput(shapes[shape])

    keys = [msgspec.json.encode(_without_laws(job)) for job in jobs]
    shapes = dict(zip(keys, jobs, strict=True))
    found = []
    for row in rows:  # All rows, or only those of a shard.
        job, constant = jobs[row["row"]], per_gpu(keys[row["row"]])
        more: dict[str, Any] = {"world_size": job.layout.world_size}
        if constant is not None and row["mean_s"]:
            faster = sum(constant.breakdown.values()) / row["mean_s"]
            more["tokens_per_s_per_gpu"] = constant.tokens_per_s_per_gpu * faster
            more["mfu"] = None if constant.mfu is None else constant.mfu * faster
        found.append(row | more)
    return found


def _half_width(name: str) -> Callable[[dict[str, Any]], float]:
    """How uncertain a figure of a row is; `nan` where that is not known."""
    low, high = name.replace("_s", "_low_s"), name.replace("_s", "_high_s")
    return lambda row: ((row.get(high) or math.nan) - (row.get(low) or math.nan)) / 2


def _without_laws(job: Any) -> Any:
    import msgspec

    if job.kernels is None:
        return job
    kernels = msgspec.structs.replace(job.kernels, variability=())
    return msgspec.structs.replace(job, kernels=kernels)
