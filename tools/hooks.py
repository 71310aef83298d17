"""What the site shows that stands elsewhere in the repository: README, changes, notebooks."""

import json
import pathlib
import posixpath
import re
from collections.abc import Iterator
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files


_ROOT = pathlib.Path(__file__).parents[1]
_PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that are made of other files."""
    for source, page in _PAGES.items():
        text = (_ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_relinked(text, source, page)))
    for path in sorted((_ROOT / "notebooks").glob("*.ipynb")):
        page = f"notebooks/{path.stem}.md"
        text = "\n\n".join(_cells(json.loads(path.read_text(encoding="utf-8"))))
        text = _relinked(text, f"notebooks/{path.name}", page)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Pages of `docs/` link to files of the repository, too."""
    if page.file.generated_by:
        return markdown
    return _relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def _relinked(text: str, source: str, page: str) -> str:
    """With the links of a file of the repository as those of a page. What is no page is named."""

    def replace(found: re.Match[str]) -> str:
        picture, label, target, anchor = found.groups()
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (_ROOT / target).exists():
            raise ValueError(f"{source} links to {target}, which is not there.")
        if target.startswith("docs/"):
            to = target.removeprefix("docs/")
        elif target.startswith("notebooks/"):
            to = target.replace(".ipynb", ".md")
        elif target in _PAGES:
            to = _PAGES[target]
        else:
            return label
        to = posixpath.relpath(to, posixpath.dirname(page) or ".")
        return f"{picture}[{label}]({to}{anchor or ''})"

    return _LINK.sub(replace, text)


def _cells(notebook: dict[str, Any]) -> Iterator[str]:
    """A notebook as Markdown, a piece for each cell and each output."""
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            yield source
            continue
        yield f"```python\n{source}\n```"
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                picture = "".join("".join(data["image/png"]).split())
                yield f'<img alt="what the cell draws" src="data:image/png;base64,{picture}">'
            elif "text/html" in data:
                yield "".join(data["text/html"])
            else:
                text = "".join(output.get("text", data.get("text/plain", ())))
                yield f"```text\n{text.rstrip()}\n```"
