"""Writes `kernels/expected_errors.toml`, the laws of `prism.expected_error`, from published steps.

    python benchmarks/expected_error.py [--data DIR]    # a minute

`python benchmarks/accuracy.py --expected` says how often they hold. Run both after each change of
what `predict` says.
"""

import argparse
import pathlib
import sys


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
from benchmarks._expected import file_of_laws, rows_of
from benchmarks._rows import DATA, ROOT


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the laws of expected errors.")
    parser.add_argument("--data", type=pathlib.Path, default=DATA)
    arguments = parser.parse_args()
    if not arguments.data.is_dir():
        parser.error(f"there is no folder {arguments.data}; name one with --data")
    rows = rows_of(arguments.data)
    if not rows:
        parser.error(f"{arguments.data} has no step that can be predicted; nothing was written")
    path = ROOT / "kernels" / "expected_errors.toml"
    path.write_text(file_of_laws(rows))


if __name__ == "__main__":
    main()
