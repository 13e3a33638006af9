"""What the site has beyond the pages of docs/: the README, sources, results, and links to them."""

import posixpath
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
from docs.site import charts, diagrams  # noqa: E402

# A page of the site -> the file of the repository that it is.
_PAGES = {
    "index.md": "README.md",
    "benchmarks.md": "benchmarks/README.md",
    "changes.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
# Where a link to a directory leads.
_FOLDERS = {"benchmarks/results": "results.md#the-files"}
_CHART = re.compile(r"!\[([^\]]*)\]\((\S+\.png)\)")
_FLAG_HELP = re.compile(r"^  (--\S+(?: \S+)*)\s+((?:.+\n?)(?: {30}.+\n?)*)", re.M)
_LINK = re.compile(r"(?<=\]\()(?!\w+:)([^)\s#]+)(#[^)\s]*)?(?=\))")
_REFERENCE = "<!-- reference -->"
_COMMANDS = "<!-- commands -->"


def on_config(config: MkDocsConfig) -> None:
    """Pages that the navigation does not name come under "More"."""
    named = set(re.findall(r"[\w/]+\.md", repr(config.nav)))
    pages = sorted({path.name for path in (ROOT / "docs").glob("*.md")} | _PAGES.keys())
    more = [name for name in pages if name not in named]
    if config.nav is not None and more:
        config.nav.append({"More": [{_title(name): name} for name in more]})


def _title(name: str) -> str:
    lines = (ROOT / _origin(name)).read_text().splitlines()
    return next(line[2:] for line in lines if line.startswith("# "))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are generated and the files that pages link to."""
    for page, path in _PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.suffix == ".py":
            text = f"# {path.name}\n\n~~~python\n{path.read_text()}~~~\n"
            uri = _in_site(path.relative_to(ROOT).as_posix())
            files.append(File.generated(config, uri, content=text))
    for path in _copied():
        uri = _in_site(path.relative_to(ROOT).as_posix())
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    files.append(File.generated(config, "site/plotly.js", content=charts.script()))
    return files


def _copied() -> Iterator[Path]:
    yield from sorted((ROOT / "benchmarks/results").iterdir())
    yield from (path for path in sorted((ROOT / "examples").glob("*.*")) if path.suffix != ".py")
    yield from (ROOT / name for name in ("LICENSE", "CITATION.cff"))


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links of the repository into links of the site, and fill in what is generated."""
    here = posixpath.dirname(page.file.src_uri)
    origin = posixpath.dirname(_origin(page.file.src_uri))

    def link(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(origin, match[1]))
        if not (ROOT / path).exists():
            return match[0]
        target = _FOLDERS.get(path) or _in_site(path) + (match[2] or "")
        return posixpath.relpath(target, here or ".")

    def drawn(block: re.Match[str]) -> str:
        path = diagrams.picture(block[1])
        if not path.exists():
            raise PluginError(f"{page.file.src_uri}: a diagram is not drawn; docs/site/diagrams.py")
        file = posixpath.relpath(f"images/{path.name}", here or ".")
        return f"[![A diagram]({file})]({file})"

    if page.file.generated_by is None or page.file.src_uri in _PAGES:
        markdown = _LINK.sub(link, markdown)
    markdown = _CHART.sub(r"[![\1](\2)](\2)", markdown)  # a click shows it in its own size
    if _REFERENCE in markdown:
        markdown = markdown.replace(_REFERENCE, _public_names())
    if _COMMANDS in markdown:
        markdown = markdown.replace(_COMMANDS, _commands())
    return charts.filled(diagrams.BLOCK.sub(drawn, markdown))


def _origin(uri: str) -> str:
    return _PAGES.get(uri, f"docs/{uri}")


def _in_site(path: str) -> str:
    """Where the site has a file of the repository."""
    pages = {origin: page for page, origin in _PAGES.items()}
    if path in pages or path.startswith("docs/"):
        return pages.get(path, path.removeprefix("docs/"))
    return f"files/{path.removesuffix('.py')}.md" if path.endswith(".py") else f"files/{path}"


def _public_names() -> str:
    import zapex

    homes: dict[str, Any] = zapex._HOMES
    return "\n\n".join(f"::: zapex.{homes[name]}.{name}" for name in zapex.__all__ if name in homes)


def _commands() -> str:
    """The help of each command, without the settings, whose values are of this machine."""
    from zapex.cli import main
    from zapex.config.settings import SECTIONS

    settings = {(kind.__doc__ or "").partition(".")[0] for kind in SECTIONS.values()}
    parts = []
    for name, (command, purpose) in main.COMMANDS.items():
        about, *groups = re.split(r"\n(?=[A-Z][^\n]*:\n  --)", main.help_of(command))
        what, _, usage = about.rpartition("Usage: ")
        usage = usage.splitlines()[0] if what else f"zapex {name} [NAME]"
        lines = [f"## {name}", "", " ".join(what.split()) or purpose, "", f"`{usage}`"]
        own = [group for group in groups if group.partition(":")[0] not in settings]
        for group in own:
            lines += ["", "| flag | meaning |", "|---|---|"]
            for flag, text in _FLAG_HELP.findall(group):
                cells = [cell.replace("|", "\\|") for cell in (f"`{flag}`", " ".join(text.split()))]
                lines.append(f"| {' | '.join(cells)} |")
        if len(own) < len(groups):
            lines += ["", "And [settings](settings.md)."]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt: the pages with their first sentences, for programs that read it."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    for title, pages in (
        (next(iter(part)), next(iter(part.values()))) for part in config.nav or ()
    ):
        if isinstance(pages, list):
            lines += ["", f"## {title}", ""]
            for name, uri in (next(iter(page.items())) for page in pages):
                lines.append(f"- [{name}]({uri.removesuffix('.md')}.html): {_first_sentence(uri)}")
    Path(config.site_dir, "llms.txt").write_text("\n".join(lines) + "\n")


def _first_sentence(uri: str) -> str:
    paragraphs = (ROOT / _origin(uri)).read_text().split("\n\n")[1:]
    prose = next((p for p in paragraphs if re.match(r"[A-Za-z*\[]|`[^`]", p)), "")
    words = re.sub(r"\[(.+?)\]\(.+?\)", r"\1", " ".join(prose.split()))
    return re.split(r"\.\s+(?=[A-Z`])", words)[0].rstrip(".:") + "."
