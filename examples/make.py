"""Makes the files of this folder that stand in for measurements: `python examples/make.py`."""

import pathlib
import sys

import jax
import numpy as np
import polars as pl

import prism_jax as prism


_FOLDER = pathlib.Path(__file__).parent
_REPLICAS, _RANKS, _MICROBATCHES, _STEPS = 2, 2, 4, 16
_SEND_RECV = 0.002  # seconds


def nodes() -> pl.DataFrame:
    """How long one matrix multiplication takes on each node, relative to the mean."""
    rng = np.random.default_rng(0)
    factors = 1 + 0.004 * rng.normal(size=4)
    factors[3] = 1.05  # A slow node, at the rank that decides the step.
    hosts = [f"gpu-{i:02d}" for i in range(4)]
    return pl.DataFrame({"node": range(4), "host": hosts, "factor": factors.round(4)})


def step_times(job: str, seed: int) -> pl.DataFrame:
    """Steps of a run that takes 3 % and 20 ms longer than predicted, one in 25 much longer."""
    program = prism.compile_job(prism.load_job(_FOLDER / job))
    law = prism.simulate(program, num_samples=65_536, key=jax.random.key(0))
    rng = np.random.default_rng(seed)
    seconds = 1.03 * law.quantile(rng.uniform(size=200)) + 0.02
    seconds *= np.where(rng.uniform(size=200) < 0.04, 1.03, 1.0)
    return pl.DataFrame({"step": range(200), "step_time_s": seconds.round(4)})


def trace() -> pl.DataFrame:
    """The ops of some steps of a 1F1B pipeline, in which steps and ops vary."""
    rng = np.random.default_rng(1)
    return pl.DataFrame([row for step in range(_STEPS) for row in _rows_of_step(step, rng)])


def _rows_of_step(step: int, rng: np.random.Generator):
    slow_step = rng.lognormal(sigma=0.02)
    for dp_rank in range(_REPLICAS):
        forward, backward = (
            mean * slow_step * rng.lognormal(sigma=0.03, size=(_RANKS, _MICROBATCHES))
            for mean in (0.1, 0.2)
        )
        run = prism.evaluate(
            prism.OneFOneB(_RANKS, _MICROBATCHES),
            forward=forward,
            backward=backward,
            send_recv=_SEND_RECV,
        )
        for stage in range(_RANKS):
            ops = zip(run.op[stage], run.start[stage], run.end[stage], strict=True)
            for token, start, end in ops:
                kind, to = ("forward", stage + 1) if "F" in token else ("backward", stage - 1)
                at = dp_rank, step, int(token[token.index(kind[0].upper()) + 1 :])
                yield _row(f"{kind}-compute", stage, *at, start, end)
                if 0 <= to < _RANKS:
                    yield _row(f"{kind}-send", stage, *at, end, end + _SEND_RECV)
                    # The receiver waits from the end of its last op on.
                    posted = max((x for x in run.end[to] if x <= end), default=0.0)
                    yield _row(f"{kind}-recv", to, *at, posted, end + _SEND_RECV)


def _row(optype: str, stage: int, dp_rank: int, step: int, call: int, start: float, end: float):
    return {
        "dp_rank": dp_rank,
        "stage": stage,
        "step": step,
        "optype": optype,
        "seq_id": call,
        "start_ts": round(10 * step + start, 6),
        "duration": round(end - start, 6),
    }


def traced_step_times(ops: pl.DataFrame) -> pl.DataFrame:
    """From the first start to the last end."""
    end = (pl.col("start_ts") + pl.col("duration")).max()
    step_time = (end - pl.col("start_ts").min()).round(6)
    return ops.group_by("step").agg(step_time.alias("step_time_s")).sort("step")


def main(folder: pathlib.Path) -> None:
    """Writes the files to a folder."""
    ops = trace()
    for name, table in {
        "nodes": nodes(),
        "step_times": step_times("job.toml", 2),
        "large_step_times": step_times("large_job.toml", 3),
        "trace": ops,
        "trace_step_times": traced_step_times(ops),
    }.items():
        table.write_csv(folder / f"{name}.csv")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER)
