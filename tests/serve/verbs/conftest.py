from tests.post.rl.test_episodes import caller  # noqa: F401 - a fixture
from tests.serve.decoding.conftest import (  # noqa: F401 - fixtures
    byte_tokenizer,
    models,
    one_thread,
    scripted,
    tiny_model_and_tokenizer,
)
