"""`prism-jax fit`: a profile of a traced job."""

import argparse
import contextlib
import os
from typing import Any


HELP = "fit the latencies of a traced job and write them as a profile"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help="a table of ops (.parquet or .csv)")
    parser.add_argument(
        "--job", required=True, metavar="JOB", help="a .toml file with the layout and the schedule"
    )
    parser.add_argument(
        "--steps",
        type=steps,
        default=slice(None),
        metavar="A:B[:S]",
        help="a Python slice of the sorted steps, such as ::2 (all)",
    )
    parser.add_argument("--out", required=True, metavar="PROFILE", help="the folder to write")


def steps(text: str) -> slice:
    """A slice: `A:B` or `A:B:S`, each of which may be left out."""
    parts = text.split(":")
    try:
        numbers = [int(part) if part.strip() else None for part in parts]
    except ValueError:
        numbers = []
    if len(numbers) not in (2, 3) or (len(numbers) == 3 and numbers[2] == 0):
        raise argparse.ArgumentTypeError(f"`{text}` must be a slice such as 0:100 or ::2")
    return slice(*numbers)


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..data import load_job, save_profile
    from ..trace import read_trace

    job = load_job(arguments.job)
    trace = read_trace(arguments.trace, job)
    chosen = trace[arguments.steps]
    if not len(chosen.steps):
        raise ValueError(
            f"`--steps` chooses none of the {len(trace.steps)} whole steps; give another slice."
        )
    if os.path.exists(arguments.out) and not os.path.isdir(arguments.out):
        raise ValueError(f"{arguments.out}: this is a file; give a folder for the profile.")

    import jax

    from ..analysis import fit_profile
    from ..program import op_latencies, replay, step_graph

    with contextlib.suppress(RuntimeError):  # Within a process that has used JAX before.
        jax.config.update("jax_num_cpu_devices", os.cpu_count() or 1)
    profile = fit_profile(chosen)
    save_profile(profile, arguments.out)
    step = step_graph(job, profile.outline)
    again = replay(step, op_latencies(chosen, step))
    measured = chosen.step_times()
    result = {
        "profile": arguments.out,
        "num_steps": len(chosen.steps),
        "dropped": trace.dropped,
        "replay_error": float(max(abs(again / measured - 1))),
        "mean_step_time_s": float(measured.mean()),
        "notes": list(profile.fitted.notes),
    }
    lines = [
        f"{arguments.out}: fitted to {len(chosen.steps)} steps of {measured.mean():.5g} s on "
        f"average; their replay is within {100 * result['replay_error']:.2g} %",
        *(f"dropped: {number} {what}" for what, number in trace.dropped.items()),
        *(f"note: {note}" for note in profile.fitted.notes),
    ]
    return result, "\n".join(lines)
