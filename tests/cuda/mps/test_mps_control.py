"""The control program's commands: what they answer, and every way in which they may not."""

import os
from pathlib import Path

import pytest

from smpart.errors import BackendUnavailable
from smpart.partition.cuda.mps_control import Client, Control, NoDaemon, Partition, same_partition
from smpart.partition.cuda.mps_errors import MPS_ERRORS, explain, find

UUID = "GPU-74d43ed3-cdf7-e667-3644-bf5b4f46ed65"
PART = f"{UUID}/Dx4AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"

CALLS = {
    "get_server_list": lambda control: control.servers(),
    "start_server": lambda control: control.start_server(7),
    "get_server_status": lambda control: control.server_status(7),
    "get_client_list": lambda control: control.clients(7),
    "ps": lambda control: control.processes(),
    "get_default_active_thread_percentage": lambda control: control.default_percentage(),
    "get_active_thread_percentage": lambda control: control.percentage(7),
    "terminate_client": lambda control: control.terminate_client(7, 8),
    "sm_partition": lambda control: control.add_partition(UUID, 3),
    "lspart": lambda control: control.partitions(),
    "quit": lambda control: control.quit(0.1),
    "-d": lambda control: control.launch(UUID),
}
ANY_REPLY = {"start_server", "quit", "-d"}
"""Their manual page promises no reply."""


@pytest.fixture
def control(fake_mps):
    return Control(fake_mps.base, fake_mps.base, program=fake_mps.program, timeout_s=20)


@pytest.fixture
def saying(tmp_path):
    """A control of a program that always says the same."""

    def make(reply, status=0):
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f'#!/bin/sh\ncat > "$0.command"\ncat "$0.reply"\nexit {status}\n')
        program.chmod(0o700)
        Path(f"{program}.reply").write_text(reply)
        return Control(tmp_path, program=str(program), timeout_s=20)

    return make


@pytest.mark.parametrize("name", CALLS)
def test_a_refusal_is_an_error_that_quotes_command_and_reply(saying, name):
    control = saying("it is\nTuesday", 3)
    with pytest.raises(BackendUnavailable, match=rf"MPS refused `[^`]*{name}[^`]*` \(it is Tuesday\)"):
        CALLS[name](control)


@pytest.mark.parametrize("name", sorted(set(CALLS) - ANY_REPLY))
def test_a_reply_of_another_form_is_an_error_although_the_status_is_0(saying, name):
    control = saying("Failed for some reason")
    with pytest.raises(BackendUnavailable, match="Failed for some reason"):
        CALLS[name](control)


def test_no_daemon_is_told_apart(control):
    with pytest.raises(NoDaemon, match=rf"no MPS daemon answers in {control.pipe}"):
        control.servers()


@pytest.mark.parametrize(
    ("call", "command"),
    [
        # As in NVIDIA's guide, "nvidia-cuda-mps-control".
        (lambda control: control.start_server(1000), "start_server -uid 1000"),
        (lambda control: control.terminate_client(6472, 9741), "terminate_client 6472 9741"),
        (lambda control: control.add_partition(UUID, 7), f"sm_partition add {UUID} 7"),
        (lambda control: control.quit(2), "quit -t 2"),
    ],
)
def test_commands_are_written_as_documented(saying, call, command):
    control = saying("0" if "client" in command else PART)
    call(control)
    assert (control.pipe / "nvidia-cuda-mps-control.command").read_text() == f"{command}\n"


@pytest.mark.parametrize("name", ["quit", "-d"])
def test_silence_ends_with_the_time_out_and_with_the_program(fake_mps, name):
    control = Control(fake_mps.base, fake_mps.base, program=fake_mps.program, timeout_s=0.3)
    fake_mps.fault(name, hang=True)
    with pytest.raises(BackendUnavailable, match=rf"did not answer `[^`]*{name}[^`]*` within 0\.\d s: look"):
        CALLS[name](control)
    assert fake_mps.processes() == []


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ("Permission denied", rf"must belong to this user \(uid {os.getuid()}\)"),
        ("Unknown command: lspart", "driver is too old for it"),
        ("nvidia-cuda-mps-control: invalid option -- 'S'", "driver is too old for it"),
        ("An instance of this daemon is already running", "another daemon has"),
        ("CUDA_ERROR_MPS_MAX_CLIENTS_REACHED", "use fewer workers"),
        ("failed with error 807", "until every client has ended"),
        ("CUDA_ERROR_OUT_OF_MEMORY", r"\(CUDA_ERROR_OUT_OF_MEMORY\)$"),
        ("", r"\(exit status 1, no reply\)$"),
    ],
)
def test_known_replies_are_explained(saying, reply, words):
    with pytest.raises(BackendUnavailable, match=words):
        saying(reply, 1).partitions()


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(BackendUnavailable, match=r"no-such-program was not found.*nvidia-compute-utils"):
        Control(tmp_path, program="no-such-program").servers()


@pytest.mark.parametrize("content", [b"\x7fELF but not really", b"#!/no/such/interpreter\n"])
def test_a_program_that_cannot_run_is_named(tmp_path, content):
    program = tmp_path / "nvidia-cuda-mps-control"
    program.write_bytes(content)
    program.chmod(0o700)
    with pytest.raises(BackendUnavailable, match="cannot be run: "):
        Control(tmp_path, program=str(program)).servers()


@pytest.mark.parametrize(
    ("name", "reply", "value"),
    [
        # As NVIDIA's guide and drivers' own output show them.
        ("get_server_list", "", ()),
        ("get_server_list", "28941\n30112", (28941, 30112)),
        ("get_server_status", "Server 7 is INITIALIZING", "INITIALIZING"),
        ("get_default_active_thread_percentage", "25.0", 25.0),
        ("terminate_client", "0", None),
        ("terminate_client", "CUDA_SUCCESS", None),
        ("sm_partition", PART, PART),
        ("sm_partition", f"Partition {PART} created", PART),
        ("ps", "", ()),
        (
            "ps",
            "PID ID SERVER DEVICE NAMESPACE COMMAND\n\n9741 0 6472 GPU-cb1213a3-d6a4-be7f 4026531836 ./nbody -n 5\n\n"
            "9743 0 6472 GPU-cb1213a3-d6a4-be7f 4026531836",
            (
                Client(9741, 6472, "GPU-cb1213a3-d6a4-be7f", "./nbody -n 5"),
                Client(9743, 6472, "GPU-cb1213a3-d6a4-be7f", ""),
            ),
        ),
        (
            "lspart",
            "GPU                Partition   free   used   free  used  clients\n"
            "                               chunk  chunk  SM    SM\n"
            "GPU-74d43ed3       -           0      14     0     56    -\n"
            "GPU-74d43ed3       Dx4AAAAA    -      7      -     28    Yes\n"
            "GPU-74d43ed3       Ex4BBBBB    -      7      -     28    ?\n",
            (Partition("Dx4AAAAA", 7, 28, True), Partition("Ex4BBBBB", 7, 28, None)),
        ),
    ],
)
def test_replies_are_read(saying, name, reply, value):
    assert CALLS[name](saying(reply)) == value


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("ps", "PID ID SERVER DEVICE NAMESPACE COMMAND\nx 0 6472 GPU-c 40 ./nbody"),
        ("ps", "PID ID SERVER DEVICE NAMESPACE COMMAND\n9741 0"),
        ("lspart", "GPU Partition free used free used clients\nGPU-74 Dx4 - seven - 28 Yes"),
        ("lspart", "GPU Partition free used free used clients\nGPU-74 Dx4 - 7"),
        ("lspart", ""),
        ("get_default_active_thread_percentage", "101"),
    ],
)
def test_broken_tables_are_refused(saying, name, reply):
    with pytest.raises(BackendUnavailable, match="MPS refused"):
        CALLS[name](saying(reply))


def test_a_daemon_gets_its_directories_and_device_and_no_client_limits(fake_mps, control, monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "10")
    monkeypatch.setenv("CUDA_MPS_LOG_DIRECTORY", "/elsewhere")
    control.launch(UUID)
    try:
        assert fake_mps.log("environment") == [
            {
                "CUDA_VISIBLE_DEVICES": UUID,
                "CUDA_MPS_PIPE_DIRECTORY": str(fake_mps.base),
                "CUDA_MPS_LOG_DIRECTORY": str(fake_mps.base),
            }
        ]
        assert control.default_percentage() == 100
        with pytest.raises(BackendUnavailable, match="another daemon has"):
            control.launch(UUID)
    finally:
        control.quit(1)


def test_names_cut_short_are_the_same_partition():
    assert same_partition(PART, Partition("Dx4AAAAA", 7, 28, None))
    assert not same_partition(PART, Partition("Ex4AAAAA", 7, 28, None))


def test_errors_have_the_names_that_the_driver_header_gives_them():
    cuda = pytest.importorskip("cuda.bindings.driver")
    for code, (name, _) in MPS_ERRORS.items():
        assert int(getattr(cuda.CUresult, name)) == code
        assert find(f"it failed: {name}!") == find(f"error {code}") == code
        assert explain(code).startswith(f"{name} ({code}): ")


def test_only_replies_that_name_an_error_are_one():
    assert find("805 clients") is None and find("error 9") is None and find("CUDA_ERROR_UNKNOWN") is None
