"""Input that once got through, or was refused in many words: each test is named after its fault."""

import contextlib
import importlib
import json
import os
import pkgutil
import subprocess
import sys
import threading
import time

import jax
import numpy as np
import polars as pl
import pytest

import prism_jax as prism
import prism_jax.cli
from prism_jax.data import Layout, Outline, ScheduleConfig, Variation
from prism_jax.profile._profile import Fitted, WorkerMean
from prism_jax.schedule import OneFOneB
from prism_jax.trace import read_factors, read_step_times

from .helpers import by_hand, lognormal, made_law, pipeline_program, refusal


_JOB = "megatron-22b-a100-8"
_TOML = "kind = 'job'\n[layout]\ntp = 2\n[schedule]\nkind = '1f1b'\nnum_microbatches = 4\n"


def _archive(path) -> tuple[dict, dict]:
    with np.load(path) as archive:
        arrays = dict(archive)
    return json.loads(str(arrays.pop("about"))), arrays


def _profile(folder, laws=()):
    means = [WorkerMean(f"{kind}-compute", 0, 0, 0.1) for kind in ("forward", "backward")]
    layout, schedule = Layout(), ScheduleConfig("1f1b", 2)
    profile = prism.Profile("p", layout, schedule, Outline(), (*means,), laws, Fitted(3))
    prism.save_profile(profile, folder)
    return by_hand(folder)


# What is written of the errors of a law besides arrays.
_ERRORS = dict.fromkeys(("mean", "std", "mean_skewness", "std_skewness"), 0.1)
_ERRORS |= {"mean_degrees": 40.0, "std_degrees": 40.0, "support": 500.0}


@pytest.mark.parametrize(
    "change",
    [
        {"std": 1e200},
        {"std": 50.0},
        {"keys": [[-1, 0]]},
        {"keys": [[2**40, 0]]},
        {"keys": [["a", "b"]]},
        {"allocations": {"means": [1e200, 1e200], "std": 0.0}},
        {"allocations": {"means": [], "std": 0.0}},
        {"errors": {**_ERRORS, "mean_degrees": "inf"}},
        {"errors": {**_ERRORS, "std_degrees": -1.0}},
        {"more": 1},
        {"counts": "negative"},
        {"counts": "overflow"},
        {"counts": "none"},
        {"times": "f2"},
        {"times": "swapped"},
        {"levels": "huge"},
    ],
)
def test_a_damaged_law_is_refused(change, tmp_path):
    path = tmp_path / "law.npz"
    prism.save_law(made_law(), path)
    assert prism.load_law(path) == made_law()
    about, arrays = _archive(path)
    assert about["errors"].keys() == _ERRORS.keys()
    (name, value), *_ = change.items()
    if name in arrays:
        old = arrays[name]
        arrays[name] = {
            "negative": old + np.pad([-1, 1], (0, len(old) - 2)),
            "overflow": np.where(np.arange(len(old)) < 4, 2**62, 0) + old,
            "none": 0 * old,
            "f2": old.astype("f2"),
            "swapped": old[::-1],
            "huge": old + 1e200,
        }[value]
        change = {}
    np.savez(path, **arrays, about=np.array(json.dumps({**about, **change})))
    refusal(lambda: prism.load_law(path), "is not a law that this version saved")


def test_a_damaged_program_is_refused(tmp_path):
    """Also one in which the same numbers are of another kind."""
    path = tmp_path / "program.npz"
    program = pipeline_program(
        OneFOneB(2, 2), variability=prism.Variability(residual={"gemm": lognormal(0.1)})
    )
    prism.save_program(program, path)
    about, arrays = _archive(path)
    text = json.dumps(about)
    for old, new in (
        ('{"array": ', '{"numpy": '),
        ('{"numpy": ', '{"array": '),
        ('{"tuple": ', '{"list": '),
    ):
        assert old in text
        np.savez(path, **arrays, about=np.array(text.replace(old, new)))
        refusal(lambda: prism.load_program(path), "is not a program that this version saved")
    np.savez(path, **arrays, about=np.array(json.dumps([about])))
    refusal(lambda: prism.load_program(path), "is not a program that this version saved")


@pytest.mark.parametrize("column", ["Rank", "global_rank", "gpu_id", "hostname", "node name"])
def test_rows_by_a_column_of_another_name_are_not_taken_in_the_order_of_the_file(column, written):
    path = written("factors.csv", f"{column},factor\n1,1.3\n0,1.0\n")
    with pytest.raises(ValueError, match=rf"{column}.*; call that column `gpu`, `rank` or `node`"):
        read_factors(path)
    path.write_text("gpu_tflops,seconds\n500,1.3\n650,1.0\n")  # What is measured names no row.
    assert read_factors(path, "seconds")[0].tolist() == [1.3, 1.0]


def test_columns_of_another_type(tmp_path):
    path = tmp_path / "table.parquet"
    for kind in (pl.lit([1, 2]), pl.struct(a=1), pl.lit(2**63, pl.UInt64), pl.lit(b"x")):
        pl.DataFrame({"factor": [1.0, 1.1]}).with_columns(gpu=kind).write_parquet(path)
        refusal(lambda: read_factors(path), "table.parquet")
        frame = pl.DataFrame({"step_time_s": [1.0, 1.1]}).with_columns(step=kind, run=kind)
        frame.write_parquet(path)
        refusal(lambda: read_step_times(path), "table.parquet")


def test_a_field_that_is_larger_than_the_limit_of_csv(tmp_path):
    folder = _profile(tmp_path / "profile")
    (folder / "means.csv").write_text(f"kind,dp_rank,stage,mean_s\n{'x' * 200_000},0,0,1\n")
    refusal(lambda: prism.load_profile(folder), "means.csv, line 2: ... field limit")


@pytest.mark.parametrize("digits", [20, 468, 5000])
@pytest.mark.parametrize("key", ["kernels.rank.sigma", "layout.dp", "model.num_layers"])
def test_a_number_of_many_digits(key, digits, refused, written):
    said = refused(["simulate", _JOB, "--set", f"{key}={'9' * digits}"])
    assert "more than 64 bits" in said
    path = written("job.toml", _TOML.replace("= 4", f"= {'9' * digits}"))
    assert "more than 64 bits" in refused(["simulate", path])
    refused(["simulate", _JOB, "--samples", "9" * digits])


@pytest.mark.parametrize("name", ["a[b].csv", "a*.csv", "a?.csv"])
def test_no_character_of_a_name_stands_for_others(name, tmp_path):
    (tmp_path / "ab.csv").write_text("step_time_s\n1\n")
    refusal(lambda: read_step_times(tmp_path / name), "no such file")
    (tmp_path / name).write_text("step_time_s\n2\n")
    assert read_step_times(tmp_path / name).tolist() == [2]
    pl.DataFrame({"factor": [3.0]}).write_parquet(tmp_path / f"{name}.parquet")
    assert read_factors(tmp_path / f"{name}.parquet")[0].tolist() == [3]
    folder = tmp_path / name.removesuffix(".csv")
    options = {"num_samples": 100, "key": jax.random.key(0), "out": folder}
    program = pipeline_program(OneFOneB(1, 1))
    values = {"latencies.mean": [1.0, 2.0]}
    found = prism.sweep(program, values, **options)
    assert prism.sweep(program, values, **options).equals(found)


def test_errors_cut_long_quotations(tmp_path, refused):
    much = "x" * 10_000_000
    for words in (
        ["simulate", much],
        ["simulate", f"{much}.toml"],
        [much],
        ["simulate", _JOB, much],
        ["simulate", _JOB, "--samples", much],
        ["simulate", _JOB, "--sampling", much],
        ["simulate", _JOB, "--set", much],
        ["simulate", _JOB, "--set", f"layout.dp={much}"],
        ["simulate", _JOB, "--set", f"layout.{much}=3"],
        ["simulate", _JOB, "--set", f"kernels.{much}.sigma=3"],
        ["simulate", _JOB, "--set", f"kernels.rank.sigma={much}"],
        ["simulate", _JOB, "--set", f"model={much}"],
        ["target", _JOB, "--part", "rank", "--at", much],
        ["target", _JOB, "--part", "rank", "--at", "1", "--objective", much],
        ["criticality", _JOB, "--band", much],
        ["whatif", _JOB, "--slow-rank", much],
        ["whatif", _JOB, "--link", f"{much}:2"],
        ["sweep", _JOB, "--over", much],
        ["sweep", _JOB, "--over", f"layout.dp={much}"],
        ["place", _JOB, "--factors", f"{much}.csv"],
        ["score", _JOB, "--against", much],
    ):
        assert "xxx" in refused(words)
    path = tmp_path / "job.toml"
    for text in (
        f"name = '{much[: 10**6]}'",
        f"{much[: 10**6]} = 1",
        f"world_size = '{much[: 10**6]}'",
    ):
        path.write_text(f"{text}\n{_TOML}")
        refused(["simulate", path])
    (tmp_path / "factors.csv").write_text(f"factor,{much}\n{much},1\n")
    refused(["place", _JOB, "--factors", tmp_path / "factors.csv"])


@pytest.mark.parametrize("suffix", [".toml", ".csv", ".parquet", ".npz"])
def test_pipes_and_endless_devices(suffix, tmp_path):
    pipe, endless = tmp_path / f"pipe{suffix}", tmp_path / f"endless{suffix}"
    os.mkfifo(pipe)
    endless.symlink_to("/dev/zero")
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "means.csv").symlink_to("/dev/zero")
    loads = {
        ".toml": [prism.load_job, prism.load_cluster],
        ".npz": [prism.load_law, prism.load_program],
    }
    for load in loads.get(suffix, [read_step_times, read_factors]):
        for path in (pipe, endless):
            with pytest.raises(ValueError, match="a pipe or a device; give a file"):
                load(path)


def test_a_file_that_is_too_large(written):
    path = written("job.toml", _TOML)
    os.truncate(path, 2**40)  # It takes no room.
    refusal(lambda: prism.load_job(path), "larger than the 2 MiB")


def test_a_deeply_nested_key(tmp_path, refused):
    path, deep = tmp_path / "job.toml", ".".join("a" * 30_000)
    for text in (f"{deep} = 1", f"[{deep}]", f"a = {{ {deep} = 1 }}", '"b" .' * 40 + "c = 1"):
        path.write_text(f"{_TOML}\n{text}\n")
        refusal(lambda: prism.load_job(path), "more than 12 parts")
    refused(["simulate", _JOB, "--set", f"layout.dp={{{deep} = 1}}"])
    refused(["simulate", _JOB, "--set", f"{deep}=1"])


def test_a_profile_of_too_many_microbatches(tmp_path):
    folder = _profile(tmp_path / "profile")
    path, text = folder / "profile.toml", (folder / "profile.toml").read_text()
    for old, new in (
        ("num_microbatches = 2", "num_microbatches = 1000000000"),
        ("dp = 1", "dp = 1000000000"),
        ("pp = 1", "pp = 1000000000"),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        refusal(lambda: prism.load_profile(folder), "blocks that fit")


def test_a_trace_of_a_job_of_many_more_ops(tmp_path):
    path = tmp_path / "trace.csv"
    rows = [f"0,0,{s},{k}-compute,0,{s},0.1" for s in range(9) for k in ("forward", "backward")]
    header = "dp_rank,stage,step,optype,seq_id,start_ts,duration"
    path.write_text("\n".join([header, *rows]) + "\n")
    (tmp_path / "job.toml").write_text(_TOML.replace("tp = 2", "dp = 1000000000"))
    job = prism.load_job(tmp_path / "job.toml")
    refusal(lambda: prism.read_trace(path, job), "check that the job is the traced one")


def test_a_grid_of_a_million_points_is_refused_in_time(refused, monkeypatch):
    from prism_jax import data

    monkeypatch.setattr(data, "load_job", lambda *_: pytest.fail("a point was loaded"))
    sides = ["--over", "layout.dp=1:1000:1000", "--over", "kernels.gemm.sigma=0:1:1000"]
    start = time.monotonic()
    assert "1,000,000 combinations" in refused(["sweep", _JOB, *sides])
    many = ",".join(map(str, range(10**6)))
    assert "1,000,000 values" in refused(["sweep", _JOB, "--over", f"layout.dp={many}"])
    assert time.monotonic() - start < 5


def test_a_locale_without_unicode(tmp_path):
    """Files are in UTF-8 wherever they are written."""
    script = (
        "import sys; from prism_jax.data import load_job, save_job;"
        "job = load_job(sys.argv[1], ['name=\\u2603']); save_job(job, sys.argv[2]);"
        "assert load_job(sys.argv[2]).name == '\\u2603'"
    )
    locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    words = [sys.executable, "-c", script, _JOB, str(tmp_path / "job.toml")]
    subprocess.run(words, env={**os.environ, **locale}, check=True, timeout=120)


def test_a_mean_that_is_there_twice(tmp_path):
    path = _profile(tmp_path / "p") / "means.csv"
    rows = path.read_text()
    path.write_text(rows + rows.splitlines()[1].replace("0.1", "0.2") + "\n")
    refusal(lambda: prism.load_profile(path.parent), "line 4: ... stage 0 has two rows; keep one")


@pytest.mark.parametrize(
    "words",
    [
        *(
            [name, _JOB, *more, "--out", f"{folder}/out.{suffix}"]
            for folder in ("/proc", "/dev/null", "no/such/folder")
            for name, suffix, *more in (
                ("simulate", "npz"),
                ("timeline", "json"),
                ("report", "html"),
                ("place", "csv"),
            )
        ),
        *(
            [*words, "--out", f"{folder}/out"]
            for folder in ("/proc", "/dev/null")
            for words in (["sweep", _JOB, "--over", "layout.dp=1"], ["fit", "a.csv", "--job", _JOB])
        ),
        ["import", "a", "--gpus", "8", "--out", "/proc/a.toml"],
    ],
)
def test_places_that_take_no_files_before_anything_is_computed(words, refused, monkeypatch):
    if any(word.startswith("/") and not os.path.exists(word.rsplit("/", 1)[0]) for word in words):
        pytest.skip("this system has no such place")
    for module in pkgutil.iter_modules(prism_jax.cli.__path__, "prism_jax.cli."):
        importlib.import_module(module.name)  # Before what it imports is replaced.
    for name in ("cli._load.compiled", "cli._load.load", "data.load_job", "analysis.sweep_points"):
        monkeypatch.setattr(f"prism_jax.{name}", lambda *_: pytest.fail("something was computed"))
    assert "written" in refused(words)


def test_a_slash_after_the_name_of_a_file(tmp_path, refused):
    (tmp_path / "job.toml").write_text(_TOML)
    (tmp_path / "steps.csv").write_text("step_time_s\n1\n")
    refused(["simulate", f"{tmp_path}/job.toml/"])
    refused(["score", _JOB, "--against", f"{tmp_path}/steps.csv/"])
    steps = ["--to", f"{tmp_path}/steps.csv"]
    said = refused(["calibrate", _JOB, *steps, "--out", f"{tmp_path}/new.toml/"])
    assert "must be a .toml file" in said


def test_two_sweeps_in_one_folder_at_once(tmp_path):
    from prism_jax._files import written_whole
    from prism_jax.analysis import open_parts

    def write(meanwhile):
        """A row that takes long to write."""
        with written_whole(path) as partial:
            partial.write_text("row")
            meanwhile()

    path = tmp_path / "part-000000.parquet"
    write(lambda: write(lambda: None))
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    # Of two that begin at once, the first has the folder.
    folder, found = tmp_path / "sweep", []
    barrier = threading.Barrier(8)

    def begin(digest):
        barrier.wait()
        with contextlib.suppress(ValueError):  # It is the other's.
            found.append((open_parts(folder, digest), digest))

    threads = [threading.Thread(target=begin, args=(f"digest {i % 2}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len({digest for _, digest in found}) == 1
    assert [file.name for file in folder.iterdir()] == ["sweep.json"]


_BY_SCRIPT = "from prism_jax.cli import main; sys.exit(main())"
_BY_MODULE = "import runpy; runpy.run_module('prism_jax', run_name='__main__')"


@pytest.mark.parametrize(
    ("module", "start"),
    [
        ("numpy", _BY_SCRIPT),
        ("prism_jax.data", _BY_MODULE),
        ("jax", _BY_MODULE),
        ("prism_jax.engine", _BY_SCRIPT),
    ],
)
def test_an_interrupt_while_importing(module, start):
    """As the command is started by its script, and by `python -m`."""
    script = (
        "import sys, signal\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name == {module!r}: signal.raise_signal(signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)  # It may be ignored here.\n"
        f"sys.argv = ['prism-jax', 'simulate', {_JOB!r}, '--samples', '10', '--no-cache']\n"
        f"{start}\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    # The second where the machine is so slow that the command is not waited for.
    sentences = ("interrupted before the first result.", "interrupted.")
    assert run.stderr in [f"prism-jax: {sentence}\n" for sentence in sentences]
    assert run.stdout == ""
    assert run.returncode == 130


_WORK = """
import os, signal, sys, time
from prism_jax import _interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)  # It may be ignored here.

def ctrl_c():
    signal.raise_signal(signal.SIGINT)
    time.sleep(0.3)  # Until the main thread has seen it.

def work():
{}

_interrupt.run_command(work)
"""
_FOUND = """
    try:
        with _interrupt.interruptible() as interrupt:
            ctrl_c()
            interrupt.check()
    except KeyboardInterrupt:
        return 7
"""


@pytest.mark.parametrize(
    ("work", "status", "told"),
    [
        ("    return 3", 3, ""),
        ("    sys.exit(4)", 4, ""),
        ("    ctrl_c(); return 0", 130, "prism-jax: interrupted when all was done.\n"),
        ("    ctrl_c(); return 2", 2, ""),
        (_FOUND, 7, ""),
        # What does not look for it ends after a while, also where no line would be seen.
        (
            "    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)\n"
            "    _interrupt._PATIENCE = 0.1; ctrl_c(); time.sleep(9)",
            130,
            "prism-jax: interrupted.\n",
        ),
        ("    ctrl_c(); ctrl_c(); time.sleep(9)", 130, "prism-jax: interrupted.\n"),
    ],
)
def test_a_command_and_ctrl_c(work, status, told):
    began = time.monotonic()
    command = [sys.executable, "-c", _WORK.format(work)]
    run = subprocess.run(command, capture_output=True, text=True)
    assert (run.returncode, run.stdout, run.stderr) == (status, "", told)
    assert time.monotonic() - began < 8


def test_a_wrong_family_of_a_profile_is_refused_on_reading(tmp_path):
    laws = [
        Variation("forward-compute", "residual", "lognormal", {"sigma": 0.1}, "x"),
        Variation("backward-compute", "residual", "lognormal", {"sigma": 0.1}, "x"),
    ]
    path = _profile(tmp_path / "profile", tuple(laws)) / "variability.csv"
    prism.load_profile(path.parent)
    text = path.read_text()
    for old, new, what in (
        ("lognormal,sigma=0.1,x\nbackward", "lognormel,sigma=0.1,x\nbackward", "lognormel"),
        ("sigma=0.1,x\nbackward", "sigmo=0.1,x\nbackward", "sigmo"),
    ):
        path.write_text(text.replace(old, new))
        words = f"variability.csv, line 2: ... `{what}` ... did you mean"
        refusal(lambda: prism.load_profile(path.parent), words)
    # Lines are those of the file, of which some are empty.
    path.write_text(text.replace("\n", "\n\n").replace("lognormal", "lognormel"))
    refusal(lambda: prism.load_profile(path.parent), "variability.csv, line 3: ")
