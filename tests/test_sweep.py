"""Sweeps: the rows, the files, and going on after a kill."""

import errno
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from prism_jax import Variability, load_job, simulate, sweep
from prism_jax.analysis import open_parts, write_part
from prism_jax.cli import main
from prism_jax.cli._values import values
from prism_jax.schedule import OneFOneB

from .helpers import lognormal, pipeline_program


_NAME = "variability.residual.gemm.sigma"


def _program():
    variability = Variability(residual={"gemm": lognormal(0.05), "send_recv": lognormal(0.1)})
    return pipeline_program(OneFOneB(2, 3), variability=variability)


def test_each_row_is_the_law_at_its_values():
    program, key = _program(), jax.random.key(1)
    frame = sweep(program, {_NAME: [0.02, 0.1]}, num_samples=3_000, key=key)
    assert list(frame[_NAME]) == [0.02, 0.1]
    for row in frame.to_dicts():
        changed = eqx.tree_at(
            lambda p: p.variability.residual["gemm"].sigma, program, jnp.asarray(row[_NAME])
        )
        law = simulate(changed, num_samples=3_000, key=key)
        assert row["mean_s"] == law.mean
        assert row["p95_s"] == law.quantile(0.95)


def test_a_row_that_is_interrupted_between_pools_is_not_taken_for_whole(monkeypatch):
    from prism_jax.engine import _pools, _simulate, law_alone

    def of_the_first_pool(*arguments):
        yield next(_pools.drawn_pools(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(_pools, "_samples", lambda run: 4096)
    monkeypatch.setattr(_simulate, "drawn_pools", of_the_first_pool)
    law = law_alone(_program(), num_samples=16384, key=jax.random.key(1))
    assert (law.num_samples, law.requested, law.interrupted) == (4096, 16384, True)


def test_a_killed_sweep_goes_on_without_repeating_a_row(tmp_path, monkeypatch):
    from prism_jax.analysis import _sweep

    program, key = _program(), jax.random.key(1)
    arguments = {"num_samples": 2_000, "key": key, "out": tmp_path / "out"}
    grid = {_NAME: [0.02, 0.05, 0.1]}
    calls = []

    def dies(changed, **options):
        if len(calls) == 2:
            raise KeyboardInterrupt
        calls.append(changed)
        return simulate(changed, **options)

    monkeypatch.setattr(_sweep, "law_alone", dies)
    with pytest.raises(KeyboardInterrupt):
        sweep(program, grid, **arguments)
    assert len(list((tmp_path / "out").glob("part-*.parquet"))) == 2
    monkeypatch.setattr(_sweep, "law_alone", lambda p, **o: calls.append(p) or simulate(p, **o))
    resumed = sweep(program, grid, **arguments)
    assert len(calls) == 3
    arguments["out"] = None
    assert resumed.equals(sweep(program, grid, **arguments))
    arguments["out"] = tmp_path / "out"
    with pytest.raises(ValueError, match="holds another sweep"):
        sweep(program, {_NAME: [0.3]}, **arguments)
    slower = eqx.tree_at(lambda p: p.latencies.mean, program, 2 * program.latencies.mean)
    with pytest.raises(ValueError, match="holds another sweep"):
        sweep(slower, grid, **arguments)
    monkeypatch.setattr(_sweep, "version", lambda package: "another")
    with pytest.raises(ValueError, match="holds another sweep"):
        sweep(program, grid, **arguments)
    monkeypatch.undo()
    (damaged,) = (tmp_path / "out").glob("part-000001-*.parquet")
    damaged.write_text("no table")
    with pytest.raises(ValueError, match="is damaged or of another sweep; remove it"):
        sweep(program, grid, **arguments)
    (tmp_path / "mine.txt").write_text("something else")
    with pytest.raises(ValueError, match="holds no sweep"):
        sweep(program, grid, **arguments | {"out": tmp_path})


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
        with pytest.raises(ValueError, match="is damaged"):
            open_parts(own, "own")
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


def test_the_command_writes_rows_and_refuses_bad_input(tmp_path, capsys):
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
        assert main(apart) == 0
        assert [row["row"] for row in json.loads(capsys.readouterr().out)["rows"]] == rows
    (tmp_path / "file").write_text("kept")
    assert main([*job[:-1], str(tmp_path / "file"), *over]) == 2
    assert "is not a folder; give the name of one" in capsys.readouterr().err
    assert (tmp_path / "file").read_text() == "kept"
    assert main([*job, "--over", "kernels.gemm.sigma=0.3,0.4"]) == 2
    assert "another sweep" in capsys.readouterr().err
    assert main([*job, "--over", "layout.dp=1:2"]) == 2
    assert main([*job, *over, *over]) == 2
    assert main([*job, "--over", "layout.nope=1"]) == 2


def test_a_sweep_of_many_rows_says_first_how_long_it_will_take(monkeypatch, capsys):
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
    assert main([*words, "--over", "kernels.gemm.sigma=0.01,0.02"]) == 2
    assert "take about" not in capsys.readouterr().err
