"""A value of another type is refused in one sentence that says what to give."""

import subprocess
import sys

import pytest

import prism_jax as prism


_SCRIPT = """
import jax, numpy as np, prism_jax as prism
program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
law = prism.simulate(program, num_samples=100, key=jax.random.key(0))
key = jax.random.key(0)
job = prism.load_job("megatron-22b-a100-8")
with jax.enable_x64(True):
    wide = prism.compile_graph([prism.Op(1.0, kind="gemm")])


def sweep(values, **options):
    prism.sweep(program, {"latencies.mean": values}, num_samples=100, key=key, **options)


for call in (
    lambda: prism.compile_job("megatron-22b-a100-8"),
    lambda: prism.predict("megatron-22b-a100-8"),
    lambda: prism.what_if(program, [program], num_samples=100, key=key),
    lambda: prism.slow_rank(program, 0, "20%"),
    lambda: prism.scale_kernel(program, "gemm", "20%"),
    lambda: prism.Quantile("p95"),
    lambda: prism.calibrate(job, np.ones(40), source="x", key=key),
    lambda: prism.save_law("law.npz", law),
    lambda: prism.rank_layouts(["megatron-22b-a100-8"], key=key),
    lambda: prism.training_run(law, num_steps=100, key=key),
    lambda: prism.plot.cdf(job),
    lambda: prism.plot.tornado(job),
    lambda: prism.plot.gantt(job),
    lambda: law.quantile("p95"),
    lambda: prism.load_job(5),
    lambda: prism.load_job("megatron-22b-a100-8", None),
    lambda: prism.load_job("megatron-22b-a100-8", [3]),
    lambda: prism.save_program("program.npz", program),
    lambda: prism.memory("megatron-22b-a100-8"),
    lambda: prism.fit_profile(3),
    lambda: prism.read_trace("trace.csv", "job.toml"),
    lambda: prism.evaluate("1f1b", forward=1.0, backward=2.0),
    lambda: prism.compile_graph([3]),
    lambda: prism.plot.histogram(None),
    lambda: prism.plot.memory(3),
    lambda: prism.sweep(program, ["latencies.mean"], key=key),
    lambda: sweep(["0.1"]),
    lambda: sweep(0.1),
    lambda: sweep([True]),
    lambda: sweep([None, 1.0]),
    lambda: sweep([[0.1], [0.1, 0.2]]),
    lambda: sweep([0.1], out=3),
    lambda: sweep([0.1], executor=2),
    lambda: prism.simulate(wide, num_samples=100, key=key),
    lambda: prism.estimate(wide, prism.Mean(), num_samples=100, key=key),
):
    try:
        call()
    except ValueError as error:
        print(error)
number = np.int64(2)
assert prism.estimate(program, prism.Mean(), num_samples=number, key=key) == 1
assert prism.step_times(program, number, key=key).tolist() == [1, 1]
"""


def test_wrong_types_are_refused_in_a_sentence():
    """In a process of its own: here, types are checked when functions are called."""
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True
    )
    wanted = [
        "use `load_job`",
        "use `load_job`",
        "A `list` was given in place of a mapping of scenarios by name; give such as",
        "is '20%'; give a number, such as 1.2",
        "is '20%'; give a number, such as 1.2",
        "such as 0.95 for p95",
        "give `[steps]` for one run",
        "write `save_law(law, path)`",
        "A `str` was given in place of a job to rank",
        "A `Law` was given in place of a program; use `compile_job`",
        "A `Job` was given in place of a law; use `simulate`",
        "A `Job` was given in place of a sensitivity; use `sensitivity`",
        "A `Job` was given in place of a simulated step; use `sample_step`",
        "`q=p95` must be a number, such as 0.95 for p95",
        "A value of type int was given in place of a job; give the name of a shipped one",
        *['give texts such as `"layout.dp=64"`, or a value for each key'] * 2,
        "write `save_program(program, path)`",
        "A `str` was given in place of a job; use `load_job`",
        "An `int` was given in place of a trace; use `read_trace`",
        "A `str` was given in place of a job; use `load_job`",
        "A `str` was given in place of a schedule; use a class",
        "An `int` was given in place of an op; use `prism.Op",
        "A `NoneType` was given in place of a law; use `simulate`",
        "An `int` was given in place of a memory; use `prism.memory`",
        "A `list` was given in place of a mapping; give such as",
        *["give a list of numbers, such as `[0.01, 0.02]`"] * 5,
        "An `int` was given in place of a path of a folder",
        "An `int` was given in place of an executor",
        *["numbers of float64, which JAX would cut; set `jax_enable_x64`"] * 2,
    ]
    said = run.stdout.splitlines()
    assert len(said) == len(wanted)
    for sentence, part in zip(said, wanted, strict=True):
        assert part in sentence


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
    with pytest.raises(FileNotFoundError, match=r"No such folder: '[^']*missing'"):
        prism.save_program(program, tmp_path / "missing" / "program.npz")


def test_dtypes_are_known_by_other_names_and_choices_are_told():
    job = prism.load_job("megatron-22b-a100-8", ["training.dtype=bfloat16"])
    assert job == prism.load_job("megatron-22b-a100-8", ["training.dtype=bf16"])
