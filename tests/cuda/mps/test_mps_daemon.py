"""Our own daemon and somebody else's: started, used, ended, and nothing left of it whatever happens."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from smpart.errors import BackendUnavailable
from smpart.partition.cuda import mps_daemon
from smpart.partition.cuda.mps_control import PID_FILE, Control
from smpart.partition.cuda.mps_daemon import ForeignDaemon, OwnDaemon, Process, foreign_pipe, is_live, sweep

UUID = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"


@pytest.fixture
def own(fake_mps):
    def make(**options):
        options = {"base": fake_mps.base, "program": fake_mps.program, "timeout_s": 20, "stop_s": 3} | options
        return OwnDaemon(UUID, **options)

    return make


@pytest.fixture
def foreign(fake_mps):
    """A daemon that somebody else started: its control."""
    pipe = fake_mps.base / "theirs"
    pipe.mkdir()
    control = Control(pipe, pipe, program=fake_mps.program, timeout_s=20)
    control.launch(UUID)
    control.start_server(os.getuid())
    yield control
    fake_mps.mend()
    control.quit(1)


def test_it_is_ready_when_started_and_gone_when_stopped(fake_mps, own):
    with own() as daemon:
        daemon.start()  # a second time changes nothing
        control = daemon.control
        home = control.pipe.parent
        assert [path.stat().st_mode & 0o777 for path in (home, home / "pipe", home / "log")] == [0o700] * 3
        (server,) = control.servers()
        assert control.server_status(server) == "ACTIVE" and control.percentage(server) == 100
        assert is_live(control.pipe) and len(fake_mps.processes()) == 2
        assert len(os.fsencode(control.pipe / "control_privileged")) <= 107
    assert fake_mps.log("launch") == [["-d"]] and fake_mps.log("environment")[0]["CUDA_VISIBLE_DEVICES"] == UUID
    assert fake_mps.processes() == [] and fake_mps.homes() == []
    assert not is_live(control.pipe)
    daemon.stop()  # a second time does nothing
    with pytest.raises(BackendUnavailable, match="not running: start it first"):
        daemon.control  # noqa: B018


@pytest.mark.parametrize(
    ("static", "command", "fault", "words"),
    [
        (False, "-d", {"reply": "Cannot bind"}, "Cannot bind"),
        (False, "-d", {"die": True}, "ended as soon as it had started"),
        (False, "-d", {"mute": True}, "did not answer within 0.5 s"),
        (False, "start_server", {"reply": "Failed", "status": 1}, r"refused `start_server.*log ends with: \[control\]"),
        (False, "start_server", {"die": True}, "no reply.*CUDA_ERROR_OUT_OF_MEMORY"),
        (False, "get_server_list", {"reply": "", "status": 0}, "took no clients within 0.5 s"),
        (False, "get_server_status", {"reply": "FAULT", "status": 0}, "took no clients within 0.5 s"),
        (True, "-d", {"cuda": "13.0"}, "invalid option -- 'S'.*driver is too old"),
    ],
)
def test_a_start_that_fails_says_why_and_leaves_nothing(fake_mps, own, static, command, fault, words):
    fake_mps.script(cuda=fault.pop("cuda", "13.1"))
    if fault:
        fake_mps.fault(command, **fault)
    hopeless = "within" in words or "mute" in fault
    daemon = own(static=static, start_s=0.5 if hopeless else 30)
    with pytest.raises(BackendUnavailable, match=words):
        daemon.start()
    assert fake_mps.processes() == [] and fake_mps.homes() == []
    fake_mps.mend()


def test_a_launch_that_hangs_leaves_nothing(fake_mps, own):
    fake_mps.fault("-d", hang=True)
    with pytest.raises(BackendUnavailable, match="did not answer"):
        own(timeout_s=0.3).start()
    assert fake_mps.processes() == [] and fake_mps.homes() == []


def test_an_interrupted_start_leaves_nothing(fake_mps, own, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Control, "server_status", interrupt)
    with pytest.raises(KeyboardInterrupt):
        own().start()
    assert fake_mps.processes() == [] and fake_mps.homes() == []


@pytest.mark.parametrize(
    ("stubborn", "fault"), [(["quit"], {}), (["quit", "SIGTERM"], {}), ([], {"reply": "busy", "status": 1})]
)
def test_a_daemon_that_will_not_quit_is_killed(fake_mps, own, caplog, stubborn, fault):
    fake_mps.script(stubborn=stubborn)
    daemon = own(stop_s=0.3)
    daemon.start()
    if fault:
        fake_mps.fault("quit", **fault)
    daemon.stop()
    assert fake_mps.processes() == [] and fake_mps.homes() == []
    assert bool(fault) == ("did not quit when asked" in caplog.text)


def test_a_daemon_that_died_leaves_its_server_and_both_are_cleaned_up(fake_mps, own):
    daemon = own(stop_s=1)
    daemon.start()
    pid = int((daemon.control.pipe / PID_FILE).read_text())
    os.kill(pid, signal.SIGKILL)
    daemon.stop()
    assert fake_mps.processes() == [] and fake_mps.homes() == []


def test_what_cannot_be_killed_is_named(fake_mps, own, monkeypatch):
    fake_mps.script(stubborn=["quit"])
    daemon = own(stop_s=0.1)
    daemon.start()
    (server,) = daemon.control.servers()
    with monkeypatch.context() as patch:
        patch.setattr(Process, "signal", lambda self, number: None)
        with pytest.raises(BackendUnavailable, match=rf"MPS process .*\b{server}\b.*end it by hand"):
            daemon.stop()
    for pid in fake_mps.processes():
        os.kill(pid, signal.SIGKILL)
    for home in fake_mps.homes():
        mps_daemon.shutil.rmtree(home)


def test_a_process_that_ends_without_stopping_it_stops_it(fake_mps):
    script = (
        "import os\nfrom pathlib import Path\nfrom smpart.partition.cuda.mps_daemon import OwnDaemon\n"
        f"OwnDaemon({UUID!r}, base=Path({str(fake_mps.base)!r}), program={fake_mps.program!r}).start()\n"
        "child = os.fork()\n"  # a child's exit is none of the daemon's business
        "if child == 0:\n    raise SystemExit(0)\n"
        "os.waitpid(child, 0)\n"
        f"print(len(os.listdir({str(fake_mps.base)!r})))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("1\n", "")
    assert fake_mps.homes() == [] and fake_mps.processes() == []


def test_a_forked_process_leaves_its_parents_daemon_alone(own):
    daemon = own()
    daemon.start()
    daemon._stop_at_exit(os.getpid() + 1)
    assert is_live(daemon.control.pipe)
    daemon._stop_at_exit(os.getpid())


def test_the_next_one_removes_what_a_killed_owner_left(fake_mps, own):
    script = (
        "import os, signal\nfrom pathlib import Path\nfrom smpart.partition.cuda.mps_daemon import OwnDaemon\n"
        f"OwnDaemon({UUID!r}, base=Path({str(fake_mps.base)!r}), program={fake_mps.program!r}).start()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=60)
    (orphan,) = fake_mps.homes()
    before = set(fake_mps.processes())
    assert len(before) == 2
    with own() as daemon:
        assert fake_mps.homes() == [daemon.control.pipe.parent] != [orphan]
        assert not before & set(fake_mps.processes())


def homes_name(owner, namespace=None):
    return f"smpart-mps-{namespace or mps_daemon._namespace()}-{owner.pid}-{owner.started}-abcdefgh"


def test_sweeping_leaves_alone_what_may_have_an_owner(fake_mps):
    me = Process.of(os.getpid())
    dead = Process(me.pid, me.started - 1)  # an earlier process with this id
    for name in (homes_name(me), homes_name(dead, 1), "smpart-mps-notes", homes_name(dead)):
        (fake_mps.base / name / "pipe").mkdir(parents=True)
    sweep(fake_mps.base, program=fake_mps.program)
    assert {home.name for home in fake_mps.homes()} == {homes_name(me), homes_name(dead, 1), "smpart-mps-notes"}
    for home in fake_mps.homes():
        mps_daemon.shutil.rmtree(home)


def test_sweeping_never_ends_a_stranger_that_a_process_id_file_names(fake_mps):
    me = Process.of(os.getpid())
    home = fake_mps.base / homes_name(Process(me.pid, me.started - 1))
    (home / "pipe").mkdir(parents=True)
    (home / "pipe" / PID_FILE).write_text(f"{me.pid}\n")
    sweep(fake_mps.base, program=fake_mps.program, stop_s=0.1)
    assert fake_mps.homes() == []  # and this process still runs


def test_sweeping_goes_on_after_one_that_cannot_be_ended(fake_mps, monkeypatch, caplog):
    me = Process.of(os.getpid())
    home = fake_mps.base / homes_name(Process(me.pid, me.started - 1))
    home.mkdir()

    def refuse(*_):
        raise BackendUnavailable("MPS process 7 could not be ended")

    with monkeypatch.context() as patch:
        patch.setattr(mps_daemon, "_end", refuse)
        sweep(fake_mps.base, program=fake_mps.program)
    assert "stays: MPS process 7" in caplog.text and fake_mps.homes() == [home]
    home.rmdir()


def test_a_place_is_found_or_the_reasons_are_told(fake_mps, own, monkeypatch):
    long = fake_mps.base / ("x" * 90)
    long.mkdir()
    with pytest.raises(BackendUnavailable, match=r"too long a path for sockets\): set TMPDIR"):
        own(base=long).start()
    with pytest.raises(BackendUnavailable, match="No such file or directory"):
        own(base=fake_mps.base / "absent").start()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(fake_mps.base))
    assert mps_daemon._bases()[0] == fake_mps.base
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert len(mps_daemon._bases()) == 1


def test_a_foreign_daemon_is_used_and_left_running(fake_mps, foreign):
    daemon = ForeignDaemon(foreign.pipe, program=fake_mps.program, timeout_s=20)
    daemon.start()
    before = len(fake_mps.log("command"))
    daemon.stop()
    assert is_live(foreign.pipe) and len(daemon.control.servers()) == 1
    used = {line.split()[0] for line in fake_mps.log("command")[1:before]}
    assert used == {"get_default_active_thread_percentage", "get_server_list", "get_active_thread_percentage"}


def test_a_foreign_daemon_that_limits_clients_is_refused(fake_mps, foreign):
    fake_mps.fault("get_active_thread_percentage", reply="40.0", status=0)
    with pytest.raises(BackendUnavailable, match=r"at most 40 % of the device: ask its owner"):
        ForeignDaemon(foreign.pipe, program=fake_mps.program, timeout_s=20).start()


def test_where_cuda_programs_look_for_a_daemon():
    assert foreign_pipe({}) == foreign_pipe({"CUDA_MPS_PIPE_DIRECTORY": ""}) == Path("/tmp/nvidia-mps")
    assert foreign_pipe({"CUDA_MPS_PIPE_DIRECTORY": "/run/mps"}) == Path("/run/mps")


def test_processes_are_told_apart_by_their_start(caplog):
    me = Process.of(os.getpid())
    assert me.runs() and not Process(me.pid, me.started + 1).runs()
    child = subprocess.Popen(["sleep", "60"])
    process = Process.of(child.pid)
    process.signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Process.of(child.pid) is None  # ended, though not reaped
    child.wait()
    process.signal(signal.SIGKILL)
    assert caplog.text == ""


def test_a_signal_that_is_not_allowed_is_logged(monkeypatch, caplog):
    def refuse(*_):
        raise PermissionError("not yours")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(os, "kill", refuse)
        Process.of(os.getpid()).signal(signal.SIGTERM)
    assert "cannot be ended: not yours" in caplog.text


def test_waiting_ends_in_time():
    begun = time.monotonic()
    assert mps_daemon._await(lambda: None, begun) is None
