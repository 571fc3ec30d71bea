"""The examples of the documentation run, and so does the code of docs/memory.md."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from gpu import cupy

pytestmark = pytest.mark.gpu

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["cupy_pinned", "memmap_rows", "torch_prefetch"])
def test_example(name):
    if name.startswith("torch"):
        torch = pytest.importorskip("torch", reason="needs PyTorch: pip install torch")
        if not torch.cuda.is_available():
            pytest.skip("needs a PyTorch that reaches the GPU: install a build for CUDA")
    runpy.run_path(str(DOCS / "examples" / f"{name}.py"))["main"]()


def test_code_of_the_memory_guide():
    text = (DOCS / "memory.md").read_text()
    names: dict[str, object] = {}
    for match in re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        line = text[: match.start()].count("\n") + 1
        exec(compile("\n" * line + match[1], "docs/memory.md", "exec"), names)  # one block goes on where the last ended
    cupy.cuda.get_current_stream().synchronize()
