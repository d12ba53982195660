"""Green contexts on the fake driver as `doctor` and `auto` see them; these take torch."""

import contextlib

import pytest
from fake_cuda import Fake

from smpart.bench.doctor import examine, require_realised
from smpart.bench.realise import realise
from smpart.engine.staff import hire, why_no_model
from smpart.errors import BackendUnavailable, SmpartError
from smpart.partition import Side, Split, open_backend
from smpart.partition.cuda.gpu import Gpu
from smpart.partition.green import Green, GreenPlaces


@pytest.mark.drivers("13.0", "12.4")
def test_doctor_makes_every_split_and_says_what_came_of_it(fake: Fake) -> None:
    facts = realise(Green())
    splits = [str(split) for split in Green().splits()]
    assert [each["split"] for each in facts["realised"]] == splits
    assert all(each["as_asked"] for each in facts["realised"])
    middle = facts["realised"][8]
    assert middle["split"] == "64/68" and middle["units"] == {"prefill": 64, "decode": 68}
    assert len(middle["prefill"]) == 64 and len(middle["decode"]) == 68
    assert facts["nested"] is True and facts["sms_looked_at"] == "yes" and facts["refused"] == {}
    assert facts["switch_us"] > 0
    assert not fake.live()


@pytest.mark.drivers("13.0")
def test_doctor_says_when_lanes_share_sms(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def overlapping(api: object, gpu: Gpu, places: GreenPlaces) -> dict[tuple[Side, Split], frozenset[int]]:
        return {(side, split): frozenset(range(split.units(side))) for side, split in places.all()}

    monkeypatch.setattr("smpart.bench.realise.read_sms", overlapping)
    facts = realise(Green())
    assert [each["as_asked"] for each in facts["realised"]] == [True, *[False] * 15, True]
    with pytest.raises(SmpartError, match=r"splits 8/124, .* were not realised as asked"):
        require_realised({"backends": [{"name": "green", **facts}]})


@pytest.mark.drivers("13.0")
def test_auto_passes_over_a_gpu_that_this_torch_cannot_use(
    fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("torch.version.cuda", None)
    with caplog.at_level("INFO", logger="smpart"):
        assert open_backend("auto", why_no_model).name == "cores"
    assert "green: this torch is a build for CPUs" in caplog.text
    assert open_backend("auto").name == "green"  # the lanes themselves need no torch
    with pytest.raises(BackendUnavailable, match="backend green: this torch is a build for CPUs"):
        hire(None, Green(), contextlib.ExitStack())  # type: ignore[arg-type]
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert open_backend("auto", why_no_model).name == "green"


@pytest.mark.drivers("13.0")
@pytest.mark.parametrize("fault", [None, ("cuGreenCtxCreate", 2), ("cuMemAlloc", 2)])
def test_doctor_tells_the_rest_when_green_contexts_fail(fake: Fake, fault: tuple[str, int] | None) -> None:
    if fault is None:
        fake.reset("h200", short_context=2)
    else:
        fake.fail(fault[0], code=fault[1], times=None)
    facts = examine()
    green = next(each for each in facts["backends"] if each["name"] == "green")
    assert not green["usable"] and (fault is None or fault[0] in green["why_unusable"])
    assert {each["name"] for each in facts["backends"]} >= {"cores", "mps"} and facts["nvml"]
    with pytest.raises(SmpartError, match=r"^backend green does not work: "):
        require_realised(facts)
    fake.reset()
