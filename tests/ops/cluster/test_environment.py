"""The rank of a process is read from its launcher's variables."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lmforge.core.distributed.distributed import check_gpus_differ, device_index, exchange
from lmforge.core.distributed.environment import check_local_ranks, count_by_host
from lmforge.core.distributed.memory import set_allocator_defaults
from lmforge.core.distributed.rank_info import RankInfo, read_rank_info, threads_per_rank
from lmforge.core.errors import UserError

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_a_process_that_was_not_launched_is_the_only_rank() -> None:
    assert read_rank_info({}) == RankInfo(
        rank=0, world_size=1, local_rank=0, local_world_size=1, launched=False
    )
    assert read_rank_info({"MASTER_ADDR": "host", "LOCAL_RANK": "3"}) == RankInfo()
    assert read_rank_info({}).is_rank0


def test_the_variables_of_torchrun_are_read() -> None:
    assert read_rank_info(TORCHRUN) == RankInfo(
        5, 8, 1, 4, launched=True, node=1, environment="torchrun"
    )
    assert not read_rank_info(TORCHRUN).is_rank0
    assert read_rank_info({**TORCHRUN, "RANK": "0"}).is_rank0


SOME_OF_TORCHRUN = {name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}


def test_without_a_local_count_ranks_are_counted_by_the_host_on_which_they_are() -> None:
    info = read_rank_info(SOME_OF_TORCHRUN)
    assert not info.is_counted
    assert count_by_host(info, ["a", "b", "b", "a", "c", "b", "a", "c"]) == RankInfo(
        5, 8, 1, 3, True, 1, "torchrun"
    )
    assert read_rank_info(
        {**SOME_OF_TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    ).is_counted


def test_local_ranks_that_do_not_count_from_0_on_each_host_are_refused() -> None:
    check_local_ranks([("a", 1), ("b", 0), ("a", 0)])
    for wrong in (0, 2):
        with pytest.raises(
            UserError,
            match=(
                rf"^environment: the ranks on a have LOCAL_RANK = 0, {wrong}: they count from 0;"
                r" set LOCAL_"
            ),
        ):
            check_local_ranks([("a", 0), ("b", 0), ("a", wrong)])


def test_one_rank_under_a_launcher_is_still_launched() -> None:
    alone = read_rank_info(
        {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    )
    assert alone == RankInfo(launched=True, environment="torchrun")


@pytest.mark.parametrize(
    "absent", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"]
)
def test_missing_variables_are_refused_by_name(absent: str) -> None:
    variables = {name: value for name, value in TORCHRUN.items() if name != absent}
    with pytest.raises(
        UserError,
        match=f"RANK or WORLD_SIZE is set but {absent} is not; start with torchrun, or unset them",
    ):
        read_rank_info(variables)


@pytest.mark.parametrize(
    "name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"]
)
@pytest.mark.parametrize("value", ["", "many", "1.5", "٣", "1_0", "9" * 10, "9" * 6000])
def test_a_variable_that_is_not_a_whole_number_is_refused(name: str, value: str) -> None:
    with pytest.raises(
        UserError,
        match=rf"^environment: {name}: expected a whole number up to \d+, got .{{0,120}}$",
    ):
        read_rank_info({**TORCHRUN, name: value})


@given(
    rank=st.integers(-2, 9),
    ranks=st.integers(-1, 9),
    local_rank=st.integers(-2, 9),
    local_ranks=st.integers(-1, 9),
)
def test_impossible_ranks_are_refused(
    rank: int, ranks: int, local_rank: int, local_ranks: int
) -> None:
    counts = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": local_rank,
        "LOCAL_WORLD_SIZE": local_ranks,
    }
    variables = {**TORCHRUN, **{name: str(count) for name, count in counts.items()}}
    if rank in range(ranks) and local_rank in range(local_ranks) and local_ranks <= ranks:
        node = rank // local_ranks
        assert read_rank_info(variables) == RankInfo(
            rank, ranks, local_rank, local_ranks, True, node, "torchrun"
        )
    else:
        with pytest.raises(UserError, match=f"rank {rank} of {ranks}"):
            read_rank_info(variables)


@pytest.mark.parametrize(
    ("name", "value"), [("MASTER_PORT", "0"), ("MASTER_PORT", "65536"), ("MASTER_ADDR", " ")]
)
def test_an_address_that_nobody_can_listen_on_is_refused(name: str, value: str) -> None:
    with pytest.raises(UserError, match=f"^environment: {name}"):
        read_rank_info({**TORCHRUN, name: value})


def test_ranks_that_torchrun_starts_know_their_rank_info(tmp_path: Path) -> None:
    script = tmp_path / "tell.py"
    script.write_text(
        "from pathlib import Path\n"
        "from lmforge.core.distributed.rank_info import read_rank_info\n"
        "info = read_rank_info()\n"
        "(Path(__file__).parent / f'{info.rank}.txt').write_text(repr(info))\n"
    )
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=3",
        str(script),
    ]
    subprocess.run(launch, check=True, timeout=120, capture_output=True)
    infos = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]
    assert infos == [
        repr(RankInfo(rank, 3, rank, 3, launched=True, environment="torchrun")) for rank in range(3)
    ]


def test_threads_are_the_usable_cores_divided_by_the_local_ranks() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == cores
    assert threads_per_rank(cores) == 1
    assert threads_per_rank(10 * cores) == 1
    pin = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})"
    code = (
        f"{pin}; from lmforge.core.distributed.rank_info import threads_per_rank;"
        " print(threads_per_rank(1))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
        ).stdout
        == "1\n"
    )


def test_a_rank_that_is_shown_one_gpu_takes_it_and_otherwise_that_of_its_local_rank() -> None:
    assert [device_index(rank, 8) for rank in range(8)] == list(range(8))
    assert [device_index(rank, 1) for rank in range(8)] == [0] * 8
    with pytest.raises(
        UserError, match="local rank 4 has no GPU of its own: this host shows 4; start fewer ranks"
    ):
        device_index(4, 4)


def test_ranks_that_share_a_gpu_are_named() -> None:
    check_gpus_differ([("a", "x"), ("a", "y"), ("b", "x")])
    with pytest.raises(
        UserError, match=r"^ranks 1 and 3 have the same GPU of a; start one rank for each GPU"
    ):
        check_gpus_differ([("a", "x"), ("a", "y"), ("b", "y"), ("a", "y")])


def test_ranks_exchange_values_through_the_store_before_they_have_a_group() -> None:
    address = "127.0.0.1"
    server = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)

    def exchange_gpu(rank: int) -> list[tuple[str, str]]:
        store = server if rank == 0 else dist.TCPStore(address, server.port, is_master=False)
        return exchange(
            "gpu", store, rank, 3, (f"host {rank // 2}", f"uuid {rank % 2}"), reads=rank < 2
        )

    with ThreadPoolExecutor(3) as ranks:
        exchanged = list(ranks.map(exchange_gpu, range(3)))
    assert exchanged == [[("host 0", "uuid 0"), ("host 0", "uuid 1"), ("host 1", "uuid 0")]] * 2 + [
        []
    ]


def test_the_gpu_allocator_grows_segments_unless_the_user_has_set_it_up() -> None:
    environ: dict[str, str] = {}
    set_allocator_defaults(environ)
    assert environ == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        environ = {name: "max_split_size_mb:64"}
        set_allocator_defaults(environ)
        assert environ == {name: "max_split_size_mb:64"}
