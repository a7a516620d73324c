"""The libraries in Swift and Kotlin, which are not compiled here, define and call what ``moa-core.js`` says.

Chats run on a stand-in with just these functions, in QuickJS and JavaScriptCore: ``tests/e2e/web/test_engines.py``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SWIFT, KOTLIN = (ROOT / "apps" / "mobile" / name for name in ("swift/Sources", "android/src/main/kotlin"))
NATIVE = ROOT / "runtime" / "web" / "src" / "native"
#: Types of values that cross, in TypeScript and in Swift's blocks.
CROSSING = {"number": {"Int", "Double"}, "string": {"String"}, "Uint8Array": {"JSValue"}}


def sources(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*")) if path.suffix in (".swift", ".kt"))


def methods(interface: str) -> dict[str, list[str]]:
    """Types of the parameters of each method of an interface."""
    text = (NATIVE / "native_host.ts").read_text()
    body = re.search(rf"interface {interface} {{\n(.*?)\n}}", text, re.DOTALL)
    assert body
    found = re.findall(r"^  (\w+)\(([^)]*)\):", body[1], re.MULTILINE)
    return {name: re.findall(r"\w+: ([^,]+)", given) for name, given in found}


def test_swift_defines_the_functions_of_the_core() -> None:
    text = sources(SWIFT)
    blocks = dict(re.findall(r"let (\w+): @convention\(block\) \(([^)]*)\) ->", text))
    assert set(re.findall(r'define\("(\w+)", \w+\)', text)) == set(blocks) == set(methods("NativeHost"))
    for name, expected in methods("NativeHost").items():
        given = re.findall(r"\w+", blocks[name])
        assert len(given) == len(expected), name
        assert all(own in CROSSING[type_] for own, type_ in zip(given, expected, strict=True)), name


def test_kotlin_defines_the_functions_of_the_core() -> None:
    text = sources(KOTLIN)
    defined = re.findall(r'define\("(\w+)"\) \{(.*?)(?=\n        define\(|\n        return host)', text, re.DOTALL)
    assert {name for name, _ in defined} == set(methods("NativeHost"))
    for name, body in defined:
        taken = re.match(r" \(([^)]*)\) ->", body)
        last = max(map(int, re.findall(r"given\[(\d+)\]", body)), default=-1)
        count = len(taken[1].split(",")) if taken else last + 1
        assert count == len(methods("NativeHost")[name]), name


@pytest.mark.parametrize("folder", [SWIFT, KOTLIN], ids=["swift", "kotlin"])
def test_what_they_call_is_there(folder: Path) -> None:
    text = sources(folder)
    calls = re.findall(
        r'(?:tell|call|invokeMethod)\("(\w+)"(?:, withArguments: \[([^\]]*)\]|, ([^\n]*?)\)+(?:\n| \}| //))?', text
    )
    known = methods("NativeCore")
    assert {name for name, *_ in calls} | {"start"} == set(known)
    requests = set(re.findall(r'case "(\w+)":', (NATIVE / "requests.ts").read_text())) | {"open"}
    assert set(re.findall(r'(?:request|follow)\("(\w+)"', text)) <= requests
    events = (ROOT / "runtime" / "web" / "src" / "events.ts").read_text()
    read = re.search(
        r"(?:switch text\(\"event\"\)|when \(event.getString\(\"event\"\)\)) \{(.*?)\n    ? ?\}", text, re.DOTALL
    )
    assert read
    named = set(re.findall(r'"(\w+)"', read[1]))
    assert len(named) > 8 and {name for name in named if not re.search(rf"\b{name}\b", events)} == set()
