"""`gdcomm bench transfer` on the emulated device: all sections, verified data, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

import gdcomm
import gdcomm.__main__
from gdcomm.bench.transfer import command, sections
from gdcomm.bench.transfer.data import differences, page_aligned, pattern
from gdcomm.bench.transfer.kits import EmulatedKit
from gdcomm.bench.transfer.timing import Figure, Row, Way, measure

QUICK = ["--device", "emulated", "--seconds", "0", "-e", "16K", "-f", "64"]


@pytest.fixture(autouse=True)
def quick_facts(monkeypatch):
    monkeypatch.setattr(command, "_facts", lambda: {"machine": "here"})


def bench(*options):
    done = CliRunner().invoke(gdcomm.__main__.main, ["bench", "transfer", *QUICK, *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One run of everything."""
    folder = tmp_path_factory.mktemp("bench")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_facts", lambda: {"machine": "here"})
        done = bench("--json", str(folder / "t.json"), "--plot", str(folder / "t.png"))
    assert done.exit_code == 0, done.output
    assert (folder / "t.png").stat().st_size > 10_000
    return done.output, json.loads((folder / "t.json").read_text())


def test_every_section_has_rows(whole):
    output, result = whole
    assert result["errors"] == {} and result["notes"] == []
    for name in sections.SECTIONS:
        figures = [figure for figure in result["figures"] if figure["section"] == name]
        assert figures, name
        assert all(figure["us"] > 0 and not figure["wrong"] and not figure["why"] for figure in figures), name
        assert f"{name}: {sections.SECTIONS[name].title}" in output
    assert set(gdcomm.__main__._SECTIONS) == set(sections.SECTIONS)


def test_figures(whole):
    _, result = whole
    for figure in result["figures"]:
        assert figure["low_us"] <= figure["us"] <= figure["high_us"]
        assert figure["iterations"] >= 3 and figure["clock"] in ("host", "events")
        assert figure["column"].startswith("emu-")
    locked = [f for f in result["figures"] if f["section"] == "kinds" and not f["what"].startswith("pageable")]
    assert {f["clock"] for f in locked} == {"events"}
    assert {f["what"].split()[0] for f in locked} == {"pinned", "registered", "mapped", "write-combined"}
    both = next(f for f in result["figures"] if f["section"] == "both")
    assert both["gbps"] == pytest.approx(2 * both["nbytes"] / both["us"] / 1e3)


def test_what_follows(whole):
    output, result = whole
    serial = next(r for r in result["ratios"] if r["section"] == "overlap" and r["peer"] == "emu-serial")
    assert serial["times_gdcomm"] == pytest.approx(result["overlap"][0]["speedup"])
    assert [found["memory"] for found in result["crossovers"]] == ["pinned", "pageable"]
    assert {found["rows"] for found in result["crossovers"]} == {16 << 10 >> 9}
    assert len(result["overlap"]) == 3
    assert {"command", "date", "facts", "properties", "versions", "memory", "sizes", "seconds"} <= set(result)
    assert "best possible" in output


def test_only(tmp_path):
    done = bench("--only", "cpu", "--only", "small", "--json", str(tmp_path / "t.json"))
    assert done.exit_code == 0
    found = json.loads((tmp_path / "t.json").read_text())["figures"]
    assert {figure["section"] for figure in found} == {"cpu", "small"}


def test_wrong_data_is_withheld(tmp_path, monkeypatch):
    copy = gdcomm.copy

    def faulty(dst, src, **options):
        if isinstance(dst, np.ndarray):
            copy(dst[:-1], src[:-1], **options)
            return None
        return copy(dst, src, **options)

    monkeypatch.setattr(gdcomm, "copy", faulty, raising=False)
    done = bench("--only", "small", "--json", str(tmp_path / "t.json"))
    assert done.exit_code == 1
    found = json.loads((tmp_path / "t.json").read_text())["figures"]
    down = [f for f in found if "D2H" in f["what"] and f["column"] == "emu-gdcomm"]
    assert down and all(f["us"] is None and f["wrong"] == 1 for f in down)
    others = [f for f in found if f not in down]
    assert others and all(f["us"] is not None and not f["wrong"] for f in others)
    assert "wrong" in done.output


def test_wrong_only_when_timed():
    kit = EmulatedKit([64], 0.0)
    target = np.empty(64, np.uint8)
    calls = []

    def call():
        calls.append(None)
        target[:] = kit.truth(64) if len(calls) == 1 else 0

    (figure,) = measure(kit, Row("x", "x", 64, {"gdcomm": Way(call, lambda _: kit.wrong_here(target))}))
    assert figure.us is None and figure.wrong > 0


def test_a_section_that_raises_ends_alone(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError("broken")

    monkeypatch.setattr(gdcomm, "copy_many", broken, raising=False)
    done = bench("--only", "pieces", "--only", "cpu", "--json", str(tmp_path / "t.json"))
    result = json.loads((tmp_path / "t.json").read_text())
    assert done.exit_code == 1 and "section pieces ended early" in done.output
    assert "KeyError: 'broken'" in result["errors"]["pieces"]
    assert {figure["section"] for figure in result["figures"]} == {"cpu"}


def test_small_budget_scales_down(tmp_path):
    only = [option for name in ("kinds", "both", "alloc", "rows") for option in ("--only", name)]
    done = subprocess.run(
        [sys.executable, "-m", "gdcomm", "bench", "transfer", *QUICK, *only, "--json", str(tmp_path / "t.json")],
        capture_output=True, text=True, timeout=60, env={**os.environ, "GDCOMM_PINNED_LIMIT": "40K"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "t.json").read_text())
    assert any(re.match(r"kinds, pinned: only up to \d+ bytes, of 16384", note) for note in result["notes"])
    pinned = [f for f in result["figures"] if f["section"] == "kinds" and f["what"] == "pinned H2D"]
    assert pinned and max(f["nbytes"] for f in pinned) <= 8192
    both = [f for f in result["figures"] if f["section"] == "both"]
    assert both and all(f["note"] and f["nbytes"] <= 8192 for f in both)


def test_no_device(tmp_path):
    done = bench("--device", "none", "--json", str(tmp_path / "t.json"))
    result = json.loads((tmp_path / "t.json").read_text())
    assert done.exit_code == 0
    assert {figure["section"] for figure in result["figures"]} == {"host", "cpu"}
    assert "kinds: needs a device" in result["notes"]


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["transfer", "p2p"], "give it alone"),
        (["transfer", "--only", "nonsense"], "--only"),
        (["transfer", "--dtype", "float64"], "--dtype"),
        (["transfer", "-b", "2", "-e", "1"], "--max-bytes"),
        (["transfer", "-e", "0"], "--max-bytes"),
        (["transfer", "--json", "/no/such/folder/x.json"], "folder does not exist"),
        (["transfer", "--plot", "x.xyz"], "does not end in"),
        (["p2p", "--only", "cpu"], "--only"),
    ],
)
def test_bad_options(options, word):
    done = CliRunner().invoke(gdcomm.__main__.main, ["bench", "--device", "emulated", *options])
    assert done.exit_code == 2
    assert word in done.output


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_several_ranks_are_refused(monkeypatch, name):
    monkeypatch.setenv(name, "2")
    done = bench("--only", "cpu")
    assert done.exit_code == 2 and "without mpirun" in done.output
    monkeypatch.setenv(name, "1")
    assert bench("--only", "cpu").exit_code == 0


def test_needs_no_mpi(tmp_path):
    program = (
        "import sys\n"
        "from gdcomm.__main__ import main\n"
        f"main(['bench', 'transfer', '--only', 'both', *{QUICK!r}], standalone_mode=False)\n"
    )
    check = "import atexit, sys\natexit.register(lambda: print('MPI' if 'mpi4py.MPI' in sys.modules else 'no MPI'))\n"
    done = subprocess.run([sys.executable, "-c", check + program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no MPI\n")


def test_crossover_is_found_between_points():
    def swept(method, share, us):
        return Figure("rows", f"pinned H2D, {share} %", method, round(share / 100 * 1000 * 512), us=us, share=share)

    figures = [swept("gather", share, share * 10) for share in (1.0, 10.0, 100.0)]
    figures += [swept("copy", share, 316.2) for share in (1.0, 10.0, 100.0)]
    (found,) = sections.crossovers(figures)
    assert found["rows"] == 1000
    assert found["measured_percent"] == pytest.approx(31.62, rel=1e-3)
    (none,) = sections.crossovers([figure for figure in figures if figure.share < 50])
    assert none["measured_percent"] is None


def test_data():
    block = pattern(page_aligned((9 << 20) + 5))
    assert block.ctypes.data % 4096 == 0
    assert (block[:1000] == pattern(np.empty(1000, np.uint8))).all()
    other = block.copy()
    assert differences(block, other) == 0
    other[[0, 5 << 20, -1]] ^= 1
    assert differences(block, other) == 3
    assert differences(block, other[:-1]) == block.nbytes
