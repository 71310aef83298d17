"""Draws the graph of packages of `architecture.md`, from the imports: `make reference`."""

import pathlib

import grimp


_ROOT = pathlib.Path(__file__).parents[1]
_PAGE, _PACKAGES = _ROOT / "docs/architecture.md", _ROOT / "prism_jax"
_START, _END = "```text\n", "```\n"


def arrows() -> dict[str, list[str]]:
    """For each package, from the top down, those that it imports, without those that these import
    in turn.
    """
    graph = grimp.build_graph("prism_jax")
    uses: dict[str, set[str]] = {}

    def used(module: str) -> set[str]:
        """The packages that a module imports, also by way of files at the top."""
        found = graph.find_modules_directly_imported_by(module)
        return set().union(*({name} if (name := _package(one)) else used(one) for one in found))

    for module in graph.modules:
        if package := _package(module):
            uses.setdefault(package, set()).update(used(module) - {package})
    below: dict[str, set[str]] = {}

    def reach(package: str) -> set[str]:
        if package not in below:
            inner = [reach(one) for one in uses[package]]
            below[package] = uses[package].union(*inner)
        return below[package]

    order = sorted(uses, key=lambda package: (-len(reach(package)), package))
    return {
        package: sorted(
            one for one in uses[package] if not any(one in reach(x) for x in uses[package])
        )
        for package in order
    }


def _package(module: str) -> str:
    """The package of a module; empty for files at the top."""
    _, _, inner = module.partition(".")
    package = inner.partition(".")[0]
    return package if package and (_PACKAGES / package).is_dir() else ""


def page() -> str:
    """The page, with the graph as it is."""
    before, _, rest = _PAGE.read_text(encoding="utf-8").partition(_START)
    after = rest.partition(_END)[2]
    lines = (f"{package:12s} {', '.join(used)}".rstrip() for package, used in arrows().items())
    graph = "".join(f"{line}\n" for line in lines)
    return f"{before}{_START}{graph}{_END}{after}"


def draw() -> None:
    """The picture: each package below all that import it, as high as possible."""
    import matplotlib.pyplot as plt

    uses = arrows()
    level: dict[str, int] = {}
    for package in uses:  # Those above come first.
        users = [level[one] for one, used in uses.items() if package in used]
        level[package] = min(users, default=1) - 1
    lowest = min(level.values())
    level = {package: each - lowest for package, each in level.items()}
    rows = [[p for p in uses if level[p] == i] for i in range(1 + max(level.values()))]
    at = {p: ((i + 0.5) / len(row), level[p]) for row in rows for i, p in enumerate(row)}
    figure, axes = plt.subplots(figsize=(9, 8), layout="constrained")
    for package, used in uses.items():
        for one in used:
            axes.annotate(
                "",
                xy=(at[one][0], at[one][1] + 0.2),
                xytext=(at[package][0], at[package][1] - 0.2),
                arrowprops={"arrowstyle": "-|>", "color": "0.6", "shrinkA": 0, "shrinkB": 0},
            )
        box = {"boxstyle": "round", "facecolor": "white", "edgecolor": "0.3"}
        axes.text(*at[package], package, ha="center", va="center", bbox=box)
    axes.set(xlim=(0, 1), ylim=(-0.5, len(rows) - 0.5))
    axes.axis("off")
    figure.savefig(_PAGE.with_suffix(".png"), dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    _PAGE.write_text(page(), encoding="utf-8")
    draw()
