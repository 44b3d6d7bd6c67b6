"""Initial weights over ranks: the same for any sharding, and each rank draws its own part."""

import json
from pathlib import Path

from tests.support.preloaded import on_ranks

SCRIPT = Path(__file__).with_name("initial_ranks.py")


def counts(folder: Path) -> list[dict[str, tuple[int, int]]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_each_rank_draws_only_the_numbers_it_holds_and_all_are_those_of_one_process(
    tmp_path: Path,
) -> None:
    on_ranks(4, SCRIPT, tmp_path, tmp_path)
    of_ranks = counts(tmp_path)
    assert len(of_ranks) == 4
    for name in of_ranks[0]:
        assert all(0 < rank[name][0] <= rank[name][1] for rank in of_ranks), name
    total = {name: sum(rank[name][0] for rank in of_ranks) for name in of_ranks[0]}
    # Each number is drawn once, and where every rank has a copy, once for each.
    assert total["fsdp1"] == total["fsdp2"] == total["tensor parallel"] == total["pipeline"]
    assert total["fsdp1, adapters"] > total["fsdp1"]
    assert total["ddp"] == 4 * total["fsdp2"]


def test_one_of_1024_ranks_draws_a_thousandth(tmp_path: Path) -> None:
    on_ranks(1, SCRIPT, tmp_path, tmp_path, 1024)
    (rank,) = counts(tmp_path)
    assert rank.keys() == {"fsdp1", "fsdp1, adapters", "fsdp2", "tensor parallel"}
    for name, (drawn, held) in rank.items():
        # Of 660,736 numbers that are drawn; FSDP2 divides rows, of which there are not a thousand
        # everywhere.
        assert 0 < drawn <= held < 1000, name
