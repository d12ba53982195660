"""Contenders: they end by themselves or when told to, keep to their duty, and touch what they say."""

from typing import Any

import numpy as np
import pytest

ENDLESS = np.int64(1 << 40)


def arithmetic(stop: Any, bursts: Any, duty: int, done: Any) -> list[Any]:
    return [stop, bursts, np.int32(4), np.int32(duty), done, np.zeros(1, np.float32)]


def memory(stop: Any, bursts: Any, duty: int, done: Any, buffer: Any = None, batch: int = 2, stores: int = 0) -> Any:
    buffer = aligned(64) if buffer is None else buffer
    assert buffer.ctypes.data % 16 == 0
    rest = [np.int32(batch), np.int32(stores), np.int32(duty), done, np.zeros(1, np.uint32)]
    return [stop, bursts, buffer, np.int64(len(buffer)), *rest]


KINDS = {"arithmetic": arithmetic, "memory": memory}


@pytest.mark.parametrize("kind", KINDS)
def test_ends_after_its_bursts_although_nobody_stops_it(host_gpu: Any, kind: str) -> None:
    host_gpu.device(2)
    done = np.zeros(3, np.int64)
    host_gpu.queue(kind, 3, 32, KINDS[kind](np.zeros(1, np.int32), np.int64(5), 100, done), range(2))
    host_gpu.run()
    assert done.tolist() == [5, 5, 5]


@pytest.mark.parametrize("duty", [100, 30, 1, 0])
@pytest.mark.parametrize("kind", KINDS)
def test_stops_soon_after_the_flag(host_gpu: Any, kind: str, duty: int) -> None:
    host_gpu.device(3)
    stop, done, after = np.zeros(1, np.int32), np.zeros(2, np.int64), 25_500
    host_gpu.queue(kind, 2, 32, KINDS[kind](stop, ENDLESS, duty, done), range(2), stream=0)
    host_gpu.queue("raise_flag", 1, 1, [stop, np.uint64(after)], {2}, stream=1)
    assert after <= host_gpu.run() < after + 1_000
    assert (done > 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_raised_flag_lets_nothing_begin(host_gpu: Any, kind: str) -> None:
    host_gpu.device(1)
    done = np.full(1, -1, np.int64)
    host_gpu.queue(kind, 1, 32, KINDS[kind](np.ones(1, np.int32), ENDLESS, 100, done), range(1))
    host_gpu.run()
    assert done.tolist() == [0]


@pytest.mark.parametrize("duty", [50, 25, 10])
def test_duty_stretches_the_time_of_the_same_work(host_gpu: Any, duty: int) -> None:
    took = {}
    for share in (100, duty):
        host_gpu.device(1)
        args = memory(np.zeros(1, np.int32), np.int64(10), share, np.zeros(1, np.int64), batch=100)
        host_gpu.queue("memory", 1, 32, args, range(1))
        took[share] = host_gpu.run()
    assert took[duty] / took[100] == pytest.approx(100 / duty, rel=0.05)


def aligned(vectors: int) -> Any:
    whole = np.zeros(vectors * 4 + 4, np.uint32)
    start = -whole.ctypes.data % 16 // 4
    return whole[start : start + vectors * 4].reshape(vectors, 4)


def test_reading_changes_nothing_and_writing_reaches_the_whole_working_set(host_gpu: Any) -> None:
    for stores in (0, 1):
        host_gpu.device(1)
        buffer = aligned(64)
        buffer[:] = np.arange(256).reshape(64, 4)
        before, done = buffer.copy(), np.zeros(1, np.int64)
        args = memory(np.zeros(1, np.int32), np.int64(3), 100, done, buffer, batch=2, stores=stores)
        host_gpu.queue("memory", 1, 32, args, range(1))
        host_gpu.run()
        before[:, 0] ^= stores  # 3 bursts x 32 threads x 2 vectors: each of 64 vectors three times
        assert (buffer == before).all()


@pytest.mark.parametrize("vectors", [1, 7, 100])
def test_a_working_set_of_any_size_is_not_left(host_gpu: Any, vectors: int) -> None:
    host_gpu.device(2)
    whole = aligned(vectors + 2)
    done = np.zeros(2, np.int64)
    args = memory(np.zeros(1, np.int32), np.int64(4), 100, done, whole[1:-1], batch=5, stores=1)
    host_gpu.queue("memory", 2, 64, args, range(2))
    host_gpu.run()
    assert (whole[[0, -1]] == 0).all()
