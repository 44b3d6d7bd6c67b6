"""Fixtures of the tests of training."""

from tests.generate.conftest import byte_tokenizer, models, scripted  # noqa: F401 - fixtures
