import gzip
import itertools as it
import json

import numpy as np
import pytest

from prism_jax.fitting import fit_profile
from prism_jax.trace import read_profile_traces, read_trace

from .test_trace import _job, _made_trace, _plain, _rows


_LETTER = {"forward-compute": "F", "backward-compute": "B"}
_LETTER |= {
    f"{p}-{w}": f"{w.upper()}_{p[0].upper()}"
    for p in ("forward", "backward")
    for w in ("send", "recv")
}
_COLLECTIVES = {"params-all-gather": "AllGather", "grads-reduce-scatter": "ReduceScatter"}


def _events(trace, d, s, *, graph=False, unit=1e6):
    """What Kineto would have recorded of one worker: ranges and launches on the host a little
    before the kernels that they start."""
    events, number, sequence = [], 0, {}

    def add(cat, name, start, end, lane, **args):
        events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0 if cat == "kernel" else 77,
                "tid": lane,
                "ts": unit * start,
                "dur": unit * (end - start),
                "args": args,
            }
        )

    for t, step in enumerate(trace.steps.tolist()):
        origin = 100.0 + 50.0 * t
        add("user_annotation", f"ProfilerStep#{step}", origin - 0.01, origin + 40, 77)
        loss = {"Collective name": "allreduce", "Process Group Name": "all", "Seq": step}
        add("kernel", "ncclDevKernel_AllReduce", origin + 29, origin + 30, 21, **loss)
        for op, start in trace.start.items():
            for m in np.flatnonzero(~np.isnan(start[t, d, s])).tolist():
                a, b = origin + start[t, d, s, m], origin + trace.end[op][t, d, s, m]
                if op in _LETTER:
                    name = f"PP:{s}{_LETTER[op]}{m}"
                elif op == "optimizer":
                    name = "Optimizer.step#Adam.step"
                else:
                    name = op
                number += 1
                called = a - 4e-6 * (list(trace.start).index(op) + 1)
                add("user_annotation", name, called, called + 3e-6, 77)
                call = "cudaGraphLaunch" if graph else "cudaLaunchKernel"
                add("cuda_runtime", call, called + 1e-6, called + 2e-6, 77, correlation=number)
                if op in _COLLECTIVES:
                    sequence[op] = sequence.get(op, 0) + 1
                    names = {"Collective name": _COLLECTIVES[op].lower(), "Seq": sequence[op]}
                    group = {"Process Group Name": str(s), "Group size": 2, "In msg nelems": 8}
                    kernel = f"ncclDevKernel_{_COLLECTIVES[op]}_RING"
                    add("kernel", kernel, a, b, 20, correlation=number, **names, **group)
                    continue
                if not op.endswith("-compute") and op != "optimizer":
                    add("kernel", "ncclDevKernel_SendRecv", a, b, 21, correlation=number)
                    continue
                cuts = [a, a + 0.4 * (b - a), b] if graph else [a, b]
                for low, high in it.pairwise(cuts):
                    add("kernel", "gemm", low, high, 7, correlation=number, grid=[1, 2, 3])
    return events


def _write(folder, trace, *, skew=0.0, only=None, **options):
    pp = trace.job.layout.pp
    folder.mkdir()
    for rank in range(trace.job.layout.dp * pp) if only is None else only:
        events = _events(trace, rank % 2, rank // 2, **options)
        for event in events:
            event["ts"] += 1e6 * skew * rank
        own = {"distributedInfo": {"rank": rank, "world_size": 4}, "traceEvents": events}
        text = json.dumps({"schemaVersion": 1, **own, "baseTimeNanoseconds": 10**18})
        path = folder / f"rank{rank}.json"
        if rank % 2:
            path = path.with_suffix(".json.gz")
        path.write_bytes(gzip.compress(text.encode()) if rank % 2 else text.encode())
    return folder


def _same(one, other, rel=1e-4):
    assert [(m.kind, m.dp_rank, m.stage) for m in one.means] == [
        (m.kind, m.dp_rank, m.stage) for m in other.means
    ]
    np.testing.assert_allclose(
        [m.mean_s for m in one.means], [m.mean_s for m in other.means], rtol=rel, atol=2e-8
    )
    found = {(v.kernel, v.component, v.family): v.parameters for v in one.variability}
    for v in other.variability:  # Nanoseconds, to which times are rounded, may have one, too.
        assert found[v.kernel, v.component, v.family] == pytest.approx(v.parameters, rel=rel)


@pytest.fixture(scope="module")
def made():
    return _made_trace(_job(), 12, _plain)


@pytest.mark.parametrize("graph", [False, True])
def test_a_kineto_trace_and_its_op_table_have_the_same_profile(tmp_path, made, graph):
    """Though the clocks of ranks are 1.5 ms apart."""
    _rows(made).write_parquet(tmp_path / "t.parquet")
    table = read_trace(tmp_path / "t.parquet", made.job)
    folder = _write(tmp_path / "k", made, skew=1.5e-3, graph=graph)
    trace = read_profile_traces(folder, made.job)
    assert trace.steps.tolist() == table.steps.tolist()
    assert not trace.dropped
    assert not trace.notes
    np.testing.assert_allclose(trace.step_times(), table.step_times(), atol=1e-8)
    _same(fit_profile(trace), fit_profile(table))
