"""The table of model types: the page says what was measured, and it is so."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "model_types.py"
specification = spec_from_file_location("model_types", PROGRAM)
assert specification is not None
assert specification.loader is not None
model_types = module_from_spec(specification)
sys.modules["model_types"] = model_types  # where its dataclasses look for it
specification.loader.exec_module(model_types)

# Promised against transformers. Packed rows are compared with each other, in fp32.
LARGEST = 1e-5
NATIVE = ()


def assert_equal(row: Any) -> None:
    for name in ("logits", "packed", "export"):
        assert getattr(row, name) < LARGEST, (row.model_type, name)
    # Two computations in fp32 are as far from each other as each is from fp64.
    assert row.gradients < max(LARGEST, 3 * row.rounding), row.model_type
    assert row.greedy, row.model_type


def test_the_page_has_the_table_that_was_measured_and_every_model_that_opens_is_equal() -> None:
    rows = model_types.written_rows()
    assert model_types.table_on_page() == model_types.lines_of(rows)
    assert [row.model_type for row in rows] == [*model_types.MODEL_TYPES]
    opened = [row for row in rows if row.how in ("native", "wrapped")]
    assert len(opened) >= 42
    for row in opened:
        assert_equal(row)
    native = {row.model_type for row in rows if row.how == "native"}
    assert native >= {*NATIVE}
    assert all(row.reason for row in rows if row.how == "refused")


@pytest.mark.slow
@pytest.mark.parametrize("written", model_types.written_rows(), ids=lambda row: row.model_type)
def test_a_model_type_opens_as_the_page_says(written: Any, tmp_path: Path) -> None:
    row = model_types.measure(written.model_type, tmp_path)
    assert row.how == written.how, row.reason
    if row.how != "refused":
        assert_equal(row)
