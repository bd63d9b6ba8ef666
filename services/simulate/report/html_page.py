"""The frame of a page that needs nothing else: no network, no script, colours for light, dark and paper."""

from __future__ import annotations

import html
from typing import Final

from mooncache.simulate.report import figures

_STYLE: Final = """
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:20px 16px 48px}
h1{font-size:1.5rem;margin:0 0 4px}h2{font-size:1.1rem;margin:32px 0 8px}
p{margin:4px 0 10px;max-width:70ch}.muted,figcaption{color:var(--muted);font-size:.9rem}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:16px 0}
.card{border:1px solid var(--grid);border-radius:8px;padding:10px 12px}
.card b{display:block;font-size:1.35rem;font-variant-numeric:tabular-nums}
.card span{color:var(--muted);font-size:.82rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,430px),1fr));gap:18px;align-items:start}
figure{margin:0;border:1px solid var(--grid);border-radius:8px;padding:10px 12px;min-width:0}
figure svg{width:100%;height:auto;display:block}figcaption{margin:6px 0}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem;font-variant-numeric:tabular-nums}
th,td{padding:5px 8px;border-bottom:1px solid var(--grid);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}thead th{color:var(--muted);font-weight:600}
pre{overflow-x:auto;border:1px solid var(--grid);border-radius:8px;padding:10px 12px;font-size:.82rem}
"""


def html_page(title: str, body: str, style: str = "") -> str:
    """A page of this title (text) and body (HTML); `style` comes after the rules that all pages have."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{html.escape(title)}</title>\n"
        f"<style>:root{{color-scheme:light dark;{figures.colour_css(dark=False)}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{figures.colour_css(dark=True)}}}}}{_STYLE}{style}</style>\n"
        f"</head><body><main>\n{body}\n</main></body></html>\n"
    )


def cards(facts: tuple[tuple[str, str], ...]) -> str:
    """Figures (value, what it is) side by side."""
    return '<div class="cards">' + "".join(
        f'<div class="card"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
        for value, name in facts
    ) + "</div>"  # fmt: skip
