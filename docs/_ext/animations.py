"""Animations: SVG that CSS moves, with numbers that the build computes.

``.. animation:: online_softmax`` shows the drawing that the function of that name makes. A page
holds it in its own colours, moving, with a checkbox before it that pauses it. All of this needs no
script; ``book.js`` adds a slider that holds it at any moment. Who prefers no motion sees one frame,
the still, and so do paper and the chapter's notebook.
"""

import heapq
import math
import re
from bisect import bisect_right
from html import escape
from pathlib import Path

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from kernelbook.lab import figures

WIDTH = 400  # so that letters of 12 are some 11 pixels high on a phone
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', Arial, sans-serif"
TEXT, MUTED, LINE, PALE = "#1f2328", "#59636e", "#d1d9e0", "#f6f8fa"
KEPT, KEPT_PALE = "#0b63ce", "#eaf2fb"  # what is kept: blue, as in the other figures
NEW, NEW_PALE = "#bc4c00", "#fff4e5"  # what is at work now: orange
MINUS = "\N{MINUS SIGN}"
OUTPUT = "chapters/images"
SLOWER = 1.4  # than the seconds in which the drawings are planned, at which readers lost the thread


# -- time -----------------------------------------------------------------------------------------


class Track:
    """A property over one round: its first value, then its changes, then back to the first."""

    FORMS = {
        "opacity": ("{:g}", "{:g}"),
        "translate": ("translate({:g}px, {:g}px)", "translate({:g} {:g})"),
        "stretch": ("translate({:g}px, 0) scale({:g}, 1)", "translate({:g} 0) scale({:g} 1)"),
    }

    def __init__(self, kind, first, *changes, over=0.4):
        """`changes` are (second, value); each takes `over` seconds from its second on."""
        self.kind, self.points = kind, [(0, first)]
        for second, value in changes:
            self.points += [(second, self.points[-1][1]), (second + over, value)]

    def at(self, second):
        """The value at a second."""
        after = bisect_right(self.points, second, key=lambda point: point[0])
        (start, a), (end, b) = self.points[after - 1], self.points[min(after, len(self.points) - 1)]
        share = (second - start) / (end - start) if end > start else 0
        return tuple(x + (y - x) * share for x, y in zip(a, b, strict=True))

    def attribute(self, second):
        """The value at a second, as an attribute of SVG."""
        value = self.FORMS[self.kind][1].format(*(round(x, 3) for x in self.at(second)))
        return f'{"opacity" if self.kind == "opacity" else "transform"}="{value}"'

    def keyframes(self, seconds):
        """The whole round, as the inside of a CSS @keyframes."""
        points = [*self.points, (seconds - 0.4, self.points[-1][1]), (seconds, self.points[0][1])]
        name = "opacity" if self.kind == "opacity" else "transform"
        return "".join(
            f"{100 * second / seconds:.4g}%{{{name}:"
            f"{self.FORMS[self.kind][0].format(*(round(x, 3) for x in value))}}}"
            for second, value in points
        )


def shown(start, end=None):
    """Is there from a second on, and until another; what follows it fades in when it has gone."""
    out = () if end is None else ((end - 0.2, (0,)),)
    return Track("opacity", (0,), (start, (1,)), *out, over=0.2)


def gone(end):
    """Is there until a second."""
    return Track("opacity", (1,), (end - 0.2, (0,)), over=0.2)


def moved(first, *changes, over=0.4):
    """Moves by (x, y)."""
    return Track("translate", first, *changes, over=over)


def stretched(x, first, *changes, over=0.5):
    """Is as wide as a share of itself says; its left edge stays at x."""
    changes = ((second, (x * (1 - share), share)) for second, share in changes)
    return Track("stretch", (x * (1 - first), first), *changes, over=over)


# -- shapes ---------------------------------------------------------------------------------------


def text(x, y, words, fill=TEXT, anchor="middle", size=14, bold=False):
    weight = ' font-weight="bold"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{fill}" text-anchor="{anchor}" '
        f'font-size="{size}"{weight}>{escape(str(words), quote=False)}</text>'
    )


def rect(x, y, width, height, fill="none", stroke="none", dashed=False, radius=2):
    dashes = ' stroke-dasharray="3 3"' if dashed else ""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}" '
        f'fill="{fill}" stroke="{stroke}"{dashes}/>'
    )


def line(x1, y1, x2, y2, stroke=LINE, width=1):
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{stroke}" '
        f'stroke-width="{width}"/>'
    )


def hatched(x, y, width, height, apart=5):
    """Slanted lines that fill a rectangle."""
    strokes = []
    for start in range(apart, math.ceil(width + height), apart):  # where x + y is the same
        right, left = min(start, width), max(0, start - height)
        strokes.append(f"M{x + right:g} {y + start - right:g}L{x + left:g} {y + start - left:g}")
    return f'<path d="{"".join(strokes)}" stroke="{MUTED}" stroke-width="1"/>'


def number(value, digits=2):
    """A number as people write it: 3, 0.37, −2, −∞."""
    if math.isinf(value):
        words = "-\N{INFINITY}"
    else:
        words = f"{value:.0f}" if value == round(value) else f"{value:.{digits}f}"
    return words.replace("-", MINUS)


class Drawing:
    """Shapes, each with the tracks that move it, in the order in which they are painted."""

    def __init__(self, title, height, seconds, still):
        """One round takes so many `seconds`; the still shows the second `still`."""
        self.title, self.height = title, height
        self.seconds, self.still = seconds, still
        self.story, self.shapes = "", []

    @property
    def duration(self):
        """How many seconds a round takes on the page."""
        return round(SLOWER * self.seconds, 1)

    def tell(self, sentences):
        """Add to the story, which is for those who do not see the drawing."""
        self.story = f"{self.story} {sentences}".strip()

    def add(self, svg, *tracks):
        self.shapes.append((svg, tracks))

    def picture(self):
        """The still, as an SVG that stands alone."""
        body = []
        for svg, tracks in self.shapes:
            if any(track.kind == "opacity" and not track.at(self.still)[0] for track in tracks):
                continue
            for track in tracks:
                svg = f"<g {track.attribute(self.still)}>{svg}</g>"
            body.append(svg)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" font-family="{FONT}">\n'
            f"<title>{escape(self.title)}</title>\n" + "\n".join(body) + "\n</svg>\n"
        )

    def figure(self, name):
        """The animation as HTML, with the checkbox that pauses it."""
        body, classes = [], {}  # the class of each keyframes
        for svg, tracks in self.shapes:
            for track in tracks:
                frames = track.keyframes(self.seconds)
                css = classes.setdefault(frames, f"{name}-{len(classes)}")
                svg = f'<g class="{css}" {track.attribute(self.still)}>{svg}</g>'
            body.append(svg)
        title = escape(self.title)
        return (
            f'<figure class="kb-animation" id="{name}">\n'
            f'<input type="checkbox" id="{name}-pause">'
            f'<label for="{name}-pause">Pause: {title}</label>\n'
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" '
            f'aria-labelledby="{name}-title" aria-describedby="{name}-story" '
            f'font-family="{FONT}">\n'
            f'<title id="{name}-title">{title}</title>\n'
            f'<desc id="{name}-story">{escape(self.story)}</desc>\n'
            f"<style>\n{self.style(name, classes, ''.join(body))}</style>\n"
            + "\n".join(body)
            + "\n</svg>\n</figure>\n"
        )

    def style(self, name, classes, body):
        """The keyframes, and the colours of the dark theme."""
        moving = "".join(
            f".{css}{{animation:{css} {self.duration}s linear infinite}}\n"
            f"@keyframes {css}{{{frames}}}\n"
            for frames, css in classes.items()
        )
        dark = "".join(
            f'html[data-theme="dark"] #{name} [{what}="{light}"]'
            f"{{{what}:{figures.to_dark(light)}}}\n"
            for what, light in sorted(set(re.findall(r'(fill|stroke)="(#\w+)"', body)))
        )
        media = "screen and (prefers-reduced-motion: no-preference)"
        return f"@media {media} {{\n{moving}}}\n{dark}"


# -- the rounds of Philox, in the dropout chapter --------------------------------------------------

SEED, COUNTER, FLIPPED, ROUNDS = 7, 2024, 0, 7
"""Seed and counter, the bit of the counter that is flipped, and the rounds of the kernel."""


def differences():
    """Yield, for each number of rounds, which bits of the four words differ after it."""
    import torch

    from kernelbook.reference import philox

    counters = torch.tensor([COUNTER, COUNTER ^ 1 << FLIPPED])
    for rounds in range(ROUNDS + 1):
        one, other = philox(SEED, counters, rounds).tolist()
        words = zip(one, other, strict=True)
        yield [[bit for bit in range(32) if (a ^ b) >> bit & 1] for a, b in words]


def one_flipped_bit():
    """One bit of a counter is flipped; round by round, more bits differ because of it."""
    left, pitch, gap, high, each = 64, 2.1, 5, 24, 1.3  # bits and rows; seconds of a round
    drawing = Drawing("one flipped bit spreads", 262, seconds=13, still=12)
    drawing.tell(
        f"Bit {FLIPPED} of a counter is flipped. Bars mark which of the 128 bits differ after each "
        "round of Philox."
    )
    add = drawing.add
    words = [left + (32 * pitch + gap) * word for word in range(4)]
    for word, x in enumerate(words):
        add(text(x + 16 * pitch, 18, f"c{'₀₁₂₃'[word]}", MUTED, size=13))
    add(text(left - 8, 18, "rounds", MUTED, "end", size=13))
    add(text(396, 18, "differ", MUTED, "end", size=13))
    for rounds, found in enumerate(differences()):
        y, second = 28 + high * rounds, each * rounds + 0.4
        add(text(left - 8, y + 14, rounds, anchor="end", size=13))
        add("".join(rect(x, y, 32 * pitch, high - 5, PALE, LINE, radius=0) for x in words))
        bars = "".join(
            f"M{x + pitch * (31 - bit):.1f} {y}v{high - 5}h{pitch}v-{high - 5}z"
            for x, bits in zip(words, found, strict=True)
            for bit in bits
        )
        count = sum(map(len, found))
        add(f'<path d="{bars}" fill="{NEW}"/>', shown(second))
        add(text(396, y + 14, count, anchor="end", size=13), shown(second))
        drawing.tell(f"After {rounds}: {count}.")
    words = "unrelated numbers differ in about 64 of 128 bits"
    add(text(left, 244, words, MUTED, "start", size=12))
    return drawing


# -- the row of the softmax chapter ---------------------------------------------------------------

ROW = ((1, 2, 0, 1), (3, 1, 2, 3), (2, 3, 1, 2), (4, 2, 3, 1))


def pair(block):
    """The maximum of a block, and the sum of its exponentials relative to it."""
    return max(block), sum(math.exp(x - max(block)) for x in block)


def recurrence():
    """Yield (old maximum, maximum, alpha, old sum, share of the block, sum) for each block."""
    m, d = -math.inf, 0.0
    for block in ROW:
        m_new = max(m, *block)
        alpha, share = math.exp(m - m_new), sum(math.exp(x - m_new) for x in block)
        yield m, m_new, alpha, d, share, d * alpha + share
        m, d = m_new, d * alpha + share


def online_softmax():
    """The recurrence of the online kernel, block by block."""
    left, pitch, base, unit, each = 52, 87, 134, 23, 2.9  # of the numbers; seconds of a block
    steps = list(recurrence())
    full = max(d for *_, d in steps)
    per_one = 326 / full
    drawing = Drawing("online softmax, block by block", 346, seconds=15, still=11.1)
    drawing.tell(
        "A row of 16 numbers comes in four blocks. A line shows the maximum so far, m; a bar is "
        "as long as the sum so far, d."
    )
    add = drawing.add
    add(text(left, 18, "a row, read in four blocks", MUTED, "start"))
    add(line(left, base, 396, base))
    add(line(4, 164, 396, 164))
    for words, y, fill in (("m", 188, KEPT), ("alpha", 212, MUTED), ("d", 236, KEPT)):
        add(text(44, y, words, fill, "end", bold=True))
    add(text(44, 273, "d", KEPT, "end", bold=True))

    lengths = []  # of the bar
    for i, (_, _, alpha, d_old, _, d) in enumerate(steps):
        lengths += [(each * i + 1.1, d_old * alpha / full), (each * i + 2.5, d / full)]
    bar = rect(left, 254, per_one * full, 28, KEPT_PALE, KEPT)
    add(bar, stretched(left, 0, *lengths))

    for i, (block, step) in enumerate(zip(ROW, steps, strict=True)):
        m_old, m, alpha, d_old, share, d = step
        start, end = each * i, each * (i + 1)
        up, shrink, grow = start + 0.6, start + 1.1, start + 1.8
        last = None if i == len(ROW) - 1 else end
        bars = [(left + pitch * i + 20 * n, max(unit * x, 2)) for n, x in enumerate(block)]
        arrives = moved((20, 0), (start, (0, 0)), over=0.3)
        for fill, stroke, there in (
            (KEPT_PALE, KEPT, shown(start + 0.5)),
            (NEW_PALE, NEW, shown(start, end)),
        ):
            shapes = (rect(x, base - height, 15, height, fill, stroke) for x, height in bars)
            add("".join(shapes), there, arrives)
        values = zip(bars, block, strict=True)
        values = (text(x + 7.5, base + 17, value, MUTED, size=13) for (x, _), value in values)
        add("".join(values), shown(start), arrives)

        for value, y, second in ((m, 188, up), (alpha, 212, up + 0.3), (d, 236, grow)):
            add(text(left + pitch * i + 38, y, number(value)), shown(second))
        words = f"alpha = exp({number(m_old)} {MINUS} {number(m)}) = {number(alpha)}"
        words += f": m is still {number(m)}" * (m == m_old)
        add(text(left, 310, words, anchor="start"), shown(up + 0.3, last))
        words = f"{number(d_old)} × {number(alpha)} + {number(share)} = {number(d)}"
        add(text(left, 332, f"d = {words}", anchor="start"), shown(grow, last))
        drawing.tell(
            f"Block {i + 1}: m {'stays' if m == m_old else 'becomes'} {number(m)}, alpha is "
            f"{number(alpha)}, and d becomes {words}."
        )
        if alpha not in (0, 1):  # an outline of what d was, while it shrinks
            outline = rect(left, 254, per_one * d_old, 28, stroke=MUTED, dashed=True)
            add(outline, shown(shrink - 0.3, end))
        begin = left + per_one * d_old * alpha
        new = rect(begin, 254, per_one * share, 28, NEW_PALE, NEW)
        add(new, stretched(begin, 0, (grow, 1)), shown(grow - 0.3, end))

    levels = [(each * i + 0.6, (0, base - unit * m)) for i, (_, m, *_) in enumerate(steps)]
    mark = line(left, 0, 396, 0, KEPT, 2) + text(44, 5, "m", KEPT, "end", bold=True)
    add(mark, shown(levels[0][0]), moved((0, base), *levels))
    return drawing


REGISTERS, EACH = 65536, 64
"""The registers of an SM, and the numbers of a row that each thread of softmax has."""


def programs_of_an_sm():
    """Yield (name, columns, programs of a row, registers for numbers, registers, those occupied).

    The last three are of one program. A thread occupies registers by the eight.
    """
    from kernelbook.lab import results
    from kernelbook.ops.softmax import tuned

    table = results.find("softmax")["tables"]["Programs per SM and the speed, bfloat16"]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    compiled = {(row["kernel"], row["columns"]): row["registers per thread"] for row in rows}
    parts, columns, _ = tuned.split(65536, 2, "forward")
    for name, length, pieces, width, numbers in (
        ("row", 32768, 1, 32768, 32768),
        ("packed", 32768, 1, 32768, 32768 // 2),
        ("split", 65536, parts, columns, columns),
    ):
        threads, each = width // EACH, compiled[name, length]
        yield name, length, pieces, numbers, threads * each, threads * 8 * math.ceil(each / 8)


def registers_of_an_sm():
    """Programs fill the registers of an SM: by the kernels row, packed and split."""
    drawing = Drawing("programs fill the registers of an SM", 322, seconds=12, still=11)
    drawing.tell(
        f"A bar is the {REGISTERS:,} registers of an SM. Programs come until no other fits."
    )
    add, unit, second = drawing.add, 392 / REGISTERS, 0.6
    for place, of_one in enumerate(programs_of_an_sm()):
        name, columns, parts, numbers, registers, occupied = of_one
        y, fit = 8 + 96 * place, REGISTERS // occupied
        row = f"a row of {columns:,} columns" + f" in {parts} parts" * (parts > 1)
        words = "1 program fits" if fit == 1 else f"{fit} programs fit"
        add(text(4, y + 14, name, anchor="start", bold=True))
        add(text(396, y + 14, row, MUTED, "end", size=13))
        add(rect(4, y + 22, 392, 30, stroke=MUTED))
        for program in range(fit):
            x = 4 + unit * occupied * program
            there = rect(x, y + 22, unit * occupied, 30, PALE, MUTED)
            if occupied > registers:
                there += hatched(x + unit * registers, y + 22, unit * (occupied - registers), 30)
            there += rect(x, y + 22, unit * numbers, 30, KEPT_PALE, KEPT)
            add(there, shown(second))
            second += 0.9 if fit < 4 else 0.3
        outcome = "no other can load meanwhile" if fit == 1 else "others can load meanwhile"
        add(text(4, y + 70, f"{words}: {outcome}", anchor="start", size=13))
        drawing.tell(f"{name.capitalize()}, {row}: {words}, {outcome}.")
        second += 1.4
    add(rect(4, 300, 18, 14, KEPT_PALE, KEPT) + rect(162, 300, 18, 14, PALE, MUTED))
    add(rect(284, 300, 18, 14, PALE, MUTED) + hatched(284, 300, 18, 14))
    add(text(28, 312, "numbers of the row", MUTED, "start", size=13))
    add(text(186, 312, "other values", MUTED, "start", size=13))
    add(text(308, 312, "rounding up", MUTED, "start", size=13))
    return drawing


PARTS = range(len(ROW))
STARTS, READ, WRITE = (0, 1, 2, 5), 3, 3
"""When the programs of a row start, and how long a part takes to read and to write."""


def publish_and_collect():
    """Four programs of a row exchange their pairs, and each waits for the last."""
    published = [start + READ for start in STARTS]
    polled, last = max(published) + 1, max(PARTS, key=lambda i: STARTS[i])
    end = polled + WRITE
    left, top, high, each = 76, 76, 42, 0.8  # numbers of the picture; seconds of a tick
    tick = (396 - left) / end
    drawing = Drawing("four programs of a row exchange their pairs", 310, seconds=14, still=12.6)
    add = drawing.add
    m_row, d_row = list(recurrence())[-1][1::4]
    moments = (
        (0, "Each program reads its part, publishes m and d, then polls."),
        (published[last], f"Program {last} publishes: now no slot is empty."),
        (polled, "Each program merges the four pairs, and writes its part."),
        (end, f"All four have found m = {number(m_row)} and d = {number(d_row)}."),
    )
    add(text(left - 8, 33, "slots", MUTED, "end", size=13))
    for i in PARTS:
        x, second = left + 81 * i, published[i] * each + 0.4
        add(rect(x, 14, 77, 30, stroke=LINE, dashed=True, radius=4))
        add(text(x + 38.5, 34, "empty", MUTED, size=13), gone(second))
        filled = rect(x, 14, 77, 30, KEPT_PALE, KEPT, radius=4)
        filled += text(x + 38.5, 34, f"({', '.join(map(number, pair(ROW[i])))})", size=13)
        add(filled, shown(second))
    for i in PARTS:
        y = top + high * i
        add(text(left - 8, y + 19, f"program {i}", anchor="end", size=13))
        add(line(left, y + 32, 396, y + 32))
        for begin, stop, words, fill, stroke in (
            (STARTS[i], published[i], "read", PALE, MUTED),
            (polled, end, "write", KEPT_PALE, KEPT),
        ):
            x, width = left + tick * begin, tick * (stop - begin)
            growing = stretched(x, 0, (begin * each, 1), over=(stop - begin) * each)
            add(rect(x, y, width, 28, fill, stroke), shown(begin * each), growing)
            seen = (begin + 0.85 * (stop - begin)) * each  # when the bar is as long as the words
            add(text(x + width / 2, y + 19, words, size=12), shown(seen))
        for poll in range(published[i], polled):
            x = left + tick * (poll + 0.5)
            add(f'<circle cx="{x:g}" cy="{y + 14}" r="2.5" fill="{MUTED}"/>', shown(poll * each))
        x, leaves = left + tick * published[i], published[i] * each
        dot = f'<circle cx="{x:g}" cy="{y + 14}" r="5" fill="{KEPT}"/>'
        to_slot = moved((0, 0), (leaves, (left + 81 * i + 38.5 - x, 15 - y)))
        add(dot, shown(leaves - 0.2, leaves + 0.6), to_slot)
    add(text(left, 256, "a small dot: one look at the slots", MUTED, "start", size=12))
    drawing.tell("Four programs share a row, and each has a slot in memory.")
    seconds = [ticks * each for ticks, _ in moments]
    for (_, words), start, stop in zip(moments, seconds, [*seconds[1:], None], strict=True):
        add(text(4, 290, words, anchor="start", size=13), shown(start, stop))
        drawing.tell(words)
    return drawing


# -- the loop of the attention chapter ------------------------------------------------------------

BLOCK, DIAGONAL, TILES = 4, 3, 6
"""Queries or keys of a tile; the tile of queries that is followed; the tiles of keys there are."""

Q = ((1, 1), (2, -1), (0, 2), (1, 2))
K = (
    *((0, 1), (1, 0), (-1, 0), (0, 0)),
    *((1, 1), (0, -1), (2, 0), (-1, 1)),
    *((1, -1), (0, 1), (1, 0), (-1, -1)),
    *((0, 2), (1, 1), (2, 1), (1, 2)),
)
V = (
    *((1, 0), (2, 1), (0, 3), (1, 1)),
    *((3, 1), (0, 2), (1, 0), (2, 2)),
    *((0, 1), (1, 3), (2, 0), (1, 2)),
    *((2, 2), (3, 0), (1, 1), (0, 2)),
)


def iterations():
    """Yield what each iteration makes, as a dictionary of matrices."""
    import torch

    from kernelbook.ops.attention.tiled import key_tiles

    q, all_k, all_v = (torch.tensor(x, dtype=torch.float64) for x in (Q, K, V))
    m_i = torch.full((BLOCK, 1), -math.inf)
    l_i, acc = torch.zeros(BLOCK, 1), torch.zeros(BLOCK, 2)
    length = BLOCK * TILES
    for start, end, masked in key_tiles(BLOCK * DIAGONAL, length, length, BLOCK, BLOCK, True):
        k, v = all_k[start:end], all_v[start:end]
        scores = q @ k.T
        if masked:
            scores = scores.masked_fill(torch.ones(BLOCK, BLOCK).triu(1).bool(), -math.inf)
        m_new = torch.maximum(m_i, scores.amax(1, keepdim=True))
        alpha, p = torch.exp(m_i - m_new), torch.exp(scores - m_new)
        made = {"masked": masked, "q": q, "k": k.T, "v": v}
        made |= {"scores": scores, "alpha": alpha, "p": p}
        made |= {"m before": m_i, "l before": l_i, "acc before": acc}
        made |= {"l rescaled": l_i * alpha, "acc rescaled": acc * alpha}
        m_i, l_i, acc = m_new, l_i * alpha + p.sum(1, keepdim=True), acc * alpha + p @ v
        yield made | {"m": m_i, "l": l_i, "acc": acc}


def cells(x, y, matrix, width, height, fill=TEXT):
    """The numbers of a matrix, each in its cell; x and y are the corner."""
    return "".join(
        text(x + width * (j + 0.5), y + height * i + height / 2 + 4.5, number(value), fill, size=12)
        for i, row in enumerate(matrix.tolist())
        for j, value in enumerate(row)
    )


def attention_loop():
    """The loop of attention for one tile of queries, with a causal mask."""
    each = 3.1  # seconds of an iteration
    steps = list(iterations())
    done = each * len(steps)
    drawing = Drawing("tiles of k and v stream past a tile of q", 410, seconds=16, still=done - 0.3)
    drawing.tell(
        "A tile of 4 queries stays. Tiles of k and v come one by one: first whole tiles, then the "
        "masked tile of the diagonal; those beyond it are never loaded. Each gives a tile of "
        "scores, and from iteration to iteration each query carries m_i, l_i and acc."
    )
    rises, alphas = (
        ", ".join(number(made[name][-1].item()) for made in steps) for name in ("m", "alpha")
    )
    drawing.tell(
        f"For the last query m_i goes {rises}, and alpha {alphas}: where m_i rises, l_i and acc "
        "shrink before the new terms are added. After the loop, out is acc divided by l_i."
    )
    add = drawing.add

    # The strip of tiles, and what is on chip.
    add(text(90, 25, "tiles of k, v", MUTED, "end"))
    for j in range(TILES):
        x, start = 100 + 50 * j, each * j
        add(rect(x, 8, 46, 24, stroke=LINE, dashed=True, radius=4))
        if j < len(steps):
            words = text(x + 23, 25, j)
            add(rect(x, 8, 46, 24, KEPT_PALE, KEPT, radius=4) + words, shown(start + 0.3))
            new = rect(x, 8, 46, 24, NEW_PALE, NEW, radius=4) + words
            add(new, shown(start, start + each))
    whole = sum(not made["masked"] for made in steps)
    for x, words in (
        (100 + 25 * whole, "stage 1: whole"),
        (100 + 25 * (whole + len(steps)), "stage 2"),
        (100 + 25 * (len(steps) + TILES), "never loaded"),
    ):
        add(text(x - 2, 47, words, MUTED, size=12))
    add(rect(8, 170, 44, 96, KEPT_PALE, KEPT, radius=4))
    add(cells(8, 170, steps[0]["q"], 22, 24))
    add(text(30, 162, "q", KEPT, bold=True) + text(30, 283, "stays", KEPT, size=12))
    names = text(56, 125, "kᵀ", NEW, "end", bold=True) + text(298, 105, "v", NEW, "end", bold=True)
    add(names, gone(done))
    for x, width, words in ((198, 26, "m_i"), (264, 40, "l_i"), (308, 90, "acc")):
        add(rect(x, 170, width, 96, KEPT_PALE, KEPT, radius=4))
        add(text(x + width / 2, 162, words, KEPT, size=12, bold=True))
    add(text(244, 162, "alpha", MUTED, size=12, bold=True))

    # The loop, with a mark at the line that is being computed.
    lines = (
        "load k and v, scores = q kᵀ",
        "m_new = max(m_i, scores),  alpha = exp(m_i − m_new)",
        "p = exp(scores − m_new)",
        "l_i = l_i · alpha,  acc = acc · alpha",
        "l_i = l_i + Σ p,  acc = acc + p v",
        "after the loop: out = acc / l_i",
    )
    for i, words in enumerate(lines):
        add(text(24, 304 + 20 * i, words, anchor="start", size=13))
    whens = (0, 1.0, 1.5, 2.0, 2.5)
    jumps = [
        (each * j + when, (0, 20 * i)) for j in range(len(steps)) for i, when in enumerate(whens)
    ]
    mark = f'<path d="M8 294l9 5l-9 5z" fill="{NEW}"/>'
    add(mark, moved((0, 0), *jumps, (done + 0.3, (0, 100)), over=0.15))

    carried = {"m": (198, 26), "l": (264, 40), "acc": (308, 45)}
    first = steps[0]
    for name, when in (("m", 1.0), ("l", 2.0), ("acc", 2.0)):
        x, width = carried[name]
        nothing = cells(x, 170, first[f"{name} before"], width, 24)
        add(nothing, gone(when))
    for j, made in enumerate(steps):
        start, end = each * j, each * (j + 1)
        last = j == len(steps) - 1
        slides = moved((14, 0), (start, (0, 0)), (end - 0.2, (-14, 0)), over=0.2)
        for name, x, y, width in (("k", 62, 100, 32), ("v", 308, 60, 45)):
            rows, columns = made[name].shape
            tile = rect(x, y, width * columns, 20 * rows, NEW_PALE, NEW, radius=4)
            add(tile + cells(x, y, made[name], width, 20), shown(start, end), slides)
        frame = rect(62, 170, 128, 96, NEW_PALE, NEW, radius=4)
        add(frame, shown(start + 0.5, end))
        for name, begin, until in (("scores", 0.5, 1.5), ("p", 1.5, each)):
            there = shown(start + begin, start + until)
            add(text(126, 162, name, NEW, size=13, bold=True), there)
            add(cells(62, 170, made[name], 32, 24), there)
        add(cells(226, 170, made["alpha"], 36, 24, NEW), shown(start + 1.0, end))
        m_until = None if last else end + 1.0
        add(cells(198, 170, made["m"], 26, 24), shown(start + 1.0, m_until))
        for name in ("l", "acc"):
            x, width = carried[name]
            rescaled = cells(x, 170, made[f"{name} rescaled"], width, 24, NEW)
            add(rescaled, shown(start + 2.0, start + 2.5))
            until = end + 2.0 if not last else done + 0.3 if name == "acc" else None
            add(cells(x, 170, made[name], width, 24), shown(start + 2.5, until))
        if made["masked"]:
            add(text(126, 283, "−∞: not seen", NEW, size=12), shown(start + 0.5, end))
    out = cells(308, 170, steps[-1]["acc"] / steps[-1]["l"], 45, 24)
    out += text(353, 283, "acc / l_i = out", KEPT, size=12)
    add(out, shown(done + 0.3))
    return drawing


# -- the slots of a GPU, filled by causal attention -----------------------------------------------

SLOTS, QUERY_TILES, HEADS = 6, 8, 2


def schedule(weights):
    """Yield (slot, begin, weight) for each program: the slot that is free first takes the next."""
    free = [(0, slot) for slot in range(SLOTS)]
    for weight in weights:
        begin, slot = heapq.heappop(free)
        heapq.heappush(free, (begin + weight, slot))
        yield slot, begin, weight


def light_or_heavy_first():
    """The same programs of causal attention in two orders, on a GPU of three SMs."""
    from kernelbook.ops.attention.tiled import key_tiles

    length = BLOCK * QUERY_TILES
    light = [
        len(list(key_tiles(start, length, length, BLOCK, BLOCK, True)))
        for _ in range(HEADS)
        for start in range(0, length, BLOCK)
    ]
    orders = {"light first": light, "heavy first": sorted(light, reverse=True)}  # of all heads
    runs = {name: list(schedule(weights)) for name, weights in orders.items()}
    ends = {name: max(begin + w for _, begin, w in run) for name, run in runs.items()}
    left, each, unit = 54, 0.7, (396 - 54) / max(ends.values())
    drawing = Drawing("slots filled light first and heavy first", 358, seconds=14.5, still=13)
    drawing.tell(
        f"Three SMs with two slots each run the {len(light)} programs of {HEADS} heads; a program "
        f"takes as long as it has tiles of keys, from {min(light)} to {max(light)}."
    )
    add = drawing.add
    words = "a number: the tiles of keys of a program; dashed: idle"
    add(text(left, 350, words, MUTED, "start", size=12))
    for name, top in zip(orders, (30, 202), strict=True):
        busy = sum(light) / SLOTS / ends[name]
        words = f"done at {ends[name]}, slots {busy:.0%} busy".replace("%", " %")
        drawing.tell(f"{name.capitalize()}: {words}.")
        add(text(left, top - 10, name, anchor="start", bold=True))
        add(text(396, top - 10, words, NEW, "end"), shown(ends[name] * each))
        for slot in range(SLOTS):
            y = top + 20 * slot + 6 * (slot // 2)
            if slot % 2 == 0:
                add(text(left - 8, y + 24, f"SM {slot // 2}", MUTED, "end", size=13))
            last = max(begin + w for where, begin, w in runs[name] if where == slot)
            if last < ends[name]:
                idle = rect(
                    left + unit * last, y, unit * (ends[name] - last), 18, "none", MUTED, True
                )
                add(idle, shown(ends[name] * each))
        for slot, begin, weight in runs[name]:
            x, y = left + unit * begin, top + 20 * slot + 6 * (slot // 2)
            colours = (NEW_PALE, NEW) if weight == max(light) else (KEPT_PALE, KEPT)
            growing = stretched(x, 0, (begin * each, 1), over=weight * each)
            add(rect(x, y, unit * weight, 18, *colours), shown(begin * each), growing)
            there = shown((begin + weight) * each - 0.2)
            add(text(x + unit * weight / 2, y + 13.5, weight, size=12), there)
    return drawing


# -- the two sweeps of attention's backward pass --------------------------------------------------

SIDE = 5
"""Tiles of queries, and tiles of keys."""

SWEEPS = {  # what a program owns, what it makes, and the matmuls of a pair of tiles
    "first sweep": ("a program owns keys", "dk, dv", "S dP dV dK"),
    "second sweep": ("a program owns queries", "dq", "S dP dQ"),
}


def two_sweeps():
    """Programs that own a column of tiles, then programs that own a row."""
    from kernelbook.ops.attention.tiled import key_tiles

    length, each, cell = BLOCK * SIDE, 1.3, 31
    tiles = {
        (i, start // BLOCK): masked
        for i in range(SIDE)
        for start, _, masked in key_tiles(BLOCK * i, length, length, BLOCK, BLOCK, True)
    }
    done = each * SIDE  # a sweep's iterations; the second sweep starts where the first ends
    drawing = Drawing("two sweeps over the same tiles", 326, seconds=16, still=2 * done + 1)
    drawing.tell(
        "Rows are tiles of queries, columns tiles of keys. Tiles above the diagonal are dashed: no "
        "query sees a key there, so no program visits them. All programs of a sweep run at once."
    )
    add = drawing.add
    for number, (name, (owns, makes, matmuls)) in enumerate(SWEEPS.items()):
        left, top, begin = 12 + 206 * number, 66, done * number
        by_column = makes == "dk, dv"
        add(text(left, 20, name, anchor="start", bold=True))
        add(text(left, 40, owns, MUTED, "start", size=13))
        streams = "loop over q, do ↓" if by_column else "loop over k, v →"
        add(text(left, 59, streams, NEW, "start", size=12))
        for i in range(SIDE):
            for j in range(SIDE):
                x, y = left + cell * j, top + cell * i
                add(rect(x, y, cell - 3, cell - 3, stroke=LINE, dashed=True, radius=3))
                if (i, j) in tiles:
                    start = begin + each * (i - j if by_column else j)
                    stroke = line(x + 4, y + 4, x + cell - 7, y + cell - 7, MUTED)
                    words = stroke if tiles[i, j] else ""
                    now = rect(x, y, cell - 3, cell - 3, NEW_PALE, NEW, radius=3) + words
                    was = rect(x, y, cell - 3, cell - 3, KEPT_PALE, KEPT, radius=3) + words
                    add(now, shown(start, start + each))
                    add(was, shown(start + each))
        for owner in range(SIDE):
            iterations = SIDE - owner if by_column else owner + 1
            along, beyond = cell * (owner + 0.5) - 1.5, cell * SIDE + 7
            x, y = (along, beyond) if by_column else (beyond, along)
            dot = f'<circle cx="{left + x:g}" cy="{top + y:g}" r="5" fill="{KEPT}"/>'
            add(dot, shown(begin + each * iterations))
        add(text(left, 254, f"● writes {makes}", KEPT, "start", size=13))
        for iteration in range(SIDE):
            start = begin + each * iteration
            count = sum((i - j if by_column else j) <= iteration for i, j in tiles)
            total = count * len(matmuls.split())
            until = None if iteration == SIDE - 1 else start + each
            so_far = f"{total} matmuls" + " so far" * (until is not None)
            add(text(left, 275, so_far, NEW, "start"), shown(start, until))
        add(text(left, 295, f"per tile: {matmuls}", MUTED, "start", size=12))
        drawing.tell(
            f"In the {name} {owns}: {'a column' if by_column else 'a row'} of tiles, one per "
            f"iteration. Each pair of tiles takes {len(matmuls.split())} matmuls, {total} in all, "
            f"and each program writes its own {makes}."
        )
    legend = "diagonal line: masked; dashed: never computed"
    add(text(12, 318, legend, MUTED, "start", size=12))
    return drawing


# -- the ring of the chapter on several GPUs ------------------------------------------------------

RANKS = 4
"""Ranks of the drawing, at the corners of a square, in the order of the ring."""


def ring_of_ranks():
    """Keys and values go round, and each rank merges what it computes with them."""
    each, wide, high = 2.8, 150, 88  # seconds of a step; sizes of a rank
    corners = ((12, 34), (238, 34), (238, 176), (12, 176))
    drawing = Drawing("keys and values go round the ring", 330, seconds=14, still=each + 1.8)
    drawing.tell(
        f"{RANKS} ranks stand in a ring. Each keeps its queries, and has a part of the keys and "
        "values, which it sends to the next rank while it computes with them."
    )
    add = drawing.add
    for (x1, y1), (x2, y2) in zip(corners, (*corners[1:], corners[0]), strict=True):
        across = y1 == y2
        start = (x1 + wide * (x2 > x1), y1 + 24) if across else (x1 + 126, y1 + high * (y2 > y1))
        end = (x2 + wide * (x2 < x1), y2 + 24) if across else (x2 + 126, y2 + high * (y2 < y1))
        add(line(*start, *end, LINE, 2))
        (x, y), sx, sy = end, (x2 > x1) - (x2 < x1), (y2 > y1) - (y2 < y1)  # its head points on
        tip = f"M{x:g} {y:g}l{-9 * sx - 5 * sy} {-9 * sy - 5 * sx}l{10 * sy} {10 * sx}z"
        add(f'<path d="{tip}" fill="{MUTED}"/>')
    for rank, (x, y) in enumerate(corners):
        add(rect(x, y, wide, high, PALE, LINE, radius=6))
        add(text(x, y - 8, f"rank {rank}", MUTED, "start", size=13))
        add(rect(x + 10, y + 10, 40, 28, KEPT_PALE, KEPT, radius=4))
        add(text(x + 30, y + 29, f"q{rank}", KEPT, size=13, bold=True))
        add(text(x + 10, y + 56, "out, lse of", MUTED, "start", size=12))
        for source in range(RANKS):
            left = x + 10 + 34 * source
            add(rect(left, y + 62, 29, 19, stroke=LINE, dashed=True, radius=3))
            merged = each * ((rank - source) % RANKS) + 1.6
            part = rect(left, y + 62, 29, 19, KEPT_PALE, KEPT, radius=3)
            add(part + text(left + 14.5, y + 76, f"k{source}", KEPT, size=12), shown(merged))
    for source, (x, y) in enumerate(corners):
        chip = rect(x + 102, y + 10, 40, 28, NEW_PALE, NEW, radius=4)
        chip += text(x + 122, y + 29, f"k{source} v{source}", NEW, size=12)
        moves = []
        for step in range(1, RANKS):
            to_x, to_y = corners[(source + step) % RANKS]
            moves.append((each * step - 0.9, (to_x - x, to_y - y)))
        add(chip, moved((0, 0), *moves, over=0.8))
    for step in range(RANKS):
        start, end = each * step, each * (step + 1)
        pairs = ", ".join(f"q{rank} k{(rank - step) % RANKS}ᵀ" for rank in range(RANKS))
        until = None if step == RANKS - 1 else end
        add(text(12, 296, f"step {step + 1}: {pairs}", NEW, "start", size=13), shown(start, until))
        goes = "nothing is left to send" if until is None else "meanwhile k and v go on"
        add(text(12, 317, f"merge by lse; {goes}", MUTED, "start", size=13), shown(start, until))
        drawing.tell(f"Step {step + 1}: the ranks compute {pairs}, and merge the results by lse.")
    drawing.tell(f"After {RANKS} steps each rank has attention to all keys, for its own queries.")
    return drawing


ANIMATIONS = {
    "one_flipped_bit": one_flipped_bit,
    "online_softmax": online_softmax,
    "registers_of_an_sm": registers_of_an_sm,
    "publish_and_collect": publish_and_collect,
    "attention_loop": attention_loop,
    "light_or_heavy_first": light_or_heavy_first,
    "two_sweeps": two_sweeps,
    "ring_of_ranks": ring_of_ranks,
}


# -- the directive --------------------------------------------------------------------------------


class Animation(nodes.image):
    """The still, which a notebook shows as any image; a page shows `figure` in its place."""


class AnimationDirective(SphinxDirective):
    """Show an animation of this module by its name."""

    required_arguments = 1

    def run(self):
        name = self.arguments[0]
        drawing = ANIMATIONS[name]()
        uri = f"{OUTPUT}/{name}.svg"
        path = Path(self.env.srcdir, uri)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(drawing.picture(), encoding="utf-8")
        # Its colours change with the page: it needs no twin for the dark theme.
        node = Animation(uri=f"/{uri}", alt=drawing.story, classes=["only-light"])
        node["figure"] = drawing.figure(f"moving-{name.replace('_', '-')}")
        return [node]


def visit(translator, node):
    translator.body.append(node["figure"])


def setup(app):
    app.add_node(Animation, html=(visit, lambda translator, node: None))
    app.add_directive("animation", AnimationDirective)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
