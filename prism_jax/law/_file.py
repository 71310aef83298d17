"""Laws as files."""

import dataclasses
import os
from typing import Annotated, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from .._archive import damaged, read_archive, write_archive
from ._law import FEWEST, LEVELS, NUM_BINS, NUM_EXTREMES, Law


_FORMAT = 1
_WHAT = ("law", "save_law")

# No step takes 10^30 seconds; the squares of what is smaller are finite.
_Finite: TypeAlias = Annotated[float, Meta(gt=-1e30, lt=1e30)]
_NonNegative: TypeAlias = Annotated[float, Meta(ge=0, lt=1e30)]
_Whole: TypeAlias = Annotated[int, Meta(ge=1, lt=2**62)]
_Word: TypeAlias = Annotated[int, Meta(ge=0, lt=2**32)]


class _About(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a law that are no arrays, and what they may be."""

    format: Literal[1]
    num_samples: _Whole
    requested: _Whole
    mean: _Finite
    std: _NonNegative
    edges: tuple[_Finite, _Finite]
    mean_error: float
    std_error: float
    mean_support: _NonNegative
    effective_samples: _NonNegative
    program: str
    keys: Annotated[tuple[tuple[_Word, _Word], ...], Meta(min_length=1)]
    compile_s: _NonNegative
    run_s: _NonNegative
    degrees: Annotated[float, Meta(gt=0)]
    sampling: str
    replicas: str
    allocation_means: tuple[_Finite, ...]
    allocation_std: _NonNegative


def save_law(law: Law, path: str | os.PathLike) -> None:
    """Writes a law to a `.npz` file, which appears whole or not at all."""
    fields = {field.name: getattr(law, field.name) for field in dataclasses.fields(law)}
    arrays = {name: x for name, x in fields.items() if isinstance(x, np.ndarray)}
    rest = {name: x for name, x in fields.items() if name not in arrays}
    write_archive(path, {"format": _FORMAT, **rest}, arrays)


def load_law(path: str | os.PathLike) -> Law:
    """Reads a law that `save_law` wrote.

    **Raises:**

    `ValueError` if the file is not one, or damaged; `OSError` if it cannot be read.
    """
    about, arrays = read_archive(path, _About, *_WHAT)
    with np.errstate(all="ignore"):  # What a damaged file holds may be as large as it likes.
        if not _are_sound(about, arrays):
            raise damaged(path, *_WHAT)
    fields = msgspec.structs.asdict(about)
    del fields["format"]
    return Law(**arrays, **fields)


def _are_sound(about: _About, arrays: dict[str, np.ndarray]) -> bool:
    """Whether the arrays are what `simulate` may give, and agree with one another and the rest."""
    kept, levels = min(about.num_samples, NUM_EXTREMES), len(LEVELS)
    shapes = {
        "counts": (np.int64, NUM_BINS + 2),
        "smallest": (np.float64, kept),
        "largest": (np.float64, kept),
        "level_errors": (np.float64, levels),
        "level_support": (np.float64, levels),
    }
    if {name: (x.dtype, x.shape) for name, x in arrays.items()} != {
        name: (np.dtype(dtype), (size,)) for name, (dtype, size) in shapes.items()
    }:
        return False
    counts, smallest, largest = arrays["counts"], arrays["smallest"], arrays["largest"]
    errors = np.array([about.mean_error, about.std_error, *arrays["level_errors"]])
    unknown = about.mean_support < FEWEST  # How wrong it is.
    rounding = 1e-9 * abs(about.mean)
    sound = [
        about.num_samples <= about.requested,
        about.edges[0] < about.edges[1],
        # Before their sum, which may overflow.
        np.all((counts >= 0) & (counts <= about.num_samples)),
        sum(counts.tolist()) == about.num_samples,
        _are_between(smallest, -1e30, 1e30) and _are_between(largest, -1e30, 1e30),
        np.all(np.diff(smallest) >= 0) and np.all(np.diff(largest) >= 0),
        np.all(smallest <= largest),
        smallest[0] - rounding <= about.mean <= largest[-1] + rounding,
        about.std <= (largest[-1] - smallest[0]) * (0.5 + 1e-6) + rounding,
        _are_between(arrays["level_support"], 0, 1e30),
        _are_between(errors[~np.isnan(errors)] if unknown else errors, 0, 1e30),
    ]
    return all(map(bool, sound))


def _are_between(x: np.ndarray, low: float, high: float) -> bool:
    """Whether all numbers are, and finite."""
    return bool(np.all((x >= low) & (x < high)))
