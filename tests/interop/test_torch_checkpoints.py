"""The reader of DCP metadata builds only descriptions of tensors, from files of any Python version."""

import io
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from lmforge.errors import UserError
from lmforge.interop.torch_checkpoints import _MetadataUnpickler


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
