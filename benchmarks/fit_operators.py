"""Fits the shipped tables by shape, `kernels/shapes/`, to measured kernels.

    python benchmarks/fit_operators.py ../shared/data/operators

The printed errors are those of shapes that were left out of the fit.
"""

import argparse
import os
import pathlib
import sys
from collections import Counter, defaultdict


# Threads gain nothing on systems of a hundred equations, and wait for one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
from benchmarks import _operators as operators
from benchmarks._rows import ROOT
from prism_jax.cluster import cross_validate, fit_shapes
from prism_jax.data import Constant, ShapeTable, Source, save_shapes


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits the shipped tables of kernels by shape.")
    parser.add_argument("folder", type=pathlib.Path, help="the Parquet files")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "kernels" / "shapes")
    arguments = parser.parse_args()

    tables: dict[str, list[ShapeTable]] = defaultdict(list)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    errors: dict[str, list[float]] = defaultdict(list)
    for name, measured in operators.read_operators(arguments.folder):
        device, sms = operators.DEVICES[name]
        tables[device].append(fit_shapes(measured, sms))
        counts[device][f"rows of {measured.kernel.partition(':')[0]}"] += len(measured.seconds)
        found = cross_validate(measured, sms)
        for row, error in zip(operators.class_of(name, measured), found, strict=True):
            errors[row].append(error)
    for device, fitted in tables.items():
        folder = arguments.out / device
        folder.mkdir(parents=True, exist_ok=True)
        constants = tuple(Constant(**about) for about in operators.CONSTANTS)
        source = Source(**operators.SOURCE, sample_counts=counts[device], constants=constants)
        save_shapes(folder, fitted, source)
    print(operators.error_table(errors))


if __name__ == "__main__":
    main()
