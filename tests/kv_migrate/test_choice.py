"""Which transport: said by the configuration and the host, never guessed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre.errors import BadInput
from gyre.kv_migrate.choice import WANTED, Host, Kind, choose, import_fault, look

NOTHING = Host((), "it was not tried")
DEVICE = Host(("mlx5_0",), "")
NO_LIBRARY = Host(("mlx5_0", "mlx5_1"), "mooncake cannot be loaded (libibverbs.so.1); install it")


@pytest.mark.parametrize(
    ("wanted", "host", "reason"),
    [
        ("auto", NOTHING, "tcp: no RDMA device is active here"),
        ("auto", DEVICE, "mooncake: mlx5_0 is active"),
        (
            "auto",
            NO_LIBRARY,
            "tcp: mlx5_0, mlx5_1 is active and not used: mooncake cannot be loaded (libibverbs.so.1); install it",
        ),
        ("tcp", DEVICE, "tcp: tcp was asked for"),
        ("mooncake", DEVICE, "mooncake: mooncake was asked for, over mlx5_0"),
        ("mooncake-tcp", Host((), ""), "mooncake-tcp: mooncake-tcp was asked for"),
        ("mooncake-tcp", DEVICE, "mooncake-tcp: mooncake-tcp was asked for"),
    ],
)
def test_the_choice_and_its_reason(wanted: str, host: Host, reason: str) -> None:
    assert choose(wanted, host).reason == reason


@pytest.mark.parametrize(
    ("wanted", "host", "why"),
    [
        ("mooncake", NOTHING, "RDMA device"),
        ("mooncake", NO_LIBRARY, "cannot be loaded"),
        ("mooncake-tcp", Host((), "mooncake cannot be loaded"), "cannot be loaded"),
        ("rdma", DEVICE, "it must be one of auto, tcp, mooncake, mooncake-tcp"),
    ],
)
def test_what_was_asked_for_and_cannot_be_had_is_refused_and_not_replaced(wanted: str, host: Host, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        choose(wanted, host)


@given(
    st.sampled_from(WANTED),
    st.lists(st.sampled_from(["mlx5_0", "mlx5_1", "rxe0"]), unique=True),
    st.sampled_from(["", "no"]),
)
def test_mooncake_is_never_chosen_without_a_device_or_by_itself_over_tcp(
    wanted: str, devices: list[str], fault: str
) -> None:
    try:
        choice = choose(wanted, Host(tuple(devices), fault))
    except BadInput:
        assert wanted in (Kind.MOONCAKE, Kind.MOONCAKE_TCP)
        return
    if choice.kind is Kind.MOONCAKE:
        assert choice.devices == tuple(devices) != ()
    if choice.kind is not Kind.TCP:
        assert not fault
    if choice.kind is Kind.MOONCAKE_TCP:
        assert wanted == Kind.MOONCAKE_TCP


def test_a_device_counts_when_one_of_its_ports_is_active(tmp_path: Path) -> None:
    for device, port, state in (
        ("mlx5_0", "1", "4: ACTIVE\n"),
        ("mlx5_1", "1", "1: DOWN\n"),
        ("mlx5_1", "2", "2: INIT\n"),
        ("mlx5_2", "1", "1: DOWN\n"),
        ("mlx5_2", "2", "4: ACTIVE\n"),
    ):
        place = tmp_path / device / "ports" / port
        place.mkdir(parents=True)
        (place / "state").write_text(state)
    (tmp_path / "mlx5_3").mkdir()
    assert look("tcp", tmp_path).devices == ("mlx5_0", "mlx5_2")
    assert look("auto", tmp_path / "nothing").devices == ()


def test_the_library_is_only_tried_where_it_may_be_used(tmp_path: Path) -> None:
    for wanted in ("auto", "tcp"):
        assert look(wanted, tmp_path) == Host((), "it was not tried")


@pytest.mark.parametrize(
    ("stderr", "said"),
    [
        ("Traceback …\nModuleNotFoundError: No module named 'mooncake'\n", "pip install 'gyre[transfer]'"),
        (
            "ImportError: libibverbs.so.1: cannot open shared object file: No such file or directory\n",
            "Debian: libibverbs1 has libibverbs.so.1), or name the folder that has libibverbs.so.1 in LD_LIBRARY_PATH",
        ),
        ("", "exit status -11"),
    ],
)
def test_a_library_that_cannot_be_loaded_is_told_with_the_mend(stderr: str, said: str) -> None:
    assert said in import_fault(stderr, -11)
