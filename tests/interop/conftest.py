from tests.generate.conftest import byte_tokenizer, one_thread  # noqa: F401 - fixtures
