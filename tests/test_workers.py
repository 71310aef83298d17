"""Sweeps: their rows, folders and commands, and the executors that do the work."""

import concurrent.futures as cf
import contextlib
import errno
import functools as ft
import itertools as it
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax import Variability, _interrupt, load_job, rank_layouts, simulate, sweep
from prism_jax._interrupt import interruptible
from prism_jax.analysis import Points, open_parts, sweep_points, write_part
from prism_jax.analysis._sweep import grid
from prism_jax.cli import main
from prism_jax.cli._values import values
from prism_jax.schedule import OneFOneB
from prism_jax.workers import RayExecutor, prepare_worker, run_tasks

from .helpers import lognormal, pipeline_program, refusal, rich_program


_NAME = "variability.residual.gemm.sigma"
_GRID = {_NAME: [0.01, 0.02, 0.03, 0.05, 0.08, 0.1]}


def _program():
    variability = Variability(residual={"gemm": lognormal(0.05), "send_recv": lognormal(0.1)})
    return pipeline_program(OneFOneB(2, 3), variability=variability)


def _spawning(workers):
    context = multiprocessing.get_context("spawn")
    return cf.ProcessPoolExecutor(workers, mp_context=context, initializer=prepare_worker)


def _third(x):
    return np.asarray(x / 3), len(jax.devices()), os.environ.get("NPROC")


def _dies(x):
    if x == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return x


def _collect(results, found):
    for result in results:
        found.append(result)


def _content(folder):
    # A hidden file is what a killed process was writing.
    return {path.name: path.read_bytes() for path in sorted(folder.glob("[!.]*"))}


def test_a_worker_has_one_core_and_the_precision_of_the_driver():
    numbers = [(jax.numpy.asarray(float(x)),) for x in range(3)]
    with _spawning(1) as executor:
        found = dict(run_tasks(_third, numbers, executor))
    for number, (result, devices, threads) in found.items():
        assert result.dtype == np.float64
        assert result == number / 3
        assert (devices, threads) == (1, "1")


def test_finished_tasks_are_kept_when_a_worker_dies():
    found = []
    with _spawning(1) as executor:
        results = run_tasks(_dies, [(x,) for x in range(4)], executor)
        refusal(lambda: _collect(results, found), "A worker died", cf.BrokenExecutor)
    assert sorted(found) == [(0, 0), (1, 1)]


_DRIVER = """
import concurrent.futures as cf, multiprocessing
from prism_jax.workers import prepare_worker, run_tasks
if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    pool = cf.ProcessPoolExecutor(2, mp_context=spawn, initializer=prepare_worker)
    task = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    list(run_tasks(exec, [(task,)] * 2, pool))
"""


@pytest.mark.slow
def test_workers_end_with_a_driver_that_is_told_to(tmp_path):
    (tmp_path / "driver.py").write_text(_DRIVER)
    command = [sys.executable, tmp_path / "driver.py"]
    workers: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            workers += [int(driver.stdout.readline()) for _ in range(2)]
            driver.terminate()
            # Their output ends when all that may write to it have ended.
            assert driver.communicate(timeout=60) == ("", None)
        finally:
            for worker in workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
    assert driver.returncode == -signal.SIGTERM


def test_python_ends_after_the_batch_in_hand(monkeypatch):
    """A thread that simulates then is stopped between two batches."""
    monkeypatch.setattr(_interrupt, "_python_ends", False)
    begun, batches = threading.Event(), []

    def simulates():
        with interruptible() as interrupt:
            begun.set()
            while not _interrupt._python_ends:
                time.sleep(0)
            batches.append("in hand")
            interrupt.check()
            batches.append("another")

    threading.Thread(target=simulates, daemon=True).start()
    begun.wait()
    _interrupt.stop_threads()
    assert batches == ["in hand"]
    assert not _interrupt._at_work


_DAEMON = """
import threading, jax, prism_jax as prism
from prism_jax.replica import _tiles
compiled, in_jax = _tiles._compiled, threading.Event()


def tells(*arguments):
    call = compiled(*arguments)
    return lambda *given: (in_jax.set(), call(*given))[1]


_tiles._compiled = tells
program = prism.compile_graph([prism.Op(1.0, kind="gemm")])
options = {"num_samples": 10**9, "key": jax.random.key(0)}
threading.Thread(target=prism.simulate, args=(program,), kwargs=options, daemon=True).start()
in_jax.wait()
"""


@pytest.mark.slow
def test_a_daemon_thread_that_simulates_when_python_ends_aborts_nothing():
    command = [sys.executable, "-c", _DAEMON]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


class _DiesAtTheThird(cf.ThreadPoolExecutor):
    """A pool that breaks, as one of processes does."""

    calls = 0

    def submit(self, fn, /, *args, **kwargs):
        self.calls += 1
        if self.calls == 2:
            raise cf.BrokenExecutor
        return super().submit(fn, *args, **kwargs)


def test_rows_are_the_same_by_any_executor_and_those_of_a_broken_one_stay(tmp_path):
    program, options = _program(), {"num_samples": 2_000, "key": jax.random.key(1)}
    alone = sweep(program, _GRID, out=tmp_path / "alone", **options)
    with _DiesAtTheThird(2) as executor, pytest.raises(cf.BrokenExecutor):
        sweep(program, _GRID, out=tmp_path / "rows", executor=executor, **options)
    assert 0 < len(list((tmp_path / "rows").glob("part-*"))) < 6
    with cf.ThreadPoolExecutor(2) as executor:
        rows = sweep(program, _GRID, out=tmp_path / "rows", executor=executor, **options)
    assert rows.equals(alone)
    assert _content(tmp_path / "rows") == _content(tmp_path / "alone")


def test_shards_part_the_rows():
    points = Points(
        [{}] * 11, [None] * 11, lambda source: source, "", ["ab"[i % 2] for i in range(11)]
    )
    shards = [points.chunks((i, 3)) for i in (1, 2, 3)]
    assert sorted(n for chunks in shards for chunk in chunks for n in chunk) == list(range(11))
    assert all(len({n % 2 for n in chunk}) == 1 for chunks in shards for chunk in chunks)


def test_executors_that_cannot_do_the_work_are_refused():
    fork = multiprocessing.get_context("fork")
    forks, threads = cf.ProcessPoolExecutor(1, mp_context=fork), cf.ThreadPoolExecutor(1)
    refusal(lambda: list(run_tasks(_third, [(1.0,)], forks)), "are forks")
    refusal(lambda: list(run_tasks(lambda x: x, [(1.0,)], threads)), "cannot be sent")


class _Talks(cf.Executor):
    """An executor whose workers are dead, which says so as Ray does: a thread of its prints it."""

    def submit(self, fn, /, *args, **kwargs):
        print("(raylet) A worker died")
        raise cf.BrokenExecutor

    def shutdown(self, wait=True, *, cancel_futures=False):
        print("(raylet) All is shut down")


def test_what_ray_says_is_not_in_the_result(monkeypatch, capsys):
    monkeypatch.setattr("prism_jax.workers.RayExecutor", lambda *_, **__: _Talks())
    over = ["--over", "kernels.gemm.sigma=0.01,0.05", "--samples", "64"]
    assert main(["sweep", "megatron-22b-a100-8", *over, "--ray", "--json"]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "(raylet) A worker died\n(raylet) All is shut down\nprism-jax: " in told.err


@pytest.mark.parametrize(("users", "sent"), [(None, "0"), ("1", "1")])
def test_ray_sends_usage_statistics_only_if_the_user_wants_it(users, sent, monkeypatch):
    seen = []

    class Ray:
        is_initialized = staticmethod(lambda: False)
        remote = staticmethod(lambda **options: lambda function: function)

        @staticmethod
        def init(**options):
            seen.append(os.environ.get("RAY_USAGE_STATS_ENABLED"))

    monkeypatch.setitem(sys.modules, "ray", Ray)
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED")
    if users is not None:
        monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", users)
    RayExecutor()
    assert seen == [sent]


# Until its input ends, also because this process did.
_CLUSTER = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def cluster():
    """A real Ray cluster of this machine."""
    pytest.importorskip("ray", reason="ray is not installed")
    # Not of this process: Ray forks, and JAX warns of that.
    command = [sys.executable, "-c", _CLUSTER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        yield one.stdout.readline().strip()
        one.communicate()


def _program_of_a_mortal(marker, program, values):
    """Kills its worker the first time."""
    from prism_jax.analysis._sweep import _with_values

    if values[_NAME] == _GRID[_NAME][2] and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return _with_values(program, values)


@pytest.mark.slow
def test_ray_gives_the_same_rows_also_after_a_worker_was_killed(cluster, tmp_path):

    program, options = _program(), {"num_samples": 2_000, "key": jax.random.key(1)}
    sweep(program, _GRID, out=tmp_path / "alone", **options)
    program_of = ft.partial(_program_of_a_mortal, tmp_path / "killed", program)
    values = grid(_GRID)
    with RayExecutor(cluster) as executor:
        points = Points(values, values, program_of, "")
        sweep_points(points, out=tmp_path / "rows", executor=executor, **options)
    assert (tmp_path / "killed").exists()
    alone, rows = (_content(tmp_path / name) for name in ("alone", "rows"))
    assert len(rows) == 7
    del alone["sweep.json"], rows["sweep.json"]  # Of another digest, as are the names of rows.
    assert [*rows.values()] == [*alone.values()]


def _dies_once(marker, call):
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return call()


class _Deadly(RayExecutor):
    """Ray, of which the first worker to do something is killed."""

    marker: pathlib.Path

    def submit(self, fn, /, *args, **kwargs):
        return super().submit(_dies_once, self.marker, ft.partial(fn, *args, **kwargs))


@pytest.mark.slow
def test_ray_ranks_layouts_as_one_process_also_after_a_worker_was_killed(cluster, tmp_path):
    jobs = [
        load_job("megatron-22b-a100-8", ["cluster.num_nodes=4", f"layout.{degrees}"])
        for degrees in ("pp=2", "pp=1", "dp=2")
    ]
    options = {"num_samples": 1024, "key": jax.random.key(0)}
    alone = rank_layouts(jobs, **options)
    with _Deadly(cluster) as executor:
        executor.marker = tmp_path / "killed"
        found = rank_layouts(jobs, executor=executor, **options)
    assert (tmp_path / "killed").exists()
    assert str(found.layouts) == str(alone.layouts)  # Unknown errors, `nan`, equal nothing.


_KILLED_AFTER_A_ROW = """
import os, signal, sys
from prism_jax.analysis import _sweep
from prism_jax.cli import main
write_part = _sweep.write_part
def write(*row):
    write_part(*row)
    os.kill(os.getpid(), signal.SIGKILL)
_sweep.write_part = write
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_driver_of_ray_goes_on_to_the_same_rows(cluster, tmp_path):
    command = [sys.executable, "-m", "prism_jax", "sweep", "megatron-22b-a100-8"]
    command += ["--samples", "1000", "--over", "kernels.gemm.sigma=0.01:0.1:12", "--out"]
    subprocess.run([*command, tmp_path / "alone"], check=True)
    by_ray = [*command, tmp_path / "rows", "--ray", cluster]
    killed = [sys.executable, "-c", _KILLED_AFTER_A_ROW, *by_ray[3:]]
    assert subprocess.run(killed).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "rows").glob("part-*"))) == 1
    subprocess.run(by_ray, check=True)
    assert _content(tmp_path / "rows") == _content(tmp_path / "alone")
    assert len(_content(tmp_path / "rows")) == 13


@pytest.mark.parametrize("values", [[0.02, 0.1], [0.02, 0.03, 0.04, 0.05, 0.1]])
@pytest.mark.parametrize("make", [lambda: _program(), lambda: rich_program(8)])
def test_each_row_is_the_law_at_its_values(values, make):
    """Random numbers of the second are drawn once for all rows."""
    program, key = make(), jax.random.key(1)
    frame = sweep(program, {_NAME: values}, num_samples=3_000, key=key)
    assert list(frame[_NAME]) == values
    for row in frame.to_dicts():
        changed = eqx.tree_at(
            lambda p: p.variability.residual["gemm"].sigma, program, jnp.asarray(row[_NAME])
        )
        law = simulate(changed, num_samples=3_000, key=key)
        assert row["mean_s"] == law.mean
        assert row["p95_s"] == law.quantile(0.95)


@pytest.mark.parametrize("make", [contextlib.nullcontext, lambda: cf.ThreadPoolExecutor(1)])
def test_rows_before_a_program_that_is_refused_are_written(tmp_path, make):
    sigmas = [*np.linspace(0.02, 0.1, 7), -1.0, *np.linspace(0.02, 0.1, 56)]
    arguments = {"num_samples": 1_000, "key": jax.random.key(1), "out": tmp_path / "out"}
    with make() as executor, pytest.raises(ValueError, match=r"^Row 7 .*sigma=-1.0\): "):
        sweep(_program(), {_NAME: sigmas}, executor=executor, **arguments)
    assert len([*(tmp_path / "out").glob("part-*.parquet")]) == 7


def test_ctrl_c_ends_a_sweep_wherever_it_comes(tmp_path, monkeypatch, ctrl_c):
    """Also while samples become steps, which loses none of them."""
    from prism_jax.engine import _pools

    def interrupt(run, drawn, *rest):
        ctrl_c()
        return _pools.pool_of(run, drawn, *rest)

    for module in ("_simulate", "_together"):
        monkeypatch.setattr(f"prism_jax.engine.{module}.pool_of", interrupt)
    for sigmas in ([0.02, 0.1], np.linspace(0.02, 0.1, 6).tolist()):
        with pytest.raises(KeyboardInterrupt):
            sweep(_program(), {_NAME: sigmas}, num_samples=1_000, key=jax.random.key(1))


def test_a_row_that_is_interrupted_between_pools_is_not_taken_for_whole(monkeypatch):
    from prism_jax.engine import _pools, _simulate

    def of_the_first_pool(*arguments):
        yield next(_pools.drawn_pools(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(_pools, "_samples", lambda run: 4096)
    monkeypatch.setattr(_simulate, "drawn_pools", of_the_first_pool)
    law = simulate(_program(), num_samples=16384, key=jax.random.key(1))
    assert (law.num_samples, law.requested, law.interrupted) == (4096, 16384, True)


def test_a_killed_sweep_goes_on_without_repeating_a_row(tmp_path, monkeypatch):
    from prism_jax.analysis import _sweep

    program, key = _program(), jax.random.key(1)
    arguments = {"num_samples": 2_000, "key": key, "out": tmp_path / "out"}
    grid = {_NAME: [0.02, 0.05, 0.1]}
    calls = []

    def laws(programs, **options):
        for changed in programs:
            calls.append(changed)
            yield simulate(changed, **options)

    def dies(programs, **options):
        yield from laws(it.islice(programs, 2), **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(_sweep, "simulate_each", dies)
    with pytest.raises(KeyboardInterrupt):
        sweep(program, grid, **arguments)
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 2
    monkeypatch.setattr(_sweep, "simulate_each", laws)
    resumed = sweep(program, grid, **arguments)
    assert len(calls) == 3
    arguments["out"] = None
    assert resumed.equals(sweep(program, grid, **arguments))
    arguments["out"] = tmp_path / "out"
    refusal(lambda: sweep(program, {_NAME: [0.3]}, **arguments), "holds another sweep")
    slower = eqx.tree_at(lambda p: p.latencies.mean, program, 2 * program.latencies.mean)
    refusal(lambda: sweep(slower, grid, **arguments), "holds another sweep")
    monkeypatch.setattr(_sweep, "version", lambda package: "another")
    refusal(lambda: sweep(program, grid, **arguments), "holds another sweep")
    monkeypatch.undo()
    (damaged,) = (tmp_path / "out").glob("part-000001-*.parquet")
    damaged.write_text("no table")
    refusal(lambda: sweep(program, grid, **arguments), "is damaged or of another sweep; remove it")
    (tmp_path / "mine.txt").write_text("something else")
    refusal(lambda: sweep(program, grid, **arguments | {"out": tmp_path}), "holds no sweep")


def test_every_flipped_bit_of_a_row_is_noticed_and_every_row_of_another_sweep(tmp_path):
    row = {"row": 3, "layout.dp": 16, "mean_s": 1.5, "p95_s": 1.75, "sampling": "plain"}
    own, other = tmp_path / "own", tmp_path / "other"
    for folder in (own, other):
        open_parts(folder, folder.name)
        write_part(folder, row, folder.name)
    assert open_parts(own, "own") == {3: row}
    (path,), (foreign,) = own.glob("part-*"), other.glob("part-*")
    whole = path.read_bytes()
    for bit in np.random.default_rng(0).integers(8 * len(whole), size=100).tolist():
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        refusal(lambda: open_parts(own, "own"), "is damaged")
    path.write_bytes(whole)
    (own / foreign.name).write_bytes(foreign.read_bytes())
    with pytest.raises(ValueError, match=rf"{foreign.name}` is damaged or of another sweep"):
        open_parts(own, "own")


def test_a_full_disk_ends_a_sweep_in_one_sentence(tmp_path, monkeypatch, capsys):
    """Rows that are done stay whole; what a killed sweep left goes with the next."""
    out, written = tmp_path / "out", []
    write = pathlib.Path.write_bytes

    def fill(path, content):
        if path.parent != out:  # Compiled code, which JAX keeps.
            return write(path, content)
        if len(written) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(path)
        return write(path, content)

    job = ["sweep", "megatron-22b-a100-8", "--samples", "200", "--out", str(out)]
    job += ["--over", "schedule.num_microbatches=4,8"]
    with monkeypatch.context() as full:
        full.setattr(pathlib.Path, "write_bytes", fill)
        assert main(job) == 1
    error = capsys.readouterr().err
    assert "No space left on device" in error
    assert "keeps the rows that are done" in error
    assert "Traceback" not in error
    assert len([*out.glob("part-*.parquet")]) == 1
    (out / ".part-000001.parquet.0123.partial").write_bytes(b"half")
    assert main(job) == 0
    names = sorted(file.name[: len("part-000000")] for file in out.iterdir())
    assert names == ["part-000000", "part-000001", "sweep.json"]


def test_values_of_the_command_line():
    assert values("layout.dp=16,32") == ("layout.dp", ["16", "32"])
    key, numbers = values("kernels.gemm.sigma=0.01:0.2:20")
    assert key == "kernels.gemm.sigma"
    np.testing.assert_allclose([float(x) for x in numbers], np.linspace(0.01, 0.2, 20))


def test_the_command_writes_rows_and_refuses_bad_input(tmp_path, answered, refused, capsys):
    out = str(tmp_path / "out")
    job = ["sweep", "megatron-22b-a100-8", "--samples", "2000", "--out", out]
    over = ["--over", "kernels.gemm.sigma=0.01,0.05"]
    assert main([*job, *over, "--progress"]) == 0
    first = capsys.readouterr()
    assert "2 rows of 2,000 steps" in first.err
    assert main([*job, *over, "--progress", "--json"]) == 0
    again = capsys.readouterr()
    assert "1/2" not in again.err  # Nothing is simulated again.
    assert '"p95_s"' in again.out
    assert main([*job, *over, "--json"]) == 0
    assert capsys.readouterr().err == ""
    # Shares of the rows: of two, one each, and a third has none to do.
    for shard, rows in (("2/2", [1]), ("3/3", [])):
        apart = [*job[:-1], str(tmp_path / shard[0]), *over, "--shard", shard, "--json"]
        assert [row["row"] for row in answered(apart)["rows"]] == rows
    (tmp_path / "file").write_text("kept")
    assert "is not a folder; give the name of one" in refused(
        [*job[:-1], str(tmp_path / "file"), *over]
    )
    assert (tmp_path / "file").read_text() == "kept"
    assert "another sweep" in refused([*job, "--over", "kernels.gemm.sigma=0.3,0.4"])
    assert main([*job, "--over", "layout.dp=1:2"]) == 2
    assert main([*job, *over, *over]) == 2
    assert main([*job, "--over", "layout.nope=1"]) == 2


def test_a_sweep_of_many_rows_says_first_how_long_it_will_take(monkeypatch, refused, capsys):
    """By a clock that ticks once for reading the first row, and ten times for simulating it."""
    clock, read, job = [0], [], load_job("megatron-22b-a100-8")

    class Law:
        interrupted = False

    def simulate(*options, **more):
        clock[0] += 10
        return Law()

    def loaded(*options):
        read.append(clock[0])
        clock[0] += 1
        return job

    def reached(*options, **more):
        raise ValueError("all rows were read")

    monkeypatch.setattr("prism_jax.cli._compare.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("prism_jax.engine.simulate", simulate)
    monkeypatch.setattr("prism_jax.program.compile_job", lambda job: job)
    monkeypatch.setattr("prism_jax.data.load_job", loaded)
    monkeypatch.setattr("prism_jax.analysis.sweep_points", reached)
    words = ["sweep", "megatron-22b-a100-8", "--samples", "100"]
    assert main([*words, "--over", "kernels.gemm.sigma=0.01:0.2:150"]) == 2
    told, _, after = capsys.readouterr().err.partition("\n")
    assert "150 rows of 100 steps take about 28 minutes" in told  # 150 times 1 and 10 seconds.
    assert read[:2] == [0, 21]  # Before any other row is read.
    assert len(read) == 151
    assert "all rows were read" in after
    assert "take about" not in refused([*words, "--over", "kernels.gemm.sigma=0.01,0.02"])
