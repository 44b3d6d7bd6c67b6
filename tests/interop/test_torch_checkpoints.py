"""The reader of DCP metadata builds only descriptions of tensors, from files of any Python version."""

import io
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from lmforge.hf.pickle_trial import try_pickle
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lmforge.core.checkpoint.safe_reader import METADATA_FILE, SafeReader, _MetadataUnpickler
from lmforge.core.errors import UserError
from lmforge.hf import pickle_trial
from lmforge.hf.torch_checkpoints import open_tensor_source
from tests.fuzzing import ENDLESS_PICKLES


class ByGetattr(pickle.Pickler):
    """Pickles members of enums, and what is asked for, as Python 3.11.0 to 3.11.3 pickles members."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Attribute):
            return getattr, (obj.owner, obj.name)
        if isinstance(obj, _MEM_FORMAT_ENCODING):
            return getattr, (type(obj), obj.name)
        return NotImplemented


class Attribute:
    def __init__(self, owner: Any, name: str) -> None:
        self.owner, self.name = owner, name


def reread(value: Any) -> Any:
    written = io.BytesIO()
    ByGetattr(written).dump(value)
    written.seek(0)
    return _MetadataUnpickler(written, Path(".metadata")).load()


def test_members_of_enums_are_read_as_every_python_writes_them() -> None:
    for member in _MEM_FORMAT_ENCODING:
        assert reread([member]) == [member]
        assert _MetadataUnpickler(io.BytesIO(pickle.dumps(member)), Path(".metadata")).load() is member


@pytest.mark.parametrize("attribute", [Attribute(Path, "home"), Attribute(_MEM_FORMAT_ENCODING, "__class__")])
def test_no_other_attribute_is_read(attribute: Attribute) -> None:
    with pytest.raises(UserError, match="it asks for the attribute"):
        reread(attribute)


@pytest.mark.parametrize("content", ENDLESS_PICKLES, ids=["key", "value"])
def test_values_that_going_through_never_ends_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / METADATA_FILE).write_bytes(content)
    reasons = r"takes too long, over \d+ s of a processor's time|asks for more memory than there is"
    with pytest.raises(UserError, match=rf"\.metadata cannot be read \(it ({reasons})\)"):
        _ = SafeReader(tmp_path).metadata


def test_a_member_of_an_enum_and_a_class_cannot_be_changed() -> None:
    member = pickle.dumps(_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, 2)[:-1]
    for content in (member + b"}U\x07_value_K\x07sb.", b"\x80\x02cpathlib\nPath\nN}U\x06existsNs\x86b."):
        with pytest.raises(ValueError, match=r"it changes a value|missing 1 required positional argument: 'state'"):
            try_pickle(content)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_old_and_new_pass_the_trial(zipped: bool, tmp_path: Path) -> None:
    # Behind the pickles of an old file is the number of a tensor's values: 128 begins as a pickle does.
    state = {**torch.nn.Linear(1, 128).state_dict(), "step": 3, "half": torch.ones(128, dtype=torch.bfloat16)}
    torch.save({"model": state}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    source = open_tensor_source(tmp_path / "a.pt")
    for name in ("weight", "half"):
        assert torch.equal(source.read(f"model.{name}"), state[name])


@pytest.mark.parametrize("code", ["import time; time.sleep(99)", "import os; os.kill(os.getpid(), 15)", "import missing"])
def test_a_checkpoint_whose_trial_the_machine_stops_is_not_called_damaged(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_trial, "WALL_SECONDS", 1)
    monkeypatch.setattr(pickle_trial, "python_command", lambda *words: [sys.executable, "-c", code])
    with pytest.raises(UserError, match=r"the process that tries a checkpoint.*try again"):
        try_pickle(pickle.dumps(1))
