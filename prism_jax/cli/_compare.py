"""Jobs ranked by a figure of the step time, with their cost; and a job over a grid of values."""

import functools as ft
import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

import prism_jax as prism

from .. import data
from .._misc import plural
from .._progress import progress_bar
from .._summary import Column, Table, plain
from . import _load
from ._options import Args, Output, command
from ._outputs import Writes
from ._values import changes_of, objective, points, shard, tokens, whole


@command(
    "--objective RANDOM --over --allow-oom --tokens --price",
    how={"--samples": whole(32), "--parameters": tokens},
)
def compare(args: Args) -> Output:
    """Rank jobs, or variants of one job, by a figure of the step time, or of the time per token.

    jobs JOB...  shipped jobs (`prism-jax jobs`), or .toml files
    --samples N (16384)  steps for each job
    --parameters N  widen or narrow each model to N parameters, such as 8e9

    example: prism-jax compare gpt3-175b-h100-4096 --over schedule.virtual_stages=3,6,12
    """
    of, grid = objective(args.objective), points(args.over)
    if len(args.jobs) * len(grid) < 2:
        raise ValueError(
            "One job was given, and nothing to compare it with; give two jobs, or values of a key "
            "with `--over`."
        )
    jobs, left_out = [], []
    for name in args.jobs:
        _, variants, without = _jobs_of(args, grid, ft.partial(_variant, args, name))
        jobs += variants
        left_out += [{"job": name, **point} for point in without]
    check_cost(args, jobs)
    _load.use_devices(args, lambda: prism.program.compile_job(jobs[0]), len(jobs))
    ranking = prism.layouts.rank_layouts(jobs, of, top=len(jobs), **_load.options_of(args))
    _load.tell_notes(jobs)
    return Output(*ranked(ranking, len(jobs), args), {"left_out": left_out})


def _variant(args: Args, name: str, point: dict[str, str]) -> Any:
    """A job at a point, in the size that it is compared in."""
    job = data.load_job(name, [*args.overrides, *changes_of(point)])
    model = job.model
    if model is not None and args.parameters is not None:
        model = prism.workload.widen(model, args.parameters)
    name = ", ".join([job.name, *changes_of(point)])
    return msgspec.structs.replace(job, model=model, name=name)


def check_cost(args: Args, jobs: Sequence[Any]) -> None:
    """Raises a `ValueError` for a price without a number of tokens, and for tokens of jobs without
    any.
    """
    if args.price is not None and args.tokens is None:
        raise ValueError("`--price` needs to know for how much; give `--tokens`, too.")
    for job in jobs if args.tokens is not None else ():
        if not isinstance(job, data.Job) or job.unit != "token":
            raise ValueError(
                f"`--tokens` was given, and `{job.name}` has a model without words; leave it out."
            )


def cost(args: Args, gpus: int, seconds: float) -> dict[str, float]:
    """The GPU hours of so many GPUs for so long, and their price if there is one."""
    hours = gpus * seconds / 3600
    return {"gpu_hours": hours} | ({} if args.price is None else {"cost": hours * args.price})


def ranked(ranking: Any, top: int, args: Args) -> tuple[dict[str, Any], Table]:
    """The first `top` jobs of a ranking: as `--json` prints them, and as a table."""
    columns = _columns(args)

    def row(layout: Any) -> dict[str, Any]:
        return layout.to_json() | {name: column.of(layout) for name, column in columns.items()}

    result = ranking.to_json() | {"layouts": [*map(row, ranking.layouts[:top])]}
    result["best_by_mean"] = row(ranking.best_by_mean)
    return plain(result), ranking.summary(top, [*columns.values()])


def _columns(args: Args) -> dict[str, Any]:
    """What is shown of a ranked job besides: the size of its model where `compare` gives all a
    size, and the cost of a training.
    """
    columns = {}
    if getattr(args, "parameters", None) is not None:
        count = prism.workload.count_parameters
        columns["hidden_size"] = Column("width", lambda layout: layout.job.model.hidden_size, ",d")
        columns["parameters"] = Column("parameters", lambda layout: count(layout.job.model), ",d")
    if args.tokens is not None:

        def costs(layout: Any) -> dict[str, float]:
            return cost(args, layout.gpus, args.tokens / layout.tokens_per_s)

        columns["gpu_hours"] = Column(
            "GPU hours", lambda layout: costs(layout)["gpu_hours"], ",.0f"
        )
        if args.price is not None:
            columns["cost"] = Column("cost", lambda layout: costs(layout)["cost"], ",.0f")
    return columns


_FIGURES = ("mean", "std", "p50", "p95", "p99")
# A sweep of so many rows says first how long it will take.
_MANY_ROWS = 100


@command("SIMULATED --ray --worker-gpus", how={"--shard": shard}, csv=True, writes=Writes("--out"))
def sweep(args: Args) -> Output:
    """Simulate a job over a grid of values.

    --over KEY=VALUES... (required)  values of a key: layout.dp=16,32,64 or
        kernels.all_gather.sigma=0.01:0.2:20 (from, to, how many); can be repeated, for all
        combinations
    --out DIR  a folder for the rows (Parquet); rows that are already there are not simulated again
    --shard I/N (1/1)  simulate only share I of N of the rows; others simulate the rest into the
        same --out

    example: prism-jax sweep gpt3-175b-h100-4096 --over layout.dp=64,128 --samples 10000 --csv
    """
    grid = points(args.over)
    if args.shard != (1, 1) and args.out is None:
        raise ValueError("`--shard` simulates a share of the rows; give the `--out` of all shares.")
    is_new = args.out is None or not os.path.exists(args.out)
    if is_new and len(grid) >= _MANY_ROWS and args.ray is None:
        _tell_duration(args, grid)
    grid, jobs, left_out = _jobs_of(args, grid, ft.partial(_job_of, args))
    try:
        done = _simulated(args, grid, jobs)
    except (KeyboardInterrupt, RuntimeError, OSError) as error:
        if args.out is None:
            raise
        reason = getattr(error, "strerror", None) or str(error).strip(".")
        if isinstance(error, KeyboardInterrupt) and "interrupted" not in reason:
            reason = "interrupted"  # A library may raise one with a text of its own.
        kind = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else RuntimeError
        raise kind(
            f"{reason}; `{args.out}` keeps the rows that are done, and the same command simulates "
            "the others."
        ) from None
    _load.tell_notes(jobs)
    rows = plain(done)
    with progress_bar(len(rows), _load.wants_progress(args), "throughput", "row") as advance:
        _with_throughput(rows, jobs, advance)
    sizes = {f"row {i}": job.layout.world_size for i, job in enumerate(jobs)}
    notes = _load.other_sizes(sizes, jobs[0].layout.world_size)
    figures = [Column(f"{name}_s", error=_interval(name)) for name in _FIGURES]
    rate = f"{jobs[0].unit}s_per_s_per_gpu"
    gpus = [Column("world_size", form="d")] * ("world_size" not in grid[0])
    columns = (*grid[0], *figures, *gpus, rate)
    result = {"job": args.job, "rows": rows, "left_out": left_out}
    return Output(result, Table(columns, rows), *notes)


def _job_of(args: Args, point: dict[str, str]) -> Any:
    return data.load_job(args.job, [*args.overrides, *changes_of(point)])


def _jobs_of(
    args: Args, grid: Sequence[dict[str, str]], make: Callable[[dict[str, str]], Any]
) -> tuple[list[dict[str, str]], list[Any], list[dict[str, Any]]]:
    """The points that can be, with the job at each; and those that cannot, with the reason, which
    is also told: numbers that do not divide, a layout that does not fit the model, or too much
    memory.

    **Raises:**

    `ValueError` if none can be, or if a key never has one of its values.
    """
    points_of, jobs, left_out, checked = [], [], [], {}
    with progress_bar(len(grid), _load.wants_progress(args), "jobs", "row") as advance:
        for point in grid:
            try:
                job = make(point)
                # Laws and latencies of kernels do not change the memory of a job.
                kernels = jobs[0].kernels if jobs else job.kernels
                shape = msgspec.json.encode(msgspec.structs.replace(job, kernels=kernels))
                if shape not in checked:
                    checked[shape] = _refusal(args, job)
                if checked[shape]:
                    raise ValueError(checked[shape])
            except data.NeverValidError:
                raise
            except ValueError as error:
                left_out.append({"values": point, "why": str(error)})
            else:
                points_of.append(point)
                jobs.append(job)
            advance(1)
    if not jobs:
        why = left_out[0]["why"]
        try:
            _load.check_memory(args, make(grid[0]))
        except ValueError as error:  # Of memory it also says which layout would fit.
            why = str(error)
        also = f" (all {len(grid)} points are refused)" if len(grid) > 1 else ""
        raise ValueError(f"{why.rstrip('.')}{also}.")
    for point in left_out:
        why = point["why"].rstrip(".")
        _load.tell_note(f"{', '.join(changes_of(point['values']))} is left out: {why}.")
    return points_of, jobs, left_out


def _refusal(args: Args, job: Any) -> str:
    """Why a job cannot be simulated, or nothing."""
    try:
        if job.model is not None:
            prism.prediction.memory(job)  # Raises where the layout does not fit the model.
    except ValueError as error:
        return str(error)
    return "" if args.allow_oom else prism.prediction.shortage(job)


def _tell_duration(args: Args, grid: Sequence[dict[str, str]]) -> None:
    """Says on stderr how long a sweep will take, by its first row, which is simulated twice: the
    first time also compiles, which is kept for the others.
    """
    began = time.monotonic()
    try:
        job = _job_of(args, grid[0])
        if _refusal(args, job):
            return
    except ValueError:  # It is left out, or all are.
        return
    to_read = time.monotonic() - began
    _load.use_devices(args, lambda: prism.program.compile_job(job), len(grid))
    _load.say(args, "simulating the first row, to say how long all will take")
    options: Any = _load.options_of(args) | {"progress": False}
    to_simulate = 0.0
    for _ in range(2):
        began = time.monotonic()
        if prism.engine.simulate(prism.program.compile_job(job), **options).interrupted:
            raise KeyboardInterrupt
        to_simulate = time.monotonic() - began
    rows = -(-len(grid) // args.shard[1])
    seconds = len(grid) * to_read + rows * to_simulate
    many = f"{plural(rows, 'row')} of {plural(args.samples, 'step')}"
    with_out = "" if args.out else "; with `--out`, rows that are done are kept"
    _load.tell_note(f"{many} take about {_in_words(seconds)}, if all are like the first{with_out}.")


def _in_words(seconds: float) -> str:
    for unit, name in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.2g} {name}"
    return plural(round(seconds), "second")


def _simulated(args: Args, grid: Sequence[Any], jobs: Sequence[Any]) -> Any:
    """The rows of a sweep."""
    # Equal jobs have equal rows, whatever of them was given.
    of_jobs = hashlib.sha256()
    for job in jobs:
        of_jobs.update(msgspec.json.encode(msgspec.structs.replace(job, given=data.Given())))
    many = prism.analysis.Points(
        grid,
        jobs,
        prism.program.compile_job,
        of_jobs.hexdigest(),
        [msgspec.json.encode((job.schedule, job.layout.pp, job.model)) for job in jobs],
    )
    with _load.ray_executor(args) as executor:
        if executor is None:
            _load.use_devices(args, lambda: prism.program.compile_job(jobs[0]), len(jobs))
        _load.say(args, f"simulating {plural(len(jobs), 'row')} of {plural(args.samples, 'step')}")
        where = {"out": args.out, "executor": executor, "shard": args.shard}
        return prism.analysis.sweep_points(many, **where, **_load.options_of(args))


def _with_throughput(
    rows: list[dict[str, Any]], jobs: Sequence[Any], advance: Callable[[float], object]
) -> None:
    """Adds GPUs, tokens/s (or samples/s) per GPU and MFU to all rows, or to those of a shard."""
    by_digest: dict[bytes, Any] = {}  # Without laws, because they do not change it.
    for row in rows:
        job = jobs[row["row"]]
        laws = job.kernels and msgspec.structs.replace(job.kernels, variability=())
        key = msgspec.json.encode(msgspec.structs.replace(job, kernels=laws))
        constant = (
            by_digest[key]
            if key in by_digest
            else by_digest.setdefault(key, prism.prediction.throughput(job))
        )
        row["world_size"] = job.layout.world_size
        if constant is not None and row["mean_s"]:
            faster = sum(constant.breakdown.values()) / row["mean_s"]
            for name in ("tokens_per_s_per_gpu", "samples_per_s_per_gpu"):
                row[name] = plain(getattr(constant, name) * faster)
            row["mfu"] = None if constant.mfu is None else constant.mfu * faster
        advance(1)


def _interval(name: str) -> Callable[[dict[str, Any]], tuple[Any, Any]]:
    return lambda row: (row[f"{name}_low_s"], row[f"{name}_high_s"])
