"""Writes `kernels/expected_errors.toml`, the laws of `prism.expected_error`, from published steps.

    python benchmarks/expected_error.py [--data DIR]    # a minute

`python benchmarks/accuracy.py --expected` says how often they hold. Run both after each change of
what `predict` says.
"""

import argparse
import pathlib
import sys


ROOT = pathlib.Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    sys.path[0] = str(ROOT)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the laws of expected errors.")
    parser.add_argument("--data", type=pathlib.Path, default=ROOT.parent / "shared" / "data")
    arguments = parser.parse_args()
    from benchmarks._expected import file_of_laws, rows_of

    path = ROOT / "kernels" / "expected_errors.toml"
    path.write_text(file_of_laws(rows_of(arguments.data)))


if __name__ == "__main__":
    main()
