"""How busy the workers of a Ray cluster keep a machine, and what a row of a sweep costs there.

    python benchmarks/workers.py                       # a table; --json for one JSON object
    python benchmarks/workers.py --rows 12 --samples 1000

One sweep runs three times: in a process of its own, by the workers of a new cluster on this
machine, and by the workers again. The first two start with nothing compiled. CPU seconds are of all
processes below this one. Figures with "then" are from the first row to the last.

The CPU use of other programs is printed, too. If they took cores, the CPU time of the sweep does
not show how many cores it would have kept busy. So "wanted" also counts seconds in which threads of
the sweep waited for a core, up to all cores at a time. It is too high where other programs take
much, because the work between waits then takes longer.
"""

import argparse
import itertools as it
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

import psutil


_JOB = "gpt3-175b-h100-4096"
_EVERY = 0.2  # Seconds between two looks.
# Until its input ends, also because this process did.
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": int(sys.argv[1])})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rows", type=int, default=48)
    parser.add_argument("--samples", type=int, default=200_000, help="steps of each row")
    parser.add_argument("--workers", type=int, default=4)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measured(pathlib.Path(folder), arguments)
    if arguments.json:
        print(json.dumps(found))
        return
    for name, one in found.items():
        print(f"{name}: " + ", ".join(f"{key} {value:.3g}" for key, value in one.items()))


def measured(folder: pathlib.Path, arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Figures of one process, of the workers, and of these when there is compiled code."""
    command = [sys.executable, "-m", "prism_jax", "sweep", _JOB, "--samples"]
    command += [str(arguments.samples), "--over", f"kernels.gemm.sigma=0.01:0.1:{arguments.rows}"]
    found: dict[str, dict[str, float]] = {}
    words = [sys.executable, "-c", _CLUSTER, str(arguments.workers)]
    pipe = subprocess.PIPE
    for name, more in (("one process", []), ("workers", ["--ray"]), ("workers again", ["--ray"])):
        os.environ["PRISM_JAX_CACHE"] = str(folder / ("cache" if more else "cache of one"))
        out = folder / name
        if not more:
            found[name] = watched([*command, "--out", str(out)], out, arguments.rows)
            continue
        with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as cluster:
            assert cluster.stdout is not None
            address = cluster.stdout.readline().strip()
            all_of_it = [*command, "--out", str(out), "--ray", address]
            found[name] = watched(all_of_it, out, arguments.rows)
            cluster.communicate()
    return found


def watched(command: list[str], out: pathlib.Path, rows: int) -> dict[str, float]:
    """Runs a sweep and looks at what the processes below this one and the machine do meanwhile."""
    cores = os.cpu_count() or 1
    looks: list[dict[str, float]] = []
    seen: dict[tuple[int, int], tuple[float, float]] = {}
    before, _ = seconds_of_threads({})
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as sweep:
        while True:
            ended = sweep.poll() is not None
            done = len(list(out.glob("part-*"))) if out.exists() else 0
            ran, runnable = seconds_of_threads(seen)
            look = {"at": time.perf_counter(), "mine": ran - before, "runnable": runnable}
            looks.append({**look, "rows": done, **machine()})
            if ended:
                break
            time.sleep(_EVERY)
    if sweep.returncode or looks[-1]["rows"] != rows:
        raise SystemExit("The sweep failed.")
    first = next(i for i, look in enumerate(looks) if look["rows"])
    last = next(i for i, look in enumerate(looks) if look["rows"] == rows)
    found = {"wall s": looks[-1]["at"] - looks[0]["at"], "CPU s": looks[-1]["mine"]}
    found |= {"until the first row s": looks[first]["at"] - looks[0]["at"]}
    found |= {"CPU s until the first row": looks[first]["mine"]}
    between: dict[str, float] = {key: looks[last][key] - looks[first][key] for key in looks[0]}
    number, total = between["rows"], between["at"] * cores
    if number:
        found |= {
            "then CPU s a row": between["mine"] / number,
            "then busy %": 100 * between["mine"] / total,
            "then others %": 100 * (between["busy"] - between["mine"]) / total,
            "then idle %": 100 * between["idle"] / total,
            "then wanted %": 100 * wanted(looks[first : last + 1], cores),
        }
    return found


def wanted(looks: list[dict[str, float]], cores: int) -> float:
    """The share of the cores that runnable threads could have kept busy."""
    could = spent = 0.0
    for one, other in it.pairwise(looks):
        apart = other["at"] - one["at"]
        could += min(other["runnable"] - one["runnable"], cores * apart)
        spent += cores * apart
    return could / spent


def seconds_of_threads(seen: dict[tuple[int, int], tuple[float, float]]) -> tuple[float, float]:
    """Of all threads below this process, those that ended included: seconds on a core, and these
    with the seconds of waiting for one.
    """
    for one in psutil.Process().children(recursive=True):
        for path in pathlib.Path(f"/proc/{one.pid}/task").glob("*/schedstat"):
            try:
                ran, waited, _ = map(int, path.read_text().split())
            except (OSError, ValueError):  # It has ended.
                continue
            seen[one.pid, int(path.parent.name)] = ran / 1e9, (ran + waited) / 1e9
    return sum(ran for ran, _ in seen.values()), sum(both for _, both in seen.values())


def machine() -> dict[str, Any]:
    """Seconds of all cores so far."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return {"busy": sum(times[:8]) - idle, "idle": idle}


if __name__ == "__main__":
    main()
