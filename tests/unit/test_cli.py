"""Options of `gdcomm bench` that can't work are told before anything is measured."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["nonsense"], "unknown operation"),
        (["p2p", "--json", "/no/such/folder/x.json"], "folder does not exist"),
        (["p2p", "--plot", "x.xyz"], "does not end in"),
        (["p2p", "--dtype", "bool"], "can't be summed"),
        (["p2p", "--dtype", "nonsense"], "--dtype"),
        (["p2p", "-b", "0", "-e", "0"], "--max-bytes"),
        (["p2p", "-e", "lots"], "no size"),
        (["p2p", "--seconds", "-1"], "--seconds"),
    ],
)
def test_bad_options(options, word):
    done = subprocess.run(
        [sys.executable, "-m", "gdcomm", "bench", *options], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert word in done.stderr
    assert "Traceback" not in done.stderr


def test_version():
    done = subprocess.run([sys.executable, "-m", "gdcomm", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
