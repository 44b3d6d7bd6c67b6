from tests.core.data.conftest import byte_tokenizer, folder_of, impatient  # noqa: F401 - fixtures
