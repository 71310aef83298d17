"""Published steps of configurations in the formats of frameworks, imported from
`tests/data/scripts`, predicted and measured: `python benchmarks/scripts.py`.
"""

import argparse
import json
import pathlib
import sys
import tomllib


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import Row, percent, table


_STEPS = pathlib.Path(__file__).with_name("scripts.toml")
_FOLDER = pathlib.Path(__file__).parents[1] / "tests/data/scripts"
_LEVEL = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    rows = [row_of(step) for step in tomllib.loads(_STEPS.read_text())["steps"]]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    cells = []
    for row in rows:
        error = percent(row["predicted"] / row["seconds"] - 1, form="+.1")
        interval = f"{row['low']:.3g} to {row['high']:.3g} s"
        times = (f"{row['seconds']:.4g} s", f"{row['predicted']:.4g} s", interval, error)
        cells.append((row["kind"], row["file"], f"{row['gpus']:,}", *times))
    header = ("framework", "file", "GPUs", "measured", "predicted", "90 % interval", "error")
    print(table(header, cells))


def row_of(step: Row) -> Row:
    """A configuration, imported and predicted."""
    import prism_jax as prism
    from prism_jax.importers import import_job
    from validation.means import VARIABILITY
    from validation.rows import predicted

    options = {"cluster": step["cluster"], "batch": step.get("batch")}
    imported = import_job(_FOLDER / step["file"], step.get("gpus"), **options)
    mean, reason = predicted(imported.job, "")
    if not mean:
        raise SystemExit(f"{step['file']}: {reason}")
    low, high = prism.expected_error(imported.job).interval(_LEVEL)
    return step | {
        "kind": imported.kind,
        "gpus": imported.job.layout.world_size,
        "predicted": VARIABILITY * mean,
        "low": low * mean,
        "high": high * mean,
    }


if __name__ == "__main__":
    main()
