"""What is removed or used in a place where others may prepare names is only what this user has made
there.
"""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from lmforge.core.files.own_folders import (
    TOKEN_NAME,
    is_trusted_folder,
    make_own_folder,
    remove_own_folder,
)

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to another user")


def replace_by_link(folder: Path) -> None:
    folder.symlink_to(folder.rename(folder.with_name("target")))


def give_to_another_user(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)


def replace_token(folder: Path) -> None:
    (folder / TOKEN_NAME).write_text("another")


def make_token_a_link(folder: Path) -> None:
    (folder / TOKEN_NAME).rename(folder.with_name("token"))
    (folder / TOKEN_NAME).symlink_to("../token")


def test_a_folder_of_a_process_is_for_its_user_alone_and_removed_with_what_links_in_it_name_left(
    tmp_path: Path,
) -> None:
    folder, token = make_own_folder(tmp_path / "new", "weights-")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert make_own_folder(tmp_path / "new", "weights-")[0] != folder
    for kept in ("file", "folder/file"):
        (tmp_path / kept).parent.mkdir(exist_ok=True)
        (tmp_path / kept).write_text("of the user")
    (folder / "to-file").symlink_to(tmp_path / "file")
    (folder / "to-folder").symlink_to(tmp_path / "folder")
    (folder / "deep" / "er").mkdir(parents=True)
    (folder / "deep" / "er" / "to-folder").symlink_to(tmp_path / "folder")
    assert remove_own_folder(folder, token)
    assert not folder.exists()
    assert (
        (tmp_path / "file").read_text()
        == (tmp_path / "folder" / "file").read_text()
        == "of the user"
    )
    assert not remove_own_folder(folder, token)


@pytest.mark.parametrize(
    "change",
    [
        replace_by_link,
        pytest.param(give_to_another_user, marks=as_root),
        replace_token,
        make_token_a_link,
    ],
)
def test_a_folder_that_is_not_what_was_made_stays_as_it_is(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    folder, token = make_own_folder(tmp_path, "weights-")
    (folder / "thesis.tex").write_text("years of work")
    change(folder)
    assert not remove_own_folder(folder, token)
    assert (folder / "thesis.tex").read_text() == "years of work"


@as_root
def test_a_folder_is_trusted_if_it_is_of_this_user_or_of_who_owns_the_place(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    assert not is_trusted_folder(folder)
    folder.mkdir()
    assert is_trusted_folder(folder)
    os.chown(folder, NOBODY, NOBODY)
    assert not is_trusted_folder(folder)
    os.chown(tmp_path, NOBODY, NOBODY)
    assert is_trusted_folder(folder)
    shutil.move(folder, tmp_path / "target")
    folder.symlink_to("target")
    assert not is_trusted_folder(folder)
