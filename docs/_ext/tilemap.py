"""The tile map: which tiles of scores attention computes, for sizes that the reader chooses.

This module writes its HTML with the tiles of the first sizes, by the package's own rule. In a
browser, docs/_static/tilemap.js then shows the controls and draws the map again for other sizes.
"""

from collections import Counter
from string import Template

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

SEQLEN_Q, SEQLEN_K, BLOCK_M, BLOCK_N = 128, 128, 32, 16
"""The first sizes: those of the chapter's own table of tiles, causal."""

LONGEST = 1024
"""So that a map has at most 64 x 64 tiles, because the shortest tile is 16."""

BLOCKS = (16, 32, 64, 128)

HTML = Template("""\
<form class="kb-map" aria-labelledby="kb-map-title" autocomplete="off">
<p class="kb-map-title" id="kb-map-title">The tile map, live</p>
<p>Under a causal mask, query <i>i</i> sees key <i>j</i> if
<i>j</i>&nbsp;≤&nbsp;<i>i</i>&nbsp;+&nbsp;seqlen_k&nbsp;−&nbsp;seqlen_q. Here is what that means for
each tile.</p>
<noscript><p>With JavaScript, the sizes can be changed here.</p></noscript>
<div class="kb-map-suggestions" hidden>
<p id="kb-map-first">Make the keys twice as long as the queries, and watch where the diagonal goes.
Or begin with one of these:</p>
<div role="group" aria-labelledby="kb-map-first">
<button type="button" data-seqlen_q="128" data-seqlen_k="256">Keys twice as long</button>
<button type="button" data-seqlen_q="100" data-seqlen_k="127">Lengths that no tile divides</button>
<button type="button" data-seqlen_q="200" data-seqlen_k="40">More queries than keys</button>
</div>
</div>
<div class="kb-map-body">
<div class="kb-map-plot">
<p class="kb-map-keys" aria-hidden="true">$seqlen_k keys →</p>
<p class="kb-map-queries" aria-hidden="true">$seqlen_q queries →</p>
<div class="kb-map-frame" style="--columns: $columns; --shape: 1">
<div class="kb-map-tiles" role="img" aria-label="The tiles of $seqlen_q queries and $seqlen_k keys
under a causal mask, counted in the table below">$tiles</div>
<svg aria-hidden="true" preserveAspectRatio="none"><path class="kb-map-outside"></path>
<path class="kb-map-seen"></path></svg>
</div>
<p class="kb-map-tile" hidden></p>
</div>
<div class="kb-map-controls" hidden>
<fieldset><legend>Lengths</legend>
$lengths
</fieldset>
<fieldset><legend>Tiles</legend>
$blocks
</fieldset>
<fieldset class="kb-map-mask"><legend>Mask</legend>
<label><input type="radio" name="mask" value="full">full</label>
<label><input type="radio" name="mask" value="causal" checked>causal</label>
</fieldset>
<fieldset><legend>Sliding window</legend>
<label for="kb-map-window">Keys to the left</label>
<input type="number" id="kb-map-window" name="window" min="0" max="$longest"
placeholder="none">
</fieldset>
</div>
</div>
<p class="kb-map-summary" hidden></p>
<table class="table">
<thead><tr><th scope="col">Tiles</th><th scope="col">How many</th><th scope="col">Computed</th></tr>
</thead>
<tbody>
<tr><th scope="row"><span class="kb-map-whole"></span>whole</th><td data-count="whole">$whole</td>
<td data-where="whole">in the first stage, without a mask</td></tr>
<tr><th scope="row"><span class="kb-map-cut"></span>cut</th><td data-count="cut">$cut</td>
<td data-where="cut">in the second stage, masked</td></tr>
<tr><th scope="row"><span class="kb-map-never"></span>never computed</th>
<td data-count="never">$never</td><td data-where="never">$saved of the work saved</td></tr>
</tbody>
</table>
<p class="kb-map-note">The stages are those of the kernel above. The package’s kernel, of the next
chapter, takes the last tile out of its loops, and computes one tile even for queries that see no
key.</p>
</form>
""")

LENGTH = Template("""\
<label for="kb-map-$name">$label</label>
<input type="number" id="kb-map-$name" name="$name" value="$value" min="1"
max="$longest" required>
<input type="range" data-of="$name" value="$value" min="1" max="$longest"
aria-label="$label, slider">
""")

BLOCK = Template("""\
<label for="kb-map-$name">$label<br><code>$constant</code></label>
<select id="kb-map-$name" name="$name">$options</select>
""")


def length(name, label, value):
    return LENGTH.substitute(name=name, label=label, value=value, longest=LONGEST)


def block(name, label, value):
    options = "".join(
        f"<option{' selected' if size == value else ''}>{size}</option>" for size in BLOCKS
    )
    return BLOCK.substitute(name=name, label=label, constant=name.upper(), options=options)


def states():
    """Whether each tile of the first sizes is whole, cut or never computed, row by row."""
    from kernelbook.ops.attention.tiled import key_tiles

    for start_m in range(0, SEQLEN_Q, BLOCK_M):
        row = dict.fromkeys(range(0, SEQLEN_K, BLOCK_N), "never")
        for start_n, _, masked in key_tiles(start_m, SEQLEN_Q, SEQLEN_K, BLOCK_M, BLOCK_N, True):
            row[start_n] = "cut" if masked else "whole"
        yield list(row.values())


class TileMap(SphinxDirective):
    """The widget. A page has one at most."""

    def run(self):
        rows = list(states())
        found = Counter(state for row in rows for state in row)
        cells = "".join(f'<div class="kb-map-{state}"></div>' for row in rows for state in row)
        page = HTML.substitute(
            found,
            seqlen_q=SEQLEN_Q,
            seqlen_k=SEQLEN_K,
            longest=LONGEST,
            lengths=length("seqlen_q", "Queries", SEQLEN_Q) + length("seqlen_k", "Keys", SEQLEN_K),
            blocks=block("block_m", "Queries in a tile", BLOCK_M)
            + block("block_n", "Keys in a tile", BLOCK_N),
            columns=len(rows[0]),
            tiles=cells,
            saved=f"{found['never'] / found.total():.0%}",
        )
        return [nodes.raw("", page, format="html")]


def add_script(app, pagename, templatename, context, doctree):
    """Load the script on the page that has the widget, and on no other."""
    if 'class="kb-map"' in context.get("body", ""):
        app.add_js_file("tilemap.js")


def setup(app):
    app.add_directive("tilemap", TileMap)
    app.connect("html-page-context", add_script)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
