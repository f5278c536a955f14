import logging
import types

import jax
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import Implementation, choose


def refuse(*arguments):
    return "`x` must be small"


def run(name):
    return lambda: name


IMPLEMENTATIONS = {
    "mosaic_gpu": Implementation(run("mosaic_gpu"), refuse),
    "triton": Implementation(run("triton")),
    "xla": Implementation(run("xla")),
    "reference": Implementation(run("reference")),
}


@pytest.fixture
def machine(monkeypatch):
    """Sets what the machine has."""

    def has(*names):
        monkeypatch.setattr(
            dispatch, "lacks", lambda name: None if name in (*names, "xla") else "another machine"
        )
        dispatch.say_once.cache_clear()

    return has


def test_auto_takes_the_fastest_that_takes_the_arguments(machine, caplog):
    machine("mosaic_gpu", "triton")
    with caplog.at_level(logging.WARNING):
        assert choose("auto", IMPLEMENTATIONS, 1)() == "triton"
    assert not caplog.records


def test_auto_says_once_why_it_falls_back(machine, caplog):
    machine("mosaic_gpu")
    with caplog.at_level(logging.WARNING):
        assert [choose("auto", IMPLEMENTATIONS, 1)() for _ in range(3)] == ["xla"] * 3
    (record,) = caplog.records
    assert "'mosaic_gpu', for `x` must be small" in record.getMessage()


def test_auto_is_silent_where_there_is_no_other(machine, caplog):
    machine()
    with caplog.at_level(logging.WARNING):
        assert choose("auto", IMPLEMENTATIONS, 1)() == "xla"
    assert not caplog.records


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda", r"`kernels` must be one of 'auto', .*, but is 'cuda'\.$"),
        ("triton", r"`kernels` is 'triton', which needs another machine\.$"),
        ("mosaic_gpu", r"`x` must be small with kernels='mosaic_gpu'\.$"),
    ],
)
def test_a_named_implementation_runs_or_says_why_not(machine, name, message):
    machine("mosaic_gpu")
    with pytest.raises(ValueError, match=message):
        choose(name, IMPLEMENTATIONS, 1)
    assert choose("xla", IMPLEMENTATIONS, 1)() == "xla"


@pytest.mark.parametrize(
    ("attributes", "expected"),
    [({"compute_capability": "9.0"}, 9.0), ({"compute_capability": "gfx942"}, None), ({}, None)],
)
def test_compute_capability(monkeypatch, attributes, expected):
    device = types.SimpleNamespace(device_kind="a device", **attributes)
    monkeypatch.setattr(dispatch, "default_device", lambda: device)
    assert dispatch.compute_capability() == expected


def test_the_default_device_may_be_named_by_its_platform():
    with jax.default_device("cpu"):
        assert dispatch.default_device().platform == "cpu"
