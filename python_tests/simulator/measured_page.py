"""What a browser makes of a report page: its size, links, pictures, contrast."""

import base64
import json
import re
import subprocess
from pathlib import Path

from browser import BROWSER

PROBE = """<script>addEventListener("load", () => {
    document.querySelectorAll("details").forEach(each => each.open = true);
    const root = document.documentElement, all = [...document.querySelectorAll("main *")];
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const luminance = rgb => rgb.slice(0, 3).map(x => x / 255)
        .map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = node => {
        for (; node; node = node.parentElement) {
            const color = numbers(getComputedStyle(node).backgroundColor);
            if (color.length == 3 || color[3] == 1) return color;
        }
        return [255, 255, 255];
    };
    const contrast = node => {
        const pair = [luminance(numbers(getComputedStyle(node).color)), luminance(behind(node))];
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    };
    const written = all.filter(node => [...node.childNodes].some(each => each.nodeType == 3 && each.data.trim()));
    const facts = {
        width: innerWidth,
        dark: matchMedia("(prefers-color-scheme: dark)").matches,
        overflow: root.scrollWidth - root.clientWidth,
        images: [...document.images].filter(image => image.naturalWidth > 0).length,
        scrolling: [...document.querySelectorAll(".scroll")].filter(box => box.scrollWidth > box.clientWidth)
            .map(box => box.getAttribute("aria-label")),
        dead: [...document.links].filter(link => !document.getElementById(link.hash.slice(1))).length,
        links: document.links.length,
        contrast: Math.min(...written.map(contrast)),
        smallest: Math.min(...written.map(node => parseFloat(getComputedStyle(node).fontSize))),
        mode: document.compatMode,
        counts: ["table", "tr", "td", "img"].map(tag => document.querySelectorAll(tag).length),
    };
    parent.postMessage(JSON.stringify(facts), "*");
})</script></body>"""
# A window cannot be narrower than 500 px, a frame can; the page cannot tell the difference.
FRAME = """<!DOCTYPE html><title>-</title>
<iframe src="probe.html" style="width: {}px; height: 900px; border: 0"></iframe>
<script>addEventListener("message", event => document.title = btoa(event.data))</script>"""


def measured(text: str, folder: Path, width: int, dark: bool = False) -> dict:
    """What a browser makes of the page: a copy of it measures itself."""
    (folder / "probe.html").write_text(text.replace("</body>", PROBE), encoding="utf-8")
    (folder / "frame.html").write_text(FRAME.format(width), encoding="utf-8")
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}"]
    command += [f"--blink-settings=preferredColorScheme={0 if dark else 1}", "--window-size=1400,1000"]
    command += ["--virtual-time-budget=5000", "--dump-dom", (folder / "frame.html").as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    facts = json.loads(base64.b64decode(re.search("<title>(.*)</title>", shown)[1]))
    assert (facts["width"], facts["dark"], facts["mode"]) == (width, dark, "CSS1Compat")
    return facts
