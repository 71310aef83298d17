"""Which configurations of other software are imported, and with how many parameters:
`python benchmarks/imports.py ../shared/cases/huggingface`.

Each path is a file, a folder of a model as it was downloaded, or a folder of files. `--gpus`,
`--batch` and `--var` hold where a file does not say it. Whether a job fits the memory is not
judged. The numbers of parameters are compared with `benchmarks/parameters.toml`.
"""

import argparse
import json
import pathlib
import sys
import time
import tomllib
from collections.abc import Iterator
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import Row, table


_STATED = pathlib.Path(__file__).with_name("parameters.toml")
# What a file that says no dtype of newer devices gets.
_USUAL_CLUSTER = "dgx-h100"
_CLOSE = 0.001  # To an exact number.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+", type=pathlib.Path)
    parser.add_argument("--gpus", type=int, default=64)
    parser.add_argument("--cluster", default="dgx-h100")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--var", action="append", default=[])
    parser.add_argument("--parameters", type=pathlib.Path, default=_STATED, help="numbers stated")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    stated = {row["file"]: row for row in tomllib.loads(given.parameters.read_text())["models"]}
    rows = [_row(path, given, stated) for path in files_of(given.paths)]
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    print(table(("file", "status", "parameters", "stated", "right, or why not"), map(_cells, rows)))
    known = [row for row in rows if row["stated_parameters"] is not None]
    right = sum(row["status"] == "imported" and _said(row) == "yes" for row in known)
    imported = sum(row["status"] == "imported" for row in rows)
    guessed = sum(row["status"] == "guessed" for row in rows)
    print(
        f"\nof {len(rows)} files {imported} imported and {guessed} guessed; of {len(known)} whose "
        f"number is stated {right} imported with it"
    )


def files_of(paths: list[pathlib.Path]) -> Iterator[pathlib.Path]:
    """The files, and the folders that each have a model as it was downloaded."""
    for path in paths:
        if not path.is_dir() or (path / "config.json").exists():
            yield path
        else:
            yield from sorted(one for one in path.iterdir() if one.name != _STATED.name)


def _row(path: pathlib.Path, given: argparse.Namespace, stated: dict[str, Row]) -> Row:
    """What is imported of a file. Whatever goes wrong is a reason."""
    from prism_jax.importers import NotImportableError
    from prism_jax.workload import count_parameters

    known = stated.get(path.name, {})
    row: Row = {
        "file": str(path),
        "kind": "huggingface" if path.suffix == ".json" or path.is_dir() else "megatron",
        "status": "refused",
        "parameters": None,
        "stated_parameters": known.get("parameters"),
        "gpus": None,
        "global_batch_size": None,
        "notes": [],
        "reasons": [],
    }
    start = time.perf_counter()
    try:
        imported = _imported(path, given)
        job = imported.job
        row |= {
            "kind": imported.kind,
            "status": imported.status,
            "parameters": None if job.model is None else count_parameters(job.model),
            "gpus": job.layout.world_size,
            "global_batch_size": job.batch_size,
            "notes": list(imported.notes),
        }
    except NotImportableError as error:
        row |= {"kind": error.kind or row["kind"], "reasons": list(error.reasons)}
    except Exception as error:
        row["reasons"] = [str(error) if isinstance(error, ValueError) else repr(error)]
    return row | {"seconds": round(time.perf_counter() - start, 3)}


def _imported(path: pathlib.Path, given: argparse.Namespace) -> Any:
    """What is imported of a file, with the options for what it does not say."""
    from prism_jax.importers import GpusNotSaidError, import_job

    options: dict[str, Any] = {"variables": given.var}
    try:
        imported = import_job(path, **options)
    except GpusNotSaidError as error:  # Of one replica or more.
        options["num_gpus"] = -(-given.gpus // error.multiple) * error.multiple
        imported = import_job(path, **options)
    job = imported.job
    assert job.training is not None
    assert job.cluster is not None
    if imported.kind == "huggingface" or imported.question:  # A configuration says no batch.
        replicas = job.layout.dp * job.training.microbatch_size
        options["batch"] = -(-given.batch // replicas) * replicas
    if job.cluster.name == _USUAL_CLUSTER:
        options["cluster"] = given.cluster
    return import_job(path, **options)


def is_right(counted: int, stated: int) -> bool:
    """Whether a number of parameters is the stated one: close to an exact one, and equal to one of
    few digits in these.
    """
    digits = str(stated).rstrip("0")
    if len(digits) > 4:
        return abs(counted - stated) <= _CLOSE * stated
    return abs(counted - stated) <= 10 ** (len(str(stated)) - len(digits)) / 2


def _said(row: Row) -> str:
    """Whether the number of parameters is right, or why there is none."""
    counted, stated = row["parameters"], row["stated_parameters"]
    if counted is None or stated is None:
        return "; ".join(row["reasons"])[:200]
    return "yes" if is_right(counted, stated) else "no"


def _cells(row: Row) -> list[str]:
    numbers = (row["parameters"], row["stated_parameters"])
    cells = ["" if number is None else f"{number:,}" for number in numbers]
    return [pathlib.Path(row["file"]).name, row["status"], *cells, _said(row)]


if __name__ == "__main__":
    main()
