"""What the tests of environments share."""

from tests.generate.conftest import byte_tokenizer, models, scripted  # noqa: F401 - fixtures
