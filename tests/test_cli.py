import contextlib
import json
import os
import pathlib
import re
import subprocess
import sys
import time

import pytest

from prism_jax import _progress
from prism_jax.cli import main
from prism_jax.cli._main import _status
from prism_jax.cli._values import objective, quantiles
from prism_jax.data import load_job


_JOB = "megatron-22b-a100-8"


def test_json_of_simulate_has_intervals_and_quantiles(answered):
    job = "examples/one_device.toml"  # Of which no step was measured.
    found = answered(["simulate", job, "--samples", "4000", "--seed", "3", "--json"])
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
def test_uneven_stages_with_an_empty_one(answered):
    options = ["layout.tp=2", "layout.pp=4", "schedule.layers_per_stage=[20, 0, 20, 8]"]
    words = [word for option in options for word in ("--set", option)]
    found = answered(["simulate", _JOB, "--samples", "500", "--json", "--allow-oom", *words])
    assert found["step_time_s"]["mean"] > 0


def test_overrides_change_the_prediction(answered):
    words = ["simulate", _JOB, "--samples", "500", "--json", "--set"]
    steps = [answered([*words, f"schedule.num_microbatches={n}"])["step_time_s"] for n in (2, 4)]
    assert 1.8 < steps[1]["mean"] / steps[0]["mean"] < 2.1


_LARGE = ("megatron-175b-a100-64", "gpt3-175b-h100-4096", "gpt3-175b-h100-768")


@pytest.mark.parametrize(
    "name", [_JOB, *(pytest.param(name, marks=pytest.mark.slow) for name in _LARGE)]
)
def test_shipped_jobs_are_within_ten_per_cent_of_measured(name, answered):
    found = answered(["simulate", name, "--samples", "4000", "--json"])["relative_error"]
    assert "mean" in found
    assert all(abs(found[figure]) < 0.1 for figure in ("mean", "p50", "p95") if figure in found)


def test_quantiles_are_shares_or_percentages():
    assert quantiles("p95, 0.999") == {"p95": 0.95, "p99.9": 0.999}


def test_one_cluster_is_shown_with_its_device(answered):
    found = answered(["hardware", "dgx-h100", "--json"])
    assert [[one["name"] for one in found[key]] for key in ("devices", "clusters")] == [
        ["h100-sxm"],
        ["dgx-h100"],
    ]


@pytest.mark.parametrize("command", ["jobs", "hardware", "kernels"])
def test_catalogues_have_sources(command, answered):
    assert len(answered([command]).splitlines()) > 3
    found = str(answered([command, "--json"]))
    assert "source" in found or "licence" in found


def test_machines_are_listed_by_groups_on_two_screens(answered):
    text = answered(["hardware"])
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


def test_the_command_itself_and_a_clean_exit():
    command = pathlib.Path(sys.executable).with_name("prism-jax")
    run = subprocess.run([command, "simulate", "nothing"], capture_output=True, text=True)
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1
    run = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "simulate" in run.stdout


def test_the_variability_of_kernels_has_sources(answered):
    profiles = answered(["kernels", "--variability", "--json"])["variability"]
    assert {"h100-sxm", "dgx-h100"} <= set(profiles)
    assert all(law["source"] for laws in profiles.values() for law in laws)
    text = answered(["kernels", "--variability"])
    assert "[1]" in text
    assert "h100-sxm" in text


def test_progress_is_told_where_somebody_looks(capsys, monkeypatch):
    words = ["simulate", _JOB, "--samples", "1000"]
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


def test_a_device_without_a_table_says_so(capsys, written):
    """It took the H100's in silence."""
    words = ["simulate", _JOB, "--samples", "100", "--json"]
    assert main(words) == 0
    captured = capsys.readouterr()
    assert "note" not in captured.err
    assert json.loads(captured.out)["notes"] == []
    gpu = written(
        "gpu.toml",
        'kind = "device"\nmemory_bytes = 8e10\nmemory_bandwidth_bytes_per_s = 1e12\n'
        "peak_flop_per_s = { fp16 = 1e14 }\n",
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


def test_a_process_or_a_terminal_is_told_that_a_command_goes_on(monkeypatch):
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


def test_one_gpu_is_one(answered):
    assert "DiT-XL/2, 1 x A100 80GB SXM (1 node): 32 samples" in answered(
        ["predict", "dit-xl-2-a100-8", "--gpus", "1"]
    )
    header, *lines = str(load_job("dit-xl-2-a100-8", ["world_size=1"])).splitlines()
    assert header == "DiT-XL/2, 1 x A100 80GB SXM (1 node)"
    names = [line.split()[0] for line in lines[:5]]
    assert names == ["job", "layout", "model", "cluster", "training"]
