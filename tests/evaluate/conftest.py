from tests.generate.conftest import (  # noqa: F401 - fixtures
    byte_tokenizer,
    models,
    one_thread,
    scripted,
    tiny_model_and_tokenizer,
)
from tests.serve.conftest import serving  # noqa: F401 - a fixture
