"""Sweeps: the law of the step time over a grid of values, with common random numbers."""

import dataclasses
import functools as ft
import hashlib
import io
import itertools as it
import json
import os
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from importlib.metadata import version
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._files import read_file, shown, written_whole
from .._installed import needed
from .._misc import check_type, quoted, unknown_name
from .._progress import progress_bar
from ..engine import simulate_each
from ..law import figures
from ..program import Program, digest
from ..random import key_data
from ..workers import run_tasks


_ABOUT = "sweep.json"
# The largest sizes, in bytes, of the file about the sweep and of the file of a row.
_MOST_ABOUT, _MOST_PART = 2**16, 2**24


# The most rows in one call to a worker, which compiles once for them; and the fewest calls in each
# shard of the rows, so that all workers have work.
_CHUNK = 8
_CALLS = 8

Row = dict[str, Any]


def sweep(
    program: Program,
    overrides: Mapping[str, Sequence[float]],
    *,
    num_samples: int = 100_000,
    key: "jax.Array",
    out: str | os.PathLike[str] | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> Any:
    """Simulates a program for every combination of values of its parameters.

    Code is compiled once for all of them, and all use the same random numbers.

    **Arguments:**

    - `program`: the step.
    - `overrides`: the values of each parameter. A parameter is given by its dotted name in the
        program, such as `variability.residual.gemm.sigma`.
    - `num_samples`, `key`: as in `simulate`.
    - `out`: a folder to which a Parquet file is written for each row as soon as it is done, with
        a digest in its name. Rows of the same sweep that are already there are not simulated again.
    - `executor`: simulates several rows in parallel, a few in each call. It can be any
        `concurrent.futures.Executor`, such as a
        [`RayExecutor`][prism_jax.workers.RayExecutor], or a `ProcessPoolExecutor` whose start
        method is `spawn`. The results are the same; only this process writes files.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A `polars.DataFrame` with a row for each combination: its values, and the mean, the standard
    deviation and quantiles of the step time in seconds, with their confidence intervals.

    **Raises:**

    `ValueError` if a name is not of a parameter, if a value is not a number, or if the folder holds
    another sweep, a row of another or a damaged one. `BrokenExecutor` if workers died; `out` then
    holds all other rows.
    """
    check_type(program, Program, "program", "use `compile_job` to get one")
    check_type(overrides, Mapping, "mapping", "give such as `{'latencies.mean': [0.01, 0.02]}`")
    if not isinstance(out, str | None):
        check_type(out, os.PathLike, "path of a folder", "give a string or a path")
    if executor is not None:
        check_type(executor, Executor, "executor", "use such as `ThreadPoolExecutor` to get one")
    for name, choices in overrides.items():
        check_type(name, str, "name of a parameter", "give such as 'latencies.mean'")
        _parameter(program, name)
        _check_numbers(name, choices)
    pl, values = needed("polars"), grid(overrides)
    points = Points(values, values, ft.partial(_with_values, program), digest(program))
    rows = sweep_points(
        points, num_samples=num_samples, key=key, out=out, executor=executor, progress=progress
    )
    return pl.DataFrame(rows, infer_schema_length=None)


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations; the last name changes fastest."""
    for name, choices in values.items():
        if not len(choices):
            raise ValueError(f"`{name}` has no values to take; give at least one.")
    return [dict(zip(values, row, strict=True)) for row in it.product(*values.values())]


@dataclasses.dataclass(frozen=True)
class Points:
    """The rows of a sweep, before they are simulated.

    **Attributes:**

    - `values`: the values of each row, by name.
    - `sources`: for each row, the argument from which `program_of` makes its program.
    - `program_of`: makes the program of a row, here or in a worker. It must be picklable.
    - `shapes`: for each row, a value that is equal for programs of the same shapes, so that one
        worker simulates several of them and compiles once; by default, all have the same shapes.
    - `about`: a digest of everything else that the figures depend on.
    """

    values: Sequence[Mapping[str, Any]]
    sources: Sequence[Any]
    program_of: Callable[[Any], Program]
    about: str
    shapes: Sequence[Hashable] | None = None

    def chunks(self, shard: tuple[int, int]) -> list[list[int]]:
        """The rows of a shard, in lists that are each simulated one after the other. Rows that are
        already done are included.
        """
        shapes = self.shapes or [None] * len(self.values)
        which, shards = shard
        most = min(max(len(self.values) // (_CALLS * shards), 1), _CHUNK)
        return alike(range(len(shapes)), shapes.__getitem__, most)[which - 1 :: shards]


def alike(numbers: Iterable[int], key: Callable[[int], Hashable], most: int) -> list[list[int]]:
    """Lists of up to so many numbers, each with one key."""
    groups: dict[Hashable, list[int]] = {}
    for number in numbers:
        groups.setdefault(key(number), []).append(number)
    return [
        group[begin : begin + most]
        for group in groups.values()
        for begin in range(0, len(group), most)
    ]


def sweep_points(
    points: Points,
    *,
    num_samples: int,
    key: "jax.Array",
    out: str | os.PathLike[str] | None,
    executor: Executor | None = None,
    shard: tuple[int, int] = (1, 1),
    progress: bool = False,
) -> list[Row]:
    """`sweep`, over any points, as dictionaries."""
    chunks = points.chunks(shard)
    numbers = sorted(number for chunk in chunks for number in chunk)
    folder = None if out is None else pathlib.Path(out)
    words = [int(word) for word in key_data(key)]
    inputs = [list(map(dict, points.values)), num_samples, words, points.about]
    digest = hashlib.sha256(json.dumps(inputs, default=str).encode()).hexdigest()
    done = {} if folder is None else open_parts(folder, digest)
    missing = [[number for number in chunk if number not in done] for chunk in chunks]
    if executor is None:
        missing = [[*it.chain(*missing)]]
    missing = [*filter(None, missing)]
    options = (points.program_of, num_samples, key)
    tasks = [
        ([points.sources[number] for number in row_numbers], *options) for row_numbers in missing
    ]
    # In this process a row is written as soon as it is there.
    rows_of = _rows if executor is None else _all_rows
    with progress_bar(len(numbers), progress, "sweep", "row") as advance:
        advance(sum(number in done for number in numbers))
        for which, rows in run_tasks(rows_of, tasks, executor):
            for number, row in zip(missing[which], rows, strict=False):
                values = points.values[number]
                if isinstance(row, ValueError):
                    words = ", ".join(f"{name}={value}" for name, value in values.items())
                    raise ValueError(f"Row {number} ({words}): {row}") from row
                done[number] = {"row": number, **values, **row}
                if folder is not None:
                    write_part(folder, done[number], digest)
                advance(1)
    return [done[number] for number in numbers]


def _rows(
    sources: Sequence[Any], program_of, num_samples: int, key: "jax.Array"
) -> Iterator[Row | ValueError]:
    """The figures of some programs, one after the other, up to the error of one that is refused."""
    try:
        for law in simulate_each(map(program_of, sources), num_samples=num_samples, key=key):
            row: Row = {}
            for name, (value, (low, high)) in figures(law).items():
                row |= {f"{name}_s": value, f"{name}_low_s": low, f"{name}_high_s": high}
            yield row | {x: getattr(law, x) for x in ("num_samples", "sampling")}
    except ValueError as error:
        yield error


def _all_rows(*arguments: Any) -> list[Row | ValueError]:
    return list(_rows(*arguments))


def _check_numbers(name: str, choices: Any) -> None:
    try:
        numbers = np.asarray(choices)
    except ValueError:  # Lists of different lengths.
        numbers = np.asarray(None)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise ValueError(
            f"`{quoted(name)}` was given `{quoted(choices)}`; give a list of numbers, such as "
            "`[0.01, 0.02]`, or `[0.01]` for one."
        )


def _with_values(program: Program, values: Mapping[str, Any]) -> Program:
    where = {name: _parameter(program, name) for name in values}
    old = [get(program) for get in where.values()]
    with np.errstate(over="ignore"):  # What is not finite is refused where it is used.
        new = [np.full(x.shape, values[name], x.dtype) for name, x in zip(where, old, strict=True)]
    leaves, tree = jax.tree.flatten(program)
    number = jax.tree.unflatten(tree, range(len(leaves)))
    for get, x in zip(where.values(), jax.device_put(new), strict=True):
        leaves[get(number)] = x
    return jax.tree.unflatten(tree, leaves)


def _parameter(program: Program, name: str) -> Callable[[Program], Any]:
    """Gets a parameter by its dotted name."""
    keys = name.split(".")

    def get(node):
        for key in keys:
            node = node[key] if isinstance(node, dict) else getattr(node, key)
        return node

    node: Any = program
    for depth, key in enumerate(keys):
        attributes = node if isinstance(node, dict) else getattr(node, "__dict__", {})
        if key not in attributes:
            raise ValueError(unknown_name("parameter", ".".join(keys[: depth + 1]), attributes))
        node = attributes[key]
    if not eqx.is_inexact_array(node):
        raise ValueError(
            f"`{name}` has the type {type(node).__name__}, but only floating-point numbers of a "
            "program can be swept; give another name."
        )
    return get


def open_parts(folder: pathlib.Path, digest: str, noun: str = "sweep") -> dict[int, Row]:
    """The rows that a folder holds, by their numbers. The folder is created if it does not exist.

    **Arguments:**

    - `digest`: the digest of what the rows belong to.
    - `noun`: what that is, for messages.

    **Raises:**

    `ValueError` for a folder that holds something else, or a row that is not as `write_part` wrote
    it for the same digest.
    """
    pl = needed("polars")
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"`{shown(folder)}` is a file; give a folder for the rows of the {noun}.")
    folder.mkdir(parents=True, exist_ok=True)
    # Another release may draw other numbers, and rows must not mix.
    note, contents = folder / _ABOUT, {"digest": digest, "version": version("prism-jax")}
    if not note.exists():
        occupied = any(not file.name.startswith(".") for file in folder.iterdir())
        if occupied and not note.exists():  # Of the same sweep, which may have begun meanwhile.
            raise ValueError(
                f"`{shown(folder)}` is not empty and holds no {noun}; give another folder."
            )
        with written_whole(note, first=True) as partial:
            partial.write_text(json.dumps(contents))
    try:
        same = json.loads(read_file(note, _MOST_ABOUT)) == contents
    except (ValueError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"`{shown(folder)}` holds another {noun} (other values, samples, seed, job or "
            f"version of prism_jax); give another folder, or continue the same {noun}."
        )
    for partial in folder.glob(".part-*.partial"):  # Of sweeps that were killed.
        partial.unlink(missing_ok=True)
    done = {}
    for path in sorted(folder.glob("part-*.parquet")):
        content = read_file(path, _MOST_PART)  # No part of its name is a pattern.
        if not path.name.endswith(_ending(content, digest)):
            raise ValueError(
                f"`{shown(path)}` is damaged or of another {noun}; remove it, and the same {noun} "
                "simulates its row again."
            )
        done |= {row["row"]: row for row in pl.read_parquet(io.BytesIO(content)).to_dicts()}
    return done


def _ending(content: bytes, digest: str) -> str:
    """The end of the name of a row's file: a digest of its content, and of what the row belongs
    to. Polars is given no other content, as damage to a Parquet file may end the process.
    """
    return f"-{hashlib.sha256(digest.encode() + content).hexdigest()[:16]}.parquet"


def write_part(folder: pathlib.Path, row: Row, digest: str) -> None:
    """Writes a row of what has this digest. Other processes may write the same row at the same
    time.

    **Raises:**

    `OSError` if it cannot be written, such as to a full disk.
    """
    pl = needed("polars")
    written = io.BytesIO()
    pl.DataFrame([row]).write_parquet(written)
    content = written.getvalue()
    path = folder / f"part-{row['row']:06d}{_ending(content, digest)}"
    for last in (False, True):
        try:
            with written_whole(path) as partial:
                partial.write_bytes(content)
            return
        except FileNotFoundError:  # Another sweep has just tidied up.
            if last or not folder.is_dir():
                raise
