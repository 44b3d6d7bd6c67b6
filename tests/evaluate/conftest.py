from tests.generate.conftest import one_thread, tiny_model_and_tokenizer  # noqa: F401 - fixtures
