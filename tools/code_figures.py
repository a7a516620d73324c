"""Count the code base: files, lines, import circles, docstrings, words of the documents.

    python tools/code_figures.py               # the working tree
    python tools/code_figures.py 9bb5272 HEAD  # commits side by side
    python tools/code_figures.py --json

Only files that git tracks are counted; generated wire code and recorded vectors are not.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

#: Roots of the product's Python packages.
ROOTS = ("runtime", "export", "server_stub", "apps")
GENERATED = ("_pb2.py", "_pb.ts")
_TYPESCRIPT_IMPORT = re.compile(r"""(?:from|import)\s+["'](\.[^"']+)["']""")

Sources = Mapping[str, str]


def read_working_tree() -> dict[str, str]:
    """Text of each tracked source file by its path."""
    return {name: Path(name).read_text("utf-8") for name in _git("ls-files").splitlines() if _counts(name)}


def read_commit(commit: str) -> dict[str, str]:
    """Text of each source file of ``commit`` by its path."""
    names = _git("ls-tree", "-r", "--name-only", commit).splitlines()
    return {name: _git("show", f"{commit}:{name}") for name in names if _counts(name)}


def measure(sources: Sources) -> dict[str, float]:
    """Figures by their name; a file of no lines counts as a file."""
    python = {name: text for name, text in sources.items() if name.endswith(".py")}
    product = _below(python, ROOTS)
    typescript = {name: text for name, text in sources.items() if name.endswith(".ts")}
    typescript_product = {name: text for name, text in typescript.items() if "/src/" in name or "/workers/" in name}
    documents = {name: len(text.split()) for name, text in sources.items() if name.endswith(".md")}
    figures: dict[str, float] = {
        "Python: product files": len(product),
        "Python: product lines": _lines(product),
        "Python: median lines of a file": _median(product),
        "Python: longest file": max(map(_count_lines, product.values()), default=0),
        "Python: import circles": len(find_circles(import_python(product))),
        "Python: public definitions with a docstring, %": round(100 * docstring_share(product.values()), 1),
    }
    for package in sorted({_package(name) for name in product}):
        own = _below(product, (package,))
        figures[f"Python: {package}: files"] = len(own)
        figures[f"Python: {package}: lines"] = _lines(own)
    figures |= {
        "TypeScript: product files": len(typescript_product),
        "TypeScript: product lines": _lines(typescript_product),
        "TypeScript: import circles": len(find_circles(import_typescript(typescript_product))),
        "tests: lines of Python": _lines(_below(python, ("tests",))),
        "tests: lines of TypeScript": _lines(typescript) - _lines(typescript_product),
        "tools, deploy, examples: lines": _lines(_below(sources, ("tools", "deploy", "examples"))),
        "words: README.md": documents.get("README.md", 0),
        "words: CONTRIBUTING.md": documents.get("CONTRIBUTING.md", 0),
        "words: CHANGELOG.md": documents.get("CHANGELOG.md", 0),
        "words: docs/": sum(count for name, count in documents.items() if name.startswith("docs/")),
    }
    return figures


def import_python(product: Sources) -> dict[str, set[str]]:
    """Modules of the product by the modules that they import, inside of functions too, but not for types alone."""
    modules = {_module(name): text for name, text in product.items()}
    graph: dict[str, set[str]] = {}
    for module, text in modules.items():
        wanted: set[str] = set()
        for node in _statements_that_run(ast.parse(text)):
            if isinstance(node, ast.Import):
                wanted |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
                wanted |= {
                    f"{node.module}.{alias.name}" if f"{node.module}.{alias.name}" in modules else node.module
                    for alias in node.names
                }
        graph[module] = wanted & (modules.keys() - {module})
    return graph


def import_typescript(product: Sources) -> dict[str, set[str]]:
    """TypeScript files by the files that they import, types included: an editor follows these too."""
    graph: dict[str, set[str]] = {}
    for name, text in product.items():
        folder = PurePosixPath(name).parent
        found = {_normal(folder / match) for match in _TYPESCRIPT_IMPORT.findall(text)}
        graph[name] = {path for path in found if path in product and path != name}
    return graph


def find_circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of two or more nodes that reach each other (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in sorted(graph[node]):
            if following not in index:
                visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            group = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(group) > 1:
                circles.append(sorted(group))

    sys.setrecursionlimit(10_000)
    for node in sorted(graph):
        if node not in index:
            visit(node)
    return circles


def docstring_share(texts: Iterable[str]) -> float:
    """Part of modules, public classes and public functions that have a docstring, 0 to 1."""
    documented = total = 0
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                if node.name.startswith("_"):
                    continue
            elif not isinstance(node, ast.Module) or not node.body:
                continue
            total += 1
            documented += ast.get_docstring(node, clean=False) is not None
    return documented / max(total, 1)


def _statements_that_run(node: ast.AST) -> Iterable[ast.AST]:
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _statements_that_run(child)


def _counts(name: str) -> bool:
    return name.endswith((".py", ".ts", ".md", ".mjs", ".cfg", ".yaml")) and not name.endswith(GENERATED)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, encoding="utf-8").stdout


def _below(sources: Sources, folders: Iterable[str]) -> dict[str, str]:
    return {name: text for name, text in sources.items() if any(name.startswith(f"{folder}/") for folder in folders)}


def _package(name: str) -> str:
    return "/".join(PurePosixPath(name).parts[:2])


def _module(name: str) -> str:
    return ".".join(PurePosixPath(name).with_suffix("").parts[1:]).removesuffix(".__init__")


def _normal(path: PurePosixPath) -> str:
    parts: list[str] = []
    for part in path.parts:
        if part == "..":
            parts.pop()
        elif part != ".":
            parts.append(part)
    return "/".join(parts).removesuffix(".js") + ".ts"


def _count_lines(text: str) -> int:
    return text.count("\n")


def _lines(sources: Sources) -> int:
    return sum(map(_count_lines, sources.values()))


def _median(sources: Sources) -> float:
    return statistics.median(map(_count_lines, sources.values())) if sources else 0


def main() -> None:
    """Print the figures of each commit, or of the working tree."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("commits", nargs="*", help="commits to compare (default: the working tree)")
    parser.add_argument("--circles", action="store_true", help="list the import circles of the working tree")
    parser.add_argument("--json", action="store_true", help="print a JSON object by commit")
    options = parser.parse_args()
    if options.circles:
        sources = read_working_tree()
        python = {name: text for name, text in sources.items() if name.endswith(".py") and name.startswith(ROOTS)}
        typescript = {name: text for name, text in sources.items() if name.endswith(".ts") and "/src/" in name}
        for circle in find_circles(import_python(python)) + find_circles(import_typescript(typescript)):
            print(*circle)
        return
    columns = {commit: measure(read_commit(commit)) for commit in options.commits}
    columns = columns or {"working tree": measure(read_working_tree())}
    if options.json:
        print(json.dumps(columns, indent=1))
        return
    names = list(dict.fromkeys(name for figures in columns.values() for name in figures))
    print(f"| figure | {' | '.join(columns)} |")
    print(f"| --- |{' ---: |' * len(columns)}")
    for name in names:
        cells = (f"{figures[name]:g}" if name in figures else "" for figures in columns.values())
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
