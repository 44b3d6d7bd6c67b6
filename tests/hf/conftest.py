from tests.core.model.conftest import draw  # noqa: F401 - a fixture
from tests.serve.decoding.conftest import byte_tokenizer, one_thread  # noqa: F401 - fixtures
