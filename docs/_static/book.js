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
