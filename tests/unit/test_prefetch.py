"""Batches arrive whole, in order and in time, whatever the streams do; threads and memory go when they should."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections import OrderedDict, UserDict
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import gdcomm
from gdcomm import devices
from gdcomm.devices.emulated import EmulatedArray, EmulatedDevice
from gdcomm.memory.pinned import pool_of


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Named:
    x: Any
    name: str


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    made = EmulatedDevice(seed=2)
    monkeypatch.setattr(devices, "_installed", [made])
    return made


def workers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "gdcomm-prefetch"]


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    assert condition()


def batch(i: int, n: int = 50) -> np.ndarray[Any, Any]:
    return np.arange(n, dtype=float) + 1000 * i


LONG = 9000  # more than 64 KiB: a copy of its own, which reads page-locked memory when it runs


def settle(device: EmulatedDevice) -> None:
    """Let the pool have everything that no event holds back."""
    gc.collect()
    device.synchronize(None)
    for _ in range(5):
        pool_of(device).stats()


def pinned(device: EmulatedDevice, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    block = device.pinned(values.nbytes).view(values.dtype).reshape(values.shape)
    block[...] = values
    return block


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("on_stream", [False, True])
def test_a_consumer_that_never_waits_sees_every_batch(device: EmulatedDevice, depth: int, on_stream: bool) -> None:
    stream = device.Stream() if on_stream else device.default_stream
    sums = device.zeros(20, stream=stream)
    with stream:
        for i, x in enumerate(gdcomm.prefetch((batch(i) for i in range(20)), depth=depth)):
            device.launch(stream, lambda s, v, i=i: s.__setitem__(i, v.sum()), sums, x)
    assert device.asnumpy(sums, stream).tolist() == [batch(i).sum() for i in range(20)]


def test_the_named_stream_is_used(device: EmulatedDevice) -> None:
    stream, total = device.Stream(), device.zeros(1)
    device.synchronize(None)
    for x in gdcomm.prefetch([batch(1), batch(2)], stream=stream):
        device.launch(stream, lambda t, v: t.__iadd__(v.sum()), total, x)
    assert device.asnumpy(total, stream) == batch(1).sum() + batch(2).sum()


def test_memory_is_used_again_but_not_under_the_consumers_work(device: EmulatedDevice) -> None:
    addresses, kept = set(), []
    results = device.zeros(30)
    for i, x in enumerate(gdcomm.prefetch(batch(i) for i in range(30))):
        addresses.add(x.ptr)
        device.launch(None, lambda r, v, i=i: r.__setitem__(i, v[7]), results, x)
        if i in (3, 4):
            kept.append(x)  # stays ours
    assert device.asnumpy(results).tolist() == [batch(i)[7] for i in range(30)]
    assert len(addresses) <= 8, "memory that was dropped is given out again"
    assert [device.asnumpy(x).tolist() for x in kept] == [batch(3).tolist(), batch(4).tolist()]


def test_a_view_keeps_the_memory(device: EmulatedDevice) -> None:
    views = [x[10:12] for x in gdcomm.prefetch(batch(i) for i in range(10))]
    assert [device.asnumpy(v).tolist() for v in views] == [batch(i)[10:12].tolist() for i in range(10)]


def test_a_source_may_use_its_buffer_again(device: EmulatedDevice) -> None:
    def source(buffer: np.ndarray[Any, Any]) -> Iterator[Any]:
        for i in range(8):
            buffer[:] = batch(i, len(buffer))
            yield buffer
            buffer[:] = -1

    for n in (50, LONG):
        for buffer in (np.zeros(n), pinned(device, np.zeros(n))):
            found = [device.asnumpy(x).tolist() for x in gdcomm.prefetch(source(buffer))]
            assert found == [batch(i, n).tolist() for i in range(8)]


def test_pinned_batches_of_a_loader_are_kept_until_they_are_copied(device: EmulatedDevice) -> None:
    class Loader:
        def __iter__(self) -> Iterator[Any]:
            for i in range(6):
                memory = pinned(device, batch(i, LONG))
                block = memory[:]
                weakref.finalize(block, memory.fill, -1)  # as a pool does that gives it to the next one
                yield block
                del block

    Loader.__module__ = "torch.utils.data.dataloader"
    iterator = gdcomm.prefetch(Loader(), depth=6)
    found = [device.asnumpy(x).tolist() for x in list(iterator)]
    assert found == [batch(i, LONG).tolist() for i in range(6)]


def test_structures_are_kept_and_other_leaves_pass_through(device: EmulatedDevice) -> None:
    class Batch(OrderedDict):  # type: ignore[type-arg]
        pass

    names, objects = np.array(["a", "b"]), np.array([object()])
    item = Batch(a=[batch(1), 3, "text"], b=Pair(batch(2), None), c=Named(batch(3), "n"), d=(names, objects), e={})
    (found,) = gdcomm.prefetch([item])
    assert type(found) is Batch
    assert list(found) == list("abcde")
    assert (type(found["a"]), type(found["b"]), type(found["c"]), type(found["d"])) == (list, Pair, Named, tuple)
    arrays = (found["a"][0], found["b"].x, found["c"].x)
    assert [device.asnumpy(x).tolist() for x in arrays] == [batch(i).tolist() for i in (1, 2, 3)]
    assert (found["a"][1:], found["b"].y, found["c"].name, found["e"]) == ([3, "text"], None, "n", {})
    assert found["d"][0] is names
    assert found["d"][1] is objects
    assert isinstance(item["a"][0], np.ndarray), "the source's batch is as it was"


def test_every_dtype_layout_and_shape_arrives(device: EmulatedDevice) -> None:
    base = np.arange(24.0).reshape(4, 6)
    record = np.zeros(3, [("a", "i1"), ("b", "<f8")])
    record["b"] = [1, 2, 3]
    arrays = [
        np.asfortranarray(base), base[::-1, ::2], base.T, np.array(5.0), np.zeros((0, 3)), base.astype("e"),
        base.astype(ml_dtypes.bfloat16), base > 3, base.astype("F"), record,
    ]  # fmt: skip
    for expected, x in zip(arrays, gdcomm.prefetch(arrays), strict=True):
        found = device.asnumpy(x)
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()


def test_device_arrays_of_the_source_are_ordered_too(device: EmulatedDevice) -> None:
    stream = device.Stream()

    def source() -> Iterator[Any]:
        for i in range(5):
            x = device.zeros(3)
            device.fill(x, i)  # on the worker's stream, and nobody waits for it
            yield x

    with stream:
        for i, x in enumerate(gdcomm.prefetch(source())):
            y = device.empty(3)
            device.launch(stream, lambda v, w: np.copyto(v, w), y, x)
            assert device.asnumpy(y, stream).tolist() == [i, i, i]


def test_the_sources_exception_comes_at_its_item(device: EmulatedDevice) -> None:
    def source() -> Iterator[Any]:
        yield batch(0)
        yield batch(1)
        raise KeyError("third")

    iterator = gdcomm.prefetch(source(), depth=4)
    assert device.asnumpy(next(iterator))[0] == 0
    assert device.asnumpy(next(iterator))[0] == 1000
    with pytest.raises(KeyError, match="third"):
        next(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    assert not workers()


def test_a_bad_iterable_fails_where_it_is_iterated(device: EmulatedDevice) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Any]:
            raise RuntimeError("no data")

    with pytest.raises(RuntimeError, match="no data"):
        next(gdcomm.prefetch(Broken()))
    assert not workers()


@pytest.mark.parametrize("how", ["break", "close", "with", "drop", "exception"])
def test_abandoned_iterators_stop_their_thread_and_close_the_source(device: EmulatedDevice, how: str) -> None:
    closed: list[int] = []

    def source() -> Iterator[Any]:
        try:
            for i in range(10**9):
                yield batch(i)
        finally:
            closed.append(1)

    def use() -> None:
        iterator = gdcomm.prefetch(source())
        if how == "break":
            for _ in iterator:
                break
        elif how == "close":
            next(iterator)
            iterator.close()
            iterator.close()
            assert list(iterator) == []
        elif how == "with":
            with iterator:
                next(iterator)
        elif how == "drop":
            next(iterator)
        else:
            with pytest.raises(ZeroDivisionError):
                for _ in iterator:
                    raise ZeroDivisionError

    use()
    gc.collect()
    wait_for(lambda: not workers())
    assert closed == [1]


def test_nothing_runs_before_the_first_item_and_not_further_than_the_depth(device: EmulatedDevice) -> None:
    pulled: list[int] = []

    def source() -> Iterator[Any]:
        for i in range(100):
            pulled.append(i)
            yield batch(i)

    iterator = gdcomm.prefetch(source(), depth=3)
    assert not workers()
    assert not pulled
    next(iterator)
    wait_for(lambda: len(pulled) == 4)
    time.sleep(0.05)
    assert len(pulled) == 4, "one handed out, three waiting"
    iterator.close()


def test_batches_that_were_copied_and_not_taken_give_their_memory_back(device: EmulatedDevice) -> None:
    iterator = gdcomm.prefetch((batch(i) for i in range(100)), depth=4)
    first = next(iterator)
    time.sleep(0.05)
    iterator.close()
    again = [x for _, x in zip(range(4), gdcomm.prefetch(batch(i) for i in range(50, 60)), strict=False)]
    assert device.asnumpy(first).tolist() == batch(0).tolist()
    assert [device.asnumpy(x).tolist() for x in again] == [batch(i).tolist() for i in range(50, 54)]


def test_streams_are_borrowed_and_given_back(device: EmulatedDevice) -> None:
    for _ in range(3):
        list(gdcomm.prefetch([batch(0)]))
        list(gdcomm.offload([device.zeros(3)]))
    before = len(device._streams)
    for _ in range(10):
        list(gdcomm.prefetch([batch(0)]))
        list(gdcomm.offload([device.zeros(3)]))
    assert len(device._streams) == before


def test_memory_of_an_abandoned_offload_is_not_written_any_more(device: EmulatedDevice) -> None:
    for _ in gdcomm.offload((device.array(batch(i, 20_000)) for i in range(8)), depth=3):
        break
    settle(device)
    reused = [gdcomm.pinned_empty(20_000) for _ in range(6)]
    for array in reused:
        array[:] = -5
    for stream in list(device._streams.values()):
        stream.synchronize()
    assert all((array == -5).all() for array in reused)


def test_len_passes_through(device: EmulatedDevice) -> None:
    assert len(gdcomm.prefetch([batch(0)] * 3)) == 3
    assert len(gdcomm.offload([device.zeros(1)] * 2)) == 2
    with pytest.raises(TypeError):
        len(gdcomm.prefetch(batch(i) for i in range(3)))


def test_bad_arguments_say_what_is_wrong(device: EmulatedDevice) -> None:
    for function in (gdcomm.prefetch, gdcomm.offload):
        for depth in (0, -1, 1.5, True):
            with pytest.raises(gdcomm.BufferSpecError, match="depth"):
                function([], depth=depth)
        with pytest.raises(gdcomm.BufferSpecError, match="iterated"):
            function(5)
    with pytest.raises(gdcomm.DeviceError, match="device 7"):
        gdcomm.prefetch([], device=7)
    assert list(gdcomm.prefetch([], device=device.properties().index)) == []


def test_without_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_installed", [])
    monkeypatch.setattr(devices, "_cuda_state", [None])
    for function in (gdcomm.prefetch, gdcomm.offload):
        with pytest.raises(gdcomm.DeviceError, match="pip install"):
            function([batch(0)])


def test_the_interpreter_ends_with_a_prefetch_under_way() -> None:
    program = """
        import threading, time, numpy, gdcomm
        from gdcomm import testing
        testing.emulate()
        def source():
            while True:
                yield numpy.zeros(100_000)
        iterator = gdcomm.prefetch(source())
        next(iterator)
        print("end")
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=30
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


# -- offload -------------------------------------------------------------------------------------


@pytest.mark.parametrize("snapshot", [True, False])
@pytest.mark.parametrize("depth", [1, 3])
def test_offload_brings_every_batch_back(device: EmulatedDevice, depth: int, snapshot: bool) -> None:
    def source() -> Iterator[Any]:
        for i in range(9):
            x = device.zeros((4, 5))
            device.fill(x, i)
            yield {"x": x, "part": x[1:3, ::2], "i": i}

    found = list(gdcomm.offload(source(), depth=depth, snapshot=snapshot))
    for i, item in enumerate(found):
        assert item["i"] == i
        assert isinstance(item["x"], np.ndarray)
        assert device.is_pinned(item["x"].ctypes.data)
        assert (item["x"] == i).all()
        assert (item["part"].shape, (item["part"] == i).all()) == ((2, 3), True)


def test_a_source_may_write_to_its_array_again_after_a_snapshot(device: EmulatedDevice) -> None:
    def source(x: EmulatedArray) -> Iterator[Any]:
        for i in range(7):
            device.fill(x, i)
            yield x
            device.fill(x, -1)

    assert [item[0] for item in gdcomm.offload(source(device.zeros(100)))] == list(range(7))
    stream = device.Stream()
    with stream:
        assert [item[0] for item in gdcomm.offload(source(device.zeros(100)))] == list(range(7))

    def on_side(x: EmulatedArray) -> Iterator[Any]:
        for i in range(4):
            device.fill(x, i, stream)
            yield x
            device.fill(x, -1, stream)

    x = device.zeros(100, stream=stream)
    assert [item[0] for item in gdcomm.offload(on_side(x), stream=stream)] == list(range(4))


def test_offload_goes_ahead_by_its_depth(device: EmulatedDevice) -> None:
    started: list[int] = []

    def source() -> Iterator[Any]:
        for i in range(10):
            started.append(i)
            yield device.zeros(3)

    iterator = gdcomm.offload(source(), depth=3)
    assert not started
    next(iterator)
    assert len(started) == 4


def test_offload_takes_the_results_of_prefetch(device: EmulatedDevice) -> None:
    def work() -> Iterator[Any]:
        for x in gdcomm.prefetch(batch(i) for i in range(12)):
            y = device.empty(x.shape)
            device.launch(None, lambda v, w: np.multiply(w, 2, out=v), y, x)
            yield y
            # x and y are dropped before anything ran

    for i, y in enumerate(gdcomm.offload(work())):
        assert y.tolist() == (batch(i) * 2).tolist()


def test_offloads_exceptions_and_ends(device: EmulatedDevice) -> None:
    closed: list[int] = []

    def source(n: int) -> Iterator[Any]:
        try:
            for i in range(n):
                yield device.array(batch(i))
            raise KeyError("late")
        finally:
            closed.append(n)

    with pytest.raises(KeyError, match="late"):
        list(gdcomm.offload(source(5)))
    with gdcomm.offload(source(50)) as iterator:
        assert next(iterator)[0] == 0
    assert list(iterator) == []
    for _ in gdcomm.offload(source(60)):
        break
    gc.collect()
    assert closed == [5, 50, 60]


# -- misuse, and sources of all kinds ---------------------------------------------------------------


class Mapping(MutableMapping):  # type: ignore[type-arg]
    """A mapping whose copy shares its content."""

    def __init__(self, content: dict[str, Any]) -> None:
        self.content = content

    def __getitem__(self, key: str) -> Any:
        return self.content[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.content[key] = value

    def __delitem__(self, key: str) -> None:
        del self.content[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.content)

    def __len__(self) -> int:
        return len(self.content)


class Cloning(Mapping):
    def __copy__(self) -> Mapping:
        return type(self)(dict(self.content))


class Point(tuple):  # type: ignore[type-arg]
    def __new__(cls, x: Any, y: Any) -> Any:
        return tuple.__new__(cls, (x, y))


class Rows(list):  # type: ignore[type-arg]
    pass


def test_the_sources_own_mappings_are_never_changed(device: EmulatedDevice) -> None:
    item = Mapping({"x": batch(1)})
    with pytest.raises(gdcomm.BufferSpecError, match="shares its content"):
        next(gdcomm.prefetch([item]))
    assert isinstance(item["x"], np.ndarray)
    for made in (Cloning({"x": batch(1)}), UserDict(x=batch(1))):
        (found,) = gdcomm.prefetch([made])
        assert type(found) is type(made)
        assert device.asnumpy(found["x"]).tolist() == batch(1).tolist()
        assert isinstance(made["x"], np.ndarray)


def test_subclasses_of_lists_and_tuples_are_gone_through(device: EmulatedDevice) -> None:
    point, rows, times = gdcomm.prefetch([Point(batch(1), 5), Rows([batch(2)]), time.gmtime(0)])
    assert (type(point), point[1], type(rows)) == (Point, 5, Rows)
    assert device.asnumpy(point[0]).tolist() == batch(1).tolist()
    assert device.asnumpy(rows[0]).tolist() == batch(2).tolist()
    assert times == time.gmtime(0)
    (back,) = gdcomm.offload([Point(device.array(batch(3)), 1)])
    assert (type(back), back[0].tolist()) == (Point, batch(3).tolist())


@pytest.mark.parametrize("at", [0, 1, 3, 7])
@pytest.mark.parametrize("depth", [1, 2, 100])
@pytest.mark.parametrize("way", ["prefetch", "offload"])
def test_an_exception_comes_behind_all_batches_before_it(device: EmulatedDevice, at: int, depth: int, way: str) -> None:
    def source() -> Iterator[Any]:
        for i in range(at):
            yield device.array(batch(i)) if way == "offload" else batch(i)
        raise KeyError("here")

    iterator, found = getattr(gdcomm, way)(source(), depth=depth), []
    with pytest.raises(KeyError, match="here"):
        for item in iterator:
            found.append((item if way == "offload" else device.asnumpy(item))[0])
    assert found == [1000 * i for i in range(at)]
    assert list(iterator) == []


def test_a_batch_that_can_not_go_fails_in_its_place(device: EmulatedDevice) -> None:
    iterator = gdcomm.prefetch([batch(0), np.arange(5, dtype=">i4"), batch(2)], depth=3)
    assert device.asnumpy(next(iterator))[0] == 0
    with pytest.raises(gdcomm.BufferSpecError, match="byte order"):
        next(iterator)


def test_a_sequence_that_computes_its_items_may_use_its_buffer_again(device: EmulatedDevice) -> None:
    class Table(Sequence):  # type: ignore[type-arg]
        buffer = pinned(device, np.zeros(LONG))

        def __len__(self) -> int:
            return 5

        def __getitem__(self, i: Any) -> Any:
            if i >= 5:
                raise IndexError
            self.buffer[:] = i
            return self.buffer

    assert [device.asnumpy(x)[7] for x in gdcomm.prefetch(Table())] == [0, 1, 2, 3, 4]

    class Dataset:  # as a torch.utils.data.IterableDataset, which is no DataLoader
        def __iter__(self) -> Iterator[Any]:
            yield from (Table()[i] for i in range(5))

    Dataset.__module__ = "torch.utils.data.dataset"
    assert [device.asnumpy(x)[7] for x in gdcomm.prefetch(Dataset())] == [0, 1, 2, 3, 4]


def test_a_source_may_use_its_device_buffer_again(device: EmulatedDevice) -> None:
    def source() -> Iterator[Any]:
        buffer = device.zeros((30, 4))
        for i in range(8):
            device.fill(buffer, i)
            yield {"x": buffer, "part": buffer[::2, 1:3]}
            device.fill(buffer, -1)

    for i, item in enumerate(gdcomm.prefetch(source())):
        assert (device.asnumpy(item["x"]) == i).all()
        assert (device.asnumpy(item["part"]) == i).all()


def test_prefetch_of_prefetch_on_a_stream_of_its_own(device: EmulatedDevice) -> None:
    side = device.Stream()
    result = device.zeros(30)
    device.synchronize(None)
    with side:
        inner = gdcomm.prefetch((batch(i) for i in range(30)), depth=1)
        for i, x in enumerate(gdcomm.prefetch(inner, depth=1)):
            device.launch(side, lambda r, v, i=i: r.__setitem__(i, v[7]), result, x)
            del x
    assert device.asnumpy(result, side).tolist() == [batch(i)[7] for i in range(30)]


def test_closing_the_outer_closes_the_inner(device: EmulatedDevice) -> None:
    for outer in (gdcomm.prefetch, gdcomm.offload):
        inner = gdcomm.prefetch(batch(i) for i in range(10**9))
        iterator = outer(inner)
        next(iterator)
        iterator.close()
        wait_for(lambda: not workers())
        assert list(inner) == []


def test_closing_from_another_thread_ends_a_wait(device: EmulatedDevice) -> None:
    for _ in range(30):
        go, found = threading.Event(), []

        def source(go: threading.Event = go) -> Iterator[Any]:
            yield batch(0)
            go.wait(10)

        iterator = gdcomm.prefetch(source())
        next(iterator)
        thread = threading.Thread(target=lambda it=iterator, found=found: found.extend(it), daemon=True)
        thread.start()
        timer = threading.Timer(0.002, go.set)
        timer.start()
        iterator.close()
        thread.join(5)
        timer.join()
        assert not thread.is_alive()


def test_threads_share_an_iterator(device: EmulatedDevice) -> None:
    iterator, found = gdcomm.prefetch(batch(i) for i in range(40)), []
    threads = [threading.Thread(target=lambda: found.extend(iterator), daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)
    assert len(found) == len({id(x) for x in found}) == 40


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_is_told_instead_of_waiting(device: EmulatedDevice) -> None:
    iterator = gdcomm.prefetch([batch(i) for i in range(50)])
    next(iterator)
    wait_for(lambda: len(iterator._pipe.ready) == 2)
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(20)
            iterator.close()
            next(iterator)
        except gdcomm.DeviceError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(iterator)) == 49


def test_streams_and_depths_are_checked_at_once(device: EmulatedDevice) -> None:
    for function in (gdcomm.prefetch, gdcomm.offload):
        with pytest.raises(gdcomm.BufferSpecError, match="stream"):
            function([], stream="none")
        for depth in (float("nan"), "2", None):
            with pytest.raises(gdcomm.BufferSpecError, match="depth"):
                function([], depth=depth)  # type: ignore[arg-type]
        assert list(function([1], depth=np.int64(1 << 40))) == [1]  # type: ignore[arg-type]


def test_offload_goes_on_without_page_locked_memory(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    for error in (gdcomm.DeviceError("none left"), gdcomm.PinnedMemoryError("over")):

        def refuse(*_: Any, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr("gdcomm.transfer.prefetch.pinned_empty", refuse)
        assert [x[1] for x in gdcomm.offload(device.array(batch(i, LONG)) for i in range(4))] == [1, 1001, 2001, 3001]


def test_a_hundred_times_over_nothing_is_left(device: EmulatedDevice) -> None:
    pool = pool_of(device)

    def use(n: int) -> None:
        for _ in range(n):
            list(gdcomm.prefetch([batch(0, LONG)] * 2))
            next(gdcomm.prefetch([batch(0, LONG)] * 5))
            list(gdcomm.offload([device.zeros(LONG)] * 2))
            next(gdcomm.offload([device.zeros(LONG)] * 5))
            with pytest.raises(KeyError):
                list(gdcomm.prefetch({}[key] for key in "a"))

    def state() -> tuple[int, int]:
        wait_for(lambda: not workers())
        for stream in list(device._streams.values()):
            stream.synchronize()
        settle(device)
        return pool.stats()["leased"], pool.stats()["pending"]

    use(2)
    before = state()
    use(100)
    assert state() == before == (0, 0)
