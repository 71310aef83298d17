"""Fits the shipped tables by shape, `kernels/shapes/`, to measured kernels.

    python benchmarks/fit_operators.py ../shared/data/operators

The printed errors are those of shapes that were left out of the fit.
"""

import argparse
import pathlib
import sys


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Fits the shipped tables of kernels by shape.")
    parser.add_argument("folder", type=pathlib.Path, help="the Parquet files")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "kernels" / "shapes")
    arguments = parser.parse_args()

    from benchmarks._operators import DEVICES, class_of, error_table, read_operators
    from prism_jax.cluster import cross_validate, fit_shapes
    from prism_jax.data import write_shapes

    tables: dict[str, list] = {}
    counts: dict[str, dict[str, int]] = {}
    errors: dict[str, list[float]] = {}
    for measured in read_operators(arguments.folder):
        device, sms = DEVICES[measured.device]
        about = (measured.columns, measured.seconds, sms)
        table = fit_shapes(measured.kernel, measured.dtype, measured.case, *about)
        tables.setdefault(device, []).append(table)
        count = counts.setdefault(device, {})
        count[measured.kernel] = count.get(measured.kernel, 0) + len(measured.seconds)
        found = cross_validate(measured.kernel, measured.dtype, *about)
        for name, error in zip(class_of(measured), found, strict=True):
            errors.setdefault(name, []).append(error)
    for device, fitted in tables.items():
        folder = arguments.out / device
        folder.mkdir(parents=True, exist_ok=True)
        write_shapes(folder / "shapes.csv", fitted)
    print(error_table(errors))


if __name__ == "__main__":
    main()
