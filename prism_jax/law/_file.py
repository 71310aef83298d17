"""Laws as files."""

import dataclasses
import math
import os

import numpy as np

from .._archive import read_archive, write_archive
from ._law import FEWEST, LEVELS, NUM_BINS, NUM_EXTREMES, Law


_FORMAT = 1


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
    try:
        about, arrays = read_archive(path)
        if about.pop("format") != _FORMAT:
            raise ValueError
        about["edges"] = tuple(about["edges"])
        about["allocation_means"] = tuple(about["allocation_means"])
        about["keys"] = tuple(map(tuple, about["keys"]))
        law = Law(**arrays, **about)
        _check(law)
        return law
    except OSError:
        raise
    except Exception as error:  # A damaged file raises almost anything.
        raise ValueError(
            f"`{os.fspath(path)}` is not a law that this version saved; give a file that "
            "`save_law` wrote."
        ) from error


def _check(law: Law) -> None:
    """Raises a `ValueError` unless every field is what `simulate` may give."""
    kept, levels = min(law.num_samples, NUM_EXTREMES), len(LEVELS)
    arrays = [
        (law.counts, NUM_BINS + 2, "i"),
        (law.smallest, kept, "f"),
        (law.largest, kept, "f"),
        (law.level_errors, levels, "f"),
        (law.level_support, levels, "f"),
    ]
    errors = (law.mean_error, law.std_error, *law.level_errors.tolist())
    finite = (law.mean, *law.edges, *law.smallest.tolist(), *law.largest.tolist())
    supports = (law.mean_support, law.effective_samples, *law.level_support.tolist())
    not_negative = (law.std, law.allocation_std, law.compile_s, law.run_s, *supports)
    unknown = law.mean_support < FEWEST  # How wrong it is.
    rounding = 1e-9 * abs(law.mean)
    sound = [
        _whole(law.num_samples) and _whole(law.requested),
        1 <= law.num_samples <= law.requested,
        *(x.shape == (size,) and x.dtype.kind == kind for x, size, kind in arrays),
        np.all(law.counts >= 0) and law.counts.sum() == law.num_samples,
        np.all(np.diff(law.smallest) >= 0) and np.all(np.diff(law.largest) >= 0),
        law.smallest[0] - rounding <= law.mean <= law.largest[-1] + rounding,
        len(law.edges) == 2 and law.edges[0] < law.edges[1],
        all(_number(x) and math.isfinite(x) for x in (*finite, *law.allocation_means)),
        all(_number(x) and 0 <= x < math.inf for x in not_negative),
        all(_number(x) and (0 <= x < math.inf or (unknown and math.isnan(x))) for x in errors),
        _number(law.degrees) and law.degrees > 0,
        isinstance(law.program, str) and isinstance(law.sampling, str),
        law.keys and all(len(k) == 2 and _whole(k[0]) and _whole(k[1]) for k in law.keys),
    ]
    if not all(sound):
        raise ValueError


def _whole(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _number(value) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
