"""The best layouts of a model on so many GPUs, and the best place of each node in one."""

import itertools as it
import os
import time
from typing import Any

import msgspec
import numpy as np

import prism_jax as prism

from .._files import shown, written_whole
from .._installed import needed
from .._misc import plural, quoted, unknown_name
from ..data import convert, load_job
from . import _load
from ._compare import check_cost, ranked
from ._options import Args, Output, command
from ._outputs import Writes
from ._values import changes_of, duration, objective, percentage, points, values, whole


@command(
    "--objective --tokens --price RANDOM --over --ray --worker-gpus",
    how={"--samples": whole(32), "--budget": duration, "--memory-margin": percentage},
    writes=Writes("--out"),
)
def layouts(args: Args) -> Output:
    """Find the best layouts of a model on a given number of GPUs, by a figure of the step time.

    job JOB  the job whose model, machine, training and batch are kept
    --gpus N (required)  how many GPUs each layout uses
    --top K (20)  rank at least K layouts
    --batch N  sequences in each step (those of the job)
    --choose KEY=VALUES...  values to choose from, such as tp=4,8 or recompute=none or
        schedule=1f1b,zb-h1; keys are tp, pp, cp, ep, virtual_stages, microbatch_size, zero,
        recompute, schedule
    --samples N (16384)  steps for each layout
    --by {simulation,mean} (simulation)  simulation, or mean: rank by the predicted mean, without
        simulation
    --budget TIME (2m)  end after this time, such as 60s or 5m, with the best so far; the order is
        fixed, so a longer budget only adds layouts
    --memory-margin SHARE (5%)  the share of a GPU's usable memory that a layout must leave free
    --out DIR  a folder for the simulated layouts (Parquet), each written as soon as it is known;
        the same search goes on from there

    example: prism-jax layouts my_job.toml --gpus 1024 --objective p95
    """
    began = time.monotonic()
    of, space = objective(args.objective), _space(args.choose)
    all_changes = [*map(changes_of, points(args.over))]
    _check_kept([*args.overrides, *it.chain(*all_changes)])
    jobs = [_sized(args, changes) for changes in all_changes]
    check_cost(args, [job for job, _ in jobs])
    prism.layouts.check_ranks(of)
    rankings: list[Any] = []
    with _load.ray_executor(args) as executor:  # First, because the cluster may not answer.
        for job, batch in jobs:
            seconds_left = args.budget - (time.monotonic() - began)
            budget = seconds_left / (len(jobs) - len(rankings))
            out = args.out and os.path.join(args.out, str(len(rankings)) * (len(jobs) > 1))
            options = {"budget": budget, "out": out, "executor": executor}
            rankings.append(_searched(args, job, batch, of, space, options))
            if rankings[-1].ended == "interrupted":
                break
    _load.tell_notes([job for job, _ in jobs])
    blocks: list[Any] = []
    results = []
    for changes, (job, batch), ranking in zip(all_changes, jobs, rankings, strict=False):
        result, table = ranked(ranking, args.top, args)
        results.append({"over": changes, "sequences": batch, **result})
        machine = f"{job.machine_text(args.gpus)}: {job.batch_text(batch)}"
        blocks += [", ".join([machine, *changes]), table]
    return Output({"job": jobs[0][0].name, "gpus": args.gpus, "searches": results}, *blocks)


def _searched(
    args: Args, job: Any, batch: int, of: Any, space: Any, options: dict[str, Any]
) -> Any:
    """The ranking of the layouts of a job."""
    enumerate_layouts = prism.layouts.enumerate_layouts
    parts = {"training": job.training, "kernels": job.kernels, "batch_size": batch, "space": space}
    of_job = (job.model, job.cluster, args.gpus)
    margin = args.memory_margin
    options = {"top": args.top, "memory_margin": margin, **options, "progress": not args.json}
    number, remainder = divmod(batch * job.schedule.num_microbatches, job.batch_size)
    if job.layout.world_size == args.gpus and number and not remainder:
        options["yours"] = _as_listed(job, number)
    if args.by == "mean":
        options["num_samples"] = None
    else:
        options |= _load.options_of(args) | {"progress": not args.json or args.progress}
    began = time.monotonic()
    try:
        listed = enumerate_layouts(*of_job, any_memory=True, **parts)
        options["budget"] -= time.monotonic() - began
        if args.by == "simulation" and options["executor"] is None:
            compile_job = prism.program.compile_job
            _load.use_devices(args, lambda: compile_job(listed[0]), args.top)
        ranking = prism.layouts.rank_layouts(listed, of, **options)
    except prism.layouts.NothingFitsError:
        enumerate_layouts(*of_job, memory_margin=margin, **parts)  # Says what would.
        raise
    if ranking.ended == "interrupted":
        _load.tell_ended(
            f"{plural(ranking.num_simulated, 'layout')} simulated; the table has what is known"
        )
    return ranking


def _as_listed(job: Any, number: int) -> Any:
    """The job with a number of microbatches, in the form of a layout of the search."""
    etp = None if job.layout.expert_tp == job.layout.tp else job.layout.etp
    layout = msgspec.structs.replace(job.layout, etp=etp)
    schedule = msgspec.structs.replace(job.schedule, num_microbatches=number)
    name = prism.layouts.layout_name(layout, schedule, job.training)
    parts = {key: getattr(job, key) for key in ("model", "cluster", "kernels")}
    parts["training"] = msgspec.structs.replace(job.training, global_batch_size=None)
    return prism.Job(layout, schedule, **parts, name=name)


def _sized(args: Args, changes: list[str]) -> tuple[Any, int]:
    """The job with a cluster that is large enough, and the number of sequences in a step."""
    changes = [*args.overrides, *changes]
    job = load_job(args.job, changes)
    cluster = prism.lowering.job_parts(job, "find layouts").cluster
    nodes = -(-args.gpus // cluster.devices_per_node)
    if nodes > cluster.num_nodes:
        job = load_job(args.job, [*changes, f"cluster.num_nodes={nodes}"])
    return job, args.batch or job.batch_size


def _check_kept(changes: list[str]) -> None:
    """Raises a `ValueError` for a change of a key that the search chooses."""
    for change in changes:
        if change.partition("=")[0].partition(".")[0] in ("layout", "schedule"):
            raise ValueError(
                f"`{quoted(change)}` has no effect here, because the search chooses layouts and "
                "schedules; use `--choose`, `--batch` or `--gpus`, or change `model`, `cluster`, "
                "`training` or `kernels`."
            )


def _space(texts: list[str]) -> Any:
    """Raises a `ValueError` of one sentence."""
    fields = {field.name for field in msgspec.structs.fields(prism.layouts.LayoutSpace)}
    space: dict[str, Any] = {}
    for text in texts:
        key, choices = values(text, "--choose", "tp=4,8")
        option = f"`--choose {quoted(text)}`"
        if key not in fields:
            raise ValueError(f"{option}: {unknown_name('key', key, fields)}")
        if key in space or len({*choices}) < len(choices):
            raise ValueError(f"{option} gives `{key}` or a value of it twice; give each once.")
        if key not in ("schedule", "recompute"):
            if not all(choice.isdecimal() and len(choice) <= 9 for choice in choices):
                raise ValueError(
                    f"{option} must be whole numbers with commas between them, such as tp=4,8."
                )
            choices = [*map(int, choices)]
        space[key] = choices
    return convert(space, prism.layouts.LayoutSpace, lambda key: "`--choose` cannot be used")


# Each has a factor of its own.
_MOST_GPUS = 10_000_000


@command("job --objective RANDOM --allow-oom")
def place(args: Args) -> Output:
    """Assign nodes to pipeline ranks and replicas by their speed, to lower the step time.

    --factors FILE  how slow each GPU, or each node, is, as `diagnose --ranks` takes it; without a
        file, factors are drawn from the job's law
    --samples N  steps to simulate for each figure (4096, or at least 512 for large jobs)
    --out NODES.csv  the file to write the placement to

    example: prism-jax place gpt3-175b-h100-4096 --factors nodes.csv --out placement.csv
    """
    if args.out is not None:
        needed("polars")  # Before the search.
    job = _load.load(args)
    devices, factors = _load.devices_per_node(job), None
    if args.factors is not None:
        measured = prism.logs.read_ranks(args.factors, job.layout.world_size, devices)
        factors = measured.compute
        if factors is None:
            raise ValueError(
                f"{shown(args.factors)}: it has collectives and no compute, which is what nodes "
                "are placed by; give a table with a column of compute."
            )

    import jax

    wanted, name = objective(args.objective), shown(args.job)
    world_size = job.layout.world_size
    if world_size > _MOST_GPUS:
        raise ValueError(f"{name}: it has {world_size:,} GPUs; up to {_MOST_GPUS:,} can be placed.")
    program, options = _load.compiled(args, job)
    of_factors, options["key"] = jax.random.split(options["key"])
    if factors is None:
        rank = program.variability.rank
        if rank is None:
            raise ValueError(
                f"{name}: the GPUs of this job do not differ; give measured --factors."
            )
        factors = np.asarray(rank.from_normal(jax.random.normal(of_factors, (program.world_size,))))
    options |= {"devices_per_node": devices, "objective": wanted}
    placement = prism.placement.place(program, factors, **options)
    lines = [plural(placement.num_samples, "step")]
    if args.out is not None:
        with written_whole(args.out) as partial:
            placement.table().write_csv(partial)
        lines.append(f"the node for each place: {args.out}")
    return Output(*_load.of(job, program), placement, lines)
