import json
import pathlib

import pytest


_NOTEBOOKS = sorted((pathlib.Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", _NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_small_and_say_nothing_of_a_machine(path):
    text = path.read_text()
    cells = json.loads(text)["cells"]
    assert len(cells) < 12
    assert len(text) < 300_000
    assert cells[0]["cell_type"] == "markdown"
    assert not any(cell["metadata"] for cell in cells)
    for words in ("/home/", "site-packages", ".venv", "Traceback"):
        assert words not in text
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.get("name") == "stderr" for output in outputs)
