"""The reader of DCP metadata builds only descriptions of tensors, from files of any Python
version.
"""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lmforge.core.checkpoint.safe_reader import _MetadataUnpickler
from lmforge.core.errors import UserError
from lmforge.hf.torch_checkpoints import open_tensor_source


class ByGetattr(pickle.Pickler):
    """Pickles members of enums, and what is asked for, as Python 3.11.0 to 3.11.3 pickles
    members.
    """

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
        assert (
            _MetadataUnpickler(io.BytesIO(pickle.dumps(member)), Path(".metadata")).load() is member
        )


@pytest.mark.parametrize(
    "attribute", [Attribute(Path, "home"), Attribute(_MEM_FORMAT_ENCODING, "__class__")]
)
def test_no_other_attribute_is_read(attribute: Attribute) -> None:
    with pytest.raises(UserError, match="it asks for the attribute"):
        reread(attribute)


@pytest.mark.parametrize("zipped", [True, False])
def test_files_of_torch_save_old_and_new_are_read(zipped: bool, tmp_path: Path) -> None:
    state = {
        **torch.nn.Linear(1, 128).state_dict(),
        "step": 3,
        "half": torch.ones(128, dtype=torch.bfloat16),
    }
    torch.save({"model": state}, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    source = open_tensor_source(tmp_path / "a.pt")
    for name in ("weight", "half"):
        assert torch.equal(source.read(f"model.{name}"), state[name])
