"""What the tests of environments share."""

from tests.serve.decoding.conftest import byte_tokenizer, models, scripted  # noqa: F401 - fixtures
