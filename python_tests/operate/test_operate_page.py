"""The live page as a real browser shows it: at both widths, for few and many clients, and while uploads stream in."""

import time

import numpy as np
import pytest
from browser import BROWSER, Browser

from secureafl_ext.operate import Look, Queue, Verdict, View, serve

pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs chromium, chromium-browser or google-chrome on PATH")

EVIL = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
QUEUE = Queue(open=6, waiting=3, model_bytes=2**20, longest_wait=12.34, to_ask=0, paused=1, places=12)
TOKEN = "a-token-of-enough-length"
READY = "window.secureafl && secureafl.state && !document.getElementById('heat-box').hidden"


class Similar:
    def similarity(self, clients):
        same = np.equal.outer(np.array(clients) % 5 == 3, np.array(clients) % 5 == 3)
        return np.where(same, 0.8, -0.4)


def told(client, kind="accepted", ago=0.0, version=1):
    reason = EVIL if kind == "rejected" else ""
    return Verdict(
        time.time() - ago, kind, client, EVIL if client % 5 == 3 else "", version, 2, 1.0 + client, 1e-3, reason
    )


def look(n, without, version=1):
    some = np.ones(n, bool)
    return Look(time.time(), version, {}, some, some, some, np.where(without, 0, 1 / n), without, 3.0, queue=QUEUE)


def fleet(n, title=""):
    """Every fifth client attacks: it is left out, and half of its uploads are rejected."""
    view = View(title)
    for k in range(6):
        kinds = [["accepted", "rejected"][client % 5 == 3 and k % 2] for client in range(n)]
        view.verdicts([told(client, kind, 60 - 10 * k - client / n, k) for client, kind in enumerate(kinds)])
        for _ in range(2):
            view.look(look(n, np.arange(n) % 5 == 3, k))
        view.evaluated(time.time() - 60 + 10 * k, k, 1 / (k + 1))
    return view


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    made = Browser(tmp_path_factory.mktemp("profile"))
    yield made
    made.close()


FACTS = """(() => {
    const texts = selector => [...document.querySelectorAll(selector)].map(node => node.textContent);
    const isDrawn = canvas => {
        const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
        let count = 0;
        for (let i = 3; i < pixels.length; i += 4) count += pixels[i] > 0;
        return count > 200;
    };
    const luminance = rgb => rgb.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4)
        .reduce((sum, x, i) => sum + x * [0.2126, 0.7152, 0.0722][i], 0);
    const numbers = text => text.match(/[\\d.]+/g).map(Number);
    const behind = node => {
        for (; node; node = node.parentElement) {
            const color = numbers(getComputedStyle(node).backgroundColor);
            if (color.length === 3) return color;
        }
        return [255, 255, 255];
    };
    const contrast = node => {
        const pair = [numbers(getComputedStyle(node).color).slice(0, 3), behind(node)].map(luminance);
        return (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    };
    const written = [...document.querySelectorAll("header *, main *")].filter(node =>
        node.offsetParent && !node.disabled
        && [...node.childNodes].some(each => each.nodeType === 3 && each.data.trim()));
    return {
        width: innerWidth,
        overflow: document.documentElement.scrollWidth - document.documentElement.clientWidth,
        charts: [...document.querySelectorAll(".chart canvas")].filter(isDrawn).length,
        maps: ["timeline", "heat"].filter(id => isDrawn(document.getElementById(id))),
        queue: texts("#queue dd"),
        rows: texts("#rows tr td:first-child"), named: texts("#named b"), place: texts("#place")[0],
        foreign: document.querySelectorAll("img, main script, [onerror]").length, title: document.title,
        contrast: Math.min(...written.map(contrast)),
        smallest: Math.min(...written.map(node => parseFloat(getComputedStyle(node).fontSize))),
    };
})()"""


@pytest.mark.parametrize(
    ("n", "width", "dark"), [(10, 1280, True), (10, 400, False), (5_000, 1280, False), (5_000, 400, True)]
)
def test_the_page_fits_and_everything_is_drawn(browser, n, width, dark):
    view = fleet(n)
    with serve(view, Similar()) as page:
        browser.open(page.url, width, dark=dark)
        browser.wait(READY)
        facts = browser.value(FACTS)
    assert (facts["width"], facts["overflow"]) == (width, 0)
    assert facts["charts"] == 5 and facts["maps"] == ["timeline", "heat"]
    assert facts["queue"] == ["6", "3", "12.3 s", "3 MiB", "3", "0", "1"]
    assert facts["contrast"] >= 4.5, "WCAG AA"
    assert facts["smallest"] >= 11
    order = [row["client"] for row in view.snapshot()["clients"]["rows"]][: len(facts["rows"])]
    assert order[:2] == [3, 8] and len(facts["rows"]) == min(n, 50)
    assert facts["rows"] == [f"{c}: {EVIL}" if c % 5 == 3 else f"client {c}" for c in order], "names are text"
    assert f"8: {EVIL}" in facts["named"] or n > 10
    assert (facts["foreign"], facts["title"]) == (0, "SecureAFL")
    assert facts["place"] == f"1 to {len(order)} of {n}"
    assert browser.errors == [], "no error in a script, no breach of the content security policy"


def test_the_page_follows_uploads_while_it_is_open(browser):
    view = fleet(10)
    tile = "document.querySelector('#tiles dd').textContent"
    with serve(view, Similar()) as page:
        browser.open(page.url, 1280)
        browser.wait(READY)
        browser.value("window.unchanged = true")  # gone if the page were loaded again
        dots = browser.value("secureafl.dots.at.length")
        for version in (11, 22):
            view.verdicts([told(1, "rejected", version=version)] * 7)
            for _ in range(30):
                view.look(look(10, np.arange(10) == 1, version))
            browser.wait(f"{tile} === '{version}'")
            dots += 7
            assert browser.value("secureafl.dots.at.length") == dots, "only what is new was added"
            assert browser.value("document.querySelector('#rows td').textContent") == "client 1"
            assert browser.value("document.querySelector('#named b').textContent") == "client 1"
        assert browser.value("window.unchanged") and browser.errors == []


def test_a_click_shows_the_history_of_a_client_and_keeps_it_current(browser):
    view = fleet(10)
    kinds = "[...document.querySelectorAll('#history tr td:nth-child(2)')].map(cell => cell.textContent)"
    with serve(view, Similar()) as page:
        browser.open(page.url, 400)
        browser.wait(READY)
        browser.value("document.querySelector('#rows button').click()")
        browser.wait("document.getElementById('detail').open")
        assert browser.value("document.getElementById('detail-name').textContent") == f"3: {EVIL}"
        assert browser.value(kinds) == ["rejected", "accepted"] * 3
        assert EVIL in browser.value("document.getElementById('history').textContent")
        assert browser.value("document.querySelectorAll('#detail img').length") == 0
        view.verdicts([told(3, "stale")])
        browser.wait(f"{kinds}.length === 7")
        assert browser.value(kinds)[0] == "stale"
        assert browser.value("document.documentElement.scrollWidth - innerWidth") == 0
        assert browser.value("(box => box.scrollWidth - box.clientWidth)(document.getElementById('detail'))") == 0
        browser.value("document.getElementById('close').click()")
        assert not browser.value("document.getElementById('detail').open") and browser.errors == []


def test_search_and_pages_reach_every_client(browser):
    place = "document.getElementById('place').textContent"
    with serve(fleet(5_000)) as page:
        browser.open(page.url, 1280)
        browser.wait(f"window.secureafl && {place} === '1 to 50 of 5000'")
        browser.value("document.getElementById('next').click()")
        browser.wait(f"{place} === '51 to 100 of 5000'")
        browser.value(
            "(box => { box.value = '4711'; box.dispatchEvent(new Event('input')); })(document.getElementById('search'))"
        )
        browser.wait(f"{place} === '1 to 1 of 1'")
        assert browser.value("document.querySelector('#rows td').textContent") == "client 4711"
        assert browser.value("document.getElementById('next').disabled && document.getElementById('before').disabled")


def test_a_server_that_is_gone_is_said_and_a_new_one_is_found(browser):
    status = "document.getElementById('status').textContent"
    with serve(fleet(10), Similar()) as page:
        browser.open(page.url, 1280)
        browser.wait(READY)
        assert browser.value(status).startswith("live")
    browser.wait(f"{status}.startsWith('the server is gone, last heard at')")
    assert browser.value("document.querySelectorAll('#rows tr').length") == 10, "what is known stays"
    with serve(fleet(5, "another one"), port=page.port):
        browser.wait("secureafl.state.title === 'another one'")
        assert browser.value("secureafl.dots.at.length") == 30, "nothing of the old one is left"
        browser.wait(f"{status}.startsWith('live')")


def test_a_token_opens_the_page_and_leaves_the_address(browser):
    with serve(fleet(10), token=TOKEN) as page:
        browser.open(page.url, 1280)
        browser.wait("document.body && document.body.textContent.includes('a token is needed')")
        browser.open(f"{page.url}?token={TOKEN}", 1280)
        browser.wait("window.secureafl && secureafl.state")
        assert browser.value("location.href") == page.url
        assert browser.value("document.cookie") == "", "scripts cannot read it"
