"""`prism-jax trace`: what a profiler's trace contains, and what can be learned from it."""

import argparse
import dataclasses
from typing import Any

from ._catalogue import table


HELP = "print what a profiler's trace contains, and what can and cannot be learned from it"
_MOST_KERNELS = 10
_WIDEST = 70
_FORMATS = ("kineto", "nsight", "chakra")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "trace", metavar="TRACE", help="a file, or a folder with a file for each rank"
    )
    add_format_arguments(parser)
    parser.add_argument(
        "--ops", metavar="OPS", help="a .parquet file to write the ops of all ranks to"
    )
    parser.add_argument(
        "--job", metavar="JOB", help="a .toml file with the layout and schedule, for --ops"
    )


def add_format_arguments(parser: argparse.ArgumentParser, default: str = "kineto") -> None:
    """Adds the arguments for how to read a profiler's trace."""
    parser.add_argument(
        "--format",
        default=default,
        metavar="FORMAT",
        help=f"format of the trace: {', '.join(dict.fromkeys([default, *_FORMATS]))} ({default})",
    )
    parser.add_argument("--names", metavar="NAMES", help="a .toml file with the meaning of ranges")
    parser.add_argument(
        "--time-unit",
        choices=("s", "ms", "us", "ns"),
        help="the unit of times in the trace, if it is not that of the format",
    )


def read_names(arguments: argparse.Namespace):
    """The meaning of ranges, if a file with it is given."""
    from ..trace import read_range_names

    return read_range_names(arguments.names) if arguments.names else None


def run(arguments: argparse.Namespace) -> tuple[dict[str, Any], str]:
    from ..trace import contents, write_ops

    names = read_names(arguments)
    job = _job_of_ops(arguments)
    found = contents(_ranks(arguments), names)
    if job is not None:
        write_ops(arguments.ops, _ranks(arguments), job, names, arguments.trace)
    result = {"trace": arguments.trace, **dataclasses.asdict(found)}
    return result, "\n".join(_lines(arguments.trace, found))


def _ranks(arguments: argparse.Namespace):
    from ..trace import read_ranks

    return read_ranks(arguments.trace, arguments.format, time_unit=arguments.time_unit)


def _job_of_ops(arguments: argparse.Namespace):
    """The traced job, if ops are to be written."""
    from ..data import load_job

    if not arguments.ops and not arguments.job:
        return None
    if not arguments.job or not (arguments.ops or "").endswith(".parquet"):
        raise ValueError(
            "--ops and --job go together; give a file name that ends in `.parquet`, and the job "
            "whose layout says which rank is which worker."
        )
    return load_job(arguments.job)


def _lines(path: str, found) -> list[str]:
    world = len(found.ranks) + len(found.missing)
    events = ", ".join(f"{n:,} {name}" for name, n in found.events.items())
    ops = ", ".join(f"{n:,} {op}" for op, n in found.ops.items())
    lines = [
        f"{path}: {len(found.ranks)} of {world} ranks, {found.steps} steps of "
        f"{found.step_time_s:.5g} s on average, {found.size / 1e6:,.1f} MB of text",
        f"events: {events}",
        f"ops: {ops or 'no range has the name of an op'}",
    ]
    if found.on_device:
        lines.append(f"streams: {found.streams}; launches of CUDA graphs: {found.graph_launches}")
    if found.clocks.matched:
        ahead = ", ".join(f"{1e-3 * x:.1f}" for _, x in sorted(found.clocks.seen.items()))
        lines.append(
            f"clocks: ahead of the clock of the first rank by {ahead} us, judged by the ends of "
            f"{found.clocks.matched} collectives, which scatter by "
            f"{1e-3 * found.clocks.scatter_ns:.1f} us"
        )
    rows = [
        (
            _short(k.name),
            k.calls,
            f"{k.total_s:.4g}",
            f"{1e6 * k.median_s:.4g}",
            f"{100 * k.cv:.3g}",
        )
        for k in found.kernels[:_MOST_KERNELS]
    ]
    header = ("kernel", "calls", "total s", "median us", "CV %")
    lines += ["", table(header, rows), ""] if rows else []
    lines += [f"note: {note}" for note in found.notes]
    lines += [f"tells: {sentence}" for sentence in found.tells]
    return lines + [f"does not tell: {sentence}" for sentence in found.does_not_tell]


def _short(name: str) -> str:
    """The start of a kernel's name, and its grid."""
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 20]}...{name[-17:]}"
