import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from prism_jax.cli import main
from prism_jax.cli._main import _status
from prism_jax.cli._values import objective, quantiles
from prism_jax.data import load_job


_TOML = """
kind = "job"
model = "megatron-22b"
cluster = "dgx-a100"
num_nodes = 1
[layout]
tp = 8
[schedule]
kind = "1f1b"
num_microbatches = 2
[training]
microbatch_size = 4
sequence_length = 2048
"""


@pytest.fixture
def job(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text(_TOML)
    return str(path)


def _error(arguments, capsys) -> str:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["simulate", "gpt3-175b-h100-4069"], "did you mean `gpt3-175b-h100-4096`"),
        (["simulate", "JOB", "--samples", "0"], "`0` must be a whole number of at least 1"),
        (["simulate", "JOB", "--samples", "-5"], "-5"),
        (["simulate", "JOB", "--samples=-5"], "`-5` must be a whole number of at least 1"),
        (["simulate", "JOB", "--samples", "nan"], "`nan` must be a whole number of at least 1"),
        (["simulate", "JOB", "--samples", "1.5"], "`1.5` must be a whole number of at least 1"),
        (["whatif", "JOB", "--samples", "31"], "`31` must be a whole number of at least 32"),
        (["simulate", "JOB", "--seed", "x"], "`x` must be a whole number"),
        (["simulate", "JOB", "--set", "layout.dq=4"], "did you mean `.*dp`"),
        (["simulate", "JOB", "--set", "layout.dp"], "layout.dp"),
        (["simulate", "JOB", "--set", "layout.dp=x"], "layout.dp"),
        (["simulate", "JOB", "--set", "layout.tp=7"], "does not divide"),
        (["simulate", "JOB", "--set", "layout.tp=1", "--set", "layout.pp=5"], "do not divide"),
        (["simulate", "JOB", "--set", "layout.dp=2"], "16"),
        (["simulate", "JOB", "--samples", "8k"], "`8k` must be a whole number .* such as 8192"),
        (["simulate", "JOB", "--set", "layout.dp=8k"], "a whole number such as 8192, got"),
        (
            ["simulate", "JOB", "--set", "layout.dp=1", "--set", "layout.dp=2"],
            "`layout.dp` is given twice",
        ),
        (["simulate", "JOB", "--quantiles", "q95"], "0.999, or a percentage, such as p99.9"),
        (["hardware", "dgx-h10"], "did you mean `dgx-h100`"),
        (["simulate", "JOB", "--set", "layout.dp=" + "[" * 3000], "layout.dp"),
        (["simulate", "JOB", "--set", "schedule.num_microbatches=100000000"], "microbatches"),
        (["simulate", "x" * 300], "too long|No job"),
        (["simulate", "JOB", "--set", "kernels.gemm.sigma=1.2"], "skewness"),
        (["simulate", "JOB", "--set", "kernels.gemm.sigma=3"], "`gemm`, .* is 90 times its mean"),
        (["simulate", "JOB", "--set", "kernels.gemm.sigma=1e9"], "gemm has .* over 1e15 times"),
        (["simulate", "JOB", "--set", "kernels.gemm.sigma=inf"], "must be finite"),
        (["simulate", "JOB", "--set", "kernels.gemm.sigma=-0.1"], "sigma"),
        (["simulate", "JOB", "--set", "schedule.kind=2f2b"], "2f2b"),
        (["simulate"], "JOB"),
        (["simulat", "JOB"], "did you mean `simulate`"),
        (["simulate", "JOB", "--sample", "3"], "--sample"),
        ([], "No command"),
    ],
)
def test_bad_input_is_one_sentence(arguments, match, job, capsys):
    import re

    line = _error([job if word == "JOB" else word for word in arguments], capsys)
    assert re.search(match, line), line


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"kind = [", "TOML"),
        (b"\xff\xfe\x00binary", "TOML|UTF-8"),
        (b"{'json': 1}", "TOML"),
        (b"", "kind"),
        (b'kind = "device"\n', "kind"),
        (_TOML.replace("tp = 8", "tp = -8").encode(), "tp"),
        (_TOML.replace("tp = 8", 'tp = "eight"').encode(), "tp"),
        (_TOML.replace("num_microbatches = 2", "").encode(), "num_microbatches"),
        (_TOML.replace("[layout]", "[layuot]").encode(), "layuot"),
    ],
)
def test_bad_files_are_one_sentence(content, match, tmp_path, capsys):
    import re

    path = tmp_path / "broken.toml"
    path.write_bytes(content)
    line = _error(["simulate", str(path)], capsys)
    assert "broken.toml" in line
    assert re.search(match, line), line


def test_missing_files_and_folders_are_one_sentence(tmp_path, capsys):
    assert "nowhere.toml" in _error(["simulate", str(tmp_path / "nowhere.toml")], capsys)
    _error(["simulate", str(tmp_path)], capsys)


def test_json_of_simulate_has_intervals_and_quantiles(job, capsys):
    assert main(["simulate", job, "--samples", "4000", "--seed", "3", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    step_time = found["step_time_s"]
    for name in ("mean", "std", "p5", "p50", "p95", "p99"):
        low, high = step_time[f"{name}_interval"]
        assert low <= step_time[name] <= high
    quantiles = step_time["quantiles"]
    assert [q for q, _ in quantiles] == [i / 200 for i in range(1, 200)]
    assert [s for _, s in quantiles] == sorted(s for _, s in quantiles)
    assert quantiles[99][1] == step_time["p50"]
    assert found["num_samples"] == 4000
    assert found["compile_s"] > 0
    assert found["samples_per_s"] > 0
    assert "measured" not in found


@pytest.mark.slow
def test_uneven_stages_with_an_empty_one(job, capsys):
    options = ["layout.tp=2", "layout.pp=4", "schedule.layers_per_stage=[20, 0, 20, 8]"]
    arguments = [word for option in options for word in ("--set", option)]
    assert main(["simulate", job, "--samples", "500", "--json", "--allow-oom", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["step_time_s"]["mean"] > 0


def test_overrides_change_the_prediction(job, capsys):
    means = []
    for microbatches in (2, 4):
        override = f"schedule.num_microbatches={microbatches}"
        assert main(["simulate", job, "--samples", "500", "--set", override, "--json"]) == 0
        means.append(json.loads(capsys.readouterr().out)["step_time_s"]["mean"])
    assert 1.8 < means[1] / means[0] < 2.1


@pytest.mark.parametrize(
    "name",
    ["megatron-22b-a100-8", pytest.param("megatron-175b-a100-64", marks=pytest.mark.slow)],
)
def test_shipped_jobs_are_within_ten_per_cent_of_measured(name, capsys):
    assert main(["simulate", name, "--samples", "2000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert abs(found["relative_error"]["mean"]) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt3-175b-h100-4096", "gpt3-175b-h100-768"])
def test_large_shipped_jobs_are_within_ten_per_cent_of_measured(name, capsys):
    assert main(["simulate", name, "--samples", "4000", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for figure in ("mean", "p50", "p95"):
        assert abs(found["relative_error"][figure]) < 0.1


def test_quantiles_are_shares_or_percentages():
    assert quantiles("p95, 0.999") == {"p95": 0.95, "p99.9": 0.999}


def test_one_cluster_is_shown_with_its_device(capsys):
    assert main(["hardware", "dgx-h100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [[one["name"] for one in found[key]] for key in ("devices", "clusters")] == [
        ["h100-sxm"],
        ["dgx-h100"],
    ]


def test_errors_name_missing_keys(job, tmp_path, capsys):
    text = pathlib.Path(job).read_text().replace('cluster = "dgx-a100"\nnum_nodes = 1\n', "")
    (tmp_path / "bare.toml").write_text(text)
    error = _error(["predict", str(tmp_path / "bare.toml")], capsys)
    assert "the key `cluster` is missing in the job `bare`" in error
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_si')
    words = [
        "import",
        str(tmp_path / "config.json"),
        "--gpus",
        "8",
        "--out",
        str(tmp_path / "x.toml"),
    ]
    assert "the JSON ends early" in _error(words, capsys)
    (tmp_path / "rank0.json").write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts":')
    words = ["trace", str(tmp_path / "rank0.json"), "--format", "kineto"]
    assert "it ends early, before its first event" in _error(words, capsys)


@pytest.mark.parametrize("command", ["jobs", "hardware", "kernels"])
def test_catalogues_have_sources(command, capsys):
    assert main([command]) == 0
    assert len(capsys.readouterr().out.splitlines()) > 3
    assert main([command, "--json"]) == 0
    found = capsys.readouterr().out
    assert "source" in found or "licence" in found


def test_machines_are_listed_by_groups_on_two_screens(capsys):
    assert main(["hardware"]) == 0
    text = capsys.readouterr().out
    assert len(text.splitlines()) <= 80
    groups = ["NVIDIA", "NVIDIA RTX", "AMD", "TPU"]
    devices, clusters = text.split("\n\n")
    of_tables = (devices, "device", groups), (clusters, "cluster", ["cloud", *groups])
    for table, header, expected in of_tables:
        width = table.index(header)
        cells = [(line[:width].strip(), line[width:].split()[0]) for line in table.splitlines()[1:]]
        assert [group for group, _ in cells if group] == expected
        # All of a group stand together.
        of_amd = [group for group, name in cells if name.startswith("mi")]
        assert of_amd == ["AMD", "", "", "", ""]


def test_the_command_itself_and_a_clean_exit(tmp_path):
    command = pathlib.Path(sys.executable).with_name("prism-jax")
    run = subprocess.run([command, "simulate", "nothing"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    run = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "simulate" in run.stdout


def test_the_variability_of_kernels_has_sources(capsys):
    assert main(["kernels", "--variability", "--json"]) == 0
    profiles = json.loads(capsys.readouterr().out)["variability"]
    assert {"h100-sxm", "dgx-h100"} <= set(profiles)
    assert all(law["source"] for laws in profiles.values() for law in laws)
    assert main(["kernels", "--variability"]) == 0
    text = capsys.readouterr().out
    assert "[1]" in text
    assert "h100-sxm" in text


def test_progress_is_told_where_somebody_looks(job, capsys, monkeypatch):
    words = ["simulate", job, "--samples", "1000"]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for more, told in (([], True), (["--json"], False), (["--json", "--progress"], True)):
        assert main([*words, *more]) == 0
        error = capsys.readouterr().err
        assert ("compiling" in error) == ("simulating 1,000 steps" in error) == told


@pytest.mark.slow
def test_compiled_code_is_kept_for_the_next_process(tmp_path):
    """The second run compiles nothing; none is kept where the user says so."""
    words = ["simulate", "megatron-22b-a100-8", "--samples", "100", "--json"]
    command = [sys.executable, "-m", "prism_jax", *words]

    def run(*more, folder=tmp_path):
        environment = {**os.environ, "PRISM_JAX_CACHE": str(folder)}
        done = subprocess.run([*command, *more], capture_output=True, text=True, env=environment)
        assert (done.returncode, done.stderr) == (0, "")
        return json.loads(done.stdout)["step_time_s"]

    def kept():
        return {path.name for path in tmp_path.rglob("*-cache")}

    run("--no-cache")
    assert not kept()
    first, names = run(), kept()
    assert len(names) >= 3
    assert run() == first
    assert kept() == names


def test_a_device_without_a_table_says_so(job, tmp_path, capsys):
    """It took the H100's in silence."""
    words = ["simulate", job, "--samples", "100", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "note" not in captured.err
    assert json.loads(captured.out)["notes"] == []
    gpu = tmp_path / "gpu.toml"
    gpu.write_text(
        'kind = "device"\nmemory_bytes = 8e10\nmemory_bandwidth_bytes_per_s = 1e12\n'
        "peak_flop_per_s = { bf16 = 1e14 }\n"
    )
    assert main([*words, "--set", f"cluster.device={gpu}"]) == 0
    captured = capsys.readouterr()
    (line,) = [line for line in captured.err.splitlines() if "note" in line]
    assert line.startswith("prism-jax: note: the device `gpu` has no table of kernels of its own")
    assert "the table of `h100-sxm` is used" in line
    found = json.loads(captured.out)
    assert found["notes"] == [line.removeprefix("prism-jax: note: ")]
    assert [k["stands_in_for"] for k in found["kernels"]] == ["device `gpu`", ""]


@pytest.mark.parametrize("name", ["p", "cvar"])
def test_levels_of_objectives_are_percentages(name):
    assert objective(f"{name}99.9").q == pytest.approx(0.999)
    assert objective(f"{name}1").q == pytest.approx(0.01)
    for level, meant in ((".95", "95"), ("0.999", "99.9"), ("0.5", "50"), ("0.01", "1")):
        with pytest.raises(ValueError, match=rf"did you mean {name}{re.escape(meant)}\?$"):
            objective(f"{name}{level}")
    for level in ("0", "100", "0.001"):
        with pytest.raises(ValueError, match=r"at least 1 and below 100, as p95 or cvar99.9\.$"):
            objective(f"{name}{level}")


def test_what_goes_on_for_long_says_so_unless_a_bar_does(monkeypatch, capsys):
    from prism_jax import _progress

    clock, bars = [0.0], contextlib.ExitStack()
    monkeypatch.setattr("prism_jax._progress.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(_progress, "_began", 0.0)

    def wait(seconds):
        clock[0] += seconds
        if clock[0] == 20:
            bars.enter_context(_progress.said_how_far(None, False))
        if clock[0] == 40:
            bars.close()
        return clock[0] > 50

    _progress.say_doing("compiling", False)
    _progress._say_it_works(wait)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"prism-jax: {n} s: compiling" for n in (10, 40, 50)]


def test_where_nobody_sees_a_bar_lines_say_how_far_the_work_is(monkeypatch, capsys):
    from prism_jax import _progress

    monkeypatch.setattr(_progress, "EVERY", 1e-3)
    with _progress.said_to_work("`sensitivity`", True):
        with _progress.progress_bar(14, False, "gains", "program") as advance:
            advance(3)
            with _progress.progress_bar(100, False, "steps", "sample") as within:
                within(1)
                _until(capsys, ": gains: 3 of 14 programs\n")
        with _progress.progress_bar(None, False, "search", "spread") as advance:
            advance(2)
            _until(capsys, ": search: 2 spreads\n")
        _until(capsys, ": `sensitivity` goes on\n")
        with _progress.progress_bar(1, False, "search", "batch") as advance:
            advance(1)
            _until(capsys, ": search: 1 of 1 batch\n")
    assert not _progress._by_lines


@pytest.mark.parametrize("in_command", [True, False])
def test_without_tqdm_lines_take_the_place_of_a_bar(in_command, monkeypatch, capsys):
    """On a terminal; in a command, and in Python."""
    from prism_jax import _progress

    monkeypatch.setattr(_progress, "EVERY", 1e-3)
    monkeypatch.setattr(_progress, "on_terminal", lambda: True)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    within = _progress.said_to_work("`run`", in_command)
    with within, _progress.progress_bar(14, True, "gains", "program") as advance:
        advance(3)
        _until(capsys, ": gains: 3 of 14 programs\n")
    assert _progress._began is None


def _until(capsys, ending):
    """Waits until this is what lines say."""
    for _ in range(10_000):
        if (lines := capsys.readouterr().err).endswith(ending):
            return
        time.sleep(1e-3)
    raise AssertionError(lines)


def test_a_process_or_a_terminal_is_told_that_a_command_goes_on(monkeypatch, capsys):
    asked = []

    def said(what, show):
        asked.append((what, show))
        return contextlib.nullcontext()

    monkeypatch.setattr("prism_jax.cli._main.said_to_work", said)
    assert main(["jobs"]) == main(["jobs", "--json"]) == 0
    assert _status(["jobs", "--no-cache"], keep=True) == 0
    monkeypatch.setattr("prism_jax.cli._main.on_terminal", lambda: True)
    assert main(["jobs"]) == main(["jobs", "--json"]) == 0
    assert asked == [("`jobs`", show) for show in (False, False, True, True, False)]


def test_one_gpu_is_one(capsys):
    assert main(["predict", "dit-xl-2-a100-8", "--gpus", "1"]) == 0
    assert "DiT-XL/2, 1 x A100 80GB SXM (1 node): 32 samples" in capsys.readouterr().out
    header, *lines = str(load_job("dit-xl-2-a100-8", ["world_size=1"])).splitlines()
    assert header == "DiT-XL/2, 1 x A100 80GB SXM (1 node)"
    names = [line.split()[0] for line in lines[:5]]
    assert names == ["job", "layout", "model", "cluster", "training"]
