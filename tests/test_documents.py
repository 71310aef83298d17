"""What README and docs print runs as it is printed, from the top of a checkout.

A block of ```bash or ```python runs, and one of ```toml is read, unless `<!-- not run: REASON -->`
stands above it; others are to be looked at. The blocks of a page run in order, those of Python as
one program. So do the commands in the tables of two pages, and the cells of notebooks. Only numbers
of samples, runs, microbatches and points of curves are made smaller, searches shorter, and the main
job.
"""

import ast
import functools as ft
import inspect
import itertools as it
import operator
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import polars as pl
import polars.testing as testing
import pytest

import prism_jax as prism
from prism_jax.cli import main
from prism_jax.cli._main import make_parser, options_of
from prism_jax.data._model import load_architecture
from prism_jax.trace import read_range_names

from .documents import NOTEBOOKS, PAGES, ROOT, Code, blocks, cells, command_lines, row_codes


_SAMPLES = 256
_FEWER = {"--samples": _SAMPLES, "--runs": _SAMPLES}
# What takes the place of the main job: a small job in blocks of pages; in notebooks the main job
# with fewer stages and microbatches, so that it shares compiled code with the small one.
_MAIN_JOB, _SMALL_JOB, _SHORT_JOB = "gpt3-175b-h100-4096", "examples/job.toml", "short.toml"
_SHORTER = {
    "pp = 8": "pp = 4",
    "num_microbatches = 16": "num_microbatches = 8",
    "virtual_stages = 12": "virtual_stages = 2",
    "tp_overlap = true": "overlap_grad_reduce = false",
}
_WITH_ROWS = (ROOT / "README.md", ROOT / "docs/commands.md")
# Commands that take longest.
# fmt: off
_SLOW = (
    "calibrate", "compare", "criticality", "diagnose", "improve", "layouts", "measure", "place",
    "report", "run", "sensitivity", "sweep", "target", "whatif",
)
# fmt: on
_READERS = {
    "job": prism.load_job,
    "model": prism.load_model,
    "layers": load_architecture,
    "failures": prism.load_failures,
    "ranges": read_range_names,
}


@pytest.fixture(scope="module", autouse=True)
def _checkout(tmp_path_factory):
    """A folder with the files of the checkout, where commands run and what they write stays."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("examples", "jobs", "notebooks", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    text = (ROOT / f"jobs/{_MAIN_JOB}.toml").read_text()
    for long, short in _SHORTER.items():
        assert text.count(long) == 1
        text = text.replace(long, short)
    (folder / _SHORT_JOB).write_text(text)
    before = os.getcwd()
    os.chdir(folder)
    yield
    os.chdir(before)


_CODES = [code for page in _WITH_ROWS for code in row_codes(page)]
_ROWS = [code for code in _CODES if code.text.startswith("prism-jax ")]
_RUNNING = [code for page in PAGES for code in blocks(page) if not code.reason]
_BASH = [code for code in _RUNNING if code.language == "bash"]
_COMMANDS = [tuple(words) for code in (*_ROWS, *_BASH) for words in command_lines(code.text)]


@pytest.fixture(autouse=True)
def _short_searches(monkeypatch):
    for name in ("_MOST_OPS", "_MOST_OPS_LIKENED"):
        monkeypatch.setattr(f"prism_jax.placement._trials.{name}", 2**25)
    monkeypatch.setattr("prism_jax.runs._training_run._GPU_SETS", 8)
    monkeypatch.setattr("prism_jax.analysis._sensitivity._MOST_GAINS", 2)


class _Threads(ThreadPoolExecutor):
    """What takes the place of processes, each of which would import JAX; `test_workers.py` starts
    some.
    """

    def __init__(self, max_workers, *, mp_context, initializer):
        del mp_context, initializer
        super().__init__(max_workers)


@ft.cache
def _run(words: tuple[str, ...]) -> None:
    """Runs a command once, and before it the one that writes what it reads."""
    assert words[0] == "prism-jax", f"`{words[0]}` is not run here; say why above the block."
    if words[1] == "explore":
        return  # It serves until Ctrl-C; see `test_explorer.py`.
    if "--ray" in words:
        pytest.importorskip("ray")
    for other in _COMMANDS:
        written = _out(other)
        if written and written in words and written != _out(words) and not os.path.exists(written):
            _run(other)
    fewer = {option: most for option, most in _FEWER.items() if option in _options(words[1])}
    fewer |= {"--top": 1} if words[1] == "layouts" else {}
    added = [str(word) for word in it.chain(*fewer.items())]
    # Commands of two pages may write a file of one name.
    added += ["--force"] * ("--force" in _options(words[1]))
    assert main([*words[1:], *added]) == 0, " ".join(words)


def _out(words: tuple[str, ...]) -> str:
    return words[words.index("--out") + 1] if "--out" in words else ""


@ft.cache
def _options(command: str):
    return options_of(make_parser()[1][command])


def _marks(slow: bool):
    return [pytest.mark.slow] if slow else []


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(
            tuple(words),
            id=f"{code.name}-{words[1]}",
            # What they read may have to be calibrated first.
            marks=_marks(words[1] in _SLOW or "mine.toml" in words),
        )
        for code in _ROWS
        for words in command_lines(code.text)
    ],
)
def test_a_command_in_a_table_runs(words):
    _run(words)


@pytest.mark.parametrize(
    "page",
    [
        # It measures for seconds, whatever else the machine does.
        pytest.param(page, id=name, marks=_marks(name == "docs/how_to/measure.md"))
        for page in PAGES
        for name in [page.relative_to(ROOT).as_posix()]
        if any(code.page == name and code.language in ("bash", "python") for code in _RUNNING)
    ],
)
def test_the_blocks_of_a_page_run(page, monkeypatch):
    monkeypatch.setenv("PRISM_JAX_CACHE", "off")  # The tests keep compiled code elsewhere.
    names: dict[str, object] = {}
    for code in blocks(page):
        if code.reason:
            continue
        text = code.text.replace(_MAIN_JOB, _SMALL_JOB)
        if code.language == "bash":
            for words in command_lines(text):
                _run(tuple(words))
        elif code.language == "python":
            _execute(text, names, code.name)


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(notebook, monkeypatch):
    """In this process, which has much of it compiled. What ends a cell is shown as a table."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    pyplot.switch_backend("agg")
    monkeypatch.setenv("PRISM_JAX_CACHE", "off")
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", _Threads)
    names: dict[str, object] = {}
    with jax.numpy_dtype_promotion("standard"):  # What they do with numbers is not ours.
        for code in cells(notebook):
            _run_cell(code, names)
    pyplot.close("all")


def _run_cell(code: Code, names: dict[str, object]) -> None:
    if "cluster_study" in code.text:
        pytest.importorskip("simpy")
    text = code.text.replace(f'"{_MAIN_JOB}"', f'"{_SHORT_JOB}"')
    text = text.replace("num_microbatches=16", "num_microbatches=8")
    *body, last = ast.parse(_with_fewer_samples(text)).body
    shown = isinstance(last, ast.Expr) and not code.text.rstrip().endswith(";")
    body += [] if shown else [last]
    exec(compile(ast.Module(body, []), code.name, "exec"), names)
    if isinstance(last, ast.Expr) and shown:
        found = eval(compile(ast.Expression(last.value), code.name, "eval"), names)
        for show in ("__repr__", "_repr_html_"):
            assert getattr(found, show, lambda: "nothing to show")()


def _execute(text: str, names: dict[str, object], name: str) -> None:
    if "prism.plot." in text:
        pytest.importorskip("matplotlib")
    exec(compile(_with_fewer_samples(text), name, "exec"), names)


def _with_fewer_samples(text: str) -> str:
    text = re.sub(r"\btop=\d+", "top=1", text)
    text = re.sub(r"\bnum_steps=\d\d\b", "num_steps=2", text)  # Of a fit.
    text = re.sub(r"(linspace\([^()]+, )\d{3}\)", r"\g<1>20)", text)
    return re.sub(
        r'(num_(?:samples|runs)"?\s*[=:]\s*)([\d_]+)',
        lambda found: f"{found[1]}{min(int(found[2]), _SAMPLES)}",
        text,
    )


@pytest.mark.slow
def test_the_python_in_a_table_runs():
    """With what the text beside it speaks of: a job, a program, a key."""
    job = prism.load_job("examples/job.toml")
    program = prism.compile_job(job)
    key = jax.random.key(0)
    law = prism.latency.LogNormal(1.0, 0.1)  # pyright: ignore[reportArgumentType]
    prism.save_law(prism.simulate(program, num_samples=_SAMPLES, key=key), "law.npz")
    given = {"prism": prism, "job": job, "program": program, "key": key, "law": law}
    calls = [c for c in _CODES if c.text.startswith("prism.") and c.text.endswith(")")]
    assert len(calls) > 10
    for code in calls:
        _execute(f"_ = {code.text}", {**given, "paths": ["law.npz"]}, code.name)


def test_commands_that_are_not_run_are_taken_by_the_command_line(monkeypatch):
    """Those of clusters, say."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "16")
    parser = make_parser()[0]
    found = 0
    for page in PAGES:
        for code in blocks(page):
            for words in command_lines(code.text) if code.language == "bash" else ():
                if words[0] == "prism-jax":
                    found += 1
                    parser.parse_args([os.path.expandvars(word) for word in words[1:]])
    assert found > 10


@pytest.mark.parametrize(
    "code", [pytest.param(c, id=c.name) for c in _RUNNING if c.language == "toml"]
)
def test_a_block_of_toml_is_a_valid_file(code, written):
    path = written("file.toml", code.text)
    _READERS[tomllib.loads(code.text)["kind"]](path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_public_names_that_a_page_speaks_of_exist(page):
    for name in re.findall(r"(?<![/\w])prism\.((?:[a-zA-Z]\w*\.)*[a-zA-Z]\w*)", page.read_text()):
        operator.attrgetter(name)(prism)


def test_figures_under_the_name_of_prism_are_its_own(shared):
    """Those of sentences that it reports, and of rows that are "reported", stand in the notes on it
    and are not marked there as measured by us ([M]).
    """
    notes = (shared / "reference/prism.md").read_text().splitlines()
    # A mark at the end of the second line of an item is of the first, too.
    pairs = zip(notes, [*notes[1:], ""], strict=True)
    theirs = [line for line, after in pairs if "[M]" not in line and "[M]" not in after]
    known = set(re.findall(r"\d+(?:\.\d+)?", " ".join(theirs)))
    text = "\n".join(page.read_text() for page in PAGES)
    said = re.findall(r"PRISM reports[^.:;]*(?:\.\d[^.:;]*)*", text)
    said += re.findall(r"^\|[^|]*\| reported \|.*$", text, re.MULTILINE)
    assert said
    for sentence in said:
        figures = re.findall(r"\d+(?:\.\d+)?", sentence.partition("reported |")[2] or sentence)
        assert {*figures} <= known, sentence


def test_a_block_says_its_language():
    for page in PAGES:
        for code in blocks(page):
            assert code.language in ("bash", "python", "toml", "text"), code.name


def test_the_api_pages_have_every_public_name_once():
    text = "".join(page.read_text() for page in sorted((ROOT / "docs/api").glob("*.md")))
    named = re.findall(r"^::: prism_jax\.(\w+)$", text, re.MULTILINE)
    public = [name for name in dir(prism) if not inspect.ismodule(getattr(prism, name))]
    assert sorted(named) == public
    for module in (prism.latency, prism.plot):
        short = module.__name__.removeprefix("prism_jax.")
        for name in re.findall(rf"^::: prism_jax\.{short}\.(\w+)$", text, re.MULTILINE):
            assert hasattr(module, name)


@pytest.mark.slow
def test_examples_equal_the_output_of_their_script(tmp_path):
    """Steps to the tenth of a millisecond, for processors round in another way."""
    subprocess.run([sys.executable, ROOT / "examples/make.py", tmp_path], check=True)
    names = sorted(path.name for path in tmp_path.glob("*.csv"))
    assert len(names) == 5
    for name in names:
        found, kept = pl.read_csv(tmp_path / name), pl.read_csv(ROOT / "examples" / name)
        testing.assert_frame_equal(found, kept, rel_tol=1e-3)
    logs = [prism.read_log(folder / "train.log") for folder in (tmp_path, ROOT / "examples")]
    assert logs[0].left_out == logs[1].left_out
    np.testing.assert_allclose(*(log.runs[0] for log in logs), rtol=1e-3)
