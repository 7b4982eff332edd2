// The theme makes code that scrolls sideways reachable by keyboard. Here the same is done for
// formulas, and again when a solution is unfolded.

function reachFormulas() {
  for (const formula of document.querySelectorAll("mjx-container[display=true]")) {
    if (formula.scrollWidth > formula.clientWidth) formula.tabIndex = 0;
    else formula.removeAttribute("tabindex");
  }
}

window.addEventListener("load", () => window.MathJax?.startup.promise.then(reachFormulas));
window.addEventListener("resize", reachFormulas);
document.addEventListener("toggle", () => window.dispatchEvent(new Event("resize")), true);

// A table or figure that is wider than the page says so, because a phone shows no bar to scroll
// with, and a figure can then be moved by the keyboard, too.

function markWide() {
  const boxes = ".kb-table, .pst-scrollable-table-container, .kb-pan";
  for (const box of document.querySelectorAll(boxes)) {
    const margin = box.matches(".kb-pan") ? 24 : 1; // the edge of a figure is blank
    const wide = box.scrollWidth > box.clientWidth + margin;
    box.classList.toggle("kb-wide", wide);
    if (!box.matches(".kb-pan")) continue;
    if (wide) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}

window.addEventListener("load", markWide);
window.addEventListener("resize", markWide);

// On a phone most lines of code are too long, and some in a fold. There each line becomes an element
// of its own, so that what does not fit goes on below, further in than the line begins. It breaks at
// spaces, and within what has none for long, behind a bracket or comma, or else at a dot: never within
// a name. What is copied does not change.

const PHONE = window.matchMedia("(max-width: 40rem)");
const LONG = 22; // letters in a row that may have to be broken, if they hold a bracket or comma
const LONGER = 28; // or if they hold none

function linesOf(code) {
  const lines = [document.createElement("span")];
  const found = [...lines];
  for (const node of [...code.childNodes]) {
    for (const [number, part] of node.textContent.split("\n").entries()) {
      if (number) {
        lines.push(document.createElement("span"));
        found.push("\n", lines.at(-1));
      }
      const piece = node.cloneNode(part === node.textContent);
      if (part !== node.textContent) piece.textContent = part;
      if (part) lines.at(-1).append(piece);
    }
  }
  for (const line of lines) {
    const number = line.querySelector(":scope > .linenos")?.textContent.length ?? 0;
    const begins = number + line.textContent.slice(number).search(/\S|$/);
    const gap = number ? " + 10px" : ""; // Pygments' own, around a number
    line.className = "kb-line";
    line.style.setProperty("--indent", `(${begins}ch${gap})`);
    const places = [...placesToBreak(line.textContent)];
    breakAt(line, places);
    const word = begins + line.textContent.slice(begins).search(/\s|$/);
    keepTogether(line, Math.min(word, ...places));
  }
  return found.filter((line) => line === "\n" || line.textContent);
}

function* placesToBreak(text) {
  for (const run of text.matchAll(/\S+/g)) {
    if (run[0].length <= LONG) continue;
    for (const piece of run[0].matchAll(/[^([{,]*(?:[([{,]+|$)/g)) {
      const begin = run.index + piece.index;
      if (piece[0].length > LONGER) {
        for (const dot of piece[0].matchAll(/\b(?=\.[a-z_])|(?<==)\b/gi)) yield begin + dot.index;
      }
      if (piece.index + piece[0].length < run[0].length) yield begin + piece[0].length;
    }
  }
}

// The text node of a line that holds the letter before a place, and how much of it is before that.
function letterBefore(line, place) {
  const walker = document.createTreeWalker(line, NodeFilter.SHOW_TEXT);
  let text = walker.nextNode();
  while (text && text.length < place) {
    place -= text.length;
    text = walker.nextNode();
  }
  return [text, place];
}

function breakAt(line, places) {
  for (const place of places) {
    const [text, before] = letterBefore(line, place);
    if (before < text.length) text.splitText(before);
    text.after(document.createElement("wbr"));
  }
}

// No line breaks between its indent and its first word, however long that is.
function keepTogether(line, end) {
  if (!end) return;
  const range = document.createRange();
  range.setStart(line, 0);
  range.setEnd(...letterBefore(line, end));
  const begin = document.createElement("span");
  begin.className = "kb-begin";
  begin.append(range.extractContents());
  line.prepend(begin);
}

function breakLines(within) {
  for (const pre of within.querySelectorAll(".bd-article div.highlight pre")) {
    const code = pre.querySelector(":scope > code") ?? pre;
    if (!code.querySelector(".kb-line")) code.replaceChildren(...linesOf(code));
  }
}

function breakOnPhone() {
  if (PHONE.matches) breakLines(document);
}

// The code that a page shows has one width, that of its longest line: else every box would end
// somewhere else. Closed folds that follow each other share lines of the column of prose.

function widenCode() {
  const shown = document.querySelectorAll(".bd-article div.highlight pre:not(details *)");
  const boxes = [...shown].filter((pre) => !pre.closest(".sphx-glr-script-out"));
  if (PHONE.matches || !boxes.length) return;
  const widest = Math.max(...boxes.map((pre) => pre.offsetWidth));
  document.querySelector(".bd-article").style.setProperty("--kb-code", `${widest}px`);
}

function gatherFolds() {
  for (const fold of document.querySelectorAll(".bd-article section > details.kb-code")) {
    if (fold.previousElementSibling?.matches(".kb-folds")) fold.previousElementSibling.append(fold);
    else if (fold.nextElementSibling?.matches("details.kb-code")) {
      const line = document.createElement("div");
      line.className = "kb-folds";
      fold.replaceWith(line);
      line.append(fold);
    }
  }
}

document.addEventListener("DOMContentLoaded", gatherFolds);
document.addEventListener("DOMContentLoaded", () => document.fonts.ready.then(widenCode));
document.addEventListener("DOMContentLoaded", breakOnPhone);
PHONE.addEventListener("change", breakOnPhone);
document.addEventListener("toggle", (event) => event.target.open && breakLines(event.target), true);

// How each result was made stands in folds beside it, far more than most readers open. A page shows
// them when its reader asks, by a button that stands at the top and below the table of contents, and
// all pages after it.

const MADE = "kernel-book-made";

function showMade(shown) {
  document.documentElement.classList.toggle("kb-quiet", !shown);
  for (const button of document.querySelectorAll("button.kb-made")) {
    button.setAttribute("aria-pressed", shown);
    button.textContent = shown ? "Hide how the results were made" : "Show how the results were made";
  }
}

function addMadeSwitches() {
  if (!document.querySelector("details.kb-book")) return;
  const places = [".kb-setup .kb-downloads", "#pst-page-toc-nav"];
  for (const place of places.map((found) => document.querySelector(found)).filter(Boolean)) {
    const button = Object.assign(document.createElement("button"), {
      className: "kb-made",
      type: "button",
    });
    button.addEventListener("click", () => {
      const before = button.getBoundingClientRect().top;
      const shown = button.getAttribute("aria-pressed") !== "true";
      showMade(shown);
      window.scrollBy({ top: button.getBoundingClientRect().top - before, behavior: "instant" });
      try {
        localStorage.setItem(MADE, shown);
      } catch {} // as for the GPU
    });
    place.after(button);
  }
  let kept = null;
  try {
    kept = localStorage.getItem(MADE);
  } catch {}
  showMade(kept === "true");
}

document.addEventListener("DOMContentLoaded", addMadeSwitches);

// A figure is as wide as a phone, and its labels are small there. A tap on it, or on the button below
// it, shows it larger, in a window that scrolls; the next tap closes that.

function enlarge(image) {
  const dialog = document.createElement("dialog");
  dialog.className = "kb-large";
  dialog.setAttribute("aria-label", "The figure, enlarged");
  const button = Object.assign(document.createElement("button"), { textContent: "Close" });
  const copy = image.cloneNode();
  copy.removeAttribute("loading");
  copy.style.minWidth = `${1.6 * image.getBoundingClientRect().width}px`; // also of a wide one
  dialog.append(button, copy);
  dialog.addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

function letFiguresEnlarge() {
  if (!PHONE.matches || document.querySelector(".kb-enlarge")) return;
  for (const light of document.querySelectorAll(".bd-article img.only-light:not(.sd-card-img-top)")) {
    const dark = light.nextElementSibling;
    if (!dark?.matches("img.only-dark")) continue;
    const shown = () => enlarge(dark.checkVisibility() ? dark : light);
    light.addEventListener("click", shown);
    dark.addEventListener("click", shown);
    const button = Object.assign(document.createElement("button"), {
      className: "kb-enlarge",
      textContent: "Enlarge",
      type: "button",
    });
    button.addEventListener("click", shown);
    const figure = dark.closest(".kb-pan") ?? dark;
    const below = figure.nextElementSibling;
    if (below?.matches(".kb-raw")) {
      below.append(button);
    } else {
      const line = Object.assign(document.createElement("p"), { className: "kb-raw" });
      line.append(button);
      figure.after(line);
    }
  }
}

document.addEventListener("DOMContentLoaded", letFiguresEnlarge);
PHONE.addEventListener("change", letFiguresEnlarge);

// Several GPUs ran some figures and tables. They stand in the page one after another; here each such
// group becomes one, with buttons that choose the GPU for the whole page, and for the next one.

const CHOSEN_GPU = "kernel-book-gpu";

function groupsOfGpus() {
  const groups = [];
  for (const variant of document.querySelectorAll(".kb-gpu")) {
    const group = groups.at(-1);
    const follows = group?.at(-1) === variant.previousElementSibling;
    if (follows && group.every((other) => other.dataset.gpu !== variant.dataset.gpu)) {
      group.push(variant);
    } else {
      groups.push([variant]);
    }
  }
  return groups;
}

function showGpu(gpu) {
  for (const buttons of document.querySelectorAll(".kb-gpus")) {
    const choices = [...buttons.querySelectorAll("button")];
    const chosen = choices.find((button) => button.textContent === gpu) ?? choices[0];
    for (const button of choices) {
      button.setAttribute("aria-pressed", button === chosen);
      button.variant.hidden = button !== chosen;
    }
  }
  window.dispatchEvent(new Event("resize")); // what scrolls sideways may have come or gone
}

function chooseGpu(button) {
  const before = button.getBoundingClientRect().top;
  showGpu(button.textContent);
  const moved = button.getBoundingClientRect().top - before;
  window.scrollBy({ top: moved, behavior: "instant" });
  try {
    localStorage.setItem(CHOSEN_GPU, button.textContent);
  } catch {} // the browser keeps nothing for this site: the choice ends with the page
}

function addGpuSwitches() {
  for (const group of groupsOfGpus()) {
    const buttons = document.createElement("div");
    buttons.className = "kb-gpus";
    buttons.setAttribute("role", "group");
    buttons.setAttribute("aria-label", "GPU");
    buttons.append(Object.assign(document.createElement("span"), { textContent: "GPU" }));
    for (const variant of group) {
      const button = document.createElement("button");
      Object.assign(button, { type: "button", textContent: variant.dataset.gpu, variant });
      button.addEventListener("click", () => chooseGpu(button));
      buttons.append(button);
    }
    group[0].before(buttons);
  }
  let chosen = null;
  try {
    chosen = localStorage.getItem(CHOSEN_GPU);
  } catch {}
  showGpu(chosen);
}

document.addEventListener("DOMContentLoaded", addGpuSwitches);

// The theme marks a section in the sidebar when its heading comes into view, and so misses one that
// is jumped over, or left upwards. Here the mark follows the place: it is at the last heading above
// a line at three tenths of the window, which sinks to its foot at the end of the page.

function markSection() {
  const below = document.documentElement.scrollHeight - window.scrollY - window.innerHeight;
  const line = Math.max(0.3 * window.innerHeight, window.innerHeight - below);
  const links = [...document.querySelectorAll("#pst-page-toc-nav a[href^='#']")];
  const current = links.findLast((link) => {
    const section = document.getElementById(decodeURIComponent(link.hash.slice(1)));
    return section && section.getBoundingClientRect().top <= line;
  });
  for (const link of links) {
    link.classList.toggle("active", link === current);
    if (link === current) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
  for (const entry of document.querySelectorAll("#pst-page-toc-nav .toc-entry")) {
    entry.classList.toggle("active", current !== undefined && entry.contains(current));
  }
}

// Later than the theme's own mark, which comes in the same frame.
for (const event of ["load", "scroll", "resize"]) {
  window.addEventListener(event, () => setTimeout(markSection), { passive: true });
}

// An animation can be held at any moment: a slider below it shows the moment, and moving it pauses.

const ROUND = 200; // steps of a slider

function addSliders() {
  for (const figure of document.querySelectorAll(".kb-animation")) {
    const [pause, svg] = [figure.querySelector("input"), figure.querySelector("svg")];
    const slider = Object.assign(document.createElement("input"), { type: "range", value: 0 });
    slider.max = ROUND;
    slider.setAttribute("aria-label", `Moment: ${svg.querySelector("title").textContent}`);
    const moving = () => svg.getAnimations({ subtree: true });
    const lasts = (animation) => animation.effect.getTiming().duration;
    slider.addEventListener("input", () => {
      pause.checked = true;
      for (const part of moving()) part.currentTime = (slider.value / ROUND) * lasts(part);
    });
    setInterval(() => {
      const [first] = pause.checked ? [] : moving();
      if (first) slider.value = (ROUND * (first.currentTime % lasts(first))) / lasts(first);
    }, 200);
    svg.after(slider);
  }
}

document.addEventListener("DOMContentLoaded", addSliders);
