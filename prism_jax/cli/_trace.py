from typing import Any

from .._summary import Column, Table, plain
from ._options import Argument, Given, Output, argument, command


_MOST_KERNELS = 10
_WIDEST = 70


def formats(default: str = "kineto") -> tuple[Argument, ...]:
    """How to read a profiler's trace."""
    known = ", ".join(dict.fromkeys([default, "kineto", "nsight", "chakra"]))
    return (
        argument("--format FORMAT", f"format of the trace: {known} ({default})", default=default),
        argument("--names NAMES", "a .toml file with the meaning of ranges"),
        argument(
            "--time-unit",
            "the unit of times in the trace, if it is not that of the format",
            choices=("s", "ms", "us", "ns"),
        ),
    )


def read_names(given: Given) -> Any:
    """The meaning of ranges, if a file with it is given."""
    from ..trace import read_range_names

    return read_range_names(given.names) if given.names else None


@command(
    "traces/ --format kineto",
    argument("trace TRACE", "a file, or a folder with a file for each rank"),
    *formats(),
    argument("--ops OPS", "a .parquet file to write the ops of all ranks to"),
    argument("--job JOB", "a .toml file with the layout and schedule, for --ops"),
)
def run(given: Given) -> Output:
    """Print what a profiler's trace contains, and what can and cannot be learned from it."""
    from ..trace import contents, write_ops

    names = read_names(given)
    job = _job_of_ops(given)
    found = contents(_ranks(given), names)
    if job is not None:
        write_ops(given.ops, _ranks(given), job, names, given.trace)
    kernels = Table(
        (
            Column("kernel", lambda kernel: _short(kernel.name)),
            Column("calls", form="d"),
            Column("total", "total_s", ".4g", "s"),
            Column("median", "median_s", ".4g", "us", scale=1e6),
            Column("CV", "cv", ".3g", "%", scale=100),
        ),
        found.kernels[:_MOST_KERNELS],
    )
    notes = [
        *(f"note: {note}" for note in found.notes),
        *(f"tells: {sentence}" for sentence in found.tells),
        *(f"does not tell: {sentence}" for sentence in found.does_not_tell),
    ]
    head = "\n".join(_lines(given.trace, found))
    result = {"trace": given.trace, **plain(found)}
    return Output(result, [head, *[kernels] * bool(found.kernels), "\n".join(notes)])


def _ranks(given: Given) -> Any:
    from ..trace import read_ranks

    return read_ranks(given.trace, given.format, time_unit=given.time_unit)


def _job_of_ops(given: Given) -> Any:
    """The traced job, if ops are to be written."""
    from ..data import load_job

    if not given.ops and not given.job:
        return None
    if not given.job or not (given.ops or "").endswith(".parquet"):
        raise ValueError(
            "--ops and --job go together; give a file name that ends in `.parquet`, and the job "
            "whose layout says which rank is which worker."
        )
    return load_job(given.job)


def _lines(path: str, found: Any) -> list[str]:
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
    return lines


def _short(name: str) -> str:
    """The start of a kernel's name, and its grid."""
    return name if len(name) <= _WIDEST else f"{name[: _WIDEST - 20]}...{name[-17:]}"
