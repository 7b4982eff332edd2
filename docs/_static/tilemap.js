// The tile map: which tiles of scores attention computes. keysSeen and tileMap are the rule, tested
// against the package's key_tiles. Sizes carry the package's names; window is a number of keys, or
// null.

// Return [first, end]: query i sees the keys from first up to, and without, end.
function keysSeen(i, { seqlen_q, seqlen_k, is_causal, window }) {
  const own = i + seqlen_k - seqlen_q; // the diagonal is aligned to the bottom right
  const first = window === null ? 0 : Math.max(0, own - window);
  return [first, is_causal ? Math.max(0, own + 1) : seqlen_k];
}

// Return rows of tiles. The state of a tile is "whole" (its queries see all its keys), "cut" (they
// see some) or "never" (computed). Its stage is 1 (no mask), 2 (masked) or 0 (none): a tile that
// reaches beyond the last key needs the mask even if it is whole.
function tileMap(sizes) {
  const { seqlen_q, seqlen_k, block_m, block_n } = sizes;
  const rows = [];
  for (let start_m = 0; start_m < seqlen_q; start_m += block_m) {
    const end_m = Math.min(start_m + block_m, seqlen_q);
    const [firstOfSome, endOfAll] = keysSeen(start_m, sizes);
    const [firstOfAll, endOfSome] = keysSeen(end_m - 1, sizes);
    const row = [];
    for (let start_n = 0; start_n < seqlen_k; start_n += block_n) {
      const end_n = Math.min(start_n + block_n, seqlen_k);
      const whole = firstOfAll <= start_n && end_n <= endOfAll;
      const computed = firstOfSome < end_n && start_n < endOfSome;
      const state = whole ? "whole" : computed ? "cut" : "never";
      const stage = !computed ? 0 : whole && start_n + block_n <= seqlen_k ? 1 : 2;
      row.push({ start_m, end_m, start_n, end_n, state, stage });
    }
    rows.push(row);
  }
  return rows;
}

// Count tiles by their state, and scores: all that are computed, those of queries and keys that
// exist, and those that a query sees.
function countTiles(sizes, rows) {
  const counts = { whole: 0, cut: 0, never: 0, overhanging: 0, existing: 0, seen: 0, blind: 0 };
  for (const { start_m, end_m, start_n, end_n, state, stage } of rows.flat()) {
    counts[state] += 1;
    if (state === "whole" && stage === 2) counts.overhanging += 1;
    if (stage) counts.existing += (end_m - start_m) * (end_n - start_n);
  }
  for (let i = 0; i < sizes.seqlen_q; i++) {
    const [first, end] = keysSeen(i, sizes);
    counts.seen += Math.max(0, end - first);
    if (end <= first) counts.blind += 1;
  }
  counts.computed = (counts.whole + counts.cut) * sizes.block_m * sizes.block_n;
  return counts;
}

// -- in words -------------------------------------------------------------------------------------

const inWords = (number) => number.toLocaleString("en");
const asShare = (part, all) => `${all ? Math.round((100 * part) / all) : 0}%`;

// How the kernel computes a tile of this stage. The stages are those of the chapter's kernel, which
// has no window; with one, the package's masks tiles at both edges of what is seen, and none between.
function describeStage(stage, { window }) {
  const masked = ["", "without a mask", "masked"][stage];
  return window === null ? `in the ${["", "first", "second"][stage]} stage, ${masked}` : masked;
}

function describeTile({ start_m, end_m, start_n, end_n, state, stage }, sizes) {
  const where = `Queries ${start_m} to ${end_m - 1}, keys ${start_n} to ${end_n - 1}:`;
  if (state === "never") return `${where} never computed.`;
  const what = state === "whole" && stage === 2 ? "whole, but reaching beyond the last key" : state;
  return `${where} ${what}. Computed ${describeStage(stage, sizes)}.`;
}

function describeMap(sizes, counts) {
  const { whole, cut, never, computed, existing, seen, blind } = counts;
  const tiles = whole + cut + never;
  const sentences = [
    `${inWords(whole + cut)} of ${inWords(tiles)} tiles are computed: ` +
      `${asShare(never, tiles)} of the work is saved.`,
    `Of ${inWords(computed)} computed scores, ${inWords(existing - seen)} ` +
      `(${asShare(existing - seen, computed)}) are masked away.`,
  ];
  if (computed > existing) {
    sentences.push(`${inWords(computed - existing)} more lie beyond the last query or key.`);
  }
  if (blind) {
    sentences.push(`${inWords(blind)} ${blind > 1 ? "queries see" : "query sees"} no key at all.`);
  }
  return sentences.join(" ");
}

// -- on the page ----------------------------------------------------------------------------------

const NUMBERS = ["seqlen_q", "seqlen_k", "window"];

// The outline of all that is seen, as a path: down along the ends of rows, up along their starts.
// With few queries it goes in steps; those of many would be too small to draw.
function outlineOfSeen(sizes, blind) {
  if (blind === sizes.seqlen_q) return "";
  const to = (x, y) => (sizes.seqlen_q > 64 ? `L${x} ${y}` : `H${x}V${y}`);
  let down = "";
  let up = "";
  for (let i = blind; i < sizes.seqlen_q; i++) {
    const [first, end] = keysSeen(i, sizes);
    down += to(end, i + 1);
    up = to(first, i) + up;
  }
  const [first, end] = keysSeen(blind, sizes);
  return `M${first} ${blind}H${end}${down}H${keysSeen(sizes.seqlen_q - 1, sizes)[0]}${up}Z`;
}

function startTileMap(map) {
  const inputs = map.elements;
  const ranges = [...map.querySelectorAll("input[type=range]")];
  const grid = map.querySelector(".kb-map-tiles");
  const frame = map.querySelector(".kb-map-frame");
  const summary = map.querySelector(".kb-map-summary");
  const shownTile = map.querySelector(".kb-map-tile");
  const hint = "Point at a tile, or step through the map with the arrow keys.";
  let sizes = {};
  let announced;

  function read() {
    const next = { is_causal: inputs.mask.value === "causal" };
    for (const name of ["block_m", "block_n"]) next[name] = Number(inputs[name].value);
    let clamped = "";
    for (const name of NUMBERS) {
      const { valueAsNumber, min, max } = inputs[name];
      next[name] = Math.min(Math.max(Math.round(valueAsNumber), min), max);
      if (Number.isNaN(valueAsNumber)) next[name] = name === "window" ? null : sizes[name];
      else if (next[name] !== valueAsNumber) {
        clamped = `Drawn with ${next[name]}: numbers here go from ${min} to ${max}.`;
      }
    }
    sizes = next;
    return clamped;
  }

  function draw() {
    const rows = tileMap(sizes);
    const counts = countTiles(sizes, rows);
    const { seqlen_q, seqlen_k, block_m, block_n } = sizes;
    const [height, width] = [rows.length * block_m, rows[0].length * block_n];

    const cell = (tile) =>
      `<div role="gridcell" tabindex="-1" class="kb-map-${tile.state}" ` +
      `aria-label="${describeTile(tile, sizes)}"></div>`;
    grid.innerHTML = rows
      .map((row) => `<div role="row">${row.map(cell).join("")}</div>`)
      .join("");
    grid.querySelector("[role=gridcell]").tabIndex = 0;
    grid.setAttribute("role", "grid");
    grid.setAttribute("aria-label", `Tiles of ${seqlen_q} queries and ${seqlen_k} keys`);
    grid.classList.toggle("kb-map-dense", Math.max(rows.length, rows[0].length) > 24);
    frame.style.setProperty("--columns", rows[0].length);
    frame.style.setProperty("--shape", Math.min(Math.max(width / height, 0.4), 3));

    map.querySelector("svg").setAttribute("viewBox", `0 0 ${width} ${height}`);
    map.querySelector(".kb-map-outside").setAttribute(
      "d",
      `M0 ${seqlen_q}H${seqlen_k}V0H${width}V${height}H0Z`,
    );
    map.querySelector(".kb-map-seen").setAttribute("d", outlineOfSeen(sizes, counts.blind));
    map.querySelector(".kb-map-keys").textContent = `${inWords(seqlen_k)} keys →`;
    map.querySelector(".kb-map-queries").textContent = `${inWords(seqlen_q)} queries →`;

    for (const state of ["whole", "cut", "never"]) {
      map.querySelector(`[data-count=${state}]`).textContent = inWords(counts[state]);
    }
    const { overhanging } = counts;
    const masked = overhanging ? `, but for ${inWords(overhanging)} beyond the last key` : "";
    map.querySelector("[data-where=whole]").textContent = describeStage(1, sizes) + masked;
    map.querySelector("[data-where=cut]").textContent = describeStage(2, sizes);
    map.querySelector("[data-where=never]").textContent =
      `${asShare(counts.never, rows.flat().length)} of the work saved`;
    shownTile.textContent = hint;
    return describeMap(sizes, counts);
  }

  // The map changes at once; the sentences, which screen readers speak, when the reader pauses.
  function update() {
    const clamped = read();
    for (const range of ranges) range.value = sizes[range.dataset.of];
    const text = `${draw()} ${clamped}`;
    clearTimeout(announced);
    announced = setTimeout(() => (summary.textContent = text), 300);
  }

  function step(event) {
    const cells = [...grid.querySelectorAll("[role=gridcell]")];
    const [at, columns] = [cells.indexOf(event.target), event.target.parentElement.children.length];
    const column = at % columns;
    const to = {
      ArrowLeft: column ? at - 1 : at,
      ArrowRight: column < columns - 1 ? at + 1 : at,
      ArrowUp: at - columns,
      ArrowDown: at + columns,
      Home: at - column,
      End: at - column + columns - 1,
    }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    if (!cells[to]) return;
    event.target.tabIndex = -1;
    cells[to].tabIndex = 0;
    cells[to].focus();
  }

  map.addEventListener("input", ({ target }) => {
    if (target.dataset.of) inputs[target.dataset.of].value = target.value;
    update();
  });
  map.addEventListener("change", () => {
    for (const name of NUMBERS) inputs[name].value = sizes[name] ?? "";
  });
  for (const button of map.querySelectorAll("button")) {
    button.addEventListener("click", () => {
      map.reset(); // to the first tiles and mask
      for (const [name, value] of Object.entries(button.dataset)) inputs[name].value = value;
      update();
    });
  }
  grid.addEventListener("keydown", step);
  for (const pointed of ["pointerover", "focusin"]) {
    grid.addEventListener(pointed, ({ target }) => {
      const label = target.closest("[role=gridcell]")?.getAttribute("aria-label");
      if (label) shownTile.textContent = label;
    });
  }

  for (const hidden of map.querySelectorAll("[hidden]")) hidden.hidden = false;
  read();
  summary.textContent = draw();
  summary.setAttribute("role", "status"); // from now on: the first sentence is not news
}

document.addEventListener("DOMContentLoaded", () => {
  for (const map of document.querySelectorAll(".kb-map")) startTileMap(map);
});
