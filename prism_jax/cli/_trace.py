"""Traces of profilers: what they contain, and the laws of the job that was traced."""

import dataclasses
import itertools as it
import os
from typing import Any

import prism_jax as prism

from .. import data
from .._files import shown
from .._misc import plural
from .._summary import Column, Table, picked_attributes, plain
from . import _load
from ._options import Args, Arguments, Output, arguments, command
from ._outputs import Writes


_MOST_ROWS, _MOST_KERNELS, _MOST_MOVES = 20, 10, 3
_WIDEST = 70
_IDLE = {"launches": "  for late launches", "input": "  for input", "device": "  of the device"}
_IDLE |= {"unknown": "  of unknown cause"}
# How to read a profiler's trace.
_FORMATS = """
    --format FORMAT  format of the trace: {}kineto (of PyTorch or JAX), nsight, xla, chakra (that of
        the suffix; .json is kineto)
    --names NAMES  a .toml file with the meaning of ranges
    --time-unit {{s,ms,us,ns}}  the unit of times in the trace, if it is not that of the format
"""


def _formats(more: str = "") -> Arguments:
    return arguments(_FORMATS.format(more))


def read_names(args: Args) -> Any:
    """The meaning of the ranges of a trace, if a file with it is given."""
    if args.names and not args.trace:
        raise ValueError("`--names` says what ranges of a trace mean; give a --trace, too.")
    return prism.trace.read_range_names(args.names) if args.names else None


@command(_formats())
def trace(args: Args) -> Output:
    """Print where the time of a profiled step goes, and what a profile can and cannot tell.

    trace TRACE  a file, or a folder with a file for each rank
    --ops OPS.parquet  a file to write the ops of all ranks to
    --job JOB  the job that was profiled: the parts of its predicted step are printed beside, of
        plain PyTorch also the kernels of each class; for --ops a layout and a schedule are enough

    example: prism-jax trace traces/
    """
    names = read_names(args)
    if args.ops and not args.job:
        raise ValueError(
            "--ops needs a --job; give the one whose layout says which rank is which worker."
        )
    job = data.load_job(args.job) if args.job else None
    if job is not None and job.model is None and not args.ops:
        raise ValueError(
            f"{shown(args.job)}: it has no model, so no part of its step is predicted; give a job "
            "with a model, or --ops."
        )
    profiled, parts = prism.trace.contents(_ranks(args), names), ()
    if job is not None and job.model is not None:
        parts = prism.diagnosis.measured_beside(job, profiled)
    if args.ops and job is not None:
        prism.trace.write_ops(args.ops, _ranks(args), job, names, args.trace)
    notes = [
        *(f"note: {note}" for note in profiled.notes),
        *(f"tells: {sentence}" for sentence in profiled.tells),
        *(f"does not tell: {sentence}" for sentence in profiled.does_not_tell),
    ]
    where, *tables = [table for table in _tables(profiled) if table.rows] or [None]
    result = {"trace": args.trace, **plain(profiled)} | ({"beside": parts} if parts else {})
    if job is not None and parts:
        tables = [prism.diagnosis.beside_table(job, parts), *tables]
        if classes := prism.diagnosis.kernel_classes(job, profiled):
            tables.insert(1, prism.diagnosis.classes_table(classes))
            result["classes"] = classes
    head, counts = _head(args.trace, profiled), "\n".join(_lines(profiled))
    return Output(result, head, where, *tables, counts, notes)


def _head(path: str, profiled: Any) -> str:
    """How many steps there are of what, and how long they take."""
    world = len(profiled.ranks) + len(profiled.missing)
    kind = {True: "training", False: "inference", None: "training or inference"}[profiled.training]
    spread = "" if profiled.step_cv is None else f", CV {profiled.step_cv:.2%}"
    steps = f"{plural(profiled.steps, 'step')} of {profiled.step_time_s:.5g} s{spread}"
    steps = steps if profiled.steps else "no whole step"
    return f"{path}: {kind}, {len(profiled.ranks)} of {plural(world, 'rank')}, {steps}"


def _tables(profiled: Any) -> list[Table]:
    """Where the time of a step goes, the largest first."""
    rows, split, step = [], profiled.split, 1.0
    if split is not None:
        phases = profiled.phases or {}
        parts = split.compute_s, split.exposed_s, split.idle_s, profiled.copies_s
        step = profiled.step_time_s or sum(parts) or 1.0
        rows = [
            ("compute", split.compute_s),
            *((f"  {name}", x) for name, x in phases.items() if name != "copies"),
            ("communication", split.communication_s),
            ("  exposed", split.exposed_s),
            ("copies alone", profiled.copies_s),
            ("idle", split.idle_s),
            *(
                (_IDLE.get(part.cause, f"  in {part.cause}"), part.seconds)
                for part in profiled.idle
            ),
        ]
    of_what = "of a step" if profiled.steps else "of the recording"
    columns = (
        Column(of_what, "name"),
        _ms("time", "seconds"),
        Column("share", "seconds", ".1f", "%", scale=100 / step),
    )
    rows = [
        {"name": name, "seconds": seconds} for name, seconds in rows if seconds or name[0] != " "
    ]
    of_rank = f" on rank {profiled.rank}" if profiled.by_rank else ""
    of_rank += ", of the median step time" if of_rank and profiled.steps else ""
    where = Table(columns, rows, f"Where the time goes{of_rank}")
    talks = Table(
        (
            *(Column("collective", "kind"), "group", "ranks", Column("elements", "size")),
            *(Column("calls", form=".3g"), Column("data", "bytes", ".4g", "MB", scale=1e-6)),
            *(_ms("time", "seconds"), _ms("exposed", "exposed_s")),
            Column("rate", lambda row: row.bytes and row.bytes / row.seconds / 1e9, ".4g", "GB/s"),
        ),
        profiled.collectives,
        "Collectives of a step: what one rank puts in, and how long they run",
        most=_MOST_ROWS,
    )
    parts = ("compute", "communication", "exposed", "idle")
    ranks = Table(
        ("rank", _ms("step", "step_time_s"), *(_ms(name, f"split.{name}_s") for name in parts)),
        [rank for rank in profiled.by_rank if rank.split is not None],
        "Ranks",
        most=_MOST_ROWS,
    )
    kernels = Table(
        (
            *(
                Column("kernel", lambda kernel: _short(kernel.name)),
                "kind",
                Column("calls", form="d"),
            ),
            *(Column("total", "total_s", ".4g", "s"), _ms("median", "median_s")),
            Column("CV", "cv", ".3g", "%", scale=100),
        ),
        profiled.kernels[:_MOST_KERNELS],
        ", ".join(f"{kind} {1e3 * x:.4g} ms" for kind, x in profiled.kinds.items() if x)
        + f" {of_what}",
    )
    regions = (Column("region", lambda row: _short(row.name)), _ms("kernels", "seconds"))
    return [where, talks, ranks, kernels, Table(regions, profiled.regions[:_MOST_KERNELS])]


def _ranks(args: Args) -> Any:
    return prism.trace.read_rank_traces(args.trace, args.format, time_unit=args.time_unit)


def _ms(name: str, key: str) -> Column:
    return Column(name, key, ".4g", "ms", scale=1e3)


def _lines(profiled: Any) -> list[str]:
    events = ", ".join(f"{n:,} {name}" for name, n in profiled.events.items())
    ops = ", ".join(f"{n:,} {op}" for op, n in profiled.ops.items())
    lines = [
        f"events: {events}; {profiled.size / 1e6:,.1f} MB of text",
        f"ops: {ops or 'none is known by its range or its launch'}",
    ]
    if profiled.on_device:
        lines.append(
            f"streams: {profiled.streams}; launches of CUDA graphs: {profiled.graph_launches}"
        )
    if profiled.clocks.matched:
        ahead = ", ".join(f"{1e-3 * x:.1f}" for _, x in sorted(profiled.clocks.seen.items()))
        lines.append(
            f"clocks: ahead of the clock of the first rank by {ahead} us, judged by the ends of "
            f"{profiled.clocks.matched} collectives, which scatter by "
            f"{1e-3 * profiled.clocks.scatter_ns:.1f} us"
        )
    return lines


def _short(name: str) -> str:
    """The start and the end of a name."""
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 20]}...{name[-17:]}"


@command(
    _formats("ops, "),
    "--steps --progress",
    writes=Writes("--out", names=lambda: prism.profile.FILES),
)
def fit(args: Args) -> Output:
    """Fit the latencies of a traced job, and write them as a profile.

    trace TRACE  a table of ops (.parquet or .csv), or a folder with the profiler's file of each
        rank
    --job JOB (required)  a .toml file with the layout and the schedule
    --out PROFILE (required)  the folder to write

    example: prism-jax fit trace.parquet --job job.toml --out profile
    """
    job = data.load_job(args.job)
    _load.say(args, f"reading {shown(args.trace)}")
    trace = _read(args, job)
    chosen = trace[args.steps]
    if not len(chosen.steps):
        raise ValueError(
            f"`--steps` leaves no step of {plural(len(trace.steps), 'whole step')}; give another "
            "slice."
        )
    _load.use_all_cores()
    _load.say(args, f"fitting {plural(len(chosen.steps), 'step')}")
    profile = prism.profile.fit_profile(chosen)
    prism.profile.save_profile(profile, args.out, overwrite=args.force)
    _load.say(args, "replaying the steps with more and more parts sampled from the fitted laws")
    step, latencies = prism.profile.traced_graph(chosen, profile.outline)
    again = prism.profile.replayed_step_times(step, latencies)
    moved = prism.profile.shuffled_means(step, latencies)
    measured, fitted = chosen.step_times(), profile.fitted
    rungs = prism.profile.ladder(chosen, profile)
    result = {
        "profile": args.out,
        "num_steps": len(chosen.steps),
        "dropped": trace.dropped,
        "replay_error": float(max(abs(again / measured - 1))),
        "mean_step_time_s": float(measured.mean()),
        **picked_attributes(fitted, "components", "notes"),
        "moved_by_shuffling": moved,
        "ladder": rungs,
    }
    head = (
        f"{args.out}: fitted to {plural(len(chosen.steps), 'step')} of {measured.mean():.5g} s "
        f"on average; their replay is within {100 * result['replay_error']:.2g} %"
    )
    dropped = [f"dropped: {reason} ({number})" for reason, number in trace.dropped.items()]
    notes = [*dropped, *(f"note: {note}" for note in fitted.notes)]
    components = dataclasses.replace(fitted.summary(), notes=notes)
    return Output(result, head, components, _ladder(rungs), _moved(moved))


def _ladder(rungs: Any) -> Table:
    changes = [None, *(100 * (b.mean_s / a.mean_s - 1) for a, b in it.pairwise(rungs))]
    rows = [{"rung": rung, "change": change} for rung, change in zip(rungs, changes, strict=True)]
    columns = (
        Column("part", "rung.name"),
        Column("mean", "rung.mean_s", ".5g", "s"),
        Column("p95", "rung.p95_s", ".5g", "s"),
        Column("change of the mean from the row above", "change", "+.2f", "%"),
    )
    title = "replayed steps; each row samples one more part from its fitted law:"
    return Table(columns, rows, title)


def _read(args: Args, job: Any) -> Any:
    is_table = args.format is None and os.fspath(args.trace).endswith((".parquet", ".csv"))
    if args.format == "ops" or is_table:
        for option in ("names", "time_unit"):
            if getattr(args, option) is not None:
                raise ValueError(
                    f"--{option.replace('_', '-')} is for a profiler's trace; give its --format, "
                    "too, or leave this out: a table of ops has a column of op types, and its "
                    "times must be in seconds."
                )
        return prism.trace.read_trace(args.trace, job)
    options = {"names": read_names(args), "time_unit": args.time_unit}
    return prism.trace.read_profile_traces(args.trace, job, args.format, **options)


def _moved(moved: dict[str, float]) -> str:
    """The largest changes of the mean from shuffling a kind of op over the steps."""
    largest = sorted(moved, key=lambda kind: -abs(moved[kind]))[:_MOST_MOVES]
    listed = ", ".join(f"{100 * moved[kind]:+.2g} % (`{kind}`)" for kind in largest)
    return (
        f"change of the mean: {listed or 'none'}, if the latencies of one kind of op are shuffled "
        "among the steps; if a kind changes the mean by more than 0.5 %, its latencies contain a "
        "wait"
    )
