"""What graphs cost of which many ops run side by side: CPU seconds and memory, each in a process.

    python benchmarks/wide_graphs.py             # a table in Markdown
    python benchmarks/wide_graphs.py --only join 5000

`compile_graph`, a first `simulate` of 256 steps with all that is compiled for it, and a second one,
in CPU seconds of all cores; memory is the peak of the process. Nothing is kept from run to run.
"""

import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Sequence


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import options, table


_SIZES = (("join", 125), ("join", 500), ("join", 5_000), ("side by side", 2_000))
_SIZES += (("side by side", 5_000), ("ranks", 5_000), ("layers", 500), ("chain", 500))
_SIZES += (("chain", 100_000), ("laws", 20_000), ("grid", 1_000_000))
_ONLY_COMPILED = ("laws", "grid")


def main() -> None:
    known = {"only": {"nargs": 2, "metavar": ("SHAPE", "OPS"), "help": "one graph, as JSON"}}
    only = options(__doc__, **known).only
    if only:
        print(json.dumps(measured(only[0], int(only[1]))))
        return
    rows = [(*one, *_in_process(*one)) for one in _SIZES]
    header = ("graph", "ops", "`compile_graph` [s]", "first [s]", "second [s]", "memory [MiB]")
    print(table(header, [(shape, f"{ops:,}", *found) for shape, ops, *found in rows]))


def graph_of(shape: str, number: int) -> list:
    """The ops of a graph: they `join` in one, wait for nothing, or for nothing on `ranks` of their
    own, for all of the `layer` of so many before them, for the one before (`chain`), or for that of
    a thousand before (`grid`); or have `laws` of their own.
    """
    from prism_jax import Op
    from prism_jax.latency import LogNormal

    law = LogNormal(1.0, 0.2)

    def after(op: int) -> Sequence[int]:
        if shape == "layers":
            first = op // number * number
            return range(max(first - number, 0), first)
        step = {"chain": 1, "grid": 1_000}.get(shape, op + 1)
        return [op - step] if op >= step else []

    if shape == "laws":
        return [Op(LogNormal(1.0, 0.1 + 1e-5 * op)) for op in range(number)]
    every = range(4 * number if shape == "layers" else number)
    ops = [Op(law, after(op), rank=op if shape == "ranks" else 0) for op in every]
    return [*ops, Op(law, range(number))] if shape == "join" else ops


def measured(shape: str, number: int) -> list[str]:
    """The cells of a row."""
    import jax

    from prism_jax import compile_graph, simulate

    ops = graph_of(shape, number)
    start = time.process_time()
    program = compile_graph(ops)
    seconds = [time.process_time() - start]
    for key in range(0 if shape in _ONLY_COMPILED else 2):
        start = time.process_time()
        simulate(program, num_samples=256, key=jax.random.key(key))
        seconds.append(time.process_time() - start)
    # Not `getrusage`, whose peak is that of the process before it became this one, too.
    status = pathlib.Path("/proc/self/status").read_text()
    memory = int(status.split("VmHWM:")[1].split()[0]) // 1024
    return [*(f"{x:.2f}" for x in seconds), *[""] * (3 - len(seconds)), f"{memory:,}"]


def _in_process(shape: str, number: int) -> list[str]:
    command = [sys.executable, __file__, "--only", shape, str(number)]
    without = os.environ | {"PRISM_JAX_CACHE": "off"}
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=without)
    return json.loads(found.stdout)


if __name__ == "__main__":
    main()
