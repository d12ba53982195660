import os
import random
import socket
import threading

import pytest

from smpart.runtime.channel import Channel


@pytest.fixture
def pair():
    engine, worker = socket.socketpair()
    channels = Channel(engine, blocking=False), Channel(worker, blocking=True)
    yield channels
    for channel in channels:
        channel.close()


def test_messages_keep_their_order_and_values(pair):
    engine, worker = pair
    rng = random.Random(1)
    messages = [(i, rng.randbytes(rng.randrange(2000))) for i in range(50)]
    for message in messages:
        engine.send(message)
    assert [worker.receive() for _ in messages] == messages
    for message in messages[:5]:
        worker.send(message)
    assert engine.pump() == messages[:5]
    assert engine.pump() == []


def test_a_message_larger_than_the_socket_does_not_block_the_engine(pair):
    engine, worker = pair
    large = os.urandom(8 << 20)
    engine.send(large)
    assert engine.unsent
    got = []
    reader = threading.Thread(target=lambda: got.append(worker.receive()))
    reader.start()
    while engine.unsent:
        assert engine.pump() == []
    reader.join()
    assert got == [large]


def test_a_large_answer_arrives_in_pieces(pair):
    engine, worker = pair
    large = os.urandom(8 << 20)
    writer = threading.Thread(target=worker.send, args=(large,))
    writer.start()
    got = []
    while not got:
        got = engine.pump()
    writer.join()
    assert got == [large]


def test_what_was_said_before_hanging_up_is_heard(pair):
    engine, worker = pair
    worker.send("last words")
    worker.close()
    assert engine.pump() == ["last words"]
    assert engine.closed
    engine.send("nobody listens")
    assert engine.pump() == []


def test_the_worker_notices_even_if_a_copy_of_the_socket_lives(pair):
    engine, worker = pair
    copy = os.dup(engine.fileno())
    try:
        engine.close()
        with pytest.raises(EOFError):
            worker.receive()
    finally:
        os.close(copy)


def test_half_a_message_at_the_end_is_no_message():
    engine, worker = socket.socketpair()
    channel = Channel(engine, blocking=False)
    with worker:
        worker.sendall((100).to_bytes(8, "little") + b"cut short")
    assert channel.pump() == []
    assert channel.closed
    channel.close()


def test_a_message_that_cannot_be_pickled_leaves_the_stream_intact(pair):
    engine, worker = pair
    with pytest.raises(Exception, match="lambda"):
        engine.send(lambda: None)
    engine.send("fine")
    assert worker.receive() == "fine"
