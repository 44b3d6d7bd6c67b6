"""What MkDocs calls while it builds the site: pages from elsewhere, links, figures."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from website.api_pages import api_pages
from website.cut_down import with_cut_downs
from website.figures import inline_svg, with_drawn_charts
from website.links import PAGES, ROOT, for_site, in_repository, page_of, source_page, targets
from website.options_page import run_page, verbs_page
from website.results_page import results

RESULTS = "<!-- results -->"
CODE_PAGES = "reference/api/"
IMAGE = re.compile(r"^!\[([^]]*)\]\(([^)]+\.svg)\)$", re.M)
# What is long and seldom wanted comes last in a search; files of code are not searched.
SEARCHED_LAST = ("log.md", "changelog.md", "reference/api/")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the code where the navigation has their folder."""
    for part in config.nav or []:
        for title, pages in part.items():
            if CODE_PAGES in pages:
                at = pages.index(CODE_PAGES)
                part[title] = [*pages[:at], {"Code": list(api_pages())}, *pages[at + 1 :]]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    pages = {"reference/options.md": run_page(), "reference/verbs.md": verbs_page(), **api_pages()}
    pages |= {
        "license.md": f"# License\n\n```text\n{(ROOT / 'LICENSE').read_text(encoding='utf-8')}```\n"
    }
    written = {shown: ROOT / path for path, shown in PAGES.items() if path.endswith(".md")}
    pages |= {shown: path.read_text(encoding="utf-8") for shown, path in written.items()}
    texts = {
        in_repository(file.src_uri): file.content_string for file in files.documentation_pages()
    }
    texts |= {in_repository(shown): pages[shown] for shown in written}
    linked = {target for path, text in texts.items() for target in targets(text, path)}
    shown = {target: page_of(target) for target in linked if (ROOT / target).is_file()}
    pages |= {
        page: source_page(target) for target, page in shown.items() if page.startswith("source/")
    }
    for page, text in pages.items():
        level = InclusionLevel.NOT_IN_NAV if page.startswith("source/") else InclusionLevel.INCLUDED
        files.append(File.generated(config, page, content=text, inclusion=level))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text with links of the site, results and figures in place."""
    uri = page.file.src_uri
    if uri.startswith(SEARCHED_LAST):
        page.meta["search"] = {"boost": 0.3}
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
    if uri.startswith(("source/", "reference/")):
        return markdown
    text = for_site(markdown, in_repository(uri), uri).replace(RESULTS, results())
    text = with_cut_downs(with_drawn_charts(text))
    docs, folder = Path(config.docs_dir), Path(uri).parent
    return IMAGE.sub(lambda image: inline_svg(docs / folder / image[2], image[1]), text)
