"""Flags and variables say whether a process is one of several."""

import os

import pytest

from jaxlora.distributed.start import Membership, find_membership, local_device_ids
from jaxlora.errors import ConfigError

JAX = {
    "JAX_COORDINATOR_ADDRESS": "node1:9000",
    "JAX_NUM_PROCESSES": "4",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[3-4]",
    "SLURM_NTASKS": "2",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "4096.0;tcp://10.0.0.7,10.1.0.7:34911",
    "OMPI_VERSION": "4.1.6",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Sets variables, after removing all that a cluster sets."""
    for name in os.environ:
        if name.startswith(("JAX_", "SLURM_", "OMPI_")):
            monkeypatch.delenv(name)

    def set_all(variables: dict[str, str]) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_all


def test_an_ordinary_run_is_not_one_of_several(environment):
    environment({})
    assert find_membership() is None


def test_flags_come_before_variables(environment):
    environment(JAX)
    found = find_membership("node2:80", 2, 0)
    assert found == Membership(coordinator="node2:80", num_processes=2, process_id=0)


def test_variables_say_it_without_flags(environment):
    environment(JAX | {"JAX_LOCAL_DEVICE_IDS": "0,2"})
    found = find_membership()
    assert found == Membership(coordinator="node1:9000", num_processes=4, process_id=3)
    assert local_device_ids() == (0, 2)


def test_one_process_by_a_flag_is_an_ordinary_run_in_any_cluster(environment):
    environment(SLURM | JAX)
    assert find_membership(num_processes=1) is None


def test_jax_asks_slurm_and_open_mpi(environment):
    environment(SLURM)
    assert find_membership() == Membership()


@pytest.mark.parametrize(
    ("variables", "ids"),
    [
        (SLURM, None),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "2(x1)", "SLURM_LOCALID": "1"}, (1,)),
        (OPEN_MPI, (0,)),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, None),
        (JAX, None),
    ],
)
def test_a_process_that_is_alone_on_its_host_has_all_devices(
    variables, ids, environment
):
    environment(variables)
    assert find_membership() is not None
    assert local_device_ids() == ids


def test_a_single_slurm_task_is_an_ordinary_run(environment):
    """A batch script sees the number of tasks of the allocation, but is one task."""
    environment(SLURM | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "1"})
    assert find_membership() is None


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("node1:9000", None, None), "without --num-processes .*, --process-id"),
        ((None, 2, None), "--num-processes .* without --coordinator .*, --process-id"),
        (("node1:9000", 2, 2), "process id 2 is out of range: .* 2 processes are 0 to"),
        (("node1:9000", 2, -1), "process id -1 is out of range"),
        (("node1", 2, 0), "coordinator 'node1' is not host:port"),
        (("node1:99999", 2, 0), "is not host:port"),
    ],
)
def test_what_cannot_be_is_refused(flags, text):
    with pytest.raises(ConfigError, match=text):
        find_membership(*flags)


def test_a_variable_that_is_no_number_is_refused(environment):
    environment(JAX | {"JAX_NUM_PROCESSES": "two"})
    with pytest.raises(ConfigError, match=r"JAX_NUM_PROCESSES.* is 'two'"):
        find_membership()
    environment(JAX | {"JAX_LOCAL_DEVICE_IDS": "a"})
    with pytest.raises(ConfigError, match="JAX_LOCAL_DEVICE_IDS is 'a'"):
        local_device_ids()
