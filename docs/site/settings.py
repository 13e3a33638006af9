"""Write docs/settings.md, all settings with each preset's value: `python -m docs.site.settings`.

A test compares the page with what this file makes.
"""

from pathlib import Path
from typing import Any

from zapex.cli.flags import flags_of, texts_of, usage_of
from zapex.config.fields import shown
from zapex.config.presets import TABLE
from zapex.config.settings import FIELDS, SECTIONS, Config

_PRESETS = ("laptop", "workstation", "smoke")
PAGE = Path(__file__).parents[1] / "settings.md"
_HEAD = """# Settings

Every setting of a run is a flag of `zapex train`, a key in the file of `--config` (`batch_size` in
the table `[learner]`), and an argument of `zapex.TrainConfig`. The preset `paper` has the paper's
values. Where a preset has two values, the first is for images, the second for vectors; "by machine"
depends on cores, memory and GPU. `zapex train` takes the preset that suits the machine.
`zapex config --preset laptop` prints the values on yours with the reason for each.
`--reward-clip` is on for Atari only.

Settings marked with * may differ between [hosts of one run](many_hosts.md).
"""


def page() -> str:
    """The page's text."""
    lines = [_HEAD]
    for section, kind in SECTIONS.items():
        texts, flags = texts_of(kind), flags_of(kind)
        lines += [f"## {(kind.__doc__ or '').partition('.')[0]}: `[{section}]`", ""]
        lines += [
            "| flag | meaning | paper | laptop | workstation | smoke |",
            "|---|---|---|---|---|---|",
        ]
        for name, types in flags.items():
            metadata = FIELDS[name][1].metadata
            local = " *" if metadata.get("local") or metadata.get("replays") else ""
            flag = usage_of(name, types).replace("|", "\\|")
            default = getattr(getattr(Config(), section), name)
            values = [_cell(default), *(_value(preset, name, default) for preset in _PRESETS)]
            text = texts[name].replace("|", "\\|")
            lines.append(f"| `{flag}`{local} | {text} | {' | '.join(values)} |")
        lines.append("")
    return "\n".join(lines)


def _value(preset: str, name: str, default: Any) -> str:
    """A preset's value for images, and for vectors where that is another one."""
    if name == "preset":
        return _cell(preset)
    images, vectors = (
        "by machine"
        if callable(value := TABLE[preset, kind].get(name, (default,))[0])
        else _cell(value)
        for kind in ("image", "vector")
    )
    return images if images == vectors else f"{images}; {vectors}"


def _cell(value: Any) -> str:
    text = shown(value)
    return text if isinstance(value, (bool, int, float)) or not text else f"`{text}`"


if __name__ == "__main__":
    PAGE.write_text(page())
