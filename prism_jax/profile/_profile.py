"""Profiles: the latencies of a traced job, as a folder of readable files."""

import hashlib
import itertools as it
import json
import os
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

from .._files import read_file, shown
from .._misc import plural, quoted
from .._summary import Column, Shown, Table
from ..data import (
    MAX_BLOCKS,
    Call,
    Count,
    Job,
    Layout,
    Name,
    NonNegative,
    Outline,
    Positive,
    ScheduleConfig,
    Variation,
    check_job,
    convert,
    is_profile,
    read_rows,
    read_toml,
    read_variations,
    without_none,
    write_csv,
    write_toml,
    write_variations,
)
from ..program import check_variability, variability_of


_PROFILE = "profile.toml"
_MEANS = "means.csv"
_LAWS = "variability.csv"
_SETS = "microbatches.csv"
_POSITIONS = "positions.csv"
_TABLES = (_MEANS, _LAWS, _SETS, _POSITIONS)
# What a profile may have in its folder.
FILES = (_PROFILE, *_TABLES)
# As of all tables.
_MOST_BYTES = 2**26


class WorkerMean(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mean latency of a kind of op on one worker, in seconds. For compute, `loading` is how
    strongly the factor `f` of its microbatch's data acts: the op takes `1 + loading (f - 1)` times
    its mean.
    """

    kind: Name
    dp_rank: Annotated[int, msgspec.Meta(ge=0)]
    stage: Annotated[int, msgspec.Meta(ge=0)]
    mean_s: NonNegative
    loading: NonNegative = 1.0


class PositionFactor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The latency of a kind of op of a stage for one microbatch of the step, over its mean for all
    microbatches.
    """

    kind: Name
    stage: Annotated[int, msgspec.Meta(ge=0)]
    microbatch: Annotated[int, msgspec.Meta(ge=0)]
    factor: NonNegative


class Component(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A component of the variability of compute.

    **Attributes:**

    - `name`: the name of the component, such as `rank`, `step` or `microbatch`.
    - `value`, `standard_error`: the standard deviation and its standard error; `None` if they
        cannot be estimated from the trace.
    - `note`: why they cannot be estimated, or a warning.
    """

    name: Name
    value: float | None = None
    standard_error: float | None = None
    note: str = ""


class Fitted(Shown, msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a profile was fitted to, and what could not be estimated from the trace.

    `level` is the factor by which `means` were scaled, because the mean of all laws together
    differed from that of the steps.
    """

    num_steps: Count
    dropped: dict[str, int] = {}
    notes: tuple[str, ...] = ()
    components: tuple[Component, ...] = ()
    level: Positive = 1.0

    def summary(self) -> Table:
        columns = (
            Column("component", "name"),
            Column("value", error="standard_error"),
            Column("+-", "standard_error", ".2g"),
            "note",
        )
        title = (
            "Components of compute, as standard deviations of logarithms (0.03 is about 3 %), "
            "except step_autocorrelation, and stall_rate, which is stalls per op"
        )
        return Table(columns, self.components, title)


class Profile(msgspec.Struct, frozen=True):
    """The latencies of a traced job, on the workers that were traced.

    **Attributes:**

    - `name`, `layout`, `schedule`: the name, layout and schedule of the job.
    - `outline`: the ops that workers run before and after the pipeline.
    - `means`: the mean latency of each kind of op on each worker. A worker that is always slow has
        longer means.
    - `variability`: the laws around the means, as in [`Kernels`][prism_jax.data.Kernels].
    - `fitted`: what the profile was fitted to.
    - `sets`: measured factors of the data of microbatches, if they are not given by a law in
        `variability`. Each row has factors that were measured one after the other; in a step, a
        replica takes as many consecutive factors as it has microbatches. Rows of length one make
        microbatches independent.
    - `positions`: factors on `means` for positions of microbatches in the step; one for positions
        that are not listed.
    """

    name: str
    layout: Layout
    schedule: ScheduleConfig
    outline: Outline
    means: tuple[WorkerMean, ...]
    variability: tuple[Variation, ...]
    fitted: Fitted
    sets: tuple[tuple[float, ...], ...] = ()
    positions: tuple[PositionFactor, ...] = ()

    @property
    def job(self) -> Job:
        """The job, without a model and a cluster."""
        return Job(self.layout, self.schedule, name=self.name)

    def header(self, num_ops: int) -> str:
        """What was traced, in a line, of which a replica has so many ops."""
        ranks = plural(self.layout.world_size, "rank")
        return f"{self.name}: {ranks}, {plural(num_ops, 'op')}"


_Row = TypeVar("_Row", WorkerMean, PositionFactor)


class _FactorRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of `microbatches.csv`; the rows of one stretch are consecutive."""

    stretch: Annotated[int, msgspec.Meta(ge=0)]
    factor: NonNegative


class _ProfileFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: Name
    layout: Layout
    schedule: ScheduleConfig
    fitted: Fitted
    before: tuple[Call, ...] = ()
    after: tuple[Call, ...] = ()
    slow_links: tuple[tuple[int, int], ...] = ()
    gathered: tuple[Name, ...] = ()
    digest: str = ""


def save_profile(
    profile: Profile, folder: str | os.PathLike[str], *, overwrite: bool = False
) -> None:
    """Writes a profile to a folder: `profile.toml`, `means.csv`, `variability.csv` and, if it has
    them, the sets as `microbatches.csv` and the positions as `positions.csv`. A profile that is
    there is replaced.

    `profile.toml` has a digest of all files. It is removed first and written last, so that a folder
    that was left half-written, or that two have written to at once, is not taken for a profile.

    **Arguments:**

    - `overwrite`: whether to replace files of these names, too, that are of no profile.

    **Raises:**

    `ValueError` if `folder` is a file, or holds such files.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: this is a file; give a folder to write the profile to.")
    if not overwrite:
        _check_own(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _PROFILE).unlink(missing_ok=True)
    outline = msgspec.structs.astuple(profile.outline)
    header = _ProfileFile(profile.name, profile.layout, profile.schedule, profile.fitted, *outline)
    sets = [_FactorRow(number, f) for number, stretch in enumerate(profile.sets) for f in stretch]
    contents = {_LAWS: write_variations(folder / _LAWS, profile.variability)}
    for name, row_type, rows in (
        (_MEANS, WorkerMean, profile.means),
        (_SETS, _FactorRow, sets),
        (_POSITIONS, PositionFactor, profile.positions),
    ):
        if rows or name == _MEANS:
            cells = [msgspec.structs.astuple(row) for row in rows]
            contents[name] = write_csv(folder / name, row_type.__struct_fields__, cells)
        else:
            (folder / name).unlink(missing_ok=True)
    table = without_none(msgspec.to_builtins(header))
    write_toml(folder / _PROFILE, "profile", table | {"digest": _digest(table, contents)})


def _check_own(folder: pathlib.Path) -> None:
    """Raises if a folder holds files that a profile would replace, and is not one."""
    there = [name for name in FILES if os.path.lexists(folder / name)]
    if not there:
        return
    try:
        read_toml(folder / _PROFILE, "profile")
    except ValueError:
        raise ValueError(
            f"{shown(folder)}: it has a `{there[0]}` that is of no profile; give another folder, "
            "or remove that file."
        ) from None


def _digest(table: Mapping[str, Any], contents: Mapping[str, bytes]) -> str:
    """A digest of `profile.toml` without its `digest`, and of the other files by their names."""
    text = json.dumps({**table, "digest": ""}, sort_keys=True, default=str)
    digest = hashlib.sha256(text.encode())
    for name, content in sorted(contents.items()):
        digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def load_profile(folder: str | os.PathLike[str]) -> Profile:
    """Reads a profile from a folder that `save_profile` wrote, or that was written by hand, without
    the `digest`.

    **Raises:**

    A `ValueError` of one sentence that names the file and the key or line, or says that the files
    were not written together.
    """
    path = pathlib.Path(folder)
    file = path / _PROFILE
    if not is_profile(folder):
        raise ValueError(
            f"{shown(path)}: there is no `profile.toml` in it; give the folder of a profile."
        )
    table = read_toml(file, "profile")
    header = convert(table, _ProfileFile, lambda key: shown(file))
    _check_size(header, file)
    if header.digest:
        there = [name for name in _TABLES if os.path.lexists(path / name)]
        contents = {name: read_file(path / name, _MOST_BYTES) for name in there}
        if _digest(table, contents) != header.digest:
            raise ValueError(
                f"{shown(path)}: its files were not written together, or one was changed; fit the "
                "profile again or, if the change is meant, remove the key `digest` from its "
                "`profile.toml`."
            )
    means = _read_once(path / _MEANS, WorkerMean, ("dp_rank", "stage"))
    laws = read_variations(path / _LAWS, lambda law: check_variability(variability_of([law])))
    sets = _read_sets(path / _SETS, header.schedule.num_microbatches)
    file, positions = path / _POSITIONS, ()
    if file.exists():
        positions = _read_once(file, PositionFactor, ("stage", "microbatch"))
    outline = Outline(header.before, header.after, header.slow_links, header.gathered)
    of_job = (header.name, header.layout, header.schedule, outline)
    return Profile(*of_job, means, laws, header.fitted, sets, positions)


def _read_once(
    file: pathlib.Path, row_type: type[_Row], names: tuple[str, str]
) -> tuple[_Row, ...]:
    """The rows of a file; no two have the same kind and the same values of `names`."""
    rows: dict[tuple[str, str], _Row] = {}
    for where, row in read_rows(file, row_type):
        place = ", ".join(f"{name} {getattr(row, name)}" for name in names)
        if (row.kind, place) in rows:
            raise ValueError(
                f"{where}: `{quoted(row.kind)}` of {place} has two rows; keep one of them."
            )
        rows[row.kind, place] = row
    return tuple(rows.values())


def _read_sets(file: pathlib.Path, num_microbatches: int) -> tuple[tuple[float, ...], ...]:
    """The factors of microbatches by stretch; empty if there is no file."""
    if not file.exists():
        return ()
    stretches = tuple(
        tuple(row.factor for _, row in rows)
        for _, rows in it.groupby(read_rows(file, _FactorRow), lambda pair: pair[1].stretch)
    )
    lengths = {len(stretch) for stretch in stretches}
    if len(lengths) != 1 or not (lengths == {1} or min(lengths) >= num_microbatches):
        raise ValueError(
            f"{shown(file)}: its stretches have {sorted(lengths)[:3]} factors; give all the same "
            f"number, one or at least num_microbatches = {num_microbatches}."
        )
    if not any(map(any, stretches)):
        raise ValueError(f"{shown(file)}: all factors are zero; give some that are not.")
    return stretches


def _check_size(header: _ProfileFile, file: pathlib.Path) -> None:
    """Raises if the graph, which has the workers of all replicas, would be too large for memory."""
    check_job(Job(header.layout, header.schedule, name=header.name), shown(file))
    workers, microbatches = header.layout.dp * header.layout.pp, header.schedule.num_microbatches
    if workers * microbatches > MAX_BLOCKS:
        raise ValueError(
            f"{shown(file)}: the step has {workers} workers times {microbatches} microbatches, "
            f"more than the {MAX_BLOCKS:,} blocks that fit; check `layout` and "
            "`schedule.num_microbatches`."
        )
