"""Prove that the emulated device notices a missing wait: take out one at a time, and the program must fail.

    .venv/bin/python tests/mutation/mutate.py [--only WORD] [--excused]

Each mutant is a copy of the package with one wait, synchronisation or guard of a release less. It is
dead when a program fails: of local transfers and memory `transfer_program.py`, in one process; of all else
`program.py` on two ranks, on some path, with the progress thread or without it. Mutants are found by what
the code says, not where it says it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PROGRAMS = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "tests"))

from run import environment, mpirun  # noqa: E402

# Devices' own waits have tests of their own; partitioned operations need MPICH (mpi4py's suite runs them on the
# emulated device there), and these programs run with Open MPI.
SKIPPED = ("devices", "bench", "testing.py", "__main__.py", "partitioned.py")
LOCAL = ("memory", "transfer")
# Program and arguments. Without the progress thread first: it is the strictest, as no thread makes up for a
# missing drive.
BETWEEN = [("program.py", path, threads) for threads in ("serialized", "multiple") for path in ("staged", "direct")]
BETWEEN.append(("program.py", "staged", "multiple", "apart"))
WITHIN = [("transfer_program.py",)]

KINDS = {
    "synchronize": "`x.synchronize(...)` is removed: the host goes on before the stream or event is done",
    "wait_event": "`x.wait_event(...)` is removed: a stream goes on before another one is done",
    "query": "`x.query()` is True: an event that is not done counts as done",
    "record": "`x.record(...)` gives an event that is done: what it guards is not guarded",
    "release": "`release(event)` and `_take_back(block, event)` get None: a block is used again at once",
    "guard": "`event is None` is True and `event is not None` False: the event is overlooked",
    "queued": "`if x._queued` is False, and `x._queued = True` is removed: a queued copy is overlooked",
    "plain": "the test before `return ..._plain(...)` is True: a request is complete before its copies are begun",
    "ready": "`x.ready()` is removed, and so is the body of each `ready`: MPI starts before its memory is ready",
    "end": "`end` returns no event: a request is complete before its copies are",
    "poll": "`x.poll()` is True: a pending operation counts as done",
    "drive": "`poll()`, `_drive()`, `_drive_all()` and `watch()` are removed: nobody brings the request to its end",
    "use": "`note_use`, `use_on` and `uses.append` are removed: memory is used again under a queued copy",
    "keep": "`keep(...)` and appends to what is `held` or `kept` are removed: arrays go while they are copied",
    "snapshot": "`x.snapshot(y)` is y: no copy is made before the original changes",
    "either": "of `if a or b:` before a wait each part is False, and so is the test of a wait with an `else`",
    "close": "`job.close()` is removed: helping threads are not waited for",
    "mpi": "`Test`, `Testall`, `Get_status`, `Wait` and `Waitall` are True: MPI is not waited for",
}
# Left alone: locks and the progress thread's own sleep, wake-up and join, which order threads and no data.

# Mutants that behave like the original, each with the other wait that covers for it: (file, function, kind, code).
EXCUSED: dict[tuple[str, str, str, str], str] = {
    ("requests.py", "_Driven._drive", "drive", "progress.poll()"): (
        "MPI moves all its requests while one is polled, and copies of the others may wait until they are waited for"
    ),
    ("requests.py", "_Progress._complete_sends", "drive", "self.poll()"): (
        "only tests/unit/test_two_ranks.py has programs that end with a send under way"
    ),
    ("requests.py", "_Driven.Test", "drive", "progress.poll()"): "the request's own poll follows",
    ("requests.py", "_Driven.Test", "poll", "self._pending.poll()"): (
        "progress.poll() before it drives this request too, and MPI's Test after it tells whether it is complete"
    ),
    ("requests.py", "Prequest.Free", "drive", "self._drive()"): "Wait after it drives too",
    ("envelopes.py", "Outgoing._wait", "either", "if self._copying:"): "query, called in turns with it, tests again",
    ("envelopes.py", "Outgoing._wait", "synchronize", "self._copying[0].synchronize()"): "query tests the event again",
    ("lanes.py", "OutMessages.close", "release", "lease.release(event)"): (
        "copies are under way only if MPI fails between an envelope's copy and its send; they are on a stream that the "
        "next large send borrows, and its copies come behind them"
    ),
    ("lanes.py", "OutMessages.wait", "mpi", "self._requests[self._done % len(self._leases)].Wait()"): (
        "done, called in turns with it, tests the message again"
    ),
    ("lanes.py", "InMessages.wait", "mpi", "self._requests[self._done % len(self._requests)].Wait()"): (
        "advance, called in turns with it, tests the message again"
    ),
    (
        "lanes.py",
        "InSlots.wait",
        "either",
        "if first is not None and self._done + len(self._fetching) == self._pieces.chunks:",
    ): "advance tests the event again; the pause in its place is short",
    ("lanes.py", "InSlots.wait", "synchronize", "first.synchronize()"): "advance tests the event again",
    ("envelopes.py", "Incoming._wait", "synchronize", "event.synchronize()"): "query tests the event again",
    ("algorithms/link.py", "Requests.test", "mpi", "MPI.Request.Testall(self._requests)"): (
        "only tests/mpi/test_algorithms.py moves data by this link"
    ),
    ("algorithms/link.py", "Requests.wait", "mpi", "MPI.Request.Waitall(self._requests)"): (
        "only tests/mpi/test_algorithms.py moves data by this link"
    ),
    ("transfer/prefetch.py", "_Pipe._move_all", "synchronize", "self.device.record(stream).synchronize()"): (
        "copies keep what they read"
    ),
    ("transfer/prefetch.py", "_Pipe._move_all", "record", "self.device.record(stream)"): "copies keep what they read",
    ("nonblocking.py", "_Collective._run", "record", "self._device.record(self._side)"): (
        "the algorithm's own waits cover for it; it only keeps the polling thread from blocking"
    ),
    ("targets.py", "_pack", "mpi", "request.Wait()"): "a message to ourselves that was received is sent",
    ("early.py", "receive", "mpi", "sent.Wait()"): (
        "of two such lines, the one of Sendrecv: its message has gone when the other end is served, which must be on "
        "its way too, else both would wait for ever"
    ),
    ("api/objects.py", "Objects.sendrecv", "mpi", "request.Wait()"): "the pickle is the request's own; it goes anyway",
    ("early.py", "deliver", "mpi", "sent.Wait()"): "a message to ourselves that was received is sent",
}

DONE = (
    "__import__('types').SimpleNamespace(query=lambda: True, synchronize=lambda: None, _point=0, "
    "_stream=__import__('types').SimpleNamespace(_run_to=lambda point: None, _advance=lambda point: None))"
)
DRIVES = ("poll", "_drive", "_drive_all", "watch")
WAITS = ("synchronize", "wait_event", "snapshot")
KEEPERS = ("held", "kept", "_under_way")
REMOVED = {"synchronize": "synchronize", "wait_event": "wait_event", "ready": "ready", **dict.fromkeys(DRIVES, "drive")}
REMOVED |= dict.fromkeys(("note_use", "_note_use", "use_on"), "use")
TRUE = {"query": "query", "poll": "poll"}
TRUE |= dict.fromkeys(("Test", "Testall", "Get_status", "Wait", "Waitall"), "mpi")


@dataclass(frozen=True)
class Mutant:
    """One change: `new` in place of the bytes from `start` to `stop` of `file`."""

    file: str
    function: str
    kind: str
    code: str
    line: int
    start: int
    stop: int
    new: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return (self.file, self.function, self.kind, self.code)

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.stop :]

    def __str__(self) -> str:
        return f"{self.kind:12}{self.file}:{self.line} {self.function}: {self.code}"


def called(node: ast.AST) -> str:
    """The name of the function or method that is called, or nothing."""
    if not isinstance(node, ast.Call):
        return ""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def is_event(node: ast.AST) -> bool:
    return getattr(node, "attr", getattr(node, "id", "")).lstrip("_") == "event"


def is_queued(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "_queued"


def changes(node: ast.AST, function: ast.AST | None, used: bool) -> Iterator[tuple[str, ast.AST, str]]:
    """The kinds of change at one place: kind, what is replaced, by what. `used`: as a value."""
    if isinstance(node, ast.Expr) and called(node.value) in REMOVED:
        yield REMOVED[called(node.value)], node, "pass"
    elif isinstance(node, ast.Expr) and called(node.value) in TRUE:  # its result is not used
        yield TRUE[called(node.value)], node, "pass"
    if isinstance(node, ast.Expr) and getattr(getattr(node.value, "func", None), "id", "") == "keep":
        yield "keep", node, "pass"
    if isinstance(node, ast.Expr) and called(node.value) == "append":
        target = getattr(node.value.func, "value", None)
        name = getattr(target, "attr", getattr(target, "id", ""))
        if name == "uses" or name in KEEPERS:
            yield "use" if name == "uses" else "keep", node, "pass"
    if isinstance(node, ast.Expr) and ast.unparse(node) == "job.close()":
        yield "close", node, "pass"
    if isinstance(node, ast.Return) and called(node.value) == "keep":
        yield "keep", node.value, f"Copying({ast.unparse(node.value.args[0])})"
    if isinstance(node, ast.Call):
        name = called(node)
        if name in TRUE and used:
            yield TRUE[name], node, "True"
        if name == "record":
            yield "record", node, DONE
        if name == "snapshot":
            yield "snapshot", node, ast.unparse(node.args[0])
        # Of the arguments, an event is the last one: release(event), _take_back(block, event).
        event = node.keywords[-1].value if node.keywords else node.args[-1] if node.args else None
        if name in ("release", "_take_back") and event is not None and not is_none(event):
            yield "release", event, "None"
    if isinstance(node, ast.Compare) and is_event(node.left) and is_none(node.comparators[0]):
        yield "guard", node, "True" if isinstance(node.ops[0], ast.Is) else "False"
    if isinstance(node, ast.If):
        if any(called(part) in WAITS for line in node.body for part in ast.walk(line)):
            if isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.Or):
                for part in node.test.values:
                    yield "either", part, "False"
            elif node.orelse and not (isinstance(node.test, ast.Compare) and is_event(node.test.left)):
                yield "either", node.test, "False"
        if is_queued(node.test):
            yield "queued", node.test, "False"
        if any(isinstance(part, ast.Return) and called(part.value) == "_plain" for part in node.body):
            yield "plain", node.test, "True"
    if isinstance(node, ast.Assign) and is_queued(node.targets[0]) and ast.unparse(node.value) == "True":
        yield "queued", node, "pass"
    if isinstance(node, ast.FunctionDef) and node.name == "ready":
        body = [part for part in node.body if not isinstance(part, ast.Pass) and not is_text(part)]
        if body:
            yield "ready", node, "pass"
    ends = isinstance(function, ast.FunctionDef) and function.name == "end"
    if ends and isinstance(node, ast.Return) and node.value is not None and not is_none(node.value):
        many = function.returns is not None and ast.unparse(function.returns).startswith("list")
        yield "end", node.value, "[]" if many else "None"


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def walk(
    node: ast.AST, names: tuple[str, ...] = (), function: ast.AST | None = None, used: bool = True
) -> Iterator[tuple[str, str, str, ast.AST, str]]:
    """All changes below a node: the function's name, kind, code, what is replaced, by what."""
    for kind, part, new in changes(node, function, used):
        if isinstance(part, ast.FunctionDef):
            yield ".".join((*names, part.name)), kind, f"def {part.name}", part, new
        else:
            yield ".".join(names), kind, ast.unparse(node).split("\n")[0], part, new
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        names, function = (*names, node.name), node
    for child in ast.iter_child_nodes(node):
        yield from walk(child, names, function, not isinstance(node, ast.Expr))


def find(package: Path) -> list[Mutant]:
    """All mutants of the package, each once."""
    found: list[Mutant] = []
    for path in sorted(package.rglob("*.py")):
        if path.relative_to(package).parts[0] in SKIPPED:
            continue
        source = path.read_bytes()
        tree = ast.parse(source)
        offsets = [0]
        for text in source.splitlines(keepends=True):
            offsets.append(offsets[-1] + len(text))
        seen = {ast.dump(tree)}
        for name, kind, code, part, new in walk(tree):
            first = part.body[0] if isinstance(part, ast.FunctionDef) else part
            start = offsets[first.lineno - 1] + first.col_offset
            stop = offsets[part.end_lineno - 1] + part.end_col_offset
            file = path.relative_to(package).as_posix()
            mutant = Mutant(file, name, kind, code, first.lineno, start, stop, new)
            changed = ast.dump(ast.parse(mutant.apply(source)))
            # `def ready` of one statement and that statement are one.
            if changed not in seen:
                seen.add(changed)
                found.append(mutant)
    return found


def runs(file: str) -> list[tuple[str, ...]]:
    """The programs, with arguments, of which one must fail on a mutant of this file."""
    return WITHIN if file.startswith(LOCAL) else BETWEEN


def run_program(folder: Path, run: tuple[str, ...], watchdog: float) -> str:
    """Run a program on the package in `folder`; how it failed, or nothing."""
    variables = {
        **environment(), "PYTHONPATH": str(folder), "GDCOMM_MUTANT": str(folder), "GDCOMM_WATCHDOG": str(watchdog),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    python = str(Path(sys.executable).absolute())
    start = [python] if run in WITHIN else mpirun(python, 2)
    process = subprocess.Popen(
        [*start, str(PROGRAMS / run[0]), *run[1:]], env=variables, cwd=folder, text=True, errors="replace",
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=watchdog + 15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hang outside Python"
    if not process.returncode:
        return ""
    told = re.search(r"MUTANT (.*)", output)
    if told:
        return told.group(1)
    if re.search(r"^Timeout \(", output, re.M):
        return "hang"
    return f"exit status {process.returncode}: {output[-1500:]}"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="only mutants whose line has this word")
    parser.add_argument("--package", type=Path, default=ROOT / "gdcomm", help="mutate another copy of gdcomm")
    parser.add_argument("--excused", action="store_true", help="run the excused mutants too: they must survive")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gdcomm-mutants-") as folder:
        passed, failures = work(Path(folder), options)
    taken = f"in {time.monotonic() - begun:.2f}s"
    for failure in failures:
        print("FAILED", failure)
    print(f"{len(failures)} failed, {passed} passed {taken}" if failures else f"{passed} passed {taken}")
    return 1 if failures else 0


def work(folder: Path, options: argparse.Namespace) -> tuple[int, list[str]]:
    """Run everything in `folder`; the number of checks that passed, and those that failed in words."""
    original = folder / "original"
    shutil.copytree(options.package, original / "gdcomm", ignore=shutil.ignore_patterns("__pycache__"))
    mutants = find(original / "gdcomm")
    chosen = [mutant for mutant in mutants if options.only in str(mutant)]
    watchdogs: dict[tuple[str, ...], float] = {}
    for run in sorted({run for mutant in chosen for run in runs(mutant.file)}):
        start = time.monotonic()
        how = run_program(original, run, 60)
        if how:
            return 0, [f"the package as it is, {' '.join(run)}: {how}"]
        taken = time.monotonic() - start
        watchdogs[run] = max(8.0, 5 * taken)
        print(f"ok      the package as it is, {' '.join(run)}: {taken:.1f} s", flush=True)
    print(f"{len(chosen)} of {len(mutants)} mutants", flush=True)
    # Nothing found where something was means that the patterns no longer fit the code.
    rotten = set(KINDS) - {mutant.kind for mutant in mutants}
    gone = sorted(set(EXCUSED) - {mutant.key for mutant in mutants})
    failures = [f"no mutant of this kind is left, change KINDS: {kind}" for kind in sorted(rotten)]
    failures += [f"excused, but no longer there: {key}" for key in gone]

    def judge(number: int, mutant: Mutant) -> tuple[Mutant, str]:
        copy = folder / str(number)
        shutil.copytree(original, copy, ignore=shutil.ignore_patterns("__pycache__"))
        target = copy / "gdcomm" / mutant.file
        target.write_bytes(mutant.apply(target.read_bytes()))
        try:
            for run in runs(mutant.file):
                how = run_program(copy, run, watchdogs[run])
                if how:
                    return mutant, f"{' '.join(run)}: {how}"
            return mutant, ""
        finally:
            shutil.rmtree(copy)

    passed = len(watchdogs)
    if not options.excused:
        for mutant in chosen:
            if mutant.key in EXCUSED:
                print(f"excused {mutant}  <- {EXCUSED[mutant.key]}", flush=True)
        chosen = [mutant for mutant in chosen if mutant.key not in EXCUSED]
    with ThreadPoolExecutor(2) as pool:
        for mutant, how in pool.map(judge, range(len(chosen)), chosen):
            excused = mutant.key in EXCUSED
            told = how and f"  <- {' '.join(how.split())[:200]}"
            print(f"{'dead' if how else 'lives':8}{mutant}{told}", flush=True)
            if bool(how) == excused:
                failures.append(f"excused, yet it fails: {mutant}" if excused else f"survives: {mutant}")
            else:
                passed += 1
    return passed, failures


if __name__ == "__main__":
    sys.exit(main())
