import dataclasses
import itertools as it
from typing import Any

from .._files import shown
from .._misc import counted
from .._summary import Column, Table, plain
from . import _load
from ._options import PROGRESS, STEPS, Given, Output, argument, command
from ._trace import formats, read_names
from ._values import check_out_folder


_MOST_MOVES = 3


@command(
    "trace.parquet --job job.toml --out profile",
    argument(
        "trace TRACE",
        "a table of ops (.parquet or .csv), or a folder with the profiler's file of each rank",
    ),
    *formats("ops"),
    argument("--job JOB", "a .toml file with the layout and the schedule", required=True),
    STEPS,
    argument("--out PROFILE", "the folder to write", required=True),
    PROGRESS,
)
def run(given: Given) -> Output:
    """Fit the latencies of a traced job, and write them as a profile."""
    from ..data import load_job
    from ..profile import save_profile

    check_out_folder(given.out)
    job = load_job(given.job)
    _load.say(given, f"reading {shown(given.trace)}")
    trace = _read(given, job)
    chosen = trace[given.steps]
    if not len(chosen.steps):
        raise ValueError(
            f"`--steps` leaves no step of {counted(len(trace.steps), 'whole step')}; give another "
            "slice."
        )

    from ..profile import fit_profile, ladder, shuffled_means
    from ..program import op_latencies, replay, step_graph

    _load.use_all_cores()
    _load.say(given, f"fitting {counted(len(chosen.steps), 'step')}")
    profile = fit_profile(chosen)
    save_profile(profile, given.out)
    what = "replaying the steps with more and more parts sampled from the fitted laws"
    _load.say(given, what)
    step = step_graph(trace.job, profile.outline)
    latencies = op_latencies(chosen, step)
    again, moved = replay(step, latencies), shuffled_means(step, latencies)
    measured, fitted = chosen.step_times(), profile.fitted
    rungs = ladder(chosen, profile)
    result = {
        "profile": given.out,
        "num_steps": len(chosen.steps),
        "dropped": trace.dropped,
        "replay_error": float(max(abs(again / measured - 1))),
        "mean_step_time_s": float(measured.mean()),
        "components": plain(fitted.components),
        "notes": list(fitted.notes),
        "moved_by_shuffling": moved,
        "ladder": plain(rungs),
    }
    head = (
        f"{given.out}: fitted to {len(chosen.steps)} steps of {measured.mean():.5g} s on average; "
        f"their replay is within {100 * result['replay_error']:.2g} %"
    )
    dropped = [f"dropped: {what} ({number})" for what, number in trace.dropped.items()]
    notes = [*dropped, *(f"note: {note}" for note in fitted.notes)]
    components = dataclasses.replace(fitted.summary(), notes=notes)
    return Output(result, [head, components, _ladder(rungs), _moved(moved)])


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


def _read(given: Given, job: Any) -> Any:
    from ..trace import read_profile_traces, read_trace

    if given.format == "ops":
        for option in ("names", "time_unit"):
            if getattr(given, option) is not None:
                raise ValueError(
                    f"--{option.replace('_', '-')} is for a profiler's trace; give its --format, "
                    "too, or leave this out: a table of ops has a column of op types, and its "
                    "times must be in seconds."
                )
        return read_trace(given.trace, job)
    return read_profile_traces(
        given.trace, job, given.format, names=read_names(given), time_unit=given.time_unit
    )


def _moved(moved: dict[str, float]) -> str:
    """The largest changes of the mean from shuffling a kind of op over the steps."""
    largest = sorted(moved, key=lambda kind: -abs(moved[kind]))[:_MOST_MOVES]
    listed = ", ".join(f"{100 * moved[kind]:+.2g} % (`{kind}`)" for kind in largest)
    return (
        f"change of the mean: {listed or 'none'}, if the latencies of one kind of op are shuffled "
        "among the steps; if a kind changes the mean by more than 0.5 %, its latencies contain a "
        "wait"
    )
