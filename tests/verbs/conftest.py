from tests.generate.conftest import byte_tokenizer, models, one_thread, scripted  # noqa: F401 - fixtures
