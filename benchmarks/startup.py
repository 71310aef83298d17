"""What a command or a short script costs from its start: CPU seconds of its process, of all cores.

    python benchmarks/startup.py                       # a table in Markdown; --json for one object
    python benchmarks/startup.py --only simulate predict

Cold, nothing is compiled yet (`PRISM_JAX_CACHE=off`). Warm, the same ran before and its compiled
code was kept, in a new folder. Commands, scripts and limits are in `startup.toml`. Each limit is of
the CPU seconds beside it, on an idle machine of two cores. Python's own bytecode is there, as an
installation leaves it. Compilations are those of the cold run, as JAX's log has them: their number,
and XLA's wall seconds; `--json` has them by function, too. Of `families`, only what follows a first
simulation counts.
"""

import compileall
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import defaultdict
from typing import Any


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.rows import ROOT
from validation.tables import Row, cells, machine, options, table


_WORK = tomllib.loads(pathlib.Path(__file__).with_suffix(".toml").read_text())
_BEFORE = _WORK.pop("before")
_BEGIN = "what counts begins at "


def measured(work: dict[str, Any], folder: str | None) -> Row:
    """CPU and wall seconds of one process, and the compiled functions with their seconds, in order.

    **Arguments:**

    - `work`: a `script`, or the words of a `command`.
    - `folder`: for compiled code; nothing is kept by default.
    """
    command = [sys.executable, "-m", "prism_jax", *work.get("command", "").split()]
    if "script" in work:
        command = [sys.executable, "-c", _BEFORE + work["script"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRISM_JAX_CACHE": folder or "off"}
    environment["JAX_LOG_COMPILES"] = "1"
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        keys: Any = {"stdout": log, "stderr": log, "cwd": ROOT, "env": environment}
        child = subprocess.Popen(command, **keys)
        _, status, usage = os.wait4(child.pid, 0)
        wall = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        log.seek(0)
        text = log.read().decode()
    if child.returncode:
        raise SystemExit(f"A process failed:\n{text[-2000:]}")
    cpu = usage.ru_utime + usage.ru_stime
    _, begin, after = text.rpartition(_BEGIN)
    if begin:
        earlier, text = float(after.split()[0]), after
        cpu, wall = cpu - earlier, None
    found = re.findall(r"Finished XLA compilation of (?:jit\()?(.+?)\)? in ([\d.e+-]+) sec", text)
    return {"cpu_s": cpu, "wall_s": wall, "compiled": [(name, float(s)) for name, s in found]}


def row_of(name: str) -> Row:
    """All figures of one kind of work."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    work, found = _WORK[name], defaultdict(list)
    cold = measured(work, None)
    for function, seconds in cold["compiled"]:
        found[function].append(seconds)
    each = [[function, len(s), round(sum(s), 3)] for function, s in found.items()]
    with tempfile.TemporaryDirectory() as folder:
        measured(work, folder)
        warm = measured(work, folder)
    row = {"what": name, "limit_s": work["cold_s"], "cold_s": cold["cpu_s"]}
    row |= {"cold_wall_s": cold["wall_s"], "warm_limit_s": work.get("warm_s")}
    row |= {"warm_s": warm["cpu_s"], "compilations": len(cold["compiled"])}
    row["compile_s"] = sum(seconds for _, seconds in cold["compiled"])
    return row | {"by_function": sorted(each, key=lambda one: -one[2])}


def cells_of(row: Row) -> list[str]:
    keys = ("cold_s", "limit_s", "cold_wall_s", "warm_s", "warm_limit_s")
    figures = ("" if row[key] is None else f"{row[key]:.3g}" for key in keys)
    return [row["what"], *figures, *cells(row, "{compilations}, {compile_s:.1f} s")]


def main() -> None:
    only = {"nargs": "+", "choices": _WORK, "metavar": "NAME", "default": list(_WORK)}
    given = options(__doc__, json=(False, "print one JSON object"), only=only)
    compileall.compile_dir(ROOT / "prism_jax", quiet=1)
    rows = list(map(row_of, given.only))
    if given.json:
        print(json.dumps({**machine(), "table": rows}, indent=1))
        return
    header = ("what", "cold CPU s", "limit", "cold wall s", "warm CPU s", "limit", "compilations")
    print(table(header, map(cells_of, rows)))


if __name__ == "__main__":
    main()
