"""Read error codes and sentences out of the product's sources, and find the tests that repeat them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
GOLDEN = REPOSITORY / "tests/golden"
#: Folder of the sources by front end.
PACKAGES = {
    "moa_runtime": "runtime/moa_runtime",
    "moa_server": "server_stub/moa_server",
    "moa_export": "export/moa_export",
    "moa_decoder": "export/moa_decoder",
    "moa_drafter": "export/moa_drafter",
    "moa_chat": "apps/moa_chat",
    "moa_page": "apps/moa_page",
    "moa_bench": "apps/moa_bench",
}

#: Lines of a text that is a program.
_PROGRAM = 8


def sources() -> dict[str, dict[Path, ast.Module]]:
    """Parsed source files by package."""
    return {
        package: {path: ast.parse(path.read_text("utf-8")) for path in sorted((REPOSITORY / folder).rglob("*.py"))}
        for package, folder in PACKAGES.items()
    }


def error_classes(packages: Mapping[str, Mapping[Path, ast.Module]]) -> set[str]:
    """Names of ``MoaError`` and the classes derived from it, without those that make their own sentence and code."""
    trees = [tree for files in packages.values() for tree in files.values()]
    defined = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.ClassDef)]
    names = {"MoaError"}
    while found := {n.name for n in defined if any(_name(base) in names for base in n.bases)} - names:
        names |= found
    return names - {
        n.name for n in defined for call in ast.walk(n) if isinstance(call, ast.Call) and _makes_itself(call)
    }


def errors_of(tree: ast.Module, classes: set[str]) -> Iterator[tuple[int, str | None, str]]:
    """Line, code (None if it has none) and sentence of each error that is constructed.

    What is put into a sentence stands in braces; a sentence made elsewhere is the expression in angle brackets. A class
    that makes its own sentence and code is one error.
    """
    scopes = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and (_name(node.func) in classes or _makes_itself(node))):
            continue
        code = next((_text(k.value) for k in node.keywords if k.arg == "code"), None)
        inside = [n for n in scopes if n.lineno <= node.lineno <= (n.end_lineno or 0)]
        scope = max(inside, key=lambda n: n.lineno) if inside else tree
        texts = [_sentence(argument, scope, node.lineno) for argument in node.args]
        yield node.lineno, code, max(texts, key=len, default="")


def _makes_itself(call: ast.Call) -> bool:
    """Whether it is ``super().__init__(text, code=...)`` with a code that is no argument of the caller."""
    if not (isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"):
        return False
    return any(k.arg == "code" and not isinstance(k.value, ast.Name) for k in call.keywords)


def _sentence(node: ast.expr, scope: ast.AST, line: int) -> str:
    if isinstance(node, ast.Name):
        assigned = [n for n in ast.walk(scope) if isinstance(n, ast.Assign) and n.lineno <= line]
        given = [n for n in assigned if any(_name(target) == node.id for target in n.targets)]
        if given:
            return _text(max(given, key=lambda n: n.lineno).value)
    return _text(node)


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(
            "{" + ast.unparse(part.value) + "}" if isinstance(part, ast.FormattedValue) else _text(part)
            for part in node.values
        )
    return f"<{ast.unparse(node)}>"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def golden(files: Mapping[Path, ast.Module], classes: set[str]) -> str:
    """Text of a golden file: each code, with the sentences that it stands for below it."""
    sentences: dict[str, set[str]] = {}
    for tree in files.values():
        for _, code, sentence in errors_of(tree, classes):
            sentences.setdefault(code or "(none)", set()).add(sentence)
    blocks = ["\n".join([code, *(f"    {s}" for s in sorted(texts))]) for code, texts in sorted(sentences.items())]
    return "\n".join(blocks) + "\n"


def repeated(test: ast.Module, said: str) -> Iterator[tuple[int, str]]:
    """Line and text of each literal of a test that has three words in a row of ``said``, which :func:`said_by` made."""
    for line, text in _literals(test):
        for piece in re.split(r"{%.*?%}|\.\*|[(){}|^$\[\]]|\\n|\n", text.replace("\\", "")):
            words = _spaced(piece)
            plain = [word for word in words.split() if word.strip(".,:;'-").isalpha() and not word.isupper()]
            if len(plain) >= 3 and words in said:
                yield line, words


def said_by(files: Mapping[Path, ast.Module]) -> str:
    """All literals of product sources, docstrings aside, and programs, which are texts of many lines."""
    said = (text for tree in files.values() for _, text in _literals(tree) if text.count("\n") < _PROGRAM)
    return "\x00".join(map(_spaced, said))


def _literals(tree: ast.Module) -> Iterator[tuple[int, str]]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {id(n.body[0].value) for n in ast.walk(tree) if isinstance(n, documented) and _begins_with_text(n)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.lineno, node.value


def _begins_with_text(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    first = node.body[0] if node.body else None
    return isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)


def _spaced(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    PARSED = sources()
    GOLDEN.mkdir(exist_ok=True)
    for front_end, parsed in PARSED.items():
        (GOLDEN / f"{front_end}.txt").write_text(golden(parsed, error_classes(PARSED)), "utf-8")
