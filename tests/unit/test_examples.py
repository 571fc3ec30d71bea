"""The examples of the documentation: those that need no CUDA run, the others use what there is."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedDevice

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLES = sorted((DOCS / "examples").glob("*.py"))
FENCE = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
BLOCKS = FENCE.findall((DOCS / "memory.md").read_text())
SOURCES = [pytest.param(path.read_text(), id=path.name) for path in EXAMPLES]
SOURCES += [pytest.param(block, id=f"memory.md-{i}") for i, block in enumerate(BLOCKS)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(seed=5)
    monkeypatch.setattr(devices, "_installed", [made])
    return made


def public(node: ast.AST) -> str | None:
    """The name behind `gdcomm.`, if that is what the node is."""
    mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "gdcomm"
    return node.attr if mine else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("source", SOURCES)
def test_what_is_used_exists(source):
    tree = ast.parse(source)
    for node in ast.walk(tree):
        name = public(node)
        assert name is None or name in gdcomm.__all__
        called = public(node.func) if isinstance(node, ast.Call) else None
        if called is not None:
            placed = [None for _ in node.args]
            named: dict[Any, None] = {keyword.arg: None for keyword in node.keywords}
            inspect.signature(getattr(gdcomm, called)).bind(*placed, **named)


def test_the_guide_has_each_function():
    text = "".join(BLOCKS)
    for name in (
        *("pinned_empty", "pinned_zeros", "pinned_like", "pinned_array", "registered", "register", "unregister"),
        *("mapped_empty", "memory_kind", "copy", "to_device", "to_host", "copy_many", "take", "put"),
        *("prefetch", "offload", "Signal"),
    ):
        assert f"gdcomm.{name}(" in text


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_short(path):
    assert len(path.read_text().splitlines()) <= 45


def test_memmap_rows(device):
    runpy.run_path(str(DOCS / "examples/memmap_rows.py"))["main"]()
