"""A folder is filled once by hosts that share it, and once by each host with its own folder."""

from pathlib import Path

import pytest

from tests.support.preloaded import on_ranks
from tests.support.tools import need


@pytest.mark.parametrize(
    ("folders", "expected"),
    [
        ("all share it", ["0"]),
        ("ranks 2 and 3 have their own", ["0", "2", "3"]),
        ("rank 3 has its own", ["0", "3"]),
        ("rank 3 has none yet", ["0", "3"]),
    ],
)
def test_a_folder_is_filled_once_however_many_hosts_share_it(
    folders: str, expected: list[str], tmp_path: Path
) -> None:
    if folders != "all share it":
        need("the right to mount")
    folder, output = tmp_path / "mounted" / "folder", tmp_path / "output"
    folder.mkdir(parents=True)
    output.mkdir()
    on_ranks(4, Path(__file__).with_name("folder_ranks.py"), tmp_path, folder, output, folders)
    assert sorted(each.name for each in output.iterdir()) == expected


def test_a_folder_that_nobody_has_made_yet_is_filled_once(tmp_path: Path) -> None:
    output = tmp_path / "output"
    output.mkdir()
    missing = tmp_path / "not" / "there"
    on_ranks(
        4, Path(__file__).with_name("folder_ranks.py"), tmp_path, missing, output, "all share it"
    )
    assert [each.name for each in output.iterdir()] == ["0"]
    assert not [*tmp_path.glob(".*")]
