from tests.core.model.conftest import draw, token_by_token  # noqa: F401 - fixtures
from tests.serve.decoding.conftest import (  # noqa: F401 - fixtures
    byte_tokenizer,
    models,
    one_thread,
    scripted,
    tiny_model_and_tokenizer,
)
