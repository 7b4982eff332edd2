"""The animations: each moves, is paused by its control, and keeps still for who prefers that.

Frames are looked at by setting the time of all animations of a page.
"""

import base64
import re

import animations
import nbformat
import pytest
from test_site import SITE, address, browser  # noqa: F401 (fixtures)

DRAFTS = "".join(
    p.read_text(encoding="utf-8") for p in SITE.parents[1].joinpath("gallery").glob("_*.py")
)
NAMES = sorted(n for n in animations.ANIMATIONS if f".. animation:: {n}\n" not in DRAFTS)
PAGE_OF = {
    found.replace("-", "_"): path
    for path in sorted(SITE.glob("chapters/*.html"))
    for found in re.findall(
        r'<figure class="kb-animation" id="moving-([\w-]+)">', path.read_text(encoding="utf-8")
    )
}
STATES = """id => document.getAnimations()  // without the transitions of the theme
    .map(a => [a.effect.target.closest("figure"), a.playState])
    .filter(([figure]) => figure)
    .map(([figure, state]) => [figure.id === id, state].join())"""
AT = """([id, second]) => {  // the smallest letters, and what stands out of the drawing
    document.getAnimations().forEach(a => { a.pause(); a.currentTime = 1000 * second; });
    const svg = document.querySelector(`#${id} svg`), frame = svg.getBoundingClientRect();
    const scale = frame.width / svg.viewBox.baseVal.width;
    const seen = e => { for (; e !== svg; e = e.parentElement)
        if (getComputedStyle(e).opacity < 0.5) return false;
        return true; };
    const texts = [...svg.querySelectorAll("text")].filter(seen);
    const out = texts.filter(t => { const b = t.getBoundingClientRect();
        return b.left < frame.left - 1 || b.right > frame.right + 1 || b.bottom > frame.bottom; });
    return [frame.left >= 0 && frame.right <= innerWidth, texts.length,
        Math.min(...texts.map(t => scale * t.getAttribute("font-size"))),
        out.map(t => t.textContent)];
}"""


def test_every_animation_stands_on_a_page():
    assert sorted(PAGE_OF) == NAMES


@pytest.fixture
def visit(browser, address):  # noqa: F811
    """A function that opens the page of an animation."""
    contexts = []

    def start(name, motion="no-preference", width=375):
        size = {"width": width, "height": 900}
        contexts.append(browser.new_context(viewport=size, reduced_motion=motion))
        page = contexts[-1].new_page()
        page.goto(address + PAGE_OF[name].relative_to(SITE).as_posix())
        return page, f"moving-{name.replace('_', '-')}"

    yield start
    for context in contexts:
        context.close()


@pytest.mark.parametrize("name", NAMES)
def test_an_animation_has_names_and_pauses_by_the_keyboard(name, visit):
    page, id_ = visit(name)
    drawing = animations.ANIMATIONS[name]()
    control = page.get_by_role("checkbox", name=f"Pause: {drawing.title}", exact=True)
    image = page.get_by_role("img", name=drawing.title, exact=True)
    assert control.count() == image.count() == 1
    assert page.locator(f"#{id_}-story").text_content() == drawing.story
    mine = {state for state in page.evaluate(STATES, id_) if state.startswith("true")}
    assert mine == {"true,running"}
    control.focus()
    page.keyboard.press("Space")
    states = set(page.evaluate(STATES, id_))
    assert states - {"false,running"} == {"true,paused"}  # and no other stops
    page.keyboard.press("Space")
    assert "true,paused" not in page.evaluate(STATES, id_)
    page.emulate_media(media="print")
    assert page.evaluate(STATES, id_) == []


MOMENTS = """id => document.querySelector(`#${id} svg`).getAnimations({subtree: true})
    .map(a => a.currentTime / a.effect.getTiming().duration % 1)"""


@pytest.mark.parametrize("name", NAMES)
def test_a_slider_follows_an_animation_and_holds_it(name, visit):
    page, id_ = visit(name)
    title = animations.ANIMATIONS[name]().title
    slider = page.get_by_role("slider", name=f"Moment: {title}", exact=True)
    page.wait_for_function("slider => slider.value > 0", arg=slider.element_handle())
    slider.focus()
    for key, share in (("End", 0), ("Home", 0), ("ArrowRight", 1 / 200)):
        page.keyboard.press(key)
        assert {round(moment, 6) for moment in page.evaluate(MOMENTS, id_)} == {share}
    assert page.locator(f"#{id_}-pause").is_checked()
    assert {s for s in page.evaluate(STATES, id_) if s.startswith("true")} == {"true,paused"}
    page.emulate_media(reduced_motion="reduce")
    assert not slider.is_visible()


@pytest.mark.parametrize("name", NAMES)
def test_an_animation_fits_a_phone_at_all_times(name, visit):
    page, id_ = visit(name)
    seconds = animations.ANIMATIONS[name]().duration
    for tenth in range(11):
        inside, texts, smallest, out = page.evaluate(AT, [id_, seconds * tenth / 10])
        assert inside
        assert texts
        assert smallest >= 10
        assert out == []


@pytest.mark.parametrize("name", NAMES)
def test_an_animation_is_still_where_motion_is_unwelcome(name, visit):
    """What is seen is the still, in the colours of the page, and there is nothing to pause."""
    page, id_ = visit(name, motion="reduce")
    assert page.evaluate(STATES, id_) == []
    assert not page.locator(f"#{id_}-pause").is_visible()
    shown = "t => t.checkVisibility({opacityProperty: true})"
    there = f"texts => texts.filter({shown}).map(t => t.textContent)"
    still = re.findall(r"<text[^>]*>([^<]*)</text>", animations.ANIMATIONS[name]().picture())
    assert page.locator(f"#{id_} svg text").evaluate_all(there) == still
    ink = "text => getComputedStyle(text).fill"
    colours = set()
    for theme in ("light", "dark"):
        page.emulate_media(color_scheme=theme)
        page.wait_for_function(f"document.documentElement.dataset.theme === '{theme}'")
        colours.add(page.locator(f"#{id_} svg text").first.evaluate(ink))
    assert len(colours) == 2


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_holds_the_still(name):
    drawing = animations.ANIMATIONS[name]()
    path = SITE / "downloads" / f"{PAGE_OF[name].stem}.ipynb"
    prose = "\n".join(cell.source for cell in nbformat.read(path, as_version=4).cells)
    data = base64.b64encode(drawing.picture().encode()).decode()
    assert f"![{drawing.story}](data:image/svg+xml;base64,{data})" in prose


@pytest.mark.parametrize("name", NAMES)
def test_a_round_ends_as_it_begins(name):
    drawing = animations.ANIMATIONS[name]()
    assert 10 <= drawing.seconds <= 16
    for _, tracks in drawing.shapes:
        for track in tracks:
            frames = re.findall(r"([\d.]+)%\{(.*?)\}", track.keyframes(drawing.seconds))
            shares = [float(share) for share, _ in frames]
            assert shares == sorted(shares)
            assert (shares[0], shares[-1]) == (0, 100)
            assert frames[0][1] == frames[-1][1]
