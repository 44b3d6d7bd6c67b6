from tests.generate.conftest import (  # noqa: F401 - fixtures
    byte_tokenizer,
    models,
    one_thread,
    scripted,
    tiny_model_and_tokenizer,
)
from tests.train.test_episodes import caller  # noqa: F401 - a fixture
