"""`prism-jax fit`: fits a profile to a trace."""

import argparse
import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec

from .._files import shown
from ._arguments import add_progress_argument, add_steps_argument, check_out_folder
from ._devices import use_all_cores
from ._trace import add_format_arguments, read_names


_MOST_MOVES = 3
HELP = "fit the latencies of a traced job, and write them as a profile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace",
        metavar="TRACE",
        help="a table of ops (.parquet or .csv), or a folder with the profiler's file of each rank",
    )
    add_format_arguments(parser, "ops")
    parser.add_argument(
        "--job", required=True, metavar="JOB", help="a .toml file with the layout and the schedule"
    )
    add_steps_argument(parser)
    parser.add_argument("--out", required=True, metavar="PROFILE", help="the folder to write")
    add_progress_argument(parser)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from .._misc import counted
    from ..data import load_job
    from ..profile import save_profile
    from ._load import say

    check_out_folder(arguments.out)
    job = load_job(arguments.job)
    say(arguments, f"reading {shown(arguments.trace)}")
    trace = _read(arguments, job)
    job = trace.job
    chosen = trace[arguments.steps]
    if not len(chosen.steps):
        raise ValueError(
            f"`--steps` leaves no step of {counted(len(trace.steps), 'whole step')}; give another "
            "slice."
        )

    from ..profile import fit_profile, ladder, shuffled_means
    from ..program import op_latencies, replay, step_graph

    use_all_cores()
    say(arguments, f"fitting {counted(len(chosen.steps), 'step')}")
    profile = fit_profile(chosen)
    save_profile(profile, arguments.out)
    say(arguments, "replaying the steps with more and more parts sampled from the fitted laws")
    step = step_graph(job, profile.outline)
    latencies = op_latencies(chosen, step)
    again, moved, rungs = (
        replay(step, latencies),
        shuffled_means(step, latencies),
        ladder(chosen, profile),
    )
    measured = chosen.step_times()
    result = {
        "profile": arguments.out,
        "num_steps": len(chosen.steps),
        "dropped": trace.dropped,
        "replay_error": float(max(abs(again / measured - 1))),
        "mean_step_time_s": float(measured.mean()),
        "components": [msgspec.to_builtins(c) for c in profile.fitted.components],
        "notes": list(profile.fitted.notes),
        "moved_by_shuffling": moved,
        "ladder": [dataclasses.asdict(rung) for rung in rungs],
    }
    lines = [
        f"{arguments.out}: fitted to {len(chosen.steps)} steps of {measured.mean():.5g} s on "
        f"average; their replay is within {100 * result['replay_error']:.2g} %",
        "components of compute, as standard deviations of logarithms (0.03 is about 3 %), except "
        "step_autocorrelation, and stall_rate, which is stalls per op",
        *(_line(component) for component in profile.fitted.components),
        *(f"dropped: {what} ({number})" for what, number in trace.dropped.items()),
        *(f"note: {note}" for note in profile.fitted.notes),
        "",
        "replayed steps; each row samples one more part from its fitted law:",
        f"{'':<22} {'mean':>10} {'p95':>10}   change of the mean from the row above",
        *_ladder_lines(rungs),
        "",
        "change of the mean: " + _moved(moved),
    ]
    return result, "\n".join(lines)


def _read(arguments: argparse.Namespace, job):
    from ..trace import read_profile_traces, read_trace

    if arguments.format == "ops":
        for option in ("names", "time_unit"):
            if getattr(arguments, option) is not None:
                raise ValueError(
                    f"--{option.replace('_', '-')} is for a profiler's trace; give its --format, "
                    "too, or leave this out: a table of ops has a column of op types, and its "
                    "times must be in seconds."
                )
        return read_trace(arguments.trace, job)
    return read_profile_traces(
        arguments.trace,
        job,
        arguments.format,
        names=read_names(arguments),
        time_unit=arguments.time_unit,
    )


def _ladder_lines(rungs) -> Iterator[str]:
    before = rungs[0]
    for rung in rungs:
        change = f"{100 * (rung.mean_s / before.mean_s - 1):+.2f} %" if rung is not before else ""
        yield f"{rung.name:<22} {rung.mean_s:>8.5g} s {rung.p95_s:>8.5g} s   {change}".rstrip()
        before = rung


def _moved(moved: dict[str, float]) -> str:
    """The largest changes of the mean from shuffling a kind of op over the steps."""
    largest = sorted(moved, key=lambda kind: -abs(moved[kind]))[:_MOST_MOVES]
    listed = ", ".join(f"{100 * moved[kind]:+.2g} % (`{kind}`)" for kind in largest)
    return (
        f"{listed or 'none'}, if the latencies of one kind of op are shuffled among the steps; "
        "if a kind changes the mean by more than 0.5 %, its latencies contain a wait"
    )


def _line(component) -> str:
    if component.value is None:
        return f"{component.name}: not known from this trace: {component.note}"
    note = f" ({component.note})" if component.note else ""
    return f"{component.name}: {component.value:.3g} +- {component.standard_error:.2g}{note}"
