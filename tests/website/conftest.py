"""A browser for the tests of the site."""

from tests.browser import browser  # noqa: F401 - a fixture
