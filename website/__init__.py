"""The documentation site: what `make docs` adds to the pages of docs/. Nothing here is part of the
package.

`hooks.py` is called by MkDocs (mkdocs.yml). It takes README.md and the like into the site, makes
the reference pages (`options_page.py` from the config classes, `api_pages.py` from docstrings,
`results_page.py` from benchmarks/results), turns links into the repository into links of the site
(`links.py`), puts figures into the page (`figures.py`), and shows how the tests cut long commands
down (`cut_down.py`).
"""
