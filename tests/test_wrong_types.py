"""A value of another type is refused in one sentence that says what to give."""

import subprocess
import sys

import pytest

import prism_jax as prism


_SCRIPT = """
import sys, jax, numpy as np, prism_jax as prism
program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
law = prism.simulate(program, num_samples=100, key=jax.random.key(0))
key = jax.random.key(0)
job = prism.load_job("megatron-22b-a100-8")
with jax.enable_x64(True):
    wide = prism.compile_graph([prism.Op(1.0, kind="gemm")])


def sweep(values, **options):
    prism.sweep(program, {"latencies.mean": values}, num_samples=100, key=key, **options)


for call in sys.argv[1:]:
    try:
        eval(call)
    except ValueError as error:
        print(error)
number = np.int64(2)
assert prism.estimate(program, prism.Mean(), num_samples=number, key=key) == 1
assert prism.step_times(program, number, key=key).tolist() == [1, 1]
"""
_TEXTS = 'give texts such as `"layout.dp=64"`, or a value for each key'
_LIST = "give a list of numbers, such as `[0.01, 0.02]`"
_CUT = "numbers of float64, which JAX would cut; set `jax_enable_x64`"
_CALLS = {
    "prism.compile_job('megatron-22b-a100-8')": "use `load_job`",
    "prism.predict('megatron-22b-a100-8')": "use `load_job`",
    "prism.what_if(program, [program], num_samples=9, key=key)": "in place of a mapping of",
    "prism.slow_rank(program, 0, '20%')": "is '20%'; give a number, such as 1.2",
    "prism.scale_kernel(program, 'gemm', '20%')": "is '20%'; give a number, such as 1.2",
    "prism.Quantile('p95')": "such as 0.95 for p95",
    "prism.calibrate(job, np.ones(40), source='x', key=key)": "give `[steps]` for one run",
    "prism.save_law('law.npz', law)": "write `save_law(law, path)`",
    "prism.rank_layouts(['megatron-22b-a100-8'], key=key)": "A `str` was given in place of a job",
    "prism.training_run(law, num_steps=100, key=key)": "A `Law` was given in place of a program",
    "prism.plot.cdf(job)": "A `Job` was given in place of a law; use `simulate`",
    "prism.plot.tornado(job)": "A `Job` was given in place of a sensitivity; use `sensitivity`",
    "prism.plot.gantt(job)": "A `Job` was given in place of a simulated step; use `sample_step`",
    "law.quantile('p95')": "`q=p95` must be a number, such as 0.95 for p95",
    "prism.load_job(5)": "A value of type int was given in place of a job; give the name",
    "prism.load_job('megatron-22b-a100-8', None)": _TEXTS,
    "prism.load_job('megatron-22b-a100-8', [3])": _TEXTS,
    "prism.save_program('program.npz', program)": "write `save_program(program, path)`",
    "prism.memory('megatron-22b-a100-8')": "A `str` was given in place of a job; use `load_job`",
    "prism.fit_profile(3)": "An `int` was given in place of a trace; use `read_trace`",
    "prism.read_trace('trace.csv', 'job.toml')": "was given in place of a job; use `load_job`",
    "prism.evaluate('1f1b', forward=1.0, backward=2.0)": "A `str` was given in place of a schedule",
    "prism.compile_graph([3])": "An `int` was given in place of an op; use `prism.Op",
    "prism.plot.histogram(None)": "A `NoneType` was given in place of a law; use `simulate`",
    "prism.plot.memory(3)": "An `int` was given in place of a memory; use `prism.memory`",
    "prism.sweep(program, ['latencies.mean'], key=key)": "A `list` was given in place of a mapping",
    "prism.sweep(program, {3: [0.1]}, key=key)": "in place of a name of a parameter",
    "prism.merge_laws(None)": "Give a list of at least one law to merge",
    "prism.merge_laws(law)": "Give a list of at least one law to merge",
    "prism.load_law(None)": "A `NoneType` was given in place of a path",
    "sweep(['0.1'])": _LIST,
    "sweep(0.1)": _LIST,
    "sweep([True])": _LIST,
    "sweep([None, 1.0])": _LIST,
    "sweep([[0.1], [0.1, 0.2]])": _LIST,
    "sweep([0.1], out=3)": "An `int` was given in place of a path of a folder",
    "sweep([0.1], executor=2)": "An `int` was given in place of an executor",
    "prism.simulate(wide, num_samples=100, key=key)": _CUT,
    "prism.estimate(wide, prism.Mean(), num_samples=100, key=key)": _CUT,
}


def test_wrong_types_are_refused_in_a_sentence():
    """In a process of its own: here, types are checked when functions are called."""
    command = [sys.executable, "-c", _SCRIPT, *_CALLS]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    for sentence, (call, words) in zip(run.stdout.splitlines(), _CALLS.items(), strict=True):
        assert words in sentence, call


def test_a_folder_that_does_not_exist_is_named(tmp_path):
    program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
    with pytest.raises(FileNotFoundError, match=r"No such folder: '[^']*missing'"):
        prism.save_program(program, tmp_path / "missing" / "program.npz")
    with pytest.raises(IsADirectoryError, match=rf"Is a folder: '{tmp_path}'"):
        prism.save_program(program, tmp_path)


def test_dtypes_are_known_by_other_names_and_choices_are_told():
    job = prism.load_job("megatron-22b-a100-8", ["training.dtype=bfloat16"])
    assert job == prism.load_job("megatron-22b-a100-8", ["training.dtype=bf16"])
