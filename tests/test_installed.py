"""The base installation, without the libraries of extras; and what other packages add by name."""

import os
import re
import subprocess
import sys
import zipfile

import pytest

from .documents import ROOT, blocks


# In a process of its own, without what the extras install: as if it were not there.
_BASE = """
import contextlib, io, sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {
            "google", "matplotlib", "polars", "ray", "shtab", "tqdm", "yaml"
        }:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
import jax
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
from prism_jax.cli import main

def refused(words):
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        status = main(words)
    print(status, told.getvalue().strip())
"""
# A graph, its gradient, a result that is printed, progress without tqdm, and a sweep of a job.
_ROUND = """
import equinox as eqx
ops = [prism.Op(prism.latency.LogNormal(1.0, 0.1), rank=rank) for rank in (0, 1)]
graph = prism.compile_graph([*ops, prism.Op(0.5, after=[0, 1])])
options = {"num_samples": 256, "key": jax.random.key(0)}
print(prism.simulate(graph, progress=True, **options))
print(eqx.filter_grad(prism.estimate)(graph, prism.Mean(), **options))
critical = prism.criticality(program, **options)
print(critical)
for table in (critical.table, lambda: prism.sweep(graph, {"latencies.mean": [1.0]}, **options)):
    try:
        table()
    except ImportError as error:
        print("needs", error)
assert main("sweep examples/job.toml --over layout.dp=2,4 --samples 256".split()) == 0
"""


@pytest.fixture
def compiled(pytestconfig):
    """The folder of what tests have compiled."""
    return pytestconfig.cache.mkdir("compiled")


def _smaller(text):
    return text.replace("10_000", "256").replace("gpt3-175b-h100-4096", "examples/job.toml")


def _run_in_base(script, compiled, folder, site=ROOT):
    """What a script prints, with another folder of installed packages."""
    (folder / "examples").symlink_to(ROOT / "examples")
    words = [sys.executable, "-W", "error", "-c", _BASE + script, str(compiled)]
    environment = {
        **os.environ,
        "PRISM_JAX_CACHE": "off",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{site}",
    }
    run = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_the_base_runs_what_the_readme_prints(compiled, tmp_path):
    codes = [code for code in blocks(ROOT / "README.md") if code.language in ("bash", "python")]
    commands, lines = (code.text for code in codes)
    words = (line.split()[1:] for line in commands.splitlines())
    script = [*(f"assert main({command}) == 0" for command in words), _smaller(lines), _ROUND]
    told = _run_in_base("\n".join(script), compiled, tmp_path)
    assert "a step, without variability" in told
    assert "p95" in told
    assert "Criticality: " in told
    (needs,) = {line for line in told.splitlines() if line.startswith("needs ")}
    assert needs.endswith('polars, which is not installed; run `pip install "prism_jax[tables]"`.')


# Commands that need an extra.
_NEED = {
    "score examples/job.toml --against examples/step_times.csv": "tables",
    "calibrate examples/job.toml --to examples/step_times.csv --out mine.toml": "tables",
    "place examples/job.toml --factors examples/nodes.csv": "tables",
    "place examples/job.toml --out placed.csv": "tables",
    "sweep examples/job.toml --over layout.dp=2,4 --out rows": "tables",
    "fit-kernels kernels.csv --device h100-sxm --out shapes": "tables",
    "trace rank0.et": "traces",
    "trace rank0.xplane.pb": "traces",
    "import model.yaml --out imported.toml": "import",
    "report examples/job.toml --out report.html": "plot",
    "--print-completion bash": "all",
    "sweep examples/job.toml --over layout.dp=2,4 --samples 256 --ray": "ray",
}


def test_a_missing_extra_is_one_sentence(compiled, tmp_path):
    for name, text in (("kernels.csv", "kernel\n"), ("rank0.et", "x"), ("rank0.xplane.pb", "x")):
        (tmp_path / name).write_text(text)
    (tmp_path / "model.yaml").write_text("hidden_size: 8\n")
    script = "\n".join(f"refused({command.split()})" for command in _NEED)
    told = _run_in_base(script, compiled, tmp_path).splitlines()
    for line, (command, extra) in zip(told, _NEED.items(), strict=True):
        advice = rf'which is not installed; run `pip install "prism_jax\[{extra}\]"`\.'
        assert re.fullmatch(f"2 prism-jax: [^;]+, {advice}", line), command


# Entry points that cannot be used.
_BAD = {"broken": "nowhere:X", "number": "math:pi", "twice": "math:pi"}
_SAID = """
2 prism-jax: Job `job`: No schedule `last-in-last-out`; did you mean `last-in-first-out`? .*
2 prism-jax: No command `stagse`; did you mean `stages` .*
[]
True
33.0
0.25 True
gemm 2 2.5e-06
1024 8 2 4
8 stages 2 on each rank
['acme.files', 'acme.step', 'acme.tell']
2 prism-jax: The schedule `broken` of the package `bad` .*No module named 'nowhere'.*
2 prism-jax: The schedule `number` of the package `bad` .*`math:pi` is no `AbstractSchedule`.*
2 prism-jax: .*The schedule `twice` is of `bad` and `worse`; uninstall one of them.
2 prism-jax: The command `broken` of the package `bad` cannot be imported .*
prism-jax: The command `broken` .* usage: .* stages print how many stages the pipeline of a job has
"""
_PLUGIN = """
import json

def printed(words):
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(words.split()) == 0, words
    return told.getvalue()

def result(words):
    return json.loads(printed(f"{words} --json"))

def imported():
    return sorted({name for name in sys.modules if name.startswith("acme.")})

job = "predict examples/job.toml --set schedule.virtual_stages=1 --set schedule.kind="
result(job + "1f1b")
refused((job + "last-in-last-out").split())
refused(["stagse", "examples/job.toml"])
print(imported())
result(job + "LastInFirstOut")
own, plain = (result(f"predict {name}.toml")["step_time_s"] for name in ("own", "plain"))
print(own == plain)

import numpy as np
import prism_jax as prism
lifo = prism.schedule.make_schedule("last_in_first_out", num_ranks=4, num_microbatches=8)
costs = np.ones((4, 8))
print(prism.evaluate(lifo, forward=costs, backward=2 * costs).makespan)
law = prism.latency.make_latency("uniform", {"cv": 0.5})
print(float(law.variance()), "uniform" in prism.latency.families())
(kernel,) = result("trace rank0.spans")["kernels"]
print(kernel["name"], kernel["calls"], kernel["total_s"])
printed("import net.json --gpus 8 --batch 64 --out imported.toml")
net = prism.load_job("imported.toml")
print(net.model.hidden_size, net.model.num_layers, net.layout.tp, net.layout.dp)
print(*printed(f"stages examples/job.toml --each").split())
print(imported())
for name in BAD:
    refused((job + name).split())
refused(["broken", "examples/job.toml"])
with contextlib.redirect_stdout(io.StringIO()) as told, contextlib.suppress(SystemExit):
    with contextlib.redirect_stderr(told):
        main(["--help"])
print(*told.getvalue().split())
"""
_MODEL = """
kind = "model"
hidden_size = 1024
vocab_size = 32000
num_heads = 8
ffn_size = 4096
activation = "{}"
[[layers]]
repeat = 4
modules = ["attention", "{}"]
"""
_JOB = """
kind = "job"
model = "{}_model.toml"
cluster = "dgx-h100"
num_nodes = 1
layout.tp = 8
training.global_batch_size = 8
training.microbatch_size = 1
training.sequence_length = 1024
"""
_NET = """
{"net": {"width": 1024, "depth": 8, "heads": 8, "inner": 4096, "words": 32000},
 "run": {"length": 2048, "batch": 1, "split": 2}}
"""


def test_a_package_adds_one_of_each(tmp_path):
    """As the page on plugins has it, from its wheel; what cannot be imported is named."""
    source, site, folder = (tmp_path / name for name in ("source", "site", "work"))
    for code in blocks(ROOT / "docs/plugins.md"):
        path = source / code.text.splitlines()[0].removeprefix("# ")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code.text)
    (source / "acme/__init__.py").touch()
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(site)
    for package, names in (("bad", [*_BAD]), ("worse", ["twice"])):
        about = site / f"{package}-1.0.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {_BAD[name]}" for name in names]
        groups = ["[prism_jax.schedules]", *lines]
        groups += ["[prism_jax.commands]", "broken = nowhere:X"] * (package == "bad")
        (about / "entry_points.txt").write_text("\n".join(groups))
    folder.mkdir()
    for name, activation, module in (
        ("own", "gelu", "squared-relu-mlp"),
        ("plain", "squared_relu", "mlp"),
    ):
        (folder / f"{name}_model.toml").write_text(_MODEL.format(activation, module))
        (folder / f"{name}.toml").write_text(_JOB.format(name))
    (folder / "net.json").write_text(_NET)
    (folder / "rank0.spans").write_text("gemm 1000 2500\ngemm 3000 4000\n")
    told = _run_in_base(f"BAD = {[*_BAD]}\n{_PLUGIN}", "", folder, site)
    for line, said in zip(told.splitlines(), _SAID.split("\n")[1:-1], strict=True):
        assert re.fullmatch(re.escape(said).replace(r"\.\*", ".*"), line), line
