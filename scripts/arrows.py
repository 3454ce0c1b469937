"""Prints the import arrows between jaxlora's packages, as docs/design.md shows them.

    python -m scripts.arrows
    python -m scripts.arrows --update    # also writes them into docs/design.md

The arrows are computed from the import statements of all files, including those inside
functions.
"""

import argparse
import ast
import functools
import graphlib
import pathlib
from collections.abc import Collection, Iterable, Iterator, Mapping

import networkx as nx

ROOT = pathlib.Path(__file__).resolve().parents[1]
Graph = dict[str, set[str]]
PAGE = ROOT / "docs" / "design.md"
MARKS = "<!-- arrows -->", "<!-- /arrows -->"  # before and after the picture
_WIDTH = 24  # of the column of names; longer names move their arrow to the right


def find_modules() -> dict[str, pathlib.Path]:
    """Returns the file of every module of the repository, by dotted name.

    A folder to which jaxlora holds a link is part of jaxlora, and of nothing else.
    """
    folders = {path.resolve(): f"jaxlora.{path.name}" for path in links()}
    folders |= {ROOT / name: name for name in ("jaxlora", "scripts", "tests")}
    out = {}
    for folder, name in folders.items():
        others = folders.keys() - {folder, *folder.parents}
        for file in folder.rglob("*.py"):
            if others.isdisjoint(file.parents):
                parts = name, *file.relative_to(folder).with_suffix("").parts
                out[".".join(parts).removesuffix(".__init__")] = file
    return out


def links() -> list[pathlib.Path]:
    """Returns jaxlora's links to the folders that are installed as parts of it."""
    return [path for path in (ROOT / "jaxlora").iterdir() if path.is_symlink()]


@functools.cache
def imported_names(path: pathlib.Path) -> frozenset[str]:
    """Returns the dotted names of a file's imports, each with its module in front."""
    names = set()
    for node in _statements(ast.parse(path.read_text(encoding="utf-8")).body):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports are not resolved"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(names)


def _statements(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Yields statements and those inside of them; expressions hold no imports."""
    for node in body:
        yield node
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            inside = getattr(node, name, ())
            if isinstance(inside, list):  # not the body of a lambda
                yield from _statements(inside)


def module_graph(files: Mapping[str, pathlib.Path]) -> Graph:
    """Returns which of the given modules each of them imports."""
    out = {}
    for module, path in files.items():
        # The last part of a name is a module or a member of one.
        names = imported_names(path)
        found = {n if n in files else n.rpartition(".")[0] for n in names}
        out[module] = (found & files.keys()) - {module}
    return out


def find_cycle(graph: Graph) -> list[str]:
    """Returns the nodes of a cycle, the first one also at the end, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def package_graph(graph: Graph) -> Graph:
    """Returns the imports between the packages and files directly inside jaxlora.

    Files with a leading underscore, such as `__init__.py`, are left out.
    """
    packages = {module.split(".")[1] for module in graph if module.count(".") > 1}
    out: Graph = {}
    for module, imports in graph.items():
        own, *others = (_part(name, packages) for name in (module, *sorted(imports)))
        if own:
            out.setdefault(own, set()).update(filter(None, others))
    return {part: imports - {part} for part, imports in out.items()}


def _part(module: str, packages: Collection[str]) -> str:
    """Returns the package or file of a module in jaxlora, or an empty string."""
    parts = module.split(".")
    if parts[0] != "jaxlora" or len(parts) == 1 or parts[1].startswith("_"):
        return ""
    return parts[1] + ("/" if parts[1] in packages else ".py")


def picture(graph: Graph) -> str:
    """Formats packages in layers, each above those that it imports.

    Arrows that follow from others are left out: if a imports b and b imports c, there
    is no arrow from a to c. Packages that import each other are joined by `<->`, and
    files with the same arrows share a line.
    """
    edges = nx.DiGraph((a, b) for a, found in graph.items() for b in found)
    edges.add_nodes_from(graph)
    condensed = nx.condensation(edges)
    reduced = nx.transitive_reduction(condensed)
    members = nx.get_node_attributes(condensed, "members")
    names = {node: " <-> ".join(sorted(found)) for node, found in members.items()}
    lines: dict[tuple[int, str], list[str]] = {}
    for height, layer in enumerate(nx.topological_generations(condensed.reverse())):
        for node in layer:
            targets = ", ".join(sorted(names[other] for other in reduced[node]))
            lines.setdefault((-height, targets), []).append(names[node])
    rows = [(-h, ", ".join(sorted(n)), t) for (h, t), n in lines.items()]
    rows.sort(key=lambda row: (-row[0], row[1]))
    width = min(_WIDTH, max(len(names) for _, names, _ in rows))
    shown = (f"{h:5}  {n:{width}}  -> {t}" if t else f"{h:5}  {n}" for h, n, t in rows)
    head = f"layer  {'part':{width}}     imports, without those that follow from others"
    return "\n".join([head, *shown])


def block() -> str:
    """Returns the picture of this repository, as Markdown between two marks."""
    drawn = picture(package_graph(module_graph(find_modules())))
    return f"\n```\n{drawn}\n```\n".join(MARKS)


def updated(page: str) -> str:
    """Returns the text of a page with the present picture between its marks."""
    before, rest = page.split(MARKS[0])
    return before + block() + rest.split(MARKS[1])[1]


def main() -> None:
    """Prints the picture, and updates the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--update", action="store_true", help=f"writes {PAGE.name}")
    if parser.parse_args().update:
        PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    print(block())


if __name__ == "__main__":
    main()
