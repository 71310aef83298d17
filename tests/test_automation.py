"""What runs by itself, on pushes, tags and commits, calls what is there."""

import pathlib
import re
import tomllib

import yaml


_ROOT = pathlib.Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_MAKEFILE = (_ROOT / "Makefile").read_text()
_WORKFLOWS = {p.stem: p.read_text() for p in sorted((_ROOT / ".github/workflows").glob("*.yml"))}


def _jobs(name: str) -> dict:
    return yaml.safe_load(_WORKFLOWS[name])["jobs"]


def _commands(job: dict) -> list[str]:
    """What a job runs, once for each value of its matrix."""
    values = job.get("strategy", {}).get("matrix", {"": [""]})
    ((key, choices),) = values.items()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    return [run.replace(f"${{{{ matrix.{key} }}}}", each) for each in choices for run in runs]


def test_workflows_make_targets_that_exist():
    targets = {
        name for line in re.findall(r"(?m)^([\w./ -]+):", _MAKEFILE) for name in line.split()
    }
    asked = [
        target
        for name in _WORKFLOWS
        for job in _jobs(name).values()
        for command in _commands(job)
        for target in re.findall(r"^make (\S+)", command)
    ]
    assert {"test", "test-lowest", "test-newest", "test-all"} <= {*asked} <= targets
    assert {*_WORKFLOWS} == {"tests", "release"}


def test_workflows_run_the_oldest_and_the_newest_python():
    """The last that they set up is `python3`, with which `make` makes its environment."""
    classified = [text.rpartition(" ")[2] for text in _PROJECT["classifiers"] if ":: 3." in text]
    assert _PROJECT["requires-python"] == f">={classified[0]}"
    for name in _WORKFLOWS:
        for job in _jobs(name).values():
            (versions,) = (s["with"] for s in job["steps"] if "setup-python" in s.get("uses", ""))
            assert versions["python-version"].split() == [classified[-1], classified[0]]


def test_a_release_is_of_its_version_and_of_the_wheel_that_was_tested():
    commands = _commands(_jobs("release")["release"])
    order = [
        next(n for n, command in enumerate(commands) if part in command)
        for part in ("make .venv/test", "hatchling version", "make test-all", "gh release create")
    ]
    assert order == sorted(order)
    assert ".venv-newest/dist/*" in commands[-1]
    assert "$(MAKE) test-newest" in _MAKEFILE.partition("\ntest-all:")[2].partition("\n\n")[0]
    assert re.fullmatch(r"\d+\.\d+\.\d+", _PROJECT["version"])


def test_each_week_has_pre_releases_and_accelerators_and_no_index_is_named():
    jobs = _jobs("tests")
    weekly = {name for name, x in jobs.items() if x["if"] == "github.event_name == 'schedule'"}
    assert weekly == {"pre-releases", "accelerators"}
    assert [name for name, x in jobs.items() if x.get("env") == {"PIP_PRE": 1}] == ["pre-releases"]
    assert _commands(jobs["accelerators"]) == ["make test-accelerators"]
    for text in (*_WORKFLOWS.values(), _MAKEFILE, (_ROOT / ".pre-commit-config.yaml").read_text()):
        assert not re.search(r"https?://|index-url|find-links", text)


def test_hooks_are_local_and_of_the_environment():
    (hooks,) = yaml.safe_load((_ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert hooks["repo"] == "local"
    installed = " ".join(_PROJECT["optional-dependencies"]["test"])
    for hook in hooks["hooks"]:
        command = pathlib.Path(hook["entry"].split()[0])
        assert command.parent == pathlib.Path(".venv/bin")
        assert {"lint-imports": "import-linter"}.get(command.name, command.name) in installed
        assert hook["language"] == "system"
