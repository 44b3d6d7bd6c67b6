from tests.generate.conftest import byte_tokenizer, one_thread  # noqa: F401 - fixtures
from tests.model.conftest import draw  # noqa: F401 - a fixture
