"""What users of any command line expect: near names, completion, `doctor`, an installed package."""

import json
import os
import pathlib
import subprocess
import sys
import tarfile
import zipfile

import jax
import numpy as np
import pytest

import prism_jax as prism
from prism_jax._cache import cache_folder
from prism_jax.cli import main
from prism_jax.cli._installation import _wrong_on, wrong_on_this_backend
from prism_jax.cli._main import COMMANDS, make_parser
from prism_jax.cli._options import arguments
from prism_jax.cli._values import count
from prism_jax.data import list_names

from .helpers import made_law


_ROOT = pathlib.Path(__file__).parents[1]


def test_every_command_has_an_example_that_it_takes():
    parser, commands = make_parser()
    assert (*commands,) == (*COMMANDS,)
    for name, command in commands.items():
        before, example = str(command.epilog).split("prism-jax ")
        assert before == "example: ", name
        assert parser.parse_args(example.split()).run is not None


def test_arguments_are_those_of_the_text_that_lists_them():
    text = """
    job [JOB]  a job
    files FILE...  some
    --ray [ADDRESS]  where
    --set KEY=VALUE...  change a key
    --of {ranks,ops} (ops)  what to print
    --deep  go on,
        deeper by 5 %
    --share X (5%)  of what
    --top N (10)  rows
    --out FILE (required)  the file
    """
    listed = dict(arguments(text))
    repeated = {"action": "append", "default": []}
    assert listed == {
        "job": {"help": "a job", "metavar": "JOB", "nargs": "?"},
        "files": {"help": "some", "metavar": "FILE", "nargs": "+"},
        "--ray": {"help": "where", "metavar": "ADDRESS", "nargs": "?", "const": True},
        "--set": {"help": "change a key", "metavar": "KEY=VALUE", **repeated},
        "--of": {"help": "what to print (ops)", "choices": ["ranks", "ops"], "default": "ops"},
        "--deep": {"help": "go on, deeper by 5 %%", "action": "store_true"},
        "--share": {"help": "of what (5%%)", "metavar": "X", "default": "5%"},
        "--top": {"help": "rows (10)", "metavar": "N", "default": "10", "type": count},
        "--out": {"help": "the file", "metavar": "FILE", "required": True},
    }
    with pytest.raises(AssertionError, match="not all are listed"):
        arguments(text, {"--fo": int})


def test_every_command_prints_its_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "example: prism-jax" in capsys.readouterr().out


def _printed_completion(shell, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--print-completion", shell])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_the_shell_completes_commands_options_and_names(tmp_path, capsys):
    script = _printed_completion("bash", capsys)
    (tmp_path / "gpt3-mine.toml").touch()

    def completed(*words: str) -> list[str]:
        typed = f"COMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}"
        shown = f'{script}\n{typed}\n_shtab_prism_jax\nprintf "%s\\n" "${{COMPREPLY[@]}}"'
        run = subprocess.run(
            ["bash", "-c", shown], capture_output=True, text=True, check=True, cwd=tmp_path
        )
        return run.stdout.split()

    assert completed("prism-jax", "sim") == ["simulate"]
    assert completed("prism-jax", "simulate", "--samp") == ["--samples", "--sampling"]
    assert completed("prism-jax", "simulate", "--sampling", "i") == ["importance"]
    jobs = [name for name in list_names("job") if "gpt3" in name]
    assert completed("prism-jax", "predict", "gpt3") == [*jobs, "gpt3-mine.toml"]
    assert "dgx-h100" in completed("prism-jax", "import", "--cluster", "dgx")
    assert "qwen3-30b-a3b" in completed("prism-jax", "init", "--model", "qwen3")
    assert completed("prism-jax", "calibrate", "--to", "gpt3") == ["gpt3-mine.toml"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_complete_the_same_names(shell, capsys):
    script = _printed_completion(shell, capsys)
    assert all(name in script for name in (*COMMANDS, "importance", *list_names("job")))


def test_doctor_lists_versions_devices_and_problems(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("PRISM_JAX_CACHE", str(tmp_path))
    with monkeypatch.context() as patch:  # The step takes seconds to compile.
        patch.setattr("prism_jax.cli._installation.wrong_on_this_backend", lambda: "")
        assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["jax"]
    assert sum(found["devices"].values()) >= 1
    assert found["cache"]["folder"].startswith(str(tmp_path))
    assert found["cache"]["files"] == 0
    assert found["problems"] == []
    monkeypatch.setenv("PRISM_JAX_CACHE", "off")
    monkeypatch.setattr("prism_jax.cli._installation._PACKAGES", ("jax", "jaxlib", "not-there"))

    def fails(*args, **options):
        raise KeyError("num_consts")

    monkeypatch.setattr(prism, "simulate", fails)
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "problem: `not-there` is not installed." in text
    assert "off" in text
    (line,) = [line for line in text.splitlines() if "On `cpu`" in line]
    assert "a small step cannot be simulated (KeyError: 'num_consts'); install" in line
    assert line.endswith("pip install 'jax==0.10.2'.")


def test_a_platform_that_jax_lacks_is_one_sentence(monkeypatch, refused, capsys):
    def asserts():
        raise AssertionError

    monkeypatch.setattr(jax, "devices", asserts)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert main(["doctor"]) == 1
    assert (
        "problem: JAX finds no device that works on JAX_PLATFORMS=cuda" in capsys.readouterr().out
    )
    told = refused(["simulate", "examples/job.toml", "--samples", "64"])
    assert 'pip install "prism_jax[cuda13]"' in told


def test_doctor_compares_a_law_and_a_derivative(monkeypatch):
    law = made_law()
    monkeypatch.setattr(prism, "simulate", lambda program, **options: law)
    assert f"the mean of a small step is {law.mean:.4g} s, not 1.135 s" in wrong_on_this_backend()

    def without_derivative(program, objective, **options):
        return jax.lax.stop_gradient(program.latencies.mean[0])

    law = made_law(np.full(100, 1.135))
    monkeypatch.setattr(prism, "estimate", without_derivative)
    assert "derivative of a small step is 0, where a difference gives" in wrong_on_this_backend()


@pytest.mark.slow
def test_doctor_asks_other_backends():
    assert _wrong_on("cpu") == ""
    assert "On `tpux`, a small step cannot be simulated (" in _wrong_on("tpux")


def test_a_script_keeps_compiled_code_where_it_can(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    told: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    (tmp_path / "file").touch()
    for folder in ("off", str(tmp_path / "file")):
        monkeypatch.setenv("PRISM_JAX_CACHE", folder)
        prism.keep_compiled()
        assert not told
    monkeypatch.setenv("PRISM_JAX_CACHE", str(tmp_path))
    prism.keep_compiled()
    assert str(told["jax_compilation_cache_dir"]).startswith(str(tmp_path))
    assert told["jax_persistent_cache_min_compile_time_secs"] == 0


def test_a_user_without_a_home_has_no_cache(monkeypatch, capsys):
    """As in a container that runs under any number."""

    def unknown(number):
        raise KeyError(number)

    for name in ("HOME", "XDG_CACHE_HOME", "PRISM_JAX_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert cache_folder() is None
    prism.keep_compiled()
    assert main(["predict", "megatron-22b-a100-8"]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert str(cache_folder()).startswith("/elsewhere/prism-jax/")


_COMPILES_AGAIN = """
import pathlib, jax, prism_jax as prism
prism.keep_compiled()
twice = jax.jit(lambda x: 2 * x)
twice(1.0)
(entry,) = pathlib.Path({!r}).glob("*/*/*-cache")
entry.write_bytes(entry.read_bytes()[:100])  # As of a process that was killed.
jax.clear_caches()
twice(1.0)
made = entry.read_bytes()
jax.clear_caches()
twice(1.0)
assert len(made) > 100 and entry.read_bytes() == made
import warnings
warnings.warn("another")
"""


def test_a_damaged_file_of_the_cache_is_made_again(tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "JAX_COMPILATION_CACHE_DIR"}
    environment["PRISM_JAX_CACHE"] = str(tmp_path)
    command = [sys.executable, "-c", _COMPILES_AGAIN.format(str(tmp_path))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # From 3.13 on, Python shows the line, too.
    assert done.stderr.startswith("<string>:15: UserWarning: another\n")
    assert done.stderr.count("Warning:") == 1


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> pathlib.Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    builder = (
        "import os, sys; os.chdir(sys.argv[1]); import hatchling.build as b;"
        "b.build_wheel(sys.argv[2]); b.build_sdist(sys.argv[2])"
    )
    subprocess.run([sys.executable, "-c", builder, str(_ROOT), str(folder)], check=True)
    return folder


def test_sdist_contains_all_files_of_the_wheel(built):
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("prism_jax/")]
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    data = "prism_jax/data/"
    folders = tuple(f"{data}{folder}/" for folder in ("hardware", "kernels", "jobs"))
    assert "prism_jax/py.typed" in names
    for name in names:
        assert (name.removeprefix(data) if name.startswith(folders) else name) in held
    assert {"pyproject.toml", "README.md", "LICENSE", "constraints.txt"} <= held
    assert not any(part in name for name in held for part in (".venv", "__pycache__"))


def test_the_wheel_holds_the_data(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    for folder in ("hardware", "kernels", "jobs"):
        files = [p for p in (_ROOT / folder).rglob("*") if p.is_file()]
        assert files
        for file in files:
            assert file.suffix in (".toml", ".csv"), file
            assert f"prism_jax/data/{file.relative_to(_ROOT)}" in names
    files = ("_accuracy.toml", "_page.css", "_page.js", "_sliders.js")
    assert {f"prism_jax/report/{name}" for name in files} <= names
    assert not any(name.startswith("tests/") for name in names)


def test_the_wheel_runs_where_there_is_no_checkout(built, tmp_path):
    """In an environment of its own, which borrows no more than the packages it depends on."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    environment["PRISM_JAX_CACHE"] = str(tmp_path / "cache")

    def run(*words) -> str:
        options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
        done = subprocess.run([str(word) for word in words], **options)
        assert done.returncode == 0, done.stderr
        return done.stdout

    run(sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv")
    python = tmp_path / "venv/bin/python"
    (site,) = (tmp_path / "venv/lib").glob("python*/site-packages")
    # The packages of a folder that is only on the path; no editable install of it counts.
    (site / "others.pth").write_text(str(pathlib.Path(pytest.__file__).parents[1]))
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet"]
    run(*pip, "--no-deps", "--no-index", "--disable-pip-version-check", wheel)
    where = run(python, "-c", "import prism_jax; print(prism_jax.__file__)").strip()
    assert pathlib.Path(where).is_relative_to(site)
    command = tmp_path / "venv/bin/prism-jax"
    assert run(command, "--version").startswith("prism-jax ")
    assert set(list_names("job")) <= set(run(command, "jobs").split())
    words = [command, "simulate", "megatron-22b-a100-8", "--samples", "200", "--json"]
    found = json.loads(run(*words))
    assert 0.9 < found["step_time_s"]["mean"] < 1.2
    assert run(command, "doctor").splitlines()[-1] == "No problem was found."
