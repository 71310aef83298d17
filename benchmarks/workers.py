"""How busy the workers of a Ray cluster keep a machine, and what a row of a sweep costs there.

    python benchmarks/workers.py

One sweep of 48 rows runs three times: in a process of its own, by the four workers of a new cluster
on this machine, and by the workers again. The first two start with nothing compiled. CPU seconds
are of all processes below this one. Figures with "then" are from the first row to the last; others
are programs beside this one, and if they took cores, the sweep could not have had them.
"""

import contextlib
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import psutil


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import options


_ROWS, _WORKERS = 48, 4
_SWEEP = ["sweep", "gpt3-175b-h100-4096", "--samples", "200000"]
_SWEEP += ["--over", f"kernels.gemm.sigma=0.01:0.1:{_ROWS}"]
_EVERY = 0.2  # Seconds between two looks.
# Until its input ends, also because this process did.
_CLUSTER = "import sys; from ray.cluster_utils import Cluster; "
_CLUSTER += f"one = Cluster(initialize_head=True, head_node_args={{'num_cpus': {_WORKERS}}}); "
_CLUSTER += "print(one.address, flush=True); sys.stdin.read(); one.shutdown()"


def main() -> None:
    options(__doc__)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for label in ("one process", "workers", "workers again"):
            of_workers = label != "one process"
            os.environ["PRISM_JAX_CACHE"] = str(folder / f"cache {of_workers}")
            with _cluster() if of_workers else contextlib.nullcontext([]) as more:
                found = _watched(folder / label, more)
            print(f"{label}: " + ", ".join(f"{key} {x:.3g}" for key, x in found.items()))


@contextlib.contextmanager
def _cluster() -> Iterator[list[str]]:
    """A cluster, and what it is called on the command line."""
    words, pipe = [sys.executable, "-c", _CLUSTER], subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as cluster:
        assert cluster.stdout is not None
        yield ["--ray", cluster.stdout.readline().strip()]
        cluster.communicate()


def _watched(out: pathlib.Path, more: list[str]) -> dict[str, float]:
    """Runs a sweep and looks at what the processes below this one and the machine do meanwhile."""
    command = [sys.executable, "-m", "prism_jax", *_SWEEP, "--out", str(out), *more]
    looks: list[dict[str, float]] = []
    seen: dict[tuple[int, int], float] = {}
    before = _seconds_of_threads({})
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as sweep:
        ended = False
        while not ended:
            ended, times = sweep.poll() is not None, psutil.cpu_times()
            busy = sum(times[:8]) - times.idle - getattr(times, "iowait", 0.0)  # Of all cores.
            look = {"at": time.perf_counter(), "mine": _seconds_of_threads(seen) - before}
            looks.append(look | {"rows": len(list(out.glob("part-*"))), "busy": busy})
            time.sleep(_EVERY)
    if sweep.returncode or looks[-1]["rows"] != _ROWS:
        raise SystemExit("The sweep failed.")
    first = next(look for look in looks if look["rows"])
    last = next(look for look in looks if look["rows"] == _ROWS)
    begin, end = looks[0]["at"], looks[-1]
    found = {"wall s": end["at"] - begin, "CPU s": end["mine"]}
    found["until the first row s"] = first["at"] - begin
    found["CPU s until the first row"] = first["mine"]
    if number := last["rows"] - first["rows"]:
        total = (last["at"] - first["at"]) * (os.cpu_count() or 1)
        mine, busy = (last[key] - first[key] for key in ("mine", "busy"))
        found |= {"then CPU s a row": mine / number, "then busy %": 100 * mine / total}
        found["then others %"] = 100 * (busy - mine) / total
    return found


def _seconds_of_threads(seen: dict[tuple[int, int], float]) -> float:
    """On a core, of all threads below this process, those that ended included."""
    for one in psutil.Process().children(recursive=True):
        for path in pathlib.Path(f"/proc/{one.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError, IndexError):  # It has ended.
                seen[one.pid, int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
    return sum(seen.values())


if __name__ == "__main__":
    main()
