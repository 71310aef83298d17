"""Saves and loads laws."""

import dataclasses
import os
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from .._files import damaged, read_archive, write_archive
from .._misc import check_type
from ._errors import LEVELS, Errors
from ._histogram import NUM_BINS, NUM_EXTREMES, Histogram
from ._law import Allocations, Law


_FORMAT = 3
_WHAT = ("law", "save_law")
# The arrays of its histogram, and of its errors.
_STEPS = ("counts", "smallest", "largest")
_LEVELS = ("levels", "level_skewness", "level_degrees", "level_support")

# No step takes 10^30 seconds; the squares of what is smaller are finite.
_Finite: TypeAlias = Annotated[float, Meta(gt=-1e30, lt=1e30)]
_NonNegative: TypeAlias = Annotated[float, Meta(ge=0, lt=1e30)]
_Positive: TypeAlias = Annotated[float, Meta(gt=0)]
_Whole: TypeAlias = Annotated[int, Meta(ge=1, lt=2**62)]
_Word: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]


class _Errors(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of the law's errors that are not arrays."""

    mean: float
    std: float
    mean_skewness: _Finite
    std_skewness: _Finite
    mean_degrees: _Positive
    std_degrees: _Positive
    support: _NonNegative


class _Allocations(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of its allocations."""

    means: Annotated[tuple[_Finite, ...], Meta(min_length=1)]
    std: _NonNegative


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a law that are not arrays, with their types."""

    format: Literal[3]
    requested: _Whole
    mean: _Finite
    std: _NonNegative
    edges: tuple[_Finite, _Finite]
    errors: _Errors
    allocations: _Allocations | None
    sampling: Literal["plain", "importance", "mixed"]
    effective_samples: _NonNegative
    program: str
    keys: Annotated[tuple[tuple[_Word, _Word], ...], Meta(min_length=1)]
    compile_s: _NonNegative
    run_s: _NonNegative


def save_law(law: Law, path: str | os.PathLike[str]) -> None:
    """Writes a law to a `.npz` file, whole or not at all."""
    check_type(law, Law, "law", "write `save_law(law, path)`")
    fields = dataclasses.asdict(law)
    histogram, errors = fields.pop("histogram"), fields["errors"]
    arrays = {name: histogram[name] for name in _STEPS}
    arrays |= {name: errors.pop(name) for name in _LEVELS}
    write_archive(path, {"format": _FORMAT, "edges": histogram["edges"], **fields}, arrays)


def load_law(path: str | os.PathLike[str]) -> Law:
    """Reads a law that `save_law` wrote.

    **Raises:**

    `ValueError` if the file is damaged or not a law; `OSError` if it cannot be read.
    """
    about, arrays = read_archive(path, _About, *_WHAT)
    if not _are_shaped(arrays):
        raise damaged(path, *_WHAT)
    fields = msgspec.structs.asdict(about)
    del fields["format"]
    fields["histogram"] = Histogram(fields.pop("edges"), *(arrays[name] for name in _STEPS))
    levels: dict[str, Any] = {name: arrays[name] for name in _LEVELS}
    fields["errors"] = Errors(**msgspec.structs.asdict(about.errors), **levels)
    if about.allocations is not None:
        fields["allocations"] = Allocations(**msgspec.structs.asdict(about.allocations))
    law = Law(**fields)
    with np.errstate(all="ignore"):  # What a damaged file holds may be as large as it likes.
        if not _is_sound(law):
            raise damaged(path, *_WHAT)
    return law


def _are_shaped(arrays: dict[str, np.ndarray]) -> bool:
    """Whether these are the arrays of a law, of fitting types and shapes."""
    if arrays.keys() != {*_STEPS, *_LEVELS}:
        return False
    if any(x.dtype != (np.int64 if name == "counts" else float) for name, x in arrays.items()):
        return False
    total = sum(arrays["counts"].ravel().tolist())  # Of whole numbers that do not overflow.
    if total < 1:
        return False
    shapes = dict.fromkeys(_STEPS, (min(total, NUM_EXTREMES),))
    shapes |= dict.fromkeys(_LEVELS, (len(LEVELS),)) | {"counts": (NUM_BINS + 2,)}
    return all(x.shape == shapes[name] for name, x in arrays.items())


def _is_sound(law: Law) -> bool:
    """Whether a law is what `simulate` may give: its parts agree with one another."""
    steps, errors = law.histogram, law.errors
    edges, counts, smallest, largest = steps.edges, steps.counts, steps.smallest, steps.largest
    each = np.array([errors.mean, errors.std, *errors.levels])
    rounding = 1e-9 * abs(law.mean)
    sound = [
        sum(counts.tolist()) <= law.requested,
        edges[0] < edges[1],
        len(set(law.keys)) == len(law.keys),
        law.allocations is None or len(law.allocations.means) <= sum(counts.tolist()),
        np.all(counts >= 0),
        _are_between(smallest, -1e30, 1e30) and _are_between(largest, -1e30, 1e30),
        np.all(np.diff(smallest) >= 0) and np.all(np.diff(largest) >= 0),
        np.all(smallest <= largest),
        smallest[0] - rounding <= law.mean <= largest[-1] + rounding,
        law.std <= (largest[-1] - smallest[0]) * (0.5 + 1e-6) + rounding,
        _are_between(errors.level_skewness, -1e30, 1e30),
        np.all(errors.level_degrees > 0),
        _are_between(errors.level_support, 0, 1e30),
        _are_between(each if errors.known else each[~np.isnan(each)], 0, 1e30),
    ]
    return all(map(bool, sound))


def _are_between(x: np.ndarray, low: float, high: float) -> bool:
    """Whether all numbers are, and finite."""
    return bool(np.all((x >= low) & (x < high)))
