"""How much memory and time it takes to tell where the time of a large trace goes, and to read its
ops: `python benchmarks/reading.py --kineto 1`, in GB; 1.6 are ten million events.

A trace of so many GB is written to a temporary folder, as the PyTorch profiler writes those of a
rank that trains, and read by a separate process.
"""

import argparse
import json
import pathlib
import resource
import subprocess
import sys
import tempfile
import time


sys.path.insert(0, __file__.rpartition("/benchmarks/")[0])
from validation.tables import options


_MICROBATCHES, _KERNELS = 8, 400
_NAME = "void at::native::vectorized_elementwise_kernel<4, at::native::bfloat16_copy_kernel_cuda>"


def main() -> None:
    given = options(__doc__, kineto=(1.0, "GB (1)"), child=(str, argparse.SUPPRESS))
    if given.child:
        _read(given.child)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "rank0.json"
        size = _write(path, 1e9 * given.kineto) / 1e9
        words = [sys.executable, __file__, "--child", str(path)]
        child = subprocess.run(words, check=True, capture_output=True, text=True)
    events, peak, *seconds = map(float, child.stdout.split())
    where, ops = (f"{x:.0f} s ({x / size:.0f} s per GB)" for x in seconds)
    print(f"{size:.2f} GB of JSON, {events:,.0f} events: peak memory {peak:.2f} GiB")
    print(f"where its time goes: {where} of CPU; its ops: {ops}")


def _read(path: str) -> None:
    """Prints the number of events, the peak of memory in GiB, and two numbers of seconds."""
    from prism_jax.data import Job, Layout, ScheduleConfig
    from prism_jax.trace import contents, read_profile_traces, read_rank_traces

    schedule = ScheduleConfig(kind="1f1b", num_microbatches=_MICROBATCHES)
    begin = time.process_time()
    events = sum(contents(read_rank_traces(path)).events.values())
    middle = time.process_time()
    read_profile_traces(path, Job(Layout(), schedule, name="large"))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(events, peak, middle - begin, time.process_time() - middle)


def _write(path: pathlib.Path, least_bytes: float) -> int:
    """Writes steps until the file has so many bytes; how many it has."""
    written, step = 0, 0
    with open(path, "w") as file:
        written += file.write('{\n"schemaVersion": 1,\n"traceEvents": [\n')
        while written < least_bytes:
            events = ",\n".join(json.dumps(event) for event in _step(step))
            written += file.write((",\n" if step else "") + events)
            step += 1
        own = {"rank": 0, "world_size": 1}
        written += file.write(f'\n],\n"distributedInfo": {json.dumps(own)}\n}}\n')
    return written


def _step(step: int):
    """Ranges, operators, calls, kernels, flows and stack frames, in microseconds."""
    at, number = 1e6 * step, step * 2 * _MICROBATCHES * _KERNELS
    host, device = {"pid": 77, "tid": 77}, {"pid": 0, "tid": 7}
    yield _event("user_annotation", f"ProfilerStep#{step}", at, 9e5, host)
    for m in range(_MICROBATCHES):
        for phase in "FB":
            yield _event("user_annotation", f"PP:0{phase}{m}", at, _KERNELS * 50.0, host)
            for k in range(_KERNELS):
                number += 1
                now, dims = at + 50.0 * k, [[4096, 1024], [1024, 4096]]
                link = {"External id": number, "correlation": number}
                yield _event("python_function", f"model.py({k}): forward", now, 40.0, host)
                yield _event("cpu_op", "aten::mm", now + 1, 30.0, host, **{"Input Dims": dims})
                yield _event("cuda_runtime", "cudaLaunchKernel", now + 2, 5.0, host, **link)
                grid = {"grid": [k % 16 + 1, 1, 1], "block": [128, 1, 1], "stream": 7}
                yield _event("kernel", _NAME, now + 20, 45.0, device, **link, **grid)
                flow = {"cat": "ac2g", "name": "ac2g", "id": number}
                yield {"ph": "s", "ts": now + 2, **flow, **host}
                yield {"ph": "f", "ts": now + 20, **flow, **device, "bp": "e"}
            at += 50.0 * _KERNELS
    yield _event("user_annotation", "Optimizer.step#Adam.step", at, 1000.0, host)
    yield _event("cuda_runtime", "cudaLaunchKernel", at + 2, 5.0, host, correlation=-2 - step)
    yield _event("kernel", "adam", at + 20, 900.0, device, correlation=-2 - step)


def _event(category: str, name: str, start: float, duration: float, where: dict, **args) -> dict:
    times = {"ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, **where, **times, "args": args}


if __name__ == "__main__":
    main()
