"""A browser for the tests of the site."""

from tests.support.browser import browser  # noqa: F401 - a fixture
