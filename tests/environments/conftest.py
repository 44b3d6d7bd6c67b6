"""What the tests of environments share."""

import pytest

from lmforge.data.tokenizer import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def byte_tokenizer() -> Tokenizer:
    """A token a byte, with the tokens of lmforge's own chat template."""
    return train_tokenizer([""], 261)
