"""Reads traces of profilers, of each rank of a job, as a trace of ops."""

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import BinaryIO, NamedTuple

from .._files import Path, check_file, shown, written_whole
from .._installed import Plugins, named, names_of
from .._misc import plural, quoted
from ..data import Job, located
from ..schedule import AbstractSchedule
from ._chakra import read_chakra
from ._join_ranks import join_ranks
from ._orders import stated_schedule
from ._profilers import read_kineto, read_nsight
from ._rank_ops import rank_ops
from ._read_trace import trace_of_rows
from ._spans import RankTrace
from ._tables import pl
from ._trace import RangeNames, Trace
from ._xla import read_xplane


class TraceReader(NamedTuple):
    """A format of traces.

    **Attributes:**

    - `suffixes`: the ends of the names of its files.
    - `read`: reads an open file into the traces of its ranks. It also takes the unit of times in
        the file (`s`, `ms`, `us` or `ns`), or `None` for that of the format.
    """

    suffixes: tuple[str, ...]
    read: Callable[[BinaryIO, str | None], list[RankTrace]]


_PLUGINS = Plugins("readers", "format of traces", TraceReader)
_FORMATS = {
    "kineto": TraceReader((".json", ".json.gz"), read_kineto),
    "chakra": TraceReader((".et", ".json"), read_chakra),
    "nsight": TraceReader((".sqlite",), read_nsight),
    "xla": TraceReader((".xplane.pb", ".pb"), read_xplane),
}
# The most bytes of a file, because a stream may be endless; and the most ranks.
_MOST_BYTES, _MOST_RANKS = 2**42, 2**20
_RANK = re.compile(r"(?:rank|gpu|worker)[-_. ]?(\d{1,7})(?!\d)", re.IGNORECASE)
_CHAKRA = re.compile(r"\.(\d{1,7})\.(?:et|json)$")  # As its converter names them.


def read_profile_traces(
    path: Path,
    job: Job,
    format: str | None = None,
    *,
    names: RangeNames | None = None,
    time_unit: str | None = None,
) -> Trace:
    """Reads the traces of a profiler on the ranks of a job.

    **Arguments:**

    - `path`: a folder with a file for each rank, or one file.
    - `job`: a job with the layout and the schedule of the traced job.
    - `format`: `kineto`, the JSON of the profilers of PyTorch and JAX; `nsight`, SQLite of Nsight
        Systems; `xla`, `xplane.pb` of JAX's profiler; `chakra`, Chakra execution traces. By default
        that of the suffix, where `.json` is `kineto`.
    - `names`: the meaning of the names of ranges; by default, those of PyTorch and Megatron-LM are
        known.
    - `time_unit`: the unit of times in the files, if it is not that of the format.

    **Returns:**

    A [`Trace`][]. If ranks are missing, its job has only the replicas that are complete.

    **Raises:**

    As `read_trace`, and `ValueError` for a file that is not a trace of that format.
    """
    ranks, schedule = read_rank_traces(path, format, time_unit=time_unit), stated_schedule(job)
    table, job, notes, hints = _joined_ops(ranks, job, schedule, names, path)
    with located(shown(path)):
        trace = trace_of_rows(table.lazy(), job, schedule, *hints[:1])
    return dataclasses.replace(trace, notes=(*trace.notes, *notes))


def write_ops(
    out: Path, ranks: Iterable[RankTrace], job: Job, names: RangeNames | None, path: Path
) -> None:
    """Writes the table of ops that `read_trace` reads, to a `.parquet` file. Other arguments are as
    in `read_profile_traces`; `path` is for messages.
    """
    table, *_ = _joined_ops(ranks, job, stated_schedule(job), names, path)
    with written_whole(out) as partial:
        table.write_parquet(partial)


def read_rank_traces(
    path: Path, format: str | None = None, *, time_unit: str | None = None
) -> Iterator[RankTrace]:
    """Reads the traces of a job's ranks, one at a time, so that only one of them is in memory.
    Arguments are as in `read_profile_traces`.

    **Raises:**

    `ValueError` if the format is not known, there are no files, a file is not a trace, or two files
    are of the same rank.
    """
    suffixes = _reader(format or _format_of(path)).suffixes
    seen: dict[int, str] = {}
    files = _files(path, suffixes)
    for file in files:
        with _opened(file) as content:
            own_format, name = format or _format_of(file), os.path.basename(file)
            # The number of a single file of a profiler may be that of a step, or a date.
            is_numbered = own_format == "chakra" or len(files) > 1
            traces = _reader(own_format).read(content, time_unit)
            for i, trace in enumerate(traces):
                rank = len(seen) if len(traces) > 1 else trace.rank
                numbers = _RANK.findall(name) or (_CHAKRA.findall(name) if is_numbered else [])
                if rank is None and numbers:
                    rank = int(numbers[-1])
                if rank is None and len(files) > 1:
                    raise ValueError(
                        "neither the file nor its name says which rank it is of; name it "
                        f"`rank<number>{suffixes[0]}`."
                    )
                rank = rank or 0
                if rank in seen:
                    raise ValueError(
                        f"this is of rank {rank}, and so is {shown(seen[rank])}; keep one of them."
                    )
                world_size = trace.world_size
                if type(world_size) is not int or world_size < 1:
                    world_size = None
                elif world_size > _MOST_RANKS:
                    raise ValueError(
                        f"its `world_size` is {quoted(world_size)}, and no job has more than "
                        f"{_MOST_RANKS:,} ranks; correct the trace."
                    )
                seen[rank] = file
                traces[i] = dataclasses.replace(trace, rank=rank, world_size=world_size)
        yield from traces


def _format_of(path: Path) -> str:
    """The format of a file, or of the files of a folder, by their suffixes."""
    name = os.fspath(path)
    names = [entry.name for entry in os.scandir(name)] if os.path.isdir(name) else [name]
    for format in names_of(_PLUGINS, _FORMATS):
        if any(file.endswith(_reader(format).suffixes) for file in names):
            return format
    return "kineto"


def _reader(format: str) -> TraceReader:
    return named(_PLUGINS, _FORMATS, format)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """The open file. Its path is put before the sentence of an error, also of one that reading it
    raises; a file that cannot be read is a `ValueError`.
    """
    try:
        check_file(path, _MOST_BYTES)
        with open(path, "rb") as file, located(shown(path)):
            yield file
    except FileNotFoundError:
        raise ValueError(f"{shown(path)}: there is no such file; give another.") from None
    except OSError as error:
        raise ValueError(
            f"{shown(path)}: it cannot be read ({error.strerror}); give another file."
        ) from None


def _files(path: Path, suffixes: tuple[str, ...]) -> list[str]:
    name = os.fspath(path)
    if not os.path.isdir(name):
        return [name]
    entries = (entry for entry in os.scandir(name) if entry.is_file())
    files = sorted(entry.path for entry in entries if entry.name.endswith(suffixes))
    if not files:
        raise ValueError(
            f"{shown(path)}: the folder has no {' or '.join(suffixes)} files; give the "
            "one with the traces of the ranks."
        )
    return files


def _joined_ops(
    ranks: Iterable[RankTrace],
    job: Job,
    schedule: AbstractSchedule | None,
    names: RangeNames | None,
    path: Path,
) -> tuple["pl.DataFrame", Job, list[str], list[str]]:
    """The table of ops that `read_trace` reads, the job with the replicas that are complete,
    warnings for readers, and reasons why ops may be missing, the likeliest first. The spans of each
    rank are freed as soon as they are read.
    """
    names = names or RangeNames()
    ops_of_ranks = [rank_ops(trace, names) for trace in ranks]
    for ops in ops_of_ranks:
        if not ops.ops or ops.graph:
            hint = "give the meaning of its ranges with --names, or record the host, too"
            if ops.graph:
                hint = "one graph holds the whole step, so its phases are not known"
            hint = _ends_early([ops.rank]) if ops.cut else hint
            raise ValueError(
                f"{shown(path)}: rank {ops.rank} has {plural(len(ops.steps), 'step')}, and no op "
                f"of them is known by its range or its launch; {hint}."
            )
    notes = [note for ops in ops_of_ranks for note in ops.notes]
    if len(ops_of_ranks) == 1 and ops_of_ranks[0].rank and job.layout.world_size == 1:
        notes.append(f"rank {ops_of_ranks[0].rank} is fitted as the only one of the layout")
        ops_of_ranks = [dataclasses.replace(ops_of_ranks[0], rank=0)]
    with located(shown(path)):
        table, job, warnings = join_ranks(ops_of_ranks, job, schedule, names.order)
    hints = (
        [_ends_early(cut)] if (cut := sorted(ops.rank for ops in ops_of_ranks if ops.cut)) else []
    )
    if any(ops.by_runs for ops in ops_of_ranks):
        hints.append(
            "neither ranges nor autograd's arrows tell apart microbatches that follow one another, "
            "so they count as one: record each in a range such as `Forward 7`, or check that the "
            "job is the traced one"
        )
    return table, job, notes + warnings, hints


def _ends_early(ranks: Sequence[int]) -> str:
    """A hint that files end early."""
    if len(ranks) == 1:
        return f"the file of rank {ranks[0]} ends early, so copy or record it again"
    return (
        f"the files of {len(ranks)} ranks end early, the first rank {ranks[0]}, so copy or record "
        "them again"
    )
