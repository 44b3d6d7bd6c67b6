from tests.generate.conftest import one_thread  # noqa: F401 - a fixture
