"""The process that workers are forked from, and the children it forks."""

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from smpart.errors import SmpartError
from smpart.runtime.children import Zygote

PATIENCE = 60.0


@pytest.fixture(autouse=True)
def toy_children_can_be_imported(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def run(target: str, *fds: int, timeout: float = PATIENCE) -> int | None:
    child = Zygote.shared().fork(f"toy_children:{target}", fds)
    try:
        return child.join(timeout)
    finally:
        child.kill()
        child.join(None)
        child.close()


def reported(target: str) -> str:
    reader, writer = os.pipe()
    try:
        assert run(target, writer) == 0
        return os.read(reader, 1 << 16).decode()
    finally:
        os.close(reader)
        os.close(writer)


def test_one_zygote_for_all_and_it_stays():
    assert Zygote.shared() is Zygote.shared()
    assert reported("parent") == reported("parent") == str(Zygote.shared().pid)


def test_it_forks_with_one_thread_and_torch_imported():
    assert reported("state") == "True, True, 1"
    assert len(list(Path(f"/proc/{Zygote.shared().pid}/task").iterdir())) == 1


def test_openmp_works_in_children_one_after_another():
    assert [reported("openmp") for _ in range(3)] == ["2"] * 3


@pytest.mark.parametrize(("target", "code"), [("fine", 0), ("leaves", 5), ("raises", 1), ("killed", -signal.SIGKILL)])
def test_exit_codes(target, code):
    assert run(target) == code


def test_a_target_that_does_not_exist():
    assert run("nowhere") == 1


def test_a_running_child_has_no_exit_code_and_can_be_killed_twice():
    child = Zygote.shared().fork("toy_children:waits", [])
    assert child.join(0) is None
    child.kill()
    assert child.join(PATIENCE) == -signal.SIGKILL
    child.kill()
    child.close()


def test_a_child_has_the_descriptors_it_was_given_and_no_others():
    other = Zygote.shared().fork("toy_children:waits", [])
    try:
        # stdin, stdout, stderr, the pipe, and the listing itself
        assert len(reported("descriptors").split()) == 5
    finally:
        other.kill()
        other.join(None)
        other.close()


def test_requests_from_many_threads_at_once():
    codes: list[int | None] = []
    threads = [threading.Thread(target=lambda: codes.append(run("leaves"))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [5] * 8


def test_ended_children_are_reaped():
    for _ in range(3):
        run("fine")
    assert psutil.Process(Zygote.shared().pid).children() == []


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_of_this_process_leaves_its_zygote_alone():
    zygote = Zygote.shared()
    pid = os.fork()
    if pid == 0:
        os._exit(0 if Zygote._shared is None and zygote._control.fileno() == -1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert Zygote.shared() is zygote
    assert run("fine") == 0


def test_an_interpreter_that_cannot_start_is_a_clear_error(monkeypatch):
    monkeypatch.setattr("sys.executable", "/bin/false")
    broken = Zygote()
    with pytest.raises(SmpartError, match="ended with exit code 1") as caught:
        broken.fork("toy_children:fine", [])
    assert "\n" not in str(caught.value)
    broken.close()
    assert not broken.alive


def test_no_interpreter(monkeypatch):
    monkeypatch.setattr("sys.executable", "")
    with pytest.raises(SmpartError, match="interpreter"):
        Zygote()
