"""`prism-jax sweep`: the law of a job's step time over a grid of values."""

import argparse
import functools as ft
import hashlib
from typing import Any

from ._arguments import add_job_arguments, check_out_folder
from ._devices import use_all_cores
from ._over import add_over_argument, choices_of
from ._workers import add_ray_arguments, ray_executor, shard


HELP = "simulate a job over a grid of values"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_job_arguments(parser)
    add_over_argument(parser, required=True)
    parser.add_argument(
        "--out",
        metavar="DIR",
        help="a folder for the rows (Parquet); rows that are already there are not simulated again",
    )
    parser.add_argument(
        "--shard",
        type=shard,
        default=(1, 1),
        metavar="I/N",
        help="simulate only share I of N of the rows; others simulate the rest into the same --out",
    )
    add_ray_arguments(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import load_job

    check_out_folder(arguments.out)
    over = choices_of(arguments.over)
    if arguments.shard != (1, 1) and arguments.out is None:
        raise ValueError("`--shard` simulates a share of the rows; give the `--out` of all shares.")

    def load(point):
        changes = [f"{key}={value}" for key, value in point.items()]
        return load_job(arguments.job, [*arguments.overrides, *changes])

    import itertools as it

    points = [dict(zip(over, row, strict=True)) for row in it.product(*over.values())]
    jobs = [load(point) for point in points]  # Bad input fails before JAX starts.

    import jax
    import msgspec

    from ..analysis import Points, sweep_points
    from ..prediction import check_memory
    from ..program import compile_job
    from ._load import say, tell_notes, wants_progress

    if not arguments.allow_oom:
        # Laws and latencies of kernels do not change the memory of a job.
        shapes = (msgspec.structs.replace(job, kernels=jobs[0].kernels) for job in jobs)
        for job in {msgspec.json.encode(job): job for job in shapes}.values():
            check_memory(job)
    many = Points(
        points,
        jobs,
        compile_job,
        hashlib.sha256(msgspec.json.encode(jobs)).hexdigest(),
        [msgspec.json.encode((job.schedule, job.layout.pp, job.model)) for job in jobs],
    )
    try:
        with ray_executor(arguments) as executor:
            if executor is None:
                use_all_cores()
            say(
                arguments,
                f"compiling and simulating {len(jobs):,} rows of {arguments.samples:,} steps",
            )
            frame = sweep_points(
                many,
                num_samples=arguments.samples,
                key=jax.random.key(arguments.seed),
                out=arguments.out,
                executor=executor,
                shard=arguments.shard,
                progress=wants_progress(arguments),
            )
    except (KeyboardInterrupt, RuntimeError) as error:
        if arguments.out is None:
            raise
        what = str(error).strip(".") or "interrupted"
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError
        raise kind(
            f"{what}; `{arguments.out}` keeps the rows that are done, and the same command "
            "simulates the others."
        ) from None
    tell_notes(jobs)
    rows = [
        {name: None if isinstance(x, float) and x != x else x for name, x in row.items()}
        for row in frame.to_dicts()
    ]
    found = _with_throughput(rows, jobs)
    from ._catalogue import table
    from ._other_sizes import other_sizes

    sizes = {f"row {i}": job.layout.world_size for i, job in enumerate(jobs)}
    notes = other_sizes(sizes, jobs[0].layout.world_size)
    figures = ["mean_s", "std_s", "p50_s", "p95_s", "p99_s", "world_size", "tokens_per_s_per_gpu"]
    shown = [*over, *figures]
    cells = [[_cell(row.get(name)) for name in shown] for row in found]
    text = "\n".join([table(shown, cells), *[""] * bool(notes), *notes])
    return {"job": arguments.job, "rows": found}, text


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each combination of values."""
    return result["rows"]


def _with_throughput(rows, jobs) -> list[dict[str, Any]]:
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


def _without_laws(job):
    import msgspec

    if job.kernels is None:
        return job
    kernels = msgspec.structs.replace(job.kernels, variability=())
    return msgspec.structs.replace(job, kernels=kernels)


def _cell(value) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
