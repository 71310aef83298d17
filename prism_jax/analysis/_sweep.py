"""Sweeps: the law of the step time over a grid of values, with common random numbers."""

import hashlib
import io
import itertools as it
import json
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from .._files import read_file, shown, written_whole
from .._misc import unknown_name
from .._progress import progress_bar
from ..engine import simulate
from ..law import Law, figures
from ..program import Program, digest
from ..random import key_data


_ABOUT = "sweep.json"
# In bytes, of what stands for the whole sweep and of the file of a row.
_MOST_ABOUT, _MOST_PART = 2**16, 2**24

Point = Mapping[str, Any]


def sweep(
    program: Program,
    overrides: Mapping[str, Sequence[float]],
    *,
    num_samples: int = 100_000,
    key: PRNGKeyArray,
    out: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Any:
    """Simulates a program for every combination of values of its parameters.

    One program is compiled for all of them, and all see the same random numbers.

    **Arguments:**

    - `program`: the step.
    - `overrides`: for each parameter, by its dotted name in the program such as
        `variability.residual.gemm.sigma`, the values to take.
    - `num_samples`, `key`: as of `simulate`.
    - `out`: a folder that gets a Parquet file for each row as soon as it is done. If it holds rows
        of the same sweep already, these are not simulated again.
    - `progress`: whether to show a bar on stderr.

    **Returns:**

    A `polars.DataFrame` with a row for each combination: the values, and the mean, standard
    deviation and quantiles of the step time in seconds, with their intervals.

    **Raises:**

    `ValueError` for a name that is no parameter, or a folder that holds another sweep.
    """
    where = {name: _parameter(program, name) for name in overrides}

    def program_of(point: Point) -> Program:
        values = [jnp.full_like(get(program), point[name]) for name, get in where.items()]
        return eqx.tree_at(lambda p: [get(p) for get in where.values()], program, values)

    return sweep_points(
        grid(overrides),
        program_of,
        num_samples=num_samples,
        key=key,
        out=out,
        about=digest(program),
        progress=progress,
    )


def grid(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """All combinations; the last name changes fastest."""
    for name, choices in values.items():
        if not len(choices):
            raise ValueError(f"`{name}` has no values to take; give at least one.")
    return [dict(zip(values, row, strict=True)) for row in it.product(*values.values())]


def sweep_points(
    points: Sequence[Point],
    program_of: Callable[[Point], Program],
    *,
    num_samples: int,
    key: PRNGKeyArray,
    out: str | os.PathLike[str] | None,
    about: str,
    progress: bool = False,
) -> Any:
    """`sweep` over any points. `about` names what else decides the figures."""
    import polars as pl

    folder = None if out is None else pathlib.Path(out)
    done = {}
    if folder is not None:
        done = _open(folder, _digest(points, num_samples, key, about))
    rows = []
    with progress_bar(len(points), progress, "sweep", "row") as advance:
        for number, point in enumerate(points):
            if number not in done:
                law = simulate(program_of(point), num_samples=num_samples, key=key)
                if law.interrupted:
                    raise KeyboardInterrupt
                done[number] = {"row": number, **point, **_figures(law)}
                if folder is not None:
                    _write(pl.DataFrame([done[number]]), folder / f"part-{number:06d}.parquet")
            rows.append(done[number])
            advance(1)
    return pl.DataFrame(rows, infer_schema_length=None)


def _parameter(program: Program, name: str) -> Callable[[Program], Any]:
    """Gets a parameter by its dotted name."""
    keys = name.split(".")

    def get(node):
        for key in keys:
            node = node[key] if isinstance(node, dict) else getattr(node, key)
        return node

    node: Any = program
    for depth, key in enumerate(keys):
        known = node if isinstance(node, dict) else getattr(node, "__dict__", {})
        if key not in known:
            raise ValueError(unknown_name("parameter", ".".join(keys[: depth + 1]), known))
        node = known[key]
    if not eqx.is_inexact_array(node):
        raise ValueError(f"`{name}` is no parameter of the program, but {type(node).__name__}.")
    return get


def _figures(law: Law) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for name, (value, (low, high)) in figures(law).items():
        row |= {f"{name}_s": value, f"{name}_low_s": low, f"{name}_high_s": high}
    return {
        **row,
        "num_samples": law.num_samples,
        "sampling": law.sampling,
        "replicas": law.replicas,
    }


def _digest(points, num_samples, key, about) -> str:
    words = [int(word) for word in key_data(key)]
    text = json.dumps([list(map(dict, points)), num_samples, words, about], default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _open(folder: pathlib.Path, digest: str) -> dict[int, dict[str, Any]]:
    """The rows that a folder holds; makes it if it is not there."""
    import polars as pl

    folder.mkdir(parents=True, exist_ok=True)
    note = folder / _ABOUT
    if not note.exists():
        others = any(not file.name.startswith(".") for file in folder.iterdir())
        if others and not note.exists():  # Of the same sweep, which may have begun meanwhile.
            raise ValueError(
                f"`{shown(folder)}` is not empty and holds no sweep; give another folder."
            )
        with written_whole(note, first=True) as partial:
            partial.write_text(json.dumps({"digest": digest}))
    try:
        same = json.loads(read_file(note, _MOST_ABOUT))["digest"] == digest
    except (ValueError, KeyError, TypeError, RecursionError):
        same = False
    if not same:
        raise ValueError(
            f"`{shown(folder)}` holds another sweep (other values, samples, seed or job); give "
            "another folder, or the same sweep to go on with it."
        )
    done = {}
    for path in sorted(folder.glob("part-*.parquet")):
        content = io.BytesIO(read_file(path, _MOST_PART))  # No part of its name is a pattern.
        try:
            done |= {row["row"]: row for row in pl.read_parquet(content).to_dicts()}
        except (pl.exceptions.PolarsError, pl.exceptions.PanicException, KeyError):
            raise ValueError(
                f"`{shown(path)}` is damaged; remove it, and the same sweep simulates its row "
                "again."
            ) from None
    return done


def _write(frame, path: pathlib.Path) -> None:
    """Writes a file that is there whole or not at all, whoever else writes the same row."""
    with written_whole(path) as partial:
        frame.write_parquet(partial)
