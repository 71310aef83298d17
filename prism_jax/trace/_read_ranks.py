"""Reads traces of profilers as a trace of ops."""

import dataclasses
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from .._files import shown, written_whole
from .._misc import counted
from ..data import Job
from ._formats import read_ranks
from ._join_ranks import JoinedOps, join_ranks
from ._range_names import RangeNames, Reader
from ._rank_ops import rank_ops
from ._read_trace import COLUMNS, trace_of_rows
from ._spans import RankTrace
from ._trace import Trace


if TYPE_CHECKING:
    import polars as pl


def read_profile_traces(
    path: str | os.PathLike[str],
    job: Job,
    format: str = "kineto",
    *,
    names: RangeNames | None = None,
    time_unit: str | None = None,
) -> Trace:
    """Reads the traces of a profiler on the ranks of a job.

    **Arguments:**

    - `path`: a folder with a file for each rank, or one file.
    - `job`: a job with the layout and the schedule of the traced job.
    - `format`: `kineto`, the JSON of the PyTorch profiler; `nsight`, SQLite of Nsight Systems;
        `chakra`, Chakra execution traces.
    - `names`: the meaning of the names of ranges; by default, those of PyTorch and Megatron-LM are
        known.
    - `time_unit`: the unit of times in the files, if it is not that of the format.

    **Returns:**

    A [`Trace`][]. If ranks are missing, its job has only the replicas that are complete.

    **Raises:**

    As `read_trace`, and `ValueError` for a file that is not a trace of that format.
    """
    joined = joined_ops(read_ranks(path, format, time_unit=time_unit), job, names, path)
    hint = _ends_early(joined.cut) if joined.cut else None
    trace = trace_of_rows(table_of(joined).lazy(), path, joined.job, hint)
    return dataclasses.replace(trace, notes=joined.notes)


def write_ops(
    out: str | os.PathLike[str],
    ranks: Iterable[RankTrace],
    job: Job,
    names: RangeNames | None,
    path: str | os.PathLike[str],
) -> None:
    """Writes the table of ops that `read_trace` reads.

    **Arguments:**

    - `out`: a `.parquet` file.
    - `ranks`, `job`, `names`: as in `read_profile_traces`.
    - `path`: the path of the ranks, for messages.
    """
    table = table_of(joined_ops(ranks, job, names, path))
    with written_whole(out) as partial:
        table.write_parquet(partial)


def joined_ops(
    ranks: Iterable[RankTrace], job: Job, names: RangeNames | None, path: str | os.PathLike[str]
) -> JoinedOps:
    """The joined ops of all ranks. The spans of each rank are freed as soon as they are read."""
    reader = Reader(names)
    found, notes, cut = [], [], []
    number = job.schedule.num_microbatches * job.schedule.virtual_stages
    for trace in ranks:
        found.append(rank_ops(trace, trace.rank or 0, reader, number))
        cut += [trace.rank or 0] if trace.cut else []
        notes += [f"rank {trace.rank}: {note}" for note in trace.notes]
    for ops in found:
        if not ops.ops:
            hint = (
                "give their meaning with --names, or record them with `record_function`"
                if ops.rank not in cut
                else _ends_early([ops.rank])
            )
            raise ValueError(
                f"{shown(path)}: rank {ops.rank} has {counted(len(ops.steps), 'step')}, and no op "
                f"was found by names of ranges or by its pattern; {hint}."
            )
    if told := [ops.rank for ops in found if ops.by_pattern]:
        notes.append(
            f"no range names the compute of {counted(len(told), 'rank')}, the first {told[0]}: "
            "microbatches were found by the pattern of the host's operators"
        )
    joined = join_ranks(found, job, reader.order, shown(path))
    notes += joined.notes
    return dataclasses.replace(joined, notes=tuple(notes), cut=tuple(sorted(cut)))


def _ends_early(ranks: Sequence[int]) -> str:
    """A hint that files end early."""
    if len(ranks) == 1:
        return f"the file of rank {ranks[0]} ends early, so copy or record it again"
    return (
        f"the files of {len(ranks)} ranks end early, the first rank {ranks[0]}, so copy or record "
        "them again"
    )


def table_of(joined: JoinedOps) -> "pl.DataFrame":
    """The table of ops that `read_trace` reads from a file."""
    import polars as pl

    order = (
        "dp_rank",
        "stage",
        "virtual_stage",
        "step",
        "optype",
        "seq_id",
        "start_ts",
        "duration",
    )
    return pl.DataFrame(
        sorted(joined.rows, key=lambda row: (row[3], row[0], row[1], row[6])),
        schema={name: getattr(pl, COLUMNS[name]) for name in order},
        orient="row",
    )
