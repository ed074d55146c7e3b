"""A hook of mkdocs.yml: files beside docs/ join the site, and links between all of them hold on it as on GitHub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from posixpath import dirname, join, normpath, relpath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(file.relative_to(ROOT).as_posix() for file in ROOT.glob("examples/*.ipynb"))
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "examples/README.md": "examples/index.md",
} | {name: name.removesuffix("ipynb") + "md" for name in NOTEBOOKS}
SCALING = [f"examples/scaling/{name}" for name in ("kubernetes.yaml", "nginx.conf", "ray.yaml")]
ASSETS = ("Dockerfile", "mkdocs.yml", "benchmarks/lm_eval/gsm8k_local.yaml", *SCALING, *NOTEBOOKS)  # that pages link to
LINK = re.compile(r'(\]\(|(?:src|srcset)=")([^)"#\s]+)')


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, place in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        content = as_markdown(json.loads(text)) if name in NOTEBOOKS else text
        files.append(File.generated(config, place, content=content))
    for name in ASSETS:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def as_markdown(notebook: dict[str, Any]) -> str:
    sources = [(cell["cell_type"], "".join(cell["source"])) for cell in notebook["cells"]]
    return "\n\n".join(f"```python\n{source}\n```" if kind == "code" else source for kind, source in sources)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    place = page.file.src_uri
    home = next((name for name, page_of in PAGES.items() if page_of == place), f"docs/{place}")
    found = LINK.sub(lambda link: link[1] + moved(link[2], home, place), markdown)
    name = home.rpartition("/")[2]
    return f"{found}\n\n[Download this notebook]({name})\n" if home in NOTEBOOKS else found


def moved(link: str, home: str, place: str) -> str:
    """A link in the repository's file `home`, as it must be on the site's page `place`."""
    target = normpath(join(dirname(home), link))
    if not (ROOT / target).is_file():  # an address, or code that looks like a link
        return link
    return relpath(PAGES.get(target, target.removeprefix("docs/")), dirname(place) or ".")
