"""The door for content from outside refuses what is not JSON, whatever the schema."""

from typing import Any

import pytest

from lmforge.errors import UserError
from lmforge.untrusted import parse_json


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("schema", [dict[str, Any], dict[str, list[float]], object])
def test_nan_and_infinity_are_refused(number: str, schema: Any) -> None:
    with pytest.raises(UserError, match=r"^the file: not valid JSON: .* at line 1 column \d+; copy it again$"):
        parse_json(f'{{"values": [0.5, {number}]}}'.encode(), schema, "the file", hint="copy it again")


def test_a_text_may_name_them() -> None:
    assert parse_json(b'{"NaN": "-Infinity"}', dict[str, Any], "the file") == {"NaN": "-Infinity"}
