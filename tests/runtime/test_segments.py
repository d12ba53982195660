import os
import socket
from pathlib import Path

import numpy as np
import pytest
import torch

from smpart.errors import SmpartError
from smpart.partition.cgroups import memory_available
from smpart.runtime.segments import SharedSegment


def open_fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_zeroed_shared_and_of_the_size_asked_for():
    segment = SharedSegment.create(10_000, "board")
    other = SharedSegment.attach(os.dup(segment.fd))
    assert len(segment.buffer) == segment.size == other.size == 10_000
    assert not any(segment.buffer)
    segment.buffer[9_999] = 7
    assert other.buffer[9_999] == 7


def test_pages_take_memory_when_touched():
    segment = SharedSegment.create(1 << 30, "kv")
    assert segment.resident() == 0
    segment.buffer[1 << 29] = 1
    assert 0 < segment.resident() <= 2 << 20


def test_travels_over_a_socket_without_a_name():
    segment = SharedSegment.create(64, "kv")
    ours, theirs = socket.socketpair()
    with ours, theirs:
        socket.send_fds(ours, [b"x"], [segment.fd])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
    np.frombuffer(SharedSegment.attach(fds[0]).buffer, dtype=np.int64)[:] = 5
    assert np.frombuffer(segment.buffer, dtype=np.int64).tolist() == [5] * 8


def test_not_inherited_by_programs_and_named_for_the_reader_of_maps():
    segment = SharedSegment.create(64, "kv")
    assert not os.get_inheritable(segment.fd)
    assert "smpart-kv" in str(Path(f"/proc/self/fd/{segment.fd}").readlink())


def test_more_than_there_is_is_refused_in_one_clear_line():
    with pytest.raises(SmpartError, match=r"^weights needs [\d,]+ MiB of memory and [\d,]+ MiB are available: .*$"):
        SharedSegment.create(memory_available() * 2, "weights")


def test_memory_that_the_filling_frees_counts():
    SharedSegment.create(size := memory_available() + (1 << 20), "weights", frees=size).close()


@pytest.mark.parametrize("size", [0, -1])
def test_nonsense_size(size):
    with pytest.raises(ValueError, match="positive"):
        SharedSegment.create(size, "kv")


def test_arrays_outlive_close_and_descriptors_do_not():
    before = open_fds()
    segment = SharedSegment.create(4096, "kv", huge_pages=True)
    tensor = torch.frombuffer(segment.buffer, dtype=torch.uint8)
    array = np.frombuffer(segment.buffer, dtype=np.uint8)
    segment.close()
    segment.close()
    tensor[3] = 9
    assert array[3] == 9
    assert segment.fd == -1
    del segment, tensor, array
    assert open_fds() == before


def test_a_forgotten_segment_closes_itself():
    before = open_fds()
    SharedSegment.create(4096, "kv")
    assert open_fds() == before
