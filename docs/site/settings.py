"""Write docs/settings.md, all settings with each preset's value: `python -m docs.site.settings`.

A test compares the page with what this file makes.
"""

from pathlib import Path
from typing import Any

from zapex.cli.flags import flags_of, texts_of, usage_of
from zapex.config.presets import TABLE
from zapex.config.settings import FIELDS, SECTIONS, Config

PAGE = Path(__file__).parents[1] / "settings.md"
_HEAD = """# Settings

Every setting of a run is a flag of `zapex train`, a key in the file of `--config` (`batch_size` in
the table `[learner]`), and an argument of `zapex.TrainConfig`. The defaults are the paper's. The
presets `laptop`, `workstation` and `smoke` replace some of them, also by the kind of observation;
"by machine" depends on cores, memory and GPU. `zapex config --preset laptop` prints the values on
your machine with the reason for each.

Settings marked with * may differ between [hosts of one run](many_hosts.md).
"""


def page() -> str:
    """The page's text."""
    lines = [_HEAD]
    for section, kind in SECTIONS.items():
        texts, flags = texts_of(kind), flags_of(kind)
        lines += [f"## {(kind.__doc__ or '').partition('.')[0]}: `[{section}]`", ""]
        lines += ["| flag | default | presets | meaning |", "|---|---|---|---|"]
        for name, types in flags.items():
            metadata = FIELDS[name][1].metadata
            local = " *" if metadata.get("local") or metadata.get("replays") else ""
            flag = usage_of(name, types).replace("|", "\\|")
            default = getattr(getattr(Config(), section), name)
            text = texts[name].replace("|", "\\|")
            lines.append(
                f"| `{flag}`{local} | {_shown(default)} | {_presets(name, default)} | {text} |"
            )
        lines.append("")
    return "\n".join(lines)


def _presets(name: str, default: Any) -> str:
    """The values of the presets in which it is not the default."""
    found = []
    for preset in ("laptop", "workstation", "smoke"):
        values = {
            kind: "by machine" if callable(value) else _shown(value)
            for kind in ("image", "vector")
            if (value := TABLE[preset, kind].get(name, (default,))[0]) != default
        }
        if len(set(values.values())) == 1 and len(values) == 2:
            found.append(f"{preset} {values['image']}")
        else:
            found += [f"{preset} {value} ({kind}s)" for kind, value in values.items()]
    return ", ".join(found)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    return f"`{value}`" if value else ""


if __name__ == "__main__":
    PAGE.write_text(page())
