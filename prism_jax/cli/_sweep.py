import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from .. import data
from .._summary import Column, Table, plain
from . import _load, _prism as prism
from ._options import OVER, RAY, REQUIRED, SIMULATED, Given, Output, command
from ._values import changes_of, check_out_folder, points, shard


_GRID = tuple((name, given | REQUIRED) for name, given in OVER)
_FIGURES = ("mean", "std", "p50", "p95", "p99")


@command(SIMULATED, _GRID, RAY, how={"--shard": (shard, (1, 1))}, csv=True)
def sweep(given: Given) -> Output:
    """Simulate a job over a grid of values.

    --out DIR  a folder for the rows (Parquet); rows that are already there are not simulated again
    --shard I/N  simulate only share I of N of the rows; others simulate the rest into the same
        --out

    example: prism-jax sweep gpt3-175b-h100-4096 --over layout.dp=64,128 --samples 10000 --csv
    """
    check_out_folder(given.out)
    grid = points(given.over)
    if given.shard != (1, 1) and given.out is None:
        raise ValueError("`--shard` simulates a share of the rows; give the `--out` of all shares.")
    jobs = [data.load_job(given.job, [*given.overrides, *changes_of(point)]) for point in grid]
    if not given.allow_oom:
        # Laws and latencies of kernels do not change the memory of a job.
        shapes = (msgspec.structs.replace(job, kernels=jobs[0].kernels) for job in jobs)
        for job in {msgspec.json.encode(job): job for job in shapes}.values():
            prism.prediction.check_memory(job)
    try:
        frame = _simulated(given, grid, jobs)
    except (KeyboardInterrupt, RuntimeError, OSError) as error:
        if given.out is None:
            raise
        what = getattr(error, "strerror", None) or str(error).strip(".")
        if isinstance(error, KeyboardInterrupt) and "interrupted" not in what:
            what = "interrupted"  # A library may raise one with a text of its own.
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError
        raise kind(
            f"{what}; `{given.out}` keeps the rows that are done, and the same command simulates "
            "the others."
        ) from None
    _load.tell_notes(jobs)
    rows = plain(frame.to_dicts())
    _with_throughput(rows, jobs)
    sizes = {f"row {i}": job.layout.world_size for i, job in enumerate(jobs)}
    notes = _load.other_sizes(sizes, jobs[0].layout.world_size)
    figures = [Column(f"{name}_s", error=_interval(name)) for name in _FIGURES]
    columns = (*grid[0], *figures, Column("world_size", form="d"), "tokens_per_s_per_gpu")
    table = Table(columns, rows, most=None)
    return Output({"job": given.job, "rows": rows}, [table, *notes])


def _simulated(given: Given, grid: Sequence[Any], jobs: Sequence[Any]) -> Any:
    """The rows of a sweep."""
    many = prism.analysis.Points(
        grid,
        jobs,
        prism.program.compile_job,
        hashlib.sha256(msgspec.json.encode(jobs)).hexdigest(),
        [msgspec.json.encode((job.schedule, job.layout.pp, job.model)) for job in jobs],
    )
    with _load.ray_executor(given) as executor:
        if executor is None:
            _load.use_all_cores()
        _load.say(given, f"compiling and simulating {len(jobs):,} rows of {given.samples:,} steps")
        where = {"out": given.out, "executor": executor, "shard": given.shard}
        return prism.analysis.sweep_points(many, **where, **_load.options_of(given))


def _with_throughput(rows: list[dict[str, Any]], jobs: Sequence[Any]) -> None:
    """Adds GPUs, tokens/s per GPU and MFU to all rows, or to those of a shard."""
    known: dict[bytes, Any] = {}  # Without laws, because they do not change it.
    for row in rows:
        job = jobs[row["row"]]
        laws = job.kernels and msgspec.structs.replace(job.kernels, variability=())
        key = msgspec.json.encode(msgspec.structs.replace(job, kernels=laws))
        constant = (
            known[key] if key in known else known.setdefault(key, prism.prediction.throughput(job))
        )
        row["world_size"] = job.layout.world_size
        if constant is not None and row["mean_s"]:
            faster = sum(constant.breakdown.values()) / row["mean_s"]
            row["tokens_per_s_per_gpu"] = constant.tokens_per_s_per_gpu * faster
            row["mfu"] = None if constant.mfu is None else constant.mfu * faster


def _interval(name: str) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    return lambda row: (row[f"{name}_low_s"], row[f"{name}_high_s"])
