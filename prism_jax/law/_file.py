"""Saves and loads laws: all fields by their names, arrays apart."""

import dataclasses
import os
from typing import Any

import msgspec
import numpy as np

from .._files import damaged, read_archive, write_archive
from .._misc import check_type
from ._errors import LEVELS
from ._histogram import BITS
from ._law import Law


_FORMAT = 4
_WHAT = ("law", "save_law")
# The arrays of its histogram, and of its errors.
_STEPS = ("times", "counts")
_LEVELS = ("levels", "level_skewness", "level_degrees", "level_support")
# No step takes so many seconds; the squares of what is smaller are finite.
_MOST = 1e30


def save_law(law: Law, path: str | os.PathLike[str]) -> None:
    """Writes a law to a `.npz` file, whole or not at all."""
    check_type(law, Law, "law", "write `save_law(law, path)`")
    write_archive(path, *_written(law))


def _written(law: Law) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The description and the arrays."""
    fields = dataclasses.asdict(law)
    histogram, errors = fields.pop("histogram"), fields["errors"]
    arrays = {name: histogram.pop(name) for name in _STEPS}
    arrays |= {name: errors.pop(name) for name in _LEVELS}
    return {"format": _FORMAT, **fields}, arrays


def load_law(path: str | os.PathLike[str]) -> Law:
    """Reads a law that `save_law` wrote.

    **Raises:**

    `ValueError` if the file is damaged or not a law; `OSError` if it cannot be read.
    """
    header, arrays = read_archive(path, dict[str, Any], *_WHAT)
    try:
        errors = {**header["errors"], **{name: arrays[name] for name in _LEVELS}}
        steps = {name: arrays[name] for name in _STEPS}
        law = msgspec.convert({**header, "histogram": steps, "errors": errors}, Law)
        is_known = header["format"] == _FORMAT and _names(header, arrays) == _names(*_written(law))
        with np.errstate(all="ignore"):  # What a damaged file holds may be as large as it likes.
            if is_known and _is_sound(law):
                return law
    except Exception as error:  # A damaged file may raise any error.
        raise damaged(path, *_WHAT) from error
    raise damaged(path, *_WHAT)


def _names(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> set[str]:
    """Of all that is in a file."""
    return {*header, *header["errors"], *(header["allocations"] or ()), *arrays}


def _is_sound(law: Law) -> bool:
    """Whether a law is what `simulate` may give: its parts agree with one another."""
    steps, errors, apart = law.histogram, law.errors, law.allocations
    total = sum(steps.counts.tolist())  # Of whole numbers that do not overflow.
    levels = [getattr(errors, name) for name in _LEVELS]
    words = [word for key in law.keys for word in key]
    means = np.array([law.mean, *(apart.means if apart else ())])
    skewness = np.array([errors.mean_skewness, errors.std_skewness, *errors.level_skewness])
    degrees = np.array([errors.mean_degrees, errors.std_degrees, *errors.level_degrees])
    sizes = [law.std, law.effective_samples, law.compile_s, law.run_s, apart.std if apart else 0]
    standard_errors = np.array([errors.mean, errors.std, *errors.levels])
    if not errors.known:
        standard_errors = standard_errors[~np.isnan(standard_errors)]
    shortest, longest = map(float, steps.times[[0, -1]])
    rounding = 2.0**-BITS * abs(law.mean)  # Of times in single precision, or of many steps.
    sound = [
        steps.counts.dtype == np.int64 and np.all(steps.counts > 0),
        steps.times.dtype in (np.float32, np.float64) and steps.times.ndim == 1,
        steps.times.shape == steps.counts.shape and np.all(np.diff(steps.times) > 0),
        all(x.dtype == float and x.shape == LEVELS.shape for x in levels),
        1 <= total <= law.requested < 2**62,
        len(set(law.keys)) == len(law.keys) > 0 and 0 <= min(words) <= max(words) < 2**32,
        law.sampling in ("plain", "importance", "mixed"),
        apart is None or 1 <= len(apart.means) <= total,
        all(_are_between(x, -_MOST, _MOST) for x in (means, steps.times, skewness)),
        _are_between(np.array([*sizes, errors.support, *errors.level_support]), 0, _MOST),
        _are_between(standard_errors, 0, _MOST),
        np.all(degrees > 0),
        shortest - rounding <= law.mean <= longest + rounding,
        law.std <= (longest - shortest) * (0.5 + 1e-6) + rounding,
    ]
    return all(map(bool, sound))


def _are_between(x: np.ndarray, low: float, high: float) -> bool:
    """Whether all numbers are, and finite."""
    return bool(np.all((x >= low) & (x < high)))
