"""What `mlx.launch` tells a process of the others, for each of its ways to connect them."""

import json

import pytest

from engine.config import Ranks
from engine.errors import UserError
from mlxcel_cli.config import launched


@pytest.fixture
def written(tmp_path):
    def write(said):
        file = tmp_path / "said"
        file.write_text(said)
        return str(file)

    return write


def test_a_process_alone_is_no_rank():
    assert launched({}) is None
    assert launched({"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_the_launchers_only_process_is_alone(written):
    assert launched({"MLX_RANK": "0", "MLX_HOSTFILE": written("\n")}) is None
    assert launched({"MLX_RANK": "0", "MLX_WORLD_SIZE": "1", "NCCL_HOST_IP": "10.0.0.1"}) is None


@pytest.mark.parametrize(("address", "host"), [("10.0.0.1:32323", "10.0.0.1"), ("[fe80::1]:32323", "fe80::1")])
def test_a_ring(written, address, host):
    hosts = written(json.dumps([[address, "10.1.0.1:32324"], ["10.0.0.2:32325"]]))
    assert launched({"MLX_RANK": "1", "MLX_HOSTFILE": hosts}) == Ranks(1, 2, host)


def test_nccl():
    said = {"MLX_RANK": "2", "MLX_WORLD_SIZE": "4", "NCCL_HOST_IP": "10.0.0.1", "NCCL_PORT": "12345"}
    assert launched(said) == Ranks(2, 4, "10.0.0.1")


def test_jaccl(written):
    devices = written(json.dumps([[None, "rdma_en5"], ["rdma_en5", None]]))
    said = {"MLX_RANK": "0", "MLX_IBV_DEVICES": devices, "MLX_JACCL_COORDINATOR": "10.0.0.1:32323"}
    assert launched(said) == Ranks(0, 2, "10.0.0.1")


@pytest.mark.parametrize("hosts", ["nothing", "7", "[[7], [8]]", None], ids=str)
def test_what_cannot_be_read_is_an_error(written, hosts):
    file = "/nowhere" if hosts is None else written(hosts)
    with pytest.raises(UserError, match=r"what mlx\.launch says of the ranks cannot be read"):
        launched({"MLX_RANK": "0", "MLX_HOSTFILE": file})


def test_mpi_is_refused_by_name():
    with pytest.raises(UserError, match="ranks that MPI starts"):
        launched({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
