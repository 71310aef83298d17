"""What a command or a short script costs from its start: CPU seconds of its process, of all cores.

    python benchmarks/startup.py                       # a table in Markdown; --json for one object
    python benchmarks/startup.py --only simulate predict

Cold, nothing is compiled yet (`PRISM_JAX_CACHE=off`). Warm, the same ran before and its compiled
code was kept, in a new folder. Each limit is of the CPU seconds beside it, on an idle machine of
two cores. Compilations are those of the cold run, as JAX's log has them: their number, and XLA's
wall seconds; `--json` has them by function, too. Of `families`, only what follows a first
simulation counts.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from typing import Any


if __name__ == "__main__":
    sys.path[0] = str(pathlib.Path(__file__).resolve().parents[1])
from benchmarks._tables import table


ROOT = pathlib.Path(__file__).resolve().parents[1]
_JOB = "gpt3-175b-h100-4096"
_SAMPLES = ("--samples", "16384")
# A script may say at which CPU time of its own, on stderr, what is measured begins.
_BEGIN = "what counts begins at "
# Scripts keep compiled code as commands do.
_KEEP = """
import sys, time
import equinox as eqx, jax
import prism_jax as prism
prism.keep_compiled()
options = {"num_samples": 20_000, "key": jax.random.key(0)}
def gradient(program):
    jax.block_until_ready(eqx.filter_grad(prism.estimate)(program, prism.Quantile(0.95), **options))
"""
_GRADIENT = f'gradient(prism.compile_job(prism.load_job("{_JOB}")))\n'
_FIVE = """
law = prism.latency.LogNormal(1.0, 0.1)
waits = ([], [0], [0], [1, 2], [3])
program = prism.compile_graph([prism.Op(law, after=after) for after in waits])
prism.simulate(program, **options)
"""
_FAMILIES = f"""
def run(law):
    ops = [prism.Op(law), prism.Op(law, after=[0]), prism.Op(law, after=[1])]
    prism.simulate(prism.compile_graph(ops), **options)
run(prism.latency.LogNormal(1.0, 0.1))
print("{_BEGIN}", time.process_time(), file=sys.stderr)
run(prism.latency.Gamma(1.0, 0.1))
run(prism.latency.Weibull(1.0, 10.0))
"""
# The words of a command or a script, and the limits of its CPU seconds, cold and warm.
_WORK: dict[str, tuple[str | tuple[str, ...], float, float | None]] = {
    "simulate": (("simulate", _JOB, "--samples", "100000"), 7, 4),
    "sensitivity": (("sensitivity", _JOB, *_SAMPLES), 20, 6),
    "whatif": (("whatif", _JOB, "--slow-rank", "stage=7:1.2", *_SAMPLES), 9, 4),
    "run": (("run", _JOB, "--steps", "1000", *_SAMPLES), 12, 8),
    "predict": (("predict", _JOB), 1.2, None),
    "gradient": (_KEEP + _GRADIENT, 14, None),
    "five-ops": (_KEEP + _FIVE, 2.5, None),
    "five-ops-gradient": (_KEEP + _FIVE + "gradient(program)\n", 5, None),
    "families": (_KEEP + _FAMILIES, 1, None),
}


def measured(work: str | tuple[str, ...], folder: str | None) -> dict[str, Any]:
    """CPU and wall seconds of one process, and the compiled functions with their seconds, in order.

    **Arguments:**

    - `work`: a script, or the words of a command.
    - `folder`: for compiled code; nothing is kept by default.
    """
    words = ["-c", work] if isinstance(work, str) else ["-m", "prism_jax", *work]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PRISM_JAX_CACHE": folder or "off"}
    environment["JAX_LOG_COMPILES"] = "1"
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)
    with tempfile.TemporaryFile() as log:
        start = time.perf_counter()
        streams = {"stdout": log, "stderr": log}
        child = subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **streams)
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


def row_of(name: str) -> dict[str, Any]:
    """All figures of one kind of work."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    work, limit, warm_limit = _WORK[name]
    cold = measured(work, None)
    compiled = defaultdict(list)
    for function, seconds in cold["compiled"]:
        compiled[function].append(seconds)
    each = [[function, len(s), round(sum(s), 3)] for function, s in compiled.items()]
    with tempfile.TemporaryDirectory() as folder:
        measured(work, folder)
        warm = measured(work, folder)
    row = {"what": name, "limit_s": limit, "cold_s": cold["cpu_s"], "cold_wall_s": cold["wall_s"]}
    row |= {
        "warm_limit_s": warm_limit,
        "warm_s": warm["cpu_s"],
        "compilations": len(cold["compiled"]),
    }
    row["compile_s"] = sum(seconds for _, seconds in cold["compiled"])
    return row | {"by_function": sorted(each, key=lambda one: -one[2])}


def cells_of(row: dict[str, Any]) -> list[str]:
    keys = ("cold_s", "limit_s", "cold_wall_s", "warm_s", "warm_limit_s")
    figures = ("" if row[key] is None else f"{row[key]:.3g}" for key in keys)
    return [row["what"], *figures, f"{row['compilations']}, {row['compile_s']:.1f} s"]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU seconds of commands from their start.")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--only", nargs="+", choices=_WORK, metavar="NAME", default=list(_WORK))
    arguments = parser.parse_args()
    rows = list(map(row_of, arguments.only))
    if arguments.json:
        about = {"machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"}
        about |= {"date": str(datetime.date.today()), "python": platform.python_version()}
        print(json.dumps({**about, "table": rows}, indent=1))
        return
    header = ("what", "cold CPU s", "limit", "cold wall s", "warm CPU s", "limit", "compilations")
    print(table(header, map(cells_of, rows)))


if __name__ == "__main__":
    main()
