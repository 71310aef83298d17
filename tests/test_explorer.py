"""The live page of a job: what it answers, to whom, and that a keyboard is enough."""

import http.client
import json
import socket
import threading
from urllib.parse import urlsplit

import jax
import numpy as np
import pytest

import prism_jax as prism
from benchmarks.explore import times_of_moves
from prism_jax.analysis import moved
from prism_jax.explorer import Server, answer, explored, serve


_JOB = "examples/job.toml"


@pytest.fixture(scope="module")
def page():
    """A page that is served, with few samples."""
    server = Server(explored(_JOB, num_samples=256))
    threading.Thread(target=serve, args=(server,), daemon=True).start()
    return server


def _asked(of, what, **settings):
    return answer(of, {"what": what, "settings": settings})


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ()),
        ({"layout.tp": "4", "training.zero": "3"}, ("layout.tp=4", "training.zero=3")),
        ({"cluster": "gb200-nvl72"}, ("cluster=gb200-nvl72",)),
        ({"training.software": "torchtitan"}, ("training.software=torchtitan",)),
        ({"world_size": "64"}, ("world_size=64",)),
    ],
)
def test_a_step_is_that_of_the_job_with_these_keys(page, settings, words):
    size = () if "world_size" in settings else ("world_size=32",)
    job = prism.load_job(_JOB, [*size, "training.global_batch_size=32", *words])
    step = _asked(page.of, "step", **settings)
    predicted, needed = prism.predict(job), prism.memory(job)
    assert step["step_s"] == predicted.mean
    assert step["breakdown_s"] == predicted.breakdown
    assert step["fits"] == needed.fits
    assert step["memory_gib"] == needed.fullest.bytes / 2**30
    hours = job.layout.world_size * 1e9 / predicted.tokens_per_s / 3600
    assert np.isclose(step["gpu_hours"], hours)


@pytest.mark.parametrize("factors", [{}, {"spread of steps": "2", "spread of GPUs": "0.5"}])
def test_a_law_is_simulated_with_these_factors(page, factors):
    program = prism.compile_job(prism.load_job(_JOB))
    program = moved(program, {name: float(value) for name, value in factors.items()})
    expected = prism.simulate(program, num_samples=256, key=jax.random.key(0))
    law = _asked(page.of, "law", **factors)
    assert law["p95"] == expected.quantile(0.95)
    assert law["mean"] == expected.mean


@pytest.mark.parametrize(
    "question",
    [
        None,
        {"what": "step"},
        {"what": "files", "settings": {}},
        {"what": "step", "settings": {"model": "../secret.toml"}},
        {"what": "step", "settings": {"cluster": "/etc/passwd"}},
        {"what": "law", "settings": {"spread of steps": "1e9"}},
        {"what": "law", "settings": {"layout.tp": "16", "layout.pp": "16"}},
    ],
)
def test_a_question_out_of_range_is_refused_in_a_sentence(page, question):
    refused = answer(page.of, question)["refused"]
    assert refused.endswith(".")
    assert len(refused) < 600


def _response(page, method, path, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=60)
    connection.request(method, path, b"{}" if method == "POST" else None, headers)
    response = connection.getresponse()
    return response.status, response.read().decode(), response.headers


def test_only_who_has_the_token_and_asks_this_host_is_answered(page):
    local, other = f"127.0.0.1:{page.server_port}", f"example.com:{page.server_port}"
    path = page.address.partition(local)[2]
    status, text, headers = _response(page, "GET", path, Host=local)
    assert status == 200
    assert "explore(document" in text
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert _response(page, "GET", "/", Host=local)[0] == 403
    assert _response(page, "GET", "/?token=wrong", Host=local)[0] == 403
    assert _response(page, "GET", path, Host=other)[0] == 403
    assert _response(page, "GET", path.replace("/?", "/secret?"), Host=local)[0] == 404
    token = {"X-Token": page.token}
    assert _response(page, "POST", "/answer", Host=local)[0] == 403
    assert _response(page, "POST", "/answer", Host=other, **token)[0] == 403
    assert _response(page, "POST", "/other", Host=local, **token)[0] == 404
    assert _response(page, "GET", f"{path}&token=", Host=local)[0] == 200
    assert _response(page, "GET", f"{path}&token=x", Host=local)[0] == 403
    status, text, _ = _response(page, "POST", "/answer", Host=local, **token)
    assert status == 200
    assert json.loads(text)["refused"]


def test_no_other_interface_answers(page):
    assert page.server_address[0] == "127.0.0.1"
    for address in socket.gethostbyname_ex(socket.gethostname())[2]:
        if not address.startswith("127."):
            with pytest.raises(OSError, match=r"refused|timed out"):
                socket.create_connection((address, page.server_port), timeout=2)


def test_jobs_move_by_what_their_files_and_changes_do_not_say():
    of = explored(_JOB, ("layout.dp=2", "num_nodes=2"), num_samples=64)
    assert _asked(of, "step", **{"layout.tp": "4"})["fits"]
    assert "refused" not in _asked(of, "step", world_size="32")


def test_each_value_of_a_control_has_figures_or_a_reason():
    of = explored("examples/one_device.toml")
    for control in of.controls:
        assert control.own in control.values
        for value in control.values:
            step = _asked(of, "step", **{control.name: value})
            reason = step.get("refused", ".")
            assert reason.endswith(".")
            assert "cannot be computed" not in reason
            if "refused" not in step:
                figures = [step[name] for name in ("step_s", "memory_gib", "gpu_hours")]
                assert np.isfinite(
                    [*figures, *step["interval_s"], *step["breakdown_s"].values()]
                ).all()
                assert min(figures) > 0
    (software,) = (c for c in of.controls if c.name == "training.software")
    assert software.values[0] == software.own == "none"


@pytest.mark.parametrize(
    "question", [b"[" * 60_000, b"\xff", b'{"what": [], "settings": {}}', b"null", b"{}"]
)
def test_each_question_has_an_answer(page, question):
    connection = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=60)
    connection.request("POST", "/answer", question, {"X-Token": page.token})
    assert json.loads(connection.getresponse().read())["refused"].endswith(".")


def test_a_law_of_the_job_as_it_is_stands_beside_that_of_an_early_move(browser, page):
    (*_, moved) = times_of_moves(browser, page.address, [("spread of steps", "END")], wait=False)
    assert moved["law_s"]
    paths = "return [...document.querySelectorAll('.explore path')].map(x => x.getAttribute('d'))"
    own, other = browser.execute_script(paths)
    assert own != other


def test_a_keyboard_moves_the_job(browser, page):
    moves = [("layout.tp", "ARROW_RIGHT"), ("cluster", "ARROW_DOWN")]
    moves += [("spread of steps", "ARROW_LEFT"), ("layout.pp", "END")]
    *answered, refused = times_of_moves(browser, page.address, moves)
    assert not any(row["refused"] for row in answered)
    assert "does not divide" in refused["refused"]
    assert urlsplit(browser.current_url).path == "/"
    for width in (400, 900, 1400):
        sizes = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", sizes)
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    browser.find_element("css selector", "button[type=reset]").click()
    assert browser.execute_script("return document.querySelectorAll('.control.moved').length") == 0
    assert browser.get_log("browser") == []


def test_a_notebook_has_the_same_as_a_widget():
    pytest.importorskip("anywidget")
    widget, sent = prism.explore(_JOB, "training.zero=3"), []
    widget.send = sent.append
    question = {"what": "step", "settings": {}}
    widget._handle_custom_msg({"number": 7, "question": question}, [])
    assert sent == [{"number": 7, "answer": answer(explored(_JOB, ("training.zero=3",)), question)}]
