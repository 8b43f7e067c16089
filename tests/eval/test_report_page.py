"""The HTML report in a real browser: no errors, no network, no sideways scroll, sorting."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from reporting import DRAFTERS, comparison, made_result

from headstart.eval.report import write_report
from headstart.eval.report_content import content
from headstart.eval.report_html import html

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
SUITES = ["mt_bench", "gsm8k"]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    return write_report(comparison(SUITES), tmp_path_factory.mktemp("report"))


def test_the_page_names_nothing_outside_itself(report):
    text = report.read_text()
    allowed = "http://www.w3.org/2000/svg"
    assert set(re.findall(r"https?://[^\s\"'<>)]+", text)) == {allowed}
    assert not re.findall(r"(?:src|href)=\"(?!#|data:)", text)
    assert "url(" not in text
    assert "@import" not in text


def test_names_and_texts_of_results_are_escaped():
    result = made_result(DRAFTERS[0])
    result.drafter.name = "<script>alert(1)</script>"
    result.warnings = ["<img src=x onerror=alert(2)>"]
    text = html(content([result]))
    assert text.count("<script>") == 1
    assert "<img" not in text
    assert "Write about &lt;b&gt;a fox&lt;/b&gt;, 3 &lt; 4." in text


def test_every_link_leads_somewhere_and_settings_list_their_sections(report):
    text = report.read_text()
    links = set(re.findall(r"href=\"#([^\"]+)\"", text))
    assert links <= set(re.findall(r" id=\"([^\"]+)\"", text))
    assert {"s1-leaderboard", "s2-samples", "provenance-2"} <= links


def test_what_is_shown_of_an_answer_is_told_as_that():
    assert re.search(r"\d+ of the \d+ tokens shown were drafted", html(content(comparison())))


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    """A headless Chromium; without one, or without playwright, these tests are skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if CHROMIUM is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(params=[390, 1280], ids=["phone", "desktop"])
def page(request, browser, report) -> Iterator[object]:
    """The report at both widths; what the console said is in page.told."""
    context = browser.new_context(viewport={"width": request.param, "height": 900})
    page = context.new_page()
    page.told = []
    page.on("console", lambda message: page.told.append(message.text))
    page.on("pageerror", lambda error: page.told.append(str(error)))
    page.on("request", lambda sent: page.told.append(sent.url) if sent.url[:4] == "http" else None)
    page.goto(report.as_uri())
    yield page
    context.close()


def test_the_console_stays_empty_and_nothing_is_fetched(page):
    page.locator("summary").evaluate_all("all => all.forEach(s => s.click())")
    assert page.told == []


def test_the_page_does_not_scroll_sideways(page):
    for opened in (False, True):
        if opened:
            page.locator("details").evaluate_all("all => all.forEach(d => d.open = true)")
        wide = page.evaluate(
            """() => [...document.querySelectorAll("body *")].filter(
                e => e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(
                    ".box, figure > div, pre")).map(e => e.tagName + "." + e.className)"""
        )
        assert wide == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_a_table_of_many_columns_has_the_whole_width_and_its_caption_is_read_whole(page):
    page.locator("details").evaluate_all("all => all.forEach(d => d.open = true)")
    widths = page.evaluate(
        """() => [...document.querySelectorAll(".box")].map(box => [
            box.querySelectorAll("thead th").length, box.offsetWidth,
            box.closest("section").clientWidth])"""
    )
    assert any(columns > 3 for columns, _, _ in widths)
    assert all(own >= whole for columns, own, whole in widths if columns > 3)
    beyond = page.evaluate(
        """() => [...document.querySelectorAll("caption span")].filter(span =>
            span.getBoundingClientRect().right > span.closest(".box").getBoundingClientRect().right
        ).map(span => span.textContent)"""
    )
    assert beyond == []


def test_every_figure_is_drawn_and_told(page, report):
    figures = content(comparison(SUITES)).figures
    assert page.locator("figure svg[role=img][aria-label]").count() == len(figures)
    sizes = page.locator("figure svg").evaluate_all(
        "all => all.map(s => [s.getBoundingClientRect().width, s.getBoundingClientRect().height])"
    )
    assert all(width > 200 and height > 60 for width, height in sizes)


def test_no_words_of_a_plot_leave_it(page):
    outside = page.locator("figure svg text").evaluate_all(
        """all => all.filter(t => {
            const b = t.getBoundingClientRect(), s = t.ownerSVGElement.getBoundingClientRect();
            return b.left < s.left - 1 || b.right > s.right + 1 || b.bottom > s.bottom + 1;
        }).map(t => t.textContent)"""
    )
    assert outside == []


def test_words_of_plots_are_large_enough(page):
    sizes = page.locator(".plot .tick").evaluate_all(
        """all => all.map(t => {
            const plot = t.ownerSVGElement;
            const share = plot.getBoundingClientRect().width / plot.viewBox.baseVal.width;
            return parseFloat(getComputedStyle(t).fontSize) * share;
        })"""
    )
    assert min(sizes) >= 9.99


def test_names_of_rows_leave_a_phone_room(page):
    if page.viewport_size["width"] > 600:
        return
    widths = page.locator("tbody th").evaluate_all(
        "all => all.map(t => t.getBoundingClientRect().width)"
    )
    assert max(widths) <= 0.4 * page.viewport_size["width"] + 1


def test_a_click_sorts_the_leaderboard_and_lossy_rows_stay_last(page):
    table = page.locator("table", has=page.locator("tr.plain")).first
    names = lambda: table.locator("tbody th").all_inner_texts()  # noqa: E731
    before = names()
    button = table.locator("thead button", has_text="tau").first
    button.click()
    taus = [
        float(t.split()[0])
        for t in table.locator("tbody tr:not(.lossy) td:nth-child(5)").all_inner_texts()
    ]
    assert taus == sorted(taus, reverse=True)
    button.click()
    assert names()[0] == "plain"
    assert table.locator("th[aria-sort=ascending]").inner_text().startswith("tau")
    table.locator("thead button", has_text="rank").click()
    assert names() == before
    assert before[-1] == "medusa-typical"


def test_rows_below_prompt_lookup_stand_out(page):
    row = page.locator("tr.behind").first
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    colour = row.locator("td").first.evaluate("e => getComputedStyle(e).backgroundColor")
    assert "BELOW" in row.inner_text()
    assert colour != paper


CONTRAST = """wanted => {
  const linear = v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => linear(v / 255));
    return .2126 * r + .7152 * g + .0722 * b;
  };
  const paper = light(getComputedStyle(document.body).backgroundColor);
  return wanted.map(([selector, property]) => {
    const ink = light(getComputedStyle(document.querySelector(selector))[property]);
    return (Math.max(ink, paper) + .05) / (Math.min(ink, paper) + .05);
  });
}"""
WORDS = [("body", "color"), (".soft", "color"), (".below", "color"), (".plot .tick", "fill")]
MARKS = [(f".plot .fill{i}", "fill") for i in range(6)] + [(".plot .behind", "fill")]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("wanted", "least"), [(WORDS, 4.5), (MARKS, 3.0)], ids=["words", "marks"])
def test_colours_can_be_told_from_the_paper(browser, report, scheme, wanted, least):
    """Least contrasts of WCAG 2.1 for text and for graphics."""
    context = browser.new_context(color_scheme=scheme)
    page = context.new_page()
    page.goto(report.as_uri())
    ratios = page.evaluate(CONTRAST, wanted)
    context.close()
    assert min(ratios) >= least, dict(zip(wanted, ratios, strict=True))
