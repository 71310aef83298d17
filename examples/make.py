"""Makes the files of this folder that stand in for measurements: `python examples/make.py`."""

import gzip
import json
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


def profile() -> list[dict]:
    """What PyTorch's profiler would write of six steps of 20 ms of one rank of eight: it waits for
    data, its host frees memory, and half of its communication has nothing beside it.
    """
    events, number = [], 0

    def span(cat: str, name: str, start: float, end: float, tid: int, **args) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": int(tid > 100), "tid": tid}
        events.append(event | {"ts": round(start, 3), "dur": round(end - start, 3), "args": args})

    def kernel(name: str, start: float, end: float, stream: int, thread: int, **args) -> None:
        nonlocal number
        number += 1
        span("cuda_runtime", "cudaLaunchKernel", start - 10, start - 5, thread, correlation=number)
        span("kernel", name, start, end, stream, correlation=number, stream=stream, **args)

    main, engine, compute, communication = 101, 102, 7, 20
    for step in range(6):
        at = 20_000.0 * step
        span("user_annotation", f"ProfilerStep#{step + 10}", at, at + 20_000, main)
        loader = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
        span("user_annotation", loader, at, at + 3000, main)
        sizes = {"Group size": 8, "Process Group Name": "dp", "dtype": "BFloat16"}
        gather = sizes | {"Collective name": "_allgather_base", "In msg nelems": 12_500_000}
        kernel(
            "ncclDevKernel_AllGather_RING_LL", at + 3020, at + 5000, communication, main, **gather
        )
        for i, name in enumerate(
            ("gemm_forward", "flash_fwd_kernel", "gemm_forward", "gemm_forward")
        ):
            span("cpu_op", "aten::linear", at + 4985 + 1250 * i, at + 5020 + 1250 * i, main)
            kernel(name, at + 5000 + 1250 * i, at + 6250 + 1250 * i, compute, main)
        span("cuda_runtime", "cudaFree", at + 9990, at + 11_000, main)
        for i in range(4):
            start = at + 11_020 + 1870 * i
            node = "autograd::engine::evaluate_function: LinearBackward0"
            span("cpu_op", node, start - 15, start + 100, engine)
            kernel("gemm_backward", start, start + 1770, compute, engine)
        scatter = sizes | {"Collective name": "_reduce_scatter_base", "In msg nelems": 100_000_000}
        name = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL"
        kernel(name, at + 16_500, at + 18_900, communication, engine, **scatter)
        span("user_annotation", "Optimizer.step#AdamW.step", at + 18_880, at + 19_500, main)
        kernel("multi_tensor_apply_adam", at + 18_900, at + 20_000, compute, main)
    return events


# Those of `job.toml`, as Megatron-LM prints them.
_ARGUMENTS = """\
add_bias_linear=False bf16=True data_parallel_size=4 ffn_hidden_size=14336 global_batch_size=32
group_query_attention=True hidden_size=4096 max_position_embeddings=8192 micro_batch_size=1
normalization=RMSNorm num_attention_heads=32 num_layers=32
num_layers_per_virtual_pipeline_stage=4 num_query_groups=8 padded_vocab_size=128256
pipeline_model_parallel_size=4 position_embedding_type=rope recompute_granularity=selective
seq_length=8192 sequence_parallel=True swiglu=True tensor_model_parallel_size=2
transformer_impl=transformer_engine untie_embeddings_and_output_weights=True
use_distributed_optimizer=True world_size=32
"""


def training_log() -> str:
    """What Megatron-LM prints of 120 steps of a run in which one GPU computes 1.6 times as long.
    The first steps compile, and a checkpoint is saved after every fiftieth.
    """
    program = prism.compile_job(prism.load_job(_FOLDER / "job.toml"))
    slow = prism.slow_rank(program, 1, 1.6).program
    law = prism.simulate(slow, num_samples=65_536, key=jax.random.key(0))
    rng = np.random.default_rng(4)
    seconds = np.asarray(law.quantile(rng.uniform(size=120)))
    seconds[:2] *= 9, 1.6
    seconds[[50, 100]] += 4
    arguments = (word.split("=") for word in _ARGUMENTS.split())
    lines = ["------------------------ arguments ------------------------"]
    lines += [f"  {name} {'.' * (47 - len(name))} {value}" for name, value in arguments]
    lines.append("-------------------- end of arguments ---------------------")
    for step, time in enumerate(seconds, 1):
        lines.append(
            f" iteration {step:8d}/     120 | consumed samples: {32 * step:12d} | elapsed time "
            f"per iteration (ms): {1e3 * time:.1f} | global batch size: 32 |"
        )
        if step % 50 == 0:
            lines.append(f"  successfully saved checkpoint from iteration {step:7d} to checkpoints")
    return "\n".join([*lines, ""])


def main(folder: pathlib.Path) -> None:
    """Writes the files to a folder."""
    own = {"distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8}}
    text = json.dumps({"schemaVersion": 1, **own, "traceEvents": profile()}).encode()
    (folder / "gpu_profile.json.gz").write_bytes(gzip.compress(text, mtime=0))
    ops = trace()
    for name, table in {
        "nodes": nodes(),
        "step_times": step_times("job.toml", 2),
        "large_step_times": step_times("large_job.toml", 3),
        "trace": ops,
        "trace_step_times": traced_step_times(ops),
    }.items():
        table.write_csv(folder / f"{name}.csv")
    (folder / "train.log").write_text(training_log(), encoding="utf-8")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else _FOLDER)
