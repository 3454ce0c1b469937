"""How long devices take to exchange data."""

import pytest

from jaxlora.costs.gpus import UNKNOWN_DEVICE, find_speed
from jaxlora.plan.mesh.predict import Rates

GB = 1e9


def test_groups_inside_a_host_use_its_own_links():
    speed = find_speed("NVIDIA H200")
    rates = Rates.of(speed, 8, network_gbits=100)
    for num_devices in (1, 2, 4, 8):
        assert rates.exchange_seconds(GB, num_devices) == speed.transfer_seconds(GB)
    for num_devices in (3, 5, 16):  # some of these groups lie in two hosts
        assert rates.exchange_seconds(GB, num_devices) == pytest.approx(8 / 100 / 0.75)


@pytest.mark.parametrize(
    ("kind", "gigabytes"),
    [
        ("NVIDIA H200", 400),
        ("NVIDIA H100 80GB HBM3", 400),
        ("NVIDIA A100-SXM4-40GB", 200),
        ("NVIDIA L40S", 25),
    ],
)
def test_data_sheets_give_the_network_of_hosts_with_eight_gpus(kind, gigabytes):
    rates = Rates.of(find_speed(kind), 8)
    assert rates.network_bytes == gigabytes * GB
    assert rates.exchange_seconds(GB, 16) >= rates.exchange_seconds(GB, 8)


def test_a_group_of_two_hosts_is_no_faster_than_the_links_of_each():
    speed = find_speed("NVIDIA L40S")
    rates = Rates.of(speed, 4, network_gbits=1e6)
    assert rates.exchange_seconds(GB, 8) == speed.transfer_seconds(GB)


def test_transfers_of_unknown_devices_take_no_time():
    assert Rates.of(UNKNOWN_DEVICE, 2, network_gbits=1).exchange_seconds(GB, 4) == 0
